"""From what a trace recorded to the table of operations: kernels get names, storages become bytes."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import replace
from typing import Any

from ironlaw.ledger import Kind, Phase
from ironlaw.workload.trace_kernels import TracedOperation
from ironlaw.workload.trace_recorder import RecordedKernel, Recorder

ELEMENT_BYTES = {"fp32": 4, "bf16": 2, "fp16": 2, "fp64": 8}


def operations_of(recorder: Recorder) -> list[TracedOperation]:
    """The table of what was recorded: a row per kernel, and what it allocates and frees."""
    records = recorder.records
    if not records:
        return []
    _write_in_place(recorder)
    groups = _merged(records)
    place = {index: i for i, group in enumerate(groups) for index in group}
    operations = [_operation([records[index] for index in group]) for group in groups]
    memory: list[dict[str, Any]] = [defaultdict(int) for _ in operations]
    backward = next((i for i, op in enumerate(operations) if op.phase is Phase.BACKWARD), None)
    for life in recorder.lifetimes:
        if life.merged:
            continue
        born = place[min(life.born, len(records) - 1)]
        died = None if life.died is None else max(place[max(life.died, 0)], born)
        if died == born and len(groups[born]) > 1:
            continue  # inside a fused kernel
        waits = backward is not None and born < backward and (died is None or died >= backward)
        kind = "gradient" if life.gradient else "saved" if waits and not life.output else "temporary"
        memory[born][f"{kind}_bytes"] += life.bytes
        if died is not None and kind != "gradient":
            memory[died][f"frees_{kind}_bytes"] += life.bytes
    return [replace(op, **sizes) for op, sizes in zip(operations, memory, strict=True)]


def _write_in_place(recorder: Recorder) -> None:
    """Autograd adds gradients that meet at a tensor in place, except those of tensor subclasses, which fakes are."""
    for index, operands, total in recorder.accumulations:
        for operand in operands:
            if operand.died == index and not operand.merged and operand.bytes == total.bytes:
                # The sum lives on in the operand's bytes.
                total.born, operand.merged = operand.born, True
                break


def _merged(records: list[RecordedKernel]) -> list[list[int]]:
    """Indices of records by operation: the calls of a module that is one kernel come together.

    Composed, such a module uses its input twice, so that one addition of gradients is its own; a second is not.
    """
    groups: list[list[int]] = []
    for index, record in enumerate(records):
        before = records[groups[-1][-1]] if groups else None
        if (
            before is not None
            and record.origin.fused
            and (before.origin, before.call.phase) == (record.origin, record.call.phase)
            and not (_accumulates(record) and any(_accumulates(records[i]) for i in groups[-1]))
        ):
            groups[-1].append(index)
        else:
            groups.append([index])
    return groups


def _accumulates(record: RecordedKernel) -> bool:
    return record.call.phase is Phase.BACKWARD and record.function == "add"


def _operation(group: list[RecordedKernel]) -> TracedOperation:
    first = group[0]
    call, origin = first.call, first.origin
    if len(group) > 1:
        elements = max(r.call.elements for r in group)
        passes = 2 if call.phase is Phase.FORWARD else 3
        call = replace(
            call, kind=Kind.NORM, kernel=f"{origin.fused}_{call.phase}", elements=elements,
            bytes_moved=passes * elements * ELEMENT_BYTES[call.dtype],
        )  # fmt: skip
    elif _accumulates(first):
        call = replace(call, kernel="add_in_place")
    flops = call.flops
    if flops is not None and call.attention is None:
        flops = round(flops * origin.causal_share)
    return replace(call, name=_operation_name(first), flops=flops)


def _operation_name(record: RecordedKernel) -> str:
    """The module's path, then what it calls unless that is all the module does. The same in both phases."""
    origin = record.origin
    function = record.function.strip("_").removesuffix("_data").removesuffix("_backward")
    if record.call.kind is Kind.LOSS and not origin.leaf:
        return f"{origin.path}.loss".lstrip(".")
    if origin.leaf and origin.path and not origin.scope:
        return origin.path
    return ".".join(part for part in (origin.path, origin.scope or function) if part)
