"""Copies between a device and host memory, on streams of their own that overlap with computation.

Offloading code receives a `TransferStream`, so that CPU tests can check its order of copies and waits with one that is
slow on purpose. Batches are copied one way, in the loader's thread, and are complete before a step uses them.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ironlaw.data.batch import Batch


class Transfer:
    """Callable that moves a NumPy batch to tensors on `device`.

    On CUDA the batch is copied from page-locked memory on a separate stream while the step computes; without
    `pin_memory` the copy is a blocking one. On other devices nothing is copied.
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
            moved.record_stream(main)  # a later batch must not reuse the memory while a step still reads it
            return moved

        with torch.cuda.stream(self._stream):
            moved = tensors.map(copy)
        self._stream.synchronize()  # this thread waits for the copy, the step does not
        return moved


class TransferStream:
    """Copies between a device and its host. Each returns an event, which is done when the copy is."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        # One stream per direction: the link transfers in both at once.
        self._out, self._back = torch.cuda.Stream(device), torch.cuda.Stream(device)

    def host_like(self, tensor: Tensor) -> Tensor:
        """Allocate a contiguous tensor in page-locked host memory, which allows asynchronous copies."""
        return torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)

    def out(self, tensor: Tensor, host: Tensor) -> torch.cuda.Event:
        """Start to copy a tensor from the device to `host`, after all work already queued on the device."""
        self._out.wait_stream(torch.cuda.current_stream(self.device))
        return self._copied(self._out, lambda: host.copy_(tensor, non_blocking=True))

    def back(self, host: Tensor) -> tuple[Tensor, torch.cuda.Event]:
        """Start to copy from `host` to a new tensor on the device."""
        with torch.cuda.stream(self._back):
            tensor = torch.empty_like(host, device=self.device, pin_memory=False)
        event = self.back_into(host, tensor)
        tensor.record_stream(torch.cuda.current_stream(self.device))
        return tensor, event

    def back_into(self, host: Tensor, tensor: Tensor) -> torch.cuda.Event:
        """Start to copy from `host` to an existing tensor on the device."""
        # The allocator may have given this stream memory that earlier computation still reads.
        self._back.wait_stream(torch.cuda.current_stream(self.device))
        return self._copied(self._back, lambda: tensor.copy_(host, non_blocking=True))

    def _copied(self, stream: Any, copy: Callable[[], object]) -> torch.cuda.Event:
        with torch.cuda.stream(stream):
            copy()
            return stream.record_event()
