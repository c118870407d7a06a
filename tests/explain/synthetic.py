"""Runs that never happened: a machine, its plan, and a measured ledger that deviates from it by known amounts."""

from __future__ import annotations

import json
import math
import random
from dataclasses import replace
from pathlib import Path
from typing import Any

from ironlaw.config import RunConfig, build_config
from ironlaw.ledger import Estimate, Ledger, Origin, Phase
from ironlaw.machine.profile import Curve, MatmulFit, Profile
from ironlaw.plan.step import step_operations

GPT = {"name": "gpt-tiny", "layers": 4, "hidden": 256, "heads": 8, "vocab": 4096, "context": 256}
LLAMA = GPT | {"positions": "rope", "norm": "rmsnorm", "activation": "silu", "gated_ffn": True, "bias": False}


def kernels() -> list[str]:
    """Everything that is timed by size in the plan of any model."""
    configs = (build_config({"model": GPT}), build_config({"model": LLAMA}))
    operations = [op for c in configs for p in ("fp32", "bf16") for op, _ in step_operations(c, p)]
    return sorted({op.kernel for op in operations if op.matmul is None and op.attention is None})


def matmul_fits(rate: float, dilution: float) -> dict[str, MatmulFit]:
    """Products at `rate` FLOP/s when large; `dilution`: seconds per FLOP that a dimension of 1 adds."""
    sides = (16, 64, 256, 1024, 8192)
    shapes = [(m, n, k) for m in sides for n in sides for k in sides]
    seconds = [2e-6 + 2 * m * n * k * (1 / rate + dilution * (1 / m + 1 / n + 1 / k)) for m, n, k in shapes]
    return dict.fromkeys(("matmul_bias", "matmul", "matmul_weight_gradient"), MatmulFit.fit(shapes, seconds))


def make_profile(
    *, bf16_factor: float = 1.0, attention: float = 2e-9, small: float = 1e-6, dilution: float = 1e-11
) -> Profile:
    """A machine of 100 GFLOP/s (times the factor in bf16) that streams 10 Gelement/s."""

    curve = Curve((1e3, 1e5, 1e7), (1e-6, 1e-5, 1e-3))
    points = [(tokens, size, attention * size / 32) for tokens in (128, 1024) for size in (32, 64, 128)]
    directions = {"forward": points, "backward": [(t, d, 2 * s) for t, d, s in points]}
    return Profile(
        device="cpu", name="AMD EPYC", created="2026-01-02T03:04:05+00:00", versions={"torch": "2.13.0"}, threads=2,
        memory_bytes=8 * 2**30, runtime_bytes=200 * 2**20,
        matmul={"fp32": matmul_fits(1e11, dilution), "bf16": matmul_fits(1e11 * bf16_factor, dilution)},
        curves={p: dict.fromkeys(kernels(), curve) for p in ("fp32", "bf16")},
        attention={"fp32": directions, "bf16": directions},
        copy_bytes_per_second=2e10, small_operation_seconds=small, storage_bytes_per_second=5e8,
        tokenizer_tokens_per_second=1e6, tiny_block_seconds={"forward": 1e-6, "backward": 1e-6},
        reference_step_seconds={"fp32": 0.0, "bf16": 0.0},
        interference={"compute": [1.0], "memory": [1.0]},
    )  # fmt: skip


def make_config(model: dict[str, Any] | None = None, **train: Any) -> RunConfig:
    return build_config({
        "model": GPT | (model or {}),
        "train": {"steps": 200, "global_batch": 8, "precision": "fp32"} | train,
        "evaluation": {"every": 50, "batches": 4},
    })  # fmt: skip


