"""A few steps of a loop in detail: under PyTorch's profiler, with a sampler of stacks and a count of sync points."""

from __future__ import annotations

import time
from contextlib import ExitStack
from typing import Any

import torch
from torch import nn
from torch.profiler import profile

from ironlaw.observe.events import SyncPoints, describe_sync_points, recorded_allocations, recorded_events, sync_points
from ironlaw.observe.measured import storage_bytes
from ironlaw.observe.memory_peak import KnownStorages
from ironlaw.observe.module_profile import ModuleProfile, mark, module_paths, read_modules
from ironlaw.observe.partition import Interval, Partition
from ironlaw.observe.profile import profiled
from ironlaw.observe.sampler import StackSampler
from ironlaw.observe.spans import scopes_recorded


class LoopRecording:
    """`begin(steps)` between two steps; it ends by itself when so many have ended, or by `end()`."""

    def __init__(
        self, model: nn.Module, optimizers: list[torch.optim.Optimizer], partition: Partition, is_compiled: bool
    ) -> None:
        self._model, self._optimizers, self._partition = model, optimizers, partition
        self._is_compiled = is_compiled
        self._stack = ExitStack()
        self._recorder: profile | None = None
        self._steps: list[list[Interval]] = []  # intervals of each recorded step
        self._held = KnownStorages()
        self._sync: SyncPoints = {}
        self._sampler: StackSampler | None = None
        self.profile: ModuleProfile | None = None
        self.seconds = 0.0  # that beginning and ending took, between steps

    @property
    def is_running(self) -> bool:
        return self._recorder is not None

    def begin(self, steps: int) -> None:
        began = time.perf_counter()
        self._steps_wanted, self._steps = steps, []
        self._held = KnownStorages(
            weights=storage_bytes([*self._model.parameters(), *self._model.buffers()]),
            gradients=self._gradients(),
            optimizer=storage_bytes([optimizer.state for optimizer in self._optimizers]),
        )
        enter = self._stack.enter_context
        if not self._is_compiled:  # hooks inside a compiled module would make it compile again
            enter(scopes_recorded(module_paths(self._model)))
        self._sync = enter(sync_points(self._partition))
        self._sampler = enter(StackSampler(self._partition))
        self._recorder = enter(profiled("cuda" if self._partition.cuda else "cpu"))
        self._partition.on_mark = mark
        self._partition.start()
        self.seconds += time.perf_counter() - began

    def end(self) -> None:
        if self._recorder is None:
            return
        began = time.perf_counter()
        self._partition.on_mark = None
        self._stack.close()
        recorder, self._recorder = self._recorder, None
        if self._steps:
            events, allocations = recorded_events(recorder), recorded_allocations(recorder)
            self.profile = read_modules(events, allocations, self._steps, self._held)
        self._partition.start()
        self.seconds += time.perf_counter() - began

    def forward_begins(self, is_first: bool, inputs: Any) -> None:
        """`is_first`: of its step."""
        if is_first:
            self.gradients_cleared()
        self._held.batch_bytes = sum(storage_bytes(inputs).values())

    def gradients_cleared(self) -> None:
        """Forget gradients that were cleared in the first step: the profiler does not see their end, as it did not see
        them allocated."""
        if self.is_running and not self._steps:
            now = self._gradients()
            self._held.gradients = {a: size for a, size in self._held.gradients.items() if a in now}

    def backward_ended(self) -> None:
        if self.is_running:
            self._held.gradient_addresses |= set(self._gradients())

    def step_ended(self, intervals: list[Interval]) -> None:
        self._steps.append(intervals)
        if len(self._steps) >= self._steps_wanted:
            self.end()

    def _gradients(self) -> dict[int, int]:
        return storage_bytes([p.grad for p in self._model.parameters()])

    def facts(self) -> dict[str, Any]:
        found = self._sampler.facts(self._steps) if self._sampler is not None else {}
        return found | {"sync_points": describe_sync_points(self._sync, max(1, len(self._steps)), self._steps)}
