"""Every optimizer learns, holds exactly the bytes that the plan says, and gives each tensor what its name asks for."""

from __future__ import annotations

import copy
import math
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any, get_args

import pytest
import torch

from ironlaw.config import build_config
from ironlaw.errors import UserError
from ironlaw.model.config import ModelConfig
from ironlaw.model.parameters import Parameter, model_parameters
from ironlaw.model.transformer import Transformer
from ironlaw.observe.measured import held_bytes
from ironlaw.plan.step import plan_run
from ironlaw.train.host_optimizer import Combined
from ironlaw.train.optimizer import (
    BITSANDBYTES,
    GaLore,
    build_optimizer,
    check_library,
    described,
    leading_vectors,
    set_learning_rate,
)
from ironlaw.train.parallel.pipeline import cut_stage
from ironlaw.train.parallel.tensor import split_projections
from ironlaw.workload.layout import Layout
from ironlaw.workload.operations import total_flops
from ironlaw.workload.optimizers import (
    PAGED,
    OptimizerConfig,
    OptimizerName,
    state_bytes,
    update_operations,
    update_temporary_bytes,
)
from ironlaw.workload.program import step
from ironlaw.workload.recipe import Recipe, StepBatch

NAMES = get_args(OptimizerName)
GPT = ModelConfig(layers=2, hidden=32, heads=2, vocab=150, context=16)
LLAMA = ModelConfig(
    layers=2, hidden=32, heads=4, kv_heads=2, ffn=48, gated_ffn=True, activation="silu", norm="rmsnorm",
    positions="rope", bias=False, tied=False, qk_norm=True, vocab=150, context=16,
)  # fmt: skip


def settings(name: str, **more: Any) -> OptimizerConfig:
    return OptimizerConfig(name=name, lr=3e-3, rank=8, **more)  # type: ignore[arg-type]


def needs(name: str) -> None:
    if name in BITSANDBYTES:  # of which paged ones page nothing on a CPU
        pytest.importorskip("bitsandbytes")


def made(model: ModelConfig, config: OptimizerConfig) -> tuple[Transformer, torch.optim.Optimizer, torch.Tensor]:
    torch.manual_seed(0)
    module = Transformer(model)
    return module, build_optimizer(module, config), torch.randint(0, model.vocab, (4, model.context))


def learn(module: Transformer, optimizer: torch.optim.Optimizer, tokens: torch.Tensor, steps: int) -> list[float]:
    losses = []
    for _ in range(steps):
        loss = module(tokens, tokens)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        losses.append(loss.item())
    return losses


@pytest.mark.parametrize("model", [GPT, LLAMA], ids=["gpt", "llama"])
def test_the_listed_parameters_are_those_of_the_module(model: ModelConfig) -> None:
    listed = [Parameter(p.name, p.shape, p.embedding) for p in model_parameters(model)]
    assert listed == described(Transformer(model))  # a module does not say how it divides
    assert sum(parameter.elements for parameter in model_parameters(model)) == model.parameters


@pytest.mark.parametrize("model", [GPT, LLAMA], ids=["gpt", "llama"])
@pytest.mark.parametrize("name", NAMES)
def test_it_learns_and_its_state_has_the_planned_bytes(name: str, model: ModelConfig) -> None:
    needs(name)
    config = settings(name)
    module, optimizer, tokens = made(model, config)
    if name == "sgd":
        set_learning_rate(optimizer, 0.3)
    losses = learn(module, optimizer, tokens, 12)
    assert losses[-1] < losses[0] - 0.05
    held = held_bytes(module, optimizer)["optimizer"]
    assert held == state_bytes(model_parameters(model), config)


@pytest.mark.parametrize("name", NAMES)
def test_saved_state_goes_on_where_it_was(name: str) -> None:
    needs(name)
    config = settings(name, projection_steps=3)
    module, optimizer, tokens = made(GPT, config)
    learn(module, optimizer, tokens, 2)
    weights, state = copy.deepcopy(module.state_dict()), copy.deepcopy(optimizer.state_dict())
    expected = learn(module, optimizer, tokens, 3)
    other, other_optimizer, _ = made(GPT, config)
    other.load_state_dict(weights)
    other_optimizer.load_state_dict(state)
    assert learn(other, other_optimizer, tokens, 3) == expected


