"""The operations of serving: one forward pass of an engine over new tokens that follow cached ones.

    forward_pass(model, [Chunk(512)] * 4)                           # prompts, nothing cached
    forward_pass(model, [Chunk(1, cached=2048)] * 32)               # one token each
    forward_pass(model, [Chunk(512, cached=1024), Chunk(1, 700)])   # both at once, each sequence at its own length

The operations are those of training (`forward.py`), with weights and the residual stream in the products' precision.
Attention includes the cached keys and values. Nothing is saved for a backward pass: a block's tensors are freed with
it (an upper bound: kernels that work in place hold less). A query attends to its own key, to those before it, and to
the cache within its window; scores are counted one by one, not as half a square.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace

from ironlaw.ledger import Kind
from ironlaw.model.config import ModelConfig
from ironlaw.workload.blocks import Precision, Shape, elementwise
from ironlaw.workload.conventions import Conventions
from ironlaw.workload.forward import final_norm
from ironlaw.workload.kinds import forward_of, layer_groups, shape_of
from ironlaw.workload.layers import linear
from ironlaw.workload.layout import Layout
from ironlaw.workload.operations import Operation, with_memory
from ironlaw.workload.program import EMBEDDING, HEAD, Layer, Program, Stage
from ironlaw.workload.recipe import Recipe

INFERENCE = Conventions(autocast=False)


@dataclass(frozen=True)
class Chunk:
    """`tokens` new tokens of a sequence with `cached` tokens in the cache."""

    tokens: int
    cached: int = 0


def forward_pass(model: ModelConfig, chunks: Sequence[Chunk], *, precision: Precision = "bf16") -> Program:
    """Return one pass over `chunks`, with logits of the last token of each."""
    shape = Shape(model, 1, sum(chunk.tokens for chunk in chunks), precision, conventions=INFERENCE)
    embedding = _kept_none([op for op in forward_of(shape, "embedding") if op.name != "mask"])
    layers = [Layer(EMBEDDING, "embedding", tuple(embedding))]
    blocks = {kind: tuple(_block(shape, kind, chunks)) for kind in dict.fromkeys(layer_groups(model))}
    layers += [Layer(f"blocks.{n}", kind, blocks[kind]) for n, kind in enumerate(layer_groups(model))]
    layers.append(Layer(HEAD, "head", tuple(_kept_none(_head(shape, len(chunks))))))
    return Program(Layout(), (Stage(tuple(layers)),), model=model, recipe=Recipe(precision), shape=shape)


def scores(chunk: Chunk, window: int | None) -> int:
    """Return the unmasked (query, key) pairs of new tokens: cached + 1, cached + 2, ..., each at most the window."""
    last = chunk.cached + chunk.tokens
    if window is None or last <= window:
        return chunk.tokens * chunk.cached + chunk.tokens * (chunk.tokens + 1) // 2
    short = max(0, window - chunk.cached)  # queries with fewer keys than a window
    return short * chunk.cached + short * (short + 1) // 2 + (chunk.tokens - short) * window


def _block(shape: Shape, kind: str, chunks: Sequence[Chunk]) -> list[Operation]:
    """A block's forward pass that writes its keys and values to the cache and attends to the cache."""
    operations: list[Operation] = []
    for op in forward_of(shape, kind):
        if op.attention is not None:
            attend = _attention if shape.model.latent is None else _latent_attention
            operations += attend(op, shape_of(shape, kind), chunks)
        elif op.batch > 1 and op.kind is Kind.MATMUL and op.name.startswith("expert"):
            operations.append(_touched(op, shape))
        elif shape.model.latent is None or (op.name != "latent_up" and op.kernel not in ("pad", "copy")):
            operations.append(op)
    return _kept_none(operations)


def _touched(op: Operation, shape: Shape) -> Operation:
    """Restrict a product of the experts to experts chosen by any token, assuming independent choices."""
    moe = shape.model.moe
    assert moe is not None and op.matmul is not None
    rows, outputs, inputs = op.matmul
    share = 1.0 - (1.0 - moe.experts_per_token / moe.experts) ** shape.tokens
    batch = max(1, min(op.batch, round(moe.experts * share)))
    unread = (moe.experts - batch) * inputs * outputs * shape.matmul_bytes
    matmul = (max(1, round(rows * op.batch / batch)), outputs, inputs)
    return replace(op, batch=batch, matmul=matmul, bytes_moved=op.bytes_moved - unread)


