"""Everything in the catalogue under one name each, as plain documents to show: figures with their sources."""

from __future__ import annotations

from typing import Any

from ironlaw.catalog.accelerators import Accelerator, accelerator, accelerator_names
from ironlaw.catalog.devices import device_names
from ironlaw.catalog.figures import Figure, source
from ironlaw.catalog.models import model_entry, model_names, released_names
from ironlaw.catalog.money import grid, grid_names, price
from ironlaw.catalog.nodes import Node, node, node_names
from ironlaw.errors import UserError, did_you_mean


def entry_names() -> dict[str, list[str]]:
    """Section to names."""
    return {
        "accelerators": list(accelerator_names()),
        "devices": list(device_names()),
        "nodes": list(node_names()),
        "models": model_names(),
        "released models": released_names(),
        "grids": list(grid_names()),
    }


def entry(name: str) -> dict[str, Any]:
    """`{kind, name, title, facts: {key: text}, figures: {key: {value, source, note}}}`; UserError if unknown."""
    names = entry_names()
    if name in names["nodes"]:
        return _node(name, node(name))
    if name in names["models"] or name in names["released models"]:
        return _model(name)
    if name in names["grids"]:
        found = grid(name)
        figures = {"kg_co2_per_kwh": _figure(found.kg_co2_per_kwh)}
        return {"kind": "grid", "name": name, "title": name, "facts": {"year": str(found.year)}, "figures": figures}
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
    figures = {key: _figure(figure) for key, figure in found.figures().items()}
    quoted = price(found.name)
    if quoted is not None:
        for quote in quoted.rent:
            figures[f"rent_usd_per_hour ({quote.provider}, {quote.date})"] = _figure(quote.usd)
        if quoted.purchase is not None:
            figures[f"purchase_usd ({quoted.purchase.provider}, {quoted.purchase.date})"] = _figure(quoted.purchase.usd)
    facts = {"vendor": found.vendor, "generation": found.generation, "default node": found.default_node}
    if found.note:
        facts["note"] = found.note
    return {"kind": "accelerator", "name": found.name, "title": found.product, "facts": facts, "figures": figures}


def _node(name: str, found: Node) -> dict[str, Any]:
    facts = {
        "accelerators": str(found.accelerators),
        "scale-up domain": f"{found.scale_up_accelerators} accelerators",
        "fabric": found.fabric,
        "source": source(found.source).title,
    }
    figures = {
        key: _figure(figure)
        for key in ("nics", "nic_bytes_per_second", "host_watts", "system_watts")
        if (figure := getattr(found, key)) is not None
    }
    return {"kind": "node", "name": name, "title": found.product, "facts": facts, "figures": figures}


def _model(name: str) -> dict[str, Any]:
    found = model_entry(name)
    facts = {key: str(value) for key, value in found["model"].items()}
    figures = {"parameters": {"value": found["parameters"], "source": found["source"], "url": "", "note": ""}}
    return {"kind": "model", "name": name, "title": name, "facts": facts, "figures": figures}


def _figure(figure: Figure) -> dict[str, Any]:
    cited = source(figure.source)
    return {"value": figure.value, "source": cited.title, "url": cited.url, "note": figure.note}
