"""What gloo puts on the wire for each collective: run by `shaped_links.py --collectives`, one rank per host."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

SIZE = 4 * 2**20  # bytes of the whole buffer
REPEATS = 4


def sent_bytes() -> int:
    return int(Path("/sys/class/net/eth0/statistics/tx_bytes").read_text(encoding="utf-8"))


def calls(rank: int, ranks: int) -> dict[str, Callable[[], Any]]:
    whole, part = torch.ones(SIZE // 4), torch.ones(SIZE // 4 // ranks)

    def send() -> None:
        if rank == 0:
            dist.send(whole, 1)
        elif rank == 1:
            dist.recv(whole, 0)

    return {
        "all_reduce": lambda: dist.all_reduce(whole),
        "all_gather": lambda: dist.all_gather_into_tensor(whole, part),
        "reduce_scatter": lambda: dist.reduce_scatter_tensor(part, whole),
        "all_to_all": lambda: dist.all_to_all_single(whole, whole.clone()),
        "broadcast": lambda: dist.broadcast(whole, 0),
        "send": send,
    }


def main() -> None:
    dist.init_process_group("gloo")
    rank, ranks = dist.get_rank(), dist.get_world_size()
    found: dict[str, Any] = {}
    for kind, call in calls(rank, ranks).items():
        call()
        dist.barrier()
        before, seconds = sent_bytes(), []
        for _ in range(REPEATS):
            dist.barrier()
            began = time.perf_counter()
            call()
            seconds.append(time.perf_counter() - began)
        dist.barrier()
        mine = {"sent_over_buffer": (sent_bytes() - before) / REPEATS / SIZE, "seconds": sorted(seconds)}
        by_rank: list[Any] = [None] * ranks
        dist.all_gather_object(by_rank, mine)
        found[kind] = by_rank
    if rank == 0:
        Path(sys.argv[1]).write_text(json.dumps(found, indent=1), encoding="utf-8")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
