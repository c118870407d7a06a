"""Events of a profiler, whether they come from a live recording or from a trace file, in one form."""

from __future__ import annotations

import functools
import itertools
import re
import sys
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from ironlaw.ledger import Phase
from ironlaw.observe.partition import Interval, Partition
from ironlaw.observe.user_code import is_users, user_line

CPU, DEVICE, RUNTIME = "cpu", "device", "runtime"
_DRIVER_CALL = re.compile(r"cu(da)?[A-Z]")  # cudaLaunchKernel, cuLaunchKernelEx
# Each makes the host wait for the device, and ends the time in which it could run ahead.
_SYNCHRONISING = ("item", "tolist", "cpu", "numpy", "__float__", "__int__", "__bool__", "nonzero")
# A dataset's tensors are the host's, and so are an optimizer's counters.
_ON_THE_HOST = (Phase.DATA, Phase.OPTIMIZER)


@dataclass(slots=True)
class Event:
    """A stretch of time on one thread of the processor, or on one stream of the device. Times are nanoseconds."""

    name: str
    start: int
    end: int
    where: str = CPU  # cpu, device (kernels and copies), runtime (calls of the driver)
    lane: int | str = 0  # thread or stream
    sequence: int = -1  # shared by a forward call and the backward node that belongs to it
    link: int = 0  # shared by a call of the driver and the kernel that it launches
    details: dict[str, Any] = field(default_factory=dict)


@dataclass(slots=True)
class Allocation:
    moment: int
    address: int
    bytes: int  # negative when freed
    on_device: bool = False
    of_collective: bool = False  # made inside a call of a process group, or by gloo's threads


def recorded_events(recorded: Any) -> list[Event]:
    """Returns the events of a finished `torch.profiler.profile` in order of time."""
    events = []
    for e in recorded.profiler.kineto_results.events():
        start, duration = e.start_ns(), e.duration_ns()
        device = e.device_type() != torch._C._autograd.DeviceType.CPU
        if device and e.is_user_annotation():  # a mark of the host's, drawn again above the kernels it launched
            continue
        host = RUNTIME if _DRIVER_CALL.match(e.name()) else CPU
        events.append(
            Event(
                e.name(), start, start + duration, DEVICE if device else host,
                e.device_resource_id() if device else e.start_thread_id(), e.sequence_nr(),
                e.linked_correlation_id() if device else e.correlation_id(),
            )
        )  # fmt: skip
    events.sort(key=lambda event: (event.start, -event.end))
    return events


def recorded_allocations(recorded: Any) -> list[Allocation]:
    """Returns the allocations of a finished profiler that recorded memory, in order of time."""
    found = list[Allocation]()
    pending = [(node, False) for node in recorded.profiler.kineto_results.experimental_event_tree()]
    while pending:
        node, inside = pending.pop()
        if node.tag == torch._C._profiler._EventType.Allocation:
            of = node.extra_fields
            found.append(Allocation(node.start_time_ns, of.ptr, of.alloc_size, of.device.type != "cpu", inside))
            continue
        inside = inside or node.name.startswith(("c10d::", "gloo:"))
        pending.extend((child, inside) for child in node.children)
    return sorted(found, key=lambda a: a.moment)


SyncPoints = dict[tuple[str, str], list[tuple[float, Interval | None]]]
"""(line of the user's code, call) -> seconds of each time the host waited there for the value of a tensor, and what the
partition of a loop has it in."""


def describe_sync_points(
    found: SyncPoints, steps: int, recorded: Sequence[Sequence[Interval]] = ()
) -> list[dict[str, Any]]:
    """Returns sync points with times and seconds per step, and their parts of the phases in these recorded steps, those
    that took most first."""
    whole, points = defaultdict[Phase, float](float), list[dict[str, Any]]()
    for interval in itertools.chain(*recorded):
        whole[interval.phase or Phase.HOST] += interval.begin.until(interval.end)
    for (place, call), times in found.items():
        parts = defaultdict[Phase, float](float)
        for seconds, within in times:
            if within is not None and (all_of := whole[within.phase or Phase.HOST]):
                parts[within.phase or Phase.HOST] += seconds / all_of
        total = sum(seconds for seconds, _ in times)
        points.append({"place": place, "call": call, "per_step": len(times) / steps, "seconds": total / steps,
                       "parts": parts})  # fmt: skip
    return sorted(points, key=lambda point: -float(point["seconds"]))[:20]


@contextmanager
def sync_points(partition: Partition) -> Iterator[SyncPoints]:
    """Every `.item()`, `float(tensor)`, `.cpu()` and the like while the block runs, by the line of the user's code that
    calls it. Calls by libraries do not count."""
    found: SyncPoints = defaultdict(list)
    is_inside = False

    @contextmanager
    def waiting(name: str, *_: Any, **__: Any) -> Iterator[None]:
        nonlocal is_inside
        caller = sys._getframe(3).f_code.co_filename  # behind `__enter__` and the wrapper
        if is_inside or partition.running in _ON_THE_HOST or not is_users(caller):
            yield
            return
        is_inside, began = True, time.perf_counter()
        try:
            yield
        finally:
            is_inside = False
            found[user_line(), name].append((time.perf_counter() - began, partition.intervals[-1]))

    with ExitStack() as stack:
        for name in _SYNCHRONISING:
            wrap(stack, Tensor, name, functools.partial(waiting, name))
        yield found


def wrap(stack: ExitStack, owner: Any, name: str, around: Callable[..., AbstractContextManager[None]]) -> None:
    """Run calls of `owner.name` in the context that `around` makes of their arguments, until `stack` is closed."""
    original, is_own = getattr(owner, name), name in vars(owner)

    @functools.wraps(original)
    def call(*args: Any, **kwargs: Any) -> Any:
        with around(*args, **kwargs):
            return original(*args, **kwargs)

    setattr(owner, name, call)
    stack.callback(lambda: setattr(owner, name, original) if is_own else delattr(owner, name))
