"""Ranks meet in torchrun's store, and only those of one start: what ranks that died have left there is not read.

torchrun keeps its store over restarts, and the addresses of dead ranks with it. It counts restarts per node, so that a
node that has joined later, or that only followed another's restart, has another number: nothing in the environment
names a start alike on all nodes. Here rank 0 names it, and every rank makes sure that it was meant.
"""

from __future__ import annotations

import json
import time
import uuid
from dataclasses import dataclass
from datetime import timedelta

import torch.distributed as dist

from ironlaw.cores import torchrun_says
from ironlaw.errors import UserError

ROUND, STARTS, FINISHED = "ironlaw/round", "ironlaw/starts", "finished"
POLL_SECONDS = 0.02
TIMEOUT_SECONDS = 360.0  # PyTorch's own, should the watcher not have ended the job before


@dataclass(frozen=True)
class Rendezvous:
    """`store` is this start's own. `restarted`: torchrun has started this job before, with as many ranks or not."""

    store: dist.Store
    rank: int
    size: int
    restarted: bool


def join(timeout_seconds: float = TIMEOUT_SECONDS) -> Rendezvous:
    """Meet the other ranks that torchrun started."""
    try:
        store, rank, size = next(dist.rendezvous("env://", timeout=timedelta(seconds=timeout_seconds)))
    except ValueError as error:  # a variable that torchrun sets is missing, or no number
        raise UserError(f"{error}: start with torchrun, or unset WORLD_SIZE") from None
    return meet(store, rank, size, timeout_seconds)


def meet(store: dist.Store, rank: int, size: int, timeout_seconds: float) -> Rendezvous:
    """UserError when not all of them come.

    Rank 0 publishes a name; each other rank leaves a word of its own under it; rank 0 repeats all words. A rank that
    does not find its own among them was looking at a name of earlier ranks, and looks again.
    """
    until = time.monotonic() + timeout_seconds
    if rank == 0:
        restarted = store.add(STARTS, 1) > 1 or torchrun_says("TORCHELASTIC_RESTART_COUNT", 0) > 0
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
            if name.endswith(f"/{size}"):  # another number: of a start with fewer or more ranks
                if store.check([f"{name}/all"]):
                    told = json.loads(store.get(f"{name}/all"))
                    if mine in told["words"]:
                        return Rendezvous(dist.PrefixStore(name, store), rank, size, told["restarted"])
                else:
                    store.set(f"{name}/{rank}", mine)
        _pause(until, "rank 0 did not come")


def stand_by(rendezvous: Rendezvous) -> None:
    """Wait until the others are done. Should one of them die, torchrun ends this rank too and starts all again."""
    while True:
        time.sleep(1.0)
        try:
            if rendezvous.store.check([FINISHED]):
                return
        except RuntimeError:  # the store was rank 0's, which has ended
            return


def _pause(until: float, what: str) -> None:
    if time.monotonic() > until:
        raise UserError(f"{what} within the time allowed: look at the output of the other nodes")
    time.sleep(POLL_SECONDS)
