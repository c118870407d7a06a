"""What the loader hands to the step: inputs, targets and, where attention must not cross documents, whose each is."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

Array = TypeVar("Array")
Other = TypeVar("Other")

IGNORED = -100  # a target that no loss counts: PyTorch's own `ignore_index`


@dataclass(frozen=True, slots=True)
class Batch(Generic[Array]):
    """One rank's share of a global batch, as numpy arrays here and as tensors once on the device.

    `inputs` and `targets` are (sequences, sequence) int64; a target is the token after its input, or IGNORED where
    there is none (padding). `documents` is (sequences, sequence) int32, the number of each position's document
    within its row (0, 1, 2, ... from left to right): attention stays inside a document and positions restart with
    it. None: the row is one text.
    """

    inputs: Array
    targets: Array
    documents: Array | None = None

    def map(self, function: Callable[[Array], Other]) -> Batch[Other]:
        """The same batch with `function` applied to each array, such as a copy to a device."""
        documents = None if self.documents is None else function(self.documents)
        return Batch(function(self.inputs), function(self.targets), documents)

    def rows(self, chosen: slice) -> Batch[Array]:
        """A micro-batch: views, nothing is copied."""

        def take(array: Any) -> Array:
            rows: Array = array[chosen]
            return rows

        return self.map(take)
