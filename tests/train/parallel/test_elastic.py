"""A job that loses ranks goes on by itself: as many as before, fewer, or a line that says why it cannot."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch.distributed as dist

import ironlaw
from ironlaw.config import RunConfig, build_config
from ironlaw.errors import UserError
from ironlaw.plan.recipe import micro_batch_of
from ironlaw.train.parallel.job import ROUND, Rendezvous, meet
from ironlaw.train.parallel.ranks import check, usable

SOURCE = Path(ironlaw.__file__).parents[1]
MODEL = {"name": "m", "layers": 4, "hidden": 32, "heads": 4, "vocab": 300, "context": 16}


# -- meeting -----------------------------------------------------------------------------------------------------


def met(store: dist.Store, size: int, timeout_seconds: float = 200.0) -> list[Rendezvous]:
    """What `size` ranks find that come in the reverse order, so that the others look before rank 0 is there."""
    found: dict[int, Any] = {}

    def one(rank: int) -> None:
        try:
            found[rank] = meet(store.clone(), rank, size, timeout_seconds)
        except UserError as problem:
            found[rank] = problem

    threads = [threading.Thread(target=one, args=(rank,)) for rank in reversed(range(size))]
    for thread in threads:
        thread.start()
        time.sleep(0.05)
    for thread in threads:
        thread.join()
    return [found[rank] for rank in range(size)]


@pytest.fixture
def store() -> dist.Store:
    return dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)


def test_ranks_meet_only_those_of_their_own_start(store: dist.Store) -> None:
    """Whatever earlier starts have left: an address under a key of theirs must not be read by the next ones."""
    for number, size in enumerate((3, 3, 2, 4, 4)):
        found = met(store, size)
        assert all(isinstance(meeting, Rendezvous) for meeting in found), found
        assert {meeting.restarted for meeting in found} == {number > 0}
        assert not found[-1].store.check(["address"])
        found[0].store.set("address", str(number))
        assert {meeting.store.get("address") for meeting in found} == {str(number).encode()}


def test_ranks_killed_while_they_meet_are_in_nobodys_way(store: dist.Store) -> None:
    store.set(ROUND, "abc/3")  # a rank 0 that died before the others had come
    store.set("abc/3/1", "word")
    assert all(isinstance(meeting, Rendezvous) for meeting in met(store, 3))
    (alone,) = [meet(store.clone(), 0, 1, 200.0)]
    assert alone.size == 1
    with pytest.raises(UserError, match="not all ranks came within the time allowed"):
        meet(store.clone(), 0, 2, 0.2)


# -- what is left of the ranks -----------------------------------------------------------------------------------


def config(layout: dict[str, Any] | None, batch: int = 8, micro_batch: int = 2) -> RunConfig:
    train = {"global_batch": batch, "micro_batch": micro_batch, "precision": "fp32"}
    return build_config({"model": MODEL, "train": train} | ({} if layout is None else {"layout": layout}))


@pytest.mark.parametrize(
    ("layout", "batch", "ranks", "expected"),
    [
        ({}, 8, 2, 2),
        ({}, 12, 3, 3),
        ({}, 8, 3, 2),  # eight sequences cannot be shared by three
        ({"zero": 3}, 8, 7, 4),
        ({"tp": 2}, 8, 3, 2),
        ({"pp": 2, "tp": 2}, 8, 7, 4),
        (None, 8, 1, 1),
    ],
)
def test_a_free_dp_is_worked_out_anew(layout: Any, batch: int, ranks: int, expected: int) -> None:
    settings = config(layout, batch)
    assert usable(settings, ranks) == expected
    assert check(settings, expected).dp is not None


def test_what_no_longer_divides_is_refused_in_one_line() -> None:
    for layout, ranks in (({"tp": 4}, 3), ({"dp": 4}, 3), ({"dp": 2, "tp": 2}, 2)):
        with pytest.raises(UserError, match=rf"does not make {ranks} ranks: start (a multiple of )?4") as error:
            usable(config(layout), ranks)
        assert "\n" not in str(error.value)


def test_the_micro_batch_follows_the_share() -> None:
    assert [micro_batch_of(config({}, 12, 4), share) for share in (12, 6, 4, 3, 2)] == [4, 3, 4, 3, 2]


# -- a job on two nodes ------------------------------------------------------------------------------------------


class Nodes:
    """torchrun once per node, all on this machine; they meet in a store of the test's own."""

    def __init__(self, folder: Path, config: Path, per_node: int, layout: tuple[str, ...]) -> None:
        self.folder = folder
        self.store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False, timeout=timedelta(seconds=5))
        self.command = [
            sys.executable, "-m", "torch.distributed.run", "--nnodes", "1:2", "--nproc-per-node", str(per_node),
            "--rdzv-backend", "c10d", "--rdzv-endpoint", f"127.0.0.1:{self.store.port}", "--rdzv-id", "job",
            "--rdzv-conf", "is_host=0,last_call_timeout=15,keep_alive_interval=1", "--max-restarts", "9",
            "-m", "ironlaw", "train", str(config), "--out", "run", "--resume", *layout,
        ]  # fmt: skip
        self.agents: list[subprocess.Popen[bytes]] = []
        self.metrics = folder / "run" / "metrics.jsonl"

    def start(self) -> None:
        environment = os.environ | {
            "PYTHONPATH": str(SOURCE), "NO_COLOR": "1", "OMP_NUM_THREADS": "1",
            "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1",
        }  # fmt: skip
        with (self.folder / f"node{len(self.agents)}.log").open("wb") as log:
            self.agents.append(subprocess.Popen(self.command, cwd=self.folder, env=environment, stdout=log, stderr=log))

    def ranks(self, node: int) -> list[psutil.Process]:
        return psutil.Process(self.agents[node].pid).children()

    def lose(self, node: int) -> None:
        processes = [psutil.Process(self.agents[node].pid), *self.ranks(node)]
        for process in processes:
            with contextlib.suppress(psutil.Error):
                process.kill()
        self.agents[node].wait()

    def steps(self) -> int:
        return self.metrics.read_text(encoding="utf-8").count("\n") if self.metrics.is_file() else 0

    def wait_for_step(self, step: int, last: int) -> None:
        """Until the run is between the two, in the session under way."""
        while not step <= self.steps() < last:
            assert self.agents[0].poll() is None, self.log(0)
            time.sleep(0.02)

    def log(self, node: int) -> str:
        return (self.folder / f"node{node}.log").read_text(encoding="utf-8", errors="replace")

    def sessions(self) -> list[dict[str, Any]]:
        lines = (self.folder / "run" / "sessions.jsonl").read_text(encoding="utf-8").splitlines()
        return [entry for line in lines if "setting" in (entry := json.loads(line))]

    def end(self) -> None:
        for node, agent in enumerate(self.agents):
            if agent.poll() is None:
                self.lose(node)


