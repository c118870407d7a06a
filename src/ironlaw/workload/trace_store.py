"""The result of a trace and its JSON form: a run can be planned after the module's process has ended."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field, fields
from typing import Any

from pydantic import TypeAdapter

from ironlaw.workload.trace_inputs import Assumed
from ironlaw.workload.trace_kernels import TracedOperation

_COLUMNS = [each.name for each in fields(TracedOperation)]


@dataclass(frozen=True)
class ModuleTrace:
    """The operations of a micro-batch of a module, and the tensors that exist before it (bytes and counts)."""

    operations: list[TracedOperation]
    name: str
    parameters: int  # elements, trained and frozen, shared ones once
    trained_parameters: int
    trained_tensors: int
    parameter_bytes: int
    trained_bytes: int
    buffer_bytes: int
    input_bytes: int
    unit_bytes: tuple[int, ...] = ()  # parameters as FSDP gathers them: each numbered layer, all others together
    inputs: dict[str, str] = field(default_factory=dict)  # "8x2048:int64" by name
    assumptions: tuple[Assumed, ...] = ()
    has_complex: bool = False  # trained parameters


def trace_to_json(trace: ModuleTrace) -> dict[str, Any]:
    """Stores operations as rows of columns: a few thousand calls take less than a megabyte."""
    document = asdict(trace)
    document["columns"] = _COLUMNS
    document["operations"] = [[getattr(op, name) for name in _COLUMNS] for op in trace.operations]
    return document


def trace_from_json(document: dict[str, Any]) -> ModuleTrace:
    known = {each.name for each in fields(ModuleTrace)}
    values = {key: value for key, value in document.items() if key in known}  # earlier versions kept more
    values["operations"] = [dict(zip(document["columns"], row, strict=True)) for row in document["operations"]]
    return TypeAdapter(ModuleTrace).validate_python(values)
