"""Adapters beside full fine-tuning on a held-out task: `python benchmarks/finetune.py --folder DIR [--record]`.

A small model learns the standard library but for PACKAGES, then those: tuned whole and by LoRA, QLoRA and DoRA. A fifth
of their files is the test, a tenth of the rest validates: the learning rate of each method is the one of least loss
there, and its loss of the test is shown. The base is kept in DIR and runs in benchmarks/results/finetune.jsonl, so that
a second call goes on where the first one ended. `--record` writes benchmarks/results/finetune.md.
"""

from __future__ import annotations

import argparse
import json
import shutil
import sysconfig
import time
from pathlib import Path
from typing import Any

import torch

from ironlaw.config import RunConfig, build_config
from ironlaw.data.batches import evaluation_batches
from ironlaw.data.loader import Loader
from ironlaw.data.prepare import prepare
from ironlaw.ledger import Decisions
from ironlaw.model.huggingface.weights import write_model
from ironlaw.train.mesh import Mesh
from ironlaw.train.state import seed_everything
from ironlaw.train.step import Step

RESULTS = Path(__file__).resolve().parent / "results" / "finetune.jsonl"
PAGE = RESULTS.with_suffix(".md")
PACKAGES, OTHERS = ("asyncio", "concurrent"), ("email", "http", "importlib", "logging", "multiprocessing", "unittest")
BASE_STEPS, STEPS, SEQUENCE, SEQUENCES = 5000, 600, 128, 4
MODEL = {
    "name": "small-llama", "layers": 4, "hidden": 128, "heads": 4, "ffn": 384, "vocab": 2048, "context": SEQUENCE,
    "positions": "rope", "norm": "rmsnorm", "activation": "silu", "gated_ffn": True, "bias": False, "tied": False,
}  # fmt: skip
ADAPTER = {"rank": 64, "alpha": 128}
RATES = {"none": (5e-4, 1e-3), "qlora": (1e-3, 3e-3), "lora": (2e-3,), "dora": (2e-3,)}


def texts(folder: Path) -> None:
    """What the base learns, what is learned after it, and what is held out of that: every fifth file."""
    library = Path(sysconfig.get_paths()["stdlib"])
    base = [*library.glob("*.py"), *(file for name in OTHERS for file in (library / name).glob("*.py"))]
    task = sorted(file for name in PACKAGES for file in (library / name).rglob("*.py"))
    for part, files in {"base": base, "task": task, "test": task[::5]}.items():
        shutil.rmtree(folder / part, ignore_errors=True)
        (folder / part).mkdir(parents=True)
        for file in files:
            if part != "task" or file not in task[::5]:
                shutil.copy(file, folder / part / f"{file.parent.name}-{file.name}")


