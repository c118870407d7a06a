"""Several optimizers as one."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import chain
from typing import Any

import torch


class Combined(torch.optim.Optimizer):
    """Two optimizers that share a model, used like one: matrices with one, the rest with the other."""

    def __init__(self, parts: Iterable[torch.optim.Optimizer]) -> None:
        self.parts = tuple(parts)

    @property
    def param_groups(self) -> list[dict[str, Any]]:  # type: ignore[override]
        return list(chain.from_iterable(part.param_groups for part in self.parts))

    @property
    def state(self) -> dict[Any, Any]:  # type: ignore[override]
        return {parameter: state for part in self.parts for parameter, state in part.state.items()}

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        assert closure is None
        for part in self.parts:
            part.step()

    def zero_grad(self, set_to_none: bool = True) -> None:
        for part in self.parts:
            part.zero_grad(set_to_none=set_to_none)

    def state_dict(self) -> dict[str, Any]:
        return {"parts": [part.state_dict() for part in self.parts]}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        for part, saved in zip(self.parts, state["parts"], strict=True):
            part.load_state_dict(saved)
