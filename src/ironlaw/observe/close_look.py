"""One step seen operation by operation: what lines of the user's code compute that nothing comes of."""

from __future__ import annotations

import gc
import statistics
import sys
import time
import traceback
from collections import Counter, defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from itertools import takewhile
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import _get_current_function_mode_stack
from torch.utils._python_dispatch import (
    TorchDispatchMode,
    _disable_current_modes,
    _get_current_dispatch_mode_stack,
)
from torch.utils._pytree import tree_map_only

from ironlaw.ledger import Phase
from ironlaw.observe.attention_masks import OddMasks, hides_nothing_else, mask_saves
from ironlaw.observe.gradients import graph_of
from ironlaw.observe.loop_lines import LineTrace
from ironlaw.observe.partition import Partition
from ironlaw.observe.trials import share_saved
from ironlaw.observe.user_code import is_users, line_of, user_frames, user_line
from ironlaw.workload.trace_kernels import storages, tensors

MATRIX_PRODUCTS = ("mm", "addmm", "bmm", "baddbmm", "convolution", "mv")
PRODUCTS = ("mul", *MATRIX_PRODUCTS)
COPIES = ("clone", "_to_copy", "copy_")
SPREADING = ("repeat", "repeat_interleave", *COPIES)  # besides what works element by element
LEAST_ELEMENTS, FULL = 2**14, 0.05  # of an operand that is looked into, and the part of it that is not zero
LEAST_WIDE, TIMES_WIDER = 2**18, 8  # elements of a result, and how many times those of all its operands
MOST_OPERATIONS = 50_000  # a step of more is not looked at further: each costs some 50 us
WORK = (*MATRIX_PRODUCTS, "attention", "rnn", "lstm", "gru", "fft")  # what a model is for; parts of names
LEAST_SAVED = 0.3  # of an operation that is tried otherwise, twice: less is noise
ROWS = ("index", "gather", "scatter", "embedding")
SOME, LEAST_DENORMAL = 4096, 0.01  # elements of a tensor that are looked at, and the part of them that slows it
COSTLY = ("svd", "eig", "qr", "inv", "matrix_exp", "householder")  # tens of times a product or a triangular solve
FORWARD, BACKWARD = str(Phase.FORWARD), str(Phase.BACKWARD)
ZEROS, MASKED, RANK = "zeros_multiplied", "attention_masked", "attention_mask_rank"
HALF = (torch.bfloat16, torch.float16)
ONE = "one operation: "
SHORT_SECONDS = 1e-4  # on average, of operations that one call for all would make much shorter: ten times a call
TIMES_USUAL = 3  # the median time between two operations: more of it is Python of the user's own
LAYERS = str(Path(nn.__file__).parent / "modules")
LEAST_TIMES = 16  # in one run of a function: a loop, where the layers of a model have weights of their own


@dataclass(frozen=True)
class CountedCall:
    """One of a forward pass or a loss, with the line of the user's that calls it."""

    line: str
    name: str
    pointwise: bool
    operands: list[Tensor]
    made: list[Tensor]
    mask: Any  # of attention


