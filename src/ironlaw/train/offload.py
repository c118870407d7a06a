"""What waits for the backward pass waits in the host's memory: copied out and back while the device computes.

Packing starts a copy to page-locked memory on a stream of its own and keeps the device's tensor until that is done.
Unpacking waits for its copy back, and starts that of the tensors saved before it, which are wanted next.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

SMALLEST_BYTES = 2**20  # smaller tensors are not worth a copy
AHEAD = 2  # tensors on their way back before they are wanted


@dataclass(eq=False)
class _Kept:
    host: Tensor
    done: Any  # event: the copy out is complete
    leaving: Tensor | None  # the device's tensor until then
    back: Tensor | None = None
    arrived: Any = None


class ActivationOffload:
    """`with offload.saving(): loss = model(...)`, then `loss.backward()` anywhere. CUDA only."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.stream = torch.cuda.Stream(device)
        self._order: list[_Kept] = []

    def saving(self) -> Any:
        self._order.clear()
        return torch.autograd.graph.saved_tensors_hooks(self._pack, self._unpack)

    def _pack(self, tensor: Tensor) -> Tensor | _Kept:
        small = tensor.numel() * tensor.element_size() < SMALLEST_BYTES
        if small or tensor.device != self.device or isinstance(tensor, torch.nn.Parameter):
            return tensor
        self._release()
        self.stream.wait_stream(torch.cuda.current_stream(self.device))
        with torch.cuda.stream(self.stream):
            host = torch.empty_strided(tensor.size(), tensor.stride(), dtype=tensor.dtype, pin_memory=True)
            host.copy_(tensor, non_blocking=True)
            done = torch.cuda.Event()
            done.record(self.stream)
        kept = _Kept(host, done, tensor)
        self._order.append(kept)
        return kept

    def _release(self) -> None:
        """Let go of what has been copied."""
        for kept in self._order[-8:]:
            if kept.leaving is not None and kept.done.query():
                kept.leaving = None

    def _unpack(self, packed: Tensor | _Kept) -> Tensor:
        if isinstance(packed, Tensor):
            return packed
        index = self._order.index(packed)
        for kept in self._order[max(0, index - AHEAD) : index + 1]:
            self._fetch(kept)
        torch.cuda.current_stream(self.device).wait_event(packed.arrived)
        tensor, packed.back = packed.back, None
        assert tensor is not None
        tensor.record_stream(torch.cuda.current_stream(self.device))
        return tensor

    def _fetch(self, kept: _Kept) -> None:
        if kept.back is not None:
            return
        kept.leaving = None
        with torch.cuda.stream(self.stream):
            kept.back = kept.host.to(self.device, non_blocking=True)
            kept.arrived = torch.cuda.Event()
            kept.arrived.record(self.stream)
