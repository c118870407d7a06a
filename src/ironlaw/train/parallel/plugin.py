"""What a setting of `[communication]` adds to a step on many ranks: the step asks each plug-in, and knows none by name.

Its state lies in checkpoints under `name`, its tensors rank by rank, by names of their own (`store.py`); so does an
average of the weights, on one process too.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn


class StepPlugin:
    name: str

    def begin(self, part: nn.Module, tokens: Tensor) -> None:
        """Before the first step: the model as it is called, and a micro-batch of it."""

    def after(self, step: int) -> None:
        """When `step` steps are done, on every rank."""

    def evaluating(self) -> AbstractContextManager[None]:
        """Around evaluations and checkpoints' readers."""
        return nullcontext()

    def held(self) -> Any:
        """Nested tensors that it holds between steps."""
        return ()

    # -- checkpoints -----------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        return {}

    def load_state_dict(self, state: dict[str, Any], /) -> None:
        """What is small; tensors have been read by name."""

    def saved(self, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
        """What is written for `tensors` (weights and optimizer state), own ones included; copies."""
        return tensors

    def wanted(self, tensors: dict[str, Tensor], known: Mapping[str, torch.Size]) -> dict[str, Tensor]:
        """What is read for `tensors` from a checkpoint that has the names `known`, into which tensors."""
        return tensors

    def after_read(self) -> None:
        """What was wanted is there."""
