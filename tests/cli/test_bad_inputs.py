"""Every verb with every kind of wrong input: one line that helps, no traceback, no hang, no escape to a terminal."""

from __future__ import annotations

import os
import shutil
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from ironlaw.config import build_config
from ironlaw.machine.profile import Profile, save_profile
from ironlaw.train.session import run_training

from .bad_inputs import COPY_OF_THE_RUN, cases, may_answer

pytestmark = pytest.mark.timeout(60)
SAMPLED = 6  # every so many of them in every run; the others are `long`
ALL = [
    pytest.param(*case, id=ascii(case[0])[1:-1], marks=() if number % SAMPLED == 0 else pytest.mark.long)
    for number, case in enumerate(cases())
]


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory, corpus: Path, machine_profile: Profile) -> Iterator[Path]:
    """A folder with a good config and a good run, and a user whose machine has been measured."""
    folder = tmp_path_factory.mktemp("world")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(folder / "cache"))
        patch.setenv("HOME", str(folder / "home"))
        save_profile(machine_profile)
        model = {"name": "tiny", "layers": 2, "hidden": 32, "heads": 2, "vocab": 300, "context": 16}
        config = build_config({
            "model": model, "data": {"path": str(corpus), "validation_fraction": 0.1, "cache": str(folder / "data")},
            "train": {"steps": 2, "global_batch": 8, "precision": "fp32", "profile_steps": 0},
            "schedule": {"warmup_steps": 1}, "evaluation": {"batches": 1},
        })  # fmt: skip
        (folder / "config.toml").write_text(config.to_toml(), encoding="utf-8")
        run_training(config, folder / "run", machine_profile)
        yield folder


def test_there_are_as_many_as_promised() -> None:
    assert len(ALL) // SAMPLED >= 300


@pytest.mark.parametrize(("name", "arguments", "files"), ALL)
def test_wrong_input_gets_one_line(
    name: str, arguments: list[str], files: dict, world: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    from ironlaw.cli.main import main

    monkeypatch.chdir(tmp_path)
    for place, content in files.items():
        for path in tmp_path.glob(place) if "*" in place else [tmp_path / place]:
            put(path, content, world)
    stand_ins = {"CONFIG": str(world / "config.toml"), "MODEL": "gpt2", "RUN": str(world / "run")}
    given = [stand_ins.get(word) or word.replace("=RUN", f"={world / 'run'}") for word in arguments]
    monkeypatch.setattr(sys, "argv", ["ironlaw", *given])
    capfd.readouterr()
    with pytest.raises(SystemExit) as stopped:
        main()
    said = capfd.readouterr()
    lines = [line for line in said.err.splitlines() if line.startswith("ironlaw: ")]
    assert "Traceback" not in said.err and "a fault of Ironlaw" not in said.err, said.err
    assert "\x1b" not in said.out + said.err
    assert stopped.value.code in (0, 1, 2)
    assert len(lines) == (stopped.value.code == 2), said.err
    if not may_answer(name):
        assert stopped.value.code == 2, said.out + said.err
    assert threading.active_count() < 20


def put(path: Path, content: object, world: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    if content is COPY_OF_THE_RUN:
        shutil.copytree(world / "run", path)
        return
    if os.path.lexists(path):
        path.unlink()
    if callable(content):
        content(path)
    else:
        assert isinstance(content, bytes)
        path.write_bytes(content)