@dataclass(eq=False)
class CloseLook(TorchDispatchMode):
    """Seconds of forward passes and losses by line, with what of the backward pass belongs to them.

    A line is unread where it takes values that a gradient would come back through, and none does: checks and measures.
    Of the kinds of `COUNTED` lines are marked. A line is slow where it repeats what it calls, or runs Python that
    calls nothing. Backward operations are those of the forward operation with their sequence number.
    """

    partition: Partition
    module: nn.Module
    taken: Callable[[str, Any], None] = lambda name, operands: None  # told what operations outside backward passes take

    def __post_init__(self) -> None:
        super().__init__()
        self._marked: dict[str, set[str]] = defaultdict(set)  # kind -> lines
        self.made_by: dict[int, str] = {}  # address of what holds nearly nothing -> line
        self.wide: dict[int, int] = {}  # address of what is wide -> elements
        self.masked: CountedCall | None = None
        self._attention = OddMasks()
        self._seconds: dict[str, dict[str, float]] = defaultdict(lambda: defaultdict(float))  # kind -> line -> seconds
        self._whole, self._backward, self._operations = 0.0, 0.0, 0
        self._learns: set[str] = set()  # lines that take values with a gradient
        self._read: set[str] = set()  # lines that a backward pass comes back through
        self._nodes: dict[int, tuple[str, list[str], float, list[str]]] = {}  # as `_forward` knows its operation
        self._head: int | None = None  # the product that the backward pass came through first: of a model's outputs
        self.types = {p.dtype for p in self.module.parameters()}
        self._loops = Loops(self.module)
        self._newest = torch._C._autograd._get_sequence_nr()
        self._on, self._looks, self._collects = False, True, False
        self.autocast = False  # all of the pass: its casts are what is wanted
        self._trace = LineTrace(self._line_begins, everywhere=True)
        self._gaps: list[dict[str, float]] = [defaultdict(float)]  # line -> seconds, between two operations of a pass
        self._line, self._since = "?", 0.0
        self._asked = "?"  # the line that has asked for the pass

    def begin(self) -> None:
        """Looks from here to `end`, unless the loop has a mode of its own on: modes must end in turn."""
        if not _get_current_dispatch_mode_stack():
            self._on, self._collects = True, gc.isenabled()
            gc.disable()  # what is collected is no doing of the line where it happens
            self._trace.begin()
            self._attention.__enter__()
            self.__enter__()

    def end(self) -> None:
        """Under a mode that the loop has begun since it stays, and looks no more; a later call ends it."""
        self._looks = False
        self._loops.end()
        self._trace.end()
        if self._collects:
            gc.enable()
            self._collects = False
        if self._on and _get_current_dispatch_mode_stack()[-1] is self:
            self._on = False
            self.__exit__(None, None, None)
            if _get_current_function_mode_stack()[-1] is self._attention:
                self._attention.__exit__(None, None, None)

    @contextmanager
    def paused(self) -> Iterator[None]:
        """What is done within is no doing of the loop's."""
        began = time.thread_time()
        with _disable_current_modes():
            yield
        self._since += time.thread_time() - began

    def pass_begins(self, roots: Any = ()) -> None:
        """A forward pass, or a backward pass from `roots`; what is repeated with every pass is no loop within one."""
        self._loops.end()
        self._asked = user_line()
        self.autocast = torch.is_autocast_enabled("cpu")
        for node in graph_of(roots) if self._on else ():
            self._read.add(self._nodes.get(node._sequence_nr(), ("",))[0])

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self._line_begins(self._line, counts=not by_layer())
        self._gaps.append(defaultdict(float))
        began = time.thread_time()  # of one step other programs would have a large part
        result = func(*args, **(kwargs or {}))
        seconds = time.thread_time() - began
        self._operations += 1
        if self._looks and self._operations < MOST_OPERATIONS:
            try:
                if self.partition.running is not Phase.BACKWARD:
                    self.taken(func.overloadpacket.__name__, args)
                if self._in_passes():
                    self._see(func, args, kwargs or {}, result, seconds)
            except Exception:  # of a tensor unlike others: what observes ends no loop
                self._looks = False
                self._whole = 0.0
        self._since = time.thread_time()
        return result

    def _see(self, func: Any, args: Any, kwargs: Any, result: Any, seconds: float) -> None:
        node = torch._C._current_autograd_node()
        if node is not None or self.partition.running is Phase.BACKWARD:
            line = self._count_backward(node, func.overloadpacket.__name__, args, seconds)
        else:
            line = self._count(func, dense(args), kwargs.get("attn_mask"), result, seconds)
        for kind, tries in TRIED.items():
            share = tries(self, func, args, kwargs, result)
            self._seconds[kind][line] += seconds * share if share > LEAST_SAVED else 0.0

    def _line_begins(self, line: str, counts: bool = True) -> None:
        """Count the time since the last line or operation for the line that has been running."""
        if counts and self._looks and self.partition.running is not Phase.BACKWARD and self._in_passes():
            self._gaps[-1][self._line] += time.thread_time() - self._since
        self._line, self._since = line, time.thread_time()

    def _in_passes(self) -> bool:
        running = self.partition.running
        of_loss = running is None and self.partition.intervals[-1].after is Phase.FORWARD
        return of_loss or running in (Phase.FORWARD, Phase.BACKWARD)

    def _count_backward(self, node: Any, name: str, args: Any, seconds: float) -> str:
        number = node._sequence_nr() if node is not None else -1
        line, kinds, forward, lines = self._nodes.get(number, ("", [], 0.0, []))
        if (own := user_line()) != self._asked:  # a hook, or a function's own backward pass
            called = CountedCall(own, name, False, dense(args), [], None)
            return self._add(own, [] if is_work(called) else [ONE + name], seconds)
        if line and name in MATRIX_PRODUCTS:
            self._head = number if self._head is None else self._head
            if self._head == number and ZEROS not in kinds and any(map(nearly_empty, tensors(args))):
                kinds = [*kinds, ZEROS]
                self._nodes[number] = line, kinds, 0.0, lines
                self._marked[ZEROS].add(line)
                self._seconds[ZEROS][line] += forward
        self._backward += seconds
        for loop in lines:
            self._seconds[BACKWARD][loop] += seconds
        return self._add(line, kinds, seconds)

    def _count(self, func: Any, operands: list[Tensor], mask: Any, result: Any, seconds: float) -> str:
        frames, newest = list(user_frames()), torch._C._autograd._get_sequence_nr()
        line, name = line_of(frames[0] if frames else None), func.overloadpacket.__name__
        self._head = None
        operation = CountedCall(line, name, torch.Tag.pointwise in func.tags, operands, dense(result), mask)
        blamed = {kind: counts(self, operation) for kind, counts in COUNTED.items()}
        kinds = [kind for kind, lines in blamed.items() if lines is not None]
        for kind in kinds:
            self._marked[kind] |= blamed[kind] or set()
        if self._attention.running:
            self._marked[RANK].add(line)
            kinds.append(RANK)
        kinds += [] if is_work(operation) or self._attention.running else [ONE + name]
        lines = self._loops.count(operation, frames, seconds)
        for number in range(self._newest, newest):
            self._nodes[number] = line, kinds, seconds, lines
        self._newest = newest
        if torch.is_grad_enabled() and any(t.requires_grad and not t.is_leaf for t in operands):
            self._learns.add(line)
        return self._add(line, [FORWARD, *kinds], seconds)

    def _add(self, line: str, kinds: list[str], seconds: float) -> str:
        self._whole += seconds
        for kind in kinds:
            self._seconds[kind][line] += seconds
        return line

    def facts(self, calls: Collection[str]) -> dict[str, Any]:
        """`calls`: lines that call the model, whose passes are judged as a whole."""
        marked = {kind: self._part(self._seconds[kind], self._marked[kind]) for kind in (*COUNTED, RANK)}
        if (found := marked[MASKED]) is not None and self.masked is not None:
            found["part"] *= mask_saves(self.masked.operands[:1] * 3, self.masked.mask, is_causal=True)
        if (found := marked[RANK]) is not None:
            *heads, mask = self._attention.seen
            found["part"] *= mask_saves(heads, mask, attn_mask=mask.detach()[None])
        return marked | {
            "values_unread": self._part(self._seconds[FORWARD], self._learns - self._read - set(calls)),
            **{k: self._part(self._seconds[k], [at for at, s in self._seconds[k].items() if s > 0]) for k in TRIED},
            "operation_slow": self._heaviest(calls),
            "line_slow": self._slow(set(calls)),
        }

    def place_of(self, operation: str) -> str | None:
        """Return the line where an operation that is no `WORK` took most; None without any."""
        taken = self._seconds[ONE + operation]
        return max(taken, key=lambda line: taken[line], default=None)

    def _heaviest(self, calls: Collection[str]) -> dict[str, Any] | None:
        """Return the operation, other than `WORK`, that takes the most time in one line."""
        each = ((kind, line) for kind, lines in self._seconds.items() if kind.startswith(ONE) for line in lines)
        found = max(each, key=lambda one: (one[1] not in calls, self._seconds[one[0]][one[1]]), default=None)
        if found is None or (part := self._part(self._seconds[found[0]], {found[1]} - set(calls))) is None:
            return None
        return part | {"operation": found[0].removeprefix(ONE)}

    def _part(self, seconds: dict[str, float], lines: Iterable[str]) -> dict[str, Any] | None:
        """Of the passes' operations."""
        found = sorted(((line, seconds[line]) for line in lines if line != "?"), key=lambda one: -one[1])
        if not found or not self._whole:
            return None
        part = sum(taken for _, taken in found) / self._whole
        return {"part": part, "place": found[0][0], "lines": [line for line, _ in found[1:3]]}

    def _slow(self, calls: set[str]) -> dict[str, Any] | None:
        """Return the lines that take most of the passes beyond one call of each operation, in a loop or in Python."""
        gaps = [(sum(gap.values()), gap) for gap in self._gaps if gap]
        python = sum(total for total, _ in gaps)
        usual = TIMES_USUAL * statistics.median(total for total, _ in gaps) if gaps else 0.0
        each = python / max(1, self._loops.calls)
        whole = python + sum(self._seconds[FORWARD].values()) or 1.0
        found: list[tuple[float, float, list[str], str]] = []
        for times, lines in self._loops.short(calls):
            taken = {line: sum(self._loops.taken[line]) + each * len(self._loops.taken[line]) for line in lines}
            back = max(self._seconds[BACKWARD][line] for line in lines) / (self._backward or 1.0)
            order = sorted(lines, key=lambda line: -taken[line])
            found.append((min(1.0, sum(taken.values()) / whole), back, order, f"the same operations {times} times"))
        own: dict[str, float] = defaultdict(float)
        for total, gap in gaps:
            for line in gap.keys() - calls - {"?"}:
                own[line] += gap[line] * max(0.0, 1 - usual / (total or 1.0))
        found += [(taken / whole, 0.0, [line], "Python without operations") for line, taken in own.items()]
        forward, back, places, again = max(found, key=lambda one: one[0] + one[1], default=(0.0, 0.0, [], ""))
        if forward + back <= 0:
            return None
        return {FORWARD: forward, BACKWARD: back, "place": places[0], "lines": [*places[1:3], again]}


