"""Layouts as a structure of arrays: a column per field of `Layout`, a row per layout.

    table = layout_table([Layout(dp=8), Layout(tp=8)])
    table["tp"]                                 # array([1, 8])
    table["schedule"] == code("schedule", "zb")
    layout_of(table[1])                         # Layout(tp=8)

A number stands for itself, and 0 for what a layout leaves open. A word is its place among those that `Layout` knows.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import fields
from typing import Any

import numpy as np
import numpy.typing as npt

from ironlaw.workload.layout import CP_KINDS, OFFLOAD, SCHEDULES, Layout
from ironlaw.workload.recompute_config import every as one_in

WORDS: dict[str, tuple[str | None, ...]] = {
    "schedule": SCHEDULES, "cp_kind": (None, *CP_KINDS), "recompute": ("none", "selective", "full"), "offload": OFFLOAD,
}  # fmt: skip
"""Fields that are words; every:K is "full" and a column `every`."""

COLUMNS = (*(f.name for f in fields(Layout) if f.name != "accumulation"), "every")
ROW = np.dtype([(name, np.int32) for name in COLUMNS])
Table = npt.NDArray[np.void]


def code(field: str, word: str | None) -> int:
    """The number that stands for a word of a field."""
    return WORDS[field].index(word)


def layout_table(layouts: Iterable[Layout]) -> Table:
    """One row per layout."""
    return np.array([tuple(_number(layout, name) for name in COLUMNS) for layout in layouts], dtype=ROW)


def layout_of(row: np.void) -> Layout:
    """The layout of a row."""
    values: dict[str, Any] = dict(zip(COLUMNS, row.item(), strict=True))
    every = values.pop("every")
    values |= {name: words[values[name]] for name, words in WORDS.items()}
    values |= {"sp": bool(values["sp"]), "shard": values["shard"] or None, "etp": values["etp"] or None}
    return Layout(**values | ({"recompute": one_in(every)} if every > 1 else {}))


def _number(layout: Layout, name: str) -> int:
    if name == "every":
        return layout.recompute.stride
    if name == "recompute":  # a budget is settled before: what it comes to is selective
        return code(name, {"every": "full", "budget": "selective"}.get(layout.recompute.mode, layout.recompute.mode))
    value = getattr(layout, name)
    return code(name, value) if name in WORDS else int(value or 0)
