"""Measured serving: rows of `inference.csv` as systems with their measurements, and the planner's predictions for them.

    runs, rejected = read_serving(rows)      # csv.DictReader's rows
    predict(runs[0])                         # {"tpot_seconds": ..., "output_tokens_per_second": ..., ...}
    serving_record(runs, rejected)["groups"]["gpt-fast"]["tpot_seconds"]["median"]

Scenarios: `decode` and `prefill` are single passes; `fixed-concurrency` is a number of requests at once, each a prompt
and its output, which start together or follow each other; `offline` and `server` have as many requests as the cache
holds. `docs/validate.md` describes the columns.

The record has errors by group and measure beside the trivial baseline, and the coverage of the intervals. The baseline
of decoding is weight bytes over 60% of the memory's rate; that of prompts is 2 N FLOPs over 40% of the dense peak.
Errors are relative to the measurement; bias is the median signed error, above 0 where the plan is too large.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from ironlaw.catalog.accelerators import Accelerator, accelerator
from ironlaw.catalog.devices import lines
from ironlaw.catalog.formats import stored_format
from ironlaw.catalog.models import is_model
from ironlaw.errors import UserError
from ironlaw.model.config import ModelConfig
from ironlaw.model.dimensions import MoEConfig
from ironlaw.plan.cluster.candidates import plain_model
from ironlaw.plan.measured.accelerator import accelerator_of
from ironlaw.plan.measured.parsing import Cells, Row, read_table
from ironlaw.plan.measured.read import Rejected
from ironlaw.plan.measured.validate import errors, not_planned
from ironlaw.plan.serving.demand import Demand, demand_of
from ironlaw.plan.serving.rates import LATEST, ServingEngine, interval_of, rates_of, serving_engine
from ironlaw.plan.serving.systems import Formats, ServingLayout, system_of
from ironlaw.plan.serving.timing import (
    System,
    at_concurrency,
    decode_seconds,
    most_at_once,
    prompt_seconds,
    room_error,
    room_tokens,
    unlimited,
)

COLUMNS = ("scenario", "weight_format")
"""Columns found only in tables of measured serving."""

VARIED = 0.9
"""Mean over nominal length, for sources that draw lengths between 80 and 100% of nominal."""

MOST_WEIGHTS = 0.6
"""Share of the memory that weights take at most where whole copies serve as many requests as they can."""

QUEUED = {
    (128, 128): 30_000, (128, 2048): 3000, (500, 2000): 3000, (1000, 1000): 3000, (2048, 128): 3000,
    (128, 4096): 1500, (1000, 2000): 1500, (2048, 2048): 1500, (5000, 500): 1500, (20_000, 2000): 1000,
}  # fmt: skip
"""Requests of a run of trtllm-bench by tokens of prompts and outputs, as its page of results says (TensorRT-LLM,
docs/source/performance/perf-overview.md, Preparing a Dataset); 1,000 in, 2,000 out as the next longer ones."""

EARLY = (("vllm", 2023, "vllm-2023"), ("llama.cpp", 2024, "llama.cpp-2024"))
"""Engines, a year, and the entry of their releases until then."""

MTP_ACCEPTANCE = 0.85
"""Multi-token prediction proposes one token beside the model's own, of which 85 to 90% are accepted (DeepSeek-V3, arXiv
2412.19437, 5.4.3). The layer that proposes it is not counted."""


MEASURES = {
    "ttft_seconds": ("prompt", 1), "tpot_seconds": ("decode", 1), "prefill_tokens_per_second": ("prompt", -1),
    "output_tokens_per_second": ("requests", -1), "requests_per_second": ("requests", -1), "kv_tokens": ("", 1),
}  # fmt: skip
"""Measures, with the kind of their interval, and whether they are in seconds (1) or rates (-1)."""


@dataclass(frozen=True)
class ServingRun:
    """One row of measured serving. Lengths in tokens: `inputs` of a prompt, `outputs` of its output; 0: not given."""

    id: str
    group: str
    scenario: str
    engine: ServingEngine
    device: Accelerator
    system: System
    layout: ServingLayout
    formats: Formats
    year: int
    backend: str
    inputs: float
    outputs: float
    concurrency: float  # requests at once per copy of the model
    together: bool  # all prompts start at once, as one pass
    queued: float  # requests of the whole run, per copy of the model, if no limit is on how many wait
    whole: bool  # the time of the output rate includes the prompt
    measured: dict[str, float]
    suspect: bool
    assumed: tuple[str, ...]


def serving_rows(path: Path) -> list[dict[str, str]] | None:
    """Return the rows of a CSV file of measured serving; None if its columns are those of training."""
    names, rows = read_table(path)
    return list(rows) if set(COLUMNS) <= set(names) else None


def read_serving(rows: Iterable[Row]) -> tuple[list[ServingRun], list[Rejected]]:
    """Return the runs, and (id, group, reason) of the rows that cannot be planned."""
    runs, rejected = [], []
    demands: dict[str, Demand] = {}
    for number, row in enumerate(rows, 2):
        cells = Cells(row)
        identity = cells.text("id") or f"line {number}"
        try:
            runs.append(_run(identity, cells, demands))
        except UserError as error:
            rejected.append((identity, cells.text("group"), str(error)))
    return runs, rejected


def predict(run: ServingRun) -> dict[str, float | None]:
    """Return the planned `MEASURES` of a row; None for those that do not apply to its scenario."""
    s = run.system
    found: dict[str, Any] = dict.fromkeys(MEASURES)
    found["kv_tokens"] = max(0.0, float(room_tokens(s, run.engine.memory_fraction, run.engine.of_free)))
    length = run.inputs + run.outputs / 2
    prompt = prompt_seconds(s, run.concurrency if run.together else 1.0, max(run.inputs, 1.0))
    if run.scenario == "prefill":
        found["ttft_seconds"] = prompt
    elif run.scenario == "decode":
        found |= {"ttft_seconds": prompt, "tpot_seconds": decode_seconds(s, run.concurrency, length)}
        each = found["tpot_seconds"] + (prompt / max(run.outputs, 1.0) if run.whole else 0.0)
        found["output_tokens_per_second"] = run.concurrency / each
    elif run.scenario == "fixed-concurrency":
        steady = at_concurrency(s, run.concurrency, run.inputs, run.outputs, run.together)
        found |= {"ttft_seconds": steady.ttft_seconds, "tpot_seconds": steady.tpot_seconds}
        found["output_tokens_per_second"] = steady.tokens_per_second
    else:
        most = min(run.queued, most_at_once(s, run.engine, run.inputs, run.outputs))
        found["output_tokens_per_second"] = unlimited(s, most, run.inputs, run.outputs)
    if found["ttft_seconds"] is not None and run.inputs:
        passed = run.concurrency if run.together else 1.0
        found["prefill_tokens_per_second"] = passed * run.inputs / found["ttft_seconds"]
    for name in ("prefill_tokens_per_second", "output_tokens_per_second"):
        if found[name] is not None:
            found[name] *= run.layout.replicas
    if found["output_tokens_per_second"] is not None and run.outputs:
        found["requests_per_second"] = found["output_tokens_per_second"] / run.outputs
    return {key: None if value is None or not np.isfinite(value) else float(value) for key, value in found.items()}


def _run(identity: str, cells: Cells, demands: dict[str, Demand]) -> ServingRun:
    device = _with_threads(cells, _device(cells))
    said = cells.text("date")[:4]
    year = int(said) if said.isdecimal() else LATEST
    engine = _engine(cells, year)
    notes, scenario = cells.text("notes"), cells.needed_text("scenario")
    formats = Formats(
        cells.needed_text("weight_format"), cells.text("activation_format"), cells.text("kv_format") or "fp16"
    )
    demand = _demand(cells, demands)
    layout = _layout(cells, demand.experts > 0, engine.by_layers, _least(demand, device, formats))
    version = cells.lower("engine_version") if engine.family == "gguf" else ""
    backend = next((name for name in ("vulkan", "hip", "rocm") if name in version), "").replace("rocm", "hip")
    rates = rates_of(engine, device, formats.weights, backend, year, demand.experts > 0)
    system = _guessing(cells, system_of(demand, device, engine, layout, formats, backend, rates))
    varied = VARIED if "lengths vary" in notes.lower() else 1.0
    inputs, outputs = (varied * (cells.measured(f"{name}_tokens") or 0.0) for name in ("input", "output"))
    requests = max(1.0, (cells.measured("concurrency") or 1.0) / layout.replicas)
    room = room_tokens(system, engine.memory_fraction, engine.of_free) / demand.cached_tokens(
        max(inputs + outputs, 1.0)
    )
    if scenario == "fixed-concurrency" and requests > room >= 1:
        if engine.paged:  # others wait
            requests = float(room)
        elif not cells.text("kv_format"):
            cells.assumed.append("kv_format = fp8 (requests that ran at once would not fit with 16 bits)")
            system = replace(system, cache_bytes=1.0)
    together = scenario in ("prefill", "decode") or "static batch" in notes.lower() or "whole batch" in notes.lower()
    return ServingRun(
        id=identity,
        group=cells.text("group") or "all",
        scenario=scenario,
        engine=engine,
        device=device,
        system=system,
        layout=layout,
        formats=formats,
        year=year,
        backend=backend,
        inputs=inputs,
        outputs=outputs,
        concurrency=requests,
        together=together,
        queued=_queued(cells) / layout.replicas,
        whole="prefill is in" in notes.lower() or "includes prefill" in notes.lower(),
        measured={key: value for key in MEASURES if (value := cells.number(key, 0)) is not None},
        suspect="SUSPECT" in notes,
        assumed=tuple(cells.assumed),
    )


def _device(cells: Cells) -> Accelerator:
    """Return the row's device. One whose maker prints no peak gets those of the fastest of its generation: decoding
    reads weights, and little of its time hangs on them."""
    device, note = accelerator_of(cells.needed_text("accelerator"))
    cells.assumed += [note] if note else []
    if cells.lower("interconnect") == "pcie":
        device = replace(device, link_bytes_per_second=None)
    if device.peak_flops_per_second:
        return device
    alike = [found for name in lines() if (found := accelerator(name)).generation == device.generation]
    peaks = {a.name: max((f.value for f in a.peak_flops_per_second.values()), default=0.0) for a in alike}
    fastest = max(alike, key=lambda a: peaks[a.name])
    cells.assumed.append(f"peak = that of {fastest.name} (the maker of {device.name} prints none)")
    return replace(device, peak_flops_per_second=fastest.peak_flops_per_second)


def _with_threads(cells: Cells, device: Accelerator) -> Accelerator:
    """Return a processor with the share of its cores that the row's threads use; any other device as it is."""
    said = re.search(r"(\d+) threads", cells.text("notes"))
    if said is None or not device.generation.startswith("cpu") or device.compute_units is None:
        return device
    share = min(1.0, int(said[1]) / device.compute_units.value)
    peaks = {name: replace(peak, value=share * peak.value) for name, peak in device.peak_flops_per_second.items()}
    return replace(device, peak_flops_per_second=peaks)


