"""`torchrun -m ironlaw train`: from the command line to a finished run, resumed on other ranks."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import ironlaw
from ironlaw.train.parallel import preflight

SOURCE = Path(ironlaw.__file__).parents[1]


def torchrun(ranks: int, *arguments: str | Path, restarts: int = 0) -> list[str]:
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)]
    return [*launcher, "--max-restarts", str(restarts), "-m", "ironlaw", *map(str, arguments)]


def environment() -> dict[str, str]:
    return os.environ | {"PYTHONPATH": str(SOURCE), "NO_COLOR": "1", "OMP_NUM_THREADS": "1"}


def on_ranks(folder: Path, ranks: int, *arguments: str | Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        torchrun(ranks, *arguments), cwd=folder, env=environment(), capture_output=True, text=True, timeout=250,
        check=False,
    )  # fmt: skip


def losses(run: Path) -> list[float]:
    return [json.loads(line)["loss"] for line in (run / "metrics.jsonl").read_text(encoding="utf-8").splitlines()]


MODEL = {"dropout": 0.1, "layers": 2, "heads": 4}


def test_two_ranks_train_like_one(
    tiny_file: Callable[..., Path], ironlaw_process: Callable[..., Any], tmp_path: Path, user_cache: Path
) -> None:
    config = tiny_file(MODEL, layout={}, train={"micro_batch": 2})
    done = on_ranks(tmp_path, 2, "train", config, "--out", "two", "--set", "layout.tp=2", "--set", "layout.sp=true")
    assert done.returncode == 0, done.stderr[-3000:]
    assert ironlaw_process("train", config, "--out", tmp_path / "one").returncode == 0
    one, two = losses(tmp_path / "one"), losses(tmp_path / "two")
    assert two == pytest.approx(one, rel=1e-5)
    assert len(one) == 12


def test_ranks_go_on_from_one_process_and_start_from_its_weights(
    tiny_file: Callable[..., Path], ironlaw_process: Callable[..., Any], tmp_path: Path, user_cache: Path
) -> None:
    config = tiny_file(MODEL, layout={}, train={"micro_batch": 2})
    slow = ("--set", "schedule.warmup_steps=100")
    assert ironlaw_process("train", config, "--out", tmp_path / "one", *slow).returncode == 0
    # The same run, its second half on two ranks.
    run = ("train", config, *slow, "--out", tmp_path / "run")
    assert ironlaw_process(*run, "--set", "train.steps=6").returncode == 0
    done = on_ranks(tmp_path, 2, *run, "--resume", "--set", "layout.tp=2")
    assert done.returncode == 0, done.stderr[-3000:]
    assert losses(tmp_path / "run") == pytest.approx(losses(tmp_path / "one"), rel=1e-5)
    # A run of its own from the first one's weights.
    fine = ("train", config, *slow, "--set", f"train.start_from={tmp_path / 'one'}", "--set", "train.steps=3")
    assert ironlaw_process(*fine, "--out", tmp_path / "fine").returncode == 0
    done = on_ranks(tmp_path, 2, *fine, "--out", tmp_path / "fine_two", "--set", "layout.zero=3")
    assert done.returncode == 0, done.stderr[-3000:]
    alone = losses(tmp_path / "fine")
    assert losses(tmp_path / "fine_two") == pytest.approx(alone, rel=1e-5)
    assert alone[0] < losses(tmp_path / "one")[0] - 0.01  # not from scratch


@pytest.mark.long
def test_a_run_goes_on_with_another_layout_and_alone(
    tiny_file: Callable[..., Path], ironlaw_process: Callable[..., Any], tmp_path: Path, user_cache: Path
) -> None:
    config = tiny_file(MODEL, layout={}, train={"micro_batch": 1})
    assert ironlaw_process("train", config, "--out", tmp_path / "one").returncode == 0
    out = ("--out", "run", "--resume")
    for steps, ranks, layout in ((4, 4, "layout.tp=2"), (8, 2, "layout.pp=2"), (10, 2, "layout.zero=3")):
        done = on_ranks(
            tmp_path, ranks, "train", config, *out, "--set", f"train.steps={steps}", "--set", layout,
            "--set", "schedule.warmup_steps=100",
        )  # fmt: skip
        assert done.returncode == 0, done.stderr[-3000:]
    last = ironlaw_process("train", config, "--out", tmp_path / "run", "--resume", "--set", "schedule.warmup_steps=100")
    assert last.returncode == 0, last.stderr
    assert (
        ironlaw_process("train", config, "--out", tmp_path / "plain", "--set", "schedule.warmup_steps=100").returncode
        == 0
    )
    assert losses(tmp_path / "run") == pytest.approx(losses(tmp_path / "plain"), rel=1e-5)


def test_what_differs_between_ranks_is_refused_in_one_line() -> None:
    same = {
        "torch": "2.13.0", "ironlaw": "0.1", "python": "3.11", "config": "abc", "devices": "cpu", "host": "node0",
        "clock_seconds": 1000.0,
    }  # fmt: skip
    assert preflight.problem([same, same | {"clock_seconds": 1003.0}]) is None
    other = same | {"host": "node1"}
    for change, words in (
        ({"torch": "2.11.0"}, "rank 1 on node1 has PyTorch 2.11.0, rank 0 has 2.13.0"),
        ({"config": "abd"}, "rank 1 on node1 has another config than rank 0"),
        ({"clock_seconds": 1090.0}, "rank 1 on node1 has a clock 90 s ahead of rank 0's on node0"),
        ({"clock_seconds": 900.0}, "a clock 100 s behind"),
    ):
        found = preflight.problem([same, other | change])
        assert found is not None and words in found and "\n" not in found