class Loops:
    """Lines that call the same operations again and again, each time for a part of what one call could do. The layers
    of a model do not: each has weights of its own."""

    def __init__(self, module: nn.Module) -> None:
        self._weights = {p.data_ptr() for p in module.parameters()}
        # The outermost first: with what was called by line, and all that was.
        self._running: list[tuple[FrameType, dict[str, Counter[tuple[str, int]]], set[tuple[str, int]]]] = []
        self._times: dict[CodeType, dict[str, int]] = defaultdict(dict)  # function -> line -> times
        self.taken: dict[str, list[float]] = defaultdict(list)  # line -> seconds of each operation
        self.calls = 0

    def count(self, operation: CountedCall, frames: list[FrameType], seconds: float) -> list[str]:
        """The lines of all functions that run. What one of them repeats, those around it called once."""
        pairs = zip(self._running, reversed(frames), strict=False)
        kept = sum(1 for _ in takewhile(lambda pair: pair[0][0] is pair[1], pairs))
        self.end(kept)
        self._running += [(frame, defaultdict(Counter), set()) for frame in reversed(frames[: len(frames) - kept])]
        called = operation.name, next((t.data_ptr() for t in operation.operands if t.data_ptr() in self._weights), 0)
        lines = [line_of(frame) for frame in frames]
        for line, (_, counts, seen) in zip(lines, reversed(self._running), strict=True):
            counts[line][called] += 1
            if called in seen:
                break
            seen.add(called)
        self.calls += 1
        for line in (found := list(dict.fromkeys(lines))):
            self.taken[line].append(seconds)
        return found

    def end(self, kept: int = 0) -> None:
        """All but so many of the functions have returned."""
        for frame, counts, _ in self._running[kept:]:
            for line, calls in counts.items():
                weighted = [number for (_, weight), number in calls.items() if weight]
                before = self._times[frame.f_code]
                before[line] = max(statistics.median_low(weighted or calls.values()), before.get(line, 0))
        del self._running[kept:]

    def short(self, calls: Collection[str]) -> Iterator[tuple[int, set[str]]]:
        """How often, and the lines of one function that repeat what they call, where that is short: a model that is
        applied again and again to what it gave has nothing to put together."""
        for times in self._times.values():
            lines = {line for line, number in times.items() if number >= LEAST_TIMES and line not in calls}
            if lines and statistics.mean(x for line in lines for x in self.taken[line]) < SHORT_SECONDS:
                yield max(times[line] for line in lines), lines