def _engine(cells: Cells, year: int) -> ServingEngine:
    """Return the row's engine; an unknown one, for which a user would be asked, gets the base constants. vLLM captures
    graphs since its release 0.2.6 of December 2023."""
    name, notes = cells.needed_text("engine"), cells.lower("notes")
    early = next((early for of, last, early in EARLY if name.lower() == of and year <= last), name)
    try:
        engine = serving_engine(early)
        if engine.key == "llama.cpp" and (said := re.search(r"(?:\bfa|flash attention) (on|off)", notes)):
            engine = replace(engine, score_bytes=0 if said[1] == "on" else serving_engine("llama.cpp-2024").score_bytes)
        return engine
    except UserError:
        cells.assumed.append(f"engine = the base of all engines ({name} is not known)")
        return ServingEngine(name, key=name.strip().lower())


def _queued(cells: Cells) -> float:
    """Return the requests of a whole run, if its source says how many; else infinity."""
    if "perf-overview" not in cells.text("source"):
        return math.inf
    return QUEUED.get((cells.whole("input_tokens") or 0, cells.whole("output_tokens") or 0), math.inf)


def _least(demand: Demand, device: Accelerator, formats: Formats) -> int:
    """Return the fewest devices, a power of two, of whose memory the weights take no more than `MOST_WEIGHTS`."""
    if device.memory_bytes is None:
        return 1
    taken = demand.parameters * stored_format(formats.weights).bytes_per_weight
    return 2 ** max(0, math.ceil(math.log2(taken / (MOST_WEIGHTS * device.memory_bytes.value))))


