"""Blocks in other orders than norm, branch, norm, branch: norms after a branch, and branches side by side.

    post       x + norm(f(x))            the stream itself is what a branch reads (OLMo 2)
    sandwich   x + norm(f(norm(x)))      (Gemma 2)
    parallel   x + f(norm(x)) + g(norm(x)), of one norm or of two (GPT-J, GPT-NeoX)

Symbols as in `transformer.py`. Norms work in fp32: in reduced precision a branch's result is cast for its norm.
"""

from __future__ import annotations

from dataclasses import replace

from ironlaw.ledger import Kind, Phase
from ironlaw.workload.backward import attention_branch_backward, branch_gradient, feed_forward_backward
from ironlaw.workload.blocks import FP32, Shape, elementwise, norm_saved_bytes
from ironlaw.workload.forward import attention_branch, feed_forward
from ironlaw.workload.layers import cast_gradient, joining, norm, norm_backward, residual
from ironlaw.workload.operations import Operation


def arranged(shape: Shape) -> list[Operation]:
    """The forward pass of a block that is not in the usual order."""
    return _parallel(shape) if shape.model.parallel_norms else _with_norms_after(shape)


def arranged_backward(shape: Shape) -> list[Operation]:
    return _parallel_backward(shape) if shape.model.parallel_norms else _with_norms_after_backward(shape)


def _readers(shape: Shape) -> tuple[str, str]:
    """The linear layers that read what a branch is given, which cast it first."""
    return "qkv", "ffn_gate" if shape.model.gated_ffn else "ffn_up"


def _sizes(shape: Shape) -> tuple[int, int, int]:
    """Elements of the stream, its bytes, and those in the precision of the products."""
    elements = shape.stream_tokens * shape.model.hidden
    return elements, elements * shape.stream_bytes, elements * shape.matmul_bytes


# -- norms after a branch ------------------------------------------------------------------------------------------


def _with_norms_after(shape: Shape) -> list[Operation]:
    attention, network = _readers(shape)
    operations = _entrance(shape, "attention_norm", attention)
    kept = not (shape.casts or shape.conventions.fused)
    operations += attention_branch(shape, keep=kept) + _after(shape, "attention_after")
    operations += _entrance(shape, "ffn_norm", network)
    operations += feed_forward(shape, shape.model.ffn_size, "ffn", keep=kept)
    return operations + _after(shape, "ffn_after")


def _entrance(shape: Shape, name: str, reader: str) -> list[Operation]:
    """What a branch reads: its norm, or the stream, of which only reduced precision makes a copy."""
    elements, _, cast = _sizes(shape)
    if shape.model.norm_place == "sandwich":
        return norm(shape, name, "block", shape.model.layers, reader=reader)
    return [elementwise(shape, f"{reader}_cast", "cast", elements, 3, saved=cast)] if shape.casts else []


def _after(shape: Shape, name: str) -> list[Operation]:
    """The norm of a branch's result, and the new stream. In fp32 the norm keeps the branch's last product itself."""
    elements, full, cast = _sizes(shape)
    operations = []
    if shape.casts:
        operations.append(elementwise(shape, f"{name}_cast", "cast", elements, 3, saved=full, frees_temporary=cast))
    operations.append(
        Operation(
            name, Kind.NORM, Phase.FORWARD, "block", f"{shape.model.norm}_forward", shape.model.layers,
            elements=elements, bytes_moved=2 * full, temporary_bytes=full,
            saved_bytes=norm_saved_bytes(shape, shape.tokens, shape.model.hidden) + cast * shape.conventions.fused,
        )
    )  # fmt: skip
    joined = replace(residual(shape, shape.model.layers), bytes_moved=3 * full, frees_temporary_bytes=full)
    if not shape.keeps_stream:
        joined = replace(joined, saved_bytes=0, temporary_bytes=full, frees_temporary_bytes=2 * full)
    return [*operations, *joining(shape, Phase.FORWARD), joined]


def _with_norms_after_backward(shape: Shape) -> list[Operation]:
    attention, network = _readers(shape)
    consumes = _sizes(shape)[2]
    operations = _after_backward(shape, "ffn_after")
    operations += feed_forward_backward(shape, shape.model.ffn_size, "ffn", consumes=consumes)
    operations += _entrance_backward(shape, "ffn_norm", network)
    operations += _after_backward(shape, "attention_after") + attention_branch_backward(shape, consumes)
    return operations + _entrance_backward(shape, "attention_norm", attention)


