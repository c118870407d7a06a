"""What a step computes, against the same thing written plainly: losses, masks, accumulation, scales, schedules."""

from __future__ import annotations

import math
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from ironlaw.config import RunConfig, ScalerConfig
from ironlaw.data.batch import IGNORED, Batch
from ironlaw.errors import UserError
from ironlaw.machine.profile import Profile
from ironlaw.model.config import ModelConfig
from ironlaw.model.loss import chunked_cross_entropy
from ironlaw.model.masks import block_mask, dense_mask, flexible, positions_in_document
from ironlaw.model.transformer import Transformer
from ironlaw.plan.step import plan_run
from ironlaw.train.average import WeightAverage
from ironlaw.train.mesh import Mesh
from ironlaw.train.noise_scale import NoiseScale
from ironlaw.train.optimizer import learning_rate
from ironlaw.train.precision import LossScale, autocast
from ironlaw.train.result import Outcome, validate
from ironlaw.train.step import Step

Config = Callable[..., RunConfig]
Train = Callable[..., Outcome]
GPT: dict[str, Any] = {"layers": 2, "hidden": 32, "heads": 4, "vocab": 90, "context": 24}
LLAMA = GPT | {"positions": "rope", "norm": "rmsnorm", "gated_ffn": True, "kv_heads": 2, "bias": False, "tied": False}

# -- the loss in chunks ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("onednn", [False, True])
@pytest.mark.parametrize("reduction", ["mean", "sum"])
@pytest.mark.parametrize("chunk", [7, 50, 64])
def test_a_chunked_loss_is_the_loss(chunk: int, reduction: str, onednn: bool) -> None:
    torch.manual_seed(0)
    x, weight = torch.randn(50, 16, requires_grad=True), torch.randn(37, 16, requires_grad=True)
    targets = torch.randint(0, 37, (50,))
    targets[3:9] = IGNORED
    expected = F.cross_entropy(x @ weight.t(), targets, reduction=reduction)
    found = chunked_cross_entropy(x, weight, targets, chunk, reduction, onednn)
    torch.testing.assert_close(found, expected)
    ours, theirs = (torch.autograd.grad(1.7 * loss, (x, weight)) for loss in (found, expected))
    for mine, other in zip(ours, theirs, strict=True):
        torch.testing.assert_close(mine, other, rtol=1e-4, atol=1e-5)


def test_a_chunked_loss_without_gradients_makes_none() -> None:
    x, weight, targets = torch.randn(20, 8), torch.randn(11, 8), torch.randint(0, 11, (20,))
    found = chunked_cross_entropy(x, weight, targets, 6, "mean")
    torch.testing.assert_close(found, F.cross_entropy(x @ weight.t(), targets))
    assert not found.requires_grad


# -- documents and windows ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("shape", [GPT, LLAMA], ids=["learned positions", "rotary"])
@pytest.mark.parametrize("window", [None, 4])
def test_documents_in_one_row_are_as_if_they_were_alone(shape: dict[str, Any], window: int | None) -> None:
    torch.manual_seed(0)
    model = Transformer(ModelConfig(**shape | {"sliding_window": window}))
    tokens, lengths = torch.randint(0, 90, (1, 24)), (5, 12, 7)
    documents = torch.repeat_interleave(torch.arange(3, dtype=torch.int32), torch.tensor(lengths))[None]
    together = model(tokens, documents=documents)
    alone = torch.cat([model(part) for part in tokens.split(lengths, dim=1)], dim=1)
    torch.testing.assert_close(together, alone, rtol=1e-4, atol=1e-5)
    assert not torch.allclose(model(tokens), alone, atol=1e-3)  # without documents they see each other


def test_positions_start_anew_in_every_document() -> None:
    documents = torch.tensor([[0, 0, 0, 1, 1, 2], [0, 1, 1, 1, 1, 1]], dtype=torch.int32)
    assert positions_in_document(documents).tolist() == [[0, 1, 2, 0, 1, 0], [0, 0, 1, 2, 3, 4]]


