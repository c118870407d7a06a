"""`ironlaw tune` against a full sweep, on three badly configured runs of this machine, and its rate of false gains.

    python benchmarks/tune_record.py STATE --seconds 100          # on an idle machine; again until it says "complete"
    python benchmarks/tune_record.py STATE --out FILE             # reports what is there

The sweep runs every combination of some settings once. What tune found and the sweep's best then take turns, so that
both see the same machine. False gains: the same config over and over, judged as tune judges a remedy.
"""

from __future__ import annotations

import argparse
import datetime
import itertools
import json
import platform
import shutil
import statistics
import tempfile
import time
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from ironlaw import __version__
from ironlaw.config import RunConfig, build_config
from ironlaw.cores import usable_cores
from ironlaw.explain import tune as tuning
from ironlaw.explain.remedies import with_settings
from ironlaw.machine import host
from ironlaw.machine.profile import load_profile

BATCH, TRIAL_SECONDS, LEAST_STEPS, ROUNDS, SAME = 24, 1.5, 10, 3, 42
GPT = {"name": "gpt", "layers": 2, "hidden": 256, "heads": 4, "vocab": 4096, "context": 32, "positions": "rope"}
MICRO = [m for m in range(1, BATCH + 1) if BATCH % m == 0]
BAD: dict[str, dict[str, Any]] = {
    "fp32, one sequence at a time": {"train.precision": "fp32", "train.micro_batch": 1},
    "everything recomputed, two sequences at a time": {
        "recompute.mode": "full", "train.precision": "fp32", "train.micro_batch": 2,
    },
    "wide, in fp32, the loss in parts": {
        "model.hidden": 512, "model.heads": 8, "train.precision": "fp32", "train.micro_batch": 3,
        "train.loss": "chunked",
    },
}  # fmt: skip
THIRD = {
    "fp32, one sequence at a time": ("train.loss", ("full", "chunked")),
    "everything recomputed, two sequences at a time": ("recompute.mode", ("none", "full")),
    "wide, in fp32, the loss in parts": ("train.loss", ("full", "chunked")),
}


def bad_config(name: str) -> RunConfig:
    plain = build_config(
        {"model": GPT, "data": {"mock": True}, "train": {"steps": 1000, "global_batch": BATCH, "loss": "full"}}
    )
    return with_settings(plain, BAD[name])


def sweep_settings(name: str) -> Iterator[dict[str, Any]]:
    key, values = THIRD[name]
    for precision, micro, third in itertools.product(("fp32", "bf16"), MICRO, values):
        yield {"train.precision": precision, "train.micro_batch": micro, key: third}


def label(settings: dict[str, Any]) -> str:
    return ", ".join(str(value) for value in settings.values())


class Record:
    """What was measured so far, kept after every run."""

    def __init__(self, state: Path, until: float) -> None:
        self.state, self.until = state, until
        self.known: dict[str, Any] = json.loads(state.read_text()) if state.is_file() else {}
        self.profile = load_profile()

    def once(self, key: str, measure: Any) -> Any:
        """The value kept under `key`, measured now if there is none and time is left; None without time."""
        if key not in self.known and time.monotonic() < self.until:
            with tempfile.TemporaryDirectory() as folder:
                self.known[key] = measure(Path(folder))
            self.state.write_text(json.dumps(self.known))
            print(key, self.known[key] if not isinstance(self.known[key], dict) else "done", flush=True)
        return self.known.get(key)

    def run(self, config: RunConfig) -> Any:
        def measure(folder: Path) -> float:
            return tuning.TrialRunner(folder, self.profile, TRIAL_SECONDS)(config, "run").seconds_per_token

        return measure

    def tuned(self, config: RunConfig) -> Any:
        def measure(folder: Path) -> dict[str, Any]:
            runner = tuning.TrialRunner(folder, self.profile, TRIAL_SECONDS)
            shutil.rmtree(folder)
            result = tuning.tune(config, self.profile, budget_seconds=600, folder=folder, measure=runner, say=print)
            return {"settings": result.settings(), "runs": result.runs, "seconds": result.seconds, "gain": result.gain,
                    "stopped": result.stopped, "trials": [asdict(t) for t in result.trials]}  # fmt: skip

        return measure


