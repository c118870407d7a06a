"""Errors of the fits of `fit_operations.py`, and the TOML files they are kept in."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any

import numpy as np
from operations_data import NOT_PLANNED, REFERENCES, Array, Table

from ironlaw.machine.efficiency.store import load_efficiency

FOLDER = Path(__file__).parent.parent / "src" / "ironlaw" / "machine" / "efficiency" / "constants"
PREFERRED = {"fp8": "trtllm", "nvfp4": "trtllm"}
INHERITS = {
    "ampere_graphics": ("ampere", "GA10x: only streaming kernels measured; matmul and attention as on A100"),
    "turing": ("volta", "not measured: constants of Volta"),
    "cdna2": ("cdna3", "not measured: constants of CDNA3"),
    "cdna3": ("hopper", "CDNA3: only collectives measured; the rest as on Hopper"),
    "cdna4": ("cdna3", "not measured: constants of CDNA3"),
    "tpu": ("assumed", "TPU: not measured; plausible constants"),
    "volta": ("ampere", "V100: no attention or streaming kernel measured; as on A100"),
    "xe2": ("hopper", "Arc B-series: what is not measured is as on Hopper"),
}
BEST = {
    "cdna2": (0.9, 560 / 294e12, "147.0 TFLOP/s a die at 1024x14080x19968"),
    "cdna3": (0.7, 750 / 782e12, "781.9 TFLOP/s at 4096x10240x4864"),
}
"""Share of the peak in an endless tile, and joules per FLOP, at which the best of many shapes comes out as measured."""
ORDER = ("flash_attention", "trtllm_mha", "flashinfer", "trtllm", "triton")


@dataclass
class Record:
    """One group of constants with its errors."""

    operation: str
    generation: str
    key: str
    constants: Any
    rows: int
    fitted: int
    inside: tuple[float, float, float]  # median, mean, p90 of absolute relative error
    outside: tuple[float, float, float] | None
    percentiles: tuple[float, float]  # of ln(measured / predicted), on held-out rows if any
    per_accelerator: dict[str, tuple[float, float, float]]
    sources: str
    held_out: Array  # absolute relative error of each row that took no part in the fit
    baseline: tuple[float, float, float] = (0.0, 0.0, 0.0)
    transfer: dict[str, float] = field(default_factory=dict)
    note: str = ""


def errors(predicted: Array, measured: Array) -> tuple[float, float, float]:
    """Median, mean and 90th percentile of |predicted / measured - 1|."""
    e = np.abs(predicted / measured - 1)
    return float(np.median(e)), float(e.mean()), float(np.percentile(e, 90))


def summarise(
    operation: str,
    generation: str,
    key: str,
    constants: Any,
    train: Table,
    test: Table,
    everything: Table,
    predict: Callable[[Table], Array],
) -> Record:
    """Errors of `constants` on the fitted rows, on the held-out ones, and by accelerator (held out)."""
    judged = test if len(test.seconds) else train
    predicted = predict(judged)
    logs = np.log(judged.seconds / predicted)
    names = np.array(judged.accelerator)
    return Record(
        operation, generation, key, constants, len(everything.seconds), len(train.seconds),
        errors(predict(train), train.seconds),
        errors(predicted, judged.seconds) if len(test.seconds) else None,
        (float(np.percentile(logs, 10)), float(np.percentile(logs, 90))),
        {
            n: errors(predicted[names == n], judged.seconds[names == n])
            for n in dict.fromkeys(judged.accelerator)
        },
        _sources(everything.source),
        np.abs(predicted / judged.seconds - 1) if len(test.seconds) else np.empty(0),
    )  # fmt: skip


def _sources(names: list[str], limit: int = 6) -> str:
    """Distinct sources, without private numbers of copies, the longest list cut."""
    clean = {re.sub(r"\(?\w+ file id \d+\)?", "", n).replace("  ", " ").strip(" ,") for n in names}
    shown = sorted(clean)[:limit]
    return "; ".join(shown) + (f"; and {len(clean) - limit} more" if len(clean) > limit else "")


def _percent(values: tuple[float, float, float] | None) -> str:
    return " / ".join(f"{100 * v:.1f}" for v in values) if values else "-"


def error_lines(records: list[Record]) -> list[str]:
    """Markdown tables of the errors, one per operation."""
    lines = []
    for operation in dict.fromkeys(r.operation for r in records):
        lines += ["", f"### {operation}", ""]
        lines.append("| generation | group | accelerator | rows | in sample | held out | baseline | not in the fit |")
        lines.append("|---|---|---|---:|---:|---:|---:|---|")
        for r in (r for r in records if r.operation == operation):
            moved = ", ".join(f"{k} {100 * v:.1f}" for k, v in r.transfer.items())
            first = f"{r.rows} | {_percent(r.inside)}"
            for i, (name, error) in enumerate(r.per_accelerator.items()):
                outside = _percent(error if r.outside else None)
                start = f"| {r.generation} | {r.key} | {name} |"
                if i == 0:
                    lines.append(f"{start} {first} | {outside} | {_percent(r.baseline)} | {moved} |")
                else:
                    lines.append(f"{start} | | {outside} | | |")
    return lines


KINDS = {
    "matmul, bf16": ("matmul", ("bf16",)),
    "matmul, fp8 and below, cast included": ("matmul", ("fp8", "fp8_block", "nvfp4")),
    "attention, forward": ("attention", ()),
    "collectives inside an island": ("collectives", ()),
    "collectives between islands": ("network", ()),
    "streaming kernels": ("streaming", ()),
}
"""Of the summary: operation and formats; all without any."""


def summary_lines(records: list[Record]) -> list[str]:
    """Markdown table of held-out errors over all rows of a kind of operation, and over its groups' medians."""
    lines = ["| operation | groups | rows held out | median | mean | p90 | best and worst group | baseline |"]
    lines.append("|---|---:|---:|---:|---:|---:|---|---:|")
    for name, (operation, formats) in KINDS.items():
        chosen = [r for r in records if r.operation == operation and (not formats or r.key.split("/")[0] in formats)]
        judged = [r for r in chosen if len(r.held_out)]
        e = np.concatenate([r.held_out for r in judged])
        pooled = [np.median(e), e.mean(), np.percentile(e, 90)]
        groups = sorted(float(np.median(r.held_out)) for r in judged)
        usual = float(np.median([r.baseline[0] for r in judged]))
        cells = [name, len(judged), len(e), *(f"{100 * v:.1f}" for v in pooled)]
        cells += [f"{100 * groups[0]:.1f} to {100 * groups[-1]:.1f}", f"{100 * usual:.1f}"]
        lines.append("| " + " | ".join(str(cell) for cell in cells) + " |")
    return lines


