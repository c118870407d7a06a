"""Kinds of layers: the groups of a decoder's identical blocks, and the forward and backward pass of one layer of each.

A group is named `block`, or `moe_block` for layers with experts. A suffix marks layers that differ from the others:
` full` for attention to all tokens in a model with a sliding window, ` unrotated` for no positions in a model with
rotary ones, ` 16-bit` for 16-bit products in a model that quantises them.

Blocks in other orders than norm, branch, norm, branch are here too: norms after a branch, and parallel branches.

    post       x + norm(f(x))            a branch reads the stream itself (OLMo 2)
    sandwich   x + norm(f(norm(x)))      (Gemma 2)
    parallel   x + f(norm(x)) + g(norm(x)), with one norm or two (GPT-J, GPT-NeoX)

Symbols as in `forward.py`. Norms compute in fp32: in reduced precision a branch's result is cast for its norm.
"""

from __future__ import annotations

from dataclasses import replace

from ironlaw.ledger import Kind
from ironlaw.model.config import ModelConfig
from ironlaw.workload.adapted import EXPERT, frozen
from ironlaw.workload.blocks import FP32, Shape, cast, gradient_sum, norm_saved_bytes
from ironlaw.workload.conventions import Casts
from ironlaw.workload.division import on_rank
from ironlaw.workload.forward import after_norm, attention_branch, block, embedding, feed_forward, head, network_reader
from ironlaw.workload.layers import input_cast, joined_gradient, joining, norm, residual
from ironlaw.workload.moe import GROUP as MOE_GROUP
from ironlaw.workload.moe import moe_block
from ironlaw.workload.operations import (
    Operation,
    call,
    differentiate,
    fast_replace,
    gradient_first,
    gradient_last,
    line_name,
    with_memory,
)
from ironlaw.workload.sizes import above_one


def layer_groups(model: ModelConfig, narrow: int | None = None) -> list[str]:
    """Return the group of each layer. `narrow`: the number of first layers with quantised products, if not all."""
    groups = []
    for layer in range(model.layers):
        group = MOE_GROUP if model.moe and model.moe.in_layer(layer) else "block"
        if model.sliding_window is not None and not model.is_windowed(layer):
            group += FULL
        group = group if model.is_rotated(layer) else group + UNROTATED
        groups.append(group if narrow is None or layer < narrow else group + IN_16_BITS)
    return groups


FULL, UNROTATED, IN_16_BITS = " full", " unrotated", " 16-bit"


def shape_of(shape: Shape, kind: str) -> Shape:
    """Return the shape for a model whose layers are all of that kind."""
    model = shape.model
    if IN_16_BITS in kind:
        shape = replace(shape, conventions=replace(shape.conventions, casts=Casts()))
    if not is_block(kind) or not (model.full_every or model.full_first or model.unrotated_every):
        return shape
    return replace(shape, model=model.of_kind(FULL not in kind, UNROTATED not in kind))


def is_block(group: str) -> bool:
    return group.startswith(("block", MOE_GROUP))


COMPILED = "blocks"


def compiled_key(op: Operation) -> tuple[Kind, str]:
    """Return the kind and name of an operation of a compiled block, as far as a profile can tell its kernels apart:
    products and attention are called by the compiled code, everything else is fused into kernels of its own. Products
    of experts are not compiled: the rows of each change from step to step."""
    if op.name.startswith(EXPERT):
        return op.kind, line_name(op.name)
    return (op.kind if op.kind in (Kind.MATMUL, Kind.ATTENTION) else Kind.ELEMENTWISE), COMPILED


def has_experts(kind: str) -> bool:
    return kind.startswith(MOE_GROUP)


def both_passes(shape: Shape, kind: str) -> tuple[list[Operation], list[Operation]]:
    """Return the forward and the backward pass of one layer: a block of a kind, the "embedding" or the "head"."""
    uniform = shape_of(shape, kind)
    whole = _operations(uniform, kind)
    shape.forward[kind] = _on_rank(uniform, kind, whole)
    return shape.forward[kind], _on_rank(uniform, kind, differentiate(whole))


def forward_of(shape: Shape, kind: str) -> list[Operation]:
    """Return the forward pass of one layer in order of execution, each repeated call listed once."""
    if kind not in shape.forward:
        uniform = shape_of(shape, kind)
        shape.forward[kind] = _on_rank(uniform, kind, _operations(uniform, kind))
    return shape.forward[kind]


def _on_rank(shape: Shape, kind: str, operations: list[Operation]) -> list[Operation]:
    return [fast_replace(op, group=kind) for op in on_rank(shape, operations)]


def _operations(shape: Shape, kind: str) -> list[Operation]:
    whole = _full_layer(shape, kind)
    return list(frozen(shape, kind, whole)) if shape.adapters else whole


def _full_layer(shape: Shape, kind: str) -> list[Operation]:
    if kind == "embedding":
        return embedding(shape)
    if kind == "head":
        return head(shape)
    if has_experts(kind):
        return moe_block(shape)
    if shape.model.parallel_norms:
        return parallel_block(shape)
    return block(shape) if shape.model.norm_place == "pre" else post_norm_block(shape)


