"""The types of the values in a stored ledger, checked on loading because files get edited, truncated and mixed up.

Facts that are not listed here are shown unchanged; no calculation uses them.
"""

from __future__ import annotations

from functools import cache
from typing import Annotated, Any, Literal

from pydantic import BaseModel, Strict, ValidationError, create_model

from ironlaw.errors import UserError, shortened

Number = Annotated[int, Strict()] | Annotated[float, Strict()]  # "3" is text, true is not a number
Known = Number | None
Numbers = dict[str, Known] | None
MANY: Any = list  # untyped aliases, to subscript with types created at run time
NAMED: Any = dict

NUMBERS = (
    "accumulation", "batch", "bubble_fraction", "clock_hertz", "clock_highest_hertz", "compute_units",
    "copy_bytes_per_second", "cores", "data_cpu_fraction", "data_workers", "delayed_gap_seconds", "delayed_seconds",
    "evaluations_per_step", "gradient_syncs_per_step", "host_bytes", "larger_batch", "launches_per_step",
    "logging_fraction", "machine_speed", "matmul_peak_flops_per_second", "memory_bytes", "micro_batch",
    "module_fraction", "other_load", "pace", "paused_seconds", "peak_bytes", "processor_throttled",
    "profiled_step_seconds", "rank", "ranks_per_host", "recompile_seconds", "recomputed_seconds", "reserved_bytes",
    "rollbacks", "rollouts", "sequence", "skipped_updates", "slow_steps_fraction", "slowest_rank", "steps_done",
    "steps_inferred", "threads", "tokens_per_micro_batch", "world_size",
)  # fmt: skip
TEXTS = (
    "autocast", "attention_reason", "data_place", "data_stage", "device", "finished", "gradients_found", "host",
    "interrupted", "machine", "measured", "not_planned", "peak_at", "peak_basis", "precision", "precision_reason",
    "profiled", "source", "started",
)  # fmt: skip

DATA_FRACTIONS = ("padded_fraction", "cropped_fraction", "documents_cut_fraction")
WHEREVER = ("gradients_uncleared", "gradients_zeroed", "graphs_retained", "left_in_eval", "optimizer_rebuilt",
            "unscaled", "updates_again")  # fmt: skip
PARTS = ("attention_mask_rank", "attention_masked", "broadcasts", "busy_thread", "copies", "decompositions",
         "denormals", "float64_operations", "forwards_unread", "gradients_idle", "graphs_again", "half_operations",
         "inputs_differentiated", "module_again", "operation_slow", "outputs_unread", "padding", "passes_apart",
         "programs_beside",
         "rows_untouched", "steps_grow", "values_unread", "vocabulary_unused", "weights_combined",
         "written_out", "zeros_multiplied")  # fmt: skip


def _record(**types: Any) -> Any:
    """Create a type of objects with at least these keys; a key given as (type, default) may be missing."""
    fields: Any = {name: kind if isinstance(kind, tuple) else (kind, ...) for name, kind in types.items()}
    made: Any = create_model("Record", **fields)
    return made


