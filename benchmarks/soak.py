"""Kill training runs at random moments, resume them, and compare with the run that nobody killed.

    python benchmarks/soak.py --runs 100 --out benchmarks/results/soak.md       # `make soak`

A run is killed (SIGKILL) one to four times: by the clock, some time after a checkpoint began to be written, or before
or after one of the calls that change the disk (open, write, sync, rename, delete), which is where a torn state would be
made. Then it is resumed to its end. Everything is logged with the batch's number and a checksum of its tokens, and must
equal the uninterrupted run to the bit: losses, gradient norms, batches, weights and optimizer state.

Each session is a fork of one process that has imported PyTorch, so that a run takes a second instead of ten.
"""

from __future__ import annotations

import argparse
import collections
import contextlib
import datetime
import json
import os
import pathlib
import platform
import random
import shutil
import signal
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")  # before torch: a fork keeps no threads, and the runs are tiny

import torch

from ironlaw.config import RunConfig, build_config
from ironlaw.machine.profile import Profile
from ironlaw.train import checkpoint, jsonl
from ironlaw.train.checkpointer import Checkpointer
from ironlaw.train.session import run_training

STEPS = 60
Kill = dict[str, Any]  # kind, and its numbers
CALLS: tuple[tuple[Any, str], ...] = (
    (os, "fsync"), (os, "ftruncate"), (jsonl.os, "pwrite"), (pathlib.Path, "rename"), (pathlib.Path, "replace"),
    (pathlib.Path, "mkdir"), (shutil, "rmtree"), (checkpoint, "save_file"), (torch, "save"),
)  # fmt: skip


def soak_config(corpus: Path, cache: Path, **sections: dict[str, Any]) -> RunConfig:
    """A model of 30 thousand parameters with everything that has a state: dropout, validation, recorded steps."""
    tables: dict[str, Any] = {
        "model": {"layers": 2, "hidden": 32, "heads": 2, "vocab": 300, "context": 16, "dropout": 0.1},
        "data": {"path": str(corpus), "validation_fraction": 0.1, "cache": str(cache), "workers": 0},
        "train": {"steps": STEPS, "global_batch": 8, "precision": "fp32", "profile_steps": 1},
        "checkpoint": {"every": 3, "keep": 2, "keep_best": 1},
        "evaluation": {"every": 3, "batches": 1},
        "tracking": {"batch_digests": True},
    }
    return build_config({name: table | sections.get(name, {}) for name, table in tables.items()})


def soak(
    config: RunConfig, profile: Profile, folder: Path, runs: int, seed: int = 0,
    progress: Callable[[str], None] = lambda line: None,
) -> dict[str, Any]:  # fmt: skip
    """Kill and resume `runs` runs in `folder`; the counts, and every difference that was found."""
    whole = folder / "whole"
    began = time.monotonic()
    code = _session(config, whole, profile, None)
    seconds = time.monotonic() - began
    assert code == 0, f"the uninterrupted run failed: {_log(whole)}"
    expected = _result(whole)
    counts: collections.Counter[str] = collections.Counter()
    wrong: list[str] = []
    for number in range(runs):
        chance = random.Random(f"{seed} {number}")
        run = folder / f"run-{number:03d}"
        planned, kills, reached = chance.randint(1, 4), [], 0
        # A session may end before its kill; a run that none has reached is finished, removed and begun again.
        while len(kills) < planned or not reached:
            if len(kills) >= planned and not reached:
                shutil.rmtree(run, ignore_errors=True)
            kill = _draw(chance, seconds)
            kills.append(kill)
            code = _session(config, run, profile, kill)
            reached += code == -signal.SIGKILL
            counts["sessions"] += 1
            if code == -signal.SIGKILL:
                counts[f"killed by {kill['kind']}"] += 1
                counts["kills"] += 1
                counts["kills that left a torn checkpoint"] += any(run.glob("checkpoints/.*.partial"))
            elif code == 0:
                counts["sessions that ended before their kill"] += 1
            else:
                wrong.append(f"run {number}: session failed with {code} after {kills}: {_log(run)}")
        if code != 0 or not run.is_dir():
            code = _session(config, run, profile, None)
            counts["sessions"] += 1
        if code != 0:
            wrong.append(f"run {number}: did not resume after {kills}: {_log(run)}")
            continue
        counts["resumed to the end"] += 1
        differences = _differences(expected, _result(run))
        wrong += [f"run {number}: {difference} after {kills}" for difference in differences]
        counts["identical to the uninterrupted run"] += not differences
        if not differences:
            shutil.rmtree(run)
        progress(f"{number + 1} of {runs}: {dict(counts)}{' WRONG ' + wrong[-1] if wrong else ''}")
    return {"runs": runs, "counts": dict(counts), "wrong": wrong, "seconds": time.monotonic() - began}


