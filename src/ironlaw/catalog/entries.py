"""All catalogue entries by name, as plain documents for display: figures with their sources."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ironlaw.catalog.accelerators import Accelerator, accelerator, accelerator_names
from ironlaw.catalog.devices import device_names
from ironlaw.catalog.figures import Figure, figures, source
from ironlaw.catalog.models import model_entry, model_names, released_names
from ironlaw.catalog.money import grid, grids, price
from ironlaw.catalog.nodes import Node, node, node_names
from ironlaw.errors import UserError, did_you_mean


def entry_names() -> dict[str, list[str]]:
    """Return the names in each section."""
    return {
        "accelerators": list(accelerator_names()),
        "devices": list(device_names()),
        "nodes": list(node_names()),
        "models": model_names(),
        "released models": released_names(),
        "grids": sorted(grids()),
    }


def entry(name: str) -> dict[str, Any]:
    """Return `{kind, name, title, facts: {key: text}, figures: {key: {value, source, note}}}`; UserError if unknown."""
    names = entry_names()
    if name in names["nodes"]:
        return _node(name, node(name))
    if name in names["models"] or name in names["released models"]:
        return _model(name)
    if name in names["grids"]:
        found = grid(name)
        return _entry("grid", name, name, {"year": str(found.year)}, figures(found))
    try:
        return _accelerator(accelerator(name))
    except UserError:
        if name in names["accelerators"]:
            raise
        known = [n for section in names.values() for n in section]
        if any(known_name.startswith(name) for known_name in names["accelerators"]):
            raise  # ambiguous: its message lists the variants
        raise UserError(f"nothing in the catalog is called {name!r}: {did_you_mean(name, known)}") from None


def _accelerator(found: Accelerator) -> dict[str, Any]:
    known, quoted = found.figures(), price(found.name)
    if quoted is not None:
        known |= {f"rent_usd_per_hour ({q.provider}, {q.date})": q.usd for q in quoted.rent}
        if (bought := quoted.purchase) is not None:
            known[f"purchase_usd ({bought.provider}, {bought.date})"] = bought.usd
    facts = {"vendor": found.vendor, "generation": found.generation, "default node": found.default_node}
    if found.note:
        facts["note"] = found.note
    return _entry("accelerator", found.name, found.product, facts, known)


def _node(name: str, found: Node) -> dict[str, Any]:
    facts = {
        "accelerators": str(found.accelerators),
        "scale-up domain": f"{found.scale_up_accelerators} accelerators",
        "fabric": found.fabric,
        "source": source(found.source).title,
    }
    return _entry("node", name, found.product, facts, figures(found))


def _model(name: str) -> dict[str, Any]:
    found = model_entry(name)
    facts = {key: str(value) for key, value in found["model"].items()}
    cited = {"value": found["parameters"], "source": found["source"], "url": "", "note": ""}
    return _entry("model", name, name, facts, {}) | {"figures": {"parameters": cited}}


def _entry(kind: str, name: str, title: str, facts: dict[str, str], known: Mapping[str, Figure]) -> dict[str, Any]:
    cited = {key: (figure, source(figure.source)) for key, figure in known.items()}
    return {
        "kind": kind, "name": name, "title": title, "facts": facts,
        "figures": {
            key: {"value": figure.value, "source": of.title, "url": of.url, "note": figure.note}
            for key, (figure, of) in cited.items()
        },
    }  # fmt: skip
