"""Layouts as a structured array: a column per field of `Layout`, a row per layout.

    table = layout_table([Layout(dp=8), Layout(tp=8)])
    table["tp"]                                 # array([1, 8])
    table["schedule"] == code("schedule", "zb")
    layout_of(table[1])                         # Layout(tp=8)

A number is stored as it is, an unset field as 0, and a word as its index in `WORDS`. Layouts of a search share their
blocks: equal rows are found and evaluated once (`distinct_rows`).
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import fields
from typing import Any

import numpy as np
import numpy.typing as npt

from ironlaw.workload.layout import CP_KINDS, OFFLOAD, SCHEDULES, Layout
from ironlaw.workload.sections import every as one_in

WORDS: dict[str, tuple[str | None, ...]] = {
    "schedule": SCHEDULES, "cp_kind": (None, *CP_KINDS), "recompute": ("none", "selective", "full"), "offload": OFFLOAD,
}  # fmt: skip
"""The possible words of each field that is a word; every:K is stored as "full", with K in the column `every`."""

COLUMNS = (*(f.name for f in fields(Layout) if f.name != "accumulation"), "every")
ROW = np.dtype([(name, np.int32) for name in COLUMNS])
Table = npt.NDArray[np.void]


def code(field: str, word: str | None) -> int:
    """Returns the number that encodes a word of a field."""
    return WORDS[field].index(word)


def layout_table(layouts: Iterable[Layout]) -> Table:
    """Returns a table with one row per layout."""
    return np.array([tuple(_number(layout, name) for name in COLUMNS) for layout in layouts], dtype=ROW)


def layout_of(row: np.void) -> Layout:
    """Returns the layout of a row."""
    values: dict[str, Any] = dict(zip(COLUMNS, row.item(), strict=True))
    every = values.pop("every")
    values |= {name: words[values[name]] for name, words in WORDS.items()}
    values |= {"sp": bool(values["sp"]), "shard": values["shard"] or None, "etp": values["etp"] or None}
    return Layout(**values | ({"recompute": one_in(every)} if every > 1 else {}))


def _number(layout: Layout, name: str) -> int:
    if name == "every":
        return layout.recompute.stride
    if name == "recompute":  # a budget has become a selective choice by now
        return code(name, {"every": "full", "budget": "selective"}.get(layout.recompute.mode, layout.recompute.mode))
    value = getattr(layout, name)
    return code(name, value) if name in WORDS else int(value or 0)


Array = npt.NDArray[np.float64]


def distinct_rows(columns: Iterable[Array], length: int) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
    """Returns the index of one row per group of equal rows, and the group of every row.

    Groups are numbered column by column, which sorts numbers; `np.unique(axis=0)` sorts rows, ten times slower.
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
