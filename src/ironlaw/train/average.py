"""An exponential average of the weights (arXiv 1806.05594): smoother than the weights themselves, and often better."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from ironlaw.model.linear import local_part
from ironlaw.train.parallel.plugin import StepPlugin


class WeightAverage(StepPlugin):
    """fp32 copies of the parameters that follow them: average += (1 - decay) (weight - average) after each step.

    Of distributed tensors a rank averages the parts it holds: call it while weights are sharded, between two steps.
    `by_name`: checkpoints hold it by name, as they hold weights (`train/parallel/store.py`), not in `state_dict`.
    """

    name = "average"

    def __init__(self, model: nn.Module, decay: float, by_name: bool = False) -> None:
        self.parameters: list[Tensor] = [p for p in model.parameters() if p.requires_grad]
        self.model, self.decay, self.by_name = model, decay, by_name
        self.tensors = [parameter.detach().clone() for parameter in self.parameters]

    @torch.no_grad()
    def update(self) -> None:
        # Asked for anew each time: FSDP may put other storage behind a parameter.
        torch._foreach_lerp_(_parts(self.tensors), _parts(self.parameters), 1 - self.decay)

    @contextmanager
    def applied(self) -> Iterator[None]:
        """The model computes with the average; its own weights come back afterwards."""
        self._exchange()
        try:
            yield
        finally:
            self._exchange()

    @torch.no_grad()
    def _exchange(self) -> None:
        """By content: FSDP, DDP and compiled blocks keep hold of their own tensors."""
        for mine, weight in zip(_parts(self.tensors), _parts(self.parameters), strict=True):
            kept = weight.clone()
            weight.copy_(mine)
            mine.copy_(kept)

    @torch.no_grad()
    def start_over(self) -> None:
        """From the weights as they are now."""
        for mine, parameter in zip(self.tensors, self.parameters, strict=True):
            mine.copy_(parameter)

    # -- checkpoints of many ranks have it by name, as they have weights -------------------------------------

    def state_dict(self) -> dict[str, Any]:
        return {} if self.by_name else {"tensors": list(self.tensors)}

    def load_state_dict(self, state_dict: dict[str, Any], /) -> None:
        """Of many ranks' checkpoint the tensors have been read by name already."""
        if self.by_name:
            return
        for mine, saved in zip(self.tensors, state_dict.get("tensors", self.tensors), strict=True):
            mine.copy_(saved)

    def named(self) -> dict[str, Tensor]:
        """As those have them."""
        from ironlaw.train.parallel.names import named_like

        return dict(named_like(self.model, self.name, dict(zip(map(id, self.parameters), self.tensors, strict=True))))

    def saved(self, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
        from ironlaw.train.parallel.names import COPY

        return tensors | {name: tensor.clone() for name, tensor in self.named().items() if not name.endswith(COPY)}

    def wanted(self, tensors: dict[str, Tensor], known: Mapping[str, torch.Size]) -> dict[str, Tensor]:
        there = any(name.startswith(f"{self.name}/") for name in known)
        return tensors | (self.named() if there else {})


def _parts(tensors: list[Tensor]) -> list[Tensor]:
    return [local_part(tensor).detach() for tensor in tensors]
