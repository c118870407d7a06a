"""The loss that training in few bits costs: `python benchmarks/recipes.py [--budget 300] [--seeds 5] [--record]`.

The demo's model, batch and text: held-out loss after STEPS steps, every recipe with the seeds that bf16 had, so that
differences are within a seed. What has been run is kept in benchmarks/results/recipes.jsonl and
not run again: call it until it says that nothing is left. `--record` writes benchmarks/results/recipes.md of it.
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
import time
from pathlib import Path
from typing import Any

import torch

from ironlaw.config import load_config
from ironlaw.data.loader import Loader
from ironlaw.data.prepare import prepare
from ironlaw.errors import UserError
from ironlaw.ledger import Decisions
from ironlaw.train.checkpoint import seed_everything
from ironlaw.train.mesh import Mesh
from ironlaw.train.step import Step

HERE = Path(__file__).resolve().parent
RESULTS = HERE / "results" / "recipes.jsonl"
PAGE = RESULTS.with_suffix(".md")
STEPS = 200  # of the demo's 850: by then it knows far more than how frequent tokens are (6.69 nats)
# fp16 is not among them: processors multiply it many times slower, and it loses nothing that its scale keeps
# (tests/train/test_step.py).
RECIPES = ("bf16", "fp32", "fp8", "fp8_delayed", "fp8_rowwise", "fp8_block", "mxfp8", "nvfp4", "mxfp4")


def known() -> list[dict[str, Any]]:
    return [json.loads(line) for line in RESULTS.read_text().splitlines()] if RESULTS.exists() else []


def run(recipe: str, seed: int) -> dict[str, Any]:
    config = load_config(HERE.parent / "examples/gpt-tiny.toml", [
        f"train.precision={recipe}", f"train.seed={seed}", f"train.steps={STEPS}",
        f"schedule.warmup_steps={STEPS // 10}", f"evaluation.every={STEPS}", f"checkpoint.every={STEPS}",
    ])  # fmt: skip
    sequences = config.train.global_batch
    seed_everything(seed)
    loader = Loader(prepare(config.data, config.model.vocab), config.data, config.sequence)
    batches, told, seconds = loader.training(sequences, seed), "", []
    step = Step(config, Decisions(config.train.precision), Mesh(torch.device("cpu")))
    try:
        for number in range(STEPS):
            began = time.perf_counter()
            step.update(step.forward_backward(batches.batch(number).map(torch.from_numpy), number), number)
            seconds.append(time.perf_counter() - began)
        with torch.no_grad(), step.evaluating():
            parts = [step.evaluate(b.map(torch.from_numpy)) for b in loader.validation(sequences, 24 * sequences)]
        loss = sum(part for part, _ in parts) / sum(count for _, count in parts)
    except (UserError, RuntimeError) as error:
        loss, told = math.nan, str(error)
    return {"recipe": recipe, "seed": seed, "loss": loss, "step_seconds": statistics.median(seconds), "told": told}


def page(rows: list[dict[str, Any]]) -> str:
    by = {(row["recipe"], row["seed"]): row for row in rows}
    lines = [
        "# Loss of training recipes against bf16", "",
        f"`python benchmarks/recipes.py --record`: examples/gpt-tiny.toml, the demo's model, {STEPS} steps of 1,024",
        "tokens, held-out loss in nats per token (a model that knows only how frequent tokens are: 6.69). Difference",
        "to bf16 with the same seed: mean and standard error. All but fp32 and bf16 are emulated here: their step time",
        "says nothing of hardware.", "",
        "| recipe | seeds | loss | difference to bf16 |", "|---|---:|---:|---:|",
    ]  # fmt: skip
    for recipe in RECIPES:
        pairs = [(row, by["bf16", seed]) for (name, seed), row in by.items() if name == recipe and ("bf16", seed) in by]
        finite = [(row, base) for row, base in pairs if math.isfinite(row["loss"])]
        if not finite:
            lines += [f"| {recipe} | {len(pairs)} | failed | {pairs[0][0]['told']} |"] * bool(pairs)
            continue
        gaps = [row["loss"] - base["loss"] for row, base in finite]
        error = statistics.stdev(gaps) / math.sqrt(len(gaps)) if len(gaps) > 1 else math.nan
        loss = statistics.mean(row["loss"] for row, _ in finite)
        gap = "" if recipe == "bf16" else f"{statistics.mean(gaps):+.4f} ± {error:.4f}"
        lines.append(f"| {recipe} | {len(finite)} of {len(pairs)} | {loss:.4f} | {gap} |")
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
