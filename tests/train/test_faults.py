"""Faults, each injected: what the run does, what it says in one line, and that it can go on."""

from __future__ import annotations

import errno
import json
import os
import subprocess
import sys
import textwrap
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from ironlaw.config import RunConfig
from ironlaw.errors import UserError
from ironlaw.train import run_directory
from ironlaw.train.faults import is_out_of_memory
from ironlaw.train.jsonl import JsonLines, read_lines
from ironlaw.train.loop import Trainer
from ironlaw.train.result import Outcome
from ironlaw.train.run_directory import locked

Config = Callable[..., RunConfig]
Train = Callable[..., Outcome]
Losses = Callable[[Path], dict[int, float]]


# -- out of memory -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("error", "expected"),
    [
        (torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB"), True),
        (MemoryError(), True),
        (OSError(errno.ENOMEM, "Cannot allocate memory"), True),
        (
            RuntimeError("[enforce fail at alloc_cpu.cpp:119] err == 0. DefaultCPUAllocator: can't allocate memory"),
            True,
        ),
        (RuntimeError("mat1 and mat2 shapes cannot be multiplied"), False),
        (OSError(errno.ENOSPC, "No space left on device"), False),
    ],
)
def test_what_is_out_of_memory(error: Exception, expected: bool) -> None:
    assert is_out_of_memory(error) is expected


@pytest.mark.parametrize("kind", [torch.OutOfMemoryError, MemoryError])
def test_out_of_memory_is_one_line_with_advice_and_the_run_goes_on(
    tiny_config: Config, train: Train, losses: Losses, undisturbed: Any, tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch, kind: type[Exception],
) -> None:  # fmt: skip
    plain = Trainer._timed_step

    def step(self: Trainer, *arguments: Any, **options: Any) -> Any:
        if self.step == 6:
            raise kind("out of memory")
        return plain(self, *arguments, **options)

    with monkeypatch.context() as patch:
        patch.setattr(Trainer, "_timed_step", step)
        with pytest.raises(UserError) as error:
            train(tiny_config(), tmp_path / "run")
    message = str(error.value)
    device = "device" if kind is torch.OutOfMemoryError else "host"
    assert message.startswith(f"the {device} is out of memory in step 7; the plan expected ")
    assert "--set train.micro_batch=4" in message and "less: " in message
    assert message.endswith("the last checkpoint is of step 4, run again with --resume")
    assert "\n" not in message
    (event,) = read_lines(tmp_path / "run" / "events.jsonl")
    assert (event["event"], event["step"]) == ("out_of_memory", 6)
    train(tiny_config(), tmp_path / "run", resume=True)
    assert losses(tmp_path / "run") == undisturbed(tiny_config())


@pytest.mark.slow
def test_a_host_that_really_has_no_more_memory(
    user_cache: Path, tiny_file: Callable[..., Path], tmp_path: Path
) -> None:
    """An address-space limit just above what the process has when training starts; its logits need 300 MB."""
    if not sys.platform.startswith("linux"):
        pytest.skip("RLIMIT_AS is enforced on Linux only")
    config = tiny_file({"context": 1024}, train={"global_batch": 256}, data={"mock": True})
    script = textwrap.dedent("""
        import resource, sys
        from pathlib import Path
        from ironlaw.cli.main import main
        from ironlaw.report.live import LiveRun

        shown = LiveRun.planned
        def planned(self, *arguments):
            shown(self, *arguments)
            pages = int(Path("/proc/self/statm").read_text().split()[0])
            limit = pages * resource.getpagesize() + 250 * 2**20
            resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
        LiveRun.planned = planned
        main()
    """)
    done = subprocess.run(
        [sys.executable, "-c", script, "train", str(config), "--out", str(tmp_path / "run")],
        env=os.environ | {"OMP_NUM_THREADS": "1"}, capture_output=True, text=True, timeout=200, check=False,
    )  # fmt: skip
    assert done.returncode == 2, done.stderr
    last = done.stderr.splitlines()[-1]
    assert last.startswith("ironlaw: the host is out of memory in step 1; the plan expected "), done.stderr
    assert "train.micro_batch" in last and "no checkpoint yet" in last
    assert "Traceback" not in done.stderr


# -- a full disk under the metrics -------------------------------------------------------------------------------


