"""The operations between the norm and the attention of a block with latent attention: `model/latent.py`, call by call.

Symbols as in `transformer.py`, and: Q all queries or keys (heads x D), W all values, R the rank of a narrow vector.

All that is not a product or a norm has one name, `rotary`: turning, padding, and putting parts beside each other.
"""

from __future__ import annotations

from dataclasses import replace

from ironlaw.ledger import Kind, Phase
from ironlaw.model.config import ModelConfig
from ironlaw.model.latent_config import LatentConfig
from ironlaw.workload.blocks import FP32, Shape, elementwise, norm_saved_bytes, rotary_saved_bytes
from ironlaw.workload.layers import linear, linear_backward
from ironlaw.workload.operations import Operation
from ironlaw.workload.sizes import Size

WIDE = ("query_up", "latent_up")
"""The products that give queries, keys and values: what `recompute.keep` calls qkv."""


def first_reader(model: ModelConfig) -> str:
    """The linear layer that first reads what the norm gives."""
    return "query_up" if _of(model).query_rank is None else "query_down"


def projections(shape: Shape) -> list[Operation]:
    """From the normed residual stream to rotated queries, keys, and values as wide as attention wants them."""
    model, latent, tokens, w = shape.model, _of(shape.model), shape.tokens, shape.matmul_bytes
    layers, keep = model.layers, not shape.casts  # in reduced precision a norm keeps a copy of its input in fp32
    operations: list[Operation] = []
    own = narrow_tokens(shape)
    if latent.query_rank is not None:
        operations += linear(
            shape, "query_down", "block", layers, model.hidden, latent.query_rank, keep=keep, bias=False, rows=own
        )
        operations += _norm(shape, "query_norm", latent.query_rank, latent.query_rank, reader="query_up")
    queries, keys, ups = (tokens * size * w for size in _sizes(model))
    inputs = model.hidden if latent.query_rank is None else latent.query_rank
    operations += linear(shape, "query_up", "block", layers, inputs, model.query_size, keep=False, bias=False)
    if shape.casts:  # autocast does not remember the cast that the query's layer has already made of the same input
        normed = tokens * model.hidden
        operations.append(elementwise(shape, "latent_down_cast", "cast", normed, 3, saved=normed * w))
    operations += linear(
        shape, "latent_down", "block", layers, model.hidden, latent.down_size, keep=keep, bias=False, rows=own
    )
    operations += _norm(shape, "latent_norm", latent.key_value_rank, latent.down_size, reader="latent_up")
    up = latent.up_size(model.heads)
    kept = not (shape.pads_values or shape.composes_attention)  # by values, which are views of it
    operations += linear(shape, "latent_up", "block", layers, latent.key_value_rank, up, keep=kept, bias=False)
    if shape.conventions.fused:  # of which values that are no view of it keep their own part
        plain = model.heads * latent.plain_size * (1 - shape.conventions.unrotated_kept)
        operations[-1] = replace(operations[-1], saved_bytes=operations[-1].saved_bytes - tokens * plain * w)
    # Rotated parts are put beside the others: copies of all queries and keys, which attention keeps.
    copies = 0 if shape.composes_attention else queries + keys
    dying = queries + (tokens * latent.down_size * w if shape.casts else 0)
    operations.append(
        elementwise(
            shape, "rotary", "rotary", (queries + keys) // w, 2, saved=rotary_saved_bytes(shape),
            temporary=queries + keys - copies, frees_temporary=dying,
        )
    )  # fmt: skip
    if shape.pads_values:
        padded = tokens * model.heads * shape.value_width
        operations.append(elementwise(shape, "rotary", "pad", padded, 2, saved=padded * w, frees_temporary=ups))
    return operations


def dying_after_attention(shape: Shape) -> int:
    """Bytes of composed attention's inputs, which it has copied: they die when the module returns."""
    return shape.tokens * sum(_sizes(shape.model)) * shape.matmul_bytes


def unpadded(shape: Shape) -> list[Operation]:
    """Attention's output without what padding added: a copy, which the output layer keeps."""
    if not shape.pads_values:
        return []
    mixed = shape.tokens * shape.model.mixed_size
    return [elementwise(shape, "rotary", "copy", mixed, 2, saved=mixed * shape.matmul_bytes)]


def unpadded_backward(shape: Shape) -> list[Operation]:
    if not shape.pads_values:
        return []
    w, mixed = shape.matmul_bytes, shape.tokens * shape.model.mixed_size
    padded = shape.tokens * shape.model.heads * shape.value_width
    return [elementwise(shape, "rotary", "pad", padded, 2, backward=True, temporary=padded * w,
                        frees_temporary=mixed * w)]  # fmt: skip


