"""Adapters beside full fine-tuning on a held-out task: `python benchmarks/finetune.py [--steps 150] [--record]`.

A small model learns the standard library's modules at the top (as `Lib/*.py`), then a package it has not seen, tuned
whole and by LoRA, QLoRA and DoRA, each at the best of its learning rates. Loss of the package's held-out text in nats
per token. `--record` writes benchmarks/results/finetune.md.
"""

from __future__ import annotations

import argparse
import json
import shutil
import sysconfig
import tempfile
from pathlib import Path
from typing import Any

import torch

from ironlaw.config import build_config
from ironlaw.data.loader import Loader
from ironlaw.data.prepare import prepare
from ironlaw.ledger import Decisions
from ironlaw.model.huggingface.weights import write_model
from ironlaw.train.mesh import Mesh
from ironlaw.train.state import seed_everything
from ironlaw.train.step import Step

PAGE = Path(__file__).resolve().parent / "results" / "finetune.md"
PACKAGE, SEQUENCE, SEQUENCES = "asyncio", 128, 4
MODEL = {
    "name": "small-llama", "layers": 4, "hidden": 128, "heads": 4, "ffn": 384, "vocab": 2048, "context": SEQUENCE,
    "positions": "rope", "norm": "rmsnorm", "activation": "silu", "gated_ffn": True, "bias": False, "tied": False,
}  # fmt: skip
RATES = {"none": (5e-4, 1e-3), "lora": (3e-3, 6e-3), "qlora": (3e-3, 6e-3), "dora": (3e-3, 6e-3)}


def trained(tables: dict[str, Any], steps: int) -> tuple[Step, float, float, Path]:
    """The step, held-out loss before and after, the tokenizer's file."""
    train = {"steps": steps, "global_batch": SEQUENCES, "sequence": SEQUENCE, "precision": "fp32"}
    schedule = {"warmup_steps": steps // 10}
    config = build_config({"model": MODEL, "schedule": schedule} | tables | {"train": train | tables.get("train", {})})
    seed_everything(0)
    dataset = prepare(config.data, config.model.vocab)
    loader = Loader(dataset, config.data, SEQUENCE)
    batches = loader.training(SEQUENCES, 0)
    step = Step(config, Decisions("fp32"), Mesh(torch.device("cpu")))

    def held_out() -> float:
        with torch.no_grad(), step.evaluating():
            parts = [step.evaluate(b.map(torch.from_numpy)) for b in loader.validation(SEQUENCES, 40)]
        return sum(loss for loss, _ in parts) / sum(count for _, count in parts)

    before = held_out()
    for number in range(steps):
        step.update(step.forward_backward(batches.batch(number).map(torch.from_numpy), number), number)
    assert dataset.tokenizer_path is not None
    return step, before, held_out(), dataset.tokenizer_path


def compare(folder: Path, steps: int) -> list[dict[str, Any]]:
    library = Path(sysconfig.get_paths()["stdlib"])
    (folder / "base").mkdir()
    for path in sorted(library.glob("*.py")):
        shutil.copy(path, folder / "base")
    shutil.copytree(library / PACKAGE, folder / "task", ignore=shutil.ignore_patterns("__pycache__"))
    base, _, loss, tokenizer = trained({"data": {"path": str(folder / "base")}, "optimizer": {"lr": 2e-3}}, 2 * steps)
    print(f"base: {loss:.4f}", flush=True)
    write_model(folder / "model", base.config.model, base.model.state_dict())
    shutil.copy(tokenizer, folder / "model" / "tokenizer.json")
    data = {
        "path": str(folder / "task"),
        "tokenizer": str(folder / "model" / "tokenizer.json"),
        "validation_fraction": 0.2,
    }
    rows = []
    for method, rates in RATES.items():
        for rate in rates:
            finetune = {"method": method, "rank": 16}
            start = {"start_from": str(folder / "model")}
            step, before, after, _ = trained(
                {"data": data, "finetune": finetune, "optimizer": {"lr": rate}, "train": start}, steps
            )
            count = sum(p.numel() for p in step.model.parameters() if p.requires_grad)
            rows.append({"method": method, "rate": rate, "before": before, "after": after, "trained": count})
            print(json.dumps(rows[-1]), flush=True)
    return rows


def page(rows: list[dict[str, Any]], steps: int) -> str:
    best = {method: min((r for r in rows if r["method"] == method), key=lambda r: r["after"]) for method in RATES}
    whole = best["none"]["after"]
    lines = [
        "# Adapters beside full fine-tuning", "",
        f"`python benchmarks/finetune.py --record`: {MODEL['layers']} x {MODEL['hidden']} after {2 * steps} steps",
        f"on the modules at the top of the standard library, then {steps} steps of {SEQUENCES * SEQUENCE} tokens on",
        f"`{PACKAGE}`, of which a fifth is held out. The best of the learning rates tried; one seed.", "",
        "| method | trained parameters | learning rate | before | after, nats per token | above full |",
        "|---|---:|---:|---:|---:|---:|",
    ]  # fmt: skip
    for method, row in best.items():
        name = "all" if method == "none" else method
        lines.append(
            f"| {name} | {row['trained']:,} | {row['rate']:g} | {row['before']:.4f} | {row['after']:.4f} | "
            f"{row['after'] - whole:+.4f} |"
        )
    return "\n".join(lines) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=150)
    parser.add_argument("--record", action="store_true")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        rows = compare(Path(folder), options.steps)
    found = page(rows, options.steps)
    print(found)
    if options.record:
        PAGE.write_text(found)


if __name__ == "__main__":
    main()