@pytest.mark.parametrize("window", [None, 5])
@pytest.mark.parametrize("with_documents", [False, True])
def test_the_block_mask_of_cuda_lets_through_what_the_dense_one_does(window: int | None, with_documents: bool) -> None:
    if window is None and not with_documents:
        window = 3
    torch.manual_seed(0)
    documents = torch.tensor([[0] * 10 + [1] * 22, [0] * 32]) if with_documents else None
    query, key, value = torch.randn(2, 4, 32, 16), torch.randn(2, 2, 32, 16), torch.randn(2, 2, 32, 16)
    found = flexible(query, key, value, block_mask(32, torch.device("cpu"), window, documents))
    dense = dense_mask(32, torch.device("cpu"), window, documents)
    expected = F.scaled_dot_product_attention(query, key, value, attn_mask=dense, enable_gqa=True)
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)


# -- accumulation ------------------------------------------------------------------------------------------------


@pytest.fixture
def make_step(tiny_config: Config, machine_profile: Profile, user_cache: Path) -> Callable[..., Step]:
    def make(model: dict[str, Any] | None = None, **sections: Any) -> Step:
        config = tiny_config(GPT | (model or {}), **sections)
        torch.manual_seed(0)
        return Step(config, plan_run(config, machine_profile).decided, Mesh(torch.device("cpu")))

    return make


