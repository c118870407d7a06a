"""The toolbox on one small model: every setting alone and in pairs trains, and holds what its plan says."""

from __future__ import annotations

import random
from collections.abc import Callable
from itertools import combinations
from pathlib import Path
from typing import Any

import pytest

from ironlaw.config import RunConfig
from ironlaw.ledger import Ledger
from ironlaw.train.result import Outcome

Config = Callable[..., RunConfig]
Train = Callable[..., Outcome]

# Wide enough that what is not listed (workspace of a library's kernel, scalars) is small.
MODEL: dict[str, Any] = {"layers": 3, "hidden": 64, "heads": 4, "vocab": 512, "context": 64}
BASE: dict[str, Any] = {
    "train": {"steps": 14, "global_batch": 8, "profile_steps": 2},
    "optimizer": {"lr": 3e-3},
    "evaluation": {"every": 0, "batches": 1},
    "checkpoint": {"every": 0},
}
SETTINGS: dict[str, dict[str, dict[str, Any]]] = {
    "plain": {},
    "sgd": {"optimizer": {"name": "sgd", "lr": 0.3}},
    "momentum": {"optimizer": {"name": "momentum", "lr": 0.1}},
    "rmsprop": {"optimizer": {"name": "rmsprop", "lr": 1e-3}},
    "adam": {"optimizer": {"name": "adam"}},
    "adafactor": {"optimizer": {"name": "adafactor", "lr": 3e-2}},
    "adam8bit": {"optimizer": {"name": "adam8bit"}},
    "galore": {"optimizer": {"name": "galore", "rank": 8, "lr": 1e-2}},
    "muon": {"optimizer": {"name": "muon", "lr": 1e-2}},
    "accumulation": {"train": {"micro_batch": 2}},
    "recompute full": {"recompute": {"mode": "full"}},
    "recompute every 2": {"recompute": {"mode": "every"}},
    "recompute selective": {"recompute": {"mode": "selective"}},
    "recompute budget": {"recompute": {"mode": "budget", "budget": "8MB"}},
    "bf16": {"train": {"precision": "bf16"}},
    "fp16": {"train": {"precision": "fp16"}},
    "chunked loss": {"train": {"loss": "chunked"}},
    "ragged accumulation": {"train": {"micro_batch": 3}},
    "average": {"train": {"average_decay": 0.9}},
    "documents": {"data": {"packing": "best_fit"}},
    "wsd": {"schedule": {"kind": "wsd"}},
    "llama": {"model": {
        "kv_heads": 2, "ffn": 160, "gated_ffn": True, "activation": "silu", "norm": "rmsnorm", "positions": "rope",
        "bias": False, "tied": False,
    }},
    "dropout": {"model": {"dropout": 0.1}},
    "window": {"model": {"sliding_window": 24}},
    "experts": {"model": {"bias": False, "moe": {
        "experts": 4, "experts_per_token": 2, "expert_ffn": 96, "shared_experts": 1, "shared_gate": True,
    }}},
    "experts with a capacity": {"model": {"bias": False, "moe": {
        "experts": 4, "experts_per_token": 2, "expert_ffn": 96, "shared_experts": 1, "dense_layers": 1,
        "capacity_factor": 1.1, "balance": "bias",
    }}},
}  # fmt: skip


def section_keys(setting: dict[str, dict[str, Any]]) -> set[tuple[str, str]]:
    return {(section, key) for section, table in setting.items() for key in table}


def compatible(one: str, other: str) -> bool:
    """Two settings of the same key are not a pair."""
    keys = [section_keys(SETTINGS[name]) for name in (one, other)]
    return "plain" not in (one, other) and not (keys[0] & keys[1]) - {("optimizer", "lr")}


PAIRS = [pair for pair in combinations(SETTINGS, 2) if compatible(*pair)]
SAMPLED = random.Random(4).sample(PAIRS, 8)


@pytest.fixture
def run(tiny_config: Config, train: Train, tmp_path: Path) -> Callable[..., Outcome]:
    def run(*names: str, out: str = "run") -> Outcome:
        for name in names:
            if name == "adam8bit":
                pytest.importorskip("bitsandbytes")
        sections = {name: dict(table) for name, table in BASE.items()} | {"model": dict(MODEL)}
        for name in names:
            for section, table in (SETTINGS | SWITCHED)[name].items():
                sections.setdefault(section, {}).update(table)
        model = sections.pop("model")
        # bf16 where asked for, fp32 elsewhere: tiny_config says so.
        return train(tiny_config(model, **sections), tmp_path / out)

    return run


