"""What ranks that share a layer send each other for one micro-batch: bytes of buffers, whatever the links.

Context parallel attention, with T tokens on a rank, Q and KV the widths of its query and key/value heads (divided by tp
already), w bytes each, lets the queries of a rank see all keys in one of three ways:

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

from typing import NamedTuple

import numpy as np

from ironlaw.model.config import ModelConfig
from ironlaw.model.moe_config import MoEConfig
from ironlaw.workload.sizes import Size, divided, larger


class RankMessage(NamedTuple):
    """`calls` of one kind of collective, each with a buffer of `bytes`."""

    kind: str
    calls: Size
    bytes: Size


def head_widths(model: ModelConfig, tp: Size, padded: bool = False) -> tuple[Size, Size, Size]:
    """Of a rank's heads: queries, keys and values together, what attention gives. Padded: values as wide as keys."""
    value = model.size_of_head if padded else model.size_of_value
    key_value = larger(divided(model.key_value_heads, tp), 1) * (model.size_of_head + value)
    return divided(model.query_size, tp), key_value, divided(model.mixed_size, tp)


def context_messages(
    model: ModelConfig, tokens: Size, tp: Size, cp: Size, width: Size, padded: bool = False
) -> dict[str, list[RankMessage]]:
    """By way of context parallel attention, one exchange of one layer, forward. `tokens`: of one rank."""
    query, key_value, mixed = head_widths(model, tp, padded)
    block = tokens * key_value * width
    swapped = tokens * (query + key_value) * width
    return {
        "ring": [RankMessage("send_recv", cp - 1, block)],
        "all_gather": [RankMessage("all_gather", 1, block * cp)],
        "all_to_all": [RankMessage("all_to_all", 1, swapped), RankMessage("all_to_all", 1, tokens * mixed * width)],
    }


def context_buffers(model: ModelConfig, tokens: Size, tp: Size, cp: Size) -> dict[str, Size]:
    """Elements on the way at the widest moment of one layer's backward pass: keys, values and their gradients."""
    query, key_value, mixed = head_widths(model, tp)
    block = tokens * key_value
    # Ring: a block and its gradients, received while others are at work. All-to-all: one side of every exchange.
    return {"ring": 4 * block, "all_gather": 2 * block * cp, "all_to_all": tokens * (query + mixed) + block}


def places_of_a_token(moe: MoEConfig, places: Size) -> Size:
    """Of so many equal parts of a layer's experts, how many a token's choices fall into: the mean over even choices.

    Where they come from some groups of experts only, the parts are those of these groups.
    """
    experts, chosen, groups = (
        np.broadcast_to(n, places.shape) for n in (moe.experts, moe.experts_per_token, moe.groups)
    )
    open_groups = groups if moe.groups_per_token is None else moe.groups_per_token
    held = np.minimum(places, groups)  # parts of whole groups
    of_groups = held * (1 - _missed(groups, groups / held, np.broadcast_to(open_groups, places.shape)))
    open_share = np.where(open_groups < groups, of_groups / held, 1.0)
    pool, among = experts * open_share, np.maximum(places * open_share, 1.0)
    return np.asarray(among * (1 - _missed(pool, pool / among, chosen)))


def _missed(pool: Size, part: Size, draws: Size) -> Size:
    """Chance that none of `draws` different ones out of `pool` is among `part` of them."""
    chance = np.ones(len(pool))
    for drawn in range(int(draws.max(initial=0))):
        left = np.maximum(pool - part - drawn, 0.0) / np.maximum(pool - drawn, 1.0)
        chance = np.where(drawn < draws, chance * left, chance)
    return chance
