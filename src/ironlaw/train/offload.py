"""Offloads activations to host memory until the backward pass, with copies that overlap with computation.

Packing starts a copy of the whole storage of a tensor (queries, keys and values are views of one) and releases the
device memory when it is done. If more than `ahead_bytes` are being copied, the device waits for the oldest copy, which
bounds memory. Unpacking starts to copy back the tensors saved before, which are needed next, also up to `ahead_bytes`.
The last block is not offloaded, since its tensors are needed again at once.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ironlaw.data.batch import Batch
from ironlaw.model.transformer import Transformer
from ironlaw.plan.offload import SMALLEST_BYTES


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
    """Copies between a device and its host. Each returns an event, which is done when the copy is. CPU tests check the
    order of copies and waits with one that is slow on purpose."""

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


@dataclass(eq=False)
class _Storage:
    """A storage, as bytes: being copied out, on the host, or being copied back."""

    number: int  # in the order of saving
    bytes: int
    host: Tensor
    out: torch.cuda.Event
    leaving: Tensor | None  # the device's storage, until the copy is done
    back: Tensor | None = None
    arrival: torch.cuda.Event | None = None
    wanted: int = 0  # number of its views still needed by the backward pass


@dataclass(frozen=True)
class _View:
    kept: _Storage
    dtype: torch.dtype
    shape: torch.Size
    stride: tuple[int, ...]
    offset: int  # in elements


class ActivationOffload:
    """`begin()` before each forward pass, `with around(block): ...` around each block, `loss.backward()` anywhere."""

    def __init__(self, model: Transformer, device: torch.device, stream: TransferStream, ahead_bytes: int) -> None:
        self.device, self.blocks, self.stream = device, len(model.blocks), stream
        # Weights, rotary tables and so on stay on the device.
        self._stay = {t.untyped_storage().data_ptr() for t in (*model.parameters(), *model.buffers())}
        self.ahead_bytes = ahead_bytes
        self.moved_bytes = 0  # to the host, in the last forward pass
        self.begin()

    def begin(self) -> None:
        self._order: list[_Storage] = []
        self._leaving: deque[_Storage] = deque()
        self._leaving_bytes = self._ahead = self.moved_bytes = 0
        self._by_storage: dict[tuple[int, int], _Storage] = {}  # those still on the device
        self._next_back = -1  # the next to copy back; all later ones have been requested

    def around(self, block: int) -> Any:
        if block == self.blocks - 1 or not torch.is_grad_enabled():
            return nullcontext()
        return torch.autograd.graph.saved_tensors_hooks(self._pack, self._unpack)

    # -- forward -----------------------------------------------------------------------------------------------------

    def _pack(self, tensor: Tensor) -> Tensor | _View:
        storage = tensor.untyped_storage()
        if storage.nbytes() < SMALLEST_BYTES or tensor.device != self.device or storage.data_ptr() in self._stay:
            return tensor
        key = (storage.data_ptr(), tensor._version)
        kept = self._by_storage.get(key)
        if kept is None:
            whole = torch.empty(0, dtype=torch.uint8, device=tensor.device).set_(storage)
            host = self.stream.host_like(whole)
            kept = _Storage(len(self._order), storage.nbytes(), host, self.stream.out(whole, host), whole)
            self._order.append(kept)
            self._by_storage[key] = kept
            self._leaving.append(kept)
            self._leaving_bytes += kept.bytes
            self.moved_bytes += kept.bytes
            self._next_back = kept.number
            self._release_copied()
        kept.wanted += 1
        return _View(kept, tensor.dtype, tensor.shape, tensor.stride(), int(tensor.storage_offset()))

    def _release_copied(self) -> None:
        """Release storages whose copies are done, and the oldest while too much is in flight, after a device wait."""
        while self._leaving and (self._leaving_bytes > self.ahead_bytes or self._leaving[0].out.query()):
            kept = self._leaving.popleft()
            kept.out.wait()  # this memory must not be reused before the copy is done
            kept.leaving = None
            self._leaving_bytes -= kept.bytes
            self._by_storage = {key: other for key, other in self._by_storage.items() if other is not kept}

    # -- backward ----------------------------------------------------------------------------------------------------

    def _unpack(self, packed: Tensor | _View) -> Tensor:
        if isinstance(packed, Tensor):
            return packed
        kept = packed.kept
        if kept.leaving is not None:  # still on the device
            whole = kept.leaving
        else:
            self._request(kept)
            assert kept.back is not None and kept.arrival is not None
            kept.arrival.wait()
            whole = kept.back
        self._prefetch()
        kept.wanted -= 1
        if kept.wanted == 0:
            self._ahead -= kept.bytes if kept.back is not None else 0
            kept.back = kept.leaving = None
        empty = torch.empty(0, dtype=packed.dtype, device=whole.device)
        return empty.set_(whole.untyped_storage(), packed.offset, packed.shape, packed.stride)

    def _prefetch(self) -> None:
        while self._next_back >= 0:
            kept = self._order[self._next_back]
            if self._ahead and self._ahead + kept.bytes > self.ahead_bytes:
                return
            self._next_back -= 1
            if kept.leaving is None and kept.wanted:
                self._request(kept)

    def _request(self, kept: _Storage) -> None:
        if kept.back is None:
            kept.back, kept.arrival = self.stream.back(kept.host)
            self._ahead += kept.bytes
