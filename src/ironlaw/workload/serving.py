"""The operations of serving: what one pass of an engine computes over new tokens behind those that its cache holds.

    prefill(model, Batch(sequences=4, tokens=512))                  # prompts, nothing cached
    prefill(model, Batch(4, 512), cached=1024)                      # a chunk of them behind a cached prefix
    decode(model, sequences=32, cached=2048)                        # a token each
    forward_pass(model, [Chunk(512, cached=1024), Chunk(1, 700)])   # both at once, each sequence at its own length

The forward operations are those of training (`forward.py`) where weights and the residual stream are as wide as the
products; attention sees the cached keys and values, and nothing waits for a backward pass: what a block makes dies with
it (an upper bound: kernels that work in place hold less). A query sees its own key, those before it, and as much of the
cache as its window holds; scores are counted one by one, not as half a square.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

from ironlaw.errors import UserError
from ironlaw.ledger import Kind
from ironlaw.model.config import ModelConfig
from ironlaw.workload.blocks import Precision, Shape, elementwise
from ironlaw.workload.collectives import Collective
from ironlaw.workload.conventions import Conventions
from ironlaw.workload.division import local_shape
from ironlaw.workload.forward import final_norm
from ironlaw.workload.kinds import forward_of, layer_groups, shape_of
from ironlaw.workload.layers import linear
from ironlaw.workload.layout import Layout
from ironlaw.workload.operations import Operation, grown
from ironlaw.workload.program import EMBEDDING, HEAD, Layer, Program, Stage, Tensor
from ironlaw.workload.recipe import Recipe, StepBatch
from ironlaw.workload.sharding import stage_parameters

INFERENCE = Conventions(autocast=False)


@dataclass(frozen=True)
class Chunk:
    """`tokens` new ones of a sequence of which the cache holds `cached`."""

    tokens: int
    cached: int = 0


def prefill(model: ModelConfig, batch: StepBatch, *, cached: int = 0, precision: Precision = "bf16") -> Program:
    """A pass over `batch.tokens` of each prompt, behind `cached` that an earlier pass or a shared prefix left."""
    return forward_pass(model, [Chunk(batch.tokens, cached)] * batch.sequences, precision=precision)


def decode(model: ModelConfig, sequences: int, cached: int, *, precision: Precision = "bf16") -> Program:
    """A token of each sequence behind `cached` others."""
    return forward_pass(model, [Chunk(1, cached)] * sequences, precision=precision)


def forward_pass(
    model: ModelConfig, chunks: Sequence[Chunk], layout: Layout | None = None, *, precision: Precision = "bf16"
) -> Program:
    """One pass over `chunks`; logits of the last token of each. `layout` divides it over `tp` ranks, no other way."""
    layout = layout or Layout()
    if layout.accelerators != layout.tp:
        raise UserError(f"serving is planned over tp ranks, not in layout '{layout}': write for example tp=2")
    tokens = sum(chunk.tokens for chunk in chunks)
    whole = Shape(model, 1, tokens, precision, conventions=INFERENCE)
    shape = replace(local_shape(whole, layout), division=whole.division)
    layers = [
        Layer(
            EMBEDDING,
            "embedding",
            tuple(_kept_none([op for op in forward_of(shape, "embedding") if op.name != "mask"])),
        )
    ]
    blocks = {kind: tuple(_block(shape, kind, chunks)) for kind in dict.fromkeys(layer_groups(model))}
    layers += [Layer(f"blocks.{n}", kind, blocks[kind]) for n, kind in enumerate(layer_groups(model))]
    layers.append(Layer(HEAD, "head", tuple(_kept_none(_head(shape, len(chunks))))))
    parameters = stage_parameters(model, layout, 0)
    w = shape.matmul_bytes
    tensors = (
        Tensor("weights", sum(p.elements for p in parameters) * w),
        Tensor("cache", cache_bytes(shape.model, [c.cached + c.tokens for c in chunks], w), "keys and values"),
    )
    exchanges = _collectives(shape, len(chunks)) if layout.tp > 1 else ()
    return Program(
        layout, (Stage(tuple(layers), tuple(parameters)),), sent=tuple(exchanges), tensors=(tensors,),
        model=model, recipe=Recipe(precision), shape=shape,
    )  # fmt: skip


def cache_bytes(model: ModelConfig, lengths: Iterable[int], element_bytes: float) -> float:
    """Keys and values of all layers for sequences of these lengths; a windowed layer keeps its window."""
    lengths = list(lengths)
    held = 0
    for layer in range(model.layers):
        window = model.sliding_window if model.is_windowed(layer) else None
        held += sum(length if window is None else min(window, length) for length in lengths)
    return kept_elements(model) * held * element_bytes


def kept_elements(model: ModelConfig) -> int:
    """Of a token in one layer: keys and values, or the narrow vector and the rotated key of latent attention."""
    return 2 * model.key_value_size if model.latent is None else model.latent.down_size


def scores(chunk: Chunk, window: int | None) -> int:
    """Pairs of a new query and a key that it sees: cached + 1, cached + 2, ... each at most the window."""
    last = chunk.cached + chunk.tokens
    if window is None or last <= window:
        return chunk.tokens * chunk.cached + chunk.tokens * (chunk.tokens + 1) // 2
    short = max(0, window - chunk.cached)  # queries that see less than a window
    return short * chunk.cached + short * (short + 1) // 2 + (chunk.tokens - short) * window


def _block(shape: Shape, kind: str, chunks: Sequence[Chunk]) -> list[Operation]:
    """A block's forward pass with attention to the cache, which it first adds its keys and values to."""
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
    """Of the experts' products those of experts that some token has chosen, where all choose independently."""
    moe = shape.model.moe
    assert moe is not None and op.matmul is not None
    rows, outputs, inputs = op.matmul
    share = 1.0 - (1.0 - moe.experts_per_token / moe.experts) ** shape.tokens
    batch = max(1, min(op.batch, round(moe.experts * share)))
    unread = (moe.experts - batch) * inputs * outputs * shape.matmul_bytes
    matmul = (max(1, round(rows * op.batch / batch)), outputs, inputs)
    return replace(op, batch=batch, matmul=matmul, bytes_moved=op.bytes_moved - unread)


