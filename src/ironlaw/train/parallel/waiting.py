"""What a rank sends in its steps, and how long its main thread waits for the others: always on, a microsecond a call.

    with watching(ranks) as waits:                      # PyTorch's own calls are timed where FSDP, DTensor, DDP,
        with waits.counting(clock):                     # pipelines and this trainer make them
            step.forward_backward(...)
    waits.found["shard", "all_gather"]                  # Found(count, bytes, seconds), of all counted steps

Exposed is what the main thread waited, and goes to the step's clock; `seconds` is from the call to its completion,
where that can be told (a message between stages ends when its receiver takes it, and is only waited for). On CUDA
collectives run behind the host's back: there only counts and bytes are known.
"""

from __future__ import annotations

import functools
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from torch.nn.parallel import DistributedDataParallel

from ironlaw.ledger import Phase
from ironlaw.observe.clock import StepClock
from ironlaw.train.parallel.ranks import Ranks
from ironlaw.train.parallel.traffic import dimensions_of

# Functions of torch.distributed: kind, and which argument (by place or name) is the whole buffer.
CALLS: dict[str, tuple[str, int, str]] = {
    "all_reduce": ("all_reduce", 0, "tensor"),
    "all_gather_into_tensor": ("all_gather", 0, "output_tensor"),
    "all_gather_single": ("all_gather", 0, "output"),
    "reduce_scatter_tensor": ("reduce_scatter", 1, "input"),
    "reduce_scatter_single": ("reduce_scatter", 1, "input"),
    "broadcast": ("broadcast", 0, "tensor"),
    "all_to_all_single": ("all_to_all", 1, "input"),
}
# Functional collectives, which DTensor calls; the last argument names the group, and `wait_tensor` waits.
FUNCTIONAL = {
    "all_reduce": "all_reduce",
    "all_gather_into_tensor": "all_gather",
    "reduce_scatter_tensor": "reduce_scatter",
    "all_to_all_single": "all_to_all",
}
LET_GO_SECONDS, BREATH_SECONDS = 1.0, 1e-4
BUCKET_LET_GO_SECONDS = 0.02  # there may be hundreds of buckets


@dataclass
class Found:
    """Calls of one kind along one mesh dimension. `seconds`: None where an end was not seen."""

    count: int = 0
    bytes: int = 0
    seconds: float | None = 0.0
    exposed_seconds: float = 0.0


class Waits:
    """What was sent and waited for while `counting`."""

    def __init__(self, ranks: Ranks) -> None:
        self.found: dict[tuple[str, str], Found] = {}
        self.steps = 0
        # While memory is recorded: a collective is waited for where it is called, until gloo's threads have let go of
        # its tensors, because a recording sees only what this thread lets go of (`observe/held.py`).
        self.settle = False
        self._dimensions = dimensions_of(ranks)
        self._known: dict[Any, tuple[str, int]] = {}
        self._clock: StepClock | None = None
        self._last_bucket: float | None = None
        self._host_waits = ranks.device.type == "cpu"

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

    def start_over(self) -> None:
        self.found.clear()
        self.steps = 0

    def dimension(self, group: Any) -> tuple[str, int]:
        """The mesh dimension of a group (or of its name) and its size; groups of one send nothing."""
        if group is None:  # what all agree on, also where they are all there is of another dimension
            return "world", dist.get_world_size()
        key = group if isinstance(group, str) else id(group)
        if key not in self._known:
            if isinstance(group, str):
                group = dist.distributed_c10d._resolve_process_group(group)  # type: ignore[arg-type]
            members = tuple(dist.get_process_group_ranks(group))
            self._known[key] = self._dimensions.get(members, ("other", len(members)))
        return self._known[key]

    def called(self, key: tuple[str, str], size: int) -> Found:
        found = self.found.setdefault(key, Found())
        found.count += 1
        found.bytes += size
        return found

    def waited(self, key: tuple[str, str], seconds: float) -> None:
        if self._clock is None or not self._host_waits:
            return
        self.found.setdefault(key, Found()).exposed_seconds += seconds
        self._clock.waited(" ".join(key), seconds)

    def holders(self, arguments: Any, named: Any) -> list[tuple[Tensor, int]]:
        """Tensors of a call and how many hold each, before it."""
        if not self.settle:
            return []
        return [(a, _uses(a)) for a in (*arguments, *named.values()) if isinstance(a, Tensor)]

    def let_go(self, holders: list[tuple[Tensor, int]], longest_seconds: float = LET_GO_SECONDS) -> None:
        """Wait until gloo's thread holds none of them any more."""
        limit = time.perf_counter() + longest_seconds
        while any(_uses(tensor) > before for tensor, before in holders) and time.perf_counter() < limit:
            time.sleep(BREATH_SECONDS)
        time.sleep(BREATH_SECONDS)  # it gives up Python's name of a tensor last, for which it needs the interpreter

    # -- DDP -------------------------------------------------------------------------------------------------------

    def bucket(self, hook: Callable[..., Any], group: Any) -> Callable[..., Any]:
        """DDP's hook for a bucket, timed; its end is the future's."""

        def timed(state: Any, bucket: Any) -> Any:
            if not self.active:
                return hook(state, bucket)
            dimension, size = self.dimension(group)
            buffer = bucket.buffer()
            found = self.called((dimension, "all_reduce"), buffer.numel() * buffer.element_size()) if size > 1 else None
            uses = _uses(buffer)
            began = time.perf_counter()
            clock, self._clock = self._clock, None  # what the hook calls is this bucket's, and counted already
            try:
                future = hook(state, bucket)
            finally:
                self._clock = clock
            if self.settle:
                future.wait()
                self.let_go([(buffer, uses + 1)], BUCKET_LET_GO_SECONDS)  # one more: the future has it

            def through(done: Any) -> Any:
                if found is not None and found.seconds is not None:
                    found.seconds += time.perf_counter() - began
                return done.value()

            future = future.then(through)
            self._last_bucket = time.perf_counter()
            self._bucket_key = (dimension, "all_reduce")
            return future

        timed.__annotations__.clear()  # DDP compares them with its own types, by identity
        return timed

    def backward_done(self) -> None:
        """DDP waits at the end of the backward pass: since its last bucket was full."""
        if self._last_bucket is not None:
            self.waited(self._bucket_key, time.perf_counter() - self._last_bucket)
            self._last_bucket = None

    _bucket_key = ("replicate", "all_reduce")


