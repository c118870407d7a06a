"""Loops with several optimizers, with passes inside the optimizer's step, and with other threads than were measured."""

from __future__ import annotations

import json
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import torch
from torch import nn

import ironlaw
from ironlaw.explain.observed import explain_observed
from ironlaw.ledger import Ledger, Phase
from ironlaw.machine import host
from ironlaw.machine.profile import Profile


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
    assert ledger.facts["steps_done"] == 20
    phases = ledger.phase_seconds
    assert phases[Phase.FORWARD] > 0 and phases[Phase.BACKWARD] > 0
    assert sum(phases.values()) <= 1.01 * ledger.totals["step_seconds"].value


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
