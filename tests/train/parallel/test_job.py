"""`torchrun -m ironlaw train`: from the command line to a finished run, resumed on other ranks."""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import ironlaw
from ironlaw.config import load_config
from ironlaw.train.parallel import job

SOURCE = Path(ironlaw.__file__).parents[1]


PLAIN = ("-m", "ironlaw")
SOAK = (str(Path(__file__).parents[3] / "benchmarks" / "soak_ranks.py"),)  # the same, of which a rank kills itself


def torchrun(
    ranks: int, *arguments: str | Path, restarts: int = 0, program: tuple[str, ...] = PLAIN
) -> list[str]:  # fmt: skip
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)]
    return [*launcher, "--max-restarts", str(restarts), *program, *map(str, arguments)]


def environment() -> dict[str, str]:
    return os.environ | {"PYTHONPATH": str(SOURCE), "NO_COLOR": "1", "OMP_NUM_THREADS": "1"}


def by_torchrun(folder: Path, ranks: int, *arguments: str | Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        torchrun(ranks, *arguments), cwd=folder, env=environment(), capture_output=True, text=True, timeout=250,
        check=False,
    )  # fmt: skip


def losses(run: Path, name: str = "loss") -> list[Any]:
    return [json.loads(line).get(name) for line in (run / "metrics.jsonl").read_text(encoding="utf-8").splitlines()]


MODEL = {"dropout": 0.1, "layers": 2, "heads": 4}


def test_two_ranks_one_of_which_is_killed_train_like_one(
    tiny_file: Callable[..., Path], ironlaw_here: Callable[..., Any], tmp_path: Path, user_cache: Path
) -> None:
    """From the command line, under torchrun, which starts the job again after one of the ranks has killed itself.

    The layout of the flag is theirs, not that of the config.
    """
    config = tiny_file(MODEL, layout={"pp": 2}, train={"micro_batch": 2})
    command = torchrun(2, "train", config, "--out", "two", "--layout", "tp=2 sp=1", "--json", restarts=1, program=SOAK)
    soak = {"IRONLAW_SOAK": json.dumps([str(tmp_path / "kills"), 1, 0])}  # log, kills, seed
    done = subprocess.run(
        command, cwd=tmp_path, env=environment() | soak, capture_output=True, text=True, timeout=250, check=False
    )
    assert done.returncode == 0, done.stderr[-3000:]
    layout = load_config(tmp_path / "two").layout
    assert layout is not None and (layout.pp, layout.tp, layout.sp) == (1, 2, True)
    assert json.loads(done.stdout)["steps"] == 12
    sessions = (tmp_path / "two" / "sessions.jsonl").read_text(encoding="utf-8")
    assert sessions.count('"setting"') == 2 and (tmp_path / "kills").read_text(encoding="utf-8").count("\n") == 1
    assert ironlaw_here("train", config, "--layout", "dp=1", "--out", tmp_path / "one")[0] == 0
    one, two = losses(tmp_path / "one"), losses(tmp_path / "two")
    assert two == pytest.approx(one, rel=1e-5)
    assert len(one) == 12


