"""A job of many ranks for `ironlaw train`: join, check that all ranks agree, train, leave. It is planned on all ranks,
steps on a layout and watches the ranks.

Before the first step ranks compare what they run. A difference is refused with one line that names the rank.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import platform
import socket
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from ironlaw.config import LayoutConfig, RunConfig
from ironlaw.cores import torchrun_integer
from ironlaw.errors import UserError
from ironlaw.machine.profile import Profile
from ironlaw.package import __version__
from ironlaw.train.history import write_event
from ironlaw.train.mesh import Result
from ironlaw.train.parallel.observer import RankObserver
from ironlaw.train.parallel.planning import plan_job
from ironlaw.train.parallel.ranks import Ranks, check, form_group, on_rank_0, planned_layout, sites_of, start, usable
from ironlaw.train.parallel.rendezvous import FINISHED, Rendezvous, join, stand_by
from ironlaw.train.parallel.step import LayoutStep
from ironlaw.train.parallel.watcher import Note, Watcher
from ironlaw.train.result import Outcome
from ironlaw.train.run_directory import RunDirectory
from ironlaw.train.session import run_training

CLOCK_SECONDS = 5.0
"""With a larger difference between clocks, checkpoints and logs of one job contradict each other."""

WORDS = {
    "torch": "PyTorch {theirs}, rank 0 has {ours}: install the same on every node",
    "ironlaw": "Ironlaw {theirs}, rank 0 has {ours}: install the same on every node",
    "python": "Python {theirs}, rank 0 has {ours}: use the same on every node",
    "config": "another config than rank 0: start every node with the same file and the same --set",
    "devices": "{theirs} as devices, rank 0 has {ours}: give every node the same kind",
}


def rank_facts(config: RunConfig) -> dict[str, Any]:
    """Return what must agree before the first step, and this rank's clock, read when all ranks are here."""
    dist.barrier()
    return {
        "torch": torch.__version__,
        "ironlaw": __version__,
        "python": ".".join(platform.python_version_tuple()[:2]),
        "config": hashlib.sha256(config.to_toml().encode()).hexdigest(),
        "devices": torch.cuda.get_device_name() if torch.cuda.is_available() else "cpu",
        "host": socket.gethostname(),
        "clock_seconds": time.time(),
    }


def first_difference(by_rank: list[dict[str, Any]]) -> str | None:
    """Return a line on the first difference from rank 0, or None."""
    first = by_rank[0]
    for rank, theirs in enumerate(by_rank):
        who = f"rank {rank} on {theirs['host']} has"
        for name, words in WORDS.items():
            if theirs[name] != first[name]:
                return f"{who} {words.format(theirs=theirs[name], ours=first[name])}"
        apart = theirs["clock_seconds"] - first["clock_seconds"]
        if abs(apart) > CLOCK_SECONDS:
            return (
                f"{who} a clock {abs(apart):.0f} s {'ahead of' if apart > 0 else 'behind'} rank 0's on "
                f"{first['host']}: synchronise the clocks (chrony, ntpd) and start again"
            )
    return None


def check_alike(ranks: Ranks, mine: dict[str, Any]) -> None:
    """If ranks differ, raise UserError on rank 0 and exit silently on the others."""
    by_rank = ranks.gather(mine)

    def refuse() -> None:
        if (found := first_difference(by_rank)) is not None:
            raise UserError(found)

    ranks.on_rank_0(refuse)


LOST = ("Connection closed by peer", "Connection reset by peer", "Broken pipe")  # in gloo's messages
SPARE_SECONDS = 60.0  # by which PyTorch's timeout is later than the watcher's, whose report is more detailed


def train_on_ranks(
    config: RunConfig, ranks: Ranks, store: dist.Store, out: Path, profile: Profile,
    end: Callable[[int], Any] = os._exit, **named: Any,
) -> Outcome:  # fmt: skip
    """Train on every rank. `store` is exclusive to these ranks; `end` ends a rank after a hang."""

    def observer(run: RunDirectory) -> RankObserver:
        watcher = Watcher(ranks, store, config.recovery.collective_seconds, partial(_hung, run), end)
        return RankObserver(ranks, config, watcher)

    return run_training(config, out, profile, ranks, make_plan=plan_job, step=LayoutStep, observer=observer, **named)


def _hung(run: RunDirectory, report: str, notes: list[Note]) -> None:
    """Report a hang, on the rank that found it, since the others may be unable to."""
    print(f"ironlaw: {report}", file=sys.stderr, flush=True)
    write_event(run, "hang", report=report, ranks=[asdict(note) for note in notes])