def test_galore_of_full_rank_is_adam_in_another_basis() -> None:
    """With every direction kept, the projection is a rotation: back and forth it is the gradient itself."""
    gradient = torch.randn(6, 9)
    basis = leading_vectors(gradient, 6, left=True)
    torch.testing.assert_close(basis @ (basis.T @ gradient), gradient)
    weight = torch.nn.Parameter(torch.zeros(6, 9))
    weight.grad = gradient.clone()
    settings = {"lr": 0.1, "betas": (0.9, 0.95), "eps": 1e-12, "weight_decay": 0.0}
    GaLore([weight], settings | {"rank": 6, "projection_steps": 5, "scale": 1.0}).step()
    # The first update of Adam is the sign of each projected entry.
    torch.testing.assert_close(weight.detach(), -0.1 * basis @ (basis.T @ gradient).sign(), rtol=1e-4, atol=1e-5)


def test_galore_keeps_the_strongest_directions_of_either_side() -> None:
    strong = 10 * torch.outer(torch.ones(5), torch.arange(1.0, 9.0))
    for gradient in (strong, strong.T):
        wide = gradient.shape[0] < gradient.shape[1]
        basis = leading_vectors(gradient + 0.01 * torch.randn(gradient.shape), 1, left=wide)
        back = basis @ (basis.T @ gradient) if wide else (gradient @ basis.T) @ basis
        torch.testing.assert_close(back, gradient, rtol=1e-2, atol=0.5)


def test_matrices_of_blocks_go_to_the_matrix_optimizer_and_nothing_else() -> None:
    module, optimizer, _ = made(LLAMA, settings("muon"))
    assert isinstance(optimizer, Combined)
    muon = {id(p) for group in optimizer.parts[0].param_groups for p in group["params"]}
    names = {name for name, p in module.named_parameters() if id(p) in muon}
    assert names == {n for n, p in module.named_parameters() if n.startswith("blocks.") and p.dim() == 2}


def test_groups_by_pattern() -> None:
    config = settings(
        "adamw", weight_decay=0.2, no_decay=["*norm*"],
        groups=[{"pattern": "embedding.*", "lr_scale": 0.1}, {"pattern": "blocks.0.*.weight", "weight_decay": 0.05}],
    )  # fmt: skip
    module, optimizer, _ = made(GPT, config)
    set_learning_rate(optimizer, 2.0)
    found = {id(p): (g["lr"], g["weight_decay"]) for g in optimizer.param_groups for p in g["params"]}
    by_name = {name: found[id(p)] for name, p in module.named_parameters()}
    assert by_name["embedding.weight"] == (0.2, 0.2)
    assert by_name["blocks.0.ffn_norm.weight"] == (2.0, 0.05)  # the group speaks, whatever no_decay says
    assert by_name["blocks.1.ffn_norm.weight"] == (2.0, 0.0)
    assert by_name["blocks.1.ffn.up.bias"] == (2.0, 0.2)  # the user's list replaces the usual one


def test_groups_by_pattern_on_a_stage_that_has_some_of_them() -> None:
    """Its tensors are in the groups that one process has them in, a copy of a tied embedding and parts of a fused
    projection too."""
    config = settings(
        "adamw", weight_decay=0.2,
        groups=[{"pattern": "embedding.*", "lr_scale": 0.1}, {"pattern": "blocks.0.*", "lr_scale": 0.5},
                {"pattern": "*.qkv.weight", "lr_scale": 0.3}],
    )  # fmt: skip
    module = Transformer(GPT)
    whole = described(module)
    split_projections(module)
    stage = cut_stage(module, 2, 1, 1)
    optimizer = build_optimizer(stage, config, whole=whole)
    found = {id(p): (g["lr_scale"], g["weight_decay"]) for g in optimizer.param_groups for p in g["params"]}
    by_name = {name: found[id(p)] for name, p in stage.named_parameters()}
    assert by_name["head.weight"] == (0.1, 0.0)
    assert by_name["blocks.1.attention.qkv.key.weight"] == (0.3, 0.2)
    assert by_name["blocks.1.ffn.up.weight"] == (1.0, 0.2)


@pytest.mark.parametrize("where", ["no_decay", "groups"])
def test_a_pattern_that_matches_nothing_names_what_is_near(where: str) -> None:
    pattern: Any = "blocks.*.attn.qkv.weight"
    patterns = [pattern] if where == "no_decay" else [{"pattern": pattern}]
    with pytest.raises(
        UserError, match=r"matches no parameter: names are like blocks\.\d\.attention\.qkv\.weight"
    ) as error:
        build_optimizer(Transformer(GPT), settings("adamw", **{where: patterns}))
    assert "\n" not in str(error.value)