def _of_zeros(look: CloseLook, one: CountedCall) -> set[str] | None:
    """Products of which nearly all of an operand is zero: one-hot rows, dense adjacency, gradients of outputs that no
    loss reads; and what makes such operands."""
    empty = [t for t in one.operands if nearly_empty(t)]
    made = {t.data_ptr(): one.line for t in one.made if nearly_empty(t)}
    blamed = {look.made_by.get(t.data_ptr(), one.line) for t in empty} if one.name in PRODUCTS else set()
    look.made_by |= made
    return blamed | ({one.line} if blamed else set()) if empty or made else None


def _spread(look: CloseLook, one: CountedCall) -> set[str] | None:
    """Results many times as wide as what they are made of, and what works on them; products and attention take a mask
    besides what they are there for."""
    if (one.pointwise or one.name in SPREADING) and is_wide(one.operands, one.made):
        look.wide[one.made[0].data_ptr()] = one.made[0].numel()
        return {one.line}
    spread = {t.numel() for t in one.operands if look.wide.get(t.data_ptr()) == t.numel()}
    if one.name in MATRIX_PRODUCTS or "attention" in one.name:
        spread.clear()
    before = {t.data_ptr() for t in one.operands}
    for made in (t for t in one.made if t.data_ptr() not in before):  # where something else may have been
        look.wide[made.data_ptr()] = made.numel() if made.numel() in spread else 0
    return set() if spread else None


