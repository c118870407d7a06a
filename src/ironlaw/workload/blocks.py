"""Shapes and saved bytes shared by the forward and backward passes of a decoder.

Symbols as in `forward.py`.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Literal

from ironlaw.ledger import Kind, Phase
from ironlaw.model.config import ModelConfig
from ironlaw.workload.conventions import OURS, Conventions
from ironlaw.workload.operations import Operation, call, fast_replace
from ironlaw.workload.sizes import Size, above_one, divided, smaller

Precision = Literal["fp32", "bf16", "fp16"]
FP32 = 4
INDEX = 8  # bytes of PyTorch's int64 indices
Policy = frozenset[str] | None  # the expensive results that a block keeps; None: everything (recompute.py)


@dataclass(frozen=True)
class Division:
    """The division of one micro-batch among ranks, as far as it changes a rank's memory (`division.py`)."""

    tp: Size = 1
    sp: bool = False  # tp ranks also divide the residual stream
    cp: Size = 1
    split_qkv: bool = False  # query, key and value have three layers instead of one

    @property
    def divides_attention(self) -> bool:
        """Whether several ranks compute one micro-batch's attention."""
        return above_one(self.tp) or above_one(self.cp)


@dataclass(frozen=True)
class BlockAdapters:
    """The adapters of one block with frozen tensors."""

    method: str  # lora, qlora, dora
    rank: int
    rows: tuple[tuple[str, tuple[int, ...]], ...]  # (name of a product, output rows of each of its adapters)
    first: bool = False  # whether this is the model's first block
    starts_plain: bool = False  # nothing before the first block's adapters is saved for the backward pass
    ends: frozenset[str] = frozenset()  # "embedding" and "head", if trained in full

    @property
    def casts_weights(self) -> bool:
        """Whether autocast casts the frozen matrices."""
        return self.method == "dora"