def measure_all(record: Record) -> bool:
    """Whether everything is there."""
    complete = True
    for name in BAD:
        bad, swept = bad_config(name), {}
        tuned = record.once(f"tune: {name}", record.tuned(bad))
        for settings in sweep_settings(name):
            swept[label(settings)] = record.once(
                f"sweep: {name}: {label(settings)}", record.run(with_settings(bad, settings))
            )
        if tuned is None or None in swept.values():
            complete = False
            continue
        best = min(sweep_settings(name), key=lambda s: swept[label(s)])
        for number in range(ROUNDS):
            for what, settings in (("best", best), ("tuned", tuned["settings"])):
                found = record.once(f"{what} {number}: {name}", record.run(with_settings(bad, settings)))
                complete &= found is not None
    same = with_settings(
        bad_config("fp32, one sequence at a time"), {"train.micro_batch": BATCH, "train.precision": "bf16"}
    )
    for number in range(SAME):
        complete &= record.once(f"same {number}", record.run(same)) is not None
    return complete


def rows(known: dict[str, Any]) -> list[dict[str, Any]]:
    found = []
    for name in BAD:
        swept = {label(s): known.get(f"sweep: {name}: {label(s)}") for s in sweep_settings(name)}
        tuned, pairs = known.get(f"tune: {name}"), [n for n in range(ROUNDS) if f"tuned {n}: {name}" in known]
        if tuned is None or None in swept.values() or not pairs:
            continue
        turns = {w: [known[f"{w} {n}: {name}"] for n in pairs] for w in ("best", "tuned")}
        best, worst = min(swept.values()), max(swept.values())
        found.append({
            "name": name, "best": min(swept, key=lambda key: swept[key]), "sweep_runs": len(swept),
            "spread": worst / best, "runs": tuned["runs"], "tuned": tuned["settings"], "seconds": tuned["seconds"],
            "rounds": len(pairs),
            "alike": max(max(found) / min(found) - 1 for found in turns.values()),
            "behind": statistics.median(turns["tuned"]) / statistics.median(turns["best"]) - 1,
            "trials": tuned["trials"],
        })  # fmt: skip
    return found


def false_gains(known: dict[str, Any]) -> tuple[int, int]:
    """(called a gain, judged) of the same config, each run against the ones before and after it."""
    times = [known[f"same {n}"] for n in range(SAME) if f"same {n}" in known]
    runs = [tuning.Measured(seconds, 0.0, (), "") for seconds in times]
    verdicts = [tuning.judge(*three)[2] for three in zip(runs, runs[1:], runs[2:], strict=False)]
    return sum(not verdict for verdict in verdicts), len(verdicts)


def report(known: dict[str, Any]) -> str:
    today = datetime.date.today().isoformat()
    lines = [
        "# Tune against a full sweep", "",
        f"{today}, ironlaw {__version__}, torch {torch.__version__}, python {platform.python_version()}, "
        f"{host.cpu_name()}, {usable_cores()} cores. Made by `python benchmarks/tune_record.py`; a run is "
        f"{TRIAL_SECONDS:g} s of steps, at least {LEAST_STEPS} of them.", "",
        "| badly configured | sweep's best | tuned | behind the best | runs | sweep's runs | sweep's worst / best |",
        "|---|---|---|---:|---:|---:|---:|",
    ]  # fmt: skip
    for r in rows(known):
        lines.append(
            f"| {r['name']} | {r['best']} | {label(r['tuned'])} | {100 * r['behind']:+.1f}% | {r['runs']} | "
            f"{r['sweep_runs']} | {r['spread']:.1f} |"
        )
    rounds = min((r["rounds"] for r in rows(known)), default=0)
    alike = max((r["alike"] for r in rows(known)), default=0.0)
    lines += ["", f"Behind the best: medians of {rounds} runs of either, in turn; runs of the same config differed by "
              f"up to {100 * alike:.0f}%.", ""]  # fmt: skip
    lines += ["| badly configured | remedy tried | promised | measured | verdict |", "|---|---|---:|---:|---|"]
    for r in rows(known):
        for t in r["trials"]:
            verdict = "kept" if t["kept"] else t["reason"]
            lines.append(
                f"| {r['name']} | {t['remedy']} | {100 * t['predicted_gain']:.0f}% | {100 * t['measured_gain']:.0f}% | "
                f"{verdict} |"
            )
    wrong, judged = false_gains(known)
    if judged:
        lines += ["", f"The same config {judged + 2} times, each run judged against those before and after it: called "
                  f"a gain {wrong} of {judged} times."]  # fmt: skip
    return "\n".join([*lines, ""])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("state", type=Path, help="a JSON file of what was measured so far")
    parser.add_argument("--seconds", type=float, default=1e9, help="start no more runs after that")
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    tuning.MIN_STEPS = LEAST_STEPS
    if options.out:
        options.out.write_text(report(json.loads(options.state.read_text())))
        return
    host.keep_freed_memory()
    print("complete" if measure_all(Record(options.state, time.monotonic() + options.seconds)) else "not complete yet")


if __name__ == "__main__":
    main()
