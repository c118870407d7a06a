"""However a run ends, resuming it gives the losses of a run that was never interrupted, every step once."""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch

from ironlaw.config import RunConfig, load_config
from ironlaw.errors import UserError
from ironlaw.report.live import DataProgress, LiveRun
from ironlaw.train.result import Outcome

Config = Callable[..., RunConfig]
Here = Callable[..., tuple[int, str, str]]
Train = Callable[..., Outcome]
Losses = Callable[[Path], dict[int, float]]
Undisturbed = Callable[[RunConfig], dict[int, float]]

# Validation, recorded steps and dropout on the way.
LONG: dict[str, dict[str, Any]] = {
    "model": {"dropout": 0.1},
    "train": {"steps": 60, "profile_steps": 2},
    "schedule": {"warmup_steps": 20},
    "checkpoint": {"every": 7, "keep": 2},
    "evaluation": {"every": 25, "batches": 1},
}


@pytest.mark.parametrize("stop", [1, 3, 4, 5, 11])
def test_whatever_step_it_stops_at(
    tiny_config: Config, train: Train, train_until: Any, losses: Losses, undisturbed: Undisturbed, tmp_path: Path,
    stop: int,
) -> None:  # fmt: skip
    config = tiny_config({"dropout": 0.1})
    train_until(stop, config, tmp_path / "run")
    outcome = train(config, tmp_path / "run", resume=True)
    assert (outcome.step, outcome.interrupted) == (12, None)
    assert losses(tmp_path / "run") == undisturbed(config)


def test_more_steps_than_first_asked_for(
    tiny_config: Config, train: Train, losses: Losses, undisturbed: Undisturbed, tmp_path: Path
) -> None:
    """A finished run may be made longer; a constant learning rate makes it the same run."""
    constant = {"schedule": {"min_lr_fraction": 1.0, "warmup_steps": 0}}
    train(tiny_config(**constant, train={"steps": 6}), tmp_path / "run")
    train(tiny_config(**constant), tmp_path / "run", resume=True)
    assert losses(tmp_path / "run") == undisturbed(tiny_config(**constant))


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
    ledger["facts"]["steps_done"] = 6  # of an earlier session, when the last one was killed after its last checkpoint
    (tmp_path / "run" / "ledger.json").write_text(json.dumps(ledger), encoding="utf-8")
    again = train(config, tmp_path / "run", resume=True)
    assert again.ledger.facts["steps_done"] == 12
    assert again.ledger.totals["validation_loss"].value == first.ledger.totals["validation_loss"].value


def test_half_a_line_of_metrics_is_taken_again(
    tiny_config: Config, train: Train, train_until: Any, losses: Losses, undisturbed: Undisturbed, tmp_path: Path
) -> None:
    config = tiny_config()
    train_until(6, config, tmp_path / "run")
    with (tmp_path / "run" / "metrics.jsonl").open("a", encoding="utf-8") as file:
        file.write('{"step": 7, "loss": 5.')
    train(config, tmp_path / "run", resume=True)
    assert losses(tmp_path / "run") == undisturbed(config)


# The process that trains ends itself: what is sent to it from here comes when the machine has time for it.
KILLED_AFTER = """
import os, signal, sys
from ironlaw.cli.main import main
from ironlaw.report.live import LiveRun
shown, last = LiveRun.step, int(sys.argv.pop(1))
def step(self, entry):
    shown(self, entry)
    if entry["step"] == last:
        os.kill(os.getpid(), signal.SIGKILL)
LiveRun.step = step
main()
"""


