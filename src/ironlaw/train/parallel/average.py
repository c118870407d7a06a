"""The average of the weights on many ranks: each averages the parts it holds."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from ironlaw.train.average import WeightAverage


class SharedAverage(WeightAverage):
    """Call it while weights are sharded: between two steps, and outside of evaluation."""

    @torch.no_grad()
    def update(self) -> None:
        # Asked for anew each time: FSDP may put other storage behind a parameter.
        torch._foreach_lerp_(_parts(self.tensors), _parts(self.parameters), 1 - self.decay)

    @torch.no_grad()
    def _exchange(self) -> None:
        """By content: FSDP and DDP keep hold of their own tensors."""
        for mine, weight in zip(_parts(self.tensors), _parts(self.parameters), strict=True):
            kept = weight.clone()
            weight.copy_(mine)
            mine.copy_(kept)

    def state_dict(self) -> dict[str, Any]:
        return {}  # written with the weights and read with them, by name

    def load_state_dict(self, state_dict: dict[str, Any], /) -> None:
        pass


def _parts(tensors: list[Tensor]) -> list[Tensor]:
    return [(tensor.to_local() if isinstance(tensor, DTensor) else tensor).detach() for tensor in tensors]
