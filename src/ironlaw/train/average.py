"""The exponential moving average of the weights (arXiv 1806.05594), which is smoother and often evaluates better."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from ironlaw.model.linear import local_part


class WeightAverage:
    """fp32 moving averages of the parameters: average += (1 - decay) (weight - average) after each step.

    For distributed tensors, each rank averages the parts it holds: update between two steps, while weights are sharded.
    Checkpoints of many ranks hold the averages by name, like weights (`train/parallel/materialize.py`).
    """

    def __init__(self, model: nn.Module, decay: float) -> None:
        self.parameters: list[Tensor] = [p for p in model.parameters() if p.requires_grad]
        self.decay = decay
        self.tensors = [parameter.detach().clone() for parameter in self.parameters]

    @torch.no_grad()
    def update(self) -> None:
        # The local parts are fetched each time: FSDP may replace the storage of a parameter.
        torch._foreach_lerp_(_parts(self.tensors), _parts(self.parameters), 1 - self.decay)

    def applied(self) -> AbstractContextManager[None]:
        """Return the context in which the model uses the averages; its own weights are restored at the end."""
        return swapped(self.tensors, self.parameters)

    @torch.no_grad()
    def reset(self) -> None:
        """Reset the averages to the current weights."""
        for mine, parameter in zip(self.tensors, self.parameters, strict=True):
            mine.copy_(parameter)

    def state_dict(self) -> dict[str, Any]:
        return {"tensors": list(self.tensors)}

    def load_state_dict(self, state_dict: dict[str, Any], /) -> None:
        for mine, saved in zip(self.tensors, state_dict["tensors"], strict=True):
            mine.copy_(saved)

    def by_parameter(self) -> dict[int, Tensor]:
        """Return the averages by the ids of their parameters."""
        return dict(zip(map(id, self.parameters), self.tensors, strict=True))


@torch.no_grad()
def swap(tensors: Sequence[Tensor], others: Sequence[Tensor]) -> None:
    """Swap the contents: FSDP, DDP and compiled blocks keep references to their tensors."""
    for mine, other in zip(_parts(tensors), _parts(others), strict=True):
        kept = other.clone()
        other.copy_(mine)
        mine.copy_(kept)


@contextmanager
def swapped(tensors: Sequence[Tensor], others: Sequence[Tensor]) -> Iterator[None]:
    """Context in which the contents are swapped."""
    swap(tensors, others)
    try:
        yield
    finally:
        swap(tensors, others)


def _parts(tensors: Sequence[Tensor]) -> list[Tensor]:
    return [local_part(tensor).detach() for tensor in tensors]
