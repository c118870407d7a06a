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

from ironlaw.ledger import Phase
from ironlaw.observe.gradients import graph_of
from ironlaw.observe.operation_checks import (
    MATRIX_PRODUCTS,
    MIN_ELEMENTS,
    CountedCall,
    OddMasks,
    OperationChecks,
    share_saved_without,
    zero_part,
)
from ironlaw.observe.partition import Partition
from ironlaw.observe.user_code import LineTrace, is_users, line_of, user_frames, user_line
from ironlaw.workload.trace_kernels import tensors

MAX_OPERATIONS = 50_000  # a step of more is not looked at further: each costs some 50 us
MIN_SAVED = 0.3  # of an operation that is tried otherwise: less is noise
FORWARD, BACKWARD = str(Phase.FORWARD), str(Phase.BACKWARD)
UNREAD, MASKED, MASK_RANK = "outputs_unread", "attention_masked", "attention_mask_rank"
VOCABULARY, INPUTS = "vocabulary_unused", "inputs_differentiated"
MIN_UNREAD = 0.5  # of the rows or columns of a model's outputs
ONE_OPERATION, WRITTEN_OUT = "one operation: ", "written out: "
MIN_SITES = 4  # operations of a function, one for each pass over its tensors
MAX_SHORT_SECONDS = 1e-4  # mean of operations that one call for all would make much shorter: ten times a call
TIMES_USUAL = 3  # the median time between two operations, a short one's at most: more is Python of the user's own
MIN_TIMES = 16  # in one run of a function: a loop, where the layers of a model have weights of their own
MIN_ALIKE = 4  # products of the same input with weights of their own: queries, keys and values are three
PYTORCH_LAYERS = str(Path(nn.__file__).parent / "modules")

Seconds = dict[str, float]  # by line
# Line, kinds, seconds and lines of all running functions, of the forward operation that a node of autograd is of.
_Node = tuple[str, list[str], float, list[str]]


