"""Shapes and saved bytes that the forward and the backward pass of a decoder share.

Symbols as in `forward.py`.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Literal

from ironlaw.ledger import Kind, Phase
from ironlaw.model.config import ModelConfig
from ironlaw.workload.conventions import OURS, Conventions
from ironlaw.workload.operations import Operation, call, changed
from ironlaw.workload.sizes import Size, divided, several, smaller

Precision = Literal["fp32", "bf16", "fp16"]
FP32 = 4
INDEX = 8  # torch indexes with int64
Policy = frozenset[str] | None  # what a block keeps of its expensive results; None: everything (recompute.py)


@dataclass(frozen=True)
class Division:
    """How ranks share one micro-batch, as far as it changes what a rank holds (`division.py`)."""

    tp: Size = 1
    sp: bool = False  # tp divides the residual stream between its layers, too
    cp: Size = 1
    split_qkv: bool = False  # query, key and value are three layers instead of one

    @property
    def is_whole(self) -> bool:
        """Whether nothing is divided."""
        return not (several(self.tp) or several(self.cp) or self.split_qkv)


@dataclass(frozen=True)
class BlockAdapters:
    """Adapters of one block whose own tensors are frozen."""

    method: str  # lora, qlora, dora
    rank: int
    rows: tuple[tuple[str, tuple[int, ...]], ...]  # of a product, by its name, rows that each of its adapters gives
    first: bool = False  # no block is before it
    starts_plain: bool = False  # nothing before the first block's adapters waits for the backward pass
    ends: frozenset[str] = frozenset()  # embedding, head: of the model, trained in full

    def rows_of(self, name: str) -> tuple[int, ...]:
        return dict(self.rows).get(name, ())

    @property
    def casts_weights(self) -> bool:
        """Whether autocast still casts the frozen matrices."""
        return self.method == "dora"


@dataclass(frozen=True)
class Shape:
    """One micro-batch of one model, and how it is computed. Sizes may be arrays, one entry per layout (`sizes.py`)."""

    model: ModelConfig
    micro_batch: Size  # sequences
    sequence: Size  # tokens
    precision: Precision = "fp32"  # of the matrix products; weights and the residual stream stay fp32
    fused_rmsnorm: bool = False  # one kernel on CUDA; on CPU PyTorch composes it from six
    recompute: tuple[Policy, ...] = ()  # one per layer; empty: nothing is recomputed
    loss_chunk: int = 0  # tokens whose logits exist at a time; 0: all
    documents: bool = False  # attention stays inside documents
    onednn: bool = False  # fp32 products by oneDNN (model/linear.py)
    native: bool = False  # causal attention by our own kernel (kernels/attention.c)
    adapters: tuple[BlockAdapters, ...] = ()  # one per layer; empty: everything is trained
    division: Division = Division()
    conventions: Conventions = OURS
    # What a rank of another trainer's layout has of a micro-batch whose sizes are its own in all else.
    cp: Size = 1  # ranks that share each sequence
    stream_shards: Size = 1  # ranks that share the residual stream between layers
    ep: Size = 1  # ranks that share the experts of a layer
    rows_per_token: Size | None = None  # that its experts compute; None: the model's experts per token
    materialised: bool = False  # every attention score is in memory, as wide as the products
    forward: dict[str, list[Operation]] = field(init=False, default_factory=dict, compare=False, repr=False)
    """Forward passes of layers by kind, once listed (`kinds.forward_of`)."""

    @property
    def tokens(self) -> Size:
        return divided(self.micro_batch * self.sequence, self.cp)

    @property
    def stream_tokens(self) -> Size:
        """Of the residual stream between layers."""
        return divided(self.tokens, self.stream_shards)

    @property
    def stream_bytes(self) -> int:
        """Of an element of the residual stream and of what norms give."""
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
        """Of what a norm gives to linear layers, which keep it as gathered or as theirs."""
        held = self.tokens * self.model.hidden
        if self.conventions.autocast:
            return held * FP32
        gathered = self.conventions.gathered_inputs * (self.stream_shards > 1)
        return held * self.conventions.storage.input_bytes * (gathered + (1 - gathered) / self.stream_shards)

    @property
    def mask_bytes(self) -> int:
        """Of masks: one for all sequences or the documents' own, for all heads or ALiBi's for each; of layers with and
        without a window one each. On CUDA masks are a few numbers."""
        if self.fused_rmsnorm:
            return 0
        model, everywhere = self.model, self.documents or self.model.positions == "alibi" or self.model.composes_scores
        spans = {model.window_of(layer, self.sequence) for layer in range(model.layers)}
        masks = sum(1 for span in spans if everywhere or span is not None)
        masks *= (self.micro_batch if self.documents else 1) * (model.heads if model.positions == "alibi" else 1)
        return masks * self.sequence**2 * self.matmul_bytes

    @property
    def composes_attention(self) -> bool:
        """Every score is in memory on a CPU: under dropout, in fp32 whatever the precision, or where scores change."""
        return (self.model.dropout > 0 or self.model.composes_scores) and not self.fused_rmsnorm

    @property
    def is_plain_attention(self) -> bool:
        """What `kernels/attention.c` computes: plain causal attention of one process that keeps everything."""
        model = self.model
        plain = model.latent is None and not self.composes_attention and not self.mask_bytes
        return plain and not (self.fused_rmsnorm or self.recompute or self.division != Division())

    @property
    def keeps_qkv(self) -> bool:
        """Fused attention keeps views of the qkv output; composed attention keeps its own copies of them.

        A norm of query and key in fp32 keeps its input, which is such a view.
        """
        return not self.composes_attention or (self.model.qk_norm and not self.casts)

    @property
    def keeps_stream(self) -> bool:
        """Whether the residual stream waits for the backward pass: not where only a copy of it is read."""
        return self.model.norm_place != "post" or not (self.casts or several(self.stream_parts))

    @property
    def stream_parts(self) -> Size:
        """Sequence parallel ranks of our trainer that share the residual stream between layers."""
        return self.division.tp if self.division.sp else 1

    @property
    def pads_values(self) -> bool:
        """A CPU's fused attention wants values as wide as keys; so do ranks that gather both as one tensor."""
        if self.model.latent is None or self.conventions.fused:
            return False
        narrower = self.model.size_of_value < self.model.size_of_head
        return narrower and not self.composes_attention and (not self.fused_rmsnorm or not self.division.is_whole)

    @property
    def value_width(self) -> int:
        """Of a head's value as attention takes it."""
        return self.model.size_of_head if self.pads_values else self.model.size_of_value

    @property
    def rotated_bytes(self) -> int:
        """Rotated copies of query and key."""
        model = self.model
        heads = model.query_size + model.key_value_size
        return self.tokens * heads * self.matmul_bytes if model.positions == "rope" else 0


