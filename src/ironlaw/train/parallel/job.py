"""A job of many ranks for `ironlaw train`: join, check that all ranks agree, train, leave. It is planned on all ranks,
steps on a layout and watches the ranks.

torchrun keeps its store across restarts, including the addresses of dead ranks, and counts restarts per node, so that
no environment variable identifies a start on all nodes. Therefore rank 0 chooses a name for it, and every rank verifies
that it takes part. Before the first step ranks compare what they run. A difference is refused with one line that names
the rank.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import platform
import socket
import sys
import time
import uuid
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from ironlaw.config import LayoutConfig, RunConfig
from ironlaw.cores import torchrun_integer
from ironlaw.errors import UserError, reported
from ironlaw.machine.profile import Profile
from ironlaw.package import __version__
from ironlaw.train.mesh import Result
from ironlaw.train.parallel.observer import RankObserver
from ironlaw.train.parallel.planning import plan_job
from ironlaw.train.parallel.ranks import Ranks, check, create_mesh, on_rank_0, sites_of, usable
from ironlaw.train.parallel.step import LayoutStep
from ironlaw.train.parallel.watcher import Note, Watcher
from ironlaw.train.result import Outcome
from ironlaw.train.run_directory import RunDirectory
from ironlaw.train.session import run_training

ROUND, STARTS, FINISHED = "ironlaw/round", "ironlaw/starts", "finished"
POLL_SECONDS = 0.02
TIMEOUT_SECONDS = 360.0  # PyTorch's timeout, in case the watcher has not ended the job before


@dataclass(frozen=True)
class Rendezvous:
    """`store` is exclusive to this start. `restarted`: torchrun has started the job before, with any size."""

    store: dist.Store
    rank: int
    size: int
    restarted: bool


def join(timeout_seconds: float = TIMEOUT_SECONDS) -> Rendezvous:
    """Meet the other ranks that torchrun started."""
    with reported("{reason}: start with torchrun, or unset WORLD_SIZE", ValueError):  # of a variable that torchrun sets
        store, rank, size = next(dist.rendezvous("env://", timeout=timedelta(seconds=timeout_seconds)))
    return meet(store, rank, size, timeout_seconds)


def meet(store: dist.Store, rank: int, size: int, timeout_seconds: float) -> Rendezvous:
    """Meet all ranks. Raises UserError if not all of them come in time.

    Rank 0 publishes a name; each other rank stores a random word under it; rank 0 publishes all words. A rank that does
    not find its own word among them has read the name of an earlier start, and tries again.
    """
    until = time.monotonic() + timeout_seconds
    if rank == 0:
        restarted = store.add(STARTS, 1) > 1 or torchrun_integer("TORCHELASTIC_RESTART_COUNT", 0) > 0
        name = f"{uuid.uuid4().hex}/{size}"
        store.set(ROUND, name)
        keys = [f"{name}/{other}" for other in range(1, size)]
        while keys and not store.check(keys):
            _pause(until, "not all ranks came")
        words = [store.get(key).decode() for key in keys]
        store.set(f"{name}/all", json.dumps({"words": words, "restarted": restarted}))
        return Rendezvous(dist.PrefixStore(name, store), rank, size, restarted)
    mine = uuid.uuid4().hex
    while True:
        if store.check([ROUND]):
            name = store.get(ROUND).decode()
            if name.endswith(f"/{size}"):  # otherwise the name of a start with fewer or more ranks
                if store.check([f"{name}/all"]):
                    meeting = json.loads(store.get(f"{name}/all"))
                    if mine in meeting["words"]:
                        return Rendezvous(dist.PrefixStore(name, store), rank, size, meeting["restarted"])
                else:
                    store.set(f"{name}/{rank}", mine)
        _pause(until, "rank 0 did not come")


def stand_by(rendezvous: Rendezvous) -> None:
    """Wait until the other ranks are done. If one of them dies, torchrun ends this rank too and restarts all."""
    while True:
        time.sleep(1.0)
        try:
            if rendezvous.store.check([FINISHED]):
                return
        except RuntimeError:  # rank 0, which serves the store, has ended
            return


def _pause(until: float, what: str) -> None:
    if time.monotonic() > until:
        raise UserError(f"{what} within the time allowed: look at the output of the other nodes")
    time.sleep(POLL_SECONDS)


RECORDED_COLLECTIVES = 256


def form_group(rendezvous: Rendezvous, size: int, timeout_seconds: float) -> None:
    """Create the process group of the first `size` ranks that have met."""
    os.environ.setdefault("TORCH_FR_BUFFER_SIZE", str(RECORDED_COLLECTIVES))  # the flight recorder's, for the watcher
    os.environ.setdefault("TORCH_NCCL_ENABLE_TIMING", "1")  # durations of kernels
    cuda = torch.cuda.is_available()
    if cuda:
        torch.cuda.set_device(torchrun_integer("LOCAL_RANK", 0))
    dist.init_process_group(
        "cpu:gloo,cuda:nccl" if cuda else "gloo", timeout=timedelta(seconds=timeout_seconds), rank=rendezvous.rank,
        world_size=size, store=rendezvous.store,
    )  # fmt: skip


CLOCK_SECONDS = 5.0
"""With a larger difference between clocks, checkpoints and logs of one job contradict each other."""

DIFFERENCES = {
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
        for name, words in DIFFERENCES.items():
            if theirs[name] != first[name]:
                return f"{who} {words.format(theirs=theirs[name], ours=first[name])}"
        apart = theirs["clock_seconds"] - first["clock_seconds"]
        if abs(apart) > CLOCK_SECONDS:
            return (
                f"{who} a clock {abs(apart):.0f} s {'ahead of' if apart > 0 else 'behind'} rank 0's on "
                f"{first['host']}: synchronise the clocks (chrony, ntpd) and start again"
            )
    return None


def check_equal(ranks: Ranks, mine: dict[str, Any]) -> None:
    """If ranks differ, raise UserError on rank 0 and exit silently on the others."""
    by_rank = ranks.gather(mine)

    def refuse() -> None:
        if (found := first_difference(by_rank)) is not None:
            raise UserError(found)

    ranks.on_rank_0(refuse)


LOST_CONNECTION = ("Connection closed by peer", "Connection reset by peer", "Broken pipe")  # in gloo's messages
EXTRA_TIMEOUT_SECONDS = 60.0  # by which PyTorch's timeout is later than the watcher's, whose report is more detailed


def _hung(run: RunDirectory, report: str, notes: list[Note]) -> None:
    """Report a hang, on the rank that found it, since the others may be unable to."""
    print(f"ironlaw: {report}", file=sys.stderr, flush=True)
    run.write_event("hang", report=report, ranks=[asdict(note) for note in notes])


@dataclass
class RankJob:
    """A job of `ranks`. `store` is exclusive to them; more processes stand by."""

    config: RunConfig
    ranks: Ranks
    store: dist.Store
    restarted: bool = False  # torchrun has started the job before
    standing_by: int = 0

    @property
    def title(self) -> str:
        """Description of the job for the console."""
        more = f" ({self.standing_by} more stand by)" if self.standing_by else ""
        return f"{self.ranks.size} ranks: {self.ranks.layout}{more}"

    def train(self, out: Path, profile: Profile, end: Callable[[int], Any] = os._exit, **named: Any) -> Outcome:
        """Train on every rank. `end` ends a rank after a hang."""
        config, ranks = self.config, self.ranks

        def observer(run: RunDirectory) -> RankObserver:
            watcher = Watcher(ranks, self.store, config.recovery.collective_seconds, partial(_hung, run), end)
            return RankObserver(ranks, config, watcher)

        return run_training(
            config, out, profile, ranks, make_plan=plan_job, step=LayoutStep, observer=observer, **named
        )


Choose = Callable[[RunConfig, int], RunConfig]  # the layout of so many ranks


def _chosen(choose: Choose, written: RunConfig, plain: RunConfig, size: int) -> RunConfig:
    """Where no layout runs or fits, what stands against the `plain` one comes first: it may be no matter of layouts."""
    try:
        return choose(written, size)
    except UserError:
        check(plain, size)
        raise


STATE_BYTES = 16  # per parameter in fp32 with AdamW: weight, gradient, two moments


def default_layout(config: RunConfig, memory_bytes: float) -> LayoutConfig:
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
        config = config.model_copy(update={"layout": default_layout(config, memory_bytes)})
    elastic = torchrun_integer("TORCHELASTIC_MAX_RESTARTS", 0) > 0
    if not elastic and not planned:  # before ranks wait for each other
        _raise_on_rank_0(lambda: check(config, size))
    rendezvous = join()
    fewer = elastic and (resume or rendezvous.restarted)
    used = _raise_on_rank_0(lambda: usable(config, size)) if fewer else size
    if rendezvous.rank >= used:
        stand_by(rendezvous)
        raise SystemExit(0)
    try:
        form_group(rendezvous, used, config.recovery.collective_seconds + EXTRA_TIMEOUT_SECONDS)
        if planned and choose is not None:
            config = on_rank_0(partial(_chosen, choose, written, config, used))
        layout = on_rank_0(partial(check, config, used))
        ranks = create_mesh(layout, sites_of(config, layout))
        check_equal(ranks, rank_facts(config))
        yield RankJob(config, ranks, rendezvous.store, rendezvous.restarted, rendezvous.size - used)
        if ranks.is_rank_0:
            rendezvous.store.set(FINISHED, "")
    except RuntimeError as error:
        if not any(words in str(error) for words in LOST_CONNECTION):
            raise
        # All ranks but the one that died end here, and torchrun reports that one.
        print(f"ironlaw: rank {rendezvous.rank} has lost the connection to another rank", file=sys.stderr, flush=True)
        raise SystemExit(1) from None
    finally:
        if dist.is_initialized():
            dist.destroy_process_group()
            wait_for_gloo()


GLOO_THREADS = "pt_gloo_runloop"
IDLE_POLLS, LONGEST_WAIT_SECONDS = 3, 5.0


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


def _raise_on_rank_0(function: Callable[[], Result]) -> Result:
    """Call a function that behaves alike on every rank. Rank 0 raises its UserError, the others exit silently."""
    try:
        return function()
    except UserError:
        if os.environ.get("RANK") == "0":
            raise
        raise SystemExit(2) from None
