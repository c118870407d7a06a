"""Constants of accelerator generations and networks: TOML files in `constants/`, read once.

A file either contains all groups or has `inherits = "<generation>"` and overrides some of them. Inherited groups
are marked as assumed, with a wide interval, and listed by `Efficiency.assumptions()`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import lru_cache
from pathlib import Path
from typing import Any, TypeVar

from ironlaw.errors import UserError, did_you_mean
from ironlaw.files import read_toml
from ironlaw.machine.efficiency.hardware import (
    AttentionConstants,
    CollectiveConstants,
    Efficiency,
    Evidence,
    Hardware,
    MatmulConstants,
    NetworkConstants,
    StreamingConstants,
)

Constants = TypeVar("Constants")
FOLDER = Path(__file__).parent / "constants"
NETWORKS, ASSUMED = "networks", "assumed"
INHERITED_LOG_ERROR = 0.4
"""Half width of the interval of inherited constants in log space: a factor of 1.5 up and down."""


def generations() -> tuple[str, ...]:
    """Return the names of all generations with constants, measured or inherited."""
    return tuple(sorted(path.stem for path in FOLDER.glob("*.toml") if path.stem not in (NETWORKS, ASSUMED)))


@lru_cache(maxsize=32)
def load_efficiency(generation: str) -> Efficiency:
    """Load the constants of one generation. UserError with the nearest names if there are none."""
    document = _document(generation)
    parent = load_efficiency(document["inherits"]) if "inherits" in document else None
    note = document.get("inherits_note", "")

    matmul = {key: _assumed(value, note) for key, value in parent.matmul.items()} if parent else {}
    matmul |= {key: _group(MatmulConstants, value) for key, value in document.get("matmul", {}).items()}

    def one(kind: type, name: str) -> Any:
        if name in document:
            return _group(kind, document[name])
        inherited = getattr(parent, name, None)
        return _assumed(inherited, note) if inherited else None

    return Efficiency(
        generation=generation,
        matmul=matmul,
        attention=one(AttentionConstants, "attention"),
        streaming=one(StreamingConstants, "streaming"),
        collectives=one(CollectiveConstants, "collectives"),
        default_library=document.get("default_library", dict(parent.default_library) if parent else {}),
    )


def assumed_efficiency(generation: str) -> Efficiency:
    """Return plausible constants for a generation without measurements."""
    return replace(load_efficiency(ASSUMED), generation=generation)


def assumed_network() -> NetworkConstants:
    return _group(NetworkConstants, _document(ASSUMED)["network"])


@lru_cache(maxsize=8)
def load_network(name: str) -> NetworkConstants:
    """Load the constants of one kind of network: infiniband, roce, efa, tcpx, ethernet."""
    networks = read_toml(FOLDER / f"{NETWORKS}.toml")
    if name not in networks:
        raise UserError(f"unknown network {name}; {did_you_mean(name, networks)}")
    return _group(NetworkConstants, networks[name])


def reference_hardware(generation: str, name: str) -> Hardware:
    """Return an accelerator with the nominal figures that the constants were fitted with.

    Fractions are relative to these figures: a catalogue that states another peak or bandwidth should scale
    the fractions accordingly.
    """
    known = _document(generation).get("accelerators", {})
    if name not in known:
        raise UserError(f"{name} is not a reference accelerator of {generation}; {did_you_mean(name, known)}")
    return Hardware(name=name, efficiency=load_efficiency(generation), **known[name])


def reference_accelerators() -> dict[str, str]:
    """Return the generation of each reference accelerator, over all files."""
    return {name: g for g in generations() for name in _document(g).get("accelerators", {})}


@lru_cache(maxsize=32)
def _document(generation: str) -> dict[str, Any]:
    path = FOLDER / f"{generation}.toml"
    if generation == NETWORKS or not path.is_file():
        raise UserError(f"no constants for generation {generation}; {did_you_mean(generation, generations())}")
    return read_toml(path)


def _group(kind: Callable[..., Constants], values: dict[str, Any]) -> Constants:
    fields = dict(values)
    evidence = fields.pop("evidence", None)
    return kind(**fields, evidence=Evidence(**evidence) if evidence else None)


def _assumed(group: Any, note: str) -> Any:
    """Return the constants marked as assumed, with an interval of at least `INHERITED_LOG_ERROR` on each side."""
    old = group.evidence or Evidence("", 0, 0.0, 0.0)
    evidence = Evidence(
        old.source, 0, min(old.log_error_p10, -INHERITED_LOG_ERROR), max(old.log_error_p90, INHERITED_LOG_ERROR),
        assumed=True, note=note,
    )  # fmt: skip
    return replace(group, evidence=evidence)
