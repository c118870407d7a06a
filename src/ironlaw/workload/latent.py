"""The operations between the norm and the attention of a block with latent attention: `model/latent.py`, call by call.

Symbols as in `forward.py`, and: Q all queries or keys (heads x D), W all values, R the rank of a narrow vector.

All that is not a product or a norm has one name, `rotary`: turning, padding, and putting parts beside each other.
"""

from __future__ import annotations

from ironlaw.ledger import Kind
from ironlaw.model.config import ModelConfig
from ironlaw.model.latent_config import LatentConfig
from ironlaw.workload.blocks import FP32, Shape, cast, elementwise, norm_saved_bytes, rotary_saved_bytes
from ironlaw.workload.layers import linear
from ironlaw.workload.operations import Operation, call, gradient_first, gradient_last, grown
from ironlaw.workload.sizes import Size

WIDE = ("query_up", "latent_up")
"""The products that give queries, keys and values: what `recompute.keep` calls qkv."""


def first_reader(model: ModelConfig) -> str:
    """The linear layer that first reads what the norm gives."""
    return "query_up" if _of(model).query_rank is None else "query_down"


def projections(shape: Shape) -> list[Operation]:
    """From the normed residual stream to rotated queries, keys, and values as wide as attention wants them."""
    model, latent, tokens, w = shape.model, _of(shape.model), shape.tokens, shape.matmul_bytes
    keep = not shape.casts  # in reduced precision a norm keeps an fp32 copy of its input
    fused = shape.conventions.fused
    stream, own, narrow = tokens * model.hidden, narrow_tokens(shape), tokens * latent.down_size
    normed = stream * w
    queries, keys, ups = (tokens * size * w for size in _sizes(model))
    operations: list[Operation] = []
    if latent.query_rank is not None:
        operations += linear(
            shape, "query_down", model.hidden, latent.query_rank, keep=keep, bias=False, rows=own, frees=normed
        )
        operations += _norm(shape, "query_norm", latent.query_rank, latent.query_rank, reader="query_up")
    inputs = model.hidden if latent.query_rank is None else latent.query_rank
    up = linear(shape, "query_up", inputs, model.query_size, keep=False, bias=False, frees=tokens * inputs * w)
    if not fused:  # else turning and putting together are one kernel
        turned = elementwise(shape, "rotary", "rotary", queries // w, 2, temporary=queries, frees_temporary=queries)
        up = gradient_first(up, turned)
    operations += up
    if not fused:
        met = elementwise(shape, "attention_norm", "add_in_place", stream, 3, frees_temporary=normed)
        operations = gradient_last(operations, met)
    if shape.casts:  # autocast does not remember the cast that the query's layer has already made of the same input
        operations.append(elementwise(shape, "latent_down_cast", "cast", stream, 3, saved=normed))
    rank, width = latent.key_value_rank, latent.up_size(model.heads)
    down = linear(
        shape, "latent_down", model.hidden, latent.down_size, keep=keep, bias=False, rows=own,
        frees=normed if shape.casts else 0,
    )  # fmt: skip
    if not fused:
        together = elementwise(
            shape, "rotary", "concatenate", narrow, 2, temporary=narrow * w, frees_temporary=tokens * rank * w
        )
        down = gradient_first(down, together)
    operations += down + _norm(shape, "latent_norm", rank, latent.down_size, reader="latent_up")
    kept = not (shape.pads_values or shape.composes_attention)  # by values, which are views of it
    operations += linear(shape, "latent_up", rank, width, keep=kept, bias=False, frees=tokens * rank * w)
    if fused:  # of which values that are no view of it keep their own part
        plain = model.heads * latent.plain_size * (1 - shape.conventions.unrotated_kept)
        operations[-1] = grown(operations[-1], saved=-tokens * plain * w)
    return [*operations, *_rotated(shape, queries, keys, ups, ups if kept else 0)]


def _rotated(shape: Shape, queries: Size, keys: Size, ups: Size, kept: Size) -> list[Operation]:
    """Rotated parts are put beside the others: copies of all queries and keys, which attention keeps.

    `ups`: bytes of what the narrow vector became, of which `kept` are saved.
    """
    model, latent, tokens, w = shape.model, _of(shape.model), shape.tokens, shape.matmul_bytes
    values = tokens * model.heads * shape.value_width * w
    if shape.conventions.fused:  # all of it in one kernel
        back = elementwise(shape, "rotary", "rotary", (queries + keys) / w, 2)
    else:
        back = elementwise(
            shape, "rotary", "concatenate", ups // w, 2, temporary=ups, frees_saved=kept, frees_temporary=keys + values
        )
    copies = 0 if shape.composes_attention else queries + keys
    dying = queries + (tokens * latent.down_size * w if shape.casts else 0)
    operations = [
        elementwise(
            shape, "rotary", "rotary", (queries + keys) // w, 2, saved=rotary_saved_bytes(shape),
            temporary=queries + keys - copies, frees_temporary=dying, gradient=[back],
        )
    ]  # fmt: skip
    if shape.pads_values:
        operations.append(elementwise(shape, "rotary", "pad", values // w, 2, saved=values, frees_temporary=ups))
    return operations


def dying_after_attention(shape: Shape) -> int:
    """Bytes of composed attention's inputs, which it has copied: they die when the module returns."""
    return shape.tokens * sum(_sizes(shape.model)) * shape.matmul_bytes


def unpadded(shape: Shape) -> list[Operation]:
    """Attention's output without what padding added: a copy, which the output layer keeps."""
    if not shape.pads_values:
        return []
    w, mixed = shape.matmul_bytes, shape.tokens * shape.model.mixed_size
    padded = shape.tokens * shape.model.heads * shape.value_width
    back = elementwise(shape, "rotary", "pad", padded, 2, temporary=padded * w, frees_temporary=mixed * w)
    return [elementwise(shape, "rotary", "copy", mixed, 2, saved=mixed * w, gradient=[back])]


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
    elements, w = narrow_tokens(shape) * width, shape.matmul_bytes
    full, reduced, given = elements * shape.stream_bytes, elements * w, narrow_tokens(shape) * whole
    statistics = norm_saved_bytes(shape, narrow_tokens(shape), width)
    held = full if shape.casts else given * shape.stream_bytes
    back = call(name, "rmsnorm_backward", elements, 3 * full, kind=Kind.NORM, temporary=full, frees_temporary=full,
                frees_saved=statistics + held, parameters=width * FP32)  # fmt: skip
    operation = call(
        name, "rmsnorm_forward", elements, 2 * full, kind=Kind.NORM, gradient=[back],
        saved=statistics + (0 if shape.casts else full), temporary=full if shape.casts else 0,
    )  # fmt: skip
    if not shape.casts:
        return [operation]
    # A copy of the input in fp32 waits instead of the input, and of the output one in the product's precision.
    frees = given * w if width == whole else 0
    return [
        cast(shape, "latent_cast", elements, wide=True, saved=full, frees_temporary=frees),
        operation,
        cast(shape, f"{reader}_cast", elements, saved=reduced, frees_temporary=full),
    ]


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
