"""Seconds of many candidates' operations, worked out once for each distinct shape."""

from __future__ import annotations

import numpy as np

from ironlaw.machine.efficiency import collective_seconds
from ironlaw.plan.cluster.candidates import Array
from ironlaw.plan.cluster.system import System
from ironlaw.workload.sizes import Size


def distinct(function, *columns: Size) -> Array:  # type: ignore[no-untyped-def]
    """`function` on the distinct rows of the columns only: layouts share most of their shapes.

    Rows are numbered column by column, which sorts numbers; `np.unique(axis=0)` sorts rows and takes ten times longer.
    """
    spread = np.broadcast_arrays(*columns)
    if len(spread[0]) <= 64:  # finding out which are alike takes longer
        return np.asarray(function(*spread))
    row_number = np.zeros(len(spread[0]), dtype=np.int64)
    for column in spread:
        if column[0] != column.min() or column[0] != column.max():
            values, code = np.unique(column, return_inverse=True)
            _, row_number = np.unique(row_number * len(values) + code.reshape(-1), return_inverse=True)
    _, first, back = np.unique(row_number, return_index=True, return_inverse=True)
    return np.asarray(function(*(column[first] for column in spread)))[back.reshape(-1)]


def collective(kind: str, size: Array, ranks: Array, inside: Array, system: System) -> Array:
    """One collective; `inside`: ranks of the group that share an island."""
    fabric = system.fabric

    def seconds(s: Array, n: Array, g: Array) -> Array:
        return np.asarray(collective_seconds(kind, s, n, g, fabric=fabric))

    return distinct(seconds, size, ranks, np.clip(inside, 1.0, ranks))