def check(outcome: Outcome, run: Path) -> None:
    plan, measured = Ledger.load(run / "plan.json"), outcome.ledger
    planned, found = plan.totals["peak_bytes"].value, measured.totals["peak_bytes"].value
    assert abs(planned / found - 1) < 0.05, (planned, found)
    assert plan.memory_bytes()["optimizer"] == measured.memory_bytes()["optimizer"]
    assert plan.memory_bytes()["weights"] == measured.memory_bytes()["weights"]
    assert measured.totals["train_loss"].value < 6.1  # ln 512 is 6.24


ROTARY = {
    "kv_heads": 2, "ffn": 160, "gated_ffn": True, "norm": "rmsnorm", "positions": "rope", "bias": False,
}  # fmt: skip
SWITCHED: dict[str, dict[str, dict[str, Any]]] = {
    "qat": {"train": {"qat": "int4,2:4"}},
    "gemma2": {"model": ROTARY | {
        "norm_place": "sandwich", "sliding_window": 24, "full_every": 2, "attention_cap": 20.0, "logit_cap": 10.0,
        "embedding_scale": 4.0,
    }},
    "gemma3": {"model": ROTARY | {
        "norm_place": "sandwich", "sliding_window": 24, "full_every": 2, "qk_norm": True, "rope_theta_local": 1e3,
    }},
    "cohere": {"model": ROTARY | {"norm": "layernorm", "norm_bias": False, "parallel_norms": 1, "logit_scale": 2.0}},
    "bloom": {"model": {"positions": "alibi", "embedding_norm": True}},
    "gpt-oss": {"model": ROTARY | {
        "bias": True, "ffn_bias": False, "activation": "clamped_swiglu", "attention_sinks": True,
        "moe": {"experts": 4, "experts_per_token": 2, "bias": True},
    }},
}  # fmt: skip
WITH = [
    ("qat",), ("gemma2",), ("gemma2", "recompute full"), ("gemma3", "bf16"), ("gemma3", "recompute budget"),
    ("cohere", "chunked loss"), ("cohere", "documents"), ("bloom", "documents"), ("gpt-oss", "ragged accumulation"),
]  # fmt: skip


@pytest.mark.parametrize("names", WITH, ids=" and ".join)
def test_families(names: tuple[str, ...], run: Callable[..., Outcome], tmp_path: Path) -> None:
    check(run(*names), tmp_path / "run")


@pytest.mark.parametrize("name", SETTINGS)
def test_alone(name: str, run: Callable[..., Outcome], tmp_path: Path) -> None:
    check(run(name), tmp_path / "run")


@pytest.mark.parametrize("pair", SAMPLED, ids=" + ".join)
def test_some_pairs(pair: tuple[str, str], run: Callable[..., Outcome], tmp_path: Path) -> None:
    check(run(*pair), tmp_path / "run")


@pytest.mark.parametrize(
    ("experts", "modes"),
    [("experts", ("full", "selective", "budget")), ("experts with a capacity", ("every 2", "budget"))],
)
def test_recomputed_experts_count_once(
    experts: str, modes: tuple[str, ...], run: Callable[..., Outcome], tmp_path: Path,
    read_metrics: Callable[[Path], list[dict[str, Any]]],
) -> None:  # fmt: skip
    """Same losses, norms, loads and dropped choices in every step, of a plan that holds."""
    run(experts, out="none")
    keys = ("loss", "grad_norm", "expert_load_busiest_over_mean", "experts_unused", "expert_choices_dropped")
    usual = [{key: entry[key] for key in keys} for entry in read_metrics(tmp_path / "none")]
    for mode in modes:
        outcome = run(experts, f"recompute {mode}", out=mode)
        check(outcome, tmp_path / mode)
        assert Ledger.load(tmp_path / mode / "plan.json").totals["recomputed_flops_per_step"].value > 0
        assert [{key: entry[key] for key in keys} for entry in read_metrics(tmp_path / mode)] == usual


@pytest.mark.long
@pytest.mark.parametrize("pair", PAIRS, ids=" + ".join)
def test_all_pairs(pair: tuple[str, str], run: Callable[..., Outcome], tmp_path: Path) -> None:
    check(run(*pair), tmp_path / "run")
