"""A run from its first step to its last: what it computes, what it records, and that it does both again."""

from __future__ import annotations

import json
import math
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from ironlaw.config import RunConfig, load_config
from ironlaw.data.prepare import prepare
from ironlaw.errors import UserError
from ironlaw.ledger import Ledger, Phase
from ironlaw.model.config import ModelConfig
from ironlaw.model.transformer import Transformer
from ironlaw.train.checkpoint import newest_of
from ironlaw.train.optimizer import build_optimizer, learning_rate
from ironlaw.train.restore import load_for_inference
from ironlaw.train.result import Outcome
from ironlaw.workload.optimizers import OptimizerConfig

Config = Callable[..., RunConfig]
Train = Callable[..., Outcome]
Losses = Callable[[Path], dict[int, float]]
LLAMA = {
    "heads": 4, "kv_heads": 2, "ffn": 48, "gated_ffn": True, "activation": "silu", "norm": "rmsnorm",
    "positions": "rope", "bias": False, "tied": False,
}  # fmt: skip


@pytest.mark.parametrize("model", [{}, LLAMA, {"dropout": 0.1}], ids=["gpt", "llama", "dropout"])
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_the_same_config_twice_gives_the_same_losses_to_the_bit(
    tiny_config: Config, train: Train, losses: Losses, tmp_path: Path, model: dict[str, Any], precision: str
) -> None:
    config = tiny_config(model, train={"precision": precision})
    for name in ("one", "two"):
        torch.manual_seed(int.from_bytes(name.encode()))  # what happened before in the process must not matter
        train(config, tmp_path / name)
    assert losses(tmp_path / "one") == losses(tmp_path / "two")
    assert len(losses(tmp_path / "one")) == 12
    one, two = (load_for_inference(newest_of(tmp_path / n), config.model).state_dict() for n in ("one", "two"))
    assert all(torch.equal(one[name], two[name]) for name in one)


def test_another_seed_gives_other_losses(tiny_config: Config, train: Train, losses: Losses, tmp_path: Path) -> None:
    for seed in (0, 1):
        train(tiny_config(train={"seed": seed, "steps": 3}), tmp_path / str(seed))
    assert losses(tmp_path / "0") != losses(tmp_path / "1")


def test_recording_steps_does_not_change_the_losses(
    tiny_config: Config, train: Train, losses: Losses, tmp_path: Path
) -> None:
    for count in (0, 2):
        train(tiny_config(train={"profile_steps": count}), tmp_path / str(count))
    assert losses(tmp_path / "0") == losses(tmp_path / "2")


@pytest.mark.parametrize("model", [{}, LLAMA], ids=["gpt", "llama"])
def test_accumulation_equals_the_large_batch(
    tiny_config: Config, train: Train, losses: Losses, tmp_path: Path, model: dict[str, Any]
) -> None:
    train(tiny_config(model), tmp_path / "whole")
    train(tiny_config(model, train={"micro_batch": 2}), tmp_path / "parts")
    whole, parts = losses(tmp_path / "whole"), losses(tmp_path / "parts")
    assert whole != parts  # rounding differs: the parts were really computed apart
    np.testing.assert_allclose(list(parts.values()), list(whole.values()), rtol=1e-4)


