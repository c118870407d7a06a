"""GaLore (arXiv 2403.03507): Adam on a low-rank projection of each matrix's gradient.

The state is the projection and two moments of the projected gradient, instead of two moments of the full gradient. The
projection consists of the gradient's leading singular vectors on its shorter side, and is recomputed periodically.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor


class GaLore(torch.optim.Optimizer):
    """GaLore with decoupled weight decay as in AdamW, for matrices with both sides longer than `rank`. Each group has
    lr, betas, eps, weight_decay, rank, projection_steps and scale."""

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]
        assert closure is None
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    self._update(parameter, group)

    def _update(self, parameter: Tensor, group: dict[str, Any]) -> None:
        gradient, state = parameter.grad, self.state[parameter]
        assert gradient is not None
        wide = gradient.shape[0] <= gradient.shape[1]
        if not state:
            state["step"] = torch.zeros((), dtype=torch.float32)
        # The step count is on the host, so that reading it needs no synchronization.
        if int(state["step"]) % group["projection_steps"] == 0:
            state["projection"] = leading_vectors(gradient, group["rank"], left=wide)
        state["step"] += 1
        projection = state["projection"]
        low = projection.T @ gradient if wide else gradient @ projection.T  # (rank, n) or (m, rank)
        if "exp_avg" not in state:
            state["exp_avg"], state["exp_avg_sq"] = torch.zeros_like(low), torch.zeros_like(low)
        (beta1, beta2), step = group["betas"], float(state["step"])
        state["exp_avg"].lerp_(low, 1 - beta1)
        state["exp_avg_sq"].mul_(beta2).addcmul_(low, low, value=1 - beta2)
        denominator = (state["exp_avg_sq"] / (1 - beta2**step)).sqrt_().add_(group["eps"])
        torch.div(state["exp_avg"], denominator, out=low)
        update = projection @ low if wide else low @ projection
        parameter.mul_(1 - group["lr"] * group["weight_decay"])
        parameter.add_(update, alpha=-group["lr"] * group["scale"] / (1 - beta1**step))


def leading_vectors(gradient: Tensor, rank: int, *, left: bool) -> Tensor:
    """Return orthonormal vectors: (m, rank) that span the row space if `left`, else (rank, n) for the columns."""
    u, _, v = torch.linalg.svd(gradient.float(), full_matrices=False)
    chosen = u[:, :rank] if left else v[:rank]
    return chosen.to(gradient.dtype).contiguous().clone()
