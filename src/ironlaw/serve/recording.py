"""Records a few engine steps with PyTorch's profiler: the model's time by operation, under the names of plans."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace

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

# Methods that are recorded under a name: those of compiled code, which the profiler misses, and parts of attention.
_SCOPES = (
    *((Native, name, NATIVE + name) for name in ("attend", "keep", "rotate", "norm")),
    (Weight, "__call__", f"{NATIVE}product"),
    *((owner, name, f"{MODULE_SCOPE}attention") for owner, name in ((LayerCache, "mix"), (Native, "attend"))),
    *((owner, name, f"{MODULE_SCOPE}cache") for owner, name in ((Pages, "read"), (Pages, "write"), (Native, "keep"))),
)


class Recording:
    """Records as many prefill and decode steps as are wanted, and keeps the shortest time of each operation."""

    def __init__(self) -> None:
        self.wanted = {"prefill": 0, "decode": 0}
        self._lines: dict[tuple[Phase, Kind, str], Line] = {}

    def start(self, steps: int) -> None:
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
            stack.enter_context(scopes_recorded(module_scopes(model), _SCOPES))
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
