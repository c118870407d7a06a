"""Batches from the loader to the device, in the loader's thread: the step that uses one finds it there."""

from __future__ import annotations

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