def _layout(cells: Cells, experts: bool, by_layers: bool, least: int) -> ServingLayout:
    """Return the degrees of one copy of the model; the remaining devices are copies, or share its experts. At full load
    many devices of which nothing else is said hold copies on `least` devices."""
    count = cells.whole("accelerators") or 1
    tp, pp, ep, dp = (cells.whole(name) for name in ("tp", "pp", "ep", "dp"))
    if (tp, pp, ep, dp) == (None,) * 4 and cells.text("scenario") in ("offline", "server") and least < count:
        return ServingLayout(tp=cells.assume("tp", least, "not said: copies"), replicas=count // least)
    each = count // (dp or 1)  # a copy's devices, if no degree of it is given
    if tp is None and pp is None and by_layers and each > 1:
        pp = cells.assume("pp", each, "not said: this engine divides layers")
    if tp is None:
        tp = 1 if (pp or 1) > 1 or each < 2 else cells.assume("tp", each, "not said")
    pp = pp or 1
    if tp * pp > count:
        raise UserError(f"tp = {tp} and pp = {pp} need more than accelerators = {count}")
    rest, wide = count // (tp * pp), max(dp or 1, (ep or 1) // tp)
    # Copies of attention that share experts: dp counts beside tp in vLLM, within tp in TensorRT-LLM and SGLang.
    if experts and rest > 1 and wide > 1 and ep != tp:
        wide = wide if rest % wide == 0 else rest
        return ServingLayout(tp, pp, attention_dp=wide, replicas=rest // wide)
    within = tp if "attention-dp enabled" in cells.lower("notes") else dp or 1
    within = within if experts and tp % within == 0 else 1
    return ServingLayout(tp // within, pp, attention_dp=within, replicas=rest)


def _guessing(cells: Cells, system: System) -> System:
    """Return the system with the row's speculation. One without a known acceptance is left out, with a note."""
    said = cells.lower("speculative")
    if "mtp" in said:
        cells.assumed.append(f"speculative = {said}: one token more a pass, of which 85% stand")
        return replace(system, drafted=1.0, acceptance=MTP_ACCEPTANCE)
    if said not in ("", "none", "no", "false", "0"):
        cells.assumed.append(f"speculative = {said}: planned without, its acceptance is not given")
    return system


def _demand(cells: Cells, known: dict[str, Demand]) -> Demand:
    """Return the demand of the catalogued model of that name, else of one with the row's sizes: tied or not, whichever
    is nearer to `params`. Further parameters in `params` (shared experts) are read by every pass."""
    name = cells.lower("model")
    if name in known:
        return known[name]
    if name and is_model(name):
        known[name] = demand_of(ModelConfig.named(name))
        return known[name]
    cells.assumed.append(f"model = the row's columns ({name or 'no name'} is not catalogued)")
    sizes: dict[str, Any] = {key: cells.needed(key) for key in ("layers", "hidden", "heads", "ffn", "vocab")}
    sizes |= {"kv_heads": cells.whole("kv_heads"), "head_size": cells.whole("head_dim")}
    experts = cells.whole("experts") or 0
    if experts:
        active = cells.needed("experts_active")
        sizes["moe"] = MoEConfig.model_construct(experts=experts, experts_per_token=active, expert_ffn=sizes["ffn"])
    gated = bool(cells.measured("gated_ffn"))
    forms = [
        demand_of(plain_model((gated, tied, experts > 0, False, False, False)).model_copy(update=sizes))
        for tied in (False, True)
    ]
    total = cells.measured("params") or forms[0].parameters
    form = min(forms, key=lambda form: abs(form.parameters - total))
    return replace(form, dense=max(form.head, form.dense + total - form.parameters))


# -- the record --------------------------------------------------------------------------------------------------------


BASELINE_MEMORY, BASELINE_PEAK = 0.6, 0.4


def serving_record(runs: Sequence[ServingRun], rejected: Sequence[Rejected]) -> dict[str, Any]:
    rows = [_row(run) for run in runs]
    groups = {
        group: _errors([row for row in rows if row["group"] == group]) for group in sorted({run.group for run in runs})
    }
    missing = not_planned(rejected)
    return {"kind": "serving", "groups": groups, "overall": _errors(rows), "rows": rows, "not_planned": missing}


def _row(run: ServingRun) -> dict[str, Any]:
    planned = predict(run)
    intervals = {name: _between(value, name, run) for name, value in planned.items() if value is not None}
    return {
        "id": run.id, "group": run.group, "engine": run.engine.name, "accelerator": run.device.name,
        "scenario": run.scenario, **{f"predicted_{name}": planned[name] for name in MEASURES},
        "interval": intervals, "measured": run.measured, "baseline": _baseline(run), "suspect": run.suspect,
        "assumed": list(run.assumed),
    }  # fmt: skip


def _between(value: float, name: str, run: ServingRun) -> list[float]:
    kind, sign = MEASURES[name]
    if not kind:
        off = room_error(run.system, value)
        return [value * max(0.0, 1 - off), value * (1 + off)]
    if name in ("output_tokens_per_second", "requests_per_second"):
        if run.scenario == "decode" and not run.whole:
            kind = "decode"
        elif run.scenario in ("offline", "server"):
            kind = "unlimited"
    if kind == "prompt" and not run.together:
        kind = "first"
    ends = sorted(value * math.exp(sign * end) for end in interval_of(run.engine, run.device, kind))
    return [float(end) for end in ends]


def _baseline(run: ServingRun) -> dict[str, float]:
    """Return back-of-the-envelope predictions, from one constant each."""
    s = run.system
    read_seconds = float(s.weight_bytes) / float(s.tp) / (BASELINE_MEMORY * float(s.bandwidth))
    prompt_rate = BASELINE_PEAK * float(s.peak) * float(s.tp) / (2 * float(s.demand.active))
    found = {"tpot_seconds": read_seconds, "prefill_tokens_per_second": prompt_rate}
    if run.inputs:
        found["ttft_seconds"] = run.inputs * run.concurrency / prompt_rate
    if run.scenario == "decode":
        found["output_tokens_per_second"] = run.layout.replicas * run.concurrency / read_seconds
    elif run.scenario == "fixed-concurrency" and run.outputs:
        seconds = run.concurrency * run.inputs / prompt_rate + run.outputs * read_seconds
        found["output_tokens_per_second"] = run.layout.replicas * run.concurrency * run.outputs / seconds
    return found


def _errors(rows: Sequence[dict[str, Any]]) -> dict[str, Any]:
    found: dict[str, Any] = {"rows": len(rows)}
    for name in MEASURES:
        pairs = [
            (row[f"predicted_{name}"], row["measured"][name], row["interval"][name], row["baseline"].get(name))
            for row in rows
            if name in row["measured"] and row[f"predicted_{name}"] is not None and row["measured"][name] > 0
        ]
        if not pairs:
            continue
        planned, measured = (np.array(column) for column in list(zip(*pairs, strict=True))[:2])
        simple = [abs(base / seen - 1) for _, seen, _, base in pairs if base is not None]
        inside = [low <= seen <= high for _, seen, (low, high), _ in pairs]
        found[name] = errors(planned, measured) | {
            "baseline_median": float(np.median(simple)) if simple else None, "in_interval": float(np.mean(inside)),
        }  # fmt: skip
    return found
