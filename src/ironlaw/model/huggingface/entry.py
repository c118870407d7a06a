"""One tensor of ours, and those that it consists of in Hugging Face files."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Entry:
    """One tensor here, and the ones it consists of there, one after the other by rows. `sizes` are their rows."""

    ours: str
    theirs: tuple[str, ...]
    sizes: tuple[int, ...] = ()
    transposed: bool = False
    stacked: bool = False  # each is one entry of our first dimension
    order: tuple[int, ...] = ()  # of our rows, which of theirs each one is; empty: the same
    # Of stacks with inputs first: the first of their outputs that is ours, and the step to the next.
    every: tuple[int, int] | None = None
    rows: int = 0  # of theirs, where `order` takes some of them
    plus: float = 0.0  # ours are theirs and this (norms that multiply by one and their weight)

    def here(self, shapes: list[tuple[int, ...]]) -> tuple[int, ...]:
        """The shape here of tensors that have these shapes there."""
        if self.stacked:
            return len(shapes), *shapes[0]
        if self.every is not None:
            start, step = self.every
            count, *inputs, outputs = shapes[0]
            return count, len(range(start, outputs, step)), *inputs
        whole = (len(self.order) or sum(shape[0] for shape in shapes), *shapes[0][1:])
        return whole[::-1] if self.transposed else whole

    def join(self, tensors: list[Tensor]) -> Tensor:
        if self.stacked:
            return torch.stack(tensors)
        if self.every is not None:
            start, step = self.every
            return tensors[0].movedim(-1, 1)[:, start::step]
        tensor = torch.cat(tensors) if len(tensors) > 1 else tensors[0]
        tensor = tensor[torch.tensor(self.order)] if self.order else tensor
        tensor = tensor.float() + self.plus if self.plus else tensor
        return tensor.t() if self.transposed else tensor

    def split(self, tensor: Tensor) -> tuple[Tensor, ...]:
        if self.stacked:
            return tensor.unbind()
        if self.order:
            tensor = torch.empty_like(tensor).index_copy_(0, torch.tensor(self.order), tensor)
        tensor = tensor.t() if self.transposed else tensor
        return tensor.split(self.sizes) if self.sizes else (tensor,)

    def put(self, tensor: Tensor, there: dict[str, Tensor]) -> None:
        """Ours into theirs; some tensors of theirs are made of several of ours."""
        tensor = tensor - self.plus if self.plus else tensor
        name = self.theirs[0]
        if self.every is not None:
            start, step = self.every
            count, outputs, *inputs = tensor.shape
            whole = there.setdefault(name, tensor.new_zeros(count, *inputs, outputs * step))
            whole.movedim(-1, 1)[:, start::step] = tensor
        elif self.rows:
            whole = there.setdefault(name, tensor.new_zeros(self.rows, *tensor.shape[1:]))
            whole[torch.tensor(self.order)] = tensor
        else:
            # A copy of their own: three views of one matrix would be saved as three whole matrices, or refused.
            there |= {name: part.clone(memory_format=torch.contiguous_format)
                      for name, part in zip(self.theirs, self.split(tensor), strict=True)}  # fmt: skip