def projections_backward(shape: Shape) -> list[Operation]:
    """`projections` in reverse, from the gradients of queries, keys and values to that of the normed stream."""
    model, latent, tokens, w = shape.model, _of(shape.model), shape.tokens, shape.matmul_bytes
    layers, normed = model.layers, tokens * model.hidden * w
    queries, keys, ups = (tokens * size * w for size in _sizes(model))
    values = tokens * model.heads * shape.value_width * w
    kept = not (shape.pads_values or shape.composes_attention)
    fused, own = shape.conventions.fused, narrow_tokens(shape)
    operations = []
    if fused:  # all of it in one kernel
        operations.append(elementwise(shape, "rotary", "rotary", (queries + keys) / w, 2, backward=True))
    else:
        operations.append(
            elementwise(
                shape, "rotary", "concatenate", ups // w, 2, backward=True,
                temporary=ups, frees_saved=ups if kept else 0, frees_temporary=keys + values,
            )
        )  # fmt: skip
    up, rank = latent.up_size(model.heads), latent.key_value_rank
    operations += linear_backward(shape, "latent_up", "block", layers, rank, up, frees=tokens * rank * w, bias=False)
    operations += _norm_backward(shape, "latent_norm", rank, latent.down_size, reader="latent_up")
    narrow = tokens * latent.down_size
    if not fused:
        operations.append(
            elementwise(
                shape, "rotary", "concatenate", narrow, 2, backward=True,
                temporary=narrow * w, frees_temporary=tokens * rank * w,
            )
        )  # fmt: skip
    operations += linear_backward(
        shape, "latent_down", "block", layers, model.hidden, latent.down_size,
        frees=normed if shape.casts else 0, bias=False, rows=own,
    )  # fmt: skip
    if not fused:
        operations.append(
            elementwise(
                shape, "rotary", "rotary", queries // w, 2, backward=True, temporary=queries, frees_temporary=queries
            )
        )
    inputs = model.hidden if latent.query_rank is None else latent.query_rank
    operations += linear_backward(
        shape, "query_up", "block", layers, inputs, model.query_size, frees=tokens * inputs * w, bias=False
    )
    if latent.query_rank is not None:
        rank = latent.query_rank
        operations += _norm_backward(shape, "query_norm", rank, rank, reader="query_up")
        operations += linear_backward(
            shape, "query_down", "block", layers, model.hidden, rank, frees=normed, bias=False, rows=own
        )  # fmt: skip
    if not fused:
        operations.append(
            elementwise(shape, "attention_norm", "add_in_place", tokens * model.hidden, 3, backward=True,
                        frees_temporary=normed)
        )  # fmt: skip
    return operations


def narrow_tokens(shape: Shape) -> Size:
    """Tokens whose narrow vectors a rank computes and keeps: its own, or all that it gathered the stream of."""
    return shape.stream_tokens if shape.conventions.narrows_own_tokens else shape.tokens


def _of(model: ModelConfig) -> LatentConfig:
    assert model.latent is not None
    return model.latent


def _sizes(model: ModelConfig) -> tuple[int, int, int]:
    """Widths of all queries, of all keys, and of what the narrow vector becomes."""
    return model.query_size, model.key_value_size, _of(model).up_size(model.heads)


def _norm(shape: Shape, name: str, width: int, whole: int, *, reader: str) -> list[Operation]:
    """Of a narrow vector, `width` of the `whole` elements that a linear layer gave."""
    tokens, w = narrow_tokens(shape), shape.matmul_bytes
    full, given = tokens * width * shape.stream_bytes, tokens * whole * w
    operation = Operation(
        name, Kind.NORM, Phase.FORWARD, "block", "rmsnorm_forward", shape.model.layers, elements=tokens * width,
        bytes_moved=2 * full, saved_bytes=norm_saved_bytes(shape, tokens, width) + (0 if shape.casts else full),
        temporary_bytes=full if shape.casts else 0,
    )  # fmt: skip
    if not shape.casts:
        return [operation]

    def cast(name: str, saved: int, frees: int) -> Operation:
        return Operation(
            name, Kind.ELEMENTWISE, Phase.FORWARD, "block", "cast", shape.model.layers, elements=tokens * width,
            bytes_moved=full + tokens * width * w, saved_bytes=saved, frees_temporary_bytes=frees,
        )  # fmt: skip

    # A copy of the input in fp32 waits instead of the input, and of the output one in the product's precision.
    before = cast("latent_cast", full, given if width == whole else 0)
    return [before, operation, cast(f"{reader}_cast", tokens * width * w, full)]


def _norm_backward(shape: Shape, name: str, width: int, whole: int, *, reader: str) -> list[Operation]:
    tokens, w = narrow_tokens(shape), shape.matmul_bytes
    full, reduced = tokens * width * shape.stream_bytes, tokens * width * w
    held = full if shape.casts else tokens * whole * shape.stream_bytes
    operation = Operation(
        name, Kind.NORM, Phase.BACKWARD, "block", "rmsnorm_backward", shape.model.layers, elements=tokens * width,
        bytes_moved=3 * full, temporary_bytes=full, frees_temporary_bytes=full,
        frees_saved_bytes=norm_saved_bytes(shape, tokens, width) + held, gradient_bytes=width * FP32,
    )  # fmt: skip
    if not shape.casts:
        return [operation]

    def cast(name: str, takes: int, frees: int) -> Operation:
        return Operation(
            name, Kind.ELEMENTWISE, Phase.BACKWARD, "block", "cast", shape.model.layers, elements=tokens * width,
            bytes_moved=full + reduced, temporary_bytes=takes, frees_temporary_bytes=frees,
        )  # fmt: skip

    return [cast(f"{reader}_cast", full, reduced), operation, cast("latent_cast", reduced, full)]


def gathered_share(model: ModelConfig) -> Size:
    """Of the residual stream, what is gathered where ranks narrow their own tokens: narrow vectors, and the stream
    itself for queries that come straight from it."""
    latent = _of(model)
    queries = model.hidden if latent.query_rank is None else latent.query_rank
    return (queries + latent.down_size) / model.hidden


def widened_bytes(shape: Shape) -> Size:
    """Queries, keys and values as attention takes them, and before their rotation: what one block keeps of them."""
    model, latent = shape.model, _of(shape.model)
    plain = model.heads * latent.plain_size * shape.conventions.unrotated_kept
    wide = model.query_size + model.key_value_size + model.heads * model.size_of_value
    return shape.tokens * shape.matmul_bytes * (wide + plain)
