"""Several optimizers as one; and one whose state, master weights and update are on the host, for devices whose memory
they would fill.

    optimizer = HostOptimizer(groups, build, stream)      # `build` makes PyTorch's own over the host's copies
    ...                                                 # backward, clip, as ever: gradients stay on the device
    optimizer.step()

Parameters go in buckets. All gradients are sent for at once; as soon as a bucket's are there the processor updates it,
and its weights go back while the next is updated: three stages that overlap, of which the slowest sets the time.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from itertools import chain
from typing import Any

import torch
from torch import Tensor, nn

from ironlaw.train.transfer import Arrival, TransferStream

BUCKET_BYTES = 64 * 2**20
Groups = list[dict[str, Any]]


class Combined(torch.optim.Optimizer):
    """Two optimizers that share a model, used like one: matrices with one, the rest with the other."""

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
    """A parameter on the device, its copy on the host that is updated, and where its gradient arrives."""

    parameter: nn.Parameter
    host: Tensor
    gradient: Tensor

    def fetch(self, stream: TransferStream) -> list[Arrival]:
        """Send for the gradient, if there is one."""
        self.host.grad = None
        if self.parameter.grad is None:
            return []
        self.host.grad = self.gradient
        return [stream.out(self.parameter.grad, self.gradient)]


class HostOptimizer(Combined):
    """Like the optimizer that `build` makes, to the bit where the device computes as the host does."""

    def __init__(
        self, groups: Groups, build: Callable[[Groups], torch.optim.Optimizer], stream: TransferStream,
        bucket_bytes: int = BUCKET_BYTES,
    ) -> None:  # fmt: skip
        self.stream = stream
        self._buckets: list[list[_Pair]] = []
        parts = []
        for bucket in _bucketed(groups, bucket_bytes):
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
                arrival.wait_on_host()
            part.step()
            returning += [self.stream.back_into(pair.host, pair.parameter.data) for pair in pairs]
        for arrival in returning:
            arrival.wait_on_device()  # the next forward pass reads new weights

    def zero_grad(self, set_to_none: bool = True) -> None:
        """The device's gradients; the host's are buffers that the next step fills."""
        for pair in self._pairs():
            if set_to_none:
                pair.parameter.grad = None
            elif pair.parameter.grad is not None:
                pair.parameter.grad.zero_()

    @torch.no_grad()
    def load_state_dict(self, state: dict[str, Any]) -> None:
        """After the weights were loaded to the device: the host's copies are taken from there."""
        super().load_state_dict(state)
        for pair in self._pairs():
            pair.host.copy_(pair.parameter.detach())

    def host_bytes(self) -> int:
        """Weights, gradients and state here."""
        state = sum(tensor.nbytes for part in self.state.values() for tensor in part.values() if tensor.dim())
        return state + sum(pair.host.nbytes + pair.gradient.nbytes for pair in self._pairs())

    def _pairs(self) -> Iterator[_Pair]:
        return (pair for pairs in self._buckets for pair in pairs)


def _bucketed(groups: Groups, bucket_bytes: int) -> Iterator[Groups]:
    """The groups cut into runs of parameters of about `bucket_bytes`; every piece keeps its group's settings."""
    bucket: Groups = []
    held = 0
    for group in groups:
        settings = {key: value for key, value in group.items() if key != "params"}
        part: list[nn.Parameter] = []
        for parameter in group["params"]:
            part.append(parameter)
            held += parameter.numel() * parameter.element_size()
            if held >= bucket_bytes:
                yield [*bucket, settings | {"params": part}]
                bucket, part, held = [], [], 0
        if part:
            bucket.append(settings | {"params": part})
    if bucket:
        yield bucket
