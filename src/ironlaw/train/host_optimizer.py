"""Combined optimizers, and one whose state, master weights and update are on the host, to save device memory.

    optimizer = HostOptimizer(groups, build, stream)      # `build` makes a PyTorch optimizer for the host copies
    ...                                                 # backward, clip as usual: gradients stay on the device
    optimizer.step()

Parameters are grouped in buckets. All gradients are requested at once. When a bucket's gradients arrive, the CPU
updates it, and its weights are copied back during the next update: the slowest of three stages sets the time.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from itertools import chain
from typing import Any

import torch
from torch import Tensor, nn

from ironlaw.train.offload import TransferStream

BUCKET_BYTES = 64 * 2**20
Groups = list[dict[str, Any]]


class Combined(torch.optim.Optimizer):
    """Several optimizers used as one, for example one for matrices and one for all other tensors."""

    def __init__(self, parts: Iterable[torch.optim.Optimizer]) -> None:
        self.parts = tuple(parts)

    @property
    def param_groups(self) -> list[dict[str, Any]]:  # type: ignore[override]
        return list(chain.from_iterable(part.param_groups for part in self.parts))

    @property
    def state(self) -> dict[Any, Any]:  # type: ignore[override]
        return {parameter: state for part in self.parts for parameter, state in part.state.items()}

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        assert closure is None
        for part in self.parts:
            part.step()

    def zero_grad(self, set_to_none: bool = True) -> None:
        for part in self.parts:
            part.zero_grad(set_to_none=set_to_none)

    def state_dict(self) -> dict[str, Any]:
        return {"parts": [part.state_dict() for part in self.parts]}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        for part, saved in zip(self.parts, state["parts"], strict=True):
            part.load_state_dict(saved)


@dataclass(frozen=True)
class _Pair:
    """A parameter on the device, its master copy on the host, and the host buffer for its gradient."""

    parameter: nn.Parameter
    host: Tensor
    gradient: Tensor

    def fetch(self, stream: TransferStream) -> list[torch.cuda.Event]:
        """Start to copy the gradient to the host, if there is one."""
        self.host.grad = None
        if self.parameter.grad is None:
            return []
        self.host.grad = self.gradient
        return [stream.out(self.parameter.grad, self.gradient)]


class HostOptimizer(Combined):
    """Runs the optimizer that `build` makes on the host. Results are bit-equal if device and host compute alike."""

    def __init__(
        self, groups: Groups, build: Callable[[Groups], torch.optim.Optimizer], stream: TransferStream
    ) -> None:
        self.stream = stream
        self._buckets: list[list[_Pair]] = []
        parts = []
        for bucket in _bucketed(groups):
            pairs, hosted = [], []
            for group in bucket:
                here = [self._pair(parameter) for parameter in group["params"]]
                pairs += here
                hosted.append(group | {"params": [pair.host for pair in here]})
            self._buckets.append(pairs)
            parts.append(build(hosted))
        super().__init__(parts)

    def _pair(self, parameter: nn.Parameter) -> _Pair:
        host = self.stream.host_like(parameter.detach())
        return _Pair(parameter, host.copy_(parameter.detach()), self.stream.host_like(parameter.detach()))

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        assert closure is None
        leaving = [[arrival for pair in pairs for arrival in pair.fetch(self.stream)] for pairs in self._buckets]
        returning = []
        for pairs, part, arrivals in zip(self._buckets, self.parts, leaving, strict=True):
            for arrival in arrivals:
                arrival.synchronize()
            part.step()
            returning += [self.stream.back_into(pair.host, pair.parameter.data) for pair in pairs]
        for arrival in returning:
            arrival.wait()  # the next forward pass reads the new weights

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Clear the device's gradients; the host's are buffers that the next step overwrites."""
        assert set_to_none
        for pair in self._pairs():
            pair.parameter.grad = None

    @torch.no_grad()
    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Load the state. The host copies are refreshed from the device, where weights must have been loaded."""
        super().load_state_dict(state)
        for pair in self._pairs():
            pair.host.copy_(pair.parameter.detach())

    def host_bytes(self) -> int:
        """Return the bytes of weights, gradients and state on the host."""
        state = sum(tensor.nbytes for part in self.state.values() for tensor in part.values() if tensor.dim())
        return state + sum(pair.host.nbytes + pair.gradient.nbytes for pair in self._pairs())

    def _pairs(self) -> Iterator[_Pair]:
        return (pair for pairs in self._buckets for pair in pairs)


def _bucketed(groups: Groups) -> Iterator[Groups]:
    """Split the groups into buckets of about `BUCKET_BYTES`; each piece keeps the settings of its group."""
    bucket: Groups = []
    held = 0
    for group in groups:
        settings = {key: value for key, value in group.items() if key != "params"}
        part: list[nn.Parameter] = []
        for parameter in group["params"]:
            part.append(parameter)
            held += parameter.nbytes
            if held >= BUCKET_BYTES:
                yield [*bucket, settings | {"params": part}]
                bucket, part, held = [], [], 0
        if part:
            bucket.append(settings | {"params": part})
    if bucket:
        yield bucket
