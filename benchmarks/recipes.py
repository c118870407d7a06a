"""The loss that training in few bits costs: `python benchmarks/recipes.py [--budget 300] [--seeds 5] [--record]`.

The demo's model, 150 steps of 256 tokens, held-out loss after the last; every recipe with the seeds that bf16 had, so
that differences are within a seed. What has been run is kept in benchmarks/results/recipes.jsonl and not run again:
call it until it says that nothing is left. `--record` writes benchmarks/results/recipes.md from what there is.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

HERE = Path(__file__).resolve().parent
RESULTS = HERE / "results" / "recipes.jsonl"
PAGE = RESULTS.with_suffix(".md")
STEPS, SEQUENCE = 150, 128
UNSCALED = "fp16 without loss scaling"
RECIPES: dict[str, list[str]] = {
    "bf16": [], "fp32": [], "fp16": [], UNSCALED: ["scaler.initial=1", "scaler.growth_steps=1000000"], "fp8": [],
    "fp8_rowwise": [], "fp8_block": [], "mxfp8": [], "nvfp4": [], "mxfp4": [],
}  # fmt: skip


def known() -> list[dict[str, float | str]]:
    return [json.loads(line) for line in RESULTS.read_text().splitlines()] if RESULTS.exists() else []


def run(recipe: str, seed: int) -> dict[str, float | str]:
    settings = [
        f"train.precision={recipe.split()[0]}", f"train.seed={seed}", f"train.steps={STEPS}", "train.global_batch=2",
        f"train.sequence={SEQUENCE}", "schedule.warmup_steps=20", f"evaluation.every={STEPS}", "evaluation.batches=16", "checkpoint.every=0",
    ] + RECIPES[recipe]  # fmt: skip
    with tempfile.TemporaryDirectory() as folder:
        config = str(HERE.parent / "examples/gpt-tiny.toml")
        command = [sys.executable, "-W", "ignore", "-m", "ironlaw", "train", config]
        command += [word for text in settings for word in ("--set", text)] + ["--out", f"{folder}/run"]
        environment = os.environ | {"PYTHONPATH": str(HERE.parent / "src")}
        done = subprocess.run(command, env=environment, capture_output=True, text=True)
        rows = [json.loads(line) for line in Path(folder, "run/metrics.jsonl").read_text().splitlines()]
    losses = [row["validation_loss"] for row in rows if "validation_loss" in row]
    seconds = statistics.median(row["seconds"] for row in rows if "seconds" in row)
    loss = losses[-1] if done.returncode == 0 and losses else math.nan
    return {"recipe": recipe, "seed": seed, "loss": loss, "step_seconds": seconds, "told": done.stderr[-300:].strip()
            if done.returncode else ""}  # fmt: skip


def page(rows: list[dict[str, float | str]]) -> str:
    by = {(str(row["recipe"]), int(row["seed"])): row for row in rows}
    lines = [
        "# Loss of training recipes against bf16", "",
        f"`python benchmarks/recipes.py`: examples/gpt-tiny.toml, {STEPS} steps of {2 * SEQUENCE} tokens, nats per token.",
        "Difference to bf16 with the same seed: mean and standard error. Emulated on a CPU: step time says nothing of",
        "hardware.", "",
        "| recipe | seeds | loss | difference to bf16 | step, times bf16's |", "|---|---:|---:|---:|---:|",
    ]  # fmt: skip
    for recipe in RECIPES:
        pairs = [(row, by["bf16", seed]) for (name, seed), row in by.items() if name == recipe and ("bf16", seed) in by]
        finite = [(row, base) for row, base in pairs if math.isfinite(float(row["loss"]))]
        if not pairs:
            continue
        failed = len(pairs) - len(finite)
        if not finite:
            lines.append(f"| {recipe} | {len(pairs)} | failed | {pairs[0][0]['told']} | |")
            continue
        gaps = [float(row["loss"]) - float(base["loss"]) for row, base in finite]
        error = statistics.stdev(gaps) / math.sqrt(len(gaps)) if len(gaps) > 1 else math.nan
        times = statistics.median(float(row["step_seconds"]) / float(base["step_seconds"]) for row, base in finite)
        loss = statistics.mean(float(row["loss"]) for row, _ in finite)
        gap = "" if recipe == "bf16" else f"{statistics.mean(gaps):+.4f} ± {error:.4f}"
        seeds = f"{len(finite)}" + (f", {failed} failed" if failed else "")
        lines.append(f"| {recipe} | {seeds} | {loss:.4f} | {gap} | {times:.1f} |")
    return "\n".join(lines) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--budget", type=float, default=300.0, help="seconds after which no other run begins")
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--record", action="store_true")
    options = parser.parse_args()
    began, there = time.monotonic(), {(row["recipe"], row["seed"]) for row in known()}
    left = [(recipe, seed) for seed in range(options.seeds) for recipe in RECIPES if (recipe, seed) not in there]
    while left and time.monotonic() - began < options.budget:
        row = run(*left.pop(0))
        with RESULTS.open("a") as file:
            file.write(json.dumps(row) + "\n")
        print(row, flush=True)
    print(f"{len(left)} runs are left")
    if options.record:
        PAGE.write_text(page(known()))


if __name__ == "__main__":
    main()