def _uses(tensor: Tensor) -> int:
    """How many hold a tensor, of all that Python's name for it counts as one."""
    count = getattr(tensor, "_use_count", None)  # not in PyTorch 2.11
    return int(count()) if count is not None else 0


class _Timed:
    """A pending call whose wait is timed."""

    def __init__(self, work: Any, waits: Waits, key: tuple[str, str]) -> None:
        self._work, self._waits, self._key = work, waits, key

    def wait(self, *arguments: Any, **named: Any) -> Any:
        began = time.perf_counter()
        result = self._work.wait(*arguments, **named)
        self._waits.waited(self._key, time.perf_counter() - began)
        return result

    def __getattr__(self, name: str) -> Any:
        return getattr(self._work, name)


_current: Waits | None = None


def backward_done() -> None:
    if _current is not None:
        _current.backward_done()


@contextmanager
def watching(ranks: Ranks) -> Iterator[Waits]:
    """Time PyTorch's collectives in this process while the block runs."""
    global _current
    waits = Waits(ranks)
    functional = torch.ops._c10d_functional
    replaced: list[tuple[Any, str, Any]] = []

    def replace(owner: Any, name: str, wrapped: Callable[[Any], Any]) -> None:
        plain = getattr(owner, name, None)
        if plain is not None:
            replaced.append((owner, name, plain))
            setattr(owner, name, wrapped(plain))

    for name, (kind, place, keyword) in CALLS.items():
        replace(dist, name, partial(_call, waits, kind=kind, place=place, keyword=keyword))
    for name in ("isend", "irecv"):  # under both names: what is asked of neighbours is checked to be one of the two
        message = _message(waits, getattr(dist, name), sends=name == "isend")
        for owner in (dist, dist.distributed_c10d):
            replace(owner, name, lambda plain, made=message: made)  # type: ignore[misc]
    pending: dict[int, tuple[tuple[str, str], float]] = {}
    wait = functional.wait_tensor
    for name, kind in FUNCTIONAL.items():
        replace(functional, name, partial(_functional, waits, kind=kind, pending=pending, wait=wait))
    replace(functional, "wait_tensor", partial(_wait_tensor, waits, pending=pending))
    _current = waits
    try:
        yield waits
    finally:
        _current = None
        for owner, name, plain in replaced:
            setattr(owner, name, plain)


