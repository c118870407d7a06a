"""Checkpoints: whole or not there, checked when read, and the last good one survives whatever happens to the next."""

from __future__ import annotations

import errno
import os
import shutil
import subprocess
import sys
from collections import namedtuple
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from ironlaw.config import RunConfig, load_config
from ironlaw.errors import UserError
from ironlaw.model.config import ModelConfig
from ironlaw.model.transformer import Transformer
from ironlaw.train import checkpoint
from ironlaw.train.loop import Outcome, StepReport
from ironlaw.train.optimizer import build_optimizer
from ironlaw.workload.optimizers import OptimizerConfig

Config = Callable[..., RunConfig]
Train = Callable[..., Outcome]
Losses = Callable[[Path], dict[int, float]]
MODEL = ModelConfig(layers=1, hidden=8, heads=2, vocab=20, context=6)
Usage = namedtuple("Usage", "total used free")


def trained() -> tuple[Transformer, torch.optim.Optimizer]:
    model = Transformer(MODEL)
    optimizer = build_optimizer(model, OptimizerConfig())
    tokens = torch.randint(0, 20, (2, 6))
    model(tokens, tokens).backward()
    optimizer.step()
    return model, optimizer


def save(folder: Path, step: int, keep: int = 2) -> checkpoint.Checkpoint:
    model, optimizer = trained()
    return checkpoint.save(folder, step, 100 * step, model, optimizer, MODEL, keep)


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def test_what_is_saved_is_loaded(tmp_path: Path) -> None:
    model, optimizer = trained()
    checkpoint.save(tmp_path, 3, 300, model, optimizer, MODEL, keep=2)
    expected_random = torch.rand(4)
    other, other_optimizer = trained()
    found = checkpoint.newest(tmp_path)
    assert found is not None and (found.step, found.tokens) == (3, 300)
    checkpoint.load(found, other, MODEL, other_optimizer)
    assert torch.equal(torch.rand(4), expected_random)  # dropout goes on where it was
    for mine, theirs in zip(model.parameters(), other.parameters(), strict=True):
        assert torch.equal(mine, theirs)
        for name in ("exp_avg", "exp_avg_sq", "step"):
            assert torch.equal(optimizer.state[mine][name], other_optimizer.state[theirs][name])


def test_the_newest_are_kept(tmp_path: Path) -> None:
    for step in (5, 10, 100, 20):
        save(tmp_path, step, keep=2)
    assert names(tmp_path) == ["step-00000020", "step-00000100"]
    found = checkpoint.newest(tmp_path)
    assert found is not None and found.step == 100


def test_weights_are_readable_by_others_and_hold_no_tensor_twice(tmp_path: Path) -> None:
    from safetensors import safe_open

    made = save(tmp_path, 1)
    with safe_open(made.path / "model.safetensors", framework="np") as file:
        assert sum(file.get_tensor(name).size for name in file.keys()) == MODEL.parameters  # noqa: SIM118


