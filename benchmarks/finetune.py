"""Adapters beside full fine-tuning: `python benchmarks/finetune.py --folder DIR [--seeds 3]`.

The demo's model learns the standard library but for PACKAGES, then those, by examples/finetune.toml: all weights, and
each kind of adapters with and without the embedding. Loss is that of files held out of them. The base is kept in DIR
and runs in benchmarks/results/finetune.jsonl, so that a second call goes on where the first one ended.
"""

from __future__ import annotations

import argparse
import json
import shutil
import statistics
import sysconfig
from pathlib import Path
from typing import Any

import ironlaw

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "benchmarks" / "results" / "finetune.jsonl"
PACKAGES = ("asyncio", "concurrent", "email", "http", "json", "xml")
WAYS: dict[str, dict[str, Any]] = {"all weights": {}} | {
    f"{method}{' and embeddings' * ends}": {
        "finetune.method": method, "finetune.modules_to_save": ["embeddings"] if ends else [],
    }
    for method in ("lora", "qlora", "dora") for ends in (True, False)
}  # fmt: skip


def base_of(folder: Path) -> Path:
    """The run that everything starts from; `folder`/task is what is learned after it."""
    if not (folder / "base").exists():
        library = Path(sysconfig.get_paths()["stdlib"])
        for part in ("before", "task"):
            (folder / part).mkdir(parents=True)
        for file in library.rglob("*.py"):
            path = file.relative_to(library)
            if not {"site-packages", "test", "tests", "idlelib", "lib2to3"} & set(path.parts):
                part = "task" if path.parts[0] in PACKAGES else "before"
                shutil.copy(file, folder / part / "-".join(path.parts))
        settings = {"data.path": str(folder / "before")}
        ironlaw.train(ROOT / "examples" / "gpt-tiny.toml", out=folder / "base", settings=settings, quiet=True)
    return folder / "base"


def known() -> list[dict[str, Any]]:
    return [json.loads(line) for line in RESULTS.read_text().splitlines()] if RESULTS.exists() else []


def run(folder: Path, way: str, seed: int) -> dict[str, Any]:
    settings = {"model.from": str(base_of(folder)), "data.path": str(folder / "task"), "train.seed": seed,
                "train.precision": "bf16", **WAYS[way]}  # fmt: skip
    out = folder / f"{way.replace(' ', '-')}-{seed}"
    shutil.rmtree(out, ignore_errors=True)
    done = ironlaw.train(ROOT / "examples" / "finetune.toml", out=out, settings=settings, quiet=True)
    assert done.validation_loss is not None
    return {"way": way, "seed": seed, "loss": done.validation_loss.value}


def page(rows: list[dict[str, Any]]) -> str:
    by = {(row["way"], row["seed"]): row["loss"] for row in rows}
    lines = [
        "# Adapters beside full fine-tuning", "",
        "`python benchmarks/finetune.py --folder DIR`: the demo's model after 850 steps of the standard library but",
        f"for {', '.join(PACKAGES)}; then these by examples/finetune.toml (200 steps, 1e-4 for all weights, 1e-3",
        "for adapters of rank 16) in bf16; loss of held-out files in nats per token, beside all weights of the same",
        "seed, mean and standard error.", "",
        "| trained | seeds | loss | above all weights |", "|---|---:|---:|---:|",
    ]  # fmt: skip
    for way in WAYS:
        pairs = [(loss, by["all weights", seed]) for (name, seed), loss in by.items() if name == way]
        if pairs:
            gaps = [loss - whole for loss, whole in pairs]
            error = statistics.stdev(gaps) / len(gaps) ** 0.5 if len(gaps) > 1 else float("nan")
            gap = f"{statistics.mean(gaps):+.4f} ± {error:.4f}" if WAYS[way] else ""
            lines.append(f"| {way} | {len(pairs)} | {statistics.mean(loss for loss, _ in pairs):.4f} | {gap} |")
    return "\n".join(lines) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--folder", type=Path, required=True)
    parser.add_argument("--seeds", type=int, default=3)
    options = parser.parse_args()
    there = {(row["way"], row["seed"]) for row in known()}
    for seed, way in ((seed, way) for seed in range(options.seeds) for way in WAYS):
        if (way, seed) not in there:
            with RESULTS.open("a") as file:
                file.write(json.dumps(run(options.folder, way, seed)) + "\n")
    RESULTS.with_suffix(".md").write_text(page(known()))


if __name__ == "__main__":
    main()
