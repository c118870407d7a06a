"""Plug-ins of a step, which keep state of their own: the base class, and the exponential moving average of the weights
(arXiv 1806.05594), which is smoother and often evaluates better."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn

from ironlaw.model.linear import local_part


class StepPlugin:
    """An extension of a step, to which the step refers by this interface only. Its state is in checkpoints under
    `name`, and on many ranks its tensors are saved rank by rank under its own names (`parallel/store.py`)."""

    name: str

    def begin(self, part: nn.Module, tokens: Tensor) -> None:
        """Called before the first step with the callable model and the tokens of a micro-batch."""

    def after(self, step: int) -> None:
        """Called on every rank after `step` steps."""

    def evaluating(self) -> AbstractContextManager[None]:
        """Return the context for evaluations and for reading weights."""
        return nullcontext()

    def held(self) -> Any:
        """Return the tensors, nested in any way, that it holds between steps."""
        return ()

    # -- checkpoints -----------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        return {}

    def load_state_dict(self, state: dict[str, Any], /) -> None:
        """Load small values. Tensors have already been read by name."""

    def tensors_to_save(self, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
        """Return copies of the tensors to write for `tensors` (weights and optimizer state), and of its own."""
        return tensors

    def tensors_to_read(self, tensors: dict[str, Tensor], known: Mapping[str, torch.Size]) -> dict[str, Tensor]:
        """Return the tensors into which a checkpoint with the names `known` is read, in place of `tensors`."""
        return tensors

    def after_read(self) -> None:
        """Called when the wanted tensors have been read."""


class WeightAverage(StepPlugin):
    """fp32 moving averages of the parameters: average += (1 - decay) (weight - average) after each step.

    For distributed tensors, each rank averages the parts it holds: update between two steps, while weights are sharded.
    `by_name`: checkpoints hold the averages by name, like weights (`train/parallel/store.py`), not in `state_dict`.
    """

    name = "average"

    def __init__(self, model: nn.Module, decay: float, by_name: bool = False) -> None:
        self.parameters: list[Tensor] = [p for p in model.parameters() if p.requires_grad]
        self.model, self.decay, self.by_name = model, decay, by_name
        self.tensors = [parameter.detach().clone() for parameter in self.parameters]

    @torch.no_grad()
    def update(self) -> None:
        # The local parts are fetched each time: FSDP may replace the storage of a parameter.
        torch._foreach_lerp_(_parts(self.tensors), _parts(self.parameters), 1 - self.decay)

    @contextmanager
    def applied(self) -> Iterator[None]:
        """Context in which the model uses the averages; its own weights are restored at the end."""
        self.swap()
        try:
            yield
        finally:
            self.swap()

    @torch.no_grad()
    def swap(self) -> None:
        """Swap the contents: FSDP, DDP and compiled blocks keep references to their tensors."""
        for mine, weight in zip(_parts(self.tensors), _parts(self.parameters), strict=True):
            kept = weight.clone()
            weight.copy_(mine)
            mine.copy_(kept)

    @torch.no_grad()
    def reset(self) -> None:
        """Reset the averages to the current weights."""
        for mine, parameter in zip(self.tensors, self.parameters, strict=True):
            mine.copy_(parameter)

    # -- checkpoints of many ranks hold the averages by name, like weights -----------------------------------

    def state_dict(self) -> dict[str, Any]:
        return {} if self.by_name else {"tensors": list(self.tensors)}

    def load_state_dict(self, state_dict: dict[str, Any], /) -> None:
        """Load the averages. With `by_name` they have already been read by name."""
        if self.by_name:
            return
        for mine, saved in zip(self.tensors, state_dict.get("tensors", self.tensors), strict=True):
            mine.copy_(saved)

    def named(self) -> dict[str, Tensor]:
        """Return the averages by their names in those checkpoints."""
        from ironlaw.train.parallel.materialize import named_like

        return dict(named_like(self.model, self.name, dict(zip(map(id, self.parameters), self.tensors, strict=True))))

    def tensors_to_save(self, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
        from ironlaw.train.parallel.materialize import COPY

        return tensors | {name: tensor.clone() for name, tensor in self.named().items() if not name.endswith(COPY)}

    def tensors_to_read(self, tensors: dict[str, Tensor], known: Mapping[str, torch.Size]) -> dict[str, Tensor]:
        there = any(name.startswith(f"{self.name}/") for name in known)
        return tensors | (self.named() if there else {})


def _parts(tensors: list[Tensor]) -> list[Tensor]:
    return [local_part(tensor).detach() for tensor in tensors]
