"""Loops with several optimizers, with passes inside the optimizer's step, and with other threads than were measured."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

import ironlaw
from ironlaw.explain.observed import explain_observed
from ironlaw.explain.observed_remedies import _threads
from ironlaw.ledger import Kind, Ledger, Phase
from ironlaw.machine import host
from ironlaw.machine.profile import Profile
from ironlaw.observe.measured import updates_of
from ironlaw.observe.trials import time_fused_update
from ironlaw.workload.trace import trace


def network(*sizes: int) -> nn.Sequential:
    layers = [layer for a, b in pairwise(sizes) for layer in (nn.Linear(a, b), nn.ReLU())]
    return nn.Sequential(*layers[:-1])


def test_two_optimizers_make_one_step_and_parts_of_a_container_are_passes(tmp_path: Path) -> None:
    generator, critic = network(16, 256, 64), network(64, 256, 1)
    optimizers = [torch.optim.Adam(m.parameters(), lr=1e-4) for m in (critic, generator)]
    with ironlaw.observe([generator, critic], optimizers, out=tmp_path / "run", profile_steps=0):
        for _ in range(20):
            optimizers[0].zero_grad()
            (critic(generator(torch.randn(64, 16)).detach()).mean() - critic(torch.randn(64, 64)).mean()).backward()
            optimizers[0].step()
            optimizers[1].zero_grad()
            (-critic(generator(torch.randn(64, 16))).mean()).backward()
            optimizers[1].step()
    ledger = Ledger.load(tmp_path / "run" / "ledger.json")
    assert ledger.facts["steps_done"] == 20 and len(ledger.facts["update_lines"]) == 2
    phases = ledger.phase_seconds
    assert phases[Phase.FORWARD] > 0 and phases[Phase.BACKWARD] > 0
    assert sum(phases.values()) <= 1.01 * ledger.totals["step_seconds"].value


def test_a_model_that_learns_through_the_observed_one_is_no_fault_of_its_loop(tmp_path: Path) -> None:
    """The generator's pass finds the critic's gradients of before, and its own are read by an optimizer of its own."""
    generator, critic = network(16, 256, 64), network(64, 256, 1)
    ours, its = (torch.optim.SGD(m.parameters(), lr=1e-4) for m in (critic, generator))
    with ironlaw.observe(critic, ours, out=tmp_path / "run", profile_steps=0, plan=False):
        for _ in range(12):
            ours.zero_grad()
            (critic(generator(torch.randn(64, 16)).detach()).mean() - critic(torch.randn(64, 64)).mean()).backward()
            ours.step()
            its.zero_grad()
            (-critic(generator(torch.randn(64, 16))).mean()).backward()
            its.step()
    facts = Ledger.load(tmp_path / "run" / "ledger.json").facts
    assert facts["gradients_uncleared"] is None
    assert (
        facts["gradients_idle"] is None or facts["gradients_idle"]["part"] < 0.5
    )  # the critic's own, which are cleared


def test_passes_inside_the_optimizers_step_are_no_update(tmp_path: Path) -> None:
    model = network(256, 512, 512, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-4)
    batch = torch.randn(256, 256)

    def closure() -> torch.Tensor:
        optimizer.zero_grad()
        loss = model(batch).square().mean()
        loss.backward()
        return loss

    with ironlaw.observe(model, optimizer, out=tmp_path / "run", profile_steps=0):
        for _ in range(16):
            optimizer.step(closure)
    phases = Ledger.load(tmp_path / "run" / "ledger.json").phase_seconds
    assert phases[Phase.FORWARD] > 0 and phases[Phase.BACKWARD] > 0
    assert phases[Phase.OPTIMIZER] < 0.5 * sum(phases.values())


def test_a_machine_measured_with_other_threads_gives_a_plan_that_says_so(
    tmp_path: Path, machine_profile: Profile
) -> None:
    model = network(64, 256, 64)
    optimizer = torch.optim.AdamW(model.parameters())
    with ironlaw.observe(model, optimizer, out=tmp_path / "run", profile_steps=0):
        for _ in range(12):
            model(torch.randn(64, 64)).mean().backward()
            optimizer.step()
            optimizer.zero_grad()
    file = tmp_path / "run" / "ledger.json"
    document = json.loads(file.read_text())
    document["facts"] |= {"threads": 1, "cores": 4, "thread_gain": {"matmul": 0.5, "elementwise": 0.2}}
    file.write_text(json.dumps(document))
    profile = replace(machine_profile, threads=4, name=host.cpu_name())
    plan = explain_observed(tmp_path / "run", profile).plan
    step = plan.totals["step_seconds"]
    assert "measured with 4 threads, run with 1" in step.basis
    assert step.low is not None and step.high is not None and step.high > 3 * step.low
    assert plan.facts["matmul_peak_flops_per_second"] == profile.matmul_peak("fp32") / 2


@pytest.mark.parametrize(("ranks", "offered"), [(1, True), (4, False)])
def test_ranks_that_share_the_cores_are_offered_no_threads(ranks: int, offered: bool) -> None:
    facts = {"threads": 1, "cores": 4, "thread_gain": {"matmul": 0.5, "elementwise": 0.2},
             "rank_own_seconds": [0.1] * ranks}  # fmt: skip
    line = SimpleNamespace(kind=Kind.MATMUL, seconds=0.1)
    now: Any = SimpleNamespace(fact=facts.get, timed=[line], step=0.2, steps=10)
    assert bool(_threads(now)) is offered


def planned_beside(
    folder: Path, machine_profile: Profile, make: Callable[[nn.Module], list[torch.optim.Optimizer]],
    cleared: str = "end",
) -> Ledger:  # fmt: skip
    """The plan beside a loop with the optimizers that `make` gives."""
    model = network(64, 256, 64)
    optimizers = make(model)
    with ironlaw.observe(model, optimizers, out=folder, profile_steps=0):
        for _ in range(8):
            loss = model(torch.randn(32, 64)).mean()
            if cleared == "middle":
                [o.zero_grad() for o in optimizers]
            loss.backward()
            [o.step() for o in optimizers]
            if cleared != "middle":
                [o.zero_grad(set_to_none=cleared != "zeros") for o in optimizers]
    profile = replace(machine_profile, threads=torch.get_num_threads(), name=host.cpu_name())
    return explain_observed(folder, profile).plan


@pytest.mark.parametrize(
    ("make", "states"),
    [
        (lambda p: [torch.optim.SGD(p, lr=1e-3)], 0),
        (lambda p: [torch.optim.SGD(p, lr=1e-3, momentum=0.9)], 1),
        (lambda p: [torch.optim.Adam(p, lr=1e-3, amsgrad=True)], 3),
        (lambda p: [torch.optim.AdamW(p, lr=1e-3, fused=True)], 2),
        (lambda p: [torch.optim.Adagrad(p, lr=1e-3)], 1),  # none of ours: as it was held
        (lambda p: [torch.optim.Adagrad(p, lr=1e-3, fused=True)], 1),
        (lambda p: [torch.optim.SGD(p[:1], lr=1e-3), torch.optim.AdamW(p[1:], lr=1e-3)], None),
    ],
    ids=["sgd", "momentum", "amsgrad", "fused adamw", "adagrad", "fused adagrad", "two"],
)
def test_the_plan_takes_the_loops_own_optimizers(
    make: Callable[[list[nn.Parameter]], list[torch.optim.Optimizer]], states: int | None, tmp_path: Path,
    machine_profile: Profile,
) -> None:  # fmt: skip
    plan = planned_beside(tmp_path / "run", machine_profile, lambda m: make(list(m.parameters())))
    run = Ledger.load(tmp_path / "run" / "ledger.json")
    held, parameters = run.memory_bytes()["optimizer"], run.totals["parameters"].value
    assert plan.memory_bytes()["optimizer"] == held, plan.facts["optimizers"]
    if states is not None:
        assert 0 <= held - states * 4 * parameters <= 4 * 4  # a count of steps per tensor
    names = [line.operation for line in plan.lines if line.phase is Phase.OPTIMIZER]
    assert set(names) == {u["optimizer"].lower() for u in run.facts["updates"]}
    assert all(line.seconds for line in plan.lines if line.phase is Phase.OPTIMIZER)


def test_a_fused_update_is_planned_quicker_than_a_loop_over_tensors(tmp_path: Path, machine_profile: Profile) -> None:
    def seconds(**how: bool) -> float:
        def make(model: nn.Module) -> list[torch.optim.Optimizer]:
            return [torch.optim.AdamW(model.parameters(), **how)]

        plan = planned_beside(tmp_path / str(len(how)), machine_profile, make)
        return plan.seconds_by_phase()[Phase.OPTIMIZER]

    assert seconds(fused=True) < seconds()


def test_complex_parameters_count_as_two_numbers_and_have_no_fused_update() -> None:
    parameters = [nn.Parameter(torch.randn(8, 8, dtype=dtype)) for dtype in (torch.float32, torch.complex64)]
    optimizer = torch.optim.AdamW(parameters)
    sum(p.abs().sum() for p in parameters).backward()  # type: ignore[union-attr]
    optimizer.step()
    (update,) = updates_of([optimizer])
    assert update.elements == 3 * 64 and update.state_bytes() == update.held_bytes
    assert time_fused_update([optimizer]) is None


def test_it_is_seen_which_gradients_a_forward_pass_finds(tmp_path: Path, machine_profile: Profile) -> None:
    def plan(cleared: str) -> tuple[str, Ledger]:
        folder = tmp_path / cleared
        ledger = planned_beside(folder, machine_profile, lambda m: [torch.optim.SGD(m.parameters(), 1e-3)], cleared)
        return Ledger.load(folder / "ledger.json").facts["gradients_found"], ledger

    found = {cleared: plan(cleared) for cleared in ("end", "middle", "zeros")}
    assert [found[c][0] for c in found] == ["none", "forward", "kept"]


@pytest.mark.parametrize(
    ("cleared", "accumulate", "make"),
    [
        ("end", 1, lambda p: torch.optim.AdamW(p)),
        ("begin", 1, lambda p: torch.optim.AdamW(p, foreach=True)),
        ("middle", 1, lambda p: torch.optim.SGD(p, lr=1e-3, weight_decay=0.1)),
        ("zeros", 1, lambda p: torch.optim.RMSprop(p, foreach=True, weight_decay=0.1)),
        ("zeros", 2, lambda p: torch.optim.AdamW(p, fused=True)),
        ("end", 1, lambda p: torch.optim.Adagrad(p, foreach=True)),
    ],
)
@pytest.mark.parametrize("rows", [16, 512])
def test_the_planned_peak_is_the_runs_however_gradients_are_cleared(
    cleared: str, accumulate: int, make: Callable[..., torch.optim.Optimizer], rows: int, tmp_path: Path,
    machine_profile: Profile,
) -> None:  # fmt: skip
    model = network(64, 256, 256, 64)
    optimizer = make(model.parameters())
    with ironlaw.observe(model, optimizer, out=tmp_path / "run"):
        for _ in range(11):
            if cleared == "begin":
                optimizer.zero_grad()
            for _ in range(accumulate):
                loss = model(torch.randn(rows, 64)).mean()
                if cleared == "middle":
                    optimizer.zero_grad()
                loss.backward()
            optimizer.step()
            if cleared in ("end", "zeros"):
                optimizer.zero_grad(set_to_none=cleared == "end")
    profile = replace(machine_profile, threads=torch.get_num_threads(), name=host.cpu_name())
    explained = explain_observed(tmp_path / "run", profile)
    planned, measured = (ledger.totals["peak_bytes"].value for ledger in (explained.plan, explained.run))
    assert planned == pytest.approx(measured, rel=0.05), (explained.plan.memory, explained.run.memory)


def test_gradients_of_a_module_count_though_it_has_some_already() -> None:
    model = network(64, 256, 64)
    batch = torch.randn(32, 64)
    first = sum(op.gradient_bytes for op in trace(model, [batch]).operations)
    model(batch).mean().backward()
    assert sum(op.gradient_bytes for op in trace(model, [batch]).operations) == first > 0