def make_run(
    plan: Ledger,
    *,
    phases: dict[str, float] | None = None,
    kinds: dict[str, float] | None = None,
    unattributed: float = 0.01,
    profiler: float = 1.2,
    memory: dict[str, float] | None = None,
    facts: dict[str, Any] | None = None,
) -> Ledger:
    """The plan, measured: kinds take `kinds[name]` times as long, phases are replaced by `phases[name]` seconds."""
    kinds, measured = kinds or {}, Origin.MEASURED
    lines = [replace(x, seconds=(x.seconds or 0) * kinds.get(str(x.kind), 1.0), origin=measured) for x in plan.lines]
    timed = Ledger("run", lines=lines)
    by_phase = {str(p): s for p, s in timed.seconds_by_phase().items()} | {"data": 1e-4, "host": 2e-4} | (phases or {})
    step = sum(by_phase.values()) / (1 - unattributed)
    profiled = [replace(line, seconds=(line.seconds or 0) * profiler, bound=None, flops=None) for line in lines]
    run = Ledger("run", lines=profiled, phase_seconds={Phase(p): s for p, s in by_phase.items()})
    run.memory = [replace(m, bytes=(m.bytes or 0) * (memory or {}).get(m.component, 1.0), origin=measured)
                  for m in plan.memory]  # fmt: skip
    tokens = plan.facts["global_batch"] * plan.facts["sequence"]
    flops = plan.totals["flops_per_step"].value
    figures: dict[str, tuple[float, float | None, float | None]] = {
        "step_seconds": (step, step * 0.97, step * 1.06),
        "tokens_per_second": (tokens / step, tokens / step / 1.06, tokens / step / 0.97),
        "mfu": (flops / step / plan.facts["matmul_peak_flops_per_second"], None, None),
        "flops_per_step": (flops, None, None),
        "parameters": (plan.totals["parameters"].value, None, None),
        "peak_bytes": (sum(run.memory_bytes().values()), None, None),
        "resident_bytes": (sum(run.memory_bytes().values()) + 220 * 2**20, None, None),
        "total_seconds": (200 * step + 6.0, None, None),
        "validation_loss": (5.21, None, None),
        "unigram_loss": (6.43, None, None),
        "train_loss": (5.02, None, None),
    }
    run.totals = {n: Estimate(v, measured, "measured during the run", lo, hi) for n, (v, lo, hi) in figures.items()}
    run.facts = {
        "device": "cpu", "machine": "AMD EPYC", "threads": 2, "precision": plan.facts["precision"], "compile": "off",
        "steps": 200, "versions": {"ironlaw": "0.1.0", "torch": "2.13.0+cpu", "python": "3.11.7"},
        "started": "2026-01-02T03:10:00+00:00", "finished": "2026-01-02T03:11:30+00:00",
        "profiled_step_seconds": step * profiler, "machine_speed": 1.0, "slow_steps_fraction": 0.01,
        "wall_seconds": {"training": 200 * step, "evaluation": 8 * step, "checkpoint": 0.3, "startup": 4.0,
                         "profiling": 3 * step * profiler, "other": 0.4},
    } | (facts or {})  # fmt: skip
    return run


def make_metrics(run: Ledger, steps: int = 200) -> list[dict[str, Any]]:
    chance = random.Random(0)
    step = run.totals["step_seconds"].value
    rows = []
    for n in range(1, steps + 1):
        spike = 1.8 if n % 61 == 0 else 1.0
        row: dict[str, Any] = {
            "step": n, "loss": 4.9 + 3.4 * math.exp(-n / 45) + chance.gauss(0, 0.06), "tokens": n * 2048,
            "seconds": step * chance.gauss(1, 0.025) * spike, "lr": 1e-3, "grad_norm": 1.0,
        }  # fmt: skip
        if n % 50 == 0:
            row |= {"validation_loss": 5.0 + 3.3 * math.exp(-n / 45), "evaluation_seconds": 2 * step}
        rows.append(row)
    return rows


def write_run(folder: Path, config: RunConfig, plan: Ledger, run: Ledger | None) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.toml").write_text(config.to_toml(), encoding="utf-8")
    plan.save(folder / "plan.json")
    if run is not None:
        run.save(folder / "ledger.json")
        lines = [json.dumps(row) for row in make_metrics(run)]
        (folder / "metrics.jsonl").write_text("\n".join(lines) + "\n", encoding="utf-8")
    return folder