def _draw(chance: random.Random, seconds: float) -> Kill:
    """Half of the kills are aimed at the writing of a checkpoint."""
    kind = chance.choice(("clock", "call", "checkpoint", "checkpoint"))
    if kind == "clock":
        return {"kind": kind, "seconds": chance.uniform(0, seconds)}
    if kind == "call":
        return {"kind": kind, "number": chance.randint(1, 250), "after": chance.random() < 0.5}
    # Of the writes of a session one is chosen, and a moment around the milliseconds that it takes.
    return {
        "kind": kind,
        "write": chance.randint(1, 12),
        "seconds": chance.choice((0.003, 0.01, 0.03)) * chance.random(),
    }


def _session(config: RunConfig, run: Path, profile: Profile, kill: Kill | None) -> int:
    """One session in a fork; its exit code, negative for a signal."""
    child = os.fork()
    if child == 0:
        code = 1
        try:
            _silence(run)
            torch.set_num_threads(1)
            if kill is not None:
                _arm(kill)
            run_training(config, run, profile, resume=True)
            code = 0
        except BaseException:
            traceback.print_exc()
        finally:
            sys.stderr.flush()
            os._exit(code)
    _, status = os.waitpid(child, 0)
    return os.waitstatus_to_exitcode(status)


def _silence(run: Path) -> None:
    log = os.open(run.with_suffix(".log"), os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(log, 1)
    os.dup2(log, 2)


def _log(run: Path) -> str:
    lines = run.with_suffix(".log").read_text(encoding="utf-8").strip().splitlines()
    return lines[-1] if lines else "no output"


def _arm(kill: Kill) -> None:
    """Prepare this process's end."""

    def die() -> None:
        os.kill(os.getpid(), signal.SIGKILL)

    def die_in(seconds: float) -> None:
        threading.Thread(target=lambda: (time.sleep(seconds), die()), daemon=True).start()

    if kill["kind"] == "clock":
        die_in(kill["seconds"])
    elif kill["kind"] == "checkpoint":
        plain, writes = Checkpointer._write, iter(range(1, 10**6))

        def write(self: Checkpointer, *taken: Any) -> None:
            if next(writes) == kill["write"]:
                die_in(kill["seconds"])
            plain(self, *taken)

        Checkpointer._write = write  # type: ignore[method-assign]
    else:
        calls = iter(range(1, 10**9))
        for owner, name in CALLS:
            setattr(owner, name, _counted(getattr(owner, name), calls, kill, die))


def _counted(function: Any, calls: Iterator[int], kill: Kill, die: Callable[[], None]) -> Any:
    def call(*arguments: Any, **options: Any) -> Any:
        mine = next(calls) == kill["number"]
        if mine and not kill["after"]:
            die()
        result = function(*arguments, **options)
        if mine:
            die()
        return result

    return call


def _result(run: Path) -> dict[str, Any]:
    """Everything that must be equal to the bit."""
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text(encoding="utf-8").splitlines()]
    kept = ("step", "batch", "batch_crc32", "loss", "grad_norm", "lr", "tokens", "validation_loss")
    last = checkpoint.newest(run / "checkpoints")
    assert last is not None
    state = torch.load(last.path / checkpoint.STATE, weights_only=True)
    return {
        "steps": [tuple(line.get(name) for name in kept) for line in lines],
        "checkpoint": last.step,
        "weights": checkpoint.sha256(last.path / checkpoint.WEIGHTS),
        "state": _flat(state),
        "kept": [path.name for path in checkpoint.complete(run / "checkpoints")],
        "torn": [path.name for path in run.rglob(".*") if path.name.endswith(".partial")],
        "ledger": (run / "ledger.json").is_file(),
    }


