"""Records a few engine steps with PyTorch's profiler: the model's time by operation, under the names of plans."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from functools import partial, wraps
from typing import Any

import torch
from torch import nn

from ironlaw.kernels.native import Native
from ironlaw.kernels.product import Weight
from ironlaw.ledger import Kind, Line, Phase
from ironlaw.model.cached import LayerCache, Pages
from ironlaw.observe.profile import (
    NATIVE,
    PHASE_SCOPE,
    STEP_SCOPE,
    module_scopes,
    read_profile,
    scope,
)
from ironlaw.observe.spans import MODULE_SCOPE, scopes_recorded

_SCOPES = ((LayerCache, "mix", "attention"), (Pages, "read", "cache"), (Pages, "write", "cache"),
           (Native, "attend", "attention"), (Native, "keep", "cache"))  # fmt: skip
_OPERATIONS = ("attend", "keep", "rotate", "norm")  # of Native: not operations of PyTorch, so the profiler misses them


class Recording:
    """Records as many prefill and decode steps as are wanted, and keeps the shortest time of each operation."""

    def __init__(self) -> None:
        self.wanted = {"prefill": 0, "decode": 0}
        self._lines: dict[tuple[Phase, Kind, str], Line] = {}

    def ask(self, steps: int) -> None:
        """Record the next steps of each phase, in place of those before: another load has other batches."""
        self._lines = {}
        self.wanted = dict.fromkeys(self.wanted, steps)

    @contextmanager
    def step(self, model: nn.Module, phase: str) -> Iterator[None]:
        """Record the model's part of a step if its phase is wanted. Mixed steps are not recorded."""
        if not self.wanted.get(phase):
            yield
            return
        self.wanted[phase] -= 1
        with ExitStack() as stack:
            recorded = stack.enter_context(torch.profiler.profile())
            stack.enter_context(scopes_recorded(module_scopes(model)))
            for name in _OPERATIONS:
                _scoped(stack, Native, name, partial(scope, NATIVE + name))
            _scoped(stack, Weight, "__call__", partial(scope, f"{NATIVE}product"))
            for owner, name, operation in _SCOPES:
                _scoped(stack, owner, name, partial(scope, MODULE_SCOPE + operation))
            stack.enter_context(scope(STEP_SCOPE))
            stack.enter_context(scope(f"{PHASE_SCOPE}{phase}"))
            yield
        for line in read_profile(recorded, 1, set()).lines:
            key = (line.phase, line.kind, line.operation)
            before = self._lines.get(key)
            if before is None or (line.seconds or 0.0) < (before.seconds or 0.0):
                self._lines[key] = replace(line)

    def lines(self) -> list[Line]:
        """Return the operations of one step."""
        return [self._lines[key] for key in sorted(self._lines)]


def _scoped(stack: ExitStack, owner: type, name: str, around: Callable[[], Any]) -> None:
    original: Any = getattr(owner, name)

    @wraps(original)
    def call(*arguments: Any, **named: Any) -> Any:
        with around():
            return original(*arguments, **named)

    setattr(owner, name, call)
    stack.callback(setattr, owner, name, original)
