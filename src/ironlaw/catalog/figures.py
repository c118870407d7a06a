"""Figures with their sources, of which every number in the catalog consists.

The data are TOML files beside this module. A figure is written as

    bf16 = { value = 989.4e12, source = "nvidia-h100-whitepaper", note = "dense" }

and its `source` is a key of `sources.toml`, which gives title and address. A figure without a citable source is left
out and read as `None`: absent means unknown, never zero.
"""

from __future__ import annotations

import tomllib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, fields
from functools import cache
from pathlib import Path
from typing import Any, TypeVar

from ironlaw.errors import UserError, did_you_mean

T = TypeVar("T")
DATA = Path(__file__).parent


@dataclass(frozen=True, slots=True)
class Figure:
    """A number and its source."""

    value: float  # in SI units; the field that holds the figure names the unit (bytes, bytes/s, FLOP/s, W, Hz)
    source: str  # key of `sources.toml`; `source(key)` gives title and address
    note: str = ""  # needed to use the number: a convention, or how conflicting sources were resolved

    def __float__(self) -> float:
        return float(self.value)


@dataclass(frozen=True, slots=True)
class Source:
    """A public document that figures are taken from."""

    key: str
    title: str
    url: str
    note: str = ""


@cache
def read_toml(*parts: str) -> dict[str, Any]:
    """Parse a data file of the catalog, once: its tables must not be changed. The path is relative to this package."""
    with open(DATA.joinpath(*parts), "rb") as file:
        return tomllib.load(file)


def stems(folder: str) -> tuple[str, ...]:
    """Return the sorted names of the TOML files in a folder. Lists the directory, parses nothing."""
    return tuple(sorted(path.stem for path in (DATA / folder).glob("*.toml")))


def figure(entry: Mapping[str, Any], key: str = "value") -> Figure:
    """Build a figure from its TOML table; `key` is the entry that holds the number."""
    return Figure(float(entry[key]), entry["source"], entry.get("note", ""))


def figures(entry: Any) -> dict[str, Figure]:
    """Return every known figure of an entry by its field, for listings and tests."""
    found = {field.name: getattr(entry, field.name) for field in fields(entry)}
    return {key: value for key, value in found.items() if isinstance(value, Figure)}


def read_entry(kind: type[T], name: str, data: Mapping[str, Any]) -> T:
    """Build a dataclass of the catalog from its table, with figures where fields have that type. Asserts known keys."""
    types = {field.name: str(field.type) for field in fields(kind)}  # type: ignore[arg-type]
    assert data.keys() <= types.keys(), f"{name}: unknown keys {sorted(data.keys() - types.keys())}"
    values: dict[str, Any] = {key: figure(v) if types[key].startswith("Figure") else v for key, v in data.items()}
    return kind(**{"name": name} | values)


def unknown(kind: str, name: str, known: Iterable[str]) -> UserError:
    """Return the one-line error for a name that is not in the catalog, with the nearest names."""
    choices = sorted(set(known))
    typed = name.strip().lower()
    holding = [choice for choice in choices if len(typed) >= 3 and typed in choice]
    if 1 <= len(holding) <= 4:  # the user typed part of a name, which spelling distance does not match
        return UserError(f"unknown {kind} '{name}': did you mean {' or '.join(holding)}?")
    return UserError(f"unknown {kind} '{name}': {did_you_mean(typed, choices)}")


def lookup(kind: str, name: str, table: Mapping[str, T]) -> T:
    """Return the entry with this name, or raise the error of `unknown`."""
    if name not in table:
        raise unknown(kind, name, table)
    return table[name]


@cache
def sources() -> dict[str, Source]:
    """Return all entries of `sources.toml`."""
    return {key: Source(key=key, **entry) for key, entry in read_toml("sources.toml").items()}


def source(key: str) -> Source:
    """Return title and address for a figure's `source` key."""
    return lookup("source", key, sources())