def _flat(tree: Any) -> Any:
    if isinstance(tree, torch.Tensor):
        return tree.tolist()
    if isinstance(tree, dict):
        return {str(key): _flat(value) for key, value in tree.items()}
    if isinstance(tree, list | tuple):
        return [_flat(value) for value in tree]
    return tree


def _differences(expected: dict[str, Any], found: dict[str, Any]) -> list[str]:
    wrong = [name for name in expected if name != "state" and expected[name] != found[name]]
    wrong += [f"the {part} state" for part in expected["state"] if expected["state"][part] != found["state"].get(part)]
    numbers = [line[1] for line in found["steps"]]
    if len(set(numbers)) != len(numbers):
        wrong.append("a batch was trained on twice")
    if sorted(numbers) != list(range(len(numbers))):
        wrong.append("a batch was left out")
    return wrong


def write_corpus(folder: Path) -> Path:
    """Some text, the same everywhere."""
    chance = random.Random(0)
    words = ["def", "return", "value", "self", "other", "if", "else", "for", "in", "range", "x", "y", "total"]
    folder.mkdir(parents=True)
    for number in range(4):
        text = "\n".join(" ".join(chance.choices(words, k=8)) for _ in range(400))
        (folder / f"part{number}.txt").write_text(text + "\n", encoding="utf-8")
    return folder


def report(result: dict[str, Any]) -> str:
    """The result as a page."""
    counts = result["counts"]
    rows = "\n".join(f"| {name} | {count} |" for name, count in counts.items())
    wrong = "\n".join(f"- {line}" for line in result["wrong"]) or "None."
    return f"""# Soak: runs killed at random moments and resumed

`make soak`, {datetime.date.today().isoformat()}, Python {platform.python_version()}, PyTorch {torch.__version__},
{platform.system()} on {platform.machine()}, CPU, fp32, {result["seconds"]:.0f} s in all.

{result["runs"]} runs of {STEPS} steps with a checkpoint every 3, each killed with SIGKILL one to four times and then
resumed to its end. A quarter of the kills come by the clock, a quarter before or after a call that changes the disk,
half within 30 ms of the moment at which a checkpoint begins to be written. What is compared with the uninterrupted
run, to the bit: loss, gradient norm, learning rate, validation loss, number and checksum of the batch of every step;
weights, optimizer state and random generators at the end; which checkpoints are kept.

| what | count |
|---|---|
{rows}

## Differences

{wrong}
"""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=int, default=100)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path)
    arguments = parser.parse_args()

    from ironlaw.machine.keep import this_machine

    profile = this_machine()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        os.environ["XDG_CACHE_HOME"] = str(folder / "cache")  # these runs are not part of the planner's record
        config = soak_config(write_corpus(folder / "corpus"), folder / "data")
        result = soak(config, profile, folder, arguments.runs, arguments.seed, lambda line: print(line, flush=True))
    page = report(result)
    print(page)
    if arguments.out is not None:
        arguments.out.parent.mkdir(parents=True, exist_ok=True)
        arguments.out.write_text(page, encoding="utf-8")
    counts = result["counts"]
    with contextlib.suppress(KeyError):
        assert counts["resumed to the end"] == arguments.runs
    sys.exit(1 if result["wrong"] or counts.get("identical to the uninterrupted run") != arguments.runs else 0)


if __name__ == "__main__":
    main()
