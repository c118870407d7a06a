"""Bytes that 8- and 4-bit training of the blocks' linear layers keeps in memory and sends, by library.

    held = storage_by(engine.low_precision, "mxfp8", "blackwell", engine.narrow_parameters)
    held.input_bytes, held.copy_bytes, held.gather_bytes

Norms, attention, residual stream, embedding, output layer, gradients and optimizer state are as under bf16.

Transformer Engine (2.20; Megatron core 0.20, NeMo)
  - keeps a layer's input quantised for the weight gradient and drops the 16-bit one (`module/linear.py`, "Cached input
    tensor"): one byte per element, or one byte and an 8-bit scale per 32 (mxfp8), half a byte and an 8-bit scale per 16
    (nvfp4), one byte and a 32-bit scale per 128 (fp8_block). Attention itself keeps its output in 16 bits. Under
    delayed scaling the projection also keeps its quantised input; under the other recipes Megatron disables this
    (`attention.py`, set_save_original_input).
  - from the first micro-batch of a step on, keeps quantised weights beside the 16-bit ones (`is_first_microbatch`): in
    two arrangements, because 8-bit products need both operands row by row; in one on Blackwell under tensor scales,
    whose products read either (`is_non_tn_fp8_gemm_supported`; its maintainer in TransformerEngine#1880: one byte per
    parameter there, two under mxfp8, two on Hopper). Sharded weights (ZeRO-3) are quantised again after each gather.
  - with quantised parameters (`--fp8-param-gather`, as NeMo's recipes set it) keeps no 16-bit ones, and gathers one
    byte per parameter under tensor scales.

torchao (0.19; torchtitan)
  - keeps input and weight in 16 bits and casts them in every pass (`float8_linear.py`, `mxfp8_linear.py`:
    save_for_backward of input_hp, weight_hp), and gathers in 16 bits under row scales. Measured: Llama 3.1 8B on 8
    H100 47.65 GB in bf16, 47.77 and 47.79 in float8; 77.0 and 76.8 GiB in torchtitan's own table. Under nvfp4 it keeps
    the quantised tensors (`nvfp4_linear.py`), as Transformer Engine does.

Other software is not known: it is planned as bf16, with the casts of Transformer Engine.

Casts: only the linear layers of the blocks compute in few bits, with both operands of each product cast; norms,
attention, router, output layer and loss stay in 16 bits or more in both libraries' recipes.
  - Transformer Engine casts a layer's input once, into the arrangements that both of its products need, and likewise
    the gradient of its output (`quantize` of its modules). Weights are cast once a step, which is not counted. With
    current scaling, where a tensor's scale is computed in the same step (the recipe of Blackwell's software; Hopper's
    published runs use delayed scaling), the tensor is read once more for its maximum.
  - torchao casts input and weight in the forward pass, and gradient, weight and input in the backward pass.
"""

from __future__ import annotations

from ironlaw.catalog.formats import number_format
from ironlaw.workload.conventions import WIDE, Casts, LinearStorage

ONE_ARRANGEMENT = ("blackwell", "blackwell_ultra")
"""Generations whose products under tensor scales read operands in either arrangement."""

LIBRARIES = ("transformer-engine", "torchao", "")


def casts_by(library: str, precision: str, generation: str) -> Casts:
    """Returns the bytes per element moved by casts to this precision; none for more than 8 bits."""
    if not number_format(precision).narrow:
        return Casts()
    width = number_format(precision).bytes_per_element()
    current = library == "torchao" or generation in ONE_ARRANGEMENT
    maximum = WIDE if number_format(precision).needs_maximum and (precision != "fp8" or current) else 0.0
    once = maximum + WIDE + width
    if library == "torchao":
        return Casts(once, once, once, once, once)
    arrangements = 1 if precision == "fp8" and generation in ONE_ARRANGEMENT else 2
    both = maximum + WIDE + arrangements * width
    return Casts(inputs=both, gradients=both)


def storage_by(library: str, precision: str, generation: str, narrow_parameters: bool) -> LinearStorage:
    """Returns the storage under this precision; that of bf16 for more than 8 bits or an unknown library."""
    if not number_format(precision).narrow:
        return LinearStorage()
    if library not in LIBRARIES[:2]:
        return LinearStorage(description="planned with the memory of bf16: what this software keeps is not known")
    if library == "torchao" and precision != "nvfp4":
        return LinearStorage(description="torchao keeps inputs and weights in 16 bits and casts them in every pass")
    arrangements = 1 if precision == "fp8" and generation in ONE_ARRANGEMENT else 2
    element = number_format(precision).bytes_per_element()
    copies = arrangements * number_format(precision).bytes_per_element(weight=True)
    once_more = element if precision == "fp8" and library == "transformer-engine" else 0.0
    narrow = narrow_parameters and precision != "fp8_block"  # NeMo's fp8_block recipe keeps 16-bit parameters
    word = "in place of" if narrow else "beside"
    return LinearStorage(
        input_bytes=element,
        attention_copy_bytes=once_more,
        copy_bytes=copies - WIDE if narrow else copies,
        # Block-scaled weights are gathered in 16 bits: a rank needs both arrangements.
        gather_bytes=1.0 if narrow and precision == "fp8" else WIDE,
        description=f"inputs of linear layers kept at {element:.4g} B per element, weights of blocks at "
        f"{copies:.4g} B {word} their 16-bit ones ({library})",
    )