def _copies(look: CloseLook, one: CountedCall) -> set[str] | None:
    large = one.name in COPIES and one.made[0].numel() >= LEAST_ELEMENTS
    return {one.line} if large and not look.autocast else None


def _in_float64(look: CloseLook, one: CountedCall) -> set[str] | None:
    """Of a model that is not in float64 itself."""
    large = any(t.dtype is torch.float64 and t.numel() >= LEAST_ELEMENTS for t in one.made)
    return {one.line} if large and torch.float64 not in look.types else None


def _decomposes(_: CloseLook, one: CountedCall) -> set[str] | None:
    return {one.line} if "linalg_" in one.name and any(word in one.name for word in COSTLY) else None


def _masked(look: CloseLook, one: CountedCall) -> set[str] | None:
    """Attention that is given a causal mask."""
    if one.mask is None or not hides_nothing_else(one.mask):
        return None
    look.masked = one
    return {one.line}


COUNTED: dict[str, Callable[[CloseLook, CountedCall], set[str] | None]] = {
    ZEROS: _of_zeros, "broadcasts": _spread, "copies": _copies, "float64_operations": _in_float64,
    "decompositions": _decomposes, MASKED: _masked,
}  # fmt: skip
"""Rule -> the lines to blame for an operation that counts there, None where it does not."""


def dense(value: Any) -> list[Tensor]:
    """Return the tensors of a nesting that have a storage of their own."""
    return [t for t in tensors(value) if t.layout is torch.strided]