@pytest.fixture
def nodes(tmp_path: Path) -> Iterator[Callable[..., Nodes]]:
    made: list[Nodes] = []

    def make(*arguments: Any) -> Nodes:
        made.append(Nodes(tmp_path, *arguments))
        return made[-1]

    yield make
    for each in made:
        each.end()


@pytest.mark.long
@pytest.mark.timeout(900)
def test_a_killed_rank_and_then_a_lost_node(
    tiny_file: Callable[..., Path], ironlaw_process: Callable[..., Any], nodes: Callable[..., Nodes], tmp_path: Path,
) -> None:  # fmt: skip
    """First all four ranks again, of which the nodes have counted different numbers of restarts; then the two left."""
    steps = 150
    settings = tiny_file(
        {"layers": 2, "heads": 4, "dropout": 0.1}, layout={"zero": 2}, train={"micro_batch": 2, "steps": steps},
        checkpoint={"every": 10}, evaluation={"every": 0},
    )  # fmt: skip
    assert ironlaw_process("train", settings, "--out", tmp_path / "one").returncode == 0
    job = nodes(settings, 2, ())
    job.start()
    job.start()
    job.wait_for_step(15, steps)
    os.kill(job.ranks(1)[0].pid, signal.SIGKILL)
    while len(job.sessions()) < 2:
        time.sleep(0.1)
    job.wait_for_step(35, steps)
    job.lose(1)
    assert job.agents[0].wait(timeout=600) == 0, job.log(0)[-3000:]
    assert [session["setting"]["layout"].split()[0] for session in job.sessions()] == ["dp=4", "dp=4", "dp=2"]
    assert "rank 0 has lost the connection to another rank" in job.log(0)
    one, run = [
        [json.loads(line) for line in (tmp_path / name / "metrics.jsonl").read_text(encoding="utf-8").splitlines()]
        for name in ("one", "run")
    ]
    assert [entry["batch"] for entry in run] == [entry["batch"] for entry in one]
    assert [entry["loss"] for entry in run] == pytest.approx([entry["loss"] for entry in one], rel=1e-4)


@pytest.mark.long
@pytest.mark.timeout(900)
@pytest.mark.parametrize(("layout", "waits"), [("layout.zero=3", "over shard"), ("layout.pp=2", "")])
def test_a_stopped_rank_is_named_and_the_job_goes_on_without_a_hand(
    tiny_file: Callable[..., Path], nodes: Callable[..., Nodes], tmp_path: Path, user_cache: Path, layout: str,
    waits: str,
) -> None:  # fmt: skip
    """Frozen by SIGSTOP, as by a dead disk or driver: it can neither answer nor end itself."""
    steps = 100
    settings = tiny_file(
        {"layers": 2, "heads": 4}, layout={}, train={"micro_batch": 2, "steps": steps}, checkpoint={"every": 10},
        evaluation={"every": 0}, recovery={"collective_seconds": 8.0},
    )  # fmt: skip
    job = nodes(settings, 2, ("--set", layout))
    job.start()
    job.wait_for_step(20, steps)
    stopped = next(process for process in job.ranks(0) if process.environ()["RANK"] == "1")
    os.kill(stopped.pid, signal.SIGSTOP)
    assert job.agents[0].wait(timeout=600) == 0, job.log(0)[-3000:]
    events = [json.loads(line) for line in (tmp_path / "run" / "events.jsonl").read_text("utf-8").splitlines()]
    (line,) = [event["report"] for event in events if event["event"] == "hang"]
    assert f"ironlaw: {line}" in job.log(0)
    first, _, rest = line.removeprefix("nothing has moved for ").partition("; ")
    assert "rank 1 on " in first and "is at step " in first and "not heard of for " in first
    assert rest.startswith("rank 0 waits in ") and waits in rest
    assert len(job.sessions()) == 2