def test_a_killed_process_and_resumed(
    tiny_file: Callable[..., Path], user_cache: Path, ironlaw_here: Here, losses: Losses, undisturbed: Undisturbed,
    tmp_path: Path,
) -> None:  # fmt: skip
    """At any step, and so while a checkpoint may be under way; benchmarks/soak.py kills at any moment."""
    config = tiny_file(**LONG)
    last = random.Random().randrange(8, 55)
    command = [sys.executable, "-c", KILLED_AFTER, str(last), "train", str(config)]
    killed = subprocess.run([*command, "--out", "run"], cwd=tmp_path, capture_output=True, text=True, check=False)
    assert killed.returncode == -signal.SIGKILL, killed.stderr
    code, _, messages = ironlaw_here("train", config, "--out", "run", "--resume")
    # The copy of step 7 may still be on its way to the disk until that of step 14 waits for it.
    first_lost = last < 15 and "starts again at step 1" in messages
    assert code == 0 and (first_lost or "resumed from step" in messages), messages
    assert losses(tmp_path / "run") == undisturbed(load_config(config)), command
    assert not list((tmp_path / "run").rglob("*.partial*")), "torn files of the killed process are left"


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_a_signal_saves_and_the_run_can_go_on(
    tiny_file: Callable[..., Path], ironlaw_here: Here, losses: Losses, undisturbed: Undisturbed, tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch, number: signal.Signals, code: int,
) -> None:  # fmt: skip
    """SIGHUP, which takes the terminal along: tests/cli/test_command_line.py."""
    shown = LiveRun.step

    def step(self: LiveRun, entry: dict[str, Any]) -> None:
        shown(self, entry)
        if entry["step"] == 30:
            os.kill(os.getpid(), number)

    config = tiny_file(**(LONG | {"checkpoint": {"every": 0}}))
    with monkeypatch.context() as patch:
        patch.setattr(LiveRun, "step", step)
        ended, output, messages = ironlaw_here("train", config, "--out", "run")
    assert ended == code, messages
    assert number.name in messages and "Traceback" not in messages
    assert len(losses(tmp_path / "run")) == 30
    saved = [path.name for path in (tmp_path / "run" / "checkpoints").iterdir()]
    assert saved == ["step-00000030"]
    assert "--resume" in output  # the command that goes on
    ended, _, messages = ironlaw_here("train", tmp_path / "run", "--out", "run", "--resume")
    assert ended == 0 and "resumed from step 30" in messages, messages
    assert losses(tmp_path / "run") == undisturbed(load_config(config))


def test_ctrl_c_before_the_first_step(
    tiny_file: Callable[..., Path], ironlaw_here: Here, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """While the corpus is tokenised: nothing to save, exit code 130, no traceback, no run directory."""

    def progress(self: DataProgress, done: int, total: int) -> None:
        assert [path for path in (tmp_path / "data-cache").iterdir() if path.name.startswith(".partial")]
        os.kill(os.getpid(), signal.SIGINT)

    monkeypatch.setattr(DataProgress, "__call__", progress)
    config = tiny_file(data={"cache": str(tmp_path / "data-cache")})
    code, _, messages = ironlaw_here("train", config, "--out", "run")
    assert code == 130 and "Traceback" not in messages, messages
    assert not (tmp_path / "run").exists()
    assert not [path for path in (tmp_path / "data-cache").iterdir() if not path.name.startswith(".")]


def test_a_run_in_a_thread_which_hears_no_signals_trains(tiny_config: Config, train: Train, tmp_path: Path) -> None:
    with ThreadPoolExecutor(1) as thread:
        outcome = thread.submit(train, tiny_config(train={"steps": 2}), tmp_path / "run").result()
    assert (outcome.step, outcome.interrupted) == (2, None)


def test_a_signal_during_the_last_step_ends_nothing_early(tiny_config: Config, train: Train, tmp_path: Path) -> None:
    def watch(entry: dict[str, Any]) -> None:
        if entry["step"] == 11:
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
        {"train": {"average_decay": None}},
        {"train": {"qat": None}},
        {"objective": {"kind": "distillation", "teacher": "run"}},
    ],
    ids=str,
)
def test_another_run_is_not_continued(
    tiny_config: Config, train: Train, tmp_path: Path, change: dict[str, dict[str, Any]]
) -> None:
    kept = {"average_decay": 0.9, "qat": "int8"}
    train(tiny_config(train=kept | {"steps": 3}), tmp_path / "run")
    before = {path: path.read_bytes() for path in (tmp_path / "run").rglob("*") if path.is_file()}
    with pytest.raises(UserError, match="another"):
        train(tiny_config(**change | {"train": kept | change.get("train", {})}), tmp_path / "run", resume=True)
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


@pytest.mark.parametrize("name", ["adamw", "muon"])
def test_settings_of_the_optimizer_are_those_of_the_session(
    tiny_config: Config, train: Train, tmp_path: Path, name: str
) -> None:
    for steps, decay, beta2 in ((3, 0.1, 0.95), (6, 0.7, 0.9)):
        optimizer = {"name": name, "weight_decay": decay, "beta2": beta2}
        train(tiny_config(train={"steps": steps}, optimizer=optimizer), tmp_path / "run", resume=steps > 3)
        states = torch.load(tmp_path / "run" / "checkpoints" / f"step-{steps:08d}" / "training.pt", weights_only=True)
        held = states["optimizer"].get("parts", [states["optimizer"]])
        groups = [group for part in held for group in part["param_groups"]]
        assert max(group["weight_decay"] for group in groups) == decay
        assert groups[-1]["betas"] == (0.9, beta2)