@dataclass
class RankJob:
    config: RunConfig
    ranks: Ranks
    rendezvous: Rendezvous

    @property
    def title(self) -> str:
        """Description of the job for the console."""
        left = self.rendezvous.size - self.ranks.size
        layout = planned_layout(self.config, self.ranks.config)
        return f"{self.ranks.size} ranks: {layout}" + (f" ({left} more stand by)" if left else "")

    def train(self, out: Path, profile: Profile, **named: Any) -> Outcome:
        return train_on_ranks(self.config, self.ranks, self.rendezvous.store, out, profile, **named)


Choose = Callable[[RunConfig, int], RunConfig]  # the layout of so many ranks


def _chosen(choose: Choose, written: RunConfig, plain: RunConfig, size: int) -> RunConfig:
    """Where no layout runs or fits, what stands against the `plain` one comes first: it may be no matter of layouts."""
    try:
        return choose(written, size)
    except UserError:
        check(plain, size)
        raise


STATE_BYTES = 16  # per parameter in fp32 with AdamW: weight, gradient, two moments


def default_layout(config: RunConfig, size: int, memory_bytes: float) -> LayoutConfig:
    """Return the layout if none is given: replicas, or full sharding if the state exceeds half of a rank's memory."""
    held = STATE_BYTES * config.model.parameters
    here = memory_bytes / torchrun_integer("LOCAL_WORLD_SIZE")
    return LayoutConfig(zero=0 if held < here / 2 else 3)


@contextlib.contextmanager
def job(
    config: RunConfig, memory_bytes: float, resume: bool = False,
    choose: Choose | None = None,
) -> Iterator[RankJob]:  # fmt: skip
    """Join the process group. If the config has no layout, rank 0 calls `choose(config, ranks)`; without `choose`, the
    `memory_bytes` of this machine decide.

    A resumed run may use fewer ranks than torchrun has started, provided that torchrun may also restart it.
    """
    size = torchrun_integer("WORLD_SIZE")
    written = config
    planned = config.layout is None and choose is not None and not torch.cuda.is_available()
    if config.layout is None:
        config = config.model_copy(update={"layout": default_layout(config, size, memory_bytes)})
    elastic = torchrun_integer("TORCHELASTIC_MAX_RESTARTS", 0) > 0
    if not elastic and not planned:  # before ranks wait for each other
        _quietly(lambda: check(config, size))
    rendezvous = join()
    fewer = elastic and (resume or rendezvous.restarted)
    used = _quietly(lambda: usable(config, size)) if fewer else size
    if rendezvous.rank >= used:
        stand_by(rendezvous)
        raise SystemExit(0)
    try:
        form_group(rendezvous, used, config.recovery.collective_seconds + SPARE_SECONDS)
        if planned and choose is not None:
            config = on_rank_0(partial(_chosen, choose, written, config, used))
        layout = on_rank_0(partial(check, config, used))
        ranks = start(layout, sites_of(config, layout))
        check_alike(ranks, rank_facts(config))
        yield RankJob(config, ranks, rendezvous)
        if ranks.is_rank_0:
            rendezvous.store.set(FINISHED, "")
    except RuntimeError as error:
        if not any(words in str(error) for words in LOST):
            raise
        # All ranks but the one that died end here, and torchrun reports that one.
        print(f"ironlaw: rank {rendezvous.rank} has lost the connection to another rank", file=sys.stderr, flush=True)
        raise SystemExit(1) from None
    finally:
        if dist.is_initialized():
            dist.destroy_process_group()
            wait_for_gloo()


GLOO_THREADS = "pt_gloo_runloop"
IDLE_POLLS, POLL_SECONDS, LONGEST_WAIT_SECONDS = 3, 0.02, 5.0


def wait_for_gloo() -> None:
    """Wait until gloo's threads are idle.

    They release the last collective's tensors a moment after the thread that waited for it continues. If the
    interpreter is gone by then, the process aborts: on a busy core, one in six ranks did after a successful run.
    """
    until, idle_polls = time.monotonic() + LONGEST_WAIT_SECONDS, 0
    while idle_polls < IDLE_POLLS and time.monotonic() < until:
        time.sleep(POLL_SECONDS)  # releases the GIL, for which they may be waiting
        idle_polls = 0 if _gloo_runs() else idle_polls + 1


def _gloo_runs() -> bool:
    """Whether one of gloo's threads is runnable. False if the system does not report it."""
    for thread in Path("/proc/self/task").glob("*"):
        with contextlib.suppress(OSError):  # the thread has ended
            name, _, rest = (thread / "stat").read_text(encoding="utf-8").partition("(")[2].rpartition(")")
            if name == GLOO_THREADS and rest.split()[0] == "R":
                return True
    return False


def _quietly(function: Callable[[], Result]) -> Result:
    """Call a function that behaves alike on every rank. Rank 0 raises its UserError, the others exit silently."""
    try:
        return function()
    except UserError:
        if os.environ.get("RANK") == "0":
            raise
        raise SystemExit(2) from None
