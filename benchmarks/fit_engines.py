"""Fit the constants of the engines in `src/ironlaw/plan/engines/` to measured runs.

    python benchmarks/fit_engines.py runs.csv [--engine NAME] [--write]

Step times and peak memory are fitted apart. Residuals are ln(predicted / measured) with a soft-L1 loss; every group
weighs by the fourth root of its size, so that 720 runs of one machine do not decide for 10 of another. Each constant
is bounded by what is physically possible and held near its starting value by a weak prior. Nothing is fitted per row
or per group.
`--unseen` refits without each group in turn and prints its error, the out-of-sample record.
"""

from __future__ import annotations

import argparse
import json
import tomllib
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
from scipy.optimize import least_squares

from ironlaw.plan.cluster.candidates import Candidates, candidates_of_jobs
from ironlaw.plan.cluster.memory import peak_memory, reported_bytes
from ironlaw.plan.cluster.step_costs import StepCosts, step_costs
from ironlaw.plan.cluster.system import system_of, under_pressure
from ironlaw.plan.cluster.timeline import Times
from ironlaw.plan.engines.engine import MEANING, TrainingEngine
from ironlaw.plan.engines.named import engines
from ironlaw.plan.measured.read import Run, read_runs
from ironlaw.plan.measured.validate import settled, systems_of

# name: (lowest, highest, scale of the prior in the fitted variable)
TIME_BOUNDS: dict[str, tuple[float, float]] = {
    "host_layer_seconds": (2e-5, 3e-3),
    "host_backward_ratio": (0.5, 3.0),
    "host_collective_seconds": (1e-6, 6e-4),
    "host_rank_seconds": (0.0, 2e-3),
    "host_microbatch_seconds": (1e-4, 3e-2),
    "host_step_seconds": (1e-3, 0.5),
    "matmul_slowdown": (0.95, 1.6),
    "cdna3.matmul_slowdown": (0.95, 2.4),
    "attention_slowdown": (0.7, 2.5),
    "streaming_traffic": (0.8, 5.0),
    "score_traffic": (0.8, 5.0),
    "loss_traffic": (0.8, 5.0),
    "optimizer_traffic": (0.6, 5.0),
    "tp_hidden": (0.0, 0.95),
    "dp_hidden": (0.0, 1.0),
    "fsdp_hidden": (0.0, 1.0),
    "pp_hidden": (0.0, 0.98),
    "cp_hidden": (0.0, 0.98),
    "shard_traffic": (0.8, 5.0),
    "island_slowdown": (1.0, 3.0),
    "network_slowdown": (1.0, 4.0),
}
MEMORY_BOUNDS: dict[str, tuple[float, float]] = {
    "run_ahead_bytes": (0.0, 200.0),
    "entrance_bytes": (0.0, 20.0),
    "activation_slack": (1.0, 1.5),
    "gathered_inputs": (0.0, 1.0),
    "activation_saves": (1.0, 3.0),
    "logit_bytes": (2.0, 24.0),
    "context_bytes": (0.0, 3e9),
    "gradient_bytes": (2.0, 6.0),
}
SCALES = {
    "host_step_seconds": 3.0,
    "attention_slowdown": 0.2,
    "matmul_slowdown": 0.2,
    "shard_traffic": 0.8,
    "host_layer_seconds": 0.2,
    "host_microbatch_seconds": 0.5,
    "host_collective_seconds": 0.5,
    "host_rank_seconds": 3e-4,
    "activation_slack": 0.1,
    "context_bytes": 5e8,
    "logit_bytes": 4.0,
    "run_ahead_bytes": 40.0,
    "entrance_bytes": 5.0,
}
PRIOR_WEIGHT = 0.06  # of 0.05 to 0.4: groups left out are planned best from 0.06 to 0.15, those fitted to best at 0.05


@dataclass
class Block:
    """Runs of one engine in one setting, with their engine-independent ingredients."""

    candidates: Candidates
    costs: StepCosts
    measured: np.ndarray
    weight: np.ndarray
    groups: np.ndarray
    generation: str


def blocks(runs: list[Run], kind: str) -> list[Block]:
    chosen = [r for r in runs if r.ran and kind in r.checks and value(r, kind)]
    sizes: dict[str, int] = {}
    for run in chosen:
        sizes[run.group] = sizes.get(run.group, 0) + 1
    result = []
    for where, index in systems_of(chosen):
        part = [chosen[i] for i in index]
        candidates = candidates_of_jobs([r.job for r in part])
        result.append(
            Block(
                candidates,
                step_costs(candidates, where),
                np.array([value(r, kind) for r in part]),
                np.array([sizes[r.group] ** -0.25 for r in part]),
                np.array([r.group for r in part]),
                part[0].cluster.accelerator.generation,
            )
        )
    return result