def _facts() -> dict[str, Any]:
    """Return the type of each fact that is present, by name."""
    at, text = _record(place=str | None, per_step=Number), str | None
    more = dict.fromkeys(("of_backward", "optimizer", "rows", "unused"), (Number, 0))
    part: Any = _record(part=Number, place=text, lines=(list[str], []), operation=(text, None), **more)
    kernels = _record(fused=Number, native=Number)
    segment: Any = _record(lane=str, label=str, style=str, start=Number, end=Number)
    update: Any = _record(
        optimizer=str, like=text, shapes=list[tuple[list[int], int]], element_bytes=Annotated[int, Strict()],
        fused=bool, decays=Annotated[bool, Strict()], extra_states=Annotated[int, Strict()], held_bytes=Number,
        foreach=(bool, False),
    )  # fmt: skip
    odd: Any = _record(module=str, shape=list[Number], aligned=list[Number], seconds=Number, aligned_seconds=Number)
    rates = dict.fromkeys(("tokens_per_second", "wait_seconds", *DATA_FRACTIONS), (Known, None))
    words = dict.fromkeys(("packing", "slowest_stage", "source"), (text, None))
    supply = dict.fromkeys(("supply_tokens_per_second", "times_demand"), Known)
    return {
        "data": _record(**rates, **words, stage_tokens_per_second=(Numbers, None)),
        "data_supply": _record(**supply, demand_tokens_per_second=Number, stage_tokens_per_second=Numbers, basis=str),
        **dict.fromkeys(NUMBERS, Number),
        **dict.fromkeys(TEXTS, str),
        **dict.fromkeys(("memory_groups", "odd_sizes", "peak_parts", "wall_seconds"), Numbers),
        **dict.fromkeys(
            ("profiled_seconds", "rank_delayed_seconds", "rank_own_seconds", "rank_removable_seconds"), list[Number]
        ),
        **dict.fromkeys(WHEREVER, at),
        **dict.fromkeys(PARTS, part),
        "places": dict[str, str],
        "update_lines": list[str],
        "planned_again": _record(after_steps=Number, step_seconds=Number, total_seconds=Number),
        **dict.fromkeys(("attention_seconds", "fused_calls_seconds"), kernels),
        **dict.fromkeys(("bf16", "float64", "half"), _record(saved=Number, place=(text, None))),
        "fused_update": _record(seconds=Number, fused_seconds=Number, name=str),
        "left_on": MANY[_record(name=str, saved=Number, remedy=str, place=text)],
        "lines": dict[str, list[tuple[str, Number]]],
        "line_slow": _record(place=str, lines=list[str], forward=Number, backward=Number),
        **dict.fromkeys(("machine_slowdown", "slowdown"), _record(compute=Number, memory=Number)),
        "memory_curve": list[tuple[Number, Number]],
        "memory_grows": _record(bytes_per_step=Number, holder=text, place=text),
        "misaligned": MANY[odd],
        "sync_points": MANY[
            _record(place=str, call=str, per_step=Number, seconds=Number, parts=(dict[str, Number], {}))
        ],
        "thread_gain": _record(matmul=Number, elementwise=Number),
        "timeline": _record(seconds=Number, lanes=list[str], segments=MANY[segment]),
        "updates": MANY[update],
        "versions": dict[str, str],
        "virtual": bool,
    }


@cache
def _stored() -> type[BaseModel]:
    optional: Any = {name: (kind | None, None) for name, kind in _facts().items()}
    facts: Any = create_model("Facts", model=(dict[str, Any], {}), **optional)
    pair = tuple[Number, Number] | None
    estimate: Any = _record(value=Number, interval=pair, origin=str, basis=str)
    columns: Any = dict.fromkeys(("count", "flops", "bytes_moved", "seconds", "joules"), (Known, None))
    keys: Any = dict.fromkeys(("phase", "kind", "operation", "origin"), (str, ...))
    line: Any = create_model("Line", **keys, **columns, bound=(str | None, None))
    memory: Any = _record(component=str, bytes=Known, origin=str)
    made: type[BaseModel] = _record(
        side=Literal["plan", "run"], totals=NAMED[str, estimate], phase_seconds=dict[str, Number], lines=MANY[line],
        memory=MANY[memory], facts=facts,
    )  # fmt: skip
    return made


def check_types(document: dict[str, Any], what: object) -> None:
    """UserError naming the first value of a stored ledger that has the wrong type."""
    try:
        _stored().model_validate(document)
    except ValidationError as error:
        first = error.errors()[0]
        where, value = _followed(document, first["loc"])
        wrong = f"lacks {first['loc'][-1]}" if first["type"] == "missing" else f"holds {shortened(repr(value), 40)}"
        raise UserError(
            f"{what} is damaged: {where or 'it'} {wrong}, and is not what Ironlaw wrote; take it from a copy, or make "
            "it again"
        ) from None


def _followed(document: Any, location: tuple[int | str, ...]) -> tuple[str, Any]:
    """Return the path and value of an error. pydantic's location also contains names of types, which are skipped."""
    names = []
    for part in location:
        there = isinstance(document, dict) and part in document
        if there or (isinstance(document, list) and isinstance(part, int) and part < len(document)):
            document = document[part]
            names.append(str(part))
    return ".".join(names), document