def _after_backward(shape: Shape, name: str) -> list[Operation]:
    """The stream's gradient stays; the branch's is made of it."""
    elements, full, cast = _sizes(shape)
    operations = joining(shape, Phase.BACKWARD)
    own = full if operations else 0
    # A composed RMSNorm's passing tensors: elsewhere larger ones hide them.
    passing = 3 * full if shape.model.norm == "rmsnorm" and not shape.fused_rmsnorm else 0
    operations.append(
        Operation(
            name, Kind.NORM, Phase.BACKWARD, "block", f"{shape.model.norm}_backward", shape.model.layers,
            elements=elements, bytes_moved=3 * full,
            temporary_bytes=full + passing, frees_temporary_bytes=own + passing,
            frees_saved_bytes=full + norm_saved_bytes(shape, shape.tokens, shape.model.hidden),
            gradient_bytes=shape.model.norm_parameters * FP32,
        )
    )  # fmt: skip
    if shape.casts:
        operations.append(
            elementwise(shape, f"{name}_cast", "cast", elements, 3, backward=True, temporary=cast, frees_temporary=full)
        )
    return operations


def _entrance_backward(shape: Shape, name: str, reader: str) -> list[Operation]:
    operations = norm_backward(shape, name, "block", shape.model.layers, reader=reader, residual=True)
    return operations if shape.model.norm_place == "sandwich" else [op for op in operations if op.kind is not Kind.NORM]


# -- branches side by side -----------------------------------------------------------------------------------------


def _parallel(shape: Shape) -> list[Operation]:
    """The stream of between the branches is kept by nobody."""
    model, (elements, full, cast) = shape.model, _sizes(shape)
    attention, network = _readers(shape)
    operations = norm(shape, "attention_norm", "block", model.layers, reader=attention)
    if model.parallel_norms == 1 and shape.casts:  # the feed-forward network has yet to read it
        operations[-1] = replace(operations[-1], frees_temporary_bytes=0)
    operations += attention_branch(shape) + joining(shape, Phase.FORWARD)
    between = residual(shape, model.layers)
    operations.append(replace(between, saved_bytes=0, temporary_bytes=full))
    if model.parallel_norms == 2:
        operations += norm(shape, "ffn_norm", "block", model.layers, reader=network)
    elif shape.casts:
        operations.append(elementwise(shape, f"{network}_cast", "cast", elements, 3, saved=cast, frees_temporary=full))
    operations += feed_forward(shape, model.ffn_size, "ffn") + joining(shape, Phase.FORWARD)
    return [*operations, replace(between, frees_temporary_bytes=cast + full)]


def _parallel_backward(shape: Shape) -> list[Operation]:
    model, (elements, full, cast) = shape.model, _sizes(shape)
    attention, network = _readers(shape)
    start = ([cast_gradient(shape)] if shape.casts else []) + joining(shape, Phase.BACKWARD)
    operations = start + feed_forward_backward(shape, model.ffn_size, "ffn", consumes=branch_gradient(shape))
    own = norm_backward(shape, "attention_norm", "block", model.layers, reader=attention, residual=True)
    if model.parallel_norms == 2:
        # The stream that its norm has read is that of the other norm, which frees it.
        operations += [
            replace(op, frees_saved_bytes=op.frees_saved_bytes - full) if op.kind is Kind.NORM else op
            for op in norm_backward(shape, "ffn_norm", "block", model.layers, reader=network, residual=True)
        ]
        return operations + start + attention_branch_backward(shape, branch_gradient(shape)) + own
    # One norm: its two gradients meet before it.
    if shape.casts:
        operations.append(
            elementwise(
                shape, f"{network}_cast", "cast", elements, 3, backward=True, temporary=full, frees_temporary=cast
            )
        )
    elif not shape.conventions.fused:  # attention has read the same tensor, and frees it
        read = [op.name == network and op.kernel == "matmul_weight_gradient" for op in operations].index(True)
        operations[read] = replace(operations[read], frees_saved_bytes=operations[read].frees_saved_bytes - cast)
    operations += start + attention_branch_backward(shape, branch_gradient(shape))
    met = elementwise(shape, "attention_norm", "add_in_place", elements, 3, backward=True, frees_temporary=full)
    at = next(i for i, op in enumerate(own) if op.kind is Kind.NORM)
    return [*operations, *own[:at], met, *own[at:]]