def a_batch(ignored: bool, sequences: int = 8) -> Batch[Tensor]:
    generator = torch.Generator().manual_seed(3)
    tokens = torch.randint(0, 90, (sequences, 25), generator=generator)
    inputs, targets = tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()
    if not ignored:
        return Batch(inputs, targets)
    targets[1, 4:], targets[6, :20], targets[7] = IGNORED, IGNORED, IGNORED  # one row counts for nothing
    documents = (torch.arange(24) // 9).to(torch.int32).expand(sequences, 24).contiguous()
    return Batch(inputs, targets, documents)


def gradients(step: Step, batch: Batch[Tensor]) -> tuple[float, list[Tensor]]:
    loss = step.forward_backward(batch, 0)
    return float(loss), [p.grad.clone() for p in step.model.parameters() if p.grad is not None]


EXPERTS = {"bias": False, "moe": {"experts": 4, "experts_per_token": 2, "balance": "none"}}


@pytest.mark.parametrize("ignored", [False, True], ids=["all count", "some ignored"])
@pytest.mark.parametrize("micro_batch", [1, 2, 3, 5])
@pytest.mark.parametrize(("loss", "model"), [("full", {}), ("chunked", {}), ("full", EXPERTS), ("chunked", EXPERTS)])
def test_accumulation_is_the_large_batch(
    make_step: Callable[..., Step], micro_batch: int, ignored: bool, loss: str, model: dict[str, Any]
) -> None:
    """Also when the last micro-batch is smaller, and when some have fewer targets than others, or none."""
    whole = gradients(make_step(model, train={"loss": loss}), a_batch(ignored))
    parts = gradients(make_step(model, train={"micro_batch": micro_batch, "loss": loss}), a_batch(ignored))
    assert parts[0] == pytest.approx(whole[0], rel=1e-6)
    for mine, other in zip(parts[1], whole[1], strict=True):
        torch.testing.assert_close(mine, other, rtol=1e-4, atol=1e-6)


def test_padding_without_document_masks_counts_for_nothing_either(make_step: Callable[..., Step]) -> None:
    data = {"packing": "best_fit", "mask_documents": False}
    padded = a_batch(ignored=True)
    padded = Batch(padded.inputs, padded.targets)
    whole = gradients(make_step(data=data), padded)
    parts = gradients(make_step(data=data, train={"micro_batch": 2}), padded)
    assert parts[0] == pytest.approx(whole[0], rel=1e-6)
    for mine, other in zip(parts[1], whole[1], strict=True):
        torch.testing.assert_close(mine, other, rtol=1e-4, atol=1e-6)


# -- loss scale --------------------------------------------------------------------------------------------------


def test_a_step_that_overflows_is_skipped_counted_and_halves_the_scale() -> None:
    weight = torch.nn.Parameter(torch.ones(3))
    optimizer = torch.optim.AdamW([weight], lr=0.1, fused=True)
    scale = LossScale(torch.device("cpu"), "fp16", ScalerConfig(initial=1024.0, growth_steps=2))
    done = []
    for factor in (1.0, math.inf, 1.0, 1.0):
        scale.scale((weight * factor).sum()).backward()
        scale.unscale_(optimizer)
        before = weight.detach().clone()
        done.append(scale.step(optimizer))
        assert torch.equal(before, weight) is not done[-1]
        optimizer.zero_grad()
    assert done == [True, False, True, True]
    assert scale.skipped_steps == 1
    assert scale.get_scale() == 1024.0  # 512 after the overflow, twice that after two steps without
    other = LossScale(torch.device("cpu"), "fp16", ScalerConfig(growth_steps=5))
    other.load_state_dict(scale.state_dict())
    assert (other.skipped_steps, other.get_scale()) == (1, 1024.0)
    assert other.get_growth_interval() == 5  # of the config


def test_fp16_without_a_loss_scale_loses_the_gradient_of_most_words() -> None:
    """Of 256 micro-batches that are added up: what a wrong word's logit gets is below fp16's smallest number."""

    def trained(precision: str, initial: float) -> tuple[float, Tensor]:
        torch.manual_seed(0)
        model = Transformer(ModelConfig(name="t", layers=1, hidden=32, heads=1, vocab=2048, context=64))
        optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
        scale = LossScale(torch.device("cpu"), precision, ScalerConfig(initial=initial))
        generator, first = torch.Generator().manual_seed(1), None
        for _ in range(40):
            inputs, targets = (torch.randint(0, 40, (2, 64), generator=generator) for _ in range(2))
            with autocast(torch.device("cpu"), precision):
                loss = model(inputs, targets)
            scale.scale(loss / 256).backward()
            scale.unscale_(optimizer)
            first = model.head.weight.grad.clone() if first is None else first
            scale.step(optimizer)
            optimizer.zero_grad()
        assert first is not None
        return float(loss.detach()), first

    loss, gradient = trained("fp32", 1.0)
    for initial, lost, off in ((2.0**16, 0.0, 1e-3), (1.0, 0.98, 0.03)):
        found, there = trained("fp16", initial)
        assert float((there == 0).float().mean()) == pytest.approx(lost, abs=0.01) and (gradient != 0).all()
        assert abs(found - loss) < off
    assert found - loss > 0.01  # nats, after 40 steps


def test_fp16_trains_on_a_cpu_and_its_scale_is_in_the_metrics(
    tiny_config: Config, train: Train, tmp_path: Path, read_metrics: Callable[[Path], list[dict[str, Any]]]
) -> None:
    config = tiny_config(train={"precision": "fp16", "steps": 30}, scaler={"initial": 2.0**40})
    train(config, tmp_path / "run")
    entries = read_metrics(tmp_path / "run")
    assert entries[0]["skipped_steps"] > 0 and entries[-1]["loss_scale"] < 2.0**40
    assert entries[-1]["loss"] < entries[0]["loss"] - 0.1
    assert all(math.isfinite(entry["grad_norm"]) for entry in entries)


# -- schedules ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("schedule", "expected"),
    [
        ({"kind": "linear", "min_lr_fraction": 0.2}, {10: 1.0, 60: 0.6, 110: 0.2}),
        ({"kind": "exponential", "min_lr_fraction": 0.01}, {10: 1.0, 60: 0.1, 110: 0.01}),
        ({"kind": "inverse_sqrt", "min_lr_fraction": 0.0}, {10: 1.0, 30: math.sqrt(1 / 3), 80: math.sqrt(1 / 8)}),
        ({"kind": "step", "step_every": 25, "min_lr_fraction": 0.2}, {10: 1.0, 34: 1.0, 35: 0.5, 60: 0.25, 85: 0.2}),
        ({"kind": "wsd", "decay_fraction": 0.5, "min_lr_fraction": 0.0}, {10: 1.0, 60: 1.0, 85: 0.5, 110: 0.0}),
        ({"kind": "constant"}, {10: 1.0, 500: 1.0}),
    ],
)
def test_schedules(tiny_config: Config, schedule: dict[str, Any], expected: dict[int, float]) -> None:
    config = tiny_config(train={"steps": 110}, optimizer={"lr": 1.0}, schedule=schedule | {"warmup_steps": 10})
    assert {step: learning_rate(config, step) for step in expected} == pytest.approx(expected)
    assert learning_rate(config, 4) == pytest.approx(0.5)


@pytest.mark.parametrize(("scaling", "factor"), [("none", 1.0), ("linear", 4.0), ("sqrt", 2.0)])
def test_the_peak_follows_the_batch(tiny_config: Config, scaling: str, factor: float) -> None:
    schedule = {"warmup_steps": 0, "lr_scaling": scaling, "reference_batch": 2}
    config = tiny_config(optimizer={"lr": 0.1}, schedule=schedule)  # eight sequences per step
    assert learning_rate(config, 0) == pytest.approx(0.1 * factor)