def _value(value: Any) -> str:
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, str):
        return '"' + value.replace('"', "'") + '"'
    if isinstance(value, Mapping):
        return "{ " + ", ".join(f'"{k}" = {_value(v)}' for k, v in value.items()) + " }"
    if isinstance(value, int):
        return str(value)
    text = f"{value:.4g}"
    return text if any(c in text for c in ".e") else text + ".0"


def _section(title: str, record: Record) -> list[str]:
    lines = ["", f"[{title}]"]
    for f in fields(record.constants):
        value = getattr(record.constants, f.name)
        if f.name != "evidence" and not f.name.startswith("cast_") and value is not None:
            lines.append(f"{f.name} = {_value(value)}")
    lines += [f"[{title}.evidence]", f"source = {_value(record.sources)}", f"rows = {record.rows}"]
    lines += [f"log_error_p10 = {record.percentiles[0]:.3f}", f"log_error_p90 = {record.percentiles[1]:.3f}"]
    return [*lines, "assumed = true", f"note = {_value(record.note)}"] if record.note else lines


def write_tomls(records: list[Record]) -> None:
    """One file per generation, measured or inherited."""
    FOLDER.mkdir(parents=True, exist_ok=True)
    assumed = assumed_records(records)
    for generation in sorted({r.generation for r in records} | set(INHERITS)):
        mine = [r for r in [*records, *assumed] if r.generation == generation]
        lines = [f"# Constants of {generation}: written by benchmarks/fit_operations.py, do not edit."]
        lines.append("# Fractions are of the nominal figures under [accelerators]; see docs/notes/operations.md.")
        if generation in INHERITS:
            parent, note = INHERITS[generation]
            lines += [f'inherits = "{parent}"', f"inherits_note = {_value(note)}"]
        kernels = sorted((r for r in mine if r.operation == "attention"), key=lambda r: ORDER.index(r.key))
        mine = [r for r in mine if r not in kernels[1:]]  # plans take one kernel
        libraries = {r.key.split("/")[0]: r.key.split("/")[1] for r in mine if "/" in r.key}
        libraries.update({k: v for k, v in PREFERRED.items() if any(r.key == f"{k}/{v}" for r in mine)})
        lines += [f"default_library = {_value(libraries)}"] * bool(libraries)
        for r in mine:
            title = f'matmul."{r.key}"' if r.operation == "matmul" else r.operation
            lines += _section(title, r)
        for name, reference in REFERENCES.items():
            if reference.generation == generation:
                lines += ["", f'[accelerators."{name}"]']
                lines += [f"{k} = {_value(v)}" for k, v in reference.toml().items()]
        (FOLDER / f"{generation}.toml").write_text("\n".join(lines) + "\n", encoding="utf-8")