def test_the_first_step_is_what_a_plain_loop_would_do(
    tiny_config: Config, train: Train, losses: Losses, tmp_path: Path
) -> None:
    """Written again without any of the trainer's machinery: model, batches, clipping, AdamW."""
    config = tiny_config(train={"steps": 4, "clip": 0.5}, schedule={"warmup_steps": 0})
    train(config, tmp_path / "run")
    from ironlaw.data.batches import Batches, TokenWindows

    data = prepare(config.data, config.model.vocab)
    batches = Batches(TokenWindows(data.train.tokens, 16, 0, 8), 8)
    torch.manual_seed(0)
    model = Transformer(config.model)
    decayed = [p for n, p in model.named_parameters() if p.dim() == 2 and "embedding" not in n and "positions" not in n]
    rest = [p for p in model.parameters() if not any(p is d for d in decayed)]
    optimizer = torch.optim.AdamW(
        [{"params": decayed, "weight_decay": 0.1}, {"params": rest, "weight_decay": 0.0}],
        lr=3e-3, betas=(0.9, 0.95), eps=1e-8,
    )  # fmt: skip
    expected = []
    for step in range(4):
        batch = batches.batch(step).map(torch.from_numpy)
        loss = model(batch.inputs, batch.targets)
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        for group in optimizer.param_groups:
            group["lr"] = learning_rate(config, step)
        optimizer.step()
        optimizer.zero_grad()
        expected.append(loss.item())
    np.testing.assert_allclose(list(losses(tmp_path / "run").values()), expected, rtol=1e-5)


def test_it_learns_and_validates(
    tiny_config: Config, train: Train, tmp_path: Path, read_metrics: Callable[[Path], list[dict[str, Any]]]
) -> None:
    config = tiny_config(train={"steps": 60}, optimizer={"lr": 1e-2}, evaluation={"every": 20})
    outcome = train(config, tmp_path / "run")
    totals = outcome.ledger.totals
    entries = read_metrics(tmp_path / "run")
    validated = {e["step"]: e["validation_loss"] for e in entries if "validation_loss" in e}
    assert list(validated) == [20, 40, 60]
    assert all(math.isfinite(loss) for loss in validated.values())
    assert validated[60] < validated[20] < math.log(300)
    assert totals["validation_loss"].value == validated[60]
    assert totals["train_loss"].value == entries[-1]["loss"]
    assert totals["unigram_loss"].value > totals["validation_loss"].value


def test_validation_is_the_loss_of_the_model_on_held_out_text(
    tiny_config: Config, train: Train, tmp_path: Path
) -> None:
    config = tiny_config({"dropout": 0.2}, evaluation={"batches": 1000})
    outcome = train(config, tmp_path / "run")
    data = prepare(config.data, config.model.vocab)
    model = load_for_inference(newest_of(tmp_path / "run"), config.model)
    count = (len(data.validation.tokens) - 1) // 16
    tokens = torch.from_numpy(np.asarray(data.validation.tokens[: count * 16 + 1]).astype(np.int64))
    with torch.no_grad():
        expected = model(tokens[:-1].view(count, 16), tokens[1:].view(count, 16)).item()
    assert outcome.ledger.totals["validation_loss"].value == pytest.approx(expected, rel=1e-5)


def test_metrics_have_what_scripts_read(
    tiny_config: Config, train: Train, tmp_path: Path, read_metrics: Callable[[Path], list[dict[str, Any]]]
) -> None:
    config = tiny_config(train={"profile_steps": 2})
    train(config, tmp_path / "run")
    entries = read_metrics(tmp_path / "run")
    assert [entry["tokens"] for entry in entries] == [128 * n for n in range(1, 13)]
    for entry in entries:
        assert entry.keys() >= {"step", "loss", "tokens", "seconds", "lr", "grad_norm"}
        assert entry["seconds"] > 0 and entry["grad_norm"] > 0
        assert entry["lr"] == pytest.approx(learning_rate(config, entry["step"] - 1))
        phases = sum(entry[f"{phase}_seconds"] for phase in ("data", "forward", "backward", "optimizer", "host"))
        assert phases <= entry["seconds"]
    assert [entry["step"] for entry in entries if entry.get("recorded")] == [3, 4]


def test_the_run_directory_holds_the_run(tiny_config: Config, train: Train, tmp_path: Path) -> None:
    config = tiny_config(train={"profile_steps": 2})
    run = tmp_path / "run"
    outcome = train(config, run)
    names = {path.name for path in run.iterdir()}
    files = {"config.toml", "plan.json", "ledger.json", "metrics.jsonl", "sessions.jsonl", "profile.json"}
    assert names == files | {"checkpoints", "last_checkpoint", "tokenizer.json"}
    assert load_config(run) == config
    assert Ledger.load(run / "ledger.json").to_json() == json.loads(json.dumps(outcome.ledger.to_json()))
    assert Ledger.load(run / "plan.json").side == "plan"
    assert sorted(path.name for path in (run / "checkpoints").iterdir()) == ["step-00000008", "step-00000012"]


