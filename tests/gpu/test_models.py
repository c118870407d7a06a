"""Models and methods on CUDA beside the CPU: attention with rules of its own, experts, adapters, state."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from ironlaw.config import RunConfig, build_config
from ironlaw.ledger import Ledger
from ironlaw.model.config import ModelConfig
from ironlaw.model.huggingface.weights import write_model
from ironlaw.model.transformer import Transformer
from ironlaw.train.result import Outcome

pytestmark = pytest.mark.gpu
Config, Train, Losses = Callable[..., RunConfig], Callable[..., Outcome], Callable[[Path], list[float]]

ROTARY: dict[str, Any] = {
    "layers": 3, "hidden": 128, "heads": 4, "vocab": 512, "context": 128, "kv_heads": 2, "ffn": 256,
    "gated_ffn": True, "activation": "silu", "norm": "rmsnorm", "positions": "rope", "bias": False, "tied": False,
}  # fmt: skip
FORMS: dict[str, dict[str, Any]] = {
    "soft caps": {"attention_cap": 20.0, "logit_cap": 10.0, "sliding_window": 24, "full_every": 2},
    "alibi": {"positions": "alibi", "embedding_norm": True, "kv_heads": 4},
    "sinks and biased experts": {
        "bias": True, "ffn_bias": False, "activation": "clamped_swiglu", "attention_sinks": True,
        "moe": {"experts": 4, "experts_per_token": 2, "bias": True},
    },
    "experts": {"moe": {"experts": 4, "experts_per_token": 2, "expert_ffn": 96, "shared_experts": 1}},
    "experts with a capacity": {"moe": {
        "experts": 4, "experts_per_token": 2, "expert_ffn": 96, "capacity_factor": 1.1, "balance": "bias",
    }},
    "latent attention": {
        "kv_heads": None,
        "latent": {"query_rank": 48, "key_value_rank": 32, "plain_size": 32, "rotary_size": 16, "value_size": 32},
    },
    "scaled embedding": {"embedding_scale": 11.3, "norm_place": "sandwich", "qk_norm": True},
    "parallel blocks": {"norm": "layernorm", "norm_bias": False, "parallel_norms": 1, "logit_scale": 2.0},
}  # fmt: skip


def shape(form: str) -> dict[str, Any]:
    return {key: value for key, value in (ROTARY | FORMS[form]).items() if value is not None}


@pytest.mark.parametrize("form", FORMS)
def test_models_are_the_cpus(
    form: str, config: Config, train: Train, train_on_cpu: Train, losses: Losses, tmp_path: Path
) -> None:
    chosen = config(shape(form))
    train(chosen, tmp_path / "here")
    train_on_cpu(chosen, tmp_path / "cpu")
    # FlexAttention multiplies in tf32 where it may.
    assert losses(tmp_path / "here") == pytest.approx(losses(tmp_path / "cpu"), rel=5e-3)


@pytest.mark.parametrize("form", FORMS)
def test_models_in_bf16_are_near(form: str, config: Config, train: Train, losses: Losses, tmp_path: Path) -> None:
    train(config(shape(form)), tmp_path / "fp32")
    train(config(shape(form), train={"precision": "bf16", "compile": "on"}), tmp_path / "here")
    assert losses(tmp_path / "here") == pytest.approx(losses(tmp_path / "fp32"), rel=0.03)


@pytest.mark.parametrize(("name", "like"), [("adam8bit", 0.03), ("paged_adamw", 2e-3), ("paged_adam8bit", 0.03)])
def test_state_that_is_paged_is_adams(
    name: str, like: float, config: Config, train: Train, losses: Losses, tmp_path: Path
) -> None:
    """And a run that stops goes on with it."""
    pytest.importorskip("bitsandbytes")

    def of(name: str, steps: int) -> RunConfig:
        return config(
            ROTARY, optimizer={"name": name}, train={"steps": steps}, schedule={"kind": "constant"},
            checkpoint={"every": 3},
        )  # fmt: skip

    train(of("adamw", 8), tmp_path / "adamw")
    train(of(name, 8), tmp_path / "whole")
    train(of(name, 4), tmp_path / "parts")
    train(of(name, 8), tmp_path / "parts", resume=True)
    assert losses(tmp_path / "whole") == pytest.approx(losses(tmp_path / "adamw"), rel=like)
    assert losses(tmp_path / "parts") == pytest.approx(losses(tmp_path / "whole"), rel=1e-4)


def write_base(folder: Path, table: dict[str, Any]) -> None:
    config = ModelConfig(**table)
    torch.manual_seed(0)
    write_model(folder, config, Transformer(config).state_dict())


@pytest.mark.parametrize("method", ["lora", "dora", "qlora"])
def test_adapters_are_the_cpus(
    method: str, config: Config, train: Train, train_on_cpu: Train, losses: Losses, tmp_path: Path
) -> None:
    write_base(tmp_path / "base", ROTARY)
    document = config(ROTARY, data={"mock": True}).model_dump(exclude_none=True)
    document |= {"model": {"from": str(tmp_path / "base")}, "finetune": {"method": method, "rank": 8, "alpha": 16.0}}
    chosen = build_config(document)
    train(chosen, tmp_path / "here")
    train_on_cpu(chosen, tmp_path / "cpu")
    assert losses(tmp_path / "here") == pytest.approx(losses(tmp_path / "cpu"), rel=2e-3)


@pytest.mark.parametrize("method", ["lora", "qlora"])
def test_peak_memory_of_adapters_is_the_plans(method: str, config: Config, train: Train, tmp_path: Path) -> None:
    model = ROTARY | {"layers": 8, "hidden": 512, "heads": 8, "kv_heads": 8, "ffn": 1536, "context": 512, "vocab": 8192}
    write_base(tmp_path / "base", model)
    train_ = {"global_batch": 8, "steps": 4, "precision": "bf16"}
    document = config(model, data={"mock": True}, train=train_).model_dump(exclude_none=True)
    document |= {"model": {"from": str(tmp_path / "base")}, "finetune": {"method": method, "rank": 8, "alpha": 16.0}}
    train(build_config(document), tmp_path / "run")
    planned, found = (
        Ledger.load(tmp_path / "run" / name).totals["peak_bytes"].value for name in ("plan.json", "ledger.json")
    )
    assert planned == pytest.approx(found, rel=0.05)


@pytest.mark.parametrize("qat", ["int8", "int4,2:4"])
def test_training_for_few_bits_is_the_cpus(
    qat: str, config: Config, train: Train, train_on_cpu: Train, losses: Losses, tmp_path: Path
) -> None:
    chosen = config(ROTARY, train={"qat": qat})
    train(chosen, tmp_path / "here")
    train_on_cpu(chosen, tmp_path / "cpu")
    assert losses(tmp_path / "here") == pytest.approx(losses(tmp_path / "cpu"), rel=1e-2)


def test_a_student_is_the_cpus(
    config: Config, train: Train, train_on_cpu: Train, losses: Losses, tmp_path: Path
) -> None:
    train_on_cpu(config(ROTARY | {"layers": 4}, checkpoint={"every": 8}), tmp_path / "teacher")
    objective = {"kind": "distillation", "teacher": str(tmp_path / "teacher"), "hidden": 0.5}
    chosen = config(ROTARY, objective=objective)
    train(chosen, tmp_path / "here")
    train_on_cpu(chosen, tmp_path / "cpu")
    assert losses(tmp_path / "here") == pytest.approx(losses(tmp_path / "cpu"), rel=2e-3)


def test_energy_is_the_boards(config: Config, train: Train, ledger: Any, tmp_path: Path) -> None:
    """By NVML's counter, where its package is installed; watts that a board can draw."""
    pytest.importorskip("pynvml")
    model = ROTARY | {"layers": 12, "hidden": 1024, "heads": 16, "kv_heads": 16, "context": 1024}
    train_ = {"global_batch": 16, "steps": 30, "precision": "bf16"}
    train(config(model, data={"mock": True}, train=train_), tmp_path / "run")
    totals = ledger(tmp_path / "run").totals
    watts = totals["energy_joules"].value / (30 * totals["step_seconds"].value)
    assert 30 < watts < 1500
