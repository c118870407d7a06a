"""Plug-ins by which settings of `[communication]` extend a step on many ranks. The step refers to none by name.

The state of a plug-in is in checkpoints under `name`, and its tensors are saved rank by rank under its own names
(`store.py`). The average of the weights is a plug-in too, also on one process.
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

    def saved(self, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
        """Return copies of the tensors to write for `tensors` (weights and optimizer state), and of its own."""
        return tensors

    def wanted(self, tensors: dict[str, Tensor], known: Mapping[str, torch.Size]) -> dict[str, Tensor]:
        """Return the tensors into which a checkpoint with the names `known` is read, in place of `tensors`."""
        return tensors

    def after_read(self) -> None:
        """Called when the wanted tensors have been read."""
