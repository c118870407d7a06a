"""Many layouts in one launch: starting ranks costs seconds."""

from __future__ import annotations

import json
import os
import selectors
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

import ironlaw
from ironlaw.machine.links import KINDS, RankCosts, save_costs
from ironlaw.machine.profile import Curve, Profile

JOB = Path(__file__).with_name("job.py")
SOURCE = Path(ironlaw.__file__).parents[1]


LONGEST_SECONDS = 1800.0  # of long tests, on a machine that has other work; the default ones have pytest's limit


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        here = item.path.parent == JOB.parent
        if here and item.get_closest_marker("long") and not item.get_closest_marker("timeout"):
            item.add_marker(pytest.mark.timeout(LONGEST_SECONDS))


class Launch:
    """Ranks that wait for cases."""

    def __init__(self, size: int, folder: Path) -> None:
        self.log = folder / f"{size}.log"
        with self.log.open("wb") as log:
            self.job = subprocess.Popen(
                [sys.executable, "-W", "ignore", str(JOB), str(size)], stdin=subprocess.PIPE, stdout=subprocess.PIPE,
                stderr=log, env=os.environ | {"PYTHONPATH": str(SOURCE), "OMP_NUM_THREADS": "1"},
            )  # fmt: skip

    def run(self, folder: Path, cases: list[dict[str, Any]], timeout_seconds: float) -> list[list[Any]]:
        assert self.job.stdin is not None and self.job.stdout is not None
        home = {name: os.environ[name] for name in ("HOME", "XDG_CACHE_HOME") if name in os.environ}
        batch = {"folder": str(folder), "cases": cases, "environment": home}
        self.job.stdin.write(json.dumps(batch).encode() + b"\n")
        self.job.stdin.flush()
        with selectors.DefaultSelector() as waiting:
            waiting.register(self.job.stdout, selectors.EVENT_READ)
            answered = bool(waiting.select(timeout_seconds)) and self.job.stdout.readline() == b"done\n"
        if not answered:
            self.end()
        assert answered, self.log.read_text(encoding="utf-8", errors="replace")[-4000:] or "no answer in time"
        return [
            json.loads((folder / f"result{number}.json").read_text(encoding="utf-8")) for number in range(len(cases))
        ]

    def end(self) -> None:
        if self.job.poll() is None:
            assert self.job.stdin is not None
            self.job.stdin.close()
            try:
                self.job.wait(10)
            except subprocess.TimeoutExpired:
                main = psutil.Process(self.job.pid)
                for process in [*main.children(recursive=True), main]:
                    process.kill()
        self.job.wait()


@pytest.fixture(scope="session")
def on_ranks(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[..., list[list[Any]]]]:
    """`on_ranks(size, cases)`: per case, every rank's result. Tests of two ranks share a launch, which starts anew when
    one has failed; those that give a time limit of their own have a launch of their own too."""
    shared: list[Launch] = []

    def run(size: int, cases: list[dict[str, Any]], timeout_seconds: float | None = None) -> list[list[Any]]:
        folder = tmp_path_factory.mktemp("ranks")
        if size == 2 and timeout_seconds is None:
            if not shared or shared[-1].job.poll() is not None:
                shared.append(Launch(size, folder))
            return shared[-1].run(folder, cases, LONGEST_SECONDS)
        launch = Launch(size, folder)
        try:
            return launch.run(folder, cases, timeout_seconds or LONGEST_SECONDS)
        finally:
            launch.end()

    yield run
    for launch in shared:
        launch.end()


@pytest.fixture
def known_links(user_cache: Path, machine_profile: Profile) -> None:
    """What ranks cost each other on this user's machine is known: measuring it takes ten seconds."""
    curve = Curve((256.0, 2.0**24), (1e-4, 1e-2))
    slower = {"compute": 1.9, "memory": 1.5}
    save_costs(RankCosts(machine_profile.machine, "today", 2, dict.fromkeys(KINDS, curve), slower, 1e-4, 1e-4, 1e-4))
