"""The record of calibration: constants from a few runs, judged on others of the same kind and of another.

    python benchmarks/calibrate_record.py runs.csv [--draws 5]

Starts from the generic engine, whose constants were not fitted to any of these runs.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np

from ironlaw.plan.engines.engine import TrainingEngine
from ironlaw.plan.engines.named import engine
from ironlaw.plan.measured.calibrate import calibrate
from ironlaw.plan.measured.read import Run, read_runs
from ironlaw.plan.measured.validate import evaluate, settled

ONE_NODE = ("vtrain-1node-h1024",)
NODES = ("vtrain-GPT-3.6B", "vtrain-GPT-18.4B")


def errors(runs: Sequence[Run], planner: TrainingEngine) -> np.ndarray:
    """Absolute relative errors of the step times."""
    settled_runs = settled([replace(run, engine=planner) for run in runs])
    measured = np.array([run.step_seconds for run in runs], dtype=float)
    return np.asarray(np.abs(evaluate(settled_runs).step_seconds / measured - 1))


def draw(runs: Sequence[Run], count: int, seed: int) -> tuple[list[Run], list[Run]]:
    """`count` random runs, and the rest."""
    order = np.random.default_rng(seed).permutation(len(runs))
    return [runs[i] for i in order[:count]], [runs[i] for i in order[count:]]


def report(name: str, found: list[tuple[float, float, float, float, float]]) -> None:
    """One line: runs, error before, left out, on the rest (mean over draws, worst draw), median on the rest."""
    table = 100 * np.array(found)
    before, inside, left_out, mean, median = table.mean(axis=0)
    cells = [f"{value:.1f}" for value in (before, inside, left_out, mean, table[:, 3].max(), median)]
    print("| " + " | ".join([name, *cells]) + " |", flush=True)


def record(name: str, fit_on: list[tuple[list[Run], list[Run]]], start: TrainingEngine) -> None:
    """Calibrate on the first of each pair, judge on the second."""
    found = []
    for few, rest in fit_on:
        calibration = calibrate(few, "record", start)
        before, after = errors(rest, start), errors(rest, calibration.engine)
        found.append(
            (
                before.mean(),
                calibration.error_in_sample,
                calibration.error_left_out,
                after.mean(),
                float(np.median(after)),
            )
        )
    report(name, found)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("csv", type=Path)
    parser.add_argument("--draws", type=int, default=5)
    arguments = parser.parse_args()
    start = engine("generic")
    read, _ = read_runs(arguments.csv, start)
    runs = [r for r in read if r.ran and r.step_seconds and "time" in r.checks]
    vtrain(runs, start, range(arguments.draws))
    others(runs, start, range(arguments.draws))


def vtrain(runs: list[Run], start: TrainingEngine, seeds: range) -> None:
    """Of one software and one cluster: one node and many, few layers and many, a small model and a large one."""
    one = [r for r in runs if r.group in ONE_NODE]
    many = [r for r in runs if r.group in NODES]
    print("| fitted on, judged on | before | in sample | left one out | mean | worst draw | median |")
    print("|---|---|---|---|---|---|---|")
    for count in (8, 16, 32):
        pairs = [draw(one, count, s) for s in seeds]
        record(f"{count} one-node runs, the other {len(one) - count}", pairs, start)
    for count in (8, 16, 32):
        pairs = [draw(many, count, s) for s in seeds]
        record(f"{count} multi-node runs, the other {len(many) - count}", pairs, start)
    record(f"32 one-node runs, all {len(many)} multi-node", [(draw(one, 32, s)[0], many) for s in seeds], start)
    record(f"32 multi-node runs, all {len(one)} one-node", [(draw(many, 32, s)[0], one) for s in seeds], start)
    few = sorted({r.job.model.layers for r in one})[0]
    small = [r for r in one if r.job.model.layers == few]
    large = [r for r in one if r.job.model.layers > few]
    if large:
        record(
            f"32 one-node runs of {few:g} layers, the {len(large)} of more",
            [(draw(small, 32, s)[0], large) for s in seeds],
            start,
        )
    small, large = [r for r in many if r.group == NODES[0]], [r for r in many if r.group == NODES[1]]
    record(f"20 runs of 3.6B, all {len(large)} of 18.4B", [(draw(small, 20, s)[0], large) for s in seeds], start)


def others(runs: list[Run], start: TrainingEngine, seeds: range) -> None:
    """Transfers within other software. Disturbed runs are among them: the median counts."""

    def named(*groups: str) -> list[Run]:
        return [r for r in runs if r.group in groups]

    pretraining = named("playbook-1B", "playbook-8B")
    for name, few, many in (
        ("runs of playbook-1B, all {} of 8B", named("playbook-1B"), named("playbook-8B")),
        ("runs of playbook-8B, all {} of 1B", named("playbook-8B"), named("playbook-1B")),
        (
            "playbook runs on one node, all {} on two",
            [r for r in pretraining if r.cluster.nodes == 1],
            [r for r in pretraining if r.cluster.nodes > 1],
        ),
        ("mpt runs on A100, all {} on H100", named("mpt-a100-sxm-80gb-small"), named("mpt-h100-sxm-80gb-small")),
        ("dgxc runs of Llama 3.1 8B, all {} of GPT-3 175B", named("dgxc-Llama-3.1-8B"), named("dgxc-GPT-3-175B")),
        ("dgxc runs of GPT-3 175B, all {} of Llama 3.1 8B", named("dgxc-GPT-3-175B"), named("dgxc-Llama-3.1-8B")),
    ):
        if len(few) > 16 and many:
            record(f"16 {name.format(len(many))}", [(draw(few, 16, s)[0], many) for s in seeds], start)


if __name__ == "__main__":
    main()
