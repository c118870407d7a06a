"""Builds the optimizer from `[optimizer]`: PyTorch's, a library's or GaLore, with parameter groups; and learning-rate
schedules."""

from __future__ import annotations

import logging
import math
import re
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from ironlaw.config import RunConfig
from ironlaw.errors import reported
from ironlaw.model.parameters import Parameter
from ironlaw.train.host_optimizer import Combined, HostOptimizer
from ironlaw.train.offload import TransferStream
from ironlaw.workload.optimizers import MATRIX_OPTIMIZERS, Assignment, OptimizerConfig, assign, check_patterns


def build_optimizer(
    model: nn.Module, config: OptimizerConfig, *, stream: TransferStream | None = None,
    whole: Sequence[Parameter] | None = None,
) -> torch.optim.Optimizer:  # fmt: skip
    """Return the optimizer of `model`. `set_learning_rate` multiplies the rate of each group by its `lr_scale`.

    `stream`: keep the state and update on the host, with this transfer stream (`train/host_optimizer.py`). `whole`: the
    parameters before they were sharded. Fused updates need tensors of one device mesh, so each mesh has its own groups.
    """
    whole = described(model) if whole is None else whole
    check_patterns([parameter.name for parameter in whole], config)
    assigned = {parameter.name: to for parameter, to in zip(whole, assign(whole, config), strict=True)}
    groups: dict[tuple[Assignment, Any], list[nn.Parameter]] = {}
    for name, tensor in trained_parameters(model):
        name = re.sub(r"\.qkv\.(query|key|value)\.", ".qkv.", name)  # tensor parallelism splits qkv
        to = assigned[name if name in assigned else "embedding.weight"]  # copy of a tied embedding, on the last stage
        groups.setdefault((to, getattr(tensor, "device_mesh", None)), []).append(tensor)

    def groups_of(matrix: bool) -> list[dict[str, Any]]:
        return [
            {"params": some, "weight_decay": to.weight_decay, "lr_scale": to.lr_scale, "lr": config.lr * to.lr_scale}
            for (to, _), some in groups.items()
            if to.matrix is matrix
        ]

    if stream is not None:
        return HostOptimizer(groups_of(False), lambda some: _build(config.name, some, config), stream)
    if config.name not in MATRIX_OPTIMIZERS:
        return _build(config.name, groups_of(False), config)
    return Combined([_build(config.name, groups_of(True), config), _build("adamw", groups_of(False), config)])


def grouped(parameters: Sequence[Parameter], config: OptimizerConfig) -> dict[Assignment, list[str]]:
    """Return the parameter names in each group of a single process's optimizer."""
    groups: dict[Assignment, list[str]] = {}
    for parameter, to in zip(parameters, assign(parameters, config), strict=True):
        groups.setdefault(to, []).append(parameter.name)
    return groups


def described(model: nn.Module) -> list[Parameter]:
    """Return the trained tensors of a module as `Parameter` descriptions."""
    embeddings = {id(m.weight) for m in model.modules() if isinstance(m, nn.Embedding)}
    return [Parameter(name, tuple(p.shape), id(p) in embeddings) for name, p in trained_parameters(model)]


def trained_parameters(model: nn.Module) -> list[tuple[str, nn.Parameter]]:
    """Return the parameters that require gradients: all, or those of the adapters, if any."""
    return [(name, parameter) for name, parameter in model.named_parameters() if parameter.requires_grad]


def set_learning_rate(optimizer: torch.optim.Optimizer, rate: float) -> None:
    for group in optimizer.param_groups:
        group["lr"] = rate * group["lr_scale"]


