"""How weights are stored that models are served from: `stored_formats.toml` as a table.

stored_format("q4_k_m").bits       # 4.89: the mean over a whole file of Llama 3.1 8B
stored_format("int4-awq").wide     # True: embedding and output layer stay in 16 bits
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from typing import Any

from ironlaw.catalog.figures import read_toml, unknown


@dataclass(frozen=True, slots=True)
class StoredFormat:
    """Bits per weight with its share of scales."""

    name: str
    bits: float
    source: str  # key of `sources.toml`
    wide: bool = False  # embedding and output layer stay in 16 bits; else `bits` is the mean over the whole file
    experts: bool = False  # only experts are stored so, everything else in 16 bits
    note: str = ""

    @property
    def bytes_per_weight(self) -> float:
        return self.bits / 8


def stored_formats() -> tuple[str, ...]:
    """All names, sorted."""
    return tuple(sorted(_table()["formats"]))


def stored_format(name: str) -> StoredFormat:
    """The format of that name, whatever its case; UserError with the nearest for others."""
    table, typed = _table(), name.strip().lower()
    if typed not in table["formats"]:
        raise unknown("weight format", name, table["formats"])
    line = table["formats"][typed]
    return StoredFormat(name=typed, **line | {"source": table["sources"][line["source"]]})


@cache
def _table() -> dict[str, Any]:
    return read_toml("stored_formats.toml")
