"""However a run ends, resuming it gives the losses of a run that was never interrupted, every step once."""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from ironlaw.config import RunConfig, load_config
from ironlaw.errors import UserError
from ironlaw.train.loop import Outcome, StepReport

Config = Callable[..., RunConfig]
Train = Callable[..., Outcome]
Losses = Callable[[Path], dict[int, float]]
Start = Callable[..., subprocess.Popen[str]]
Finish = Callable[..., subprocess.CompletedProcess[str]]

# Long enough for a signal to arrive in between, with validation, recorded steps and dropout on the way.
LONG: dict[str, dict[str, Any]] = {
    "model": {"dropout": 0.1},
    "train": {"steps": 240, "profile_steps": 2},
    "schedule": {"warmup_steps": 20},
    "checkpoint": {"every": 7, "keep": 2},
    "evaluation": {"every": 50, "batches": 1},
}


class Interruption(Exception):
    """Stands for whatever ends a process."""


def stop_after(step: int) -> Callable[[StepReport], None]:
    def watch(report: StepReport) -> None:
        if report.step == step:
            raise Interruption

    return watch


def wait_for_steps(process: subprocess.Popen[str], run: Path, steps: int) -> None:
    """Until the run has recorded so many steps."""
    metrics, deadline = run / "metrics.jsonl", time.monotonic() + 150
    while time.monotonic() < deadline:
        if metrics.is_file() and metrics.read_bytes().count(b"\n") >= steps:
            return
        assert process.poll() is None, process.communicate()[1]
        time.sleep(0.002)
    raise AssertionError("the run did not get to its steps in time")


@pytest.mark.parametrize("stop", [1, 3, 4, 5, 11])
def test_whatever_step_it_stops_at(
    tiny_config: Config, train: Train, losses: Losses, tmp_path: Path, stop: int
) -> None:
    config = tiny_config({"dropout": 0.1})
    train(config, tmp_path / "whole")
    with pytest.raises(Interruption):
        train(config, tmp_path / "run", watch=stop_after(stop))
    outcome = train(config, tmp_path / "run", resume=True)
    assert (outcome.step, outcome.interrupted) == (12, None)
    assert losses(tmp_path / "run") == losses(tmp_path / "whole")


def test_more_steps_than_first_asked_for(tiny_config: Config, train: Train, losses: Losses, tmp_path: Path) -> None:
    """A finished run may be made longer; a constant learning rate makes it the same run."""
    constant = {"schedule": {"min_lr_fraction": 1.0, "warmup_steps": 0}}
    train(tiny_config(**constant), tmp_path / "whole")
    train(tiny_config(**constant, train={"steps": 6}), tmp_path / "run")
    train(tiny_config(**constant), tmp_path / "run", resume=True)
    assert losses(tmp_path / "run") == losses(tmp_path / "whole")


def test_a_finished_run_is_left_as_it_is(tiny_config: Config, train: Train, losses: Losses, tmp_path: Path) -> None:
    config = tiny_config()
    first = train(config, tmp_path / "run")
    before = (tmp_path / "run" / "metrics.jsonl").read_bytes()
    said: list[str] = []
    again = train(config, tmp_path / "run", resume=True, say=said.append)
    assert "done its 12 steps already" in said[-1]
    assert (tmp_path / "run" / "metrics.jsonl").read_bytes() == before
    assert again.step == first.step == 12
    ledger = json.loads((tmp_path / "run" / "ledger.json").read_text(encoding="utf-8"))
    # What the run measured is still there, and is still about its steps.
    assert ledger["totals"]["step_seconds"]["value"] == first.ledger.totals["step_seconds"].value
    assert ledger["totals"]["validation_loss"]["value"] == first.ledger.totals["validation_loss"].value


def test_half_a_line_of_metrics_is_taken_again(
    tiny_config: Config, train: Train, losses: Losses, tmp_path: Path
) -> None:
    config = tiny_config()
    train(config, tmp_path / "whole")
    with pytest.raises(Interruption):
        train(config, tmp_path / "run", watch=stop_after(6))
    with (tmp_path / "run" / "metrics.jsonl").open("a", encoding="utf-8") as file:
        file.write('{"step": 7, "loss": 5.')
    train(config, tmp_path / "run", resume=True)
    assert losses(tmp_path / "run") == losses(tmp_path / "whole")


@pytest.mark.slow
def test_killed_at_random_and_resumed(
    tiny_file: Callable[..., Path], start_ironlaw: Start, ironlaw_process: Finish, train: Train, losses: Losses,
    tmp_path: Path,
) -> None:  # fmt: skip
    config = tiny_file(**LONG)
    train(load_config(config), tmp_path / "whole")
    chance = random.Random()
    for target in sorted(chance.sample(range(10, 200), 2)):
        process = start_ironlaw("train", config, "--out", "run", "--resume")
        wait_for_steps(process, tmp_path / "run", target)
        process.send_signal(signal.SIGKILL)
        assert process.wait(timeout=60) == -signal.SIGKILL, f"finished before step {target}"
    last = ironlaw_process("train", config, "--out", "run", "--resume")
    assert last.returncode == 0, last.stderr
    assert "resumed from step" in last.stderr
    assert losses(tmp_path / "run") == losses(tmp_path / "whole")
    assert not list((tmp_path / "run").rglob("*.partial*")), "torn files of the killed processes are left"


