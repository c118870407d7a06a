"""Sizes: an `int` for one exact plan, or an array with one entry per layout for thousands of plans at once.

Every function of this package that describes operations accepts both; whole numbers stay exact Python integers.
numpy is imported only where there are arrays: its import takes longer than a plan of one run on this machine.
"""

from __future__ import annotations

from typing import Any

Size = Any
"""`int`, `float`, or a numpy array of either."""


def is_array(*sizes: Size) -> bool:
    return any(type(size).__name__ == "ndarray" for size in sizes)


def is_nonzero(size: Size) -> bool:
    """Whether the size is nonzero for any layout."""
    return bool(size.any() if is_array(size) else size)


def above_one(size: Size) -> bool:
    """Whether the size is above one; all layouts of an array must agree."""
    if not is_array(size):
        return bool(size > 1)
    found = bool((size > 1).all())
    assert found or not (size > 1).any(), "layouts that divide and layouts that do not are described apart"
    return found


def divided(size: Size, parts: Size) -> Size:
    """Return `size / parts`, as an integer if both are integers and the division is exact."""
    if is_array(size, parts):
        return size / parts
    quotient, rest = divmod(size, parts)
    return size / parts if rest or isinstance(quotient, float) else quotient


def whole(size: Size) -> Size:
    """Round a number that is whole up to rounding errors; arrays are returned unchanged."""
    return size if is_array(size) else round(size)


def larger(a: Size, b: Size) -> Size:
    if not is_array(a, b):
        return max(a, b)
    import numpy as np

    return np.maximum(a, b)


def smaller(a: Size, b: Size) -> Size:
    if not is_array(a, b):
        return min(a, b)
    import numpy as np

    return np.minimum(a, b)


def divisors(number: int) -> list[int]:
    """Return the divisors in ascending order."""
    small = [d for d in range(1, int(number**0.5) + 1) if number % d == 0]
    return sorted({*small, *(number // d for d in small)})