class Disk:
    """`os.pwrite` on a disk with so much room."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.room = 10**9
        plain = os.pwrite

        def write(descriptor: int, data: bytes, offset: int) -> int:
            if not self.room:
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            written = plain(descriptor, data[: self.room], offset)
            self.room -= written
            return written

        monkeypatch.setattr(run_directory.os, "pwrite", write)


def test_lines_wait_for_room_and_none_is_torn(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    disk, said = Disk(monkeypatch), []
    lines = JsonLines(tmp_path / "m.jsonl", said.append)
    lines.append({"n": 0})
    disk.room = 12  # half of the next but one
    for n in range(1, 6):
        lines.append({"n": n})
        for line in (tmp_path / "m.jsonl").read_text(encoding="utf-8").splitlines():
            json.loads(line)
    assert [entry["n"] for entry in read_lines(tmp_path / "m.jsonl")] == [0, 1]
    assert len(said) == 1 and "kept in memory until there is room" in said[0]
    with pytest.raises(OSError, match="No space left"):
        lines.sync()
    disk.room = 10**9
    lines.append({"n": 6})
    lines.sync()
    lines.close()
    assert [entry["n"] for entry in read_lines(tmp_path / "m.jsonl")] == list(range(7))


def test_a_run_whose_metrics_find_no_room_for_a_while(
    tiny_config: Config, train: Train, losses: Losses, undisturbed: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No checkpoint is written either: its steps would have no line after a kill."""
    whole = undisturbed(tiny_config())
    disk, said = Disk(monkeypatch), []

    def watch(entry: dict[str, Any]) -> None:
        disk.room = 0 if 5 <= entry["step"] < 10 else 10**9

    train(tiny_config(), tmp_path / "run", watch=watch, say=said.append)
    assert losses(tmp_path / "run") == whole
    assert "kept in memory" in said[0]
    assert "the checkpoint of step 8 was not written, that of step 4 is intact" in said[1]
    assert len(said) == 2


def test_lines_are_whole_json_also_for_what_json_has_no_word(tmp_path: Path) -> None:
    lines = JsonLines(tmp_path / "m.jsonl")
    lines.append({"loss": float("nan"), "deep": [{"norm": float("inf")}]})
    lines.close()
    (entry,) = read_lines(tmp_path / "m.jsonl")
    assert entry == {"loss": "nan", "deep": [{"norm": "inf"}]}
    assert float(entry["loss"]) != float(entry["loss"])


# -- two processes on one run ------------------------------------------------------------------------------------

HOLD = """
import sys, time
from pathlib import Path
from ironlaw.train.run_directory import locked
with locked(Path(sys.argv[1])):
    print("held", flush=True)
    time.sleep(300)
"""


def hold(folder: Path) -> subprocess.Popen[str]:
    process = subprocess.Popen([sys.executable, "-c", HOLD, str(folder)], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None and process.stdout.readline() == "held\n"
    return process


def test_a_run_in_use_is_refused_until_its_process_ends_however_it_does(
    tiny_config: Config, train: Train, tmp_path: Path
) -> None:
    train(tiny_config(train={"steps": 2}), tmp_path / "run")
    process = hold(tmp_path / "run")
    try:
        with pytest.raises(UserError, match=rf"in use by process {process.pid} on .* since .*: wait .*--out") as error:
            train(tiny_config(train={"steps": 4}), tmp_path / "run", resume=True)
        assert "\n" not in str(error.value)
    finally:
        process.kill()
        process.communicate()
    assert (tmp_path / "run" / ".lock").exists()  # left by the kill, and in nobody's way
    assert train(tiny_config(train={"steps": 4}), tmp_path / "run", resume=True).step == 4
    assert not (tmp_path / "run" / ".lock").exists()


def test_the_same_process_is_refused_too(tmp_path: Path) -> None:
    with locked(tmp_path), pytest.raises(UserError, match="in use by this process"), locked(tmp_path):
        pass
    with locked(tmp_path):
        pass


def test_only_one_of_many_gets_the_lock(tmp_path: Path) -> None:
    """Locks are taken and removed all the time, and never held twice."""
    inside, most, wrong = 0, 0, []
    guard, start = threading.Lock(), threading.Barrier(4)

    def work() -> None:
        nonlocal inside, most
        start.wait()
        for _ in range(50):
            try:
                with locked(tmp_path):
                    with guard:
                        inside += 1
                        most = max(most, inside)
                    with guard:
                        inside -= 1
            except UserError:
                pass
            except Exception as error:
                wrong.append(error)

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert (most, wrong) == (1, [])
