"""The update step of a user's own training loop: state, temporaries and operations of its optimizers. No torch."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

from ironlaw.workload.operations import Operation
from ironlaw.workload.optimizers import (
    FP32,
    OptimizerConfig,
    OptimizerName,
    accumulate,
    elementwise_update,
    muon_update,
    streamed,
    tensor_state_bytes,
)

LOOPED_CALLS = {"sgd": 1, "momentum": 3, "adam": 6, "adamw": 6}
"""Passes over three tensors in PyTorch's unfused updates: a third of the tensors touched (3, 8, 18). AdamW's calls are
lerp, mul, addcmul, sqrt, division, add and addcdiv. Weight decay adds one pass."""

EQUIVALENTS: dict[str, OptimizerName] = {
    "SGD": "sgd", "Adam": "adam", "AdamW": "adamw", "RMSprop": "rmsprop", "Adafactor": "adafactor", "Muon": "muon",
    "Adam8bit": "adam8bit", "AdamW8bit": "adam8bit",
}  # fmt: skip
"""Class of PyTorch or bitsandbytes -> Ironlaw's optimizer with the same states and work."""


TEMPORARIES: dict[str, tuple[float, float, float, float]] = {
    "SGD": (0, 1, 0, 1), "Adam": (2, 3, 1, 1), "AdamW": (2, 2, 1, 1), "NAdam": (2, 3, 1, 1), "RAdam": (2, 3, 1, 1),
    "RMSprop": (1, 2, 1, 2), "Adagrad": (1, 2, 2, 2), "Adamax": (1, 2, 1, 1), "Adadelta": (2, 3, 2, 2),
    "ASGD": (0, 1, 1, 1), "Rprop": (3, 3, 2, 2), "Adafactor": (1, 1, 1, 1), "Muon": (3, 3, 3, 3),
    "Adam8bit": (5, 5, 5, 5), "AdamW8bit": (5, 5, 5, 5),
}  # fmt: skip
"""Class -> temporary tensors of an unfused update, each without and with weight decay: in a loop over tensors, in
multiples of the largest one; with `foreach`, in multiples of all tensors. Measured, torch 2.13."""
OTHER_TEMPORARIES = (2.0, 2.0, 1.0, 1.0)  # other classes, assumed


@dataclass(frozen=True)
class Update:
    """One parameter group of an optimizer. `like`: Ironlaw's equivalent optimizer, None if unknown."""

    optimizer: str  # name of its class
    like: OptimizerName | None
    shapes: tuple[tuple[tuple[int, ...], int], ...]  # (shape, number of tensors)
    element_bytes: int
    fused: bool
    decays: bool
    extra_states: int  # optional state tensors: amsgrad, centered
    held_bytes: int  # of state, measured at the end of the run
    foreach: bool = False  # updates all tensors at once, PyTorch's default on CUDA

    @property
    def name(self) -> str:
        """The operation's name in the ledgers of plan and run."""
        return self.optimizer.lower()

    @property
    def elements(self) -> int:
        return sum(math.prod(shape) * count for shape, count in self.shapes)

    @property
    def tensors(self) -> int:
        return sum(count for _, count in self.shapes)

    def state_bytes(self) -> int:
        """Return the bytes of state, calculated from the shapes; for an unknown optimizer, as measured."""
        if self.like is None:
            return self.held_bytes
        config, more = OptimizerConfig(name=self.like), self.extra_states * self.element_bytes
        states = sum(count * tensor_state_bytes(s, config, matrix=self.like == "muon") for s, count in self.shapes)
        return states * self.element_bytes // FP32 + more * self.elements

    def temporary_bytes(self) -> int:
        """Return an update's peak bytes of temporaries, in addition to weights, gradients and state."""
        if self.fused:
            return 0
        tensors = TEMPORARIES.get(self.optimizer, OTHER_TEMPORARIES)[2 * self.foreach + self.decays]
        largest = max((math.prod(shape) for shape, _ in self.shapes), default=0)
        return int(tensors * (self.elements if self.foreach else largest) * self.element_bytes)

    def operations(self, cuda: bool) -> list[Operation]:
        """Return the kernels of one update."""
        if self.like == "muon":
            operations = [op for shape, count in self.shapes for op in muon_update(shape, count)]
        elif self.like is not None and (self.fused or self.like in ("rmsprop", "adafactor", "adam8bit")):
            operations = [
                *elementwise_update(self.like, self.elements, cuda),
                streamed("", "update_tensors", self.tensors, 0),
            ]
        else:
            sizes = [(self.elements, 1)] if cuda else [(math.prod(shape), count) for shape, count in self.shapes]
            operations = [
                streamed("", "add_in_place", size, 3, repeat=count * self._calls()) for size, count in sizes if size
            ]
        held = self.temporary_bytes()
        return [replace(op, name=self.name, temporary_bytes=held, frees_temporary_bytes=held) for op in operations]

    def _calls(self) -> int:
        if self.like is None:  # reads weight, gradient and all states, writes weight and states
            states = self.held_bytes / max(1, self.elements * self.element_bytes)
            return max(1, round((3 + 2 * states) / 3))
        return LOOPED_CALLS[self.like] + self.decays + self.extra_states

    def description(self) -> str:
        """Return a phrase that describes how the update is planned."""
        if self.like is None:
            return f"{self.optimizer}: state as it was held, every tensor passed over once (assumed)"
        return f"{self.optimizer}{', fused' if self.fused else ''}"


@dataclass(frozen=True)
class Loop:
    """The work of a user's loop per step outside of its micro-batches: clipping and updates."""

    updates: tuple[Update, ...]
    clips: bool
    cuda: bool = False
    gradients: str = "none"  # gradients alive in a forward pass: "none", "forward" (until backward), "kept"

    def operations(self, trained: int, accumulation: int) -> list[Operation]:
        """Return clipping, if any, and all optimizers' updates. `trained`: number of parameters with gradients."""
        operations = [streamed("clip", "clip", trained, 3)] if self.clips else []
        for update in self.updates:
            operations += update.operations(self.cuda)
        return operations + accumulate(trained, accumulation)

    def state_bytes(self) -> int:
        return sum(update.state_bytes() for update in self.updates)

    def names(self) -> str:
        return " and ".join(dict.fromkeys(update.optimizer for update in self.updates))
