"""Reads PyTorch's flight recorder: each rank's list of its latest collectives, kept by gloo and by NCCL."""

from __future__ import annotations

import json
import os
from dataclasses import dataclass
from typing import Any

import torch.distributed as dist
from torch._C import _distributed_c10d as c10d

KEPT = 256  # collectives


@dataclass(frozen=True)
class RecordedCollective:
    """A collective as called by one rank: number `number` of the group of `members`, along a mesh dimension."""

    kind: str
    number: int
    dimension: str
    members: tuple[int, ...]
    started_seconds: float  # time.time()
    done: bool

    def __str__(self) -> str:
        return f"{self.kind} #{self.number} over {self.dimension}"


def switch_on() -> None:
    """Enable the recorder. Call it before the first process group is created, which allocates the buffer."""
    os.environ.setdefault("TORCH_FR_BUFFER_SIZE", str(KEPT))
    os.environ.setdefault("TORCH_NCCL_ENABLE_TIMING", "1")  # durations of kernels


def groups_of(used: dict[str, dist.ProcessGroup]) -> dict[str, tuple[str, tuple[int, ...]]]:
    """Return dimension and ranks of the groups that a step uses (`Ranks.process_groups`), by PyTorch's name.

    Other groups may wait for any time: for the preparation of data, or for a checkpoint.
    """
    found: dict[str, tuple[str, tuple[int, ...]]] = {}
    for name, group in used.items():
        if group.size() > 1:
            found.setdefault(group.group_name, (name, tuple(dist.get_process_group_ranks(group))))
    return found


def operations(groups: dict[str, tuple[str, tuple[int, ...]]]) -> list[RecordedCollective]:
    """Return the latest collectives of this rank, oldest first."""
    found = []
    for entry in _entries():
        dimension, members = groups.get(entry["process_group"][0], ("", ()))
        if not members:
            continue
        kind = entry["profiling_name"].partition(":")[2]
        number = entry["p2p_seq_id"] if entry["is_p2p"] else entry["collective_seq_id"]
        done = entry["retired"] or entry["state"] == "completed"
        found.append(RecordedCollective(kind, number, dimension, members, entry["time_created_ns"] / 1e9, done))
    return found


_counted = -1


def kernel_seconds() -> float:
    """Return the seconds of NCCL's collectives since the last call, if the buffer still holds them all."""
    global _counted
    entries = [entry for entry in _entries() if entry["record_id"] > _counted and "duration_ms" in entry]
    _counted = max((entry["record_id"] for entry in entries), default=_counted)
    return sum(float(entry["duration_ms"]) for entry in entries) / 1e3


def _entries() -> list[dict[str, Any]]:
    for name in ("_dump_nccl_trace_json", "_dump_fr_trace_json"):
        dump = getattr(c10d, name, None)
        entries = json.loads(dump(True, False)).get("entries", []) if dump is not None else []
        if entries:
            return list(entries)
    return []
