"""Describes what the optimizers of a loop do with which tensors, for the plan beside it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any

import torch

from ironlaw.observe.measured import tree_bytes
from ironlaw.workload.optimizers import OptimizerName
from ironlaw.workload.updates import EQUIVALENTS, Update


def updates_of(optimizers: Sequence[torch.optim.Optimizer]) -> list[Update]:
    """Returns one entry per group of trained parameters; call it after a step, when the states exist."""
    found = [_update(optimizer, group) for optimizer in optimizers for group in optimizer.param_groups]
    return [update for update in found if update is not None]


def _update(optimizer: torch.optim.Optimizer, group: dict[str, Any]) -> Update | None:
    trained = [torch.view_as_real(p) if p.is_complex() else p for p in group["params"] if p.requires_grad]
    if not trained:
        return None
    known = next((EQUIVALENTS[c.__name__] for c in type(optimizer).__mro__ if c.__name__ in EQUIVALENTS), None)
    like: OptimizerName | None = "momentum" if known == "sgd" and group.get("momentum") else known
    extra = bool(group.get("amsgrad")) + bool(group.get("centered")) + (like == "rmsprop" and group["momentum"] > 0)
    foreach = group.get("foreach")
    if foreach is None:  # PyTorch's own choice; not every optimizer has one
        foreach = "foreach" in group and trained[0].is_cuda
    return Update(
        type(optimizer).__name__, like, tuple(Counter(tuple(p.shape) for p in trained).items()),
        trained[0].element_size(), bool(group.get("fused")), bool(group.get("weight_decay")), int(extra),
        tree_bytes([optimizer.state.get(p) for p in group["params"] if p.requires_grad]), bool(foreach),
    )  # fmt: skip
