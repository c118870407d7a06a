"""Batches that the loader hands to the step: inputs, targets and, where attention is masked, document numbers."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Generic, TypeVar, cast

Array = TypeVar("Array")
Other = TypeVar("Other")

IGNORED = -100  # a target that the loss ignores: PyTorch's default `ignore_index`


@dataclass(frozen=True, slots=True)
class Batch(Generic[Array]):
    """One rank's share of a global batch, as numpy arrays here and as tensors once on the device.

    `inputs` and `targets` are (sequences, sequence) int64; a target is the token after its input, or IGNORED where
    there is none (padding). `documents` is (sequences, sequence) int32, the number of each position's document
    within its row (0, 1, 2, ... from left to right): attention does not cross documents, and positions restart at
    each. None: each row is one text.
    """

    inputs: Array
    targets: Array
    documents: Array | None = None

    def map(self, function: Callable[[Array], Other]) -> Batch[Other]:
        """Return the batch with `function` applied to each array, for example a copy to a device."""
        documents = None if self.documents is None else function(self.documents)
        return Batch(function(self.inputs), function(self.targets), documents)

    def rows(self, chosen: slice) -> Batch[Array]:
        """Return the `chosen` sequences as a micro-batch of views, without copying."""
        return self.map(lambda array: cast(Any, array)[chosen])
