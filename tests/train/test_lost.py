"""Nothing of a run is lost, and no other model taken for it, without a word."""

from __future__ import annotations

import json
import math
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file, save_file

from ironlaw.config import RunConfig
from ironlaw.errors import UserError

Train = Callable[..., object]
Config = Callable[..., RunConfig]
Here = Callable[..., tuple[int, str, str]]


def damage(checkpoint: Path) -> None:
    (checkpoint / "model.safetensors").write_bytes(b"x")


@pytest.mark.parametrize("lose", [damage, shutil.rmtree])
@pytest.mark.parametrize("stop_at", [None, 6, 10])
def test_a_run_without_a_usable_checkpoint_is_left_as_it_is(
    tiny_config: Config, train: Train, train_until: Any, tmp_path: Path, lose: Callable[[Path], None],
    stop_at: int | None,
) -> None:  # fmt: skip
    run = tmp_path / "run"
    if stop_at is None:
        train(tiny_config(), run)
    else:
        train_until(stop_at, tiny_config(), run)
    for checkpoint in (run / "checkpoints").iterdir():
        lose(checkpoint)
    before = {path: path.read_bytes() for path in run.rglob("*") if path.is_file()}
    with pytest.raises(UserError, match=r"none of its checkpoints can be used.*start over with another --out") as error:
        train(tiny_config(), run, resume=True)
    assert "\n" not in str(error.value)
    assert before == {path: path.read_bytes() for path in run.rglob("*") if path.is_file()}


def test_a_run_killed_before_its_first_checkpoint_begins_anew(
    tiny_config: Config, train: Train, train_until: Any, losses: Any, undisturbed: Any, tmp_path: Path
) -> None:
    train_until(3, tiny_config(), tmp_path / "run")
    assert not list((tmp_path / "run" / "checkpoints").iterdir())
    train(tiny_config(), tmp_path / "run", resume=True)
    assert losses(tmp_path / "run") == undisturbed(tiny_config())


def test_every_verb_says_which_step_it_takes(
    ironlaw_here: Here, tiny_file: Callable[..., Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert ironlaw_here("train", tiny_file(), "--out", "run")[0] == 0
    code, out, _ = ironlaw_here("generate", "run", "--tokens", "2", "--json")
    assert code == 0 and json.loads(out)["step"] == 12 and json.loads(out)["passed_over"] == []
    damage(tmp_path / "run" / "checkpoints" / "step-00000012")
    code, out, messages = ironlaw_here("generate", "run", "--tokens", "2")
    assert code == 0 and "step-00000012 is damaged" in messages and "step 8" in messages
    code, out, messages = ironlaw_here("export", "run", "there", "--json")
    assert code == 0, messages
    assert json.loads(out)["step"] == 8 and "step-00000012 is damaged" in json.loads(out)["passed_over"][0]
    code, out, messages = ironlaw_here("export", "run", "again")
    assert code == 0 and "step 8" in out and "step-00000012 is damaged" in messages
    for name in ("server.serve", "warmup.warm_up"):
        monkeypatch.setattr(f"ironlaw.serve.{name}", lambda *_: None)
    short = tiny_file(train={"steps": 2})
    for words in (
        ("serve", "run", "--port", "0"),
        ("compress", "run", "--to", "int8"),
        ("train", short, "--out", "tuned", "--set", "model.from=run"),
        ("distil", short, "--out", "student", "--teacher", "run"),
    ):
        code, _, messages = ironlaw_here(*words)
        assert code == 0 and "".join(messages.split()).count("step-00000012isdamaged") == 1, words


def test_a_session_replaces_the_tokenizer_as_a_whole(
    tiny_config: Config, train: Train, train_until: Any, tmp_path: Path
) -> None:
    """Half a tokenizer, of a process that was killed while it wrote, would keep the run from going on."""
    train_until(6, tiny_config(), tmp_path / "run")
    file = tmp_path / "run" / "tokenizer.json"
    before = file.stat().st_ino, file.read_bytes()
    train(tiny_config(), tmp_path / "run", resume=True)
    assert file.stat().st_ino != before[0] and file.read_bytes() == before[1]


def test_weights_that_are_refused_leave_no_run_behind(
    ironlaw_here: Here, tiny_file: Callable[..., Path], tmp_path: Path
) -> None:
    assert ironlaw_here("train", tiny_file(), "--out", "run")[0] == 0
    assert ironlaw_here("export", "run", "there")[0] == 0
    weights = tmp_path / "there" / "model.safetensors"
    good = load_file(weights)
    save_file({name: tensor * math.nan for name, tensor in good.items()}, weights)
    words = ("train", tiny_file(), "--out", "second", "--set", "model.from=there")
    code, _, said = ironlaw_here(*words)
    assert code == 2 and "not finite" in said and not (tmp_path / "second").exists()
    save_file(good, weights)
    assert ironlaw_here(*words)[0] == 0