def value(run: Run, kind: str) -> float | None:
    return run.step_seconds if kind == "time" else run.peak_bytes


def get(engine: TrainingEngine, name: str) -> float:
    """A constant, or with a dot its value on one generation: `hopper.matmul_slowdown`."""
    generation, _, key = name.rpartition(".")
    return float(getattr(engine.on(generation), key))


def rounded(value: float) -> float:
    """Four digits; what a bound of zero was approached to is zero."""
    return float(f"{value:.4g}") if abs(value) >= 1e-7 else 0.0


def put(engine: TrainingEngine, values: dict[str, float]) -> TrainingEngine:
    plain = {name: value for name, value in values.items() if "." not in name}
    nested = {generation: dict(entries) for generation, entries in engine.by_generation.items()}
    for name, value in values.items():
        if "." in name:
            generation, _, key = name.rpartition(".")
            nested.setdefault(generation, {})[key] = value
    return replace(engine, **plain, by_generation=nested)


def predicted(block: Block, engine: TrainingEngine, kind: str) -> np.ndarray:
    engine = engine.on(block.generation)
    if kind == "time":
        return Times(block.costs, block.candidates, engine).step_seconds
    return reported_bytes(block.candidates, engine)


def fit(engine: TrainingEngine, data: list[Block], names: list[str], kind: str) -> TrainingEngine:
    """The engine with the named constants fitted."""
    bounds = TIME_BOUNDS if kind == "time" else MEMORY_BOUNDS
    low = np.array([bounds.get(n, bounds[n.split(".")[-1]])[0] for n in names])
    high = np.array([bounds.get(n, bounds[n.split(".")[-1]])[1] for n in names])
    logarithmic = np.array([low_ > 0 and high_ / low_ > 5 for low_, high_ in zip(low, high, strict=True)])
    default = np.where(logarithmic, 1.0, 0.4)
    scale = np.array([SCALES.get(n.split(".")[-1], d) for n, d in zip(names, default, strict=True)])

    def encode(x: np.ndarray) -> np.ndarray:
        return np.where(logarithmic, np.log(np.maximum(x, 1e-12)) / scale, x / scale)

    def decode(x: np.ndarray) -> np.ndarray:
        return np.where(logarithmic, np.exp(np.clip(x * scale, -30, 30)), x * scale)

    start = encode(np.clip([get(engine, n) for n in names], low, high))

    def residuals(x: np.ndarray) -> np.ndarray:
        trial = put(engine, dict(zip(names, map(float, decode(x)), strict=True)))
        errors = [np.log(predicted(b, trial, kind) / b.measured) * b.weight for b in data]
        return np.concatenate([*errors, PRIOR_WEIGHT * (x - start)])

    inside = np.clip(start, encode(low) + 1e-6, encode(high) - 1e-6)
    found = least_squares(
        residuals,
        inside,
        bounds=(encode(low), encode(high)),
        loss="soft_l1",
        f_scale=0.01 if kind == "memory" else 0.05,
        max_nfev=60,
    )
    return put(engine, dict(zip(names, (float(v) for v in decode(found.x)), strict=True)))


def summary(data: list[Block], engine: TrainingEngine, kind: str) -> None:
    errors: dict[str, list[float]] = {}
    for block in data:
        for group, error in zip(block.groups, predicted(block, engine, kind) / block.measured - 1, strict=True):
            errors.setdefault(group, []).append(error)
    for group, values in sorted(errors.items()):
        e = np.array(values)
        a = np.abs(e)
        print(
            f"  {group:26s} {kind:6s} n {len(e):4d} median {100 * np.median(a):5.1f} mean {100 * a.mean():5.1f} "
            f"p90 {100 * np.quantile(a, 0.9):5.1f} bias {100 * np.median(e):+5.1f}"
        )


