"""An exponential average of the weights (arXiv 1806.05594): smoother than the weights themselves, and often better."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn


class WeightAverage:
    """fp32 copies of the parameters that follow them: average += (1 - decay) (weight - average) after each step."""

    def __init__(self, model: nn.Module, decay: float) -> None:
        self.parameters: list[Tensor] = list(model.parameters())
        self.decay = decay
        self.tensors = [parameter.detach().clone() for parameter in self.parameters]

    @torch.no_grad()
    def update(self) -> None:
        torch._foreach_lerp_(self.tensors, self.parameters, 1 - self.decay)

    @contextmanager
    def applied(self) -> Iterator[None]:
        """The model computes with the average; its own weights come back afterwards."""
        self._exchange()
        try:
            yield
        finally:
            self._exchange()

    def _exchange(self) -> None:
        for index, parameter in enumerate(self.parameters):
            parameter.data, self.tensors[index] = self.tensors[index], parameter.data

    def bytes(self) -> int:
        return sum(tensor.numel() * tensor.element_size() for tensor in self.tensors)

    def state_dict(self) -> dict[str, Any]:
        return {"tensors": list(self.tensors)}

    def load_state_dict(self, state_dict: dict[str, Any], /) -> None:
        for mine, saved in zip(self.tensors, state_dict["tensors"], strict=True):
            mine.copy_(saved)