@dataclass(frozen=True)
class Shape:
    """One micro-batch of a model and how it is computed. Sizes may be arrays with one entry per layout (`sizes.py`)."""

    model: ModelConfig
    micro_batch: Size  # sequences
    sequence: Size  # tokens
    precision: Precision = "fp32"  # of the matrix products; weights and the residual stream stay fp32
    fused_rmsnorm: bool = False  # true on CUDA: one kernel; on a CPU PyTorch composes RMSNorm from six
    recompute: tuple[Policy, ...] = ()  # one per layer; empty: nothing is recomputed
    loss_chunk: int = 0  # tokens whose logits exist at a time; 0: all
    documents: bool = False  # attention does not cross document boundaries
    onednn: bool = False  # oneDNN computes fp32 products (model/linear.py)
    native: bool = False  # Ironlaw's own kernel computes causal attention (kernels/attention.c)
    adapters: tuple[BlockAdapters, ...] = ()  # one per layer; empty: everything is trained
    division: Division = Division()
    conventions: Conventions = OURS
    # The division under another trainer's layout; all other sizes are already one rank's.
    cp: Size = 1  # ranks that share each sequence
    stream_shards: Size = 1  # ranks that share the residual stream between layers
    ep: Size = 1  # ranks that share the experts of a layer
    rows_per_token: Size | None = None  # rows its experts compute per token; None: the model's experts per token
    materialised: bool = False  # all attention scores are in memory, in the precision of the products
    forward: dict[str, list[Operation]] = field(init=False, default_factory=dict, compare=False, repr=False)
    """Cache of the forward passes of layers, by kind (`kinds.forward_of`)."""

    @property
    def tokens(self) -> Size:
        return divided(self.micro_batch * self.sequence, self.cp)

    @property
    def stream_tokens(self) -> Size:
        """Tokens of the residual stream that a rank holds between layers."""
        return divided(self.tokens, self.stream_shards)

    @property
    def elements(self) -> Size:
        """Elements of the hidden states (T, H)."""
        return self.tokens * self.model.hidden

    @property
    def stream_elements(self) -> Size:
        """Elements of the residual stream that a rank holds between layers."""
        return self.stream_tokens * self.model.hidden

    @property
    def stream_bytes(self) -> int:
        """Bytes per element of the residual stream and of norm outputs."""
        return FP32 if self.conventions.autocast else self.matmul_bytes

    @property
    def matmul_bytes(self) -> int:
        return FP32 if self.precision == "fp32" else 2

    @property
    def casts(self) -> bool:
        return self.precision != "fp32" and self.conventions.autocast

    @property
    def head_is_frozen(self) -> bool:
        return bool(self.adapters) and "head" not in self.adapters[0].ends

    @property
    def casts_head(self) -> bool:
        return self.casts and (not self.head_is_frozen or self.adapters[0].casts_weights)

    @property
    def normed_bytes(self) -> Size:
        """Bytes of a norm's output that linear layers save: gathered over tp, or only the rank's own part."""
        elements = self.elements
        if self.conventions.autocast:
            return elements * FP32
        gathered = self.conventions.gathered_inputs * (self.stream_shards > 1)
        return elements * self.conventions.storage.input_bytes * (gathered + (1 - gathered) / self.stream_shards)

    @property
    def mask_bytes(self) -> int:
        """Bytes of attention masks: one per micro-batch or per sequence (documents), for all heads or per head (ALiBi),
        and one each for layers with and without a window. On CUDA masks are a few numbers."""
        if self.fused_rmsnorm:
            return 0
        model, everywhere = self.model, self.documents or self.model.positions == "alibi" or self.model.composes_scores
        spans = {model.window_of(layer, self.sequence) for layer in range(model.layers)}
        masks = sum(1 for span in spans if everywhere or span is not None)
        masks *= (self.micro_batch if self.documents else 1) * (model.heads if model.positions == "alibi" else 1)
        return masks * self.sequence**2 * self.matmul_bytes

    @property
    def composes_attention(self) -> bool:
        """Whether all scores are in memory on a CPU: with dropout (always in fp32), or if the model modifies scores."""
        return (self.model.dropout > 0 or self.model.composes_scores) and not self.fused_rmsnorm

    @property
    def is_plain_attention(self) -> bool:
        """Whether `kernels/attention.c` applies: plain causal attention in one process without recomputation."""
        model = self.model
        plain = model.latent is None and not self.composes_attention and not self.mask_bytes
        return plain and not (self.fused_rmsnorm or self.recompute or self.division != Division())

    @property
    def keeps_qkv(self) -> bool:
        """Whether the qkv output is saved. Fused attention saves views of it, composed attention saves copies instead.

        In fp32 a norm of query and key saves its input, which is such a view.
        """
        return not self.composes_attention or (self.model.qk_norm and not self.casts)

    @property
    def keeps_stream(self) -> bool:
        """Whether the residual stream is saved for the backward pass: not if only a copy of it is read."""
        return self.model.norm_place != "post" or not (self.casts or above_one(self.stream_parts))

    @property
    def stream_parts(self) -> Size:
        """Sequence parallel ranks of Ironlaw's trainer that divide the residual stream between layers."""
        return self.division.tp if self.division.sp else 1

    @property
    def pads_values(self) -> bool:
        """Whether values are padded to the width of keys: for fused attention on a CPU, and to gather both as one."""
        if self.model.latent is None or self.conventions.fused:
            return False
        narrower = self.model.size_of_value < self.model.size_of_head
        return narrower and not self.composes_attention and (not self.fused_rmsnorm or self.division.divides_attention)

    @property
    def value_width(self) -> int:
        """Width of a head's value at attention's input."""
        return self.model.size_of_head if self.pads_values else self.model.size_of_value

    @property
    def rotated_bytes(self) -> int:
        """Bytes of the rotated copies of query and key."""
        model = self.model
        heads = model.query_size + model.key_value_size
        return self.tokens * heads * self.matmul_bytes if model.positions == "rope" else 0


def attention_score_pairs(sequence: Size, window: int | None) -> Size:
    """Return twice the unmasked (query, key) pairs under a causal mask: S^2, or 2wS - w^2 with a window w."""
    span = sequence if window is None else smaller(window, sequence)
    return 2 * span * sequence - span * span


def norm_saved_bytes(shape: Shape, rows: Size, width: Size) -> Size:
    """Return the bytes a norm saves: statistics; a composed RMSNorm with trained weight also the normalised tensor."""
    if shape.conventions.fused:
        return 0
    if shape.model.norm == "layernorm" and width == shape.model.hidden:
        return 2 * rows * FP32
    return rows * FP32 + (0 if shape.fused_rmsnorm or shape.adapters else rows * width * FP32)