def test_ranks_go_on_from_one_process_and_start_from_its_weights(
    tiny_file: Callable[..., Path], ironlaw_here: Callable[..., Any], tmp_path: Path, on_ranks: Callable[..., Any],
    known_links: None,
) -> None:  # fmt: skip
    config = tiny_file(
        MODEL, layout={}, train={"micro_batch": 2, "average_decay": 0.8}, evaluation={"every": 4},
        schedule={"kind": "constant", "warmup_steps": 2},
    )  # fmt: skip

    def on_two(out: Path, resume: bool = False, **settings: Any) -> None:
        settings = {key.replace("__", "."): str(value) for key, value in settings.items()}
        case = {"task": "run", "config": str(config), "set": settings, "out": str(out), "resume": resume}
        for rank in on_ranks(2, [case])[0]:
            assert "stopped" not in rank, rank["stopped"]
            assert rank["slow"] == []  # layers made by dividing multiply as the others do

    assert ironlaw_here("train", config, "--out", tmp_path / "one")[0] == 0
    # The same run, its second half on two ranks, and its last steps in one process again.
    run = ("train", config, "--out", tmp_path / "run")
    assert ironlaw_here(*run, "--set", "train.steps=6")[0] == 0
    on_two(tmp_path / "run", resume=True, layout__tp=2, train__steps=9)
    assert ironlaw_here(*run, "--resume")[0] == 0
    for name in ("validation_loss", "average_validation_loss"):  # on two ranks after step 8, in one process after 12
        found, expected = losses(tmp_path / "run", name), losses(tmp_path / "one", name)
        assert (found[7], found[11]) == pytest.approx((expected[7], expected[11]), rel=1e-5)
        assert expected[7] != losses(tmp_path / "one")[7]
    assert losses(tmp_path / "run") == pytest.approx(losses(tmp_path / "one"), rel=1e-5)
    # Runs of their own from the first one's weights; from those of many ranks, and from a Hugging Face model.
    fine = ("train", config, "--set", "train.steps=3")
    for source, layout in (("one", {"layout__zero": 3}), ("ranks", {"layout__pp": 2}), ("exported", {"layout__tp": 2})):
        from_there = tmp_path / source
        if source == "ranks":
            on_two(from_there, layout__zero=2)
        if source == "exported":
            assert ironlaw_here("export", tmp_path / "one", from_there)[0] == 0
        alone = tmp_path / f"from_{source}"
        assert ironlaw_here(*fine, "--set", f"train.start_from={from_there}", "--out", alone)[0] == 0
        two = tmp_path / f"two_from_{source}"
        on_two(two, train__start_from=from_there, train__steps=3, **layout)
        assert losses(two) == pytest.approx(losses(alone), rel=1e-5)
        assert losses(alone)[0] < losses(tmp_path / "one")[0] - 0.01  # not from scratch
    # Two optimizers in one, which ranks load as one process does: with the settings of their own session.
    muon = ("train", config, "--set", "optimizer.name=muon", "--set", "train.steps=3", "--out")
    for out in ("muon", "two_muon"):
        assert ironlaw_here(*muon, tmp_path / out)[0] == 0
    assert ironlaw_here(*muon, tmp_path / "muon", "--resume", "--set", "train.steps=8", "--set",
                        "optimizer.weight_decay=9.0")[0] == 0  # fmt: skip
    on_two(tmp_path / "two_muon", True, optimizer__name="muon", optimizer__weight_decay=9.0, train__steps=8)
    assert losses(tmp_path / "two_muon") == pytest.approx(losses(tmp_path / "muon"), rel=1e-4)


@pytest.mark.long
def test_a_run_goes_on_with_another_layout_and_alone(
    tiny_file: Callable[..., Path], ironlaw_process: Callable[..., Any], tmp_path: Path, user_cache: Path
) -> None:
    config = tiny_file(MODEL, layout={}, train={"micro_batch": 1})
    assert ironlaw_process("train", config, "--out", tmp_path / "one").returncode == 0
    out = ("--out", "run", "--resume")
    for steps, ranks, layout in ((4, 4, "layout.tp=2"), (8, 2, "layout.pp=2"), (10, 2, "layout.zero=3")):
        done = by_torchrun(
            tmp_path, ranks, "train", config, *out, "--set", f"train.steps={steps}", "--set", layout,
            "--set", "schedule.warmup_steps=4",
        )  # fmt: skip
        assert done.returncode == 0, done.stderr[-3000:]
    last = ironlaw_process("train", config, "--out", tmp_path / "run", "--resume", "--set", "schedule.warmup_steps=4")
    assert last.returncode == 0, last.stderr
    assert (
        ironlaw_process("train", config, "--out", tmp_path / "plain", "--set", "schedule.warmup_steps=4").returncode
        == 0
    )
    assert losses(tmp_path / "run") == pytest.approx(losses(tmp_path / "plain"), rel=1e-5)


def test_what_differs_between_ranks_is_refused_in_one_line() -> None:
    same = {
        "torch": "2.13.0", "ironlaw": "0.1", "python": "3.11", "config": "abc", "devices": "cpu", "host": "node0",
        "clock_seconds": 1000.0,
    }  # fmt: skip
    assert job.first_difference([same, same | {"clock_seconds": 1003.0}]) is None
    other = same | {"host": "node1"}
    for change, words in (
        ({"torch": "2.11.0"}, "rank 1 on node1 has PyTorch 2.11.0, rank 0 has 2.13.0"),
        ({"config": "abd"}, "rank 1 on node1 has another config than rank 0"),
        ({"clock_seconds": 1090.0}, "rank 1 on node1 has a clock 90 s ahead of rank 0's on node0"),
        ({"clock_seconds": 900.0}, "a clock 100 s behind"),
    ):
        found = job.first_difference([same, other | change])
        assert found is not None and words in found and "\n" not in found


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="states of threads are read from /proc")
def test_a_rank_leaves_when_gloos_threads_rest() -> None:
    named, ended = threading.Event(), threading.Event()

    def work() -> None:
        with open(f"/proc/self/task/{threading.get_native_id()}/comm", "w", encoding="utf-8") as name:
            name.write(job.GLOO_THREADS)
        named.set()
        hashlib.pbkdf2_hmac("sha256", b"", b"", 1_000_000)  # without the interpreter's lock
        ended.set()

    thread = threading.Thread(target=work)
    thread.start()
    named.wait()
    job.wait_for_gloo()
    assert ended.is_set()
    thread.join()
