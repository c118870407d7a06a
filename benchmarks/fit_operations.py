"""Learns the constants of single operations from measured tables and writes them as TOML.

    python benchmarks/fit_operations.py CALIBRATION_FOLDER [--only hopper] [--report errors.md]

Reads gemm.csv.gz, attention_forward.csv.gz, collectives.csv.gz and memory_bandwidth.csv; writes
src/ironlaw/machine/efficiency/constants/*.toml and results/operations.md, and prints the error tables of
docs/notes/operations.md.
Deterministic: one seed, 60% of the shapes to fit (at most 1,200 rows a group), the rest held out.
"""

from __future__ import annotations

import argparse
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
from operations_collectives import collective_records
from operations_data import (
    REFERENCES,
    STREAM_INDEX,
    Array,
    Table,
    attention_tables,
    matmul_tables,
    streaming_rows,
)
from operations_fit import baseline, by_accelerator, device, fit, subsample, transfer
from operations_report import Record, error_lines, summarise, summary_lines, write_networks, write_tomls

from ironlaw.catalog.formats import number_format
from ironlaw.machine.efficiency.attention import attention_seconds
from ironlaw.machine.efficiency.hardware import AttentionConstants, MatmulConstants, StreamingConstants
from ironlaw.machine.efficiency.matmul import matmul_seconds

SUMMARY = Path(__file__).parent / "results" / "operations.md"  # shown by accuracy_report.py

# --- matmul ----------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class CastingConstants(MatmulConstants):
    """Of a library that quantises the left operand from 2 bytes in the call, which plans time by itself."""

    cast_traffic: float = 1.0  # passes over the operand
    cast_seconds: float = 3e-6  # launch


def predict_matmul(table: Table, constants: MatmulConstants, dtype: str) -> Array:
    """Seconds of every row of a matmul table."""

    def one(part: Table, name: str) -> Array:
        hardware = device(name, matmul={dtype: constants})
        seconds = np.asarray(matmul_seconds(**part.columns, dtype=dtype, hardware=hardware))
        if not isinstance(constants, CastingConstants):
            return seconds
        moved = part.columns["m"] * part.columns["k"] * (2 + number_format(dtype).bytes_per_element())
        cast = constants.cast_traffic * part.columns.get("batch", 1.0) * moved / hardware.memory_bytes_per_second
        return np.asarray(seconds + constants.cast_seconds + cast)

    return by_accelerator(table, one)


SAME_PROCESS = {"blackwell_ultra": "blackwell"}
"""Generations made in the process of an earlier one: a product takes no more energy there."""

APPLY_SCALES = ("blackwell", "blackwell_graphics", "blackwell_ultra")
"""Generations whose matrix units apply the scales of blocks themselves."""

NEXT_WIDER = {"nvfp4": "fp8", "fp8_block": "fp8"}
"""A product takes no more than its operands' share of the bytes of another's energy, where matrix units apply the
scales: benchmarks last too short to show what they draw. One library on one B200 multiplies under scales of blocks of
32 as fast as under one scale (2,348 and 2,369 TFLOP/s, flashinfer#2256), another on a B300 5% slower (7.16 and 6.81 ms
a layer, Transformer Engine's profiling of products).
"""


def most_joules(generation: str, key: str, found: dict[tuple[str, str], MatmulConstants]) -> float:
    """What an operation of this format takes at most, by those that are known."""
    dtype, _, library = key.partition("/")
    before = found.get((SAME_PROCESS.get(generation, ""), key))
    wider = NEXT_WIDER.get(dtype, "") if generation in APPLY_SCALES else ""
    of_wider = found.get((generation, f"{wider}/{library}"))
    bounds = [before.joules_per_flop] if before else []
    if of_wider:
        share = number_format(dtype).bytes_per_element() / number_format(wider).bytes_per_element()
        bounds.append(of_wider.joules_per_flop * share)
    return min(bounds, default=np.inf)