def attention_saved_bytes(shape: Shape) -> Size:
    """Return the bytes that attention saves: in a flash kernel, the output and a log-sum-exp per query (2205.14135).

    Composed: scaled query and key, and the value, each with all heads; for every score the softmax, its dropout noise
    and their product; and the output, copied to (B, S, A, D). `model/masks.py`: the same copies; for every score the
    cap's saved tensor, the softmax, and its cast copy for the second product, if any.
    """
    model = shape.model
    if shape.conventions.fused:
        output = model.mixed_size * (shape.matmul_bytes + shape.conventions.storage.attention_copy_bytes)
        return shape.tokens * output + attention_core_bytes(shape)
    if shape.composes_attention and model.composes_scores:
        w, rows = shape.matmul_bytes, shape.micro_batch * model.heads * shape.sequence
        weights = rows * (shape.sequence + model.attention_sinks) * FP32
        read = rows * shape.sequence * w if shape.casts else 0
        cap = rows * shape.sequence * w if model.attention_cap is not None else 0
        return 4 * shape.tokens * model.query_size * w + weights + read + cap
    if shape.composes_attention:
        scores = shape.micro_batch * model.heads * shape.sequence**2
        copies = shape.tokens * (2 * model.query_size + model.mixed_size)
        return (copies + 3 * scores) * FP32 + shape.tokens * model.mixed_size * shape.matmul_bytes
    width = shape.tokens * model.heads * shape.value_width
    return width * shape.matmul_bytes + shape.tokens * model.heads * FP32


def attention_core_bytes(shape: Shape) -> Size:
    """Return the bytes attention saves besides its output. Materialised: softmax, dropout and mask of all scores."""
    of_a_query = shape.sequence * (2 * shape.matmul_bytes + 1) if shape.materialised else FP32
    return shape.tokens * shape.model.heads * of_a_query


def rotary_saved_bytes(shape: Shape) -> Size:
    """Return the bytes of rotated copies that attention saves; the value, a view of qkv, keeps unrotated ones alive."""
    if shape.model.positions != "rope":
        return 0
    if shape.conventions.fused:
        return shape.rotated_bytes * (shape.conventions.unrotated_kept if shape.model.latent is None else 1)
    tables = 2 * shape.sequence * shape.model.size_of_rotary * shape.matmul_bytes if shape.casts else 0
    return tables + (0 if shape.composes_attention else shape.rotated_bytes)


def noise(shape: Shape, name: str, elements: Size, kind: Kind = Kind.ELEMENTWISE) -> list[Operation]:
    """The drawing of dropout's noise, on a CPU a separate kernel that takes longer than the rest of dropout."""
    if not shape.model.dropout or shape.fused_rmsnorm:
        return []
    return [elementwise(shape, name, "noise", elements, 1, kind=kind)]


def dropout(shape: Shape) -> list[Operation]:
    """Dropout on a branch before it joins the residual stream, if the model has any.

    It saves noise in the branch's dtype on a CPU, one byte per element on CUDA.
    """
    if not shape.model.dropout:
        return []
    elements, branch = shape.elements, shape.elements * shape.matmul_bytes
    kept = elements if shape.fused_rmsnorm else branch
    # The stream's gradient stays alive beside the branch's; in reduced precision its cast copy is freed.
    back = elementwise(shape, "dropout", "multiply", elements, 3, temporary=branch,
                       frees_temporary=branch if shape.casts else 0, on_stream=True)  # fmt: skip
    return [
        *noise(shape, "dropout", elements),
        elementwise(
            shape, "dropout", "multiply", elements, 3, held=kept, scratch=branch, on_stream=True, gradient=[back]
        ),
    ]


def qk_norm_saved_bytes(shape: Shape) -> int:
    model = shape.model
    if not model.qk_norm:
        return 0
    heads = model.heads + model.key_value_heads
    elements = shape.tokens * heads * model.size_of_head
    norms = norm_saved_bytes(shape, shape.tokens * heads, model.size_of_head)
    if model.qk_norm_whole:
        norms = sum(norm_saved_bytes(shape, shape.tokens, size) for size in model.qk_norm_sizes)
    # The norm computes in fp32: in reduced precision its input is a cast copy. Its output goes to the rotation, which
    # saves only its tables, or to attention, which saves it (composed attention saves a scaled copy instead).
    cast_input = elements * FP32 if shape.casts else 0
    output = 0 if model.positions == "rope" or shape.composes_attention else elements * shape.matmul_bytes
    return norms + cast_input + output