def configured(tables: dict[str, Any], steps: int) -> RunConfig:
    train = {"steps": steps, "global_batch": SEQUENCES, "sequence": SEQUENCE, "precision": "bf16"}
    schedule = {"warmup_steps": steps // 10}
    return build_config({"model": MODEL, "schedule": schedule} | tables | {"train": train | tables.get("train", {})})


def loss(step: Step, batches: Any) -> float:
    with torch.no_grad(), step.evaluating():
        parts = [step.evaluate(batch.map(torch.from_numpy)) for batch in batches]
    return float(sum(loss for loss, _ in parts) / sum(count for _, count in parts))


def trained(config: RunConfig, test: RunConfig | None = None) -> tuple[Step, dict[str, float]]:
    """The step after training, and losses of what validates and of the test, before and after."""
    seed_everything(0)
    loader = Loader(prepare(config.data, config.model.vocab), config.data, SEQUENCE)
    batches = loader.training(SEQUENCES, 0)
    step = Step(config, Decisions(config.train.precision), Mesh(torch.device("cpu")))
    held_out = None if test is None else prepare(test.data, test.model.vocab).train

    def losses(when: str) -> dict[str, float]:
        found = {f"validation_{when}": loss(step, loader.validation(16, None if held_out is not None else 16))}
        if held_out is not None:
            found[f"test_{when}"] = loss(step, evaluation_batches(held_out, SEQUENCE, 16))
        return found

    found, began = losses("before"), time.monotonic()
    for number in range(config.train.steps):
        step.update(step.forward_backward(batches.batch(number).map(torch.from_numpy), number), number)
        if number % 500 == 499:
            print(f"step {number + 1} after {time.monotonic() - began:.0f} s", flush=True)
    return step, found | losses("after")


def base_of(folder: Path) -> None:
    """The model that everything starts from, once."""
    if (folder / "model").exists():
        return
    texts(folder)
    config = configured({"data": {"path": str(folder / "base")}, "optimizer": {"lr": 3e-3}}, BASE_STEPS)
    step, found = trained(config)
    print(json.dumps(found), flush=True)
    write_model(folder / "made", config.model, step.model.state_dict())
    tokenizer = prepare(config.data, config.model.vocab).tokenizer_path
    assert tokenizer is not None
    shutil.copy(tokenizer, folder / "made" / "tokenizer.json")
    (folder / "made").rename(folder / "model")


def run(folder: Path, method: str, rate: float) -> dict[str, Any]:
    data = {"tokenizer": str(folder / "model" / "tokenizer.json"), "validation_fraction": 0.1}
    tables = {"optimizer": {"lr": rate}, "train": {"start_from": str(folder / "model")},
              "finetune": {"method": method} | (ADAPTER if method != "none" else {})}  # fmt: skip
    config = configured(tables | {"data": data | {"path": str(folder / "task")}}, STEPS)
    test = configured({"data": data | {"path": str(folder / "test"), "validation_fraction": 0.001}}, STEPS)
    step, found = trained(config, test)
    count = sum(p.numel() for p in step.model.parameters() if p.requires_grad)
    return {"method": method, "rate": rate, "trained": count, **found}


def known() -> list[dict[str, Any]]:
    return [json.loads(line) for line in RESULTS.read_text().splitlines()] if RESULTS.exists() else []


def page(rows: list[dict[str, Any]]) -> str:
    tried = {method: [row for row in rows if row["method"] == method] for method in RATES}
    best = {method: min(found, key=lambda r: r["validation_after"]) for method, found in tried.items() if found}
    whole = best["none"]["test_after"]
    lines = [
        "# Adapters beside full fine-tuning", "",
        f"`python benchmarks/finetune.py --record`: {MODEL['layers']} x {MODEL['hidden']} after {BASE_STEPS:,} steps",
        f"of {SEQUENCES * SEQUENCE} tokens on the standard library without {' and '.join(PACKAGES)}, then {STEPS:,}",
        "steps on these; the test is every fifth file. Learning rates are chosen by a validation part; one seed.",
        "A method that is not here has not been run yet.", "",
        "| method | trained parameters | learning rate | test before | after, nats per token | above full |",
        "|---|---:|---:|---:|---:|---:|",
    ]  # fmt: skip
    for method, row in best.items():
        name = "all" if method == "none" else f"{method}, rank {ADAPTER['rank']}"
        lines.append(
            f"| {name} | {row['trained']:,} | {row['rate']:g} | {row['test_before']:.4f} | {row['test_after']:.4f} | "
            f"{row['test_after'] - whole:+.4f} |"
        )
    return "\n".join(lines) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--folder", type=Path, required=True)
    parser.add_argument("--record", action="store_true")
    options = parser.parse_args()
    base_of(options.folder)
    there = {(row["method"], row["rate"]) for row in known()}
    for method, rate in ((method, rate) for method, rates in RATES.items() for rate in rates):
        if (method, rate) not in there:
            row = run(options.folder, method, rate)
            print(json.dumps(row), flush=True)
            with RESULTS.open("a") as file:
                file.write(json.dumps(row) + "\n")
    if options.record:  # of what there is
        PAGE.write_text(page(known()))


if __name__ == "__main__":
    main()
