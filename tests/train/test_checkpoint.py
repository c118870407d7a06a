"""Checkpoints: whole or not there, checked when read, and the last good one survives whatever happens to the next."""

from __future__ import annotations

import errno
import hashlib
import json
import os
import random
import shutil
import subprocess
import sys
import threading
import time
from collections import namedtuple
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from ironlaw.config import CheckpointConfig, RunConfig, build_config, load_config
from ironlaw.errors import UserError
from ironlaw.machine.profile import Profile
from ironlaw.model.config import ModelConfig
from ironlaw.model.transformer import Transformer
from ironlaw.train import checkpoint
from ironlaw.train.checkpoint import RandomState, host_copy
from ironlaw.train.checkpointer import Checkpointer
from ironlaw.train.loop import Trainer
from ironlaw.train.optimizer import build_optimizer
from ironlaw.train.recovery import drop_checkpoints_after
from ironlaw.train.restore import load
from ironlaw.train.result import Outcome
from ironlaw.train.session import run_training
from ironlaw.workload.optimizers import OptimizerConfig

Config = Callable[..., RunConfig]
Train = Callable[..., Outcome]
Losses = Callable[[Path], dict[int, float]]
Undisturbed = Callable[[RunConfig], dict[int, float]]
MODEL = ModelConfig(layers=1, hidden=8, heads=2, vocab=20, context=6)
Usage = namedtuple("Usage", "total used free")


def trained() -> tuple[Transformer, torch.optim.Optimizer]:
    model = Transformer(MODEL)
    optimizer = build_optimizer(model, OptimizerConfig())
    tokens = torch.randint(0, 20, (2, 6))
    model(tokens, tokens).backward()
    optimizer.step()
    return model, optimizer


def write(
    folder: Path, step: int, model: Transformer, states: dict[str, Any], **policy: int | float | None
) -> checkpoint.Checkpoint:
    validation_loss = policy.pop("validation_loss", None)
    checkpointer = Checkpointer(folder, CheckpointConfig(**policy), MODEL)
    checkpointer.take(step, 100 * step, model, states, validation_loss)
    checkpointer.write()
    checkpointer.finish()
    assert checkpointer.last is not None
    return checkpointer.last


def save(folder: Path, step: int, **policy: int | float | None) -> checkpoint.Checkpoint:
    model, optimizer = trained()
    return write(folder, step, model, {"optimizer": optimizer, "random": RandomState()}, **policy)


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def draws() -> tuple[float, float, float]:
    return torch.rand(1).item(), random.random(), float(np.random.rand())


def test_what_is_saved_is_loaded(tmp_path: Path) -> None:
    model, optimizer = trained()
    write(tmp_path, 3, model, {"optimizer": optimizer, "random": RandomState()})
    expected_random = draws()
    other, other_optimizer = trained()
    found = checkpoint.newest(tmp_path)
    assert found is not None and (found.step, found.tokens) == (3, 300)
    missing = load(found, other, MODEL, {"optimizer": other_optimizer, "random": RandomState()})
    assert missing == []
    assert draws() == expected_random  # dropout goes on where it was
    for mine, theirs in zip(model.parameters(), other.parameters(), strict=True):
        assert torch.equal(mine, theirs)
        for name in ("exp_avg", "exp_avg_sq", "step"):
            assert torch.equal(optimizer.state[mine][name], other_optimizer.state[theirs][name])


def test_the_newest_are_kept(tmp_path: Path) -> None:
    for step in (5, 10, 20, 100):
        save(tmp_path, step, keep=2)
    assert names(tmp_path) == ["step-00000020", "step-00000100"]
    found = checkpoint.newest(tmp_path)
    assert found is not None and found.step == 100


def test_what_a_killed_process_did_not_drop_is_dropped_by_the_next(tmp_path: Path) -> None:
    found = [save(tmp_path, step, keep=9) for step in (5, 10, 20)][-1]
    Checkpointer(tmp_path, CheckpointConfig(keep=2), MODEL).go_on_from(found)
    assert names(tmp_path) == ["step-00000010", "step-00000020"]


def test_a_damaged_one_drops_none_of_those_that_a_run_resumed_before_it_writes(tmp_path: Path) -> None:
    save(tmp_path, 20, keep=2)
    weights = save(tmp_path, 30, keep=2).path / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-1])
    save(tmp_path, 25, keep=1)
    found = checkpoint.newest(tmp_path)
    assert found is not None and found.step == 25
    save(tmp_path, 35, keep=1)
    assert names(tmp_path) == ["step-00000035"]


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