class CloseLook(TorchDispatchMode):
    """Seconds of forward passes and losses by line, with what of the backward pass belongs to them.

    A line is unread where it takes values that a gradient would come back through, and none does, nor through what is
    made of its results: checks and measures.
    Kinds of time are rules of `OperationChecks`, FORWARD and BACKWARD, and names of single operations; lines are marked
    for a rule. A line is slow where it repeats what it calls, or runs Python that calls nothing. Backward operations
    are those of the forward operation with their sequence number. `on_operation` is given the name and operands of
    every operation outside backward passes.
    """

    def __init__(
        self,
        partition: Partition,
        module: nn.Module,
        on_operation: Callable[[str, Any], None] = lambda name, args: None,
    ) -> None:
        super().__init__()
        self._partition, self._module, self._on_operation = partition, module, on_operation
        self._checks, self._odd_masks, self._loops = OperationChecks(module), OddMasks(), Loops(module)
        self._is_on, self._is_looking, self._collects = False, True, False
        self._seconds: dict[str, Seconds] = defaultdict(lambda: defaultdict(float))  # kind -> seconds
        self._marked: dict[str, set[str]] = defaultdict(set)  # rule -> lines
        self._whole, self._backward, self._tables, self._operations = 0.0, 0.0, 0.0, 0
        self._taking: set[str] = set()  # lines that take values with a gradient, or what such lines make without one
        self._made_by: dict[int, str] = {}  # address of what they make without a gradient -> line
        self._feeds: dict[str, set[str]] = defaultdict(set)  # line -> lines that take what it makes so
        self._read = {""}  # lines that a backward pass comes back through, or that write weights or buffers
        self._state = {t.data_ptr() for t in (*module.parameters(), *module.buffers())}
        self._nodes: dict[int, _Node] = {}  # by sequence number
        self._newest = torch._C._autograd._get_sequence_nr()
        self._unread_part = 0.0  # of the outputs
        self._inputs: list[Tensor] = []  # with gradients of their own, that nothing has read
        self._to_inputs: set[int] = set()  # numbers of nodes from which a backward pass comes to no weight
        self._head: int | None = None  # the product that the backward pass came through first: of a model's outputs
        self._trace = LineTrace(self._line_begins, everywhere=True)
        self._gaps: list[Seconds] = [defaultdict(float)]  # between two operations of a pass
        self._functions: dict[str, CodeType] = {}  # kind of time -> function whose own operations it is of
        self._sites: dict[CodeType, set[int]] = defaultdict(set)  # function -> where it calls them, -1 for products
        self._line, self._since = "?", 0.0
        self._is_layers = False  # the running operation is called by one of PyTorch's own
        self._pass_line = "?"  # which has called for the pass

    def begin(self) -> None:
        """Looks from here to `end`, unless the loop has a mode of its own on: modes must end in turn."""
        if not _get_current_dispatch_mode_stack():
            self._is_on, self._collects = True, gc.isenabled()
            gc.disable()  # what is collected is not made by the line where it happens
            self._trace.begin()
            self._odd_masks.__enter__()
            self.__enter__()

    def end(self) -> None:
        """Under a mode that the loop has begun since it stays, and looks no more; a later call ends it."""
        self._is_looking = False
        self._loops.end()
        self._trace.end()
        if self._collects:
            gc.enable()
            self._collects = False
        if self._is_on and _get_current_dispatch_mode_stack()[-1] is self:
            self._is_on = False
            self.__exit__(None, None, None)
            if _get_current_function_mode_stack()[-1] is self._odd_masks:
                self._odd_masks.__exit__(None, None, None)

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Operations and time of the block are not the loop's."""
        began = time.thread_time()
        with _disable_current_modes():
            yield
        self._since += time.thread_time() - began

    def pass_begins(self, roots: Any = ()) -> None:
        """A forward pass, or a backward pass from `roots`; what is repeated with every pass is no loop within one."""
        self._loops.end()
        self._pass_line = user_line()
        self._checks.uses_autocast = torch.is_autocast_enabled("cpu")
        nodes = graph_of(roots) if self._is_on else []
        self._read |= {self._nodes.get(node._sequence_nr(), ("",))[0] for node in nodes}
        self._find_inputs(nodes)

    def _find_inputs(self, nodes: list[Any]) -> None:
        """Find inputs that have gradients of their own, and nodes from which a backward pass comes to nothing else."""
        leads: dict[Any, bool] = {}  # node -> whether a backward pass comes from it to a weight
        for node in sorted(nodes, key=lambda node: -1 if hasattr(node, "variable") else node._sequence_nr()):
            leaf = getattr(node, "variable", None)
            if leaf is None:  # a function of the user's may write any gradient
                is_function = isinstance(node, torch.autograd.function.BackwardCFunction)
                leads[node] = is_function or any(leads.get(before) for before, _ in node.next_functions)
            else:
                leads[node] = isinstance(leaf, nn.Parameter) or leaf.data_ptr() in self._state
                self._inputs += [] if leads[node] else [leaf]
        self._to_inputs |= {node._sequence_nr() for node, is_needed in leads.items() if not is_needed}

    def _forget_read(self, operands: Any) -> None:
        """Forget inputs whose gradients an operation takes."""
        read = {t.data_ptr() for t in dense(operands)}
        self._inputs = [one for one in self._inputs if read.isdisjoint(t.data_ptr() for t in dense(one.grad))]

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self._is_layers = _is_called_by_layer()
        self._line_begins(self._line, is_counted=not self._is_layers)
        self._gaps.append(defaultdict(float))
        began = time.thread_time()  # of one step other programs would have a large part
        result = func(*args, **(kwargs or {}))
        seconds = time.thread_time() - began
        self._operations += 1
        if self._is_looking and self._operations < MAX_OPERATIONS:
            try:
                name = func.overloadpacket.__name__
                if self._partition.running is not Phase.BACKWARD:
                    self._on_operation(name, args)
                    self._forget_read(args if self._inputs else ())
                if self._is_in_pass():
                    self._count(func, args, kwargs or {}, result, seconds)
                elif self._made_by:
                    self._follow(CountedCall(user_line(), name, False, dense(args), dense(result)))
            except Exception:  # of a tensor unlike others: what observes ends no loop
                self._is_looking = False
                self._whole = 0.0
        self._since = time.thread_time()
        return result

    def _line_begins(self, line: str, is_counted: bool = True) -> None:
        """Count the time since the last line or operation for the line that has been running."""
        is_forward = self._partition.running is not Phase.BACKWARD and self._is_in_pass()
        if is_counted and self._is_looking and is_forward:
            self._gaps[-1][self._line] += time.thread_time() - self._since
        self._line, self._since = line, time.thread_time()

    def _is_in_pass(self) -> bool:
        running = self._partition.running
        is_loss = running is None and self._partition.intervals[-1].after is Phase.FORWARD
        return is_loss or running in (Phase.FORWARD, Phase.BACKWARD)

    def _count(self, func: Any, args: Any, kwargs: Any, result: Any, seconds: float) -> None:
        node, name = torch._C._current_autograd_node(), func.overloadpacket.__name__
        if node is not None or self._partition.running is Phase.BACKWARD:
            line, kinds = self._count_backward(node, name, args, result, seconds)
        else:
            frames = list(user_frames())
            line = line_of(frames[0] if frames else None)
            is_pointwise, mask = torch.Tag.pointwise in func.tags, kwargs.get("attn_mask")
            call = CountedCall(line, name, is_pointwise, dense(args), dense(result), mask)
            kinds = self._count_forward(call, frames, seconds)
        self._whole += seconds
        for kind in kinds:
            self._seconds[kind][line] += seconds
        for rule in OperationChecks.TRIED:
            share = getattr(self._checks, rule)(func, args, kwargs, result)
            if share > MIN_SAVED:
                self._marked[rule].add(line)
                self._seconds[rule][line] += seconds * share

    def _count_backward(self, node: Any, name: str, args: Any, result: Any, seconds: float) -> tuple[str, list[str]]:
        """Returns the line and the kinds of time of a backward operation. Gradients that the loop itself asks for count
        as made by the line that does; with a graph of their own they are for a later pass."""
        number = node._sequence_nr() if node is not None else -1
        line, kinds, forward, lines = self._nodes.get(number, ("", [], 0.0, []))
        self._add_nodes((line, kinds, 0.0, lines))  # of a graph of the graph
        is_pass, own = self._partition.running is Phase.BACKWARD, user_line()  # else it is torch.autograd.grad
        operands = {t.data_ptr() for t in dense(args)}
        for made in (t for t in dense(result) if t.data_ptr() not in operands):  # no views
            self._made_by.pop(made.data_ptr(), None)
            if not is_pass:
                self._made_by[made.data_ptr()] = own
                (self._read if made.requires_grad else self._taking).add(own)
        if not is_pass:
            self._seconds[FORWARD][own] += seconds
        elif own != self._pass_line:  # a hook, or a function's own backward pass
            return own, [] if CountedCall(own, name, False, dense(args), []).is_main_work else [ONE_OPERATION + name]
        if line and name in MATRIX_PRODUCTS:
            self._head = number if self._head is None else self._head
            given = (t for t in dense(args) if t.data_ptr() not in self._loops.weights)
            if (
                self._head == number
                and UNREAD not in kinds
                and (part := max(map(zero_part, given), default=0.0)) > MIN_UNREAD
            ):
                kinds, self._unread_part = [*kinds, UNREAD], part
                self._nodes[number] = line, kinds, 0.0, lines
                self._marked[UNREAD].add(line)
                self._seconds[UNREAD][line] += forward
        if line and number in self._to_inputs:
            kinds = [*kinds, INPUTS]
            self._marked[INPUTS].add(line)
        self._backward += seconds
        self._tables += seconds if "embedding" in name else 0.0
        for loop in lines:
            self._seconds[BACKWARD][loop] += seconds
        return line, kinds

    def _count_forward(self, call: CountedCall, frames: list[FrameType], seconds: float) -> list[str]:
        """Returns the kinds of time of a forward operation."""
        self._head = None
        blamed = self._checks.count(call)
        if self._odd_masks.is_running:
            blamed[MASK_RANK] = {call.line}
        for rule, lines in blamed.items():
            self._marked[rule] |= lines
        is_single = not call.is_main_work and not self._odd_masks.is_running
        kinds = [*blamed, *([ONE_OPERATION + call.name] if is_single else [])]
        kinds += [self._written_out(call, frames[0])] if frames and not self._is_layers else []
        self._add_nodes((call.line, kinds, seconds, self._loops.count(call, frames, seconds)))
        takes = torch.is_grad_enabled() and any(t.requires_grad and not t.is_leaf for t in call.operands)
        self._follow(call, takes)
        return [FORWARD, *kinds]

    def _written_out(self, call: CountedCall, frame: FrameType) -> str:
        """Returns the kind of time that the operations which a function of the user's calls itself have in common."""
        code = frame.f_code
        given = {t.data_ptr() for t in call.operands}
        is_large = any(t.numel() >= MIN_ELEMENTS for t in (*call.operands, *call.results))
        if call.is_main_work or (is_large and any(t.data_ptr() not in given for t in call.results)):
            self._sites[code].add(-1 if call.is_main_work else frame.f_lasti)
        kind = f"{WRITTEN_OUT}{code.co_filename}:{code.co_firstlineno}"
        self._functions[kind] = code
        return kind

    def _add_nodes(self, node: _Node) -> None:
        """Those that autograd has made since."""
        newest = torch._C._autograd._get_sequence_nr()
        self._nodes |= dict.fromkeys(range(self._newest, newest), node)
        self._newest = newest

    def _follow(self, call: CountedCall, takes: bool = False) -> None:
        """Follow values that a gradient would come back through, which the call `takes`, to what is made of them
        without one."""
        makers = {self._made_by[t.data_ptr()] for t in call.operands if t.data_ptr() in self._made_by}
        for maker in makers:
            self._feeds[maker].add(call.line)
        if makers or takes:
            self._taking.add(call.line)
        for made in call.results or call.operands:  # what returns nothing writes into what it is given
            self._made_by.pop(made.data_ptr(), None)
            if (makers or takes) and not made.requires_grad:
                self._made_by[made.data_ptr()] = call.line
            if made.data_ptr() in self._state and any(made is given for given in call.operands):  # no view of it
                self._read.add(call.line)

    def update_begins(self, parameters: Iterable[Tensor]) -> None:
        """Gradients that the loop has put together itself are read by this update."""
        gradients = dense([p.grad for p in parameters]) if self._is_looking else []
        self._read |= {self._made_by.get(gradient.data_ptr(), "") for gradient in gradients}

    def _unread(self) -> set[str]:
        """Returns the lines of which nothing reaches one that is read."""
        unread, before = self._taking - self._read, set[str]()
        while unread != before:
            before, unread = unread, {line for line in unread if self._feeds[line] <= unread}
        return unread

    def facts(self, calls: Collection[str]) -> dict[str, Any]:
        """`calls`: lines that call the model, whose passes are judged as a whole."""
        rules = (*OperationChecks.COUNTED, *OperationChecks.TRIED, MASK_RANK, UNREAD)
        found = {rule: self._part(self._seconds[rule], self._marked[rule]) for rule in rules}
        if (part := found[MASKED]) is not None and (masked := self._checks.masked) is not None:
            part["part"] *= share_saved_without(masked.operands[:1] * 3, masked.mask, is_causal=True)
        if (part := found[MASK_RANK]) is not None:
            *heads, mask = self._odd_masks.found
            part["part"] *= share_saved_without(heads, mask, attn_mask=mask.detach()[None])
        if (part := found[UNREAD]) is not None:
            part["part"] *= self._unread_part
        if (part := found[VOCABULARY]) is not None:
            rows, unused = self._checks.vocabulary
            sizes = [(p.numel(), p.shape[:1] == (rows,)) for p in self._module.parameters()]
            updated = sum(size for size, is_of_words in sizes if is_of_words) / sum(size for size, _ in sizes)
            part |= {"part": part["part"] * unused, "optimizer": updated * unused, "rows": rows, "unused": unused,
                     "place": None, "lines": [part["place"], *part["lines"]]}  # fmt: skip
        found[INPUTS] = self._part(self._seconds[INPUTS], self._marked[INPUTS]) if self._inputs else None
        unread = self._unread() - set(calls)
        return found | {
            "values_unread": self._part(self._seconds[FORWARD], unread),
            "operation_slow": self._slowest_operation(calls),
            "written_out": self._longest_function(calls),
            "line_slow": self._slowest_line(set(calls)),
        }

    @property
    def tables_part(self) -> float:
        """Of the backward passes, for gradients of embeddings."""
        return self._tables / (self._backward or 1.0)

    def place_of(self, operation: str) -> str | None:
        """Returns the line where an operation that is no main work took most; None without any."""
        taken = self._seconds[ONE_OPERATION + operation]
        return max(taken, key=lambda line: taken[line], default=None)

    def _slowest_operation(self, calls: Collection[str]) -> dict[str, Any] | None:
        """Returns the operation, other than main work, that takes the most time in one line."""
        each = (
            (seconds, kind.removeprefix(ONE_OPERATION), line)
            for kind, lines in self._seconds.items()
            for line, seconds in lines.items()
            if kind.startswith(ONE_OPERATION) and line not in calls
        )
        seconds, operation, line = max(each, default=(0.0, "", "?"))
        part = self._part({line: seconds}, {line})
        return None if part is None else part | {"operation": operation}

    def _longest_function(self, calls: Collection[str]) -> dict[str, Any] | None:
        """Returns the function without products that takes most with operations of its own, and the part of them that
        one pass over its tensors in place of one for each would save."""
        found = []
        for kind, code in self._functions.items():
            sites, seconds = self._sites[code], self._seconds[kind]
            lines = {f"{code.co_filename}:{line}" for *_, line in code.co_lines()}
            if -1 not in sites and len(sites) >= MIN_SITES and lines.isdisjoint(calls):
                found.append((sum(seconds.values()) * (1 - 1 / len(sites)), seconds, code.co_name, len(sites)))
        saved, seconds, name, number = max(found, key=lambda one: one[0], default=(0.0, {}, "", 0))
        part = self._part(seconds, seconds)
        return None if part is None else part | {"part": saved / self._whole, "function": name, "operations": number}

    def _part(self, seconds: Seconds, lines: Iterable[str]) -> dict[str, Any] | None:
        """Returns the part of the passes' operations that is on these lines."""
        found = sorted(((line, seconds[line]) for line in lines if line != "?"), key=lambda one: -one[1])
        if not found or not self._whole:
            return None
        part = sum(taken for _, taken in found) / self._whole
        return {"part": part, "place": found[0][0], "lines": [line for line, _ in found[1:3]]}

    def _slowest_line(self, calls: set[str]) -> dict[str, Any] | None:
        """Returns the lines that take most of the passes beyond one call of each operation, in a loop or in Python."""
        gaps = [(sum(gap.values()), gap) for gap in self._gaps if gap]
        usual = min(MAX_SHORT_SECONDS, statistics.median(total for total, _ in gaps)) if gaps else 0.0
        whole = sum(total for total, _ in gaps) + sum(self._seconds[FORWARD].values()) or 1.0
        found: list[tuple[float, float, list[str], str]] = []  # forward, backward, lines, text
        for times, lines in self._loops.short(calls):
            taken = {at: sum(s) + usual * len(s) for at, s in self._loops.taken.items() if at in lines}
            back = min(1.0, sum(self._seconds[BACKWARD][line] for line in lines) / (self._backward or 1.0))
            order = sorted(lines, key=lambda line: -taken[line])
            found.append((min(1.0, sum(taken.values()) / whole), back, order, f"the same operations {times} times"))
        own: Seconds = defaultdict(float)
        for total, gap in gaps:
            for line in gap.keys() - calls - {"?"}:
                own[line] += gap[line] * max(0.0, 1 - TIMES_USUAL * usual / (total or 1.0))
        found += [(taken / whole, 0.0, [line], "Python without operations") for line, taken in own.items()]
        forward, back, places, text = max(
            found, key=lambda one: one[0] * whole + one[1] * self._backward, default=(0.0, 0.0, [], "")
        )
        if forward + back <= 0:
            return None
        return {FORWARD: forward, BACKWARD: back, "place": places[0], "lines": [*places[1:3], text]}


