"""The way between a device and its host's memory: copies on streams of their own, beside the computation.

What moves data out and back is given a `TransferStream`, so that its order of copies and waits is tested on a CPU, with
one that is slow on purpose. Batches go one way, in the loader's thread: the step that uses one finds it there.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ironlaw.data.batch import Batch


class Transfer:
    """Callable: numpy batch to tensors on `device`.

    On CUDA the batch is copied from page-locked memory on a stream of its own, while the step computes on another;
    without `pin_memory` the copy is an ordinary one and waits for the host. Elsewhere nothing is copied.
    """

    def __init__(self, device: torch.device, pin_memory: bool = True):
        self._device = device
        self._pin = pin_memory
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None

    def __call__(self, batch: Batch[np.ndarray]) -> Batch[Tensor]:
        tensors = batch.map(torch.from_numpy)
        if self._stream is None:
            return tensors
        main = torch.cuda.default_stream(self._device)

        def copy(tensor: Tensor) -> Tensor:
            moved = (tensor.pin_memory() if self._pin else tensor).to(self._device, non_blocking=self._pin)
            moved.record_stream(main)  # its memory is not given to a later batch while a step still reads it
            return moved

        with torch.cuda.stream(self._stream):
            moved = tensors.map(copy)
        self._stream.synchronize()  # this thread waits for the copy, the step does not
        return moved


class Arrival:
    """A copy under way."""

    def __init__(self, event: Any, device: torch.device) -> None:
        self._event, self._device = event, device

    def done(self) -> bool:
        return bool(self._event.query())

    def wait_on_host(self) -> None:
        """Block this thread until the copy is complete."""
        self._event.synchronize()

    def wait_on_device(self) -> None:
        """What the device is given from now on waits for the copy; this thread does not."""
        torch.cuda.current_stream(self._device).wait_event(self._event)


class TransferStream:
    def __init__(self, device: torch.device) -> None:
        self.device = device
        # One each way: the link carries both at once.
        self._out, self._back = torch.cuda.Stream(device), torch.cuda.Stream(device)

    def host_like(self, tensor: Tensor) -> Tensor:
        """Memory on the host, contiguous, that copies can reach without the processor's help."""
        return torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)

    def out(self, tensor: Tensor, host: Tensor) -> Arrival:
        """Start to copy a device's tensor, as what was asked of the device before leaves it."""
        self._out.wait_stream(torch.cuda.current_stream(self.device))
        return self._copied(self._out, lambda: host.copy_(tensor, non_blocking=True))

    def back(self, host: Tensor) -> tuple[Tensor, Arrival]:
        """Start to copy to a new tensor on the device."""
        with torch.cuda.stream(self._back):
            tensor = torch.empty_like(host, device=self.device, pin_memory=False)
        arrival = self.back_into(host, tensor)
        tensor.record_stream(torch.cuda.current_stream(self.device))
        return tensor, arrival

    def back_into(self, host: Tensor, tensor: Tensor) -> Arrival:
        """Start to copy to a tensor that is there."""
        # Memory that the allocator gave to this stream may still be read by the computation before.
        self._back.wait_stream(torch.cuda.current_stream(self.device))
        return self._copied(self._back, lambda: tensor.copy_(host, non_blocking=True))

    def _copied(self, stream: Any, copy: Callable[[], object]) -> Arrival:
        with torch.cuda.stream(stream):
            copy()
            event = torch.cuda.Event()
            event.record(stream)
        return Arrival(event, self.device)