PLAN: dict[str, tuple[list[str], list[str]]] = {
    # engine: constants of time, constants of memory that its runs can tell
    "megatron-2021": (["matmul_slowdown", "streaming_traffic", "shard_traffic", "score_traffic", "pp_hidden",
                       "network_slowdown"], []),
    "megatron-deepspeed": (
        ["host_layer_seconds", "host_collective_seconds", "host_microbatch_seconds", "host_step_seconds",
         "matmul_slowdown", "streaming_traffic", "shard_traffic", "score_traffic", "loss_traffic", "tp_hidden",
         "pp_hidden", "island_slowdown", "network_slowdown", "optimizer_traffic"],
        [],
    ),
    "megatron-core": (["matmul_slowdown", "attention_slowdown", "shard_traffic", "tp_hidden", "dp_hidden",
                       "host_layer_seconds", "host_step_seconds"],
                      ["logit_bytes", "gathered_inputs", "context_bytes"]),
    "nemo": (["matmul_slowdown", "attention_slowdown", "streaming_traffic", "shard_traffic", "tp_hidden", "dp_hidden",
              "pp_hidden", "cp_hidden", "host_step_seconds"], []),
    "paxml": (["matmul_slowdown", "fsdp_hidden"], []),
    "nanotron": (["host_layer_seconds", "host_collective_seconds", "host_rank_seconds", "host_microbatch_seconds",
                  "host_step_seconds", "matmul_slowdown", "streaming_traffic", "shard_traffic", "loss_traffic",
                  "tp_hidden", "dp_hidden", "pp_hidden", "island_slowdown", "network_slowdown", "optimizer_traffic"],
                 ["run_ahead_bytes", "entrance_bytes", "activation_slack", "context_bytes"]),
    "composer-fsdp": (["host_step_seconds", "matmul_slowdown", "attention_slowdown", "streaming_traffic",
                       "shard_traffic", "fsdp_hidden"], []),
    "torchtitan-2024": (["matmul_slowdown", "attention_slowdown", "shard_traffic", "fsdp_hidden"], []),
    # FlashAttention-2 through PyTorch: its published rate on Hopper, so attention is not fitted.
    "torchtitan": (["matmul_slowdown", "tp_hidden"], []),
    "torchtitan-2025": (["matmul_slowdown", "host_step_seconds", "cdna3.matmul_slowdown"],
                        ["logit_bytes", "hopper.logit_bytes"]),  # on Hopper torch 2.7, whose loss is not fused
}  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("csv", type=Path)
    parser.add_argument("--engine", choices=sorted(PLAN))
    parser.add_argument("--kind", choices=("time", "memory"))
    parser.add_argument("--write", action="store_true", help="write the constants into the engines' files")
    parser.add_argument("--unseen", action="store_true", help="fit without each group in turn")
    arguments = parser.parse_args()
    read, _ = read_runs(arguments.csv)
    runs = settled(read)
    for name, plan in PLAN.items():
        if arguments.engine not in (None, name):
            continue
        chosen = [r for r in runs if r.engine.name == name]
        for kind, names in zip(("time", "memory"), plan, strict=True):
            if not names or arguments.kind not in (None, kind):
                continue
            data = blocks(chosen, kind)
            fitted = fit(start_of(name), data, names, kind)
            print(name, kind, {n: rounded(get(fitted, n)) for n in names})
            summary(data, fitted, kind)
            if arguments.write:
                write(name, fitted, names, chosen)
            if arguments.unseen:
                left_out(name, chosen, names, kind)


@dataclass
class Unseen:
    """A run planned with constants that were fitted without its group."""

    run: Run
    log_error: float  # ln(measured / planned)


NEUTRAL = TrainingEngine("neutral", fsdp_hidden=0.6)
"""Runs of three engines tell how much of ZeRO-3 is hidden, 0.37 to 0.47; 0.9 is of engines whose runs do not."""


def start_of(name: str) -> TrainingEngine:
    """The engine's conventions with neutral values for everything that is fitted: where every fit starts.

    So a fit does not depend on the one before it, and a group that is left out does not come back by the prior.
    """
    values = {n: get(NEUTRAL, n) for n in (*PLAN[name][0], *PLAN[name][1])}
    return put(engines()[name], values)


def left_out(name: str, runs: list[Run], names: list[str], kind: str, quiet: bool = False) -> list[Unseen]:
    """Each group planned by an engine fitted to its others, without any by the neutral one; and the errors printed."""
    usable = [r for r in runs if r.ran and kind in r.checks and value(r, kind)]
    result: list[Unseen] = []
    for group in sorted({r.group for r in usable}):
        rest = blocks([r for r in usable if r.group != group], kind)
        out = [r for r in usable if r.group == group]
        engine = fit(start_of(name), rest, names, kind) if rest else start_of(name)
        mine = [Unseen(*found) for found in log_errors(out, engine, kind)]
        result += mine
        if not quiet:
            errors = np.array([np.exp(-u.log_error) - 1 for u in mine])
            size = np.abs(errors)
            print(
                f"  left out: {group:26s} {kind:6s} n {len(size):4d} median {100 * np.median(size):5.1f} "
                f"mean {100 * size.mean():5.1f} p90 {100 * np.quantile(size, 0.9):5.1f} "
                f"bias {100 * np.median(errors):+5.1f}"
            )
    return result


