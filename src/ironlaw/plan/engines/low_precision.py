"""What 8- and 4-bit training keeps in memory and sends: the linear layers of the blocks, in the library that runs them.

    held = storage_by(engine.low_precision, "mxfp8", "blackwell", engine.narrow_parameters)
    held.input_bytes, held.copy_bytes, held.gather_bytes

Norms, attention, residual stream, embedding, output layer, gradients and optimizer state stay as under bf16.

Transformer Engine (2.20; Megatron core 0.20, NeMo)
  - keeps a layer's input quantised for the weight gradient and drops the 16-bit one (`module/linear.py`, "Cached input
    tensor"): one byte, or one byte and an 8-bit scale per 32 (mxfp8), half a byte and one per 16 (nvfp4), a 32-bit one
    per 128 (fp8_block). Attention's output is kept in 16 bits by attention itself; under delayed scaling the projection
    keeps its quantised input besides, under the other recipes Megatron tells it not to (`attention.py`,
    set_save_original_input).
  - keeps quantised weights from the first micro-batch of a step on beside the 16-bit ones (`is_first_microbatch`): two
    arrangements of them, for products of 8 bits want both operands row by row; one on Blackwell under tensor scales,
    whose products read either (`is_non_tn_fp8_gemm_supported`; its maintainer in TransformerEngine#1880: one byte per
    parameter there, two under mxfp8, two on Hopper). Sharded weights (ZeRO-3) are quantised anew after gathering.
  - with parameters stored so (`--fp8-param-gather`, as NeMo's recipes set it) the 16-bit ones are not there, and what
    is gathered under scales per tensor is one byte.

torchao (0.19; torchtitan)
  - keeps input and weight in 16 bits and casts them in every pass (`float8_linear.py`, `mxfp8_linear.py`:
    save_for_backward of input_hp, weight_hp), and under scales per row gathers in 16 bits. Measured: Llama 3.1 8B on 8
    H100 47.65 GB in bf16, 47.77 and 47.79 in float8; 77.0 and 76.8 GiB in torchtitan's own table. Under nvfp4 the
    quantised ones are kept (`nvfp4_linear.py`), as in Transformer Engine.

Of other software nothing is known: planned as bf16, with the casts of Transformer Engine.

What is cast: the linear layers of the blocks alone compute so, each product on operands of these bits; norms,
attention, router, output layer and loss stay in 16 bits or more in both libraries' recipes.
  - Transformer Engine casts a layer's input once, in the arrangements that both of its products want, and likewise the
    gradient of its output (`quantize` of its modules). Weights are cast once a step, which is not counted. Where a
    tensor's one scale is of this very step (current scaling, the recipe of Blackwell's software; Hopper's published
    runs have the delayed one of before) it is read once more for its maximum.
  - torchao casts input and weight forward, and the gradient, the weight and the input again backward.
"""

from __future__ import annotations

from ironlaw.catalog.formats import number_format
from ironlaw.workload.conventions import WIDE, Casts, LinearStorage

ONE_ARRANGEMENT = ("blackwell", "blackwell_ultra")
"""Generations whose products under scales per tensor read operands in either order."""

LIBRARIES = ("transformer-engine", "torchao", "")


def casts_by(library: str, precision: str, generation: str) -> Casts:
    """What is moved to cast in this precision; nothing where it is not of 8 bits or fewer."""
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
    """What is held under this precision; as under bf16 of more than 8 bits or by an unknown library."""
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
    narrow = narrow_parameters and precision != "fp8_block"  # that recipe of NeMo keeps 16-bit parameters
    word = "in place of" if narrow else "beside"
    return LinearStorage(
        input_bytes=element,
        attention_copy_bytes=once_more,
        copy_bytes=copies - WIDE if narrow else copies,
        # Block-scaled weights are gathered in 16 bits: a rank needs both arrangements of them.
        gather_bytes=1.0 if narrow and precision == "fp8" else WIDE,
        description=f"inputs of linear layers kept at {element:.4g} B per element, weights of blocks at "
        f"{copies:.4g} B {word} their 16-bit ones ({library})",
    )