@pytest.fixture(scope="module")
def stopped(
    tiny_tables: Callable[..., dict[str, Any]], machine_profile: Profile, shared_data: Path,
    tmp_path_factory: pytest.TempPathFactory,
) -> tuple[RunConfig, Path]:  # fmt: skip
    """A run of 14 steps that ended after the 12th: checkpoints of steps 8 and 12."""
    folder = tmp_path_factory.mktemp("stopped")

    def stop(entry: dict[str, Any]) -> None:
        if entry["step"] == 12:
            raise InterruptedError

    config = build_config(tiny_tables(shared_data, train={"steps": 14}))
    with pytest.raises(InterruptedError):
        run_training(config, folder / "run", machine_profile, watch=stop)
    return config, folder / "run"


@pytest.mark.parametrize(("name", "damage"), [*DAMAGES, ("checkpoint.json", other_step)])
def test_a_damaged_checkpoint_is_passed_over_with_a_message(
    stopped: tuple[RunConfig, Path], train: Train, losses: Losses, undisturbed: Undisturbed, tmp_path: Path, name: str,
    damage: Callable[[Path], None],
) -> None:  # fmt: skip
    config, run = stopped[0], tmp_path / "run"
    shutil.copytree(stopped[1], run)
    damage(run / "checkpoints" / "step-00000012" / name)
    said: list[str] = []
    train(config, run, resume=True, say=said.append)
    assert "step-00000012 is damaged" in said[0]
    assert "resumed from step 8" in said[1]
    assert losses(run) == undisturbed(config)


def test_a_torn_checkpoint_is_not_looked_at(
    tiny_config: Config, train: Train, train_until: Any, losses: Losses, undisturbed: Undisturbed, tmp_path: Path
) -> None:
    config, run = tiny_config(), tmp_path / "run"
    train_until(9, config, run)
    torn = run / "checkpoints" / ".step-00000012.99999999.partial"
    torn.mkdir()
    (torn / "model.safetensors").write_bytes(b"half")
    said: list[str] = []
    train(config, run, resume=True, say=said.append)
    assert said[0] == "resumed from step 8"
    assert losses(run) == undisturbed(config)
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
    one = checkpoint.checkpoint_bytes(RunConfig(model=MODEL))
    monkeypatch.setattr(shutil, "disk_usage", lambda path: Usage(0, 0, int(2.5 * one)))
    checkpoint.check_space(tmp_path / "not" / "yet", one, count=1)
    with pytest.raises(UserError, match=r"lower checkpoint.keep"):
        checkpoint.check_space(tmp_path, one, count=2)
    (tmp_path / "step-00000001").mkdir()
    checkpoint.check_space(tmp_path, one, count=2)


@pytest.mark.parametrize(
    ("optimizer", "average", "per_weight"),
    [
        ({}, None, 12), ({"name": "sgd"}, None, 4), ({"name": "momentum"}, None, 8), ({}, 0.99, 16),
        ({"name": "muon"}, None, 0), ({"name": "adafactor"}, None, 0), ({"name": "sgd"}, 0.99, 8),
    ],
)  # fmt: skip
def test_room_is_asked_for_what_this_optimizer_and_the_average_hold(
    tiny_config: Config, train: Train, tmp_path: Path, optimizer: Any, average: float | None, per_weight: int
) -> None:
    """As many bytes as the files have, but for their headers, random states and the like."""
    config = tiny_config(
        train={"steps": 2} | ({"average_decay": average} if average else {}), optimizer=optimizer,
        checkpoint={"every": 2},
    )  # fmt: skip
    expected = checkpoint.checkpoint_bytes(config)
    assert per_weight in (0, round(expected / config.model.parameters, 1))
    train(config, tmp_path / "run")
    written = sum(path.stat().st_size for path in (tmp_path / "run").rglob("step-*/*"))
    assert expected < written < expected + 40_000 + 0.02 * expected


@pytest.mark.parametrize("writer", ["save_file", "torch.save", "write_json", "publish"])
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
    with pytest.raises(UserError, match=r"cannot write to .* \(Permission denied\): the checkpoint of step 2"):
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