def _cache_write(op: Operation, shape: Shape) -> Operation:
    written = elementwise(shape, "cache", "copy", shape.tokens * shape.model.cached_size, 2)
    return replace(written, group=op.group)


def _latent_attention(op: Operation, shape: Shape, chunks: Sequence[Chunk]) -> list[Operation]:
    """Latent attention: few queries are projected to the narrow space; for many, keys and values of all heads are
    recomputed, whichever multiplies less (`LatentAttention.mixed`). Both use the weights of `latent_up`."""
    model, w = shape.model, shape.matmul_bytes
    latent = model.latent
    assert latent is not None
    rank, up = latent.key_value_rank, latent.up_size(model.heads)
    operations = [_cache_write(op, shape)]
    for chunk, count in Counter(chunks).items():
        keys, pairs = chunk.cached + chunk.tokens, count * scores(chunk, model.sliding_window)
        absorbed = rank + latent.down_size
        made = latent.head_size + latent.value_size + rank * up // model.heads / chunk.tokens
        rows, width = (chunk.tokens, absorbed) if absorbed <= made else (keys, latent.head_size + latent.value_size)
        rows *= count
        widened = linear(shape, "latent_up", rank, up, keep=False, bias=False, rows=rows)
        operations += [replace(one, group=op.group) for one in widened]
        read = count * (chunk.tokens * model.query_size + keys * latent.down_size) * w
        heads = (model.heads, 1, latent.down_size)
        operations.append(
            replace(
                op, kernel="attention_decode" if chunk.tokens == 1 else "attention_forward",
                flops=2 * pairs * model.heads * width, elements=pairs * model.heads,
                attention=(count, chunk.tokens, *heads), bytes_moved=read + count * chunk.tokens * model.mixed_size * w,
                saved_bytes=0, temporary_bytes=count * chunk.tokens * model.mixed_size * w, frees_temporary_bytes=0,
            )
        )  # fmt: skip
    return operations


def _attention(op: Operation, shape: Shape, chunks: Sequence[Chunk]) -> list[Operation]:
    """Attention in one call for sequences with several new tokens, and one for those with a single new token."""
    model, w, window = shape.model, shape.matmul_bytes, shape.model.sliding_window
    heads = (model.heads, model.key_value_heads, model.size_of_head)
    operations = [_cache_write(op, shape)]
    several, single = [c for c in chunks if c.tokens > 1], [c for c in chunks if c.tokens == 1]
    for kernel, some in (("attention_forward", several), ("attention_decode", single)):
        if not some:
            continue
        tokens, pairs = sum(c.tokens for c in some), sum(scores(c, window) for c in some)
        keys = sum(c.cached + c.tokens if window is None else c.tokens + min(window - 1, c.cached) for c in some)
        made = tokens * model.mixed_size * w
        read = (tokens * model.query_size + 2 * keys * model.key_value_size) * w
        operations.append(
            replace(
                op, kernel=kernel, flops=2 * pairs * (model.query_size + model.mixed_size),
                elements=pairs * model.heads, attention=(len(some), max(c.tokens for c in some), *heads),
                bytes_moved=read + made, saved_bytes=0, temporary_bytes=made, frees_temporary_bytes=0,
            )
        )  # fmt: skip
    return operations


def _head(shape: Shape, rows: int) -> list[Operation]:
    """The final norm and the logits of `rows` tokens."""
    model = shape.model
    operations = final_norm(shape)
    operations += linear(shape, "head", model.hidden, model.vocab, keep=False, bias=model.head_bias, rows=rows)
    if model.logit_cap is not None:
        operations.append(elementwise(shape, "logit_cap", "tanh", rows * model.vocab, 6))
    return [replace(op, group="head") for op in operations]


def _kept_none(operations: Sequence[Operation]) -> list[Operation]:
    """Make all saved bytes temporary, freed with the last operation, as there is no backward pass."""
    result = [
        replace(op, saved_bytes=0, temporary_bytes=op.saved_bytes + op.temporary_bytes, frees_saved_bytes=0)
        for op in operations
    ]
    left = sum(op.temporary_bytes - op.frees_temporary_bytes for op in result)
    result[-1] = with_memory(result[-1], frees_temporary=left)
    return result