def _build(name: str, groups: list[dict[str, Any]], config: OptimizerConfig) -> torch.optim.Optimizer:
    betas, lr, eps = (config.beta1, config.beta2), config.lr, config.eps
    # Fused where available: one kernel over all parameters, measured 3 times faster than the loop on CPU and without
    # temporaries. PyTorch has no fused SGD for distributed tensors.
    fused = None if any(hasattr(p, "to_local") for group in groups for p in group["params"]) else True
    match name:
        case "sgd":
            return torch.optim.SGD(groups, lr=lr, fused=fused)
        case "momentum":
            momentum = 0.9 if config.momentum is None else config.momentum
            return torch.optim.SGD(groups, lr=lr, momentum=momentum, fused=fused)
        case "rmsprop":
            return torch.optim.RMSprop(groups, lr=lr, alpha=config.beta2, eps=eps)
        case "adam":
            return torch.optim.Adam(groups, lr=lr, betas=betas, eps=eps, fused=True)
        case "adafactor":
            return torch.optim.Adafactor(groups, lr=lr)
        case "adam8bit" | "paged_adamw" | "paged_adam8bit":
            return getattr(_bitsandbytes(name), BITSANDBYTES[name])(groups, lr=lr, betas=betas, eps=eps)
        case "galore":
            every, scale = config.projection_steps, config.projection_scale
            own = {"rank": config.rank, "projection_steps": every, "scale": scale}
            return GaLore(groups, {"lr": lr, "betas": betas, "eps": eps, "weight_decay": 0.0} | own)
        case "muon":
            # Scaled to AdamW's update size, so that both can share a learning rate (arXiv 2502.16982).
            momentum = 0.95 if config.momentum is None else config.momentum
            return torch.optim.Muon(groups, lr=lr, momentum=momentum, adjust_lr_fn="match_rms_adamw")
        case _:
            return torch.optim.AdamW(groups, lr=lr, betas=betas, eps=eps, fused=True)


BITSANDBYTES = {"adam8bit": "AdamW8bit", "paged_adamw": "PagedAdamW", "paged_adam8bit": "PagedAdamW8bit"}


def check_library(name: str) -> None:
    """Raise UserError if the optimizer needs a library that is not installed."""
    if name in BITSANDBYTES:
        _bitsandbytes(name)


def _bitsandbytes(name: str) -> Any:
    logging.getLogger("bitsandbytes").setLevel(logging.ERROR)  # suppress warnings about unused kernels
    with reported(f"optimizer.name = {name!r} needs bitsandbytes: pip install 'ironlaw[quant]'", ImportError):
        import bitsandbytes.optim
    return bitsandbytes.optim


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


def peak_rate(config: RunConfig) -> float:
    """`optimizer.lr` scaled with the batch: linearly (arXiv 1706.02677) or by its root (arXiv 2205.10287 for Adam)."""
    ratio = config.train.global_batch / config.schedule.reference_batch
    factors = {"none": 1.0, "linear": ratio, "sqrt": math.sqrt(ratio)}
    return config.optimizer.lr * factors[config.schedule.lr_scaling]


def learning_rate(config: RunConfig, step: int) -> float:
    """Return the learning rate of `step`, counted from 0: linear warmup, then the schedule.

    Warmup starts at peak / warmup rather than 0, so that the first batch is not wasted.
    """
    peak, warmup = peak_rate(config), config.warmup_steps
    if step < warmup:
        return peak * (step + 1) / warmup
    span = max(1, config.train.steps - warmup)
    return _after_warmup(config, peak, step - warmup, min(1.0, (step - warmup) / span))


def _after_warmup(config: RunConfig, peak: float, steps: int, progress: float) -> float:
    """Return the rate `steps` after the warmup; `progress` (0 to 1) is their fraction of all steps after it."""
    schedule = config.schedule
    floor = peak * schedule.min_lr_fraction
    match schedule.kind:
        case "cosine":
            return floor + (peak - floor) * 0.5 * (1 + math.cos(math.pi * progress))
        case "linear":
            return peak + (floor - peak) * progress
        case "exponential":
            return peak * schedule.min_lr_fraction**progress
        case "inverse_sqrt":
            start = max(1, config.warmup_steps)
            return max(floor, peak * math.sqrt(start / (start + steps)))
        case "step":
            return float(max(floor, peak * schedule.step_factor ** (steps // schedule.step_every)))
        case "wsd":
            left = (1 - progress) / schedule.decay_fraction
            return floor + (peak - floor) * min(1.0, left)
        case _:
            return peak