# -- average of the weights, noise scale -------------------------------------------------------------------------


def test_the_average_follows_the_weights_and_can_take_their_place() -> None:
    model = torch.nn.Linear(3, 2)
    average, start = WeightAverage(model, 0.75), model.weight.detach().clone()
    with torch.no_grad():
        model.weight.add_(4.0)
    average.update()
    now = model.weight.detach().clone()
    with average.applied():
        torch.testing.assert_close(model.weight.detach(), start + 1.0)
    assert torch.equal(model.weight, now)
    other = WeightAverage(model, 0.75)
    other.load_state_dict(average.state_dict())
    assert all(torch.equal(a, b) for a, b in zip(other.tensors, average.tensors, strict=True))


def test_the_noise_scale_of_gradients_whose_noise_is_known() -> None:
    """Gradients of b sequences: a fixed direction plus noise of variance S / b; the critical batch is S / |G|^2."""
    chance = np.random.default_rng(0)
    noise, size, estimate = 50.0, 400, NoiseScale()
    direction = np.full(size, 1.0 / math.sqrt(size))
    for _ in range(200):
        parts = direction + chance.normal(0, math.sqrt(noise / size / 4), (8, size))  # eight of four sequences
        estimate.observe(4, float((parts[0] ** 2).sum()), 32, float((parts.mean(axis=0) ** 2).sum()))
    assert estimate.sequences == pytest.approx(noise, rel=0.4)


def test_the_critical_batch_is_reported_when_asked(
    tiny_config: Config, train: Train, tmp_path: Path, read_metrics: Callable[[Path], list[dict[str, Any]]]
) -> None:
    config = tiny_config(train={"micro_batch": 2, "noise_scale_every": 2, "steps": 12})
    train(config, tmp_path / "run")
    reported = [entry["critical_batch"] for entry in read_metrics(tmp_path / "run") if "critical_batch" in entry]
    assert reported and all(value > 0 for value in reported)


def test_validation_in_other_units_and_with_averaged_weights(
    tiny_config: Config, train: Train, tmp_path: Path, read_metrics: Callable[[Path], list[dict[str, Any]]]
) -> None:
    train(tiny_config(train={"average_decay": 0.5}), tmp_path / "run")
    last = read_metrics(tmp_path / "run")[-1]
    assert last["perplexity"] == pytest.approx(math.exp(last["validation_loss"]))
    assert 0 < last["bits_per_byte"] < last["validation_loss"] / math.log(2)  # a token stands for more than a byte
    assert last["average_validation_loss"] != last["validation_loss"]
    assert last["average_validation_loss"] == pytest.approx(last["validation_loss"], rel=0.1)


# -- what a CPU cannot do ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("train", "says"),
    [
        ({"precision": "tf32"}, 'use "fp32"'),
        ({"compile": "graphs"}, 'use train.compile = "on"'),
        ({"offload": "activations"}, 'use "none"'),
        ({"offload": "both"}, 'use "none"'),
    ],
)
def test_what_needs_a_gpu_is_refused_in_one_line(
    tiny_config: Config, machine_profile: Profile, user_cache: Path, train: dict[str, Any], says: str
) -> None:
    with pytest.raises(UserError) as error:
        plan_run(tiny_config(train=train), machine_profile)
    assert says in str(error.value) and "\n" not in str(error.value)


def test_a_pipeline_validates_on_a_batch_that_is_not_full() -> None:
    """Its shapes are those of the training step: rows without targets make up for what the text lacks."""
    rows = np.arange(6).reshape(3, 2)

    def evaluate(batch: Batch[np.ndarray]) -> tuple[float, int]:
        assert batch.inputs.shape == (8, 2)
        counted = batch.targets[batch.targets != IGNORED]
        return float(counted.sum()), counted.size

    step: Any = SimpleNamespace(
        schedule=object(), share=8, evaluating=nullcontext, evaluate=evaluate, mesh=Mesh(torch.device("cpu")),
        config=SimpleNamespace(train=SimpleNamespace(global_batch=8), evaluation=SimpleNamespace(batches=1)),
    )  # fmt: skip
    loader: Any = SimpleNamespace(validation=lambda rows_each, limit: [Batch(rows, rows)])
    assert validate(step, loader, lambda batch: batch) == rows.mean()
