"""The attention kernel that a run reports is the one that runs."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.profiler import ProfilerActivity, profile

from ironlaw.config import RunConfig
from ironlaw.ledger import Ledger
from ironlaw.model.transformer import Transformer
from ironlaw.train.blocks import attention_kernel
from ironlaw.train.precision import autocast
from ironlaw.train.result import Outcome

CPU = torch.device("cpu")
OPERATION = {
    "SDPA: flash": "aten::_scaled_dot_product_flash_attention_for_cpu",
    "SDPA: math": "aten::_scaled_dot_product_attention_math",
}


@pytest.mark.parametrize(
    ("model", "data", "precision"),
    [
        ({}, {}, "fp32"),
        ({}, {}, "bf16"),
        ({"dropout": 0.1}, {}, "fp32"),
        ({"sliding_window": 6}, {}, "fp32"),
        ({"heads": 4, "kv_heads": 2}, {"packing": "best_fit"}, "bf16"),
        ({"positions": "alibi"}, {}, "fp32"),
    ],
    ids=["plain", "bf16", "dropout", "window", "documents and grouped heads", "alibi"],
)
def test_what_is_reported_runs(
    model: dict[str, Any], data: dict[str, Any], precision: str, tiny_config: Callable[..., RunConfig]
) -> None:
    config = tiny_config(model, data=data)
    network = Transformer(config.model)
    said = attention_kernel(network, config, CPU, precision)
    tokens = torch.zeros(2, config.sequence, dtype=torch.long)
    documents = torch.zeros(2, config.sequence, dtype=torch.int32) if data else None
    with profile(activities=[ProfilerActivity.CPU]) as recorded, autocast(CPU, precision):
        network(tokens, tokens, None, documents).backward()
    ran = {event.name for event in recorded.events()} & set(OPERATION.values())
    assert {OPERATION[said]} == ran


@pytest.mark.parametrize(("precision", "dtype"), [("fp32", torch.float32), ("fp8", torch.bfloat16)])
def test_the_kernel_is_asked_for_in_the_type_that_attention_has(
    precision: str, dtype: torch.dtype, tiny_config: Callable[..., RunConfig], monkeypatch: pytest.MonkeyPatch
) -> None:
    config, asked = tiny_config(), list[torch.dtype]()
    monkeypatch.setattr(torch, "_fused_sdp_choice", lambda query, *rest, **named: asked.append(query.dtype) or 0)
    attention_kernel(Transformer(config.model), config, CPU, precision)
    assert asked == [dtype]


def test_no_fused_kernel_draws_dropout_by_sample(tiny_config: Callable[..., RunConfig]) -> None:
    config = tiny_config({"dropout": 0.1}, layout={})
    assert attention_kernel(Transformer(config.model), config, CPU, "fp32").startswith("scores in memory")


def test_a_run_says_it_and_its_ledger_keeps_it(
    tiny_config: Callable[..., RunConfig], train: Callable[..., Outcome], tmp_path: Path
) -> None:
    said: list[str | None] = []
    train(tiny_config(train={"steps": 2}), tmp_path / "run", watch=lambda entry: said.append(entry["attention"]))
    assert said == ["SDPA: flash"] * 2
    assert Ledger.load(tmp_path / "run" / "ledger.json").facts["attention"] == "SDPA: flash"


def test_caps_and_sinks_are_said_to_be_computed_in_memory(tiny_config: Callable[..., RunConfig]) -> None:
    config = tiny_config({"attention_cap": 20.0})
    assert "scores in memory" in attention_kernel(Transformer(config.model), config, CPU, "fp32")


def test_our_own_kernel_trains_to_the_same_losses_and_repeat_to_the_bit(
    tiny_config: Callable[..., RunConfig], train: Callable[..., Outcome], tmp_path: Path
) -> None:
    losses: dict[str, list[float]] = {}
    for name in ("fused", "native", "native again"):
        config = tiny_config({"context": 80}, train={"steps": 4, "attention": name.split()[0]})
        seen = losses.setdefault(name, [])
        train(config, tmp_path / name, watch=lambda entry, seen=seen: seen.append(entry["loss"]))
    assert losses["native"] == losses["native again"]
    assert losses["native"] == pytest.approx(losses["fused"], rel=1e-5)
    facts = Ledger.load(tmp_path / "native" / "ledger.json").facts
    assert facts["attention"] == "Ironlaw's own, for CPUs"
