"""What a trace found, and as a document: a run can be planned after the process that holds the module has ended."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field, fields
from typing import Any

from pydantic import TypeAdapter

from ironlaw.workload.trace_inputs import Assumed
from ironlaw.workload.trace_kernels import TracedOperation

_COLUMNS = [each.name for each in fields(TracedOperation)]


@dataclass(frozen=True)
class ModuleTrace:
    """One micro-batch of a module, and what exists before it starts (bytes and counts)."""

    operations: list[TracedOperation]
    name: str
    parameters: int  # elements that are trained or frozen, shared ones once
    trained_parameters: int
    trained_tensors: int
    parameter_bytes: int
    trained_bytes: int
    buffer_bytes: int
    input_bytes: int
    output_shapes: tuple[tuple[int, ...], ...]
    unit_bytes: tuple[int, ...] = ()  # of parameters, as FSDP gathers them: numbered layers each, all else together
    inputs: dict[str, str] = field(default_factory=dict)  # "8x2048:int64" by name
    assumptions: tuple[Assumed, ...] = ()


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