def by_layer() -> bool:
    """Return whether a layer of PyTorch's own calls this, whose Python is not the user's."""
    files = (frame.f_code.co_filename for frame, _ in traceback.walk_stack(sys._getframe(2)))
    return any(file.startswith(LAYERS) for file in takewhile(lambda file: not is_users(file), files))


def is_work(one: CountedCall) -> bool:
    """Return whether this is what models are for: products, and rows taken by number. Masks of truth values are not."""
    by_number = one.name.startswith(ROWS) and all(t.dtype is not torch.bool for t in one.operands)
    return by_number or any(word in one.name for word in WORK)


def is_wide(operands: list[Tensor], made: list[Tensor]) -> bool:
    """Whether the result has many times the elements of all operands, each as it lies in memory."""
    if len(made) != 1 or not operands or made[0].numel() < LEAST_WIDE:
        return False
    held = sum(min(t.numel(), sum(part.nbytes() for part in storages(t)) // t.element_size()) for t in operands)
    return made[0].numel() >= TIMES_WIDER * held


def is_denormal(tensor: Tensor) -> bool:
    """Return whether a large tensor has denormal numbers, judged by a sample of its elements."""
    if tensor.numel() < LEAST_ELEMENTS or tensor.dtype not in (torch.float32, torch.float64):
        return False
    if tensor.layout is not torch.strided or not tensor.is_contiguous():
        return False
    some = tensor.detach().view(-1)[:: max(1, tensor.numel() // SOME)]
    least = torch.finfo(tensor.dtype).smallest_normal
    return int(((some != 0) & (some.abs() < least)).sum()) > LEAST_DENORMAL * some.numel()


def share_flushed(_: CloseLook, func: Any, args: Any, kwargs: Any, result: Any) -> float:
    """Return the share of time that an operation saves when denormal numbers count as zero. Operations that write in
    place or draw random numbers cannot be repeated, and return 0."""
    if func._schema.is_mutable or torch.Tag.nondeterministic_seeded in func.tags:
        return 0.0
    if not any(map(is_denormal, tensors((args, result)))):
        return 0.0

    def tried(flush: bool) -> None:
        torch.set_flush_denormal(flush)
        func(*args, **kwargs)

    kept = bool(torch.tensor([torch.finfo(torch.float32).smallest_normal]).div(2).any())
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # other threads' numbers are as when they began
    try:
        return share_saved(partial(tried, False), partial(tried, True), 2) if kept else 0.0
    finally:
        torch.set_flush_denormal(not kept)
        torch.set_num_threads(threads)


def share_of_half(look: CloseLook, func: Any, args: Any, kwargs: Any, result: Any) -> float:
    """Return the share of time that fp32 saves for a product in 16 bits, if the rest of the model is in fp32."""
    if func.overloadpacket.__name__ not in MATRIX_PRODUCTS or look.autocast or not look.types.isdisjoint(HALF):
        return 0.0
    if not any(t.dtype in HALF and t.numel() >= LEAST_ELEMENTS for t in tensors(result)):
        return 0.0
    wide = tree_map_only(Tensor, lambda t: t.float() if t.dtype in HALF else t, (args, kwargs))
    return share_saved(partial(func, *args, **kwargs), partial(func, *wide[0], **wide[1]), 2)


TRIED: dict[str, Callable[[CloseLook, Any, Any, Any, Any], float]] = {
    "denormals": share_flushed, "half_operations": share_of_half,
}  # fmt: skip
"""Rule -> the share of an operation's time that another way to call it saves; both ways are timed on the spot."""


def nearly_empty(tensor: Tensor) -> bool:
    """Of zeros, and no parameter that starts there."""
    if tensor.numel() < LEAST_ELEMENTS or tensor.dtype is torch.bool or (tensor.is_leaf and tensor.requires_grad):
        return False
    if tensor.layout is not torch.strided:
        return False
    return int(torch.count_nonzero(tensor)) <= FULL * tensor.numel()
