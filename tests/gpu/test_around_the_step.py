"""What goes on beside the steps on CUDA: batches, checkpoints, faults, and everything that measures."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F

import ironlaw
from ironlaw.config import RunConfig
from ironlaw.data.batch import Batch
from ironlaw.errors import UserError
from ironlaw.ledger import Ledger, Phase
from ironlaw.train.result import Outcome

pytestmark = pytest.mark.gpu
Config, Train, Losses = Callable[..., RunConfig], Callable[..., Outcome], Callable[[Path], list[float]]


@pytest.mark.parametrize("pinned", [True, False])
def test_batches_arrive_as_they_were_made(pinned: bool, device: torch.device) -> None:
    from ironlaw.train.offload import Transfer

    transfer = Transfer(device, pinned)
    for number in range(20):
        ids = np.arange(64 * 512, dtype=np.int64).reshape(64, 512) + number
        there = transfer(Batch(ids, ids + 1, None))
        assert there.inputs.device.type == device.type
        assert np.array_equal(there.inputs.cpu().numpy(), ids) and np.array_equal(there.targets.cpu().numpy(), ids + 1)


def test_a_copy_of_the_state_is_the_state(device: torch.device) -> None:
    from ironlaw.train.checkpoint import host_copy

    there = {"a": torch.randn(1000, 1000, device=device), "b": [torch.arange(5, device=device)], "c": 3}
    copied = host_copy(there)
    there["a"].zero_()
    assert copied["a"].device.type == "cpu" and float(copied["a"].abs().sum()) > 0
    assert torch.equal(copied["b"][0], torch.arange(5)) and copied["c"] == 3
    assert copied["a"].is_pinned() == (device.type == "cuda")


@pytest.mark.parametrize("compile_", ["off", "on"])
def test_a_resumed_run_goes_on(compile_: str, config: Config, train: Train, losses: Losses, tmp_path: Path) -> None:
    """With dropout: the trial of a compiler must leave the device's random numbers where they were."""

    def of(steps: int) -> RunConfig:
        return config(
            {"layers": 3, "hidden": 128, "heads": 4, "vocab": 512, "context": 128, "dropout": 0.1},
            train={"steps": steps, "compile": compile_}, schedule={"kind": "constant"}, checkpoint={"every": 3},
        )  # fmt: skip

    train(of(8), tmp_path / "whole")
    train(of(4), tmp_path / "parts")
    train(of(8), tmp_path / "parts", resume=True)
    assert losses(tmp_path / "parts") == pytest.approx(losses(tmp_path / "whole"), rel=1e-4)


def test_out_of_device_memory_is_one_line(config: Config, train: Train, tmp_path: Path, device: torch.device) -> None:
    torch.cuda.set_per_process_memory_fraction(0.003, 0)
    try:
        with pytest.raises(UserError, match="the device is out of memory"):
            model = {"layers": 4, "hidden": 1024, "heads": 8, "vocab": 8192, "context": 512}
            train(config(model, data={"mock": True}, train={"global_batch": 64}), tmp_path / "run")
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0, 0)
        torch.cuda.empty_cache()


def test_phases_sum_to_the_step(config: Config, train: Train, ledger: Any, tmp_path: Path) -> None:
    """Events on the stream, resolved when the host waits anyway."""
    train(config(train={"steps": 40}), tmp_path / "run")
    measured = ledger(tmp_path / "run")
    step = measured.totals["step_seconds"].value
    assert sum(measured.phase_seconds.values()) == pytest.approx(step, rel=0.1)
    assert measured.phase_seconds[Phase.BACKWARD] > 0


def test_recorded_steps_have_operations(config: Config, train: Train, ledger: Any, tmp_path: Path) -> None:
    train(config(train={"steps": 30, "profile_steps": 3}), tmp_path / "run")
    measured = ledger(tmp_path / "run")
    assert {line.phase for line in measured.lines} >= {Phase.FORWARD, Phase.BACKWARD, Phase.OPTIMIZER}
    assert sum(line.seconds or 0.0 for line in measured.lines) > 0


@pytest.mark.slow
def test_the_machine_is_measured(device: torch.device, user_cache: Path) -> None:
    from ironlaw.machine.measure import measure

    profile = measure(budget_seconds=20)
    assert profile.device == device.type
    assert profile.matmul_peak("bf16") > profile.matmul_peak("fp32") > 1e12
    assert profile.copy_bytes_per_second > 1e11


def observed(out: Path, device: torch.device) -> Ledger:
    model = torch.nn.Sequential(torch.nn.Linear(256, 1024), torch.nn.GELU(), torch.nn.Linear(1024, 10)).to(device)
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    with ironlaw.observe(model, optimizer, out=out):
        for _ in range(16):
            x, y = torch.randn(512, 256).to(device), torch.randint(0, 10, (512,)).to(device)
            F.cross_entropy(model(x), y).backward()
            optimizer.step()
            optimizer.zero_grad()
    return Ledger.load(out / "ledger.json")


def test_a_loop_of_ones_own_is_observed(device: torch.device, tmp_path: Path, user_cache: Path) -> None:
    """Marks as events, kernels under the modules that launched them, memory as the allocator has it."""
    ledger = observed(tmp_path / "run", device)
    step = ledger.totals["step_seconds"].value
    assert sum(ledger.phase_seconds.values()) == pytest.approx(step, rel=0.1)
    assert ledger.totals["peak_bytes"].value >= 4 * 4 * (256 * 1024)
    assert ledger.facts["reserved_bytes"] >= ledger.totals["peak_bytes"].value
    names = {line.operation for line in ledger.lines}
    assert any(name.startswith("0") for name in names) and any(name.startswith("2") for name in names)


def test_a_recorded_trace_is_read(device: torch.device, tmp_path: Path) -> None:
    from torch.profiler import ProfilerActivity, profile, schedule

    from ironlaw.observe.foreign_trace import trace_ledger
    from ironlaw.observe.trace_file import read_trace

    model = torch.nn.Linear(2048, 2048, device=device)
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    path = tmp_path / "trace.json"
    with profile(
        activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA], record_shapes=True,
        schedule=schedule(wait=1, warmup=1, active=3), on_trace_ready=lambda p: p.export_chrome_trace(str(path)),
    ) as recorded:  # fmt: skip
        for _ in range(6):
            model(torch.randn(512, 2048, device=device)).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
            recorded.step()
    ledger = trace_ledger(read_trace(path))
    assert ledger.facts["machine"] == torch.cuda.get_device_name(device)
    assert ledger.phase_seconds[Phase.FORWARD] > 0 and ledger.phase_seconds[Phase.BACKWARD] > 0
    assert ledger.flops() == 2 * 2 * 512 * 2048 * 2048  # the input needs no gradient
