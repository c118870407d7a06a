"""Context parallel attention: three ways to let the queries of a rank see all keys, and what each one costs.

With T tokens on a rank, Q and KV the widths of its query and key/value heads (divided by tp already), w bytes each:

    ring         each key/value block passes all ranks, cp - 1 messages of 2 T KV w; the backward pass sends the blocks
                 and their gradients. Runs beside the attention of the block before (arXiv 2310.01889), as far as that
                 lasts. A rank has a chunk from each end of the sequence, so that under a causal mask all compute the
                 same (arXiv 2406.16047; `p2p` of Transformer Engine 2.20, which has no sliding window here)
    all_gather   keys and values are gathered first, 2 T KV w from every rank, and gathered again for the backward pass,
                 whose gradients are scattered; nothing hides it (Llama 3: arXiv 2407.21783, section 3.3.2)
    all_to_all   ranks change from parts of the sequence to parts of the heads: T (Q + 2 KV) w before attention, T Q w
                 after it, the same in the backward pass; nothing hides it (DeepSpeed-Ulysses, arXiv 2309.14509). Query
                 and key/value heads must divide by cp x tp

T KV of the first two does not shrink with cp, what a rank sends in all grows with cp - 1; T (Q + KV) of the last falls
with cp, so that it gains over longer rings unless key/value heads are few.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from ironlaw.plan.cluster.candidates import Array, Candidates
from ironlaw.plan.cluster.distinct import collective
from ironlaw.plan.cluster.layout_table import code
from ironlaw.plan.engines.engine import Engine

if TYPE_CHECKING:
    from ironlaw.plan.cluster.system import System

SAYS = {
    "ring": "keys and values pass all ranks beside attention (ring, arXiv 2310.01889)",
    "all_gather": "keys and values are gathered before attention (all-gather, arXiv 2407.21783)",
    "all_to_all": "ranks exchange parts of the sequence for parts of the heads (all-to-all, arXiv 2309.14509)",
}


def default_kind(engine: Engine, windowed: bool) -> str:
    """The engine's own kind; one that can see a sliding window where the model has one."""
    usable = [kind for kind in engine.cp_kinds if kind != "ring" or not windowed]
    return usable[0] if usable else "all_gather"


def kinds(candidates: Candidates, engine: Engine) -> Array:
    """Of every candidate, a code of `cp_kind`."""
    plain, windowed = (code("cp_kind", default_kind(engine, w)) for w in (False, True))
    return np.where(
        candidates.cp_kind > 0, candidates.cp_kind, windowed if candidates.model.sliding_window is not None else plain
    )


def _widths(candidates: Candidates) -> tuple[Array, Array, Array]:
    """Of a rank's heads: queries, keys and values together, what attention gives."""
    model, tp = candidates.model, candidates.tp
    heads = np.maximum(model.key_value_heads / tp, 1.0)
    return model.query_size / tp, heads * (model.size_of_head + model.size_of_value), model.mixed_size / tp


def exchange_seconds(candidates: Candidates, system: System, kind: Array) -> Array:
    """One exchange of one layer and micro-batch, forward; 0 without context parallelism."""
    if not (candidates.cp > 1).any():
        return np.zeros(len(candidates))
    width, cp = system.engine.element_bytes, candidates.cp
    query, key_value, mixed = _widths(candidates)
    inside = np.clip(float(system.fabric.island_ranks) // candidates.tp, 1.0, cp)

    block = candidates.tokens * key_value * width
    two = np.full(len(candidates), 2.0)
    # A ring across islands goes at the pace of its slowest link.
    ring = (cp - 1) * collective("send_recv", block, two, np.where(inside >= cp, 2.0, 1.0), system)
    gather = collective("all_gather", block * cp, cp, inside, system)
    swap = collective("all_to_all", candidates.tokens * (query + key_value) * width, cp, inside, system)
    swap = swap + collective("all_to_all", candidates.tokens * mixed * width, cp, inside, system)
    found = np.where(
        kind == code("cp_kind", "ring"), ring, np.where(kind == code("cp_kind", "all_gather"), gather, swap)
    )
    return np.where(cp > 1, found, 0.0)


def cp_exchanges(kind: Array, passes: Array) -> Array:
    """How many of them a layer and micro-batch make; `passes`: forward, backward and recomputed ones."""
    return np.where(kind == code("cp_kind", "all_to_all"), passes, passes + 1)


def exposed(seconds: Array, candidates: Candidates, kind: Array, attention: Array, hidden: float) -> Array:
    """Of all exchanges of a layer, what attention does not hide. `attention`: seconds of all its passes."""
    beside = hidden * np.minimum(seconds, attention * (candidates.cp - 1) / candidates.cp)
    return np.where(kind == code("cp_kind", "ring"), seconds - beside, seconds)


def buffer_bytes(candidates: Candidates, engine: Engine) -> Array:
    """At its widest, in the backward pass of one layer: keys, values and their gradients on the way."""
    if not (candidates.cp > 1).any():
        return np.zeros(len(candidates))
    kind = kinds(candidates, engine)
    query, key_value, mixed = _widths(candidates)
    block = candidates.tokens * key_value
    # Ring: a block and its gradients, received while others are at work. All-to-all: one side of every exchange.
    elements = np.where(kind == code("cp_kind", "all_gather"), 2 * block * candidates.cp, 4 * block)
    elements = np.where(kind == code("cp_kind", "all_to_all"), candidates.tokens * (query + mixed) + block, elements)
    return np.where(candidates.cp > 1, elements * engine.element_bytes, 0.0)
