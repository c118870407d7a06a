"""Kill ranks of one run at random moments; torchrun starts the job again each time, and it ends as if undisturbed.

    python benchmarks/soak_ranks.py --kills 30 --out benchmarks/results/soak_ranks.md       # `make soak-ranks`

One run on 4 gloo ranks under `torchrun --max-restarts`, nothing else. In every start of the job one rank, drawn by
chance, kills itself (SIGKILL): by the clock within 8 steps, some milliseconds after a checkpoint began to be written,
or before or after one of the calls that change the disk. Batches are logged with their numbers; losses and gradient
norms must be those of the same job that nobody killed, to the bit: gloo adds up in a fixed order.
"""

from __future__ import annotations

import argparse
import collections
import datetime
import json
import os
import platform
import random
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

RANKS, STEPS = 4, 240
MOST_STEPS = 8  # of one start: the run must not end before its kills
BENCHMARKS = Path(__file__).parent
LAYOUT = {"zero": 2}


def worker() -> None:
    """One rank: `IRONLAW_SOAK` names the log of kills, how many there shall be, and the seed."""
    sys.path.insert(0, str(BENCHMARKS))
    log, kills, seed = json.loads(os.environ["IRONLAW_SOAK"])
    done = Path(log).read_text(encoding="utf-8").count("\n") if Path(log).is_file() else 0
    chance = random.Random(f"{seed} {done}")
    mine = chance.randrange(int(os.environ["WORLD_SIZE"])) == int(os.environ["RANK"])
    if done < kills and mine:
        _arm(draw(chance), Path(log))
    from ironlaw.cli.main import main

    sys.argv[0] = "ironlaw"
    main()


def draw(chance: random.Random) -> dict[str, Any]:
    """Half of the kills are aimed at the writing of a checkpoint."""
    kind = chance.choice(("clock", "call", "checkpoint", "checkpoint"))
    if kind == "clock":
        return {"kind": kind, "step": chance.randint(1, MOST_STEPS), "seconds": chance.uniform(0, 0.05)}
    if kind == "call":
        return {"kind": kind, "number": chance.randint(1, 40), "after": chance.random() < 0.5}
    return {"kind": kind, "write": chance.randint(1, 2), "seconds": chance.choice((0.0, 0.01, 0.05)) * chance.random()}


def _arm(kill: dict[str, Any], log: Path) -> None:
    import soak

    from ironlaw.train.checkpointer import Checkpointer
    from ironlaw.train.loop import Trainer

    def die() -> None:
        with log.open("a", encoding="utf-8") as file:
            file.write(json.dumps(kill | {"rank": int(os.environ["RANK"])}) + "\n")
            file.flush()
        os.kill(os.getpid(), 9)

    def die_in(seconds: float) -> None:
        threading.Thread(target=lambda: (time.sleep(seconds), die()), daemon=True).start()

    if kill["kind"] == "checkpoint":
        plain, writes = Checkpointer._write, iter(range(1, 10**6))

        def write(self: Checkpointer, *taken: Any) -> None:
            if next(writes) == kill["write"]:
                die_in(kill["seconds"])
            plain(self, *taken)

        Checkpointer._write = write  # type: ignore[method-assign]
        return
    if kill["kind"] == "call":
        train = Trainer.train

        def armed(self: Trainer) -> Any:
            calls = iter(range(1, 10**9))
            for owner, name in soak.CALLS:
                setattr(owner, name, soak._counted(getattr(owner, name), calls, kill, die))
            return train(self)

        Trainer.train = armed  # type: ignore[method-assign]
    step, steps = Trainer._timed_step, iter(range(1, 10**6))

    def timed(self: Trainer, *arguments: Any, **named: Any) -> Any:
        # All ranks but the first write little: what has made too few calls by then goes by the clock.
        if next(steps) == kill.get("step", MOST_STEPS):
            die_in(kill.get("seconds", 0.0))
        return step(self, *arguments, **named)

    Trainer._timed_step = timed  # type: ignore[method-assign]


def soak_ranks(
    folder: Path, kills: int, seed: int = 0, steps: int = STEPS, ranks: int = RANKS, limit_seconds: float = float("inf")
) -> dict[str, Any]:
    """The undisturbed job, then the disturbed one, both in `folder`: counts, and every difference.

    TimeoutError after `limit_seconds`: another call goes on in the same folder.
    """
    import soak

    until = time.monotonic() + limit_seconds
    if not (folder / "corpus").is_dir():
        soak.write_corpus(folder / "corpus")
    config = soak.soak_config(
        folder / "corpus", folder / "data",
        train={"steps": steps, "micro_batch": 2, "profile_steps": 0},
        checkpoint={"every": 3, "keep": 2, "keep_best": 0}, evaluation={"every": 0}, tracking={"batch_digests": True},
    )  # fmt: skip
    file = folder / "config.toml"
    file.write_text(config.to_toml(), encoding="utf-8")
    whole = _job(folder, file, "whole", 0, seed, ranks, until)
    killed = _job(folder, file, "killed", kills, seed, ranks, until)
    counts: collections.Counter[str] = collections.Counter()
    log = folder / "killed.kills"
    for line in log.read_text(encoding="utf-8").splitlines() if log.is_file() else []:
        kill = json.loads(line)
        counts["kills"] += 1
        counts[f"killed by {kill['kind']}"] += 1
        counts[f"rank {kill['rank']} killed"] += 1
    wrong = [f"the {name} job ended with {code}" for name, code in (("whole", whole), ("killed", killed)) if code]
    expected, found = _lines(folder / "whole"), _lines(folder / "killed")
    wrong += [f"step {a[0]}: {a} became {b}" for a, b in zip(expected, found, strict=False) if a != b][:5]
    if len(expected) != len(found):
        wrong.append(f"{len(found)} steps instead of {len(expected)}")
    sessions = (folder / "killed" / "sessions.jsonl").read_text(encoding="utf-8")
    starts = [json.loads(line) for line in sessions.splitlines() if '"setting"' in line]
    counts["sessions"] = len(starts)
    torn = [path.name for path in (folder / "killed").rglob(".*") if path.name.endswith(".partial")]
    wrong += [f"left behind: {name}" for name in torn]
    return {
        "counts": dict(counts), "wrong": wrong, "steps": len(found), "ranks": ranks,
        "sittings": (folder / "killed.sittings").read_text(encoding="utf-8").count("\n"),
    }  # fmt: skip


