"""A trace as a document, so that a run can be planned after the process that holds the module has ended."""

from __future__ import annotations

from dataclasses import asdict, fields
from typing import Any

from pydantic import TypeAdapter

from ironlaw.workload.trace import ModuleTrace
from ironlaw.workload.trace_table import TracedOperation

_COLUMNS = [field.name for field in fields(TracedOperation)]


def trace_to_json(trace: ModuleTrace) -> dict[str, Any]:
    """Operations as rows of columns: a model of a few thousand calls stays under a megabyte."""
    document = asdict(trace)
    document["columns"] = _COLUMNS
    document["operations"] = [[getattr(op, name) for name in _COLUMNS] for op in trace.operations]
    return document


def trace_from_json(document: dict[str, Any]) -> ModuleTrace:
    values = {key: value for key, value in document.items() if key not in ("variants", "columns")}
    values["operations"] = [dict(zip(document["columns"], row, strict=True)) for row in document["operations"]]
    return TypeAdapter(ModuleTrace).validate_python(values)
