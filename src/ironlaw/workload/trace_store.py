"""A trace as a document, so that a run can be planned after the process that holds the module has ended."""

from __future__ import annotations

from dataclasses import asdict, fields
from typing import Any

from ironlaw.ledger import Kind, Phase
from ironlaw.workload.trace import Trace
from ironlaw.workload.trace_table import TracedOperation

_COLUMNS = [field.name for field in fields(TracedOperation)]


def trace_to_json(trace: Trace) -> dict[str, Any]:
    """Operations as rows of columns: a model of a few thousand calls stays under a megabyte."""
    document = asdict(trace)
    document["columns"] = _COLUMNS
    document["operations"] = [[getattr(op, name) for name in _COLUMNS] for op in trace.operations]
    return document


def trace_from_json(document: dict[str, Any]) -> Trace:
    values = dict(document)
    values.pop("variants", None)
    columns = values.pop("columns")
    values["operations"] = [_operation(dict(zip(columns, row, strict=True))) for row in values["operations"]]
    values["assumptions"] = tuple(tuple(one) for one in values.get("assumptions", ()))
    values["output_shapes"] = tuple(tuple(shape) for shape in values["output_shapes"])
    return Trace(**values)


def _operation(row: dict[str, Any]) -> TracedOperation:
    shapes = {name: tuple(row[name]) if row[name] is not None else None for name in ("matmul", "attention")}
    return TracedOperation(**(row | shapes | {"kind": Kind(row["kind"]), "phase": Phase(row["phase"])}))