class Loops:
    """Lines that call the same operations again and again, each time for a part of what one call could do. The layers
    of a model do not: each has weights of its own, and what the one before gave."""

    def __init__(self, module: nn.Module) -> None:
        self.weights = {p.data_ptr() for p in module.parameters()}
        # Functions, the outermost first: with the times of each operation by line, and all operations.
        self._running: list[tuple[FrameType, dict[str, Counter[tuple[str, int]]], set[tuple[str, int]]]] = []
        self._times: dict[CodeType, dict[str, int]] = defaultdict(dict)  # function -> line -> times
        self._alike: dict[CodeType, dict[str, int]] = defaultdict(dict)  # and of products of one input
        self.taken: dict[str, list[float]] = defaultdict(list)  # line -> seconds of each operation

    def count(self, call: CountedCall, frames: list[FrameType], seconds: float) -> list[str]:
        """Returns the lines of all functions that run. What one of them repeats, those around it called once."""
        pairs = zip(self._running, reversed(frames), strict=False)
        kept = sum(1 for _ in takewhile(lambda pair: pair[0][0] is pair[1], pairs))
        self.end(kept)
        self._running += [(frame, defaultdict(Counter), set()) for frame in reversed(frames[: len(frames) - kept])]
        addresses = [t.data_ptr() for t in call.operands]
        weight = next((at for at in addresses if at in self.weights), 0)
        given = next((at for at in addresses if at not in self.weights), 0)
        lines = [line_of(frame) for frame in frames]
        for called in ((call.name, weight), (call.name, -given)) if weight else ((call.name, 0),):
            for line, (_, times, all_called) in zip(lines, reversed(self._running), strict=True):
                times[line][called] += 1
                if called in all_called:
                    break
                all_called.add(called)
        for line in (found := list(dict.fromkeys(lines))):
            self.taken[line].append(seconds)
        return found

    def end(self, kept: int = 0) -> None:
        """All but so many of the functions have returned."""
        for frame, times, _ in self._running[kept:]:
            for line, calls in times.items():
                weighted = [number for (_, address), number in calls.items() if address > 0]
                alike = max((number for (_, address), number in calls.items() if address < 0), default=0)
                repeated = statistics.median_low(weighted or calls.values())
                for known, number in ((self._times, repeated), (self._alike, alike)):
                    known[frame.f_code][line] = max(number, known[frame.f_code].get(line, 0))
        del self._running[kept:]

    def short(self, calls: Collection[str]) -> Iterator[tuple[int, set[str]]]:
        """Yields how often, and the lines of one function that repeat what they call, where that is short: a model that
        is applied again and again to what it gave has nothing to put together."""
        for code, times in self._times.items():
            alike = self._alike[code]
            lines = {at for at in times.keys() - calls if times[at] >= MIN_TIMES or alike[at] >= MIN_ALIKE}
            if lines and statistics.mean(x for line in lines for x in self.taken[line]) < MAX_SHORT_SECONDS:
                yield max(max(times[line], alike[line]) for line in lines), lines


def dense(value: Any) -> list[Tensor]:
    """Returns the tensors of a nesting that have a storage of their own."""
    return [t for t in tensors(value) if t.layout is torch.strided]


def _is_called_by_layer() -> bool:
    """Whether a layer of PyTorch's own calls the operation; its Python is not the user's."""
    files = (frame.f_code.co_filename for frame, _ in traceback.walk_stack(sys._getframe(2)))
    return any(file.startswith(PYTORCH_LAYERS) for file in takewhile(lambda file: not is_users(file), files))