@pytest.mark.slow
@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143), (signal.SIGHUP, 129)])
def test_a_signal_saves_and_the_run_can_go_on(
    tiny_file: Callable[..., Path], start_ironlaw: Start, ironlaw_process: Finish, train: Train, losses: Losses,
    tmp_path: Path, number: signal.Signals, code: int,
) -> None:  # fmt: skip
    config = tiny_file(**(LONG | {"checkpoint": {"every": 0}}))
    process = start_ironlaw("train", config, "--out", "run")
    wait_for_steps(process, tmp_path / "run", 30)
    process.send_signal(number)
    output, messages = process.communicate(timeout=150)
    assert process.returncode == code, messages
    assert number.name in messages and "Traceback" not in messages
    done = len(losses(tmp_path / "run"))
    assert 30 <= done < 240
    saved = [path.name for path in (tmp_path / "run" / "checkpoints").iterdir()]
    assert saved == [f"step-{done:08d}"]
    assert "--resume" in output  # the command that goes on
    last = ironlaw_process("train", tmp_path / "run", "--out", "run", "--resume")
    assert last.returncode == 0, last.stderr
    assert f"resumed from step {done}" in last.stderr
    train(load_config(config), tmp_path / "whole")
    assert losses(tmp_path / "run") == losses(tmp_path / "whole")


@pytest.mark.slow
def test_ctrl_c_before_the_first_step(start_ironlaw: Start, tiny_file: Callable[..., Path], tmp_path: Path) -> None:
    """While the corpus is tokenised: nothing to save, exit code 130, no traceback, no run directory."""
    big = tmp_path / "big"
    big.mkdir()
    lines = (f"line {n} of a text that takes a while: {n * 7919 % 10007}\n" for n in range(800_000))
    (big / "text.txt").write_text("".join(lines), encoding="utf-8")
    config = tiny_file(data={"path": str(big)})
    process = start_ironlaw("train", config, "--out", "run")
    data, deadline = tmp_path / "data-cache", time.monotonic() + 100
    while not data.is_dir() and time.monotonic() < deadline:
        time.sleep(0.01)
    time.sleep(0.2)
    process.send_signal(signal.SIGINT)
    _, messages = process.communicate(timeout=150)
    assert process.returncode == 130, messages
    assert "Traceback" not in messages
    assert not (tmp_path / "run").exists()
    assert not [path for path in data.iterdir() if not path.name.startswith(".")], "a half-prepared data set is left"


def test_a_signal_during_the_last_step_ends_nothing_early(tiny_config: Config, train: Train, tmp_path: Path) -> None:
    def watch(report: StepReport) -> None:
        if report.step == 11:
            os.kill(os.getpid(), signal.SIGINT)

    outcome = train(tiny_config(train={"steps": 11}), tmp_path / "run", watch=watch)
    assert (outcome.step, outcome.interrupted, outcome.ledger.facts["interrupted"]) == (11, None, None)
    early = train(tiny_config(), tmp_path / "early", watch=watch)
    assert (early.step, early.interrupted, early.ledger.facts["interrupted"]) == (11, "SIGINT", "SIGINT")


# -- what may and may not be resumed -----------------------------------------------------------------------------


@pytest.mark.parametrize(
    "change",
    [
        {"model": {"hidden": 64}},
        {"train": {"global_batch": 16}},
        {"train": {"seed": 1}},
        {"train": {"sequence": 8}},
        {"data": {"seed": 5}},
    ],
    ids=str,
)
def test_another_run_is_not_continued(
    tiny_config: Config, train: Train, tmp_path: Path, change: dict[str, dict[str, Any]]
) -> None:
    train(tiny_config(train={"steps": 3}), tmp_path / "run")
    before = {path: path.read_bytes() for path in (tmp_path / "run").rglob("*") if path.is_file()}
    with pytest.raises(UserError, match="another"):
        train(tiny_config(**change), tmp_path / "run", resume=True)
    assert {path: path.read_bytes() for path in (tmp_path / "run").rglob("*") if path.is_file()} == before


def test_a_checkpoint_of_another_model_without_its_config(tiny_config: Config, train: Train, tmp_path: Path) -> None:
    train(tiny_config(train={"steps": 3}), tmp_path / "run")
    for path in (tmp_path / "run").iterdir():
        if path.is_file():
            path.unlink()
    with pytest.raises(UserError, match=r"is of another model .*hidden 32 there, 64 here"):
        train(tiny_config({"hidden": 64}), tmp_path / "run", resume=True)
    assert [path.name for path in (tmp_path / "run").iterdir()] == ["checkpoints"]


def test_a_folder_of_something_else_is_not_taken_over(tiny_config: Config, train: Train, tmp_path: Path) -> None:
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "thesis.txt").write_text("mine", encoding="utf-8")
    for resume in (False, True):
        with pytest.raises(UserError, match=r"another --out|new directory"):
            train(tiny_config(), tmp_path / "run", resume=resume)
    assert [path.name for path in (tmp_path / "run").iterdir()] == ["thesis.txt"]


def test_an_empty_folder_may_be_used(tiny_config: Config, train: Train, tmp_path: Path) -> None:
    (tmp_path / "run").mkdir()
    assert train(tiny_config(train={"steps": 2}), tmp_path / "run").step == 2