def _cache_write(op: Operation, shape: Shape) -> Operation:
    written = elementwise(shape, "cache", "copy", shape.tokens * kept_elements(shape.model), 2)
    return replace(written, group=op.group)


def _latent_attention(op: Operation, shape: Shape, chunks: Sequence[Chunk]) -> list[Operation]:
    """Few queries are taken to the narrow space, for many the keys and values of all heads are made anew, whichever
    multiplies less (`LatentAttention.mixed`); both go through the weights of `latent_up`."""
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
    """One call for sequences that have several new tokens and one for those with a single one."""
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
    """The last norm, and the logits of `rows` tokens."""
    model = shape.model
    operations = final_norm(shape)
    operations += linear(shape, "head", model.hidden, model.vocab, keep=False, bias=model.head_bias, rows=rows)
    if model.logit_cap is not None:
        operations.append(elementwise(shape, "logit_cap", "tanh", rows * model.vocab, 6))
    return [replace(op, group="head") for op in operations]


def _kept_none(operations: Sequence[Operation]) -> list[Operation]:
    """The same without gradients: what was saved for a backward pass dies with the last of them."""
    result = [
        replace(op, saved_bytes=0, temporary_bytes=op.saved_bytes + op.temporary_bytes, frees_saved_bytes=0)
        for op in operations
    ]
    left = sum(op.temporary_bytes - op.frees_temporary_bytes for op in result)
    result[-1] = grown(result[-1], frees_temporary=left)
    return result


def _collectives(shape: Shape, rows: int) -> list[Collective]:
    """Of tp ranks: the embedding's and each block's two sums of the residual stream, and the logits put together."""
    stream = shape.tokens * shape.model.hidden * shape.matmul_bytes
    calls = 1 + 2 * shape.model.layers
    logits = rows * shape.model.vocab * shape.matmul_bytes
    return [Collective("tp", "all_reduce", calls, calls * stream), Collective("tp", "all_gather", 1, logits)]
