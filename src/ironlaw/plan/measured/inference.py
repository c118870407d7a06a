"""Measured serving: rows of `inference.csv` as systems with what was measured, and what the planner says of them.

    runs, rejected = read_serving(rows)      # csv.DictReader's rows
    predict(runs[0])                         # {"tpot_seconds": ..., "output_tokens_per_second": ..., ...}

Scenarios: `decode` and `prefill` are single passes; `fixed-concurrency` is so many requests at once, of which each is a
prompt and its output, whether they start together or follow each other; `offline` and `server` have as many requests as
the cache holds. Columns are described in `docs/validate.md`.
"""

from __future__ import annotations

import csv
import io
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from ironlaw.catalog.accelerators import Accelerator, accelerator
from ironlaw.catalog.devices import taken
from ironlaw.catalog.models import is_model
from ironlaw.errors import UserError
from ironlaw.files import read_text
from ironlaw.model.config import ModelConfig
from ironlaw.plan.measured import parsing
from ironlaw.plan.measured.parsing import Row
from ironlaw.plan.serving.demand import Demand, demand_of
from ironlaw.plan.serving.rates import LATEST, Rates, ServingEngine, rates_of, serving_engine
from ironlaw.plan.serving.steady import at_concurrency, most_at_once, unlimited
from ironlaw.plan.serving.systems import Formats, ServingLayout, system_of
from ironlaw.plan.serving.timing import System, decode_seconds, prompt_seconds, room_tokens

COLUMNS = ("scenario", "weight_format")
"""Columns that only measured serving has."""

VARIED = 0.9
"""Mean over nominal length where a source draws lengths between 80 and 100% of nominal."""


@dataclass(frozen=True)
class ServingRun:
    """One row. Lengths in tokens, `inputs` of a prompt, `outputs` new ones; None: not given."""

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
    concurrency: float
    together: bool  # all prompts start at once, as one pass
    whole: bool  # the rate's time has the prompt in it
    measured: dict[str, float]
    params: float
    suspect: bool
    assumed: tuple[str, ...]


def is_serving(header: Iterable[str]) -> bool:
    """Whether a CSV file's columns are those of measured serving."""
    return set(COLUMNS) <= set(header)


def serving_rows(path: Path) -> list[dict[str, str]] | None:
    """The rows of a CSV file of measured serving; None where its columns are those of training, or it is unreadable."""
    try:
        reader = csv.DictReader(io.StringIO(read_text(path, "CSV"), newline=""))
        return list(reader) if is_serving(reader.fieldnames or ()) else None
    except (UserError, OSError, csv.Error):
        return None  # the reader of training runs says what is wrong


def read_serving(rows: Iterable[Row]) -> tuple[list[ServingRun], list[tuple[str, str, str]]]:
    """Runs, and (id, group, reason) of rows that cannot be planned."""
    runs, rejected = [], []
    demands: dict[str, Demand] = {}
    for number, row in enumerate(rows, 2):
        try:
            runs.append(_run(row, number, demands))
        except UserError as error:
            rejected.append((row.get("id") or f"line {number}", row.get("group") or "", str(error)))
    return runs, rejected


def predict(run: ServingRun, rates: Rates | None = None) -> dict[str, float | None]:
    """Seconds and rates of a row: `ttft_seconds`, `tpot_seconds`, `prefill_tokens_per_second`,
    `output_tokens_per_second`, `requests_per_second`, `kv_tokens`; None where the row asks for none."""
    s = run.system
    found: dict[str, Any] = dict.fromkeys(MEASURES)
    found["kv_tokens"] = max(0.0, float(room_tokens(s, run.engine.memory_fraction, run.engine.of_free)))
    length = run.inputs + run.outputs / 2
    prompt = prompt_seconds(s, run.concurrency if run.together else 1.0, max(run.inputs, 1.0))
    if run.scenario in ("decode", "fixed-concurrency"):
        found["tpot_seconds"] = decode_seconds(s, run.concurrency, length)
    if run.scenario == "prefill":
        found["ttft_seconds"] = prompt
    elif run.scenario == "decode":
        found["ttft_seconds"] = prompt
        each = found["tpot_seconds"] + (prompt / max(run.outputs, 1.0) if run.whole else 0.0)
        found["output_tokens_per_second"] = run.concurrency / each
    elif run.scenario == "fixed-concurrency":
        steady = at_concurrency(s, run.concurrency, run.inputs, run.outputs, run.together)
        found |= {"ttft_seconds": steady.ttft_seconds, "output_tokens_per_second": steady.tokens_per_second}
        found["tpot_seconds"] = steady.tpot_seconds
        found["output_tokens_per_second"] *= run.layout.replicas
    else:
        rate = unlimited(s, most_at_once(s, run.engine, run.inputs, run.outputs), run.inputs, run.outputs)
        found["output_tokens_per_second"] = rate * run.layout.replicas
    if found["ttft_seconds"] is not None and run.inputs:
        passed = run.concurrency if run.together else 1.0
        found["prefill_tokens_per_second"] = passed * run.inputs / found["ttft_seconds"]
    if found["output_tokens_per_second"] is not None and run.outputs:
        found["requests_per_second"] = found["output_tokens_per_second"] / run.outputs
    return {key: None if value is None or not np.isfinite(value) else float(value) for key, value in found.items()}


MEASURES = (
    "ttft_seconds", "tpot_seconds", "prefill_tokens_per_second", "output_tokens_per_second", "requests_per_second",
    "kv_tokens",
)  # fmt: skip


