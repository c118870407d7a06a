"""What a container allows, as its control group says it."""

from __future__ import annotations

import os
import time
from pathlib import Path

import psutil
import pytest

from ironlaw import cores
from ironlaw.machine import host

CORES = len(os.sched_getaffinity(0))


@pytest.fixture
def group(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder of this process's group, two below the top."""
    own = tmp_path / "groups" / "slice" / "job"
    own.mkdir(parents=True)
    (tmp_path / "own").write_text("1:name=systemd:/other\n0::/slice/job\n", encoding="ascii")
    monkeypatch.setattr(cores, "GROUPS", tmp_path / "groups")
    monkeypatch.setattr(cores, "OWN_GROUP", tmp_path / "own")
    return own


@pytest.mark.parametrize(("quota", "usable"), [("max", CORES), ("100000", 1), ("50000", 1), ("99999999", CORES)])
def test_threads_are_those_that_a_quota_pays_for(
    group: Path, quota: str, usable: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    (group.parent / "cpu.max").write_text(f"{quota} 100000\n", encoding="ascii")  # of the group above
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    assert cores.usable_cores() == cores.usable_threads() == usable


def test_memory_is_what_the_group_has_left(group: Path) -> None:
    total = psutil.virtual_memory().total
    assert host.memory_bytes() == total
    (group / "memory.max").write_text("max\n", encoding="ascii")
    (group / "memory.current").write_text("100\n", encoding="ascii")
    assert host.memory_bytes() == total
    (group.parent / "memory.max").write_text(f"{2**28}\n", encoding="ascii")
    (group.parent / "memory.current").write_text(f"{2**27}\n", encoding="ascii")
    assert host.memory_bytes() == 2**28 and host.available_bytes() == 2**28 - 2**27


def test_without_control_groups_the_machine_counts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cores, "GROUPS", tmp_path / "none")
    monkeypatch.setattr(cores, "OWN_GROUP", tmp_path / "none")
    assert cores.usable_cores() == CORES and host.memory_bytes() == psutil.virtual_memory().total


@pytest.mark.parametrize("sleeps", [False, True])
def test_a_thread_waits_for_a_core_whenever_it_neither_computes_nor_sleeps(sleeps: bool) -> None:
    clock = host.ThreadClock()
    began, _, before = clock.read()
    start = time.thread_time()
    if sleeps:
        time.sleep(0.03)
    while time.thread_time() - start < 0.01:
        pass
    ended, computed, after = clock.read()
    idle, waited = ended - began - (computed - start), after - before
    assert waited < idle - 0.02 if sleeps else waited == pytest.approx(idle, abs=1e-3)
