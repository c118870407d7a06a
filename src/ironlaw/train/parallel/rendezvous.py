"""Rendezvous of the ranks of one start in torchrun's store, ignoring entries of earlier ranks that died.

torchrun keeps its store across restarts, including the addresses of dead ranks. It counts restarts per node: a node
that joined later, or only followed another's restart, has another count, so that no environment variable identifies a
start on all nodes. Therefore rank 0 chooses a name for it, and every rank verifies that it takes part.
"""

from __future__ import annotations

import json
import time
import uuid
from dataclasses import dataclass
from datetime import timedelta

import torch.distributed as dist

from ironlaw.cores import torchrun_integer
from ironlaw.errors import UserError

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
    try:
        store, rank, size = next(dist.rendezvous("env://", timeout=timedelta(seconds=timeout_seconds)))
    except ValueError as error:  # a variable that torchrun sets is missing or not a number
        raise UserError(f"{error}: start with torchrun, or unset WORLD_SIZE") from None
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