def until(true: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 100
    while not true():
        assert time.monotonic() < deadline
        time.sleep(0.01)


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
@pytest.mark.parametrize(("leave", "message"), [(200_000, "the checkpoint of step 60"), (0, "free some space")])
def test_a_real_disk_that_fills_up_on_the_way(
    small_disk: Path, losses: Losses, undisturbed: Undisturbed, tiny_file: Callable[..., Path],
    ironlaw_here: Callable[..., tuple[int, str, str]], monkeypatch: pytest.MonkeyPatch, leave: int, message: str,
) -> None:  # fmt: skip
    from ironlaw.report.live import LiveRun

    shown = LiveRun.step

    def step(self: LiveRun, entry: dict[str, Any]) -> None:
        shown(self, entry)
        if entry["step"] == 40:
            until((small_disk / "run" / "checkpoints" / "step-00000025").is_dir)
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
    assert losses(run) == undisturbed(load_config(config))


# -- behind the back of the step ---------------------------------------------------------------------------------


def test_the_run_goes_on_while_a_checkpoint_is_written(
    tiny_config: Config, train: Train, losses: Losses, undisturbed: Undisturbed, tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    """The writing of step 4 is held up until step 7 is done, and still what it writes is the state of step 4."""
    config = tiny_config({"dropout": 0.1})
    whole = undisturbed(config)
    reached, plain = threading.Event(), checkpoint.WholeFiles.write

    def slow(self: checkpoint.WholeFiles, folder: Path, taken: Any) -> dict[str, str]:
        assert reached.wait(timeout=100), "the run waited for the writer"
        return plain(self, folder, taken)

    def watch(entry: dict[str, Any]) -> None:
        if entry["step"] == 7:
            reached.set()
        if entry["step"] == 8:  # its checkpoint waited for the one of step 4
            raise InterruptedError

    monkeypatch.setattr(checkpoint.WholeFiles, "write", slow)
    with pytest.raises(InterruptedError):
        train(config, tmp_path / "run", watch=watch)
    shutil.rmtree(tmp_path / "run" / "checkpoints" / "step-00000008")
    said: list[str] = []
    train(config, tmp_path / "run", resume=True, say=said.append)
    assert said == ["resumed from step 4"]
    assert losses(tmp_path / "run") == whole


def test_a_snapshot_does_not_change_with_the_run(tmp_path: Path) -> None:
    model, optimizer = trained()
    states = {"optimizer": optimizer, "random": RandomState()}
    weights, saved = checkpoint.WholeFiles().take(model, states)
    before = [tensor.clone() for tensor in (*weights.values(), saved["optimizer"]["state"][0]["exp_avg"])]
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.fill_(7.0)
            optimizer.state[parameter]["exp_avg"].fill_(7.0)
    after = (*weights.values(), saved["optimizer"]["state"][0]["exp_avg"])
    assert all(torch.equal(one, two) for one, two in zip(before, after, strict=True))


def test_a_copy_keeps_what_is_shared_and_what_is_nested() -> None:
    shared = torch.arange(6.0).view(2, 3).t()
    tree = {"a": [shared, (shared, 3, None)], "b": {"c": "text", "d": torch.tensor(2.5)}}
    copied = host_copy(tree)
    assert copied["a"][0] is copied["a"][1][0]
    assert copied["a"][0].is_contiguous() and torch.equal(copied["a"][0], shared)
    shared.zero_()
    assert copied["a"][0].sum() == 15
    assert (copied["a"][1][1:], copied["b"]["c"], copied["b"]["d"].item()) == ((3, None), "text", 2.5)


def test_a_full_disk_does_not_stop_the_run(
    tiny_config: Config, train: Train, losses: Losses, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plain = checkpoint.WholeFiles.write

    def full(self: checkpoint.WholeFiles, folder: Path, taken: Any) -> dict[str, str]:
        if int(folder.name.split(".")[1].removeprefix("step-")) == 8:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return plain(self, folder, taken)

    monkeypatch.setattr(checkpoint.WholeFiles, "write", full)
    said: list[str] = []
    outcome = train(tiny_config(), tmp_path / "run", say=said.append)
    assert outcome.step == 12
    assert said == [
        "the disk is full: the checkpoint of step 8 was not written, that of step 4 is intact; free some space; "
        "training goes on"
    ]
    assert names(tmp_path / "run" / "checkpoints") == ["step-00000004", "step-00000012"]


def test_a_writer_that_breaks_is_not_silent(
    tiny_config: Config, train: Train, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(self: checkpoint.WholeFiles, folder: Path, taken: Any) -> dict[str, str]:
        raise TypeError("a bug of ours")

    monkeypatch.setattr(checkpoint.WholeFiles, "write", broken)
    with pytest.raises(TypeError, match="a bug of ours"):
        train(tiny_config(), tmp_path / "run")


def test_a_run_that_is_moved_away_is_not_begun_again_where_it_was(
    tiny_config: Config, train: Train, tmp_path: Path
) -> None:
    """Also if it is moved while a checkpoint is written."""

    def watch(entry: dict[str, Any]) -> None:
        if entry["step"] == 9:
            (tmp_path / "run").rename(tmp_path / "moved")

    with pytest.raises(UserError, match=r"cannot write to .*run/checkpoints .* of step 12 was not written"):
        train(tiny_config(train={"steps": 12}, checkpoint={"every": 4}), tmp_path / "run", watch=watch)
    assert not (tmp_path / "run").exists()
    assert "step-00000004" in names(tmp_path / "moved" / "checkpoints")  # complete before that of step 8 was taken


def test_what_is_kept(tmp_path: Path) -> None:
    losses = {10: 3.0, 20: 1.0, 30: 2.0, 40: 2.5, 50: None, 60: 2.2}
    for step, loss in losses.items():
        save(tmp_path, step, keep=1, keep_every=30, keep_best=1, validation_loss=loss)
    assert names(tmp_path) == ["step-00000020", "step-00000030", "step-00000060"]


def test_the_best_by_validation_loss_survives(
    tiny_config: Config, train: Train, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def evaluate(self: Trainer) -> dict[str, float]:
        self.validation_loss = 1.0 + abs(self.step - 14)
        return {"validation_loss": self.validation_loss, "evaluation_seconds": 0.0}

    monkeypatch.setattr(Trainer, "_evaluate", evaluate)
    config = tiny_config(
        train={"steps": 40}, checkpoint={"keep": 1, "keep_best": 1, "every": 4}, evaluation={"every": 2}
    )
    train(config, tmp_path / "run")
    assert names(tmp_path / "run" / "checkpoints") == ["step-00000012", "step-00000040"]


@pytest.mark.parametrize(
    ("table", "message"),
    [
        ({"keep_best": 1, "every": 5}, "use evaluation.every = 5 or a divisor"),
        ({"keep_every": 30, "every": 20}, "is not a multiple of checkpoint.every = 20"),
    ],
)
def test_policies_that_would_keep_nothing_are_refused(tiny_config: Config, table: dict[str, int], message: str) -> None:
    with pytest.raises(UserError, match=message):
        tiny_config(checkpoint=table)


def test_a_checkpoint_of_the_first_format_still_loads(tmp_path: Path) -> None:
    """As 0.1 wrote it: schema version 1, optimizer and torch's generator only."""
    made = save(tmp_path, 5)
    state = torch.load(made.path / "training.pt", weights_only=True)
    torch.save({"optimizer": state["optimizer"], "random": state["random"]["cpu"]}, made.path / "training.pt")
    names_ = ("model.safetensors", "training.pt")
    index = {
        "schema_version": 1, "step": 5, "tokens": 500, "model": MODEL.model_dump(mode="json"),
        "sha256": {name: checkpoint.sha256(made.path / name) for name in names_},
    }  # fmt: skip
    index["index_sha256"] = hashlib.sha256(json.dumps(index, sort_keys=True).encode()).hexdigest()
    (made.path / "checkpoint.json").write_text(json.dumps(index), encoding="utf-8")
    found = checkpoint.newest(tmp_path)
    assert found is not None and found.step == 5
    model, optimizer = trained()
    assert load(found, model, MODEL, {"optimizer": optimizer, "random": RandomState()}) == []
    assert torch.equal(torch.get_rng_state(), state["random"]["cpu"])
    first = optimizer.state_dict()["state"][0]["exp_avg"]
    assert torch.equal(first, state["optimizer"]["state"][0]["exp_avg"])


def test_a_state_that_a_checkpoint_does_not_hold_is_said(tmp_path: Path) -> None:
    save(tmp_path, 5)
    found = checkpoint.newest(tmp_path)
    assert found is not None
    model, optimizer = trained()
    states = {"optimizer": optimizer, "random": RandomState(), "ema": optimizer}
    assert load(found, model, MODEL, states) == ["ema"]


def test_the_state_of_another_optimizer_is_refused(tmp_path: Path) -> None:
    save(tmp_path, 5)
    found = checkpoint.newest(tmp_path)
    assert found is not None
    model, _ = trained()
    other = torch.optim.SGD(list(model.parameters())[:3], lr=0.1)
    with pytest.raises(UserError, match=r"the optimizer state in .* is of another kind"):
        load(found, model, MODEL, {"optimizer": other})


def test_a_pipe_in_place_of_a_file_is_refused_and_not_waited_for(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / checkpoint.STATE)
    with pytest.raises(UserError, match="a pipe or a device"):
        checkpoint.sha256(tmp_path / checkpoint.STATE)


def test_a_copy_under_another_name_is_neither_read_nor_dropped(tmp_path: Path) -> None:
    for name in ("step-00000002", "step-00000004", "step-00000004-mine", "step-old"):
        (tmp_path / name).mkdir()
    assert [path.name for path in checkpoint.complete(tmp_path)] == ["step-00000002", "step-00000004"]
    drop_checkpoints_after(tmp_path, 2)
    assert {path.name for path in tmp_path.iterdir()} == {"step-00000002", "step-00000004-mine", "step-old"}


def test_a_checkpoint_of_another_step_than_its_name_says_is_damaged(tmp_path: Path) -> None:
    """Folders were swapped: the newest by name would be the older one."""
    older, newer = save(tmp_path, 2), save(tmp_path, 4)
    older.path.rename(tmp_path / "aside")
    newer.path.rename(older.path)
    (tmp_path / "aside").rename(newer.path)
    (tmp_path / "step-²").mkdir()
    said: list[str] = []
    assert checkpoint.newest(tmp_path, said.append) is None and len(said) == 2


class Runs:
    """Pickled, a call of whatever it names."""

    def __reduce__(self) -> Any:
        return Path.touch, (Path("ran"),)


@pytest.mark.parametrize("states", [{"random": Runs()}, {}, [1], {"random": 3}], ids=["code", "none", "list", "number"])
def test_files_that_were_changed_and_signed_again_run_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, states: object
) -> None:
    monkeypatch.chdir(tmp_path)
    path = save(tmp_path, 2).path
    torch.save(states, path / checkpoint.STATE)
    index = json.loads((path / checkpoint.INDEX).read_text())
    index["sha256"][checkpoint.STATE] = checkpoint.sha256(path / checkpoint.STATE)
    checkpoint.write_index(path, {key: value for key, value in index.items() if key != "index_sha256"})
    found, (model, optimizer) = checkpoint.newest(tmp_path), trained()
    assert found is not None
    with pytest.raises(UserError, match="not those of its index"):
        load(found, model, MODEL, {"optimizer": optimizer, "random": RandomState()})
    assert not Path("ran").exists()


def test_random_states_of_more_devices_than_are_left_go_on_with_those(monkeypatch: pytest.MonkeyPatch) -> None:
    restored: list[int] = []
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "get_rng_state_all", lambda: [0, 1, 2, 3])
    monkeypatch.setattr("torch.cuda.random.set_rng_state", lambda state, device: restored.append(state))
    RandomState().load_state_dict(RandomState().state_dict())
    assert restored == [0, 1]


@pytest.mark.parametrize("of", [{"model": {"layers": "x"}}, {"model": []}, {"store": [[]]}, {"sha256": ""}])
def test_an_index_of_other_types_is_damage_though_it_is_signed(tmp_path: Path, of: dict[str, Any]) -> None:
    path = save(tmp_path, 2).path
    index = json.loads((path / checkpoint.INDEX).read_text()) | of
    checkpoint.write_index(path, {key: value for key, value in index.items() if key != "index_sha256"})
    with pytest.raises(UserError, match="is damaged"):
        checkpoint.read_index(path)


def test_a_run_that_writes_one_checkpoint_needs_room_for_one(
    tiny_config: Config, train: Train, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = tiny_config(train={"steps": 2}, checkpoint={"every": 0})
    room = 1.5 * checkpoint.checkpoint_bytes(config)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: Usage(0, 0, int(room)))
    train(config, tmp_path / "run")
    with pytest.raises(UserError, match="free some space"):
        train(tiny_config(train={"steps": 2}, checkpoint={"every": 1}), tmp_path / "two")