def elementwise(shape: Shape, name: str, kernel: str, elements: Size, tensors: float, **memory: Any) -> Operation:
    """`call` with traffic of `tensors` tensors of `elements` each, read or written in the products' precision."""
    return call(name, kernel, elements, tensors * elements * shape.matmul_bytes, **memory)


def gradient_sum(shape: Shape, name: str, elements: Size, frees: Size) -> Operation:
    """The addition in place of two gradients of one tensor, which frees `frees` bytes of one of them."""
    return elementwise(shape, name, "add_in_place", elements, 3, frees_temporary=frees)


def cast(shape: Shape, name: str, elements: Size, *, wide: bool = False, **memory: Any) -> Operation:
    """A cast from fp32 to the products' precision, or back if `wide`; its gradient is cast the opposite way."""
    full, narrow = elements * FP32, elements * shape.matmul_bytes
    allocated, freed = (narrow, full) if wide else (full, narrow)
    shared = {key: memory[key] for key in ("kind", "on_stream") if key in memory}
    back = call(name, "cast", elements, full + narrow, temporary=allocated, frees_temporary=freed, **shared)
    return call(name, "cast", elements, full + narrow, gradient=[back], **memory)


def activation(shape: Shape, elements: Size, *, made: Size | None = None, frees: Size = 0) -> Operation:
    """An activation, which saves its input. `made`: bytes of its gradient and of the intermediates of that."""
    kernel, size = shape.model.activation, elements * shape.matmul_bytes
    made = size if made is None else made
    back = elementwise(shape, "activation", f"{kernel}_backward", elements, 3, scratch=made)
    return elementwise(shape, "activation", f"{kernel}_forward", elements, 2, held=size, frees_temporary=frees,
                       gradient=[back])  # fmt: skip


def gate_product(shape: Shape, elements: Size, *, kept: int = 2, scratch: Size = 0) -> Operation:
    """The product of the activation's result and the other half of a gated network. Its backward pass frees `kept` of
    the two factors and needs `scratch` bytes for a while; the next product saves its result."""
    size = elements * shape.matmul_bytes
    back = elementwise(shape, "gate_product", "multiply_backward", elements, 6, temporary=2 * size + scratch,
                       frees_saved=kept * size, frees_temporary=size + scratch)  # fmt: skip
    return elementwise(shape, "gate_product", "multiply", elements, 3, saved=size, gradient=[back])


def attention(shape: Shape) -> Operation:
    """Attention: forward QK^T and PV, backward two gradients of each. The scores that a flash kernel recomputes are
    work of the implementation, not of the model, and not counted."""
    model, w, tokens = shape.model, shape.matmul_bytes, shape.tokens
    pairs = divided(attention_score_pairs(shape.sequence, model.sliding_window), shape.cp)
    values = model.key_value_heads * shape.value_width
    inputs = tokens * (model.query_size + model.key_value_size + values) * w
    outputs = tokens * model.heads * shape.value_width * w
    padded = tokens * values * w if shape.pads_values else 0  # a copy, saved for the backward pass
    # Composed: scores before the softmax, and their gradients.
    working = shape.micro_batch * model.heads * shape.sequence**2 * FP32 if shape.composes_attention else 0

    def one(phase: Phase, times: int, **memory: Any) -> Operation:
        flops = times * shape.micro_batch * (model.query_size + model.mixed_size) * pairs
        kernel = f"{'native' if shape.native else 'attention'}_{phase}"
        elements = shape.micro_batch * model.heads * pairs // 2
        return fast_replace(
            call("attention", kernel, elements, times * (inputs + outputs), kind=Kind.ATTENTION, **memory), flops=flops,
            attention=(shape.micro_batch, shape.sequence, model.heads, model.key_value_heads, model.size_of_head),
        )  # fmt: skip

    back = one(
        Phase.BACKWARD, 2, temporary=working + inputs, frees_temporary=working + outputs,
        frees_saved=rotary_saved_bytes(shape) + padded,
        parameters=model.heads * FP32 if model.attention_sinks else 0,
    )  # fmt: skip
    return one(Phase.FORWARD, 1, held=attention_saved_bytes(shape), scratch=working, gradient=[back])