def log_errors(runs: list[Run], engine: TrainingEngine, kind: str) -> list[tuple[Run, float]]:
    """Each run with ln(measured / planned) by this engine in place of its own."""
    result: list[tuple[Run, float]] = []
    for _, index in systems_of(runs):
        part = [runs[i] for i in index]
        where = system_of(part[0].cluster, engine, part[0].precision)  # with what its precision casts and keeps
        candidates = candidates_of_jobs([r.job for r in part])
        if kind == "time":
            seconds = Times(step_costs(candidates, where), candidates, where.engine).step_seconds
            planned = under_pressure(seconds, peak_memory(candidates, where.engine).total, where)
        else:
            planned = reported_bytes(candidates, where.engine)
        measured = np.array([value(r, kind) for r in part])
        result += [(r, float(e)) for r, e in zip(part, np.log(measured / planned), strict=True)]
    return result


ASSUMED = {
    "torchtitan.cdna3": "assumed: between the value above and the 1.7 of another generation of this software there",
    "torchtitan.blackwell": "read from its source: cuDNN's attention there (May 2025), as slow as in the vendor's "
    "software",
    "torchtitan-2025.blackwell": "read from its source: cuDNN's attention there (May 2025), which selective "
    "recomputation repeats until December 2025, as slow as in the vendor's software",
    "megatron-core.ampere": "its code's measured there a generation of software before (megatron-2021); of tensor "
    "parallel collectives those of backward's input gradients run beside weight gradients (its layers.py), a quarter",
    "nemo.ampere": "as slow as products of Megatron's code were measured there (megatron-2021)",
    "megatron-core.hopper": "assumed: between these and what NeMo, built on the same code and tuned, has there",
}
"""Where constants of a generation come from that no run of the engine tells."""

TEXT = ("frameworks", "source", "attention")


def write(name: str, fitted: TrainingEngine, names: list[str], runs: list[Run]) -> None:
    """Rewrite the engine's file: conventions first, then what was fitted, each with unit, meaning and origin."""
    path = Path(__file__).parents[1] / "src/ironlaw/plan/engines" / f"{name}.toml"
    old = tomllib.loads(path.read_text(encoding="utf-8"))
    overrides = old.pop("by_generation", {})
    old |= {n: rounded(get(fitted, n)) for n in names if "." not in n}
    for n in names:
        generation, _, key = n.rpartition(".")
        if generation:
            overrides.setdefault(generation, {})[key] = rounded(get(fitted, n))
    groups = ", ".join(sorted({r.group for r in runs if r.step_seconds or r.peak_bytes}))
    old["source"] = f"fitted by benchmarks/fit_engines.py to published runs of {groups}; conventions from the framework"
    free = {n.rpartition(".")[2] for plan in PLAN[name] for n in plan}
    lines = [f"# Constants of the engine {name}. Conventions are read from the framework's documentation or code;"]
    lines += [
        "# what is marked fitted comes from benchmarks/fit_engines.py. Meanings: src/ironlaw/plan/engines/engine.py.",
        "",
    ]
    lines += [f"{key} = {toml(old[key])}" for key in TEXT if key in old]
    for title, wanted in (("conventions", False), ("fitted", True)):
        keys = [k for k in old if k not in TEXT and (k in free) is wanted]
        lines += ["", f"# {title}"] if keys else []
        for key in keys:
            unit, meaning = MEANING[key]
            lines.append(f"{key} = {toml(old[key])}  # {unit + '; ' if unit else ''}{meaning}")
    for generation, entries in sorted(overrides.items()):
        origin = (
            "fitted"
            if all(f"{generation}.{key}" in (*PLAN[name][0], *PLAN[name][1]) for key in entries)
            else ASSUMED.get(f"{name}.{generation}", "assumed")
        )
        lines += ["", f"[by_generation.{generation}] # {origin}, in place of the above"]
        lines += [f"{key} = {toml(value_)}" for key, value_ in entries.items()]
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")


def toml(value_: object) -> str:
    return json.dumps(list(value_)) if isinstance(value_, list | tuple) else json.dumps(value_)


if __name__ == "__main__":
    main()