def truncate(path: Path) -> None:
    with path.open("r+b") as file:
        file.truncate(path.stat().st_size // 2)


def flip(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)


def empty(path: Path) -> None:
    path.write_bytes(b"")


def other_step(path: Path) -> None:
    """One changed digit, and the file is still valid."""
    text = path.read_text(encoding="utf-8")
    path.write_text(text.replace('"step": 12', '"step": 10'), encoding="utf-8")


FILES = ("model.safetensors", "training.pt", "checkpoint.json")
DAMAGES = [(name, damage) for name in FILES for damage in (truncate, flip, empty, Path.unlink)]


@pytest.mark.parametrize(("name", "damage"), [*DAMAGES, ("checkpoint.json", other_step)])
def test_a_damaged_checkpoint_is_passed_over_with_a_message(
    tiny_config: Config, train: Train, losses: Losses, tmp_path: Path, name: str, damage: Callable[[Path], None]
) -> None:
    config, run = tiny_config(train={"steps": 14}), tmp_path / "run"
    train(config, tmp_path / "whole")

    def stop(report: StepReport) -> None:
        if report.step == 12:
            raise InterruptedError

    with pytest.raises(InterruptedError):
        train(config, run, watch=stop)
    damage(run / "checkpoints" / "step-00000012" / name)
    said: list[str] = []
    train(config, run, resume=True, say=said.append)
    assert "step-00000012 is damaged" in said[0]
    assert "resumed from step 8" in said[1]
    assert losses(run) == losses(tmp_path / "whole")


def test_a_torn_checkpoint_is_not_looked_at(tiny_config: Config, train: Train, losses: Losses, tmp_path: Path) -> None:
    config, run = tiny_config(), tmp_path / "run"
    train(config, tmp_path / "whole")

    def stop(report: StepReport) -> None:
        if report.step == 9:
            raise InterruptedError

    with pytest.raises(InterruptedError):
        train(config, run, watch=stop)
    torn = run / "checkpoints" / ".step-00000012.99999999.partial"
    torn.mkdir()
    (torn / "model.safetensors").write_bytes(b"half")
    said: list[str] = []
    train(config, run, resume=True, say=said.append)
    assert said[0] == "resumed from step 8"
    assert losses(run) == losses(tmp_path / "whole")
    assert names(run / "checkpoints") == ["step-00000008", "step-00000012"]  # the torn one of a dead process is gone


# -- a full disk -------------------------------------------------------------------------------------------------


def test_no_room_at_the_start_writes_nothing(
    tiny_config: Config, train: Train, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    train(tiny_config(), tmp_path / "first")  # the data are prepared
    monkeypatch.setattr(shutil, "disk_usage", lambda path: Usage(10**9, 10**9 - 5000, 5000))
    with pytest.raises(UserError, match=r"has 4.88 KiB free, checkpoints need .*: free some space") as error:
        train(tiny_config(), tmp_path / "run")
    assert "\n" not in str(error.value)
    assert not (tmp_path / "run").exists()


def test_room_is_asked_for_what_will_be_there_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """`keep` checkpoints and the one being written; those that are there already need no more."""
    one = checkpoint.checkpoint_bytes(MODEL)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: Usage(0, 0, int(2.5 * one)))
    checkpoint.check_space(tmp_path / "not" / "yet", MODEL, keep=1)
    with pytest.raises(UserError, match=r"lower checkpoint.keep"):
        checkpoint.check_space(tmp_path, MODEL, keep=2)
    (tmp_path / "step-00000001").mkdir()
    checkpoint.check_space(tmp_path, MODEL, keep=2)


@pytest.mark.parametrize("writer", ["save_file", "torch.save", "write_atomically"])
def test_a_disk_that_fills_up_leaves_the_earlier_checkpoint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, writer: str
) -> None:
    save(tmp_path, 1)
    before = {path: path.read_bytes() for path in (tmp_path / "step-00000001").iterdir()}

    def full(*arguments: Any, **options: Any) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(f"ironlaw.train.checkpoint.{writer}", full)
    with pytest.raises(UserError, match="the disk is full: the checkpoint of step 2 was not written") as error:
        save(tmp_path, 2)
    assert "\n" not in str(error.value)
    assert names(tmp_path) == ["step-00000001"]
    assert {path: path.read_bytes() for path in (tmp_path / "step-00000001").iterdir()} == before


def test_another_failure_is_not_called_a_full_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def denied(*arguments: Any, **options: Any) -> None:
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))

    monkeypatch.setattr("ironlaw.train.checkpoint.save_file", denied)
    with pytest.raises(PermissionError):
        save(tmp_path, 2)
    assert names(tmp_path) == []


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A real file system of 2 MiB."""
    folder = tmp_path / "disk"
    folder.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", "size=2m", "tmpfs", str(folder)]
    if sys.platform != "linux" or shutil.which("mount") is None:
        pytest.skip("no mount")
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        pytest.skip(f"mounting a small disk is not permitted here: {done.stderr.strip()}")
    yield folder
    subprocess.run(["umount", str(folder)], check=True)


def fill(disk: Path, leave: int) -> None:
    free = shutil.disk_usage(disk).free
    (disk / "ballast").write_bytes(b"\0" * max(0, free - leave))


def test_a_real_disk_too_small_from_the_start(
    small_disk: Path, tiny_file: Callable[..., Path], ironlaw_here: Callable[..., tuple[int, str, str]]
) -> None:
    fill(small_disk, leave=300_000)
    code, _, messages = ironlaw_here("train", tiny_file(), "--out", small_disk / "run")
    assert code == 2
    assert messages.splitlines()[-1].startswith("ironlaw: the disk of ")
    assert names(small_disk) == ["ballast"]


# Room for no checkpoint, and room for not even a line of metrics, which fail in different places.
@pytest.mark.parametrize(("leave", "message"), [(200_000, "the checkpoint of step 50"), (0, "free some space")])
def test_a_real_disk_that_fills_up_on_the_way(
    small_disk: Path, train: Train, losses: Losses, tiny_file: Callable[..., Path], tmp_path: Path,
    ironlaw_here: Callable[..., tuple[int, str, str]], monkeypatch: pytest.MonkeyPatch, leave: int, message: str,
) -> None:  # fmt: skip
    from ironlaw.report.live import LiveRun

    shown = LiveRun.step

    def step(self: LiveRun, report: Any) -> None:
        shown(self, report)
        if report.step == 26:
            fill(small_disk, leave)

    monkeypatch.setattr(LiveRun, "step", step)
    config = tiny_file(train={"steps": 60}, checkpoint={"every": 25})
    run = small_disk / "run"
    code, _, messages = ironlaw_here("train", config, "--out", run)
    last = messages.splitlines()[-1]
    assert code == 2, messages
    assert last.startswith("ironlaw: the disk is full") and message in last and "--resume" in last
    assert "Traceback" not in messages
    assert names(run / "checkpoints") == ["step-00000025"]
    (small_disk / "ballast").unlink()
    monkeypatch.setattr(LiveRun, "step", shown)
    assert ironlaw_here("train", config, "--out", run, "--resume")[0] == 0
    train(load_config(config), tmp_path / "whole")
    assert losses(run) == losses(tmp_path / "whole")