def attention_score_pairs(sequence: Size, window: int | None) -> Size:
    """Twice the (query, key) pairs that count under a causal mask, optionally windowed: S^2, or 2wS - w^2."""
    span = sequence if window is None else smaller(window, sequence)
    return 2 * span * sequence - span * span


def norm_saved_bytes(shape: Shape, rows: Size, width: Size) -> Size:
    """Statistics kept by a norm; the composed RMSNorm also keeps the normalised tensor where its weight is trained."""
    if shape.conventions.fused:
        return 0
    if shape.model.norm == "layernorm" and width == shape.model.hidden:
        return 2 * rows * FP32
    return rows * FP32 + (0 if shape.fused_rmsnorm or shape.adapters else rows * width * FP32)


def attention_saved_bytes(shape: Shape) -> Size:
    """Output and the log-sum-exp per query that a flash kernel keeps (arXiv 2205.14135).

    Composed: scaled query and key and the value, each with all heads; of every score the softmax, its noise and
    their product; and the output, copied back to (B, S, A, D). `model/scores.py`: those copies; of every score what
    a cap keeps, the softmax, and what of it the second product reads, if that is another tensor.
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
    """What attention keeps beside its output; materialised, softmax, its dropout and a one-byte mask of every score."""
    of_a_query = shape.sequence * (2 * shape.matmul_bytes + 1) if shape.materialised else FP32
    return shape.tokens * shape.model.heads * of_a_query


def rotary_saved_bytes(shape: Shape) -> Size:
    """Rotated copies, which attention keeps; the unrotated ones stay because value is a view of the same buffer."""
    if shape.model.positions != "rope":
        return 0
    if shape.conventions.fused:
        return shape.rotated_bytes * (shape.conventions.unrotated_kept if shape.model.latent is None else 1)
    tables = 2 * shape.sequence * shape.model.size_of_rotary * shape.matmul_bytes if shape.casts else 0
    return tables + (0 if shape.composes_attention else shape.rotated_bytes)


def noise(shape: Shape, name: str, elements: Size, kind: Kind = Kind.ELEMENTWISE) -> list[Operation]:
    """What dropout draws: on a CPU by a kernel of its own, that takes longer than all else of it."""
    if not shape.model.dropout or shape.fused_rmsnorm:
        return []
    return [elementwise(shape, name, "noise", elements, 1, kind=kind)]


def dropout(shape: Shape) -> list[Operation]:
    """On a branch before it joins the residual stream: noise of the branch's type on a CPU, a byte per element on CUDA.

    Nothing without dropout.
    """
    if not shape.model.dropout:
        return []
    elements = shape.tokens * shape.model.hidden
    branch = elements * shape.matmul_bytes
    kept = elements if shape.fused_rmsnorm else branch
    # The gradient of the stream stays beside the branch's; in reduced precision its cast copy dies.
    back = elementwise(shape, "dropout", "multiply", elements, 3, temporary=branch, frees_saved=kept,
                       frees_temporary=branch if shape.casts else 0, on_stream=True)  # fmt: skip
    return [*noise(shape, "dropout", elements),
            elementwise(shape, "dropout", "multiply", elements, 3, saved=kept, temporary=branch,
                        frees_temporary=branch, on_stream=True, gradient=[back])]  # fmt: skip


def qk_norm_saved_bytes(shape: Shape) -> int:
    model = shape.model
    if not model.qk_norm:
        return 0
    heads = model.heads + model.key_value_heads
    elements = shape.tokens * heads * model.size_of_head
    norms = norm_saved_bytes(shape, shape.tokens * heads, model.size_of_head)
    if model.qk_norm_whole:
        norms = sum(norm_saved_bytes(shape, shape.tokens, size) for size in model.qk_norm_sizes)
    # The norm works in fp32: in reduced precision its input is a cast copy. Its output feeds the rotation, which
    # saves only the tables, or else attention, which saves it (composed, it saves a scaled copy instead).
    cast_input = elements * FP32 if shape.casts else 0
    output = 0 if model.positions == "rope" or shape.composes_attention else elements * shape.matmul_bytes
    return norms + cast_input + output


def elementwise(shape: Shape, name: str, kernel: str, elements: Size, tensors: float, **memory: Any) -> Operation:
    """`tensors`: how many tensors of `elements`, as wide as the products, it reads and writes; else as `call`."""
    return call(name, kernel, elements, tensors * elements * shape.matmul_bytes, **memory)


def cast(shape: Shape, name: str, elements: Size, *, wide: bool = False, **memory: Any) -> Operation:
    """From fp32 to the precision of the products, or `wide` the other way; its gradient is cast back."""
    full, narrow = elements * FP32, elements * shape.matmul_bytes
    made, gone = (narrow, full) if wide else (full, narrow)
    alike = {key: memory[key] for key in ("kind", "on_stream") if key in memory}
    back = call(name, "cast", elements, full + narrow, temporary=made, frees_temporary=gone, **alike)
    return call(name, "cast", elements, full + narrow, gradient=[back], **memory)


def activation(shape: Shape, elements: Size, *, made: Size | None = None, frees: Size = 0) -> Operation:
    """It keeps what it is given. `made`: bytes of its gradient and of what that is made of."""
    kernel, size = shape.model.activation, elements * shape.matmul_bytes
    made = size if made is None else made
    back = elementwise(shape, "activation", f"{kernel}_backward", elements, 3, temporary=made, frees_saved=size,
                       frees_temporary=made)  # fmt: skip
    return elementwise(shape, "activation", f"{kernel}_forward", elements, 2, saved=size, frees_temporary=frees,
                       gradient=[back])  # fmt: skip


def gate_product(shape: Shape, elements: Size, *, kept: int = 2, passing: Size = 0) -> Operation:
    """Of the activation's result and the other half of a gated network, `kept` of which die here in the backward
    pass; the next product keeps what it gives. `passing`: bytes that its backward pass has for a while."""
    size = elements * shape.matmul_bytes
    back = elementwise(shape, "gate_product", "multiply_backward", elements, 6, temporary=2 * size + passing,
                       frees_saved=kept * size, frees_temporary=size + passing)  # fmt: skip
    return elementwise(shape, "gate_product", "multiply", elements, 3, saved=size, gradient=[back])


def attention(shape: Shape) -> Operation:
    """Forward QK^T and PV; backward the two gradients of each. A flash kernel recomputes the scores on top; that is
    work of the implementation, not of the model, and is not counted."""
    model, w, tokens = shape.model, shape.matmul_bytes, shape.tokens
    pairs = divided(attention_score_pairs(shape.sequence, model.sliding_window), shape.cp)
    values = model.key_value_heads * shape.value_width
    inputs = tokens * (model.query_size + model.key_value_size + values) * w
    outputs = tokens * model.heads * shape.value_width * w
    padded = tokens * values * w if shape.pads_values else 0  # a copy, which waits for the backward pass
    saved = attention_saved_bytes(shape)
    # Composed: scores before the softmax, and their gradients.
    working = shape.micro_batch * model.heads * shape.sequence**2 * FP32 if shape.composes_attention else 0

    def one(phase: Phase, times: int, **memory: Any) -> Operation:
        flops = times * shape.micro_batch * (model.query_size + model.mixed_size) * pairs
        kernel = f"{'native' if shape.native else 'attention'}_{phase}"
        elements = shape.micro_batch * model.heads * pairs // 2
        return changed(
            call("attention", kernel, elements, times * (inputs + outputs), kind=Kind.ATTENTION, **memory), flops=flops,
            attention=(shape.micro_batch, shape.sequence, model.heads, model.key_value_heads, model.size_of_head),
        )  # fmt: skip

    back = one(
        Phase.BACKWARD, 2, temporary=working + inputs, frees_temporary=working + outputs,
        frees_saved=saved + rotary_saved_bytes(shape) + padded,
        parameters=model.heads * FP32 if model.attention_sinks else 0,
    )  # fmt: skip
    return one(Phase.FORWARD, 1, saved=saved, temporary=working, frees_temporary=working, gradient=[back])
