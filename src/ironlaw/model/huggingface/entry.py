"""One tensor of ours, and those that it consists of in Hugging Face files. Needs torch only where there are tensors."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True)
class Entry:
    """One tensor here, and the ones it consists of there, one after the other by rows. `sizes` are their rows.

    Where theirs holds several of ours, ours is number `which` of `count`: halves, or with `turns` every second row.
    """

    ours: str
    theirs: tuple[str, ...]
    sizes: tuple[int, ...] = ()
    transposed: bool = False
    each: bool = False  # each of theirs is one entry of our first dimension
    stack: bool = False  # theirs is such a stack, whose rows are the second dimension
    inputs_first: bool = False  # of a stack: rows are the last dimension there
    order: tuple[int, ...] = ()  # of our rows, which of theirs each one is; empty: the same
    which: int = 0
    count: int = 1
    turns: bool = False
    row: bool = False  # theirs has a first dimension of one
    flat: int = 0  # theirs has so many of a stack's first two dimensions as one
    skipped: int = 0  # first rows of theirs, which nothing reads
    plus: float = 0.0  # ours are theirs and this (norms that multiply by one and their weight)

    def here(self, shapes: list[tuple[int, ...]]) -> tuple[int, ...]:
        """The shape here of tensors that have these shapes there."""
        import torch

        return tuple(self.join([torch.empty(shape, device="meta") for shape in shapes]).shape)

    def join(self, tensors: list[Tensor]) -> Tensor:
        import torch

        if self.each:
            return torch.stack(tensors)
        tensor = torch.cat(tensors) if len(tensors) > 1 else tensors[0]
        tensor = tensor[0] if self.row else tensor
        tensor = self._part(tensor.unflatten(0, (self.flat, -1)) if self.flat else tensor)
        tensor = tensor[torch.tensor(self.order, device=tensor.device)] if self.order else tensor
        tensor = tensor.float() + self.plus if self.plus else tensor
        return tensor.t() if self.transposed else tensor

    def put(self, tensor: Tensor, there: dict[str, Tensor]) -> None:
        """Ours into theirs; some tensors of theirs are made of several of ours."""
        import torch

        tensor = tensor - self.plus if self.plus else tensor
        tensor = tensor.t() if self.transposed else tensor
        if self.order:
            tensor = torch.empty_like(tensor).index_copy_(0, torch.tensor(self.order), tensor)
        if self.count > 1 or self.skipped or self.inputs_first:
            shape = list(tensor.shape)
            shape[int(self.stack)] = shape[int(self.stack)] * self.count + self.skipped
            if self.inputs_first:
                shape.append(shape.pop(1))
            whole = there.setdefault(self.theirs[0], tensor.new_zeros(shape))
            self._part(whole).copy_(tensor)
            if self.flat:
                there[self.theirs[0]] = whole.flatten(0, 1)
            return
        tensor = tensor.flatten(0, 1) if self.flat else tensor[None] if self.row else tensor
        split = tensor.unbind() if self.each else tensor.split(self.sizes) if self.sizes else (tensor,)
        # A copy of their own: three views of one matrix would be saved as three whole matrices, or refused.
        there |= {name: part.clone(memory_format=torch.contiguous_format)
                  for name, part in zip(self.theirs, split, strict=True)}  # fmt: skip

    def _part(self, theirs: Tensor) -> Tensor:
        """A view of what is ours."""
        if self.inputs_first:
            theirs = theirs.movedim(-1, 1)
        axis = int(self.stack)
        rows = theirs.shape[axis]
        if self.turns:
            chosen = slice(self.which, None, self.count)
        else:
            start = self.skipped + self.which * (rows // self.count)
            chosen = slice(start, start + rows // self.count if self.count > 1 else None)
        return theirs[(slice(None),) * axis + (chosen,)]
