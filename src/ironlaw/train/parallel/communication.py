"""Measures what a rank sends in its steps, and how long its main thread waits; always on, at a microsecond per call.

    with observed(ranks) as traffic:                    # times the calls that FSDP, DTensor, DDP, pipelines
        with traffic.counting(clock):                   # and this trainer make
            step.forward_backward(...)
    traffic.found["shard", "all_gather"]                # CallTotals(count, bytes, seconds), of all counted steps

Bytes are those of the whole buffer that is reduced, gathered or sent (nccl-tests' convention). Exposed time is the time
the main thread waits, and is passed to the step's clock. `seconds` lasts from a call to its completion, if that can be
observed (a message between stages ends when its receiver takes it, so that only the wait is timed). On CUDA collectives
run asynchronously to the host: only counts and bytes are known.
"""

from __future__ import annotations

import functools
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from ironlaw.observe.clock import StepClock
from ironlaw.observe.profile import COMMUNICATION_SCOPE, scope
from ironlaw.train.parallel.ranks import Ranks
from ironlaw.workload.collectives import Sent

# Functions of torch.distributed -> kind, and the position and name of the argument that is the whole buffer.
CALLS: dict[str, tuple[str, int, str]] = {
    "all_reduce": ("all_reduce", 0, "tensor"),
    "all_gather_into_tensor": ("all_gather", 0, "output_tensor"),
    "all_gather_single": ("all_gather", 0, "output"),
    "reduce_scatter_tensor": ("reduce_scatter", 1, "input"),
    "reduce_scatter_single": ("reduce_scatter", 1, "input"),
    "broadcast": ("broadcast", 0, "tensor"),
    "all_to_all_single": ("all_to_all", 1, "input"),
}
# Operators that DTensor and compiled code call, by kind: they write a new tensor, the first one or `out`. Their last
# positional argument names the group; `wait_tensor` waits for the result.
FUNCTIONAL = {
    "all_reduce": ("all_reduce", "all_reduce_"),
    "all_gather": ("all_gather_into_tensor", "all_gather_into_tensor_out"),
    "reduce_scatter": ("reduce_scatter_tensor", "reduce_scatter_tensor_out"),
    "all_to_all": ("all_to_all_single",),
}
RELEASE_SECONDS, POLL_SECONDS = 1.0, 1e-4
BUCKET_RELEASE_SECONDS = 0.02  # shorter, as there may be hundreds of buckets

Key = tuple[str, str]  # mesh dimension and kind of a collective


@dataclass
class CallTotals:
    """Calls of one kind along one mesh dimension. `seconds` is None if their ends are not observed."""

    count: int = 0
    bytes: int = 0
    seconds: float | None = 0.0

    def add_seconds(self, seconds: float) -> None:
        self.seconds = None if self.seconds is None else self.seconds + seconds