def _run(row: Row, number: int, demands: dict[str, Demand]) -> ServingRun:
    assumed: list[str] = []
    name = parsing.needed(row, "accelerator")  # the record takes one where a user would be asked which
    device = accelerator(next(iter(taken(name) or (name,))))
    year = _year(row)
    engine = _engine(parsing.needed(row, "engine"), year, assumed)
    notes = row.get("notes") or ""
    scenario = parsing.needed(row, "scenario")
    formats = Formats(
        parsing.needed(row, "weight_format"), row.get("activation_format") or "", row.get("kv_format") or "fp16"
    )
    layout = _layout(row, scenario, assumed)
    backend = _backend(row, engine)
    demand = _demand(row, demands, assumed)
    rates = rates_of(engine, device, formats.weights, backend, year, demand.experts > 0)
    varied = VARIED if "lengths vary" in notes.lower() else 1.0
    measured = {key: value for key in MEASURES if (value := parsing.number(row, key, 0)) is not None}
    together = scenario in ("prefill", "decode") or "static batch" in notes.lower() or "whole batch" in notes.lower()
    return ServingRun(
        id=row.get("id") or f"line {number}",
        group=row.get("group") or "all",
        scenario=scenario,
        engine=engine,
        device=device,
        system=system_of(demand, device, engine, layout, formats, rates=rates),
        layout=layout,
        formats=formats,
        year=year,
        backend=backend,
        inputs=varied * (parsing.number(row, "input_tokens", 0) or 0.0),
        outputs=varied * (parsing.number(row, "output_tokens", 0) or 0.0),
        concurrency=parsing.number(row, "concurrency", 0) or 1.0,
        together=together,
        whole="prefill is in" in notes.lower() or "includes prefill" in notes.lower(),
        measured=measured,
        params=parsing.number(row, "params", 0) or float(demand.parameters),
        suspect="SUSPECT" in notes,
        assumed=tuple(assumed),
    )


def _engine(name: str, year: int, assumed: list[str]) -> ServingEngine:
    """The record plans engines that nobody measured, where a user would be asked which is meant. vLLM captures graphs
    since its release 0.2.6 of December 2023."""
    try:
        return serving_engine("vllm-2023" if name.lower() == "vllm" and year <= 2023 else name)
    except UserError:
        assumed.append(f"engine = the base of all engines ({name} is not known)")
        return ServingEngine(name, key=name.strip().lower())


def _layout(row: Row, scenario: str, assumed: list[str]) -> ServingLayout:
    """Degrees of one copy of the model; devices beside them are copies, or share experts."""
    count = parsing.whole(row, "accelerators") or 1
    tp, pp, ep, dp = (parsing.whole(row, name) for name in ("tp", "pp", "ep", "dp"))
    experts = (parsing.number(row, "experts", 0) or 0.0) > 0
    if tp is None:
        tp = 1 if (pp or 1) > 1 else count
        if count > 1:
            assumed.append(f"tp = {tp} (not said)")
    pp = pp or 1
    if tp * pp > count:
        raise UserError(f"tp = {tp} and pp = {pp} need more than accelerators = {count}")
    rest = count // (tp * pp)
    if rest > 1 and (experts and ((ep or 1) > tp or (dp or 1) > 1)):  # ranks that share experts, attention apart
        return ServingLayout(devices=count, tp=tp, pp=pp, attention_dp=rest)
    if experts and "attention-dp enabled" in (row.get("notes") or "").lower():  # its ranks are printed as tp
        return ServingLayout(devices=tp * pp, tp=1, pp=pp, attention_dp=tp, replicas=max(rest, 1))
    return ServingLayout(devices=tp * pp, tp=tp, pp=pp, replicas=max(rest, 1))


def _demand(row: Row, known: dict[str, Demand], assumed: list[str]) -> Demand:
    """The catalogue's model of that name, else the row's own columns."""
    name = (row.get("model") or "").strip().lower()
    if name and name in known:
        return known[name]
    if name and is_model(name):
        known[name] = demand_of(ModelConfig.named(name))
        return known[name]
    assumed.append(f"model = the row's columns ({name or 'no name'} is not catalogued)")
    need = {key: parsing.number(row, key, 0) for key in ("layers", "hidden", "heads", "ffn", "vocab")}
    missing = [key for key, value in need.items() if not value]
    if missing:
        raise UserError(f"model '{name}' is not catalogued, and {', '.join(missing)} is not given")
    layers, hidden, heads, ffn, vocab = (float(value or 0) for value in need.values())
    head = parsing.number(row, "head_dim", 0) or hidden / heads
    cached = parsing.number(row, "kv_heads", 0) or heads
    matrices = 3 if (parsing.number(row, "gated_ffn", 0) or 0.0) else 2
    experts, active = parsing.number(row, "experts", 0) or 0.0, parsing.number(row, "experts_active", 0) or 0.0
    attention = layers * (2 * hidden * heads * head + 2 * hidden * cached * head)
    network = layers * matrices * hidden * ffn
    total = parsing.number(row, "params", 0) or attention + network * max(experts, 1.0) + vocab * hidden
    routed = network * experts
    rest = total - attention - (routed or network)
    table = vocab * hidden if rest > 1.6 * vocab * hidden else 0.0
    return Demand(
        layers, hidden, vocab, max(total - routed - table, attention), table, vocab * hidden, routed,
        active / experts if experts else 0.0, 2 * cached * head * layers, 0.0, 0.0, cached, 4 * heads * head * layers,
    )  # fmt: skip


def _backend(row: Row, engine: ServingEngine) -> str:
    if engine.family != "gguf":
        return ""
    said = f"{row.get('engine_version') or ''}".lower()
    return next((name for name in ("vulkan", "hip", "rocm") if name in said), "").replace("rocm", "hip")


def _year(row: Row) -> int:
    said = (row.get("date") or "")[:4]
    return int(said) if said.isdigit() else LATEST