# -- blocks in other orders --------------------------------------------------------------------------------------------


def post_norm_block(shape: Shape) -> list[Operation]:
    """A block with a norm after each branch, and for "sandwich" also before it."""
    model, narrow = shape.model, shape.stream_elements * shape.matmul_bytes
    kept = not (shape.casts or shape.conventions.fused)
    attention = attention_branch(shape, keep=kept, consumes=narrow)
    network = feed_forward(shape, model.ffn_size, "ffn", keep=kept, consumes=narrow)
    return [
        *_branch_with_input(shape, "attention_norm", "qkv", attention), *_norm_after_branch(shape, "attention_after"),
        *_branch_with_input(shape, "ffn_norm", network_reader(shape), network), *_norm_after_branch(shape, "ffn_after"),
    ]  # fmt: skip


def _branch_with_input(shape: Shape, name: str, reader: str, branch: list[Operation]) -> list[Operation]:
    """A branch with its input: its norm, or the stream itself, which is copied only in reduced precision."""
    if shape.model.norm_place == "sandwich":
        return after_norm(shape, name, reader, branch)
    read = [*input_cast(shape, reader), *branch]
    if above_one(shape.stream_parts):  # gathered: fp32 products save it; otherwise it is freed when the branch returns
        full = shape.elements * FP32
        freed = full * shape.casts
        gathered = call("residual", "", 0, 0, saved=full - freed, temporary=freed, gathered=True)
        read = [fast_replace(gathered, repeat=0), *read[:-1], with_memory(read[-1], frees_temporary=freed)]
    return gradient_last(read, fast_replace(joined_gradient(shape), gathered=True))


def _norm_after_branch(shape: Shape, name: str) -> list[Operation]:
    """The norm of a branch's result, and the new stream. In fp32 the norm saves the branch's last product itself.

    In the backward pass the stream's gradient stays alive, and the branch's is computed from it.
    """
    elements, joins = shape.stream_elements, joining(shape)
    full, narrow = elements * shape.stream_bytes, elements * shape.matmul_bytes
    # A composed RMSNorm's intermediates; in other blocks they are below the peak.
    scratch = 3 * full if shape.model.norm == "rmsnorm" and not shape.fused_rmsnorm else 0
    back = call(
        name, f"{shape.model.norm}_backward", elements, 3 * full, kind=Kind.NORM, temporary=full + scratch,
        frees_temporary=(full if joins else 0) + scratch, frees_saved=full,
        parameters=shape.model.norm_parameters * FP32, on_stream=True,
    )  # fmt: skip
    operations = []
    if shape.casts:
        operations.append(
            cast(shape, f"{name}_cast", elements, wide=True, saved=full, frees_temporary=narrow, on_stream=True)
        )
    operations.append(
        call(
            name, f"{shape.model.norm}_forward", elements, 2 * full, kind=Kind.NORM, temporary=full,
            held=norm_saved_bytes(shape, shape.tokens, shape.model.hidden), saved=narrow * shape.conventions.fused,
            on_stream=True, gradient=[back],
        )
    )  # fmt: skip
    joined = fast_replace(residual(shape), bytes_moved=3 * full, frees_temporary_bytes=full, gradient=())
    if not shape.keeps_stream:
        joined = fast_replace(joined, saved_bytes=0, temporary_bytes=full, frees_temporary_bytes=2 * full)
    return [*operations, *joins, joined]


def parallel_block(shape: Shape) -> list[Operation]:
    """A block with parallel branches that read the same stream. The stream between the branches is not saved."""
    model, elements = shape.model, shape.stream_elements
    full, narrow = elements * shape.stream_bytes, elements * shape.matmul_bytes
    shares_norm, fused, reader = model.parallel_norms == 1, shape.conventions.fused, network_reader(shape)
    operations = norm(shape, "attention_norm", reader="qkv")
    if shares_norm:
        if shape.casts:  # keep it for the feed-forward network
            operations[-1] = fast_replace(operations[-1], frees_temporary_bytes=0)
        # The gradients of both branches are added before the norm's backward pass.
        operations[:1] = gradient_first(operations[:1], gradient_sum(shape, "attention_norm", elements, full))
    between = residual(shape)
    operations += attention_branch(shape) + joining(shape)
    operations.append(fast_replace(between, saved_bytes=0, temporary_bytes=full))
    # Both norms read the same stream; the attention norm's backward pass frees it.
    operations += input_cast(shape, reader, frees=full) if shares_norm else norm(
        shape, "ffn_norm", reader=reader, owns_input=False
    )  # fmt: skip
    # In fp32 both branches read the same normed tensor; attention's backward pass frees it.
    operations += feed_forward(shape, model.ffn_size, "ffn", owns_input=not shares_norm or shape.casts or fused)
    return [*operations, *joining(shape), fast_replace(between, frees_temporary_bytes=narrow + full)]