class Traffic:
    """Traffic and waiting times while `counting`. Groups of one rank send nothing and are not counted."""

    def __init__(self, ranks: Ranks) -> None:
        self.found: dict[Key, CallTotals] = {}
        self.steps = 0
        # During profiling: wait for each collective where it is called, until gloo's threads have released its
        # tensors, because the profiler sees only what this thread releases (`observe/profile.py`).
        self.synchronous = False
        # Mesh dimension and size by members. Of dimensions with the same ranks, the first is used, as in a plan.
        groups = reversed(ranks.process_groups().items())
        self._dimensions = {tuple(dist.get_process_group_ranks(g)): (name, g.size()) for name, g in groups}
        self._known: dict[Any, tuple[str, int]] = {}
        self._clock: StepClock | None = None
        self._main = threading.get_ident()
        self.device_type = ranks.device.type
        self._last_bucket: tuple[Key, float] | None = None

    @contextmanager
    def counting(self, clock: StepClock) -> Iterator[None]:
        self._clock = clock
        self.steps += 1
        try:
            yield
        finally:
            self._clock = None

    @property
    def active(self) -> bool:
        return self._clock is not None

    @property
    def table(self) -> dict[Key, Sent]:
        return {key: Sent(found.count, found.bytes) for key, found in self.found.items() if found.count}

    def reset(self) -> None:
        self.found.clear()
        self.steps = 0

    def dimension(self, group: Any) -> tuple[str, int]:
        """Return the mesh dimension of a group (or of a group's name) and its size."""
        if group is None:  # all ranks, even if they are also all ranks of another dimension
            return "world", dist.get_world_size()
        key = group if isinstance(group, str) else id(group)
        if key not in self._known:
            if isinstance(group, str):
                group = dist.distributed_c10d._resolve_process_group(group)  # type: ignore[arg-type]
            members = tuple(dist.get_process_group_ranks(group))
            self._known[key] = self._dimensions.get(members, ("other", len(members)))
        return self._known[key]

    def count(self, key: Key, size: int) -> CallTotals:
        found = self.found.setdefault(key, CallTotals())
        found.count += 1
        found.bytes += size
        return found

    @contextmanager
    def waiting(self, key: Key) -> Iterator[None]:
        """Time a block in which the main thread waits."""
        began = time.perf_counter()
        with scope(COMMUNICATION_SCOPE, self.synchronous):
            yield
        self.waited(key, time.perf_counter() - began)

    def waited(self, key: Key, seconds: float) -> None:
        if self._clock is None or self.device_type != "cpu" or threading.get_ident() != self._main:
            return
        self.found.setdefault(key, CallTotals())  # also of a rank that only receives
        self._clock.waited(" ".join(key), seconds)

    def reference_counts(self, arguments: Any, named: Any) -> list[tuple[Tensor, int]]:
        """Return the tensors of a call with their reference counts before it."""
        if not self.synchronous:
            return []
        return [(a, _reference_count(a)) for a in (*arguments, *named.values()) if isinstance(a, Tensor)]

    def wait_for_release(self, uses: list[tuple[Tensor, int]], longest_seconds: float = RELEASE_SECONDS) -> None:
        """During profiling, wait until gloo's thread has released all these tensors."""
        if not self.synchronous:
            return
        limit = time.perf_counter() + longest_seconds
        while any(_reference_count(tensor) > before for tensor, before in uses) and time.perf_counter() < limit:
            time.sleep(POLL_SECONDS)
        time.sleep(POLL_SECONDS)  # the thread releases a tensor's Python object last, which requires the GIL

    def bucket_done(self, key: Key, buffer: Tensor, uses: int, future: Any) -> None:
        """Called when DDP's hook has sent a bucket."""
        if self.synchronous:
            with scope(COMMUNICATION_SCOPE):
                future.wait()
                self.wait_for_release([(buffer, uses + 1)], BUCKET_RELEASE_SECONDS)  # plus one reference by the future
        self._last_bucket = key, time.perf_counter()

    def backward_done(self) -> None:
        """Count the wait of DDP at the end of the backward pass, which begins when its last bucket has been sent."""
        if self._last_bucket is not None:
            key, since = self._last_bucket
            self.waited(key, time.perf_counter() - since)
            self._last_bucket = None


def _reference_count(tensor: Tensor) -> int:
    """Return the reference count of a tensor, in which its Python object counts as one."""
    count = getattr(tensor, "_use_count", None)  # not in PyTorch 2.11
    return int(count()) if count is not None else 0


class _Timed:
    """An asynchronous call whose wait is timed."""

    def __init__(self, work: Any, traffic: Traffic, key: Key) -> None:
        self._work, self._traffic, self._key = work, traffic, key

    def wait(self, *arguments: Any, **named: Any) -> Any:
        with self._traffic.waiting(self._key):
            return self._work.wait(*arguments, **named)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._work, name)


_current: Traffic | None = None


def backward_done() -> None:
    if _current is not None:
        _current.backward_done()


def bucket_hook(hook: Callable[..., Any], group: Any) -> Callable[..., Any]:
    """Wrap DDP's bucket hook to time it while traffic is observed. Collectives that it calls are counted as usual."""

    def timed(state: Any, bucket: Any) -> Any:
        traffic = _current
        if traffic is None or not traffic.active:
            return hook(state, bucket)
        buffer = bucket.buffer()
        uses = _reference_count(buffer)
        future = hook(state, bucket)
        traffic.bucket_done((traffic.dimension(group)[0], "all_reduce"), buffer, uses, future)
        return future

    timed.__annotations__.clear()  # DDP would compare them with its own types, by identity
    return timed


@contextmanager
def observed(ranks: Ranks) -> Iterator[Traffic]:
    """Count and time the collectives of PyTorch in this process while the block runs."""
    global _current
    traffic = Traffic(ranks)
    with ExitStack() as replaced:

        def replace(owner: Any, name: str, made: Any) -> None:
            replaced.callback(setattr, owner, name, getattr(owner, name))
            setattr(owner, name, made)

        for name, (kind, place, keyword) in CALLS.items():
            if (plain := getattr(dist, name, None)) is not None:
                replace(dist, name, _call(traffic, plain, kind, place, keyword))
        for name in ("isend", "irecv"):  # in both modules, since batches of messages accept only these functions
            message = _message(traffic, getattr(dist, name), sends=name == "isend")
            for owner in (dist, dist.distributed_c10d):
                replace(owner, name, message)
        _override(traffic, replaced.enter_context(torch.library._scoped_library("_c10d_functional", "IMPL")))
        _current = traffic
        try:
            yield traffic
        finally:
            _current = None


