"""Learns the constants of single operations from measured tables and writes them as TOML.

    python benchmarks/fit_operations.py CALIBRATION_FOLDER [--only hopper] [--report errors.md]

Reads gemm.csv.gz, attention_forward.csv.gz, collectives.csv.gz and memory_bandwidth.csv; writes
src/ironlaw/machine/efficiency/constants/*.toml and prints the error tables of docs/notes/operations.md.
Deterministic: one seed, 60% of the shapes to fit (at most 800 rows a group), the rest held out.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from operations_data import (
    KIND_INDEX,
    NETWORK_RATE,
    NETWORKS,
    REFERENCES,
    STREAM_INDEX,
    Array,
    Table,
    attention_tables,
    collective_rows,
    matmul_tables,
    streaming_rows,
)
from operations_report import Record, error_lines, summarise, write_networks, write_tomls
from scipy.optimize import least_squares

from ironlaw.machine.efficiency import attention_seconds, collective_seconds, matmul_seconds
from ironlaw.machine.efficiency.hardware import (
    AttentionConstants,
    CollectiveConstants,
    Efficiency,
    Fabric,
    Hardware,
    MatmulConstants,
    NetworkConstants,
    StreamingConstants,
)

MAX_ROWS = 800
UPPER = {
    "attainable_fraction": 1.0, "wave_rigidity": 1.0, "memory_fraction": 0.97, "tail_rigidity": 1.0,
    "ring_fraction": 0.98, "direct_fraction": 0.98, "attained_fraction": 1.0, "split_traffic": 300.0,
    "cached_share": 0.95,
}  # fmt: skip
LARGE_CACHE = ("ada", "blackwell_graphics", "xe2")  # little bandwidth beside a large cache: reuse is seen
NO_STREAM = StreamingConstants({}, 0.0, 0.0)


def fit(
    constants: Any,
    names: list[str],
    predict: Callable[[Any], Array],
    seconds: Array,
    starts: int = 2,
    weights: Array | float = 1.0,
) -> Any:
    """Constants that minimise the soft absolute log error; positive, bounded, weakly tied to the start."""
    start = np.array([max(getattr(constants, n), 1e-12) for n in names])

    def at(z: Array) -> Any:
        values = {n: min(v, UPPER.get(n, np.inf)) for n, v in zip(names, start * np.exp(z), strict=True)}
        return replace(constants, **{n: float(v) for n, v in values.items()})

    def residual(z: Array) -> Array:
        return np.concatenate([weights * np.log(predict(at(z)) / seconds), 0.01 * z])

    rng, best = np.random.default_rng(0), None
    for trial in range(starts):
        first = rng.normal(0.0, 0.3, len(names)) * (trial > 0)
        found = least_squares(
            residual, first, loss="soft_l1", f_scale=0.05, max_nfev=60, diff_step=3e-3, bounds=(-9, 6)
        )
        if best is None or found.cost < best.cost:
            best = found
    assert best is not None
    return at(best.x)


def device(name: str, matmul: Mapping[str, Any] | None = None, attention: Mapping[str, Any] | None = None) -> Hardware:
    """A reference accelerator carrying trial constants."""
    reference = REFERENCES[name]
    efficiency = Efficiency(reference.generation, matmul or {}, attention or {}, "trial", NO_STREAM, None)
    return Hardware(name=name, efficiency=efficiency, **reference.toml())  # type: ignore[arg-type]


def by_accelerator(table: Table, predict: Callable[[Table, str], Array]) -> Array:
    """Predictions row by row, computed one accelerator at a time."""
    out = np.empty(len(table.seconds))
    names = np.array(table.accelerator)
    for name in dict.fromkeys(table.accelerator):
        mask = names == name
        out[mask] = predict(table.pick(mask), name)
    return out


def subsample(table: Table, rows: int = MAX_ROWS) -> Table:
    """At most `rows` rows, chosen with a fixed seed."""
    keep = np.zeros(len(table.seconds), dtype=bool)
    keep[np.random.default_rng(1).permutation(len(keep))[:rows]] = True
    return table.pick(keep)


# --- matmul ----------------------------------------------------------------------------------------------


def predict_matmul(table: Table, constants: MatmulConstants, dtype: str) -> Array:
    """Seconds of every row of a matmul table."""

    def one(part: Table, name: str) -> Array:
        hardware = device(name, matmul={dtype: constants})
        cast = constants.cast_traffic > 0 or constants.cast_seconds > 0
        return np.asarray(matmul_seconds(**part.columns, dtype=dtype, hardware=hardware, include_cast=cast))

    return by_accelerator(table, one)


def fit_matmul(table: Table, key: str) -> MatmulConstants:
    """Constants of one generation and format (and library, where formats need a cast)."""
    dtype = key.split("/")[0]
    flops = 2 * table.columns["m"] * table.columns["n"] * table.columns["k"]
    large = flops > np.percentile(flops, 75)
    watts = np.array([REFERENCES[a].power_watts for a in table.accelerator])
    energy = float(np.median((watts * table.seconds / flops)[large]))
    start = MatmulConstants(0.95, 12.0, 100.0, 0.3, 0.85, 2.0, 2.5e-6, energy)
    names = ["attainable_fraction", "operand_elements", "fill_elements", "wave_rigidity", "memory_fraction"]
    names += ["split_traffic", "launch_seconds", "joules_per_flop"]
    if REFERENCES[table.accelerator[0]].generation in LARGE_CACHE:
        start = replace(start, cached_share=0.2)
        names.append("cached_share")
    if dtype != "bf16":
        start = replace(start, cast_traffic=1.0, cast_seconds=3e-6)
        names += ["cast_traffic", "cast_seconds"]
    return fit(start, names, lambda c: predict_matmul(table, c, dtype), table.seconds)


def matmul_records(folder: Path, only: str | None) -> list[Record]:
    """Fits and errors of all matmul groups."""
    records = []
    for (generation, key), table in matmul_tables(folder).items():
        if only and generation != only:
            continue
        # one library version was much slower on B300's block-scaled fp8 than all later ones: held out
        old = [generation == "blackwell_ultra" and key == "fp8_block/sglang" and "0.5.10" in s for s in table.source]
        current = table.pick(~np.array(old))
        held = current.held_out()
        train, test = subsample(current.pick(~held)), current.pick(held)
        constants = fit_matmul(train, key)
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
            current, lambda t, k=key: fit_matmul(t, k), lambda t, c, d=dtype: predict_matmul(t, c, d)
        )
        records.append(record)
    return records


def transfer(table: Table, learn: Callable[[Table], Any], predict: Callable[[Table, Any], Array]) -> dict[str, float]:
    """Median absolute error on each source, and accelerator, when it took no part in the fit."""
    out = {}
    for column, names in (("source", table.source), ("accelerator", table.accelerator)):
        short = [s.split("/")[2] if column == "source" and s.count("/") == 3 else s for s in names]
        labels = sorted(set(short))
        if len(labels) < 2 or any(len(label) > 30 for label in labels):
            continue
        for label in labels:
            there = np.array([label == s for s in short])
            constants, rest = learn(subsample(table.pick(~there))), table.pick(there)
            out[label] = float(np.median(np.abs(predict(rest, constants) / rest.seconds - 1)))
    return out


def baseline(ideal: Array, seconds: Array) -> tuple[float, float, float]:
    """Median, mean, p90 of absolute error of ideal time over the one fraction that fits best."""
    error = np.abs(ideal * np.median(seconds / ideal) / seconds - 1)
    return float(np.median(error)), float(error.mean()), float(np.percentile(error, 90))


# --- attention -------------------------------------------------------------------------------------------


def predict_attention(table: Table, constants: AttentionConstants) -> Array:
    """Seconds of every row of an attention table: causal, forward, half precision."""

    def one(part: Table, name: str) -> Array:
        return np.asarray(attention_seconds(**part.columns, hardware=device(name, attention={"trial": constants})))

    return by_accelerator(table, one)


def attention_work(table: Table) -> Array:
    """FLOPs of each row, half of the scores masked."""
    c = table.columns
    return 2 * c["batch"] * c["heads"] * c["sequence"] ** 2 * c["head_size"]


def fit_attention(table: Table) -> AttentionConstants:
    """Constants of one attention kernel on one generation."""
    flops = attention_work(table)
    watts = np.array([REFERENCES[a].power_watts for a in table.accelerator])
    long = flops > np.percentile(flops, 75)
    energy = float(np.median((watts * table.seconds / flops)[long]))
    start = AttentionConstants(0.8, 20.0, 100.0, 0.5, 1.0, 5e-6, energy, 0.85)
    names = ["attainable_fraction", "softmax_head_elements", "fill_keys", "tail_rigidity", "extra_traffic"]
    names += ["launch_seconds", "joules_per_flop"]
    if len(set(table.columns["head_size"])) == 1:
        names.remove("softmax_head_elements")
    return fit(start, names, lambda k: predict_attention(table, k), table.seconds, starts=3)


def attention_records(folder: Path, only: str | None) -> list[Record]:
    """Fits and errors of all attention groups."""
    records = []
    for (generation, kernel), table in attention_tables(folder)[0].items():
        if only and generation != only:
            continue
        held = table.held_out()
        train, test = subsample(table.pick(~held)), table.pick(held)
        constants = fit_attention(train)
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


# --- collectives -----------------------------------------------------------------------------------------


def predict_collectives(
    table: Table,
    island: CollectiveConstants | Mapping[str, CollectiveConstants],
    network: NetworkConstants | None = None,
) -> Array:
    """Seconds of every row; `island` by accelerator where rows of several generations are mixed."""
    out = np.empty(len(table.seconds))
    kinds = table.columns["kind"].astype(int)
    names = np.array(table.accelerator)
    for name in dict.fromkeys(table.accelerator):
        reference = REFERENCES[name]
        if isinstance(island, CollectiveConstants):
            constants = island
        else:
            rack = f"{reference.generation} nvl72"
            constants = island[rack if name == "GB200" and rack in island else reference.generation]
        ranks = 72 if name in ("GB200", "GB300") else 8
        nominal = NETWORKS[table.name][1] if table.name in NETWORKS else 0.0
        nominal = NETWORK_RATE.get((table.name, name), nominal) * 1e9
        link = reference.link_gb_per_second * 1e9
        fabric = Fabric(ranks, link, constants, reference.topology, nominal, network)
        for kind, index in KIND_INDEX.items():
            mask = (names == name) & (kinds == index)
            if mask.any():
                c = {k: v[mask] for k, v in table.columns.items()}
                inside = c.get("island")
                out[mask] = collective_seconds(kind, c["size"], c["ranks"], inside, fabric=fabric)
    return out


def collective_records(folder: Path, only: str | None) -> tuple[list[Record], list[Record]]:
    """Fits and errors inside islands by generation, then between islands by network."""
    inside, between, left = collective_rows(folder)
    print("collectives left out:", left)
    records, islands = [], {}
    generations = np.array([REFERENCES[a].generation for a in inside.accelerator])
    for generation in sorted(set(generations)):
        table = inside.pick((generations == generation) & (inside.columns["ranks"] <= 8))
        rack = inside.pick((generations == generation) & (inside.columns["ranks"] > 8))
        noisy = np.array(["CUDA graph" in s for s in table.source])  # timer of 1 us, bimodal: held out
        held = table.held_out() | noisy
        train, test = subsample(table.pick(~held)), table.pick(held & ~noisy)
        has_switch = generation in ("hopper", "blackwell", "blackwell_ultra")
        bus = REFERENCES[table.accelerator[0]].topology == "bus"
        start = CollectiveConstants(
            4e-6, 8e-7, 2e-5, 2.5e6, 0.8, 2.0, 0.6 if has_switch else 0.0, 0.8, 1.0 if bus else 0.0
        )
        names = ["launch_seconds", "step_seconds", "fill_seconds", "fill_bytes", "ring_fraction"]
        names += ["local_copy_ratio", "direct_fraction"]
        names += ["switch_fraction"] * has_switch + ["sharing_exponent"] * bus
        if not any(k in (3, 4) for k in table.columns["kind"]):
            names.remove("direct_fraction")
            start = replace(start, direct_fraction=0.0)
        constants = fit(
            start,
            names,
            lambda c, t=train: predict_collectives(t, c),
            train.seconds,
            3,
            collective_weights(train),
        )
        islands[generation] = constants
        record = summarise(
            "collectives", generation, "island", constants, train, test, table.pick(~noisy),
            lambda t, c=constants: predict_collectives(t, c),
        )  # fmt: skip
        record.baseline = collective_baseline(table)
        if noisy.any():
            rest = table.pick(noisy)
            record.transfer = {
                "CUDA graph": float(np.median(np.abs(predict_collectives(rest, constants) / rest.seconds - 1)))
            }
        records.append(record)
        if len(rack.seconds):
            records.append(rack_record(rack, constants, generation))
            islands[f"{generation} nvl72"] = records[-1].constants
    networks = network_records(between, islands)
    return ([r for r in records if not only or r.generation == only], networks)


def rack_record(rack: Table, island: CollectiveConstants, generation: str) -> Record:
    """An island of a whole rack: only the share that in-switch reduction attains differs."""
    constants = fit(island, ["switch_fraction"], lambda c: predict_collectives(rack, c), rack.seconds)
    none = rack.pick(np.zeros(len(rack.seconds), dtype=bool))
    record = summarise(
        "collectives_nvl72",
        generation,
        "rack",
        constants,
        rack,
        none,
        rack,
        lambda t: predict_collectives(t, constants),
    )
    record.baseline = collective_baseline(rack)
    return record


def collective_weights(table: Table) -> Array:
    """Training sends long messages: they count double, and the few of a GiB and more eight times."""
    size = table.columns["size"]
    return np.select([size >= 2**30, size >= 2**24], [8.0, 2.0], 1.0)


def collective_baseline(table: Table) -> tuple[float, float, float]:
    """Ring traffic over the nominal link, at one fraction."""
    n, size, kind = table.columns["ranks"], table.columns["size"], table.columns["kind"]
    share = np.where(kind == 0, 2 * (n - 1) / n, np.where(kind == 4, 1.0, (n - 1) / n))
    links = np.array([REFERENCES[a].link_gb_per_second * 1e9 for a in table.accelerator])
    return baseline(share * size / links, table.seconds)


def network_records(between: Table, islands: Mapping[str, CollectiveConstants]) -> list[Record]:
    """Fits and errors of collectives across islands, by network."""
    records = []
    labels = np.array([s.split(" | ")[0] for s in between.source])
    for name in NETWORKS:
        table = between.pick(labels == name)
        if not len(table.seconds):
            continue
        table.name = name
        held = table.held_out()
        train, test = (table.pick(~held), table.pick(held)) if len(held) > 20 else (table, table.pick(held))
        start = NetworkConstants(2e-5, 1e-5, 1e-4, 5e6, 0.9)
        names = ["fill_seconds", "fill_bytes", "attained_fraction"]
        if np.min(table.columns["size"]) < 2**20:  # else latency cannot be seen: it stays at the start
            names.append("launch_seconds")
        if len(set(table.columns["ranks"])) > 4:  # the cost of a step shows only over many sizes of group
            names.append("step_seconds")
        constants = fit(
            start,
            names,
            lambda c, t=train: predict_collectives(t, islands, c),
            train.seconds,
            3,
            collective_weights(train),
        )
        record = summarise(
            "network", name, "network", constants, train, test, table,
            lambda t, c=constants: predict_collectives(t, islands, c),
        )  # fmt: skip
        record.baseline = collective_baseline(table)
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
    table, records = streaming_rows(folder), []
    generations = np.array([REFERENCES[a].generation for a in table.accelerator])
    for generation in sorted(set(generations)):
        part = table.pick(generations == generation)
        if len(part.seconds) < 5 or (only and generation != only):
            continue
        held = part.held_out()
        train, test = part.pick(~held), part.pick(held)
        bandwidth = np.array([REFERENCES[a].memory_gb_per_second * 1e9 for a in train.accelerator])
        fraction = {}
        for kind, index in STREAM_INDEX.items():
            mask = train.columns["kind"] == index
            if mask.any():
                net = np.maximum(train.seconds[mask] - 2e-6, 1e-7)
                fraction[kind] = float(np.median(train.columns["size"][mask] / net / bandwidth[mask]))
        fraction = {k: min(v, 1.0) for k, v in fraction.items()}
        fraction.setdefault("copy", min(fraction.get("elementwise", 0.85), 0.92))
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
    if not arguments.only:
        write_tomls(records)
        write_networks(networks)
    lines = error_lines([*records, *networks])
    print("\n".join(lines))
    if arguments.report:
        arguments.report.write_text("\n".join(lines) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