def test_phases_and_what_is_left_over_are_the_step(
    tiny_config: Config, train: Train, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By a clock that stands still while other programs run: they may come between two phases."""
    monkeypatch.setattr(time, "perf_counter", time.thread_time)
    # A model large enough that a few microseconds between phases do not matter.
    config = tiny_config({"hidden": 64, "layers": 4}, train={"steps": 20, "global_batch": 32})
    ledger = train(config, tmp_path / "run").ledger
    phases = ledger.seconds_by_phase()
    assert {Phase.DATA, Phase.FORWARD, Phase.BACKWARD, Phase.OPTIMIZER, Phase.HOST} <= set(phases)
    step = ledger.totals["step_seconds"].value
    assert 0 <= (step - sum(phases.values())) / step < 0.05


def test_the_wall_time_of_the_run_is_accounted_for(tiny_config: Config, train: Train, tmp_path: Path) -> None:
    ledger = train(tiny_config(train={"profile_steps": 2}), tmp_path / "run").ledger
    wall = ledger.facts["wall_seconds"]
    assert {"startup", "training", "evaluation", "checkpoint", "profiling", "other"} <= set(wall)
    assert all(seconds >= 0 for seconds in wall.values())
    assert sum(wall.values()) == pytest.approx(ledger.totals["total_seconds"].value, rel=0.01)


def test_a_loss_that_is_not_finite_ends_the_run(tiny_config: Config, train: Train, tmp_path: Path) -> None:
    config = tiny_config(train={"clip": float("inf")}, optimizer={"lr": 1e30}, schedule={"warmup_steps": 0})
    with pytest.raises(UserError, match=r"lower optimizer\.lr") as error:
        train(config, tmp_path / "run")
    assert "\n" not in str(error.value)


# -- schedule and optimizer --------------------------------------------------------------------------------------


def scheduled(tiny_config: Config, steps: int, lr: float, **schedule: Any) -> RunConfig:
    return tiny_config(train={"steps": steps}, optimizer={"lr": lr}, schedule=schedule)


def test_learning_rate(tiny_config: Config) -> None:
    config = scheduled(tiny_config, 110, 1.0, warmup_steps=10, min_lr_fraction=0.1)
    assert [learning_rate(config, step) for step in (0, 4, 9, 10)] == pytest.approx([0.1, 0.5, 1.0, 1.0])
    assert learning_rate(config, 60) == pytest.approx(0.55)  # half way down the cosine
    assert learning_rate(config, 35) == pytest.approx(0.1 + 0.9 * (1 + math.cos(math.pi / 4)) / 2)
    assert learning_rate(config, 110) == pytest.approx(0.1)
    assert learning_rate(config, 500) == pytest.approx(0.1)
    falling = [learning_rate(config, step) for step in range(10, 111)]
    assert falling == sorted(falling, reverse=True)


def test_learning_rate_without_warmup_and_with_nothing_else(tiny_config: Config) -> None:
    assert learning_rate(scheduled(tiny_config, 10, 2.0, warmup_steps=0), 0) == 2.0
    short = scheduled(tiny_config, 5, 1.0, warmup_steps=5)
    assert [learning_rate(short, step) for step in (0, 4)] == pytest.approx([0.2, 1.0])


@pytest.mark.parametrize("tied", [True, False])
def test_only_the_matrices_of_linear_layers_are_decayed(tied: bool) -> None:
    model = Transformer(
        ModelConfig(layers=2, hidden=16, heads=2, vocab=30, context=8, tied=tied, qk_norm=True, norm="rmsnorm")
    )
    optimizer = build_optimizer(model, OptimizerConfig(weight_decay=0.3))
    decay = {id(p): group["weight_decay"] for group in optimizer.param_groups for p in group["params"]}
    assert len(decay) == len(list(model.parameters()))
    for name, parameter in model.named_parameters():
        linear = any(part in name for part in ("qkv.weight", "out.weight", "up.weight", "down.weight"))
        linear = linear or (name == "head.weight" and not tied)
        assert decay[id(parameter)] == (0.3 if linear else 0.0), name


# -- compilation -------------------------------------------------------------------------------------------------


def test_compilation_that_fails_is_said_and_trained_without(
    tiny_config: Config, train: Train, losses: Losses, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(self: nn.Module, *arguments: Any, **options: Any) -> None:
        def call(*inputs: Any, **named: Any) -> None:
            raise RuntimeError("no compiler here\nand a long trace")

        self._compiled_call_impl = call

    train(tiny_config({"dropout": 0.1}), tmp_path / "plain")
    monkeypatch.setattr(nn.Module, "compile", broken)
    said: list[str] = []
    outcome = train(tiny_config({"dropout": 0.1}, train={"compile": "on"}), tmp_path / "run", say=said.append)
    assert "torch.compile failed, training without it: no compiler here" in said
    assert outcome.ledger.facts["compile"] is False
    assert losses(tmp_path / "run") == losses(tmp_path / "plain")  # the failed attempt drew no random numbers


@pytest.mark.long  # the compiler takes half a minute the first time
def test_compiled_blocks_train_alike_and_save_the_same_names(
    tiny_config: Config, train: Train, losses: Losses, tmp_path: Path
) -> None:
    train(tiny_config(), tmp_path / "plain")
    said: list[str] = []
    outcome = train(tiny_config(train={"compile": "on"}), tmp_path / "run", say=said.append)
    if not outcome.ledger.facts["compile"]:
        pytest.skip(f"cannot compile here: {said[-1]}")
    compiled, plain = losses(tmp_path / "run"), losses(tmp_path / "plain")
    np.testing.assert_allclose(list(compiled.values()), list(plain.values()), rtol=1e-3)
    load_for_inference(newest_of(tmp_path / "run"), tiny_config().model)


def test_an_odd_vocabulary_is_named(tiny_config: Config, train: Train, tmp_path: Path) -> None:
    from ironlaw.explain.explanation import explain_run

    train(tiny_config({"vocab": 2049}, data={"mock": True}), tmp_path / "odd")  # 2,049 x 32: large enough to matter
    (odd,) = explain_run(tmp_path / "odd").run.facts["misaligned"]
    assert odd["module"] == "head" and odd["shape"] == [2049, 32] and odd["aligned"] == [2112, 64]
    found = {finding.rule for finding in explain_run(tmp_path / "odd").diagnosis.findings}
    assert "misaligned" in found
    narrow = tiny_config({"hidden": 40, "heads": 2}, train={"sequence": 15, "micro_batch": 1}, data={"mock": True})
    train(narrow, tmp_path / "narrow")
    explanation = explain_run(tmp_path / "narrow")
    assert explanation.run.facts["odd_sizes"] == {"tokens of a micro-batch": 15, "size of a head": 20}
    (notice,) = [finding for finding in explanation.diagnosis.findings if finding.rule == "misaligned"]
    assert any("size of a head: 20" in figure for figure in notice.evidence)
    even = train(tiny_config({"vocab": 2048}, data={"mock": True}), tmp_path / "even").ledger
    assert even.facts["misaligned"] == []


def test_a_key_that_nothing_reads_is_named_before_the_run(
    tiny_config: Config, train: Callable[..., Any], tmp_path: Path
) -> None:
    said: list[str] = []
    train(tiny_config(schedule={"step_every": 9}, train={"steps": 2}), tmp_path / "run", say=said.append)
    assert [line for line in said if "schedule.step_every = 9 is not used" in line] == said[:1]
