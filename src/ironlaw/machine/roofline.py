"""The roofline: an operation takes as long as its arithmetic or its traffic, whichever is longer."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Roofline:
    """Two ceilings of an accelerator (Williams, Waterman, Patterson 2009, doi 10.1145/1498765.1498785)."""

    flops_per_second: float
    bytes_per_second: float

    @property
    def ridge_point(self) -> float:
        """Arithmetic intensity, in FLOP per byte, above which arithmetic limits and below which memory does."""
        return self.flops_per_second / self.bytes_per_second

    def attainable_flops_per_second(self, flops_per_byte: float) -> float:
        return min(self.flops_per_second, flops_per_byte * self.bytes_per_second)

    def seconds(self, flops: float, bytes_moved: float) -> float:
        return max(flops / self.flops_per_second, bytes_moved / self.bytes_per_second)

    def bound(self, flops: float, bytes_moved: float) -> str:
        """ "compute" or "memory"."""
        return "compute" if flops > self.ridge_point * bytes_moved else "memory"
