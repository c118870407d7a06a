"""What runs on a CUDA device only: `python -m pytest -m gpu` tests every path of docs/gpu-status.md."""

from __future__ import annotations

import gc
import os
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from ironlaw.config import RunConfig
from ironlaw.ledger import Ledger
from ironlaw.machine.profile import Profile
from ironlaw.train.result import Outcome
from ironlaw.train.session import run_training

DEVICE = os.environ.get("IRONLAW_TEST_DEVICE", "cuda")  # cpu: whether the tests themselves are right


@pytest.fixture(scope="session")
def device() -> torch.device:
    if DEVICE == "cuda" and not torch.cuda.is_available():
        pytest.skip("needs a CUDA device")
    return torch.device(DEVICE)


@pytest.fixture
def profile(device: torch.device, machine_profile: Profile) -> Profile:
    """This device with made-up curves: its plans are right in bytes, not in seconds."""
    if device.type != "cuda":
        return machine_profile
    memory = torch.cuda.get_device_properties(device).total_memory
    return replace(machine_profile, device="cuda", name=torch.cuda.get_device_name(device), memory_bytes=memory)


@pytest.fixture(autouse=True)
def _nothing_left(device: torch.device) -> None:
    """Peaks count what earlier tests of this process still hold."""
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()


# Wide enough that kernels see whole tiles, small enough for seconds.
MODEL: dict[str, Any] = {"layers": 3, "hidden": 128, "heads": 4, "vocab": 512, "context": 128}


@pytest.fixture
def config(tiny_config: Callable[..., RunConfig]) -> Callable[..., RunConfig]:
    """A run of this device; keyword arguments replace keys of a section."""

    def build(model: dict[str, Any] | None = None, **sections: dict[str, Any]) -> RunConfig:
        sections["train"] = {"steps": 8, "compile": "off"} | sections.get("train", {})
        sections["checkpoint"] = {"every": 0} | sections.get("checkpoint", {})
        return tiny_config(MODEL if model is None else model, **sections)

    return build


@pytest.fixture
def train(user_cache: Path, profile: Profile) -> Callable[..., Outcome]:
    def run(config: RunConfig, out: Path, **options: Any) -> Outcome:
        return run_training(config, out, profile, **options)

    return run


@pytest.fixture
def train_on_cpu(user_cache: Path, machine_profile: Profile) -> Callable[..., Outcome]:
    def run(config: RunConfig, out: Path) -> Outcome:
        return run_training(config, out, replace(machine_profile, device="cpu"))

    return run


@pytest.fixture
def losses(read_metrics: Callable[[Path], list[dict[str, Any]]]) -> Callable[[Path], list[float]]:
    return lambda run: [entry["loss"] for entry in read_metrics(run)]


@pytest.fixture
def ledger() -> Callable[[Path], Ledger]:
    return lambda run: Ledger.load(run / "ledger.json")