@contextmanager
def timed_hooks(waits: Waits) -> Iterator[None]:
    """Hooks that DDP is given meanwhile are timed."""
    plain = DistributedDataParallel.register_comm_hook

    def register(self: Any, state: Any, hook: Any) -> None:
        plain(self, state, waits.bucket(hook, self.process_group))

    DistributedDataParallel.register_comm_hook = register  # type: ignore[method-assign]
    try:
        yield
    finally:
        DistributedDataParallel.register_comm_hook = plain  # type: ignore[method-assign]


def watch_replica(part: Any, waits: Waits) -> None:
    """DDP's own reduction, as a hook, where it has none."""
    if isinstance(part, DistributedDataParallel) and not getattr(part, "_comm_hooks", None):
        with timed_hooks(waits):
            part.register_comm_hook(part.process_group, allreduce_hook)


def within(
    function: Callable[..., Any], phase: Callable[[Phase], AbstractContextManager[None]], which: Phase
) -> Callable[..., Any]:
    """The function, its time counted to a phase."""

    def timed(*arguments: Any, **named: Any) -> Any:
        with phase(which):
            return function(*arguments, **named)

    return timed


def _call(waits: Waits, plain: Any, kind: str, place: int, keyword: str) -> Any:
    def timed(*arguments: Any, **named: Any) -> Any:
        if waits.settle and named.get("async_op"):
            # What a hook of DDP's does next is then done, and let go of, by this thread.
            work = plain(*arguments, **named)
            work.wait()
            return work
        if not waits.active:
            return plain(*arguments, **named)
        group = named.get("group") or next((a for a in arguments if isinstance(a, dist.ProcessGroup)), None)
        dimension, size = waits.dimension(group)
        if size < 2:
            return plain(*arguments, **named)
        buffer: Tensor = arguments[place] if len(arguments) > place else named[keyword]
        key = (dimension, kind)
        found = waits.called(key, buffer.numel() * buffer.element_size())
        holders = waits.holders(arguments, named)
        began = time.perf_counter()
        work = plain(*arguments, **named)
        if work is None or not named.get("async_op"):
            took = time.perf_counter() - began
            found.seconds = None if found.seconds is None else found.seconds + took
            waits.waited(key, took)
            waits.let_go(holders)
            return work

        def through(done: Any) -> None:
            if found.seconds is not None:
                found.seconds += time.perf_counter() - began

        work.get_future().add_done_callback(through)
        return _Timed(work, waits, key)

    return timed


def _message(waits: Waits, plain: Any, sends: bool) -> Any:
    @functools.wraps(plain)
    def timed(tensor: Tensor, *arguments: Any, **named: Any) -> Any:
        work = plain(tensor, *arguments, **named)
        if not waits.active or work is None:
            return work
        key = (waits.dimension(named.get("group"))[0], "send")
        if sends:
            waits.called(key, tensor.numel() * tensor.element_size()).seconds = None
        return _Timed(work, waits, key)

    return timed


def _functional(
    waits: Waits,
    plain: Any,
    kind: str,
    pending: dict[int, tuple[tuple[str, str], float]],
    wait: Callable[[Tensor], Any],
) -> Any:
    def timed(*arguments: Any, **named: Any) -> Any:
        if not waits.active:
            return plain(*arguments, **named)
        dimension, size = waits.dimension(next(a for a in reversed(arguments) if isinstance(a, str)))
        tensor: Tensor = arguments[0]
        count = tensor.numel() * tensor.element_size() * (size if kind == "all_gather" else 1)
        holders = waits.holders(arguments, named)
        began = time.perf_counter()
        result = plain(*arguments, **named)
        if waits.settle:
            wait(result)
            waits.let_go([*holders, (result, 1)])
        if size > 1:
            key = (dimension, kind)
            waits.called(key, count)
            waits.waited(key, time.perf_counter() - began)
            pending[result.data_ptr()] = key, began
        return result

    return timed


def _wait_tensor(waits: Waits, plain: Any, pending: dict[int, tuple[tuple[str, str], float]]) -> Any:
    def timed(tensor: Tensor, *rest: Any, **named: Any) -> Any:
        if not waits.active:
            return plain(tensor, *rest, **named)
        address = tensor.data_ptr()
        began = time.perf_counter()
        result = plain(tensor, *rest, **named)
        if address in pending:
            key, called = pending.pop(address)
            now = time.perf_counter()
            found = waits.found.setdefault(key, Found())
            found.seconds = None if found.seconds is None else found.seconds + now - called
            waits.waited(key, now - began)
        return result

    return timed
