"""Masks of attention that keep it from its fused kernel, or say what `is_causal` says without one."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from ironlaw.observe.trials import share_saved

HIDDEN = -1e4  # added to a score that no token should see; half precision reaches -65,504


def hides_nothing_else(mask: Tensor) -> bool:
    """Whether a mask of attention hides from every token those after it, and nothing else."""
    visible, hidden = (mask, ~mask) if mask.dtype is torch.bool else (mask == 0, mask < HIDDEN)
    causal = torch.ones(mask.shape[-2:], dtype=torch.bool).tril()
    square = mask.shape[-2] == mask.shape[-1] > 1
    return square and bool((visible == causal).all() and (hidden != causal).all())


def mask_saves(heads: Sequence[Tensor], mask: Tensor, **instead: Any) -> float:
    """Share of the attention's time, forward and backward, that another way to say the mask saves.

    `heads`: queries, keys and values (B, H, S, D).
    """
    leaves = q, k, v = [torch.randn_like(each).requires_grad_() for each in heads]

    def both_ways(**how: Any) -> None:
        torch.autograd.grad(torch.nn.functional.scaled_dot_product_attention(q, k, v, **how).sum(), leaves)

    return share_saved(partial(both_ways, attn_mask=mask.detach()), partial(both_ways, **instead))


class OddMasks(TorchFunctionMode):
    """Finds attention that a mask of three dimensions keeps from its fused kernel: underneath it is several calls."""

    running = False
    seen: tuple[Tensor, ...] = ()  # queries, keys, values and mask of the latest

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is torch.nn.functional.scaled_dot_product_attention:
            self._look(*args, **kwargs)
        try:
            return func(*args, **kwargs)
        finally:
            self.running = False

    def _look(
        self, query: Any, key: Any, value: Any, attn_mask: Any = None, dropout_p: float = 0.0, *_: Any, **__: Any
    ) -> None:
        heads = (query, key, value)
        alike = all(isinstance(t, Tensor) and t.dim() == 4 and t.shape[1] == query.shape[1] for t in heads)
        is_odd = isinstance(attn_mask, Tensor) and attn_mask.dim() == 3 and not attn_mask.requires_grad
        if alike and is_odd and not dropout_p:
            self.running, self.seen = True, (*heads, attn_mask)
