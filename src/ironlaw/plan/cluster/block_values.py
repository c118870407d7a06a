"""Rows of columns that are alike, and what is worked out for one of each: layouts of a search share their blocks."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from ironlaw.workload.sizes import Size

Array = npt.NDArray[np.float64]


def distinct_rows(columns: Iterable[Array], length: int) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
    """One row of every sort that differs in some column, and of every row its sort.

    Rows are numbered column by column, which sorts numbers; `np.unique(axis=0)` sorts rows and takes ten times longer.
    """
    number, size = np.zeros(length, dtype=np.int64), 1
    for column in columns:
        least, most = (column.min(), column.max()) if length else (0.0, 0.0)
        if least == most:
            continue
        if least >= 0 and most < 2**20 and (column == np.floor(column)).all():
            code, values = column.astype(np.int64), int(most) + 1
        else:
            found, code = np.unique(column, return_inverse=True)
            code, values = code.reshape(-1), len(found)
        if size * values >= 2**62:
            found, number = np.unique(number, return_inverse=True)
            number, size = number.reshape(-1), len(found)
        number, size = number * values + code, size * values
    _, first, sort = np.unique(number, return_index=True, return_inverse=True)
    return first, sort.reshape(-1)


@dataclass
class BlockValues:
    """What a function gave of every block that it was asked about: a row of `values` per name, a place per block."""

    place: dict[bytes, int] = field(default_factory=dict)
    names: list[Any] = field(default_factory=list)
    values: Array = field(default_factory=lambda: np.zeros((0, 0)))

    def learn(self, keys: Sequence[bytes], found: Mapping[Any, Size]) -> None:
        columns = np.stack([np.broadcast_to(column, len(keys)) for column in found.values()])
        self.values = np.concatenate([self.values, columns], axis=1) if self.names else columns
        self.names = list(found)
        self.place |= {key: len(self.place) + i for i, key in enumerate(keys)}


Known = dict[str, BlockValues]
"""By name of a function."""