def assumed_records(records: list[Record]) -> list[Record]:
    """Constants nobody measured, from what is nearest: they are marked `assumed`."""
    found = {(r.operation, r.generation): r for r in records if r.key in ("bf16", "streaming")}
    hopper_matmul, hopper_stream = found["matmul", "hopper"], found["streaming", "hopper"]
    out = []
    for (operation, generation), r in found.items():
        if operation != "matmul" or ("streaming", generation) in found:
            continue
        rate = r.constants.memory_fraction
        ratio = rate / hopper_stream.constants.fraction["elementwise"]
        fraction = {k: v * ratio for k, v in hopper_stream.constants.fraction.items()}
        constants = replace(hopper_stream.constants, fraction=fraction)
        note = "bandwidth seen in this generation's skinny matmuls; kinds of kernel relative to it as on Hopper"
        out.append(_assumed(hopper_stream, generation, constants, note, 0.25))
    of_island = {r.generation: r for r in records if r.operation == "collectives"}
    rack = of_island["blackwell"].constants.wide_switch_fraction  # GB200's, in a rack of 72
    ultra = of_island["blackwell_ultra"]
    ultra.constants = replace(ultra.constants, wide_switch_fraction=rack)
    for generation, (level, joules, best) in BEST.items():
        constants = replace(hopper_matmul.constants, attainable_fraction=level, joules_per_flop=joules)
        note = (
            f"shape constants of Hopper; level from {best}, ROCm 6.2, "
            "in the table of maximum achievable matmul FLOPS of github.com/stas00/ml-engineering, "
            "compute/accelerator/README.md"
        )
        out.append(_assumed(hopper_matmul, generation, constants, note, 0.35))
    assumed = load_efficiency("assumed").matmul["bf16"]
    systolic = replace(assumed, attainable_fraction=0.85, operand_elements=0.0, evidence=None)
    note = (
        "level from the fastest step published of MaxText (64B on v5p, MFU 70.3%, README of github.com/google/maxtext);"
        " in a systolic array operands pass from cell to cell: a tile's edges cost nothing (Google, Cloud TPU "
        "architecture)"
    )
    return [*out, _assumed(hopper_matmul, "tpu", systolic, note, 0.35)]


def _assumed(like: Record, generation: str, constants: Any, note: str, width: float) -> Record:
    return replace(
        like, generation=generation, constants=constants, rows=0, outside=None, percentiles=(-width, width),
        sources="none", note=note,
    )  # fmt: skip


def write_networks(records: list[Record]) -> None:
    """All networks between islands in one file."""
    lines = ["# Networks between islands: written by benchmarks/fit_operations.py, do not edit."]
    for r in records:
        if r.generation not in NOT_PLANNED:
            lines += _section(r.generation, r)
    (FOLDER / "networks.toml").write_text("\n".join(lines) + "\n", encoding="utf-8")
