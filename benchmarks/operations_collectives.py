"""Fits of collectives: inside islands by generation, between islands by network."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import numpy as np
from operations_data import KIND_INDEX, NETWORK_RATE, NETWORKS, REFERENCES, Array, Table, collective_rows
from operations_fit import baseline, fit, subsample
from operations_report import Record, summarise

from ironlaw.machine.efficiency.collectives import collective_seconds
from ironlaw.machine.efficiency.hardware import CollectiveConstants, Fabric, NetworkConstants


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
        constants = island if isinstance(island, CollectiveConstants) else island[reference.generation]
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
        if len(rack.seconds):  # in a whole rack only the share that in-switch reduction attains differs
            start = replace(constants, wide_switch_fraction=constants.switch_fraction)
            constants = fit(start, ["wide_switch_fraction"], lambda c, t=rack: predict_collectives(t, c), rack.seconds)
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
    networks = network_records(between, islands)
    return ([r for r in records if not only or r.generation == only], networks)


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
