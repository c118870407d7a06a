"""Messages between ranks that share a layer, for one micro-batch: bytes of buffers, independent of the links.

With T tokens on a rank, Q and KV the widths of its query and key/value heads (already divided by tp) and w bytes per
element, context parallel attention lets a rank's queries attend to all keys in one of three ways:

    ring         each key/value block visits all ranks, cp - 1 messages of 2 T KV w; the backward pass sends the blocks
                 and their gradients. Overlaps the attention of the previous block (arXiv 2310.01889). A rank has a
                 chunk from each end of the sequence, so that all compute equally much under a causal mask (arXiv
                 2406.16047; `p2p` of Transformer Engine 2.20, which has no sliding window here)
    all_gather   keys and values are gathered first, 2 T KV w from every rank, and again for the backward pass, whose
                 gradients are reduce-scattered; not overlapped (Llama 3: arXiv 2407.21783, section 3.3.2)
    all_to_all   ranks change from parts of the sequence to parts of the heads: T (Q + 2 KV) w before attention, T Q w
                 after it, the same in the backward pass; not overlapped (DeepSpeed-Ulysses, arXiv 2309.14509). Query
                 and key/value heads must be divisible by cp x tp

In the first two, a rank's traffic grows with cp - 1, as T KV per message does not shrink with cp; in the last, it falls
with cp as T (Q + KV), which beats longer rings unless key/value heads are few.
"""

from __future__ import annotations

from typing import NamedTuple

from ironlaw.model.config import ModelConfig
from ironlaw.model.dimensions import MoEConfig
from ironlaw.workload.sizes import Size, divided, larger


class RankMessage(NamedTuple):
    """`calls` of one kind of collective, with a buffer of `bytes` each."""

    kind: str
    calls: Size
    bytes: Size


def head_widths(model: ModelConfig, tp: Size, padded: bool = False) -> tuple[Size, Size, Size]:
    """Return the widths of a rank's queries, keys plus values, and output. `padded`: values are as wide as keys."""
    value = model.size_of_head if padded else model.size_of_value
    key_value = larger(divided(model.key_value_heads, tp), 1) * (model.size_of_head + value)
    return divided(model.query_size, tp), key_value, divided(model.mixed_size, tp)


def context_messages(
    model: ModelConfig, tokens: Size, tp: Size, cp: Size, width: Size, padded: bool = False
) -> dict[str, list[RankMessage]]:
    """Return one layer's forward messages for each kind of context parallelism. `tokens` are those of one rank."""
    query, key_value, mixed = head_widths(model, tp, padded)
    block = tokens * key_value * width
    swapped = tokens * (query + key_value) * width
    return {
        "ring": [RankMessage("send_recv", cp - 1, block)],
        "all_gather": [RankMessage("all_gather", 1, block * cp)],
        "all_to_all": [RankMessage("all_to_all", 1, swapped), RankMessage("all_to_all", 1, tokens * mixed * width)],
    }


def context_buffers(model: ModelConfig, tokens: Size, tp: Size, cp: Size) -> dict[str, Size]:
    """Return the peak elements of communication buffers in one layer's backward pass: keys, values and gradients."""
    query, key_value, mixed = head_widths(model, tp)
    block = tokens * key_value
    # Ring: a block and its gradients are received while another is computed. All-to-all: one side of every exchange.
    return {"ring": 4 * block, "all_gather": 2 * block * cp, "all_to_all": tokens * (query + mixed) + block}


def expert_parts_per_token(moe: MoEConfig, places: Size) -> Size:
    """Return the mean number of `places` (equal parts of a layer's experts) hit by a token's choices, if even.

    If a token chooses from a few groups of experts only, just the places within these groups count.
    """
    import numpy as np

    experts, chosen, groups = (
        np.broadcast_to(n, places.shape) for n in (moe.experts, moe.experts_per_token, moe.groups)
    )
    open_groups = groups if moe.groups_per_token is None else moe.groups_per_token
    held = np.minimum(places, groups)  # parts of whole groups
    of_groups = held * (1 - _miss_probability(groups, groups / held, np.broadcast_to(open_groups, places.shape)))
    open_share = np.where(open_groups < groups, of_groups / held, 1.0)
    pool, among = experts * open_share, np.maximum(places * open_share, 1.0)
    return np.asarray(among * (1 - _miss_probability(pool, pool / among, chosen)))


def _miss_probability(pool: Size, part: Size, draws: Size) -> Size:
    """Return the probability that `draws` draws without replacement from `pool` all miss a given `part` of it."""
    import numpy as np

    chance = np.ones(len(pool))
    for drawn in range(int(draws.max(initial=0))):
        left = np.maximum(pool - part - drawn, 0.0) / np.maximum(pool - drawn, 1.0)
        chance = np.where(drawn < draws, chance * left, chance)
    return chance