def fit_matmul(table: Table, key: str, most: float = np.inf) -> MatmulConstants:
    """Constants of one generation and format (and library, where formats need a cast); `most` joules per operation."""
    dtype = key.split("/")[0]
    flops = 2 * table.columns["m"] * table.columns["n"] * table.columns["k"]
    large = flops > np.percentile(flops, 75)
    watts = np.array([REFERENCES[a].power_watts for a in table.accelerator])
    energy = float(np.median((watts * table.seconds / flops)[large]))
    start = MatmulConstants(0.95, 12.0, 100.0, 0.3, 0.85, 2.0, 2.5e-6, energy, 1e-3)
    names = ["attainable_fraction", "operand_elements", "fill_elements", "wave_rigidity", "memory_fraction"]
    names += ["split_traffic", "launch_seconds", "joules_per_flop", "throttle_seconds"]
    if dtype != "bf16":
        start = CastingConstants(**vars(start))
        names += ["cast_traffic", "cast_seconds"]
    upper = {"joules_per_flop": most}
    return fit(start, names, lambda c: predict_matmul(table, c, dtype), table.seconds, upper=upper)


def matmul_records(folder: Path, only: str | None) -> list[Record]:
    """Fits and errors of all matmul groups."""
    records = []
    found: dict[tuple[str, str], MatmulConstants] = {}
    for (generation, key), table in matmul_tables(folder).items():  # in order: wider formats and older chips first
        if only and generation != only:
            continue
        # one library version was much slower on B300's block-scaled fp8 than all later ones: held out
        old = [generation == "blackwell_ultra" and key == "fp8_block/sglang" and "0.5.10" in s for s in table.source]
        current = table.pick(~np.array(old))
        held = current.held_out()
        train, test = subsample(current.pick(~held)), current.pick(held)
        most = most_joules(generation, key, found)
        constants = found[generation, key] = fit_matmul(train, key, most)
        dtype = key.split("/")[0]
        peaks = np.array([REFERENCES[a].tflops[dtype.split("_")[0]] * 1e12 for a in table.accelerator])
        ideal = 2 * table.columns["m"] * table.columns["n"] * table.columns["k"] / peaks
        record = summarise(
            "matmul",
            generation,
            key,
            constants,
            train,
            test,
            current,
            lambda t, c=constants, d=dtype: predict_matmul(t, c, d),
        )
        record.baseline = baseline(ideal, table.seconds)
        record.transfer = transfer(
            current, lambda t, k=key, j=most: fit_matmul(t, k, j), lambda t, c, d=dtype: predict_matmul(t, c, d)
        )
        records.append(record)
    return records


# --- attention -------------------------------------------------------------------------------------------


def predict_attention(table: Table, constants: AttentionConstants) -> Array:
    """Seconds of every row of an attention table: causal, forward, half precision."""

    def one(part: Table, name: str) -> Array:
        return np.asarray(attention_seconds(**part.columns, hardware=device(name, attention=constants)))

    return by_accelerator(table, one)


def attention_work(table: Table) -> Array:
    """FLOPs of each row, half of the scores masked."""
    c = table.columns
    return 2 * c["batch"] * c["heads"] * c["sequence"] ** 2 * c["head_size"]


def fit_attention(table: Table, softmax: float = 20.0) -> AttentionConstants:
    """Constants of one attention kernel on one generation."""
    flops = attention_work(table)
    watts = np.array([REFERENCES[a].power_watts for a in table.accelerator])
    long = flops > np.percentile(flops, 75)
    energy = float(np.median((watts * table.seconds / flops)[long]))
    start = AttentionConstants(0.8, softmax, 100.0, 0.5, 1.0, 5e-6, energy, 0.85)
    names = ["attainable_fraction", "softmax_head_elements", "fill_keys", "tail_rigidity", "extra_traffic"]
    names += ["launch_seconds", "joules_per_flop"]
    if len(set(table.columns["head_size"])) == 1:
        names.remove("softmax_head_elements")
    return fit(start, names, lambda k: predict_attention(table, k), table.seconds, starts=3)