def _override(traffic: Traffic, library: Any) -> None:
    """Time the kernels of functional collectives on the ranks' device. Whoever calls the operators comes here, compiled
    code too, but no trace: that runs other kernels, of tensors without data."""
    pending: dict[int, tuple[Key, float]] = {}

    def plain(name: str) -> Callable[..., Any]:
        # The kernel that all devices share. `torch.library.get_kernel` has it too, but would hold the GIL.
        operator = getattr(torch.ops._c10d_functional, name).default
        return partial(operator._op_dk, torch._C.DispatchKey.CompositeExplicitAutograd)

    wait = plain("wait_tensor")
    device = traffic.device_type.upper()
    for kind, names in FUNCTIONAL.items():
        for name in names:
            library.impl(name, _functional(traffic, plain(name), kind, pending, wait), device)
    library.impl("wait_tensor", _wait_tensor(traffic, wait, pending), device)


@contextmanager
def counted(ranks: Ranks) -> Iterator[Traffic]:
    """Like `observed`, with every call of the block counted."""
    with observed(ranks) as traffic, traffic.counting(StepClock()):
        yield traffic


def _call(traffic: Traffic, plain: Any, kind: str, place: int, keyword: str) -> Any:
    @torch.compiler.disable  # a compiled block calls it between two graphs
    def timed(*arguments: Any, **named: Any) -> Any:
        if not traffic.active:
            return plain(*arguments, **named)
        group = named.get("group") or next((a for a in arguments if isinstance(a, dist.ProcessGroup)), None)
        dimension, size = traffic.dimension(group)
        if size < 2:
            return plain(*arguments, **named)
        buffer: Tensor = arguments[place] if len(arguments) > place else named[keyword]
        key = (dimension, kind)
        found = traffic.count(key, buffer.numel() * buffer.element_size())
        uses = traffic.reference_counts(arguments, named)
        began = time.perf_counter()
        if named.get("async_op") and not traffic.synchronous:
            work = plain(*arguments, **named)
            work.get_future().add_done_callback(lambda done: found.add_seconds(time.perf_counter() - began))
            return _Timed(work, traffic, key)
        with traffic.waiting(key):
            work = plain(*arguments, **named)
            if named.get("async_op"):  # so that this thread runs, and releases, what DDP's hook does next
                work.wait()
            else:
                traffic.wait_for_release(uses)
        found.add_seconds(time.perf_counter() - began)
        return work

    return timed


def _message(traffic: Traffic, plain: Any, sends: bool) -> Any:
    @functools.wraps(plain)
    def timed(tensor: Tensor, *arguments: Any, **named: Any) -> Any:
        work = plain(tensor, *arguments, **named)
        if not traffic.active or work is None:
            return work
        key = (traffic.dimension(named.get("group"))[0], "send")
        if sends:
            traffic.count(key, tensor.numel() * tensor.element_size()).seconds = None
        return _Timed(work, traffic, key)

    return timed


def _functional(
    traffic: Traffic, plain: Any, kind: str, pending: dict[int, tuple[Key, float]], wait: Callable[[Tensor], Any]
) -> Any:
    def timed(*arguments: Any, **named: Any) -> Any:
        if not traffic.active:
            return plain(*arguments, **named)
        dimension, size = traffic.dimension(arguments[-1])
        if size < 2:
            return plain(*arguments, **named)
        key = (dimension, kind)
        tensor: Tensor = arguments[0]
        traffic.count(key, tensor.numel() * tensor.element_size() * (size if kind == "all_gather" else 1))
        uses = traffic.reference_counts(arguments, named)
        began = time.perf_counter()
        with traffic.waiting(key):
            result = plain(*arguments, **named)
            if traffic.synchronous:
                wait(result)
                traffic.wait_for_release([*uses, (result, 1)])
        pending[result.data_ptr()] = key, began
        return result

    return timed


def _wait_tensor(traffic: Traffic, plain: Any, pending: dict[int, tuple[Key, float]]) -> Any:
    def timed(tensor: Tensor, *rest: Any, **named: Any) -> Any:
        known = pending.pop(tensor.data_ptr(), None) if traffic.active else None
        if known is None:
            return plain(tensor, *rest, **named)
        key, called = known
        with traffic.waiting(key):
            result = plain(tensor, *rest, **named)
        traffic.found.setdefault(key, CallTotals()).add_seconds(time.perf_counter() - called)
        return result

    return timed
