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

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

from ironlaw.errors import UserError
from ironlaw.ledger import Kind, Phase
from ironlaw.model.config import ModelConfig
from ironlaw.workload.blocks import Precision, Shape, elementwise
from ironlaw.workload.collectives import Collective
from ironlaw.workload.conventions import Conventions
from ironlaw.workload.division import local_shape
from ironlaw.workload.forward import final_norm
from ironlaw.workload.kinds import forward_of, layer_groups, shape_of
from ironlaw.workload.layers import linear
from ironlaw.workload.layout import Layout
from ironlaw.workload.operations import Operation
from ironlaw.workload.program import EMBEDDING, HEAD, Layer, Program, Stage
from ironlaw.workload.recipe import Batch, Recipe
from ironlaw.workload.sharding import stage_parameters
from ironlaw.workload.tensors import Tensor

INFERENCE = Conventions(autocast=False)


@dataclass(frozen=True)
class Chunk:
    """`tokens` new ones of a sequence of which the cache holds `cached`."""

    tokens: int
    cached: int = 0


def prefill(model: ModelConfig, batch: Batch, *, cached: int = 0, precision: Precision = "bf16") -> Program:
    """A pass over `batch.tokens` of each prompt, behind `cached` that an earlier pass or a shared prefix left."""
    return forward_pass(model, [Chunk(batch.tokens, cached)] * batch.sequences, precision=precision)


def decode(model: ModelConfig, sequences: int, cached: int, *, precision: Precision = "bf16") -> Program:
    """A token of each sequence behind `cached` others."""
    return forward_pass(model, [Chunk(1, cached)] * sequences, precision=precision)


def forward_pass(
    model: ModelConfig, chunks: Sequence[Chunk], layout: Layout | None = None, *, precision: Precision = "bf16",
    cuda: bool = False, all_logits: bool = False,
) -> Program:  # fmt: skip
    """One pass over `chunks`; logits of the last token of each, or of all tokens.

    `layout` divides it over `tp` ranks, no other way. UserError for models whose cache is not of keys and values.
    """
    layout = layout or Layout()
    _check(model, layout)
    tokens = sum(chunk.tokens for chunk in chunks)
    whole = Shape(model, 1, tokens, precision, fused_rmsnorm=cuda, conventions=INFERENCE)
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
    rows = tokens if all_logits else len(chunks)
    layers.append(Layer(HEAD, "head", tuple(_kept_none(_head(shape, rows)))))
    parameters = stage_parameters(model, layout, 0)
    w = shape.matmul_bytes
    tensors = (
        Tensor("weights", sum(p.elements for p in parameters) * w),
        Tensor("cache", cache_bytes(shape.model, [c.cached + c.tokens for c in chunks], w), "keys and values"),
    )
    exchanges = _collectives(shape, rows) if layout.tp > 1 else ()
    return Program(
        layout, (Stage(tuple(layers), tuple(parameters)),), collectives=(tuple(exchanges),), tensors=(tensors,),
        model=model, recipe=Recipe(precision, cuda), shape=shape,
    )  # fmt: skip


def cache_bytes(model: ModelConfig, lengths: Iterable[int], element_bytes: float) -> float:
    """Keys and values of all layers for sequences of these lengths; a windowed layer keeps its window."""
    lengths = list(lengths)
    held = 0
    for layer in range(model.layers):
        window = model.sliding_window if model.is_windowed(layer) else None
        held += sum(length if window is None else min(window, length) for length in lengths)
    return 2 * model.key_value_size * held * element_bytes


def scores(chunk: Chunk, window: int | None) -> int:
    """Pairs of a new query and a key that it sees: cached + 1, cached + 2, ... each at most the window."""
    last = chunk.cached + chunk.tokens
    if window is None or last <= window:
        return chunk.tokens * chunk.cached + chunk.tokens * (chunk.tokens + 1) // 2
    short = max(0, window - chunk.cached)  # queries that see less than a window
    return short * chunk.cached + short * (short + 1) // 2 + (chunk.tokens - short) * window


def _check(model: ModelConfig, layout: Layout) -> None:
    what = "latent attention" if model.latent is not None else "experts" if model.moe is not None else None
    if what is not None:
        raise UserError(f"serving is planned for dense models with keys and values: {model.name} has {what}")
    if layout.accelerators != layout.tp:
        raise UserError(f"serving is planned over tp ranks, not in layout '{layout}': write for example tp=2")


def _block(shape: Shape, kind: str, chunks: Sequence[Chunk]) -> list[Operation]:
    """A block's forward pass with attention to the cache, which it first adds its keys and values to."""
    operations: list[Operation] = []
    for op in forward_of(shape, kind):
        if op.attention is None:
            operations.append(op)
        else:
            operations += _attention(op, shape_of(shape, kind), chunks)
    return _kept_none(operations)


def _attention(op: Operation, shape: Shape, chunks: Sequence[Chunk]) -> list[Operation]:
    """One call for sequences that have several new tokens and one for those with a single one."""
    model, w, window = shape.model, shape.matmul_bytes, shape.model.sliding_window
    heads = (model.heads, model.key_value_heads, model.size_of_head)
    new = 2 * shape.tokens * model.key_value_size
    operations = [
        Operation("cache", Kind.ELEMENTWISE, Phase.FORWARD, op.group, "copy", elements=new, bytes_moved=2 * new * w)
    ]
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
    result[-1] = replace(result[-1], frees_temporary_bytes=result[-1].frees_temporary_bytes + left)
    return result


def _collectives(shape: Shape, rows: int) -> list[Collective]:
    """Of tp ranks: the embedding's and each block's two sums of the residual stream, and the logits put together."""
    stream = shape.tokens * shape.model.hidden * shape.matmul_bytes
    calls = 1 + 2 * shape.model.layers
    logits = rows * shape.model.vocab * shape.matmul_bytes
    return [Collective("tp", "all_reduce", calls, calls * stream), Collective("tp", "all_gather", 1, logits)]