def attention_records(folder: Path, only: str | None) -> list[Record]:
    """Fits and errors of all attention groups."""
    records = []
    tables, dropped = attention_tables(folder)
    print("attention rows above peak:", dropped)
    softmax: dict[str, float] = {}  # kernels measured at both head sizes first, others take their value
    for (generation, kernel), table in sorted(tables.items(), key=lambda item: -len(set(item[1].columns["head_size"]))):
        if only and generation != only:
            continue
        held = table.held_out()
        train, test = subsample(table.pick(~held)), table.pick(held)
        constants = replace(fit_attention(train, min(softmax.get(generation, 20.0), 25.0)), kernel=kernel)
        softmax.setdefault(generation, constants.softmax_head_elements)
        record = summarise(
            "attention",
            generation,
            kernel,
            constants,
            train,
            test,
            table,
            lambda t, k=constants: predict_attention(t, k),
        )
        peaks = np.array([REFERENCES[a].tflops["bf16"] * 1e12 for a in table.accelerator])
        record.baseline = baseline(attention_work(table) / peaks, table.seconds)
        record.transfer = transfer(table, fit_attention, predict_attention)
        records.append(record)
    return records


# --- streaming -------------------------------------------------------------------------------------------


def predict_streaming(table: Table, constants: StreamingConstants) -> Array:
    """Seconds of every row of the streaming table."""
    kinds = list(STREAM_INDEX)
    fraction = np.array([constants.fraction[kinds[int(i)]] for i in table.columns["kind"]])
    bandwidth = np.array([REFERENCES[a].memory_gb_per_second * 1e9 for a in table.accelerator])
    return constants.launch_seconds + (table.columns["size"] + constants.ramp_bytes) / (bandwidth * fraction)


def streaming_records(folder: Path, only: str | None) -> list[Record]:
    """Fraction of bandwidth by kind of kernel. Launch and ramp cannot be told apart: launch is 2 us."""
    (table, left), records = streaming_rows(folder), []
    print("streaming rows left out:", left)
    generations = np.array([REFERENCES[a].generation for a in table.accelerator])
    for generation in sorted(set(generations)):
        part = table.pick(generations == generation)
        if len(part.seconds) < 5 or (only and generation != only):
            continue
        held = np.array(["Qwen" in s for s in part.source])
        train, test = part.pick(~held), part.pick(held)
        bandwidth = np.array([REFERENCES[a].memory_gb_per_second * 1e9 for a in train.accelerator])
        fraction = {}
        for kind, index in STREAM_INDEX.items():
            mask = train.columns["kind"] == index
            if mask.any():
                net = np.maximum(train.seconds[mask] - 2e-6, 1e-7)
                fraction[kind] = float(np.median(train.columns["size"][mask] / net / bandwidth[mask]))
        # above 95% of the datasheet a 50 MB cache is still at work, not the memory
        fraction = {k: min(v, 0.95) for k, v in fraction.items()}
        constants = StreamingConstants(fraction, 0.0, 2e-6)
        record = summarise(
            "streaming", generation, "streaming", constants, train, test, part,
            lambda t, c=constants: predict_streaming(t, c),
        )  # fmt: skip
        peak = np.array([REFERENCES[a].memory_gb_per_second * 1e9 for a in part.accelerator])
        record.baseline = baseline(part.columns["size"] / peak, part.seconds)
        records.append(record)
    return records


def main() -> None:
    """Fit everything, write the TOML files, print the tables."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("folder", type=Path, help="folder of the calibration tables")
    parser.add_argument("--only", help="fit one generation and write nothing")
    parser.add_argument("--report", type=Path, help="also write the error tables here")
    arguments = parser.parse_args()
    islands, networks = collective_records(arguments.folder, arguments.only)
    records = [
        *matmul_records(arguments.folder, arguments.only),
        *attention_records(arguments.folder, arguments.only),
    ]
    records += [*islands, *streaming_records(arguments.folder, arguments.only)]
    lines = error_lines([*records, *networks])
    if not arguments.only:
        write_tomls(records)
        write_networks(networks)
        SUMMARY.write_text("\n".join(summary_lines([*records, *networks])) + "\n", encoding="utf-8")
    print("\n".join(lines))
    if arguments.report:
        arguments.report.write_text("\n".join(lines) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
