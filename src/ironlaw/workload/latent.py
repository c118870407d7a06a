"""The operations between norm and attention in a block with latent attention, mirroring `model/latent.py` call by call.

Symbols as in `forward.py`, and: Q all queries or keys (heads x D), W all values, R the rank of a narrow vector.

All operations other than products and norms are named `rotary`: rotation, padding and concatenation.
"""

from __future__ import annotations

from ironlaw.ledger import Kind
from ironlaw.model.config import ModelConfig
from ironlaw.model.dimensions import LatentConfig
from ironlaw.workload.blocks import FP32, Shape, cast, elementwise, gradient_sum, norm_saved_bytes, rotary_saved_bytes
from ironlaw.workload.layers import linear
from ironlaw.workload.operations import Operation, call, gradient_first, gradient_last, with_memory
from ironlaw.workload.sizes import Size

WIDE = ("query_up", "latent_up")
"""The products that compute queries, keys and values: "qkv" in `recompute.keep`."""


def first_reader(model: ModelConfig) -> str:
    """Return the name of the linear layer that first reads the norm's output."""
    return "query_up" if _of(model).query_rank is None else "query_down"


def projections(shape: Shape) -> list[Operation]:
    """The operations from the normed residual stream to rotated queries and keys, and values padded for attention."""
    model, latent, tokens, w = shape.model, _of(shape.model), shape.tokens, shape.matmul_bytes
    keep = not shape.casts  # in reduced precision a norm saves an fp32 copy of its input
    fused = shape.conventions.fused
    stream, rows, narrow = shape.elements, narrow_tokens(shape), tokens * latent.down_size
    normed = stream * w
    queries, keys, ups = (tokens * size * w for size in _sizes(model))
    operations: list[Operation] = []
    if latent.query_rank is not None:
        operations += linear(
            shape, "query_down", model.hidden, latent.query_rank, keep=keep, bias=False, rows=rows, frees=normed
        )
        operations += _norm(shape, "query_norm", latent.query_rank, latent.query_rank, reader="query_up")
    inputs = model.hidden if latent.query_rank is None else latent.query_rank
    up = linear(shape, "query_up", inputs, model.query_size, keep=False, bias=False, frees=tokens * inputs * w)
    if not fused:  # fused: rotation and concatenation are one kernel
        rotation = elementwise(shape, "rotary", "rotary", queries // w, 2, scratch=queries)
        up = gradient_first(up, rotation)
    operations += up
    if not fused:
        operations = gradient_last(operations, gradient_sum(shape, "attention_norm", stream, normed))
    if shape.casts:  # autocast does not cache the query layer's cast of the same input
        operations.append(elementwise(shape, "latent_down_cast", "cast", stream, 3, saved=normed))
    rank, width = latent.key_value_rank, latent.up_size(model.heads)
    down = linear(
        shape, "latent_down", model.hidden, latent.down_size, keep=keep, bias=False, rows=rows,
        frees=normed if shape.casts else 0,
    )  # fmt: skip
    if not fused:
        concatenation = elementwise(
            shape, "rotary", "concatenate", narrow, 2, temporary=narrow * w, frees_temporary=tokens * rank * w
        )
        down = gradient_first(down, concatenation)
    operations += down + _norm(shape, "latent_norm", rank, latent.down_size, reader="latent_up")
    kept = not (shape.pads_values or shape.composes_attention)  # values, which are views of the result, keep it alive
    operations += linear(shape, "latent_up", rank, width, keep=kept, bias=False, frees=tokens * rank * w)
    if fused:  # values that are not views of the result keep only their own part alive
        plain = model.heads * latent.plain_size * (1 - shape.conventions.unrotated_kept)
        operations[-1] = with_memory(operations[-1], saved=-tokens * plain * w)
    return [*operations, *_rotated(shape, queries, keys, ups, ups if kept else 0)]


def _rotated(shape: Shape, queries: Size, keys: Size, ups: Size, kept: Size) -> list[Operation]:
    """The concatenation of rotated and plain parts: copies of all queries and keys, which attention saves.

    `ups`: bytes of the up-projected narrow vector, of which `kept` are saved.
    """
    model, latent, tokens, w = shape.model, _of(shape.model), shape.tokens, shape.matmul_bytes
    values = tokens * model.heads * shape.value_width * w
    if shape.conventions.fused:  # one kernel for everything
        back = elementwise(shape, "rotary", "rotary", (queries + keys) / w, 2)
    else:
        back = elementwise(
            shape, "rotary", "concatenate", ups // w, 2, temporary=ups, frees_saved=kept, frees_temporary=keys + values
        )
    copies = 0 if shape.composes_attention else queries + keys
    freed = queries + (tokens * latent.down_size * w if shape.casts else 0)
    operations = [
        elementwise(
            shape, "rotary", "rotary", (queries + keys) // w, 2, saved=rotary_saved_bytes(shape),
            temporary=queries + keys - copies, frees_temporary=freed, gradient=[back],
        )
    ]  # fmt: skip
    if shape.pads_values:
        operations.append(elementwise(shape, "rotary", "pad", values // w, 2, saved=values, frees_temporary=ups))
    return operations


def freed_after_attention(shape: Shape) -> int:
    """Return the bytes of composed attention's inputs, which it copies and which are freed when the module returns."""
    return shape.tokens * sum(_sizes(shape.model)) * shape.matmul_bytes


def unpadded(shape: Shape) -> list[Operation]:
    """Attention's output without the padding: a copy, which the output layer saves."""
    if not shape.pads_values:
        return []
    w, mixed = shape.matmul_bytes, shape.tokens * shape.model.mixed_size
    padded = shape.tokens * shape.model.heads * shape.value_width
    back = elementwise(shape, "rotary", "pad", padded, 2, temporary=padded * w, frees_temporary=mixed * w)
    return [elementwise(shape, "rotary", "copy", mixed, 2, saved=mixed * w, gradient=[back])]


def narrow_tokens(shape: Shape) -> Size:
    """Return the tokens whose narrow vectors a rank computes and saves: its own, or all gathered ones."""
    return shape.stream_tokens if shape.conventions.narrows_own_tokens else shape.tokens


def _of(model: ModelConfig) -> LatentConfig:
    assert model.latent is not None
    return model.latent


def _sizes(model: ModelConfig) -> tuple[int, int, int]:
    """Return the widths of all queries, of all keys, and of the up-projected narrow vector."""
    return model.query_size, model.key_value_size, _of(model).up_size(model.heads)


def _norm(shape: Shape, name: str, width: int, whole: int, *, reader: str) -> list[Operation]:
    """The norm of a narrow vector: `width` of the `whole` output elements of a linear layer."""
    elements, w = narrow_tokens(shape) * width, shape.matmul_bytes
    full, reduced, product_elements = elements * shape.stream_bytes, elements * w, narrow_tokens(shape) * whole
    saved_input = full if shape.casts else product_elements * shape.stream_bytes
    back = call(name, "rmsnorm_backward", elements, 3 * full, kind=Kind.NORM, scratch=full,
                frees_saved=saved_input, parameters=width * FP32)  # fmt: skip
    operation = call(
        name, "rmsnorm_forward", elements, 2 * full, kind=Kind.NORM, gradient=[back],
        held=norm_saved_bytes(shape, narrow_tokens(shape), width), saved=0 if shape.casts else full,
        temporary=full if shape.casts else 0,
    )  # fmt: skip
    if not shape.casts:
        return [operation]
    # Saved instead are an fp32 copy of the input, and a copy of the output in the product's precision.
    frees = product_elements * w if width == whole else 0
    return [
        cast(shape, "latent_cast", elements, wide=True, saved=full, frees_temporary=frees),
        operation,
        cast(shape, f"{reader}_cast", elements, saved=reduced, frees_temporary=full),
    ]


def gathered_share(model: ModelConfig) -> Size:
    """Return the gathered fraction of the residual stream's size where ranks narrow their own tokens: the narrow
    vectors, and the stream itself if queries are projected from it."""
    latent = _of(model)
    queries = model.hidden if latent.query_rank is None else latent.query_rank
    return (queries + latent.down_size) / model.hidden


def widened_bytes(shape: Shape) -> Size:
    """Return the bytes of queries, keys and values that one block saves: attention's inputs, and unrotated parts."""
    model, latent = shape.model, _of(shape.model)
    plain = model.heads * latent.plain_size * shape.conventions.unrotated_kept
    wide = model.query_size + model.key_value_size + model.heads * model.size_of_value
    return shape.tokens * shape.matmul_bytes * (wide + plain)