def _job(folder: Path, config: Path, name: str, kills: int, seed: int, ranks: int, until: float) -> int:
    """Until it ends; at `until` it is told to stop, as by a scheduler whose time is up."""
    done = folder / f"{name}.done"
    if done.is_file():
        return int(done.read_text(encoding="utf-8"))
    command = [
        sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks),
        "--max-restarts", str(2 * kills + 5), str(Path(__file__)), "train", str(config), "--out", str(folder / name),
        "--resume", *[text for key, value in LAYOUT.items() for text in ("--set", f"layout.{key}={value}")],
    ]  # fmt: skip
    environment = os.environ | {
        "IRONLAW_SOAK": json.dumps([str(folder / f"{name}.kills"), kills, seed]), "OMP_NUM_THREADS": "1",
    }  # fmt: skip
    with (folder / f"{name}.sittings").open("a", encoding="utf-8") as sittings:
        sittings.write(datetime.datetime.now().isoformat() + "\n")
    with (folder / f"{name}.log").open("ab") as log:
        job = subprocess.Popen(command, env=environment, stdout=log, stderr=log)
        try:
            code = job.wait(None if until == float("inf") else max(0.0, until - time.monotonic()))
            done.write_text(str(code), encoding="utf-8")
            return code
        except subprocess.TimeoutExpired:
            job.terminate()
            job.wait()
            raise TimeoutError(f"the {name} job goes on in the next sitting") from None


def _lines(run: Path) -> list[tuple[Any, ...]]:
    kept = ("step", "batch", "batch_crc32", "loss", "grad_norm", "lr", "tokens")
    text = (run / "metrics.jsonl").read_text(encoding="utf-8")
    return [tuple(json.loads(line).get(name) for name in kept) for line in text.splitlines()]


def report(result: dict[str, Any]) -> str:
    import torch

    rows = "\n".join(f"| {name} | {count} |" for name, count in sorted(result["counts"].items()))
    wrong = "\n".join(f"- {line}" for line in result["wrong"]) or "None."
    commit = subprocess.run(
        ["git", "rev-parse", "--short", "HEAD"], cwd=BENCHMARKS, capture_output=True, text=True, check=False
    ).stdout.strip()
    machine = f"{platform.system()} on {platform.machine()}"
    return f"""# Soak: ranks killed at random moments

`make soak-ranks`, {datetime.date.today().isoformat()}, commit {commit}, Python {platform.python_version()},
PyTorch {torch.__version__}, {machine}, {result["ranks"]} gloo ranks on {os.cpu_count()} cores, fp32, ZeRO 2.
{result["sittings"]} sitting(s) of the disturbed job: where there are more, it was also stopped by SIGTERM between them.

One run of {result["steps"]} steps with a checkpoint every 3. In every start of the job one rank, drawn by chance,
kills itself with SIGKILL; torchrun starts all ranks again, which go on from the last checkpoint. Half of the kills
come within 50 ms of the moment at which a checkpoint begins to be written, a quarter before or after a call that
changes the disk, a quarter by the clock. What is compared with the undisturbed job, to the bit: loss, gradient norm,
learning rate, number of the batch and checksum of rank 0's part of it, in every step.

| what | count |
|---|---|
{rows}

## Differences

{wrong}
"""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=30)
    parser.add_argument("--steps", type=int, default=STEPS)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--folder", type=Path, help="kept, to go on after --seconds")
    parser.add_argument("--seconds", type=float, default=float("inf"), help="of this sitting")
    arguments = parser.parse_args()

    from ironlaw.machine.keep import this_machine
    from ironlaw.machine.profile import save_profile

    profile = this_machine()
    with tempfile.TemporaryDirectory() as name:
        folder = arguments.folder or Path(name)
        os.environ["XDG_CACHE_HOME"] = str(folder / "cache")  # these runs are not part of the planner's record
        save_profile(profile)
        try:
            result = soak_ranks(folder, arguments.kills, arguments.seed, arguments.steps, RANKS, arguments.seconds)
        except TimeoutError as unfinished:
            sys.exit(f"{unfinished}: run the same command again")
        if result["wrong"]:
            print((folder / "killed.log").read_text(encoding="utf-8", errors="replace")[-5000:], file=sys.stderr)
    page = report(result)
    print(page)
    if arguments.out is not None:
        arguments.out.write_text(page, encoding="utf-8")
    sys.exit(1 if result["wrong"] or result["counts"].get("kills") != arguments.kills else 0)


if __name__ == "__main__":
    sys.path.insert(0, str(BENCHMARKS))
    worker() if "IRONLAW_SOAK" in os.environ and "RANK" in os.environ else main()
