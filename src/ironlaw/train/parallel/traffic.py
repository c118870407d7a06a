"""Every collective of a step, counted as it is called: what a layout really sends, to hold against the plan.

    with counted(ranks) as traffic:
        step.forward_backward(...)
    traffic.by_dimension()          # {("tp", "all_reduce"): Sent(count, bytes), ...}

Bytes are those of the whole buffer (nccl-tests' convention): what is reduced, what is gathered, what is sent.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.distributed_c10d import _resolve_process_group
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode

from ironlaw.train.parallel.ranks import Ranks
from ironlaw.workload.collectives import Sent

# Operators of PyTorch's process groups and of its functional collectives: kind, and which argument is the whole buffer.
OPERATORS = {
    "c10d.allreduce_": ("all_reduce", 0),
    "c10d._allgather_base_": ("all_gather", 0),
    "c10d._reduce_scatter_base_": ("reduce_scatter", 1),
    "c10d.allgather_into_tensor_coalesced_": ("all_gather", 0),
    "c10d.reduce_scatter_tensor_coalesced_": ("reduce_scatter", 1),
    "c10d.broadcast_": ("broadcast", 0),
    "c10d.alltoall_base_": ("all_to_all", 1),
    "c10d.send": ("send", 0),
    "_c10d_functional.all_reduce": ("all_reduce", 0),
    "_c10d_functional.all_reduce_": ("all_reduce", 0),
    "_c10d_functional.reduce_scatter_tensor": ("reduce_scatter", 0),
    "_c10d_functional.all_gather_into_tensor": ("all_gather", 0),
    "_c10d_functional.all_to_all_single": ("all_to_all", 0),
}


@dataclass
class Traffic:
    """Collectives by (dimension, kind). Groups of one rank send nothing and are not counted."""

    sent: dict[tuple[str, str], Sent] = field(default_factory=dict)

    def add(self, dimension: str, kind: str, size: int) -> None:
        known = self.sent.get((dimension, kind), Sent(0, 0))
        self.sent[dimension, kind] = Sent(known.count + 1, known.bytes + size)


class _Counter(TorchDispatchMode):
    def __init__(self, dimensions: dict[Members, tuple[str, int]], traffic: Traffic) -> None:
        super().__init__()
        self.dimensions, self.traffic = dimensions, traffic

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(issubclass(kind, DTensor) for kind in types):
            return NotImplemented  # what it is made of comes by here next
        name = str(func).rpartition(".")[0]
        if name in OPERATORS:
            kind, which = OPERATORS[name]
            dimension, size = self.dimensions.get(_members(args), ("other", 2))
            if size > 1:
                buffer = args[which]
                tensors = [buffer] if isinstance(buffer, Tensor) else list(buffer)
                count = sum(t.numel() * t.element_size() for t in tensors)
                if name == "_c10d_functional.all_gather_into_tensor":
                    count *= size
                self.traffic.add(dimension, kind, count)
        return func(*args, **(kwargs or {}))


Members = tuple[int, ...]


def _members(args: Any) -> Members:
    """The ranks of the process group among an operator's arguments: equal meshes may have groups of other names."""
    for argument in args:
        if isinstance(argument, torch.ScriptObject):
            try:
                return tuple(dist.get_process_group_ranks(dist.ProcessGroup.unbox(argument)))
            except RuntimeError:
                continue  # a reduction, not a group
    name: Any = next((argument for argument in reversed(args) if isinstance(argument, str)), None)
    return tuple(dist.get_process_group_ranks(_resolve_process_group(name))) if name is not None else ()


@contextmanager
def counted(ranks: Ranks) -> Iterator[Traffic]:
    """Count while the block runs."""
    dimensions, traffic = dimensions_of(ranks), Traffic()
    with _Counter(dimensions, traffic), _other_threads(dimensions, traffic):
        yield traffic


def dimensions_of(ranks: Ranks) -> dict[Members, tuple[str, int]]:
    """Members of a group -> its mesh dimension and size; of dimensions with the same ranks, the first, as in a plan
    (`workload/mesh.py`)."""
    names = ("replicate", "shard", "tp", "pp") + (("site",) if ranks.sites > 1 else ())
    groups = {name: ranks.group(name) for name in names} | ranks.groups
    if ranks.context is not None:
        groups["cp"] = ranks.context.get_group()
    dimensions: dict[Members, tuple[str, int]] = {}
    for name, group in groups.items():
        dimensions.setdefault(tuple(dist.get_process_group_ranks(group)), (name, group.size()))
    dimensions.setdefault(tuple(range(ranks.size)), ("world", ranks.size))
    return dimensions


@contextmanager
def _other_threads(dimensions: dict[Members, tuple[str, int]], traffic: Traffic) -> Iterator[None]:
    """What callbacks reduce on threads of the backend, where a dispatch mode does not reach: PowerSGD's second half."""
    here, plain = threading.get_ident(), dist.all_reduce

    def all_reduce(tensor: Tensor, *rest: Any, **named: Any) -> Any:
        group = named.get("group")
        if threading.get_ident() != here and group is not None:
            dimension, size = dimensions.get(tuple(dist.get_process_group_ranks(group)), ("other", 2))
            if size > 1:
                traffic.add(dimension, "all_reduce", tensor.numel() * tensor.element_size())
        return plain(tensor, *rest, **named)

    dist.all_reduce = all_reduce
    try:
        yield
    finally:
        dist.all_reduce = plain