def test_a_pattern_may_match_in_one_stage_of_a_pipeline_only() -> None:
    def planned(pattern: str) -> int:
        recipe = Recipe(optimizer=settings("adamw", groups=[{"pattern": pattern}]))
        return len(step(LLAMA, StepBatch(8, 16), Layout(pp=2, micro_batch=2), recipe).stages)

    assert planned("embedding.*") == planned("head.*") == 2
    with pytest.raises(UserError, match="matches no parameter"):
        planned("blocks.7.*")


def test_moved_keys_say_where_they_are() -> None:
    with pytest.raises(UserError, match=r"train\.lr has moved: write optimizer\.lr"):
        build_config({"model": {"name": "gpt2"}, "train": {"lr": 1e-3}})
    with pytest.raises(UserError, match=r"train\.warmup_steps has moved: write schedule\.warmup_steps"):
        build_config({"model": {"name": "gpt2"}, "train": {"warmup_steps": 3}})


def test_flops_of_muon_are_those_of_its_products() -> None:
    """Five times X X^T, (X X^T)^2 and their product with X, for every matrix of the blocks."""
    expected = 0
    for parameter in model_parameters(LLAMA):
        if parameter.is_block_matrix:
            small, large = sorted(parameter.shape)
            expected += 5 * 2 * (2 * small * small * large + small**3)
    assert total_flops(update_operations(model_parameters(LLAMA), settings("muon"))) == expected


def test_bytes_of_an_update() -> None:
    """AdamW reads and writes weight and moments and reads the gradient; clipping reads it twice and writes it once."""
    elements = GPT.parameters
    moved = {
        name: sum(op.bytes_moved * op.repeat for op in update_operations(model_parameters(GPT), settings(name)))
        for name in ("sgd", "momentum", "adamw")
    }
    clip = 12 * elements
    assert math.isclose(moved["adamw"] - clip, 28 * elements, rel_tol=1e-3)
    assert math.isclose(moved["momentum"] - clip, 20 * elements, rel_tol=1e-3)
    assert math.isclose(moved["sgd"] - clip, 12 * elements, rel_tol=1e-3)


@pytest.mark.parametrize("name", sorted({*NAMES} - {*PAGED}))
def test_an_update_holds_what_is_planned(name: str, tmp_path: Path) -> None:
    """The highest moment of the second update, by the profiler's record."""
    needs(name)
    from torch.profiler import ProfilerActivity, profile

    from ironlaw.observe.events import recorded_allocations
    from ironlaw.observe.profile import silent_stderr

    model = GPT.model_copy(update={"hidden": 128, "vocab": 1500})
    config = settings(name)
    module, optimizer, tokens = made(model, config)
    learn(module, optimizer, tokens, 1)
    module(tokens, tokens).backward()
    recorded = profile(activities=[ProfilerActivity.CPU], profile_memory=True)
    with silent_stderr():
        recorded.start()
    optimizer.step()
    with silent_stderr():
        recorded.stop()
    held = peak = 0
    alive: dict[int, int] = {}
    for pointer, size in ((a.address, a.bytes) for a in recorded_allocations(recorded)):
        if size > 0:
            alive[pointer] = size
            held += size
        elif pointer in alive:
            held -= alive.pop(pointer)
        peak = max(peak, held)
    planned = update_temporary_bytes(model_parameters(model), config)
    total = 4 * 2 * model.parameters + state_bytes(model_parameters(model), config)
    assert abs(planned - peak) < 0.02 * total, (planned, peak)


@pytest.mark.parametrize("name", PAGED)
def test_paged_state_needs_a_gpu_and_its_library_before_anything_is_made(
    name: str, tiny_config: Any, train: Any, machine_profile: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = tiny_config(optimizer={"name": name})
    with pytest.raises(UserError, match="pages its state between a GPU and the host, and there is no GPU: use"):
        train(config, tmp_path / "run")
    planned = plan_run(config, replace(machine_profile, device="cuda"))
    optimizer = next(line for line in planned.memory if line.component == "optimizer")
    assert optimizer.bytes == state_bytes(model_parameters(config.model), config.optimizer)
    assert "leaves for the host" in optimizer.note
    monkeypatch.setitem(sys.modules, "bitsandbytes.optim", None)
    with pytest.raises(UserError, match="needs bitsandbytes: pip install"):
        check_library(name)
    assert not (tmp_path / "run").exists()
