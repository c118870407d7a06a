"""Before the first step: do all ranks run the same thing? What differs is refused with one line that names the rank."""

from __future__ import annotations

import hashlib
import platform
import socket
import time
from typing import Any

import torch
import torch.distributed as dist

from ironlaw.config import RunConfig
from ironlaw.errors import UserError
from ironlaw.package import __version__
from ironlaw.train.parallel.ranks import Ranks

CLOCK_SECONDS = 5.0
"""Clocks further apart than this make checkpoints and logs of one job contradict each other."""

WORDS = {
    "torch": "PyTorch {theirs}, rank 0 has {ours}: install the same on every node",
    "ironlaw": "Ironlaw {theirs}, rank 0 has {ours}: install the same on every node",
    "python": "Python {theirs}, rank 0 has {ours}: use the same on every node",
    "config": "another config than rank 0: start every node with the same file and the same --set",
    "devices": "{theirs} as devices, rank 0 has {ours}: give every node the same kind",
}


def facts(config: RunConfig) -> dict[str, Any]:
    """What must agree, and this rank's clock, read when all have come here."""
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


def problem(everybodys: list[dict[str, Any]]) -> str | None:
    """The first difference from rank 0, in one line."""
    first = everybodys[0]
    for rank, theirs in enumerate(everybodys):
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


def check(ranks: Ranks, mine: dict[str, Any]) -> None:
    """UserError on rank 0, a quiet end on the others, when ranks differ."""
    everybodys = ranks.gather(mine)

    def refuse() -> None:
        if (found := problem(everybodys)) is not None:
            raise UserError(found)

    ranks.first_does(refuse)
