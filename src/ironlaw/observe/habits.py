"""What a loop leaves switched on and what it keeps: looked at step by step, tried both ways at the end.

Every finding carries the line of the user's code where it begins, as far as the text of that code tells.
"""

from __future__ import annotations

import gc
import itertools
import statistics
import sys
import time
import tracemalloc
from collections import Counter, defaultdict
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, replace
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import nn

from ironlaw.machine import host
from ironlaw.observe.close_look import CloseLook
from ironlaw.observe.gradients import GradientUse
from ironlaw.observe.inputs import padding
from ironlaw.observe.measured import storage_bytes
from ironlaw.observe.partition import Partition
from ironlaw.observe.trials import ModuleCall, share_saved
from ironlaw.observe.user_code import (
    clipping_line,
    files_of,
    growing_line,
    holder_of,
    line_calling,
    padding_line,
    user_line,
)
from ironlaw.workload.trace_kernels import tensors

LEAST_STEPS, LEAST_BYTES, LEAST_GROWTH = 12, 2**22, 0.02  # steps and bytes, and share of the resident memory
UNNAMED = 3  # times as many: growth that nothing of the user's holds may be a heap or a loader that still settles
LOOKED_AT = 2  # steps done when gradients are looked into: once, for it takes time
MOST_BATCHES = 32  # looked into for padding
LEAST_MERGED, MOST_MERGED = 4, 16  # parts of a batch that are tried as one; two or three are views, or real and made
SETTLED = 3  # steps after which nothing has to be compiled any more
EVEN = 0.3  # each quarter of a leak grows by at least this share of the mean quarter


@dataclass(frozen=True)
class Mode:
    """A switch of PyTorch that slows training. `names`: what the user's code calls to set it."""

    name: str
    names: tuple[str, ...]
    is_on: Callable[[], bool]
    switch: Callable[[bool], Any]
    remedy: str


MODES = (
    Mode(
        "Anomaly detection", ("set_detect_anomaly", "detect_anomaly"), torch.is_anomaly_enabled,
        torch.set_anomaly_enabled,
        "torch.autograd.set_detect_anomaly(False); turn it on for the steps that give NaN",
    ),
    Mode(
        "Deterministic algorithms", ("use_deterministic_algorithms", "set_deterministic_debug_mode"),
        torch.are_deterministic_algorithms_enabled, torch.use_deterministic_algorithms,
        "torch.use_deterministic_algorithms(False), or only torch.utils.deterministic.fill_uninitialized_memory = "
        "False",
    ),
    Mode(
        "PyTorch without oneDNN", ("mkldnn",), lambda: not torch._C._get_mkldnn_enabled(),
        lambda on: torch._C._set_mkldnn_enabled(not on), "torch.backends.mkldnn.enabled = True",
    ),
)  # fmt: skip


NAMED: dict[str, tuple[str, ...]] = {
    **dict.fromkeys(("oversubscribed", "threads_few"), ("set_num_threads", "OMP_NUM_THREADS", "MKL_NUM_THREADS")),
    "batch_small": ("batch_size", "BATCH_SIZE", "per_device_train_batch_size", "micro_batch", "bs"),
    **dict.fromkeys(("attention_unfused", "attention_slow"), ("softmax", "Softmax", "need_weights", "eager")),
    "recompute_needless": ("checkpoint", "checkpoint_sequential", "gradient_checkpointing_enable"),
    "recompiles": ("compile",),
    "update_unfused": ("AdamW", "Adam", "SGD", "Adagrad"),
}
"""Rule -> what the code that it is about calls, or sets."""
ONCE_A_STEP = ("updates_again", "optimizer_rebuilt", "gradients_zeroed", "graphs_retained", "gradients_uncleared")
PROFILERS = ("profile", "emit_itt", "Profile", "setprofile", "settrace", "tracemalloc")
DOUBLE = ("double", "float64", "set_default_dtype")
HALF = ("autocast", "bfloat16", "float16", "half", "bf16", "fp16")
SEEN = {
    **{name: name for name in ("update", "evaluation_frequent", "checkpoint_frequent")},
    **dict.fromkeys(("precision", "batch_small"), "forward pass"),
}
"""Rule, or part of the loop -> what is seen in the loop where it begins."""


@dataclass
class Habits:
    """`look()` in every backward pass, `stepped()` after every step, `facts()` at the end; calls count by line."""

    module: nn.Module
    optimizers: Sequence[torch.optim.Optimizer] = ()
    partition: Partition | None = None  # where operations are looked at too
    is_compiled: bool = False  # the model, or a part of it
    on: set[str] = field(default_factory=set)
    resident: list[int] = field(default_factory=list)
    forwards: int = 0
    parts: list[int] = field(default_factory=list)  # forward passes before each backward pass, of parts of the batch
    read: int = 0  # forward passes that a backward pass has come back through
    passes: list[float] = field(default_factory=list)  # seconds of this step's backward passes
    graphs: list[int] = field(default_factory=list)  # of each step: autograd's count of nodes at its forward pass
    work: int = 0  # passes and evaluations begun
    anew: bool = True  # whether there were any between the last update and the one of its optimizer before
    backward_seconds: float = 0.0
    again_seconds: float = 0.0  # of backward passes through a graph that another one of the step had been through
    lines: dict[str, Counter[str]] = field(default_factory=lambda: defaultdict(Counter))  # what was seen, by line
    compiled: list[int] = field(default_factory=list)  # steps in which the compiler ran
    learns_in_eval: bool = False  # the step before was of passes in evaluation mode only
    eval_steps: int = 0
    paddings: list[tuple[float, float]] = field(default_factory=list)  # of the first batches, as `inputs.padding`
    call: ModuleCall | None = None  # the first one of the model
    profiled: bool = False  # by a profiler that is not ours

    def __post_init__(self) -> None:
        self._files = files_of(self.module)
        self.profiled = torch.autograd._profiler_enabled()
        self.traced = any((sys.getprofile(), sys.gettrace(), tracemalloc.is_tracing()))  # Python itself, by whomever
        self._graphs = _compiled_graphs()
        self.gradients = GradientUse(self.module, self.optimizers)
        self._updated: WeakKeyDictionary[torch.optim.Optimizer, int] = WeakKeyDictionary()  # `work` at its last update
        self._closely: CloseLook | None = None
        self._parts = 0  # forward passes since the last backward pass
        self._outputs: dict[int, Callable[[], Any]] = {}  # of this step's passes: what to call where one is used

    def forward_begins(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self.forwards += 1
        self._parts += not any(t.requires_grad and not t.is_leaf for t in tensors([args, kwargs]))  # another's output
        self.work += 1
        if self._closely is not None:
            self._closely.pass_begins()
        if len(self.paddings) < MOST_BATCHES and (found := padding(args, kwargs)) is not None:
            self.paddings.append(found)
        self._place = self.sees("forward pass")
        for address in storage_bytes([args, kwargs]):  # of one part of the model, for another: detached, and of use
            self._outputs.pop(address, bool)()

    def forward_ended(self, output: Any) -> None:
        """A gradient that comes to any of its outputs tells that the pass was of use."""
        place, come = self._place, False
        self.lines["unread pass"][place] += 1

        def comes(gradient: torch.Tensor | None = None) -> None:
            nonlocal come
            if not come:
                come = True
                self.read += 1
                self.lines["unread pass"][place] -= 1

        for tensor in tensors(output):
            if tensor.requires_grad:
                tensor.register_hook(comes)
                self._outputs |= dict.fromkeys(storage_bytes([tensor]), comes)
                if tensor.grad_fn is not None and len(self.graphs) <= len(self.resident):
                    self.graphs.append(tensor.grad_fn._sequence_nr())

    def aside(self) -> AbstractContextManager[None]:
        """What is asked within is no doing of the loop's."""
        return self._closely.aside() if self._closely is not None else nullcontext()

    def backward_begins(self, roots: Any) -> None:
        self.work += 1
        self.parts.append(self._parts)
        self._parts = 0
        with self.aside():
            self.gradients.backward_begins(roots)
        if self._closely is not None:
            self._closely.pass_begins(roots)
        self._backward_began = time.perf_counter()

    def backward_ended(self, args: Sequence[Any], kwargs: dict[str, Any]) -> None:
        """What `torch.autograd.backward` was given."""
        self.passes.append(time.perf_counter() - self._backward_began)
        given = dict(zip(("tensors", "grad_tensors", "retain_graph", "create_graph"), args, strict=False)) | kwargs
        if given.get("retain_graph") or given.get("create_graph"):  # a graph of the pass itself keeps the forward's
            self.sees("graphs_retained")
        self.gradients.backward_ended()
        self.look()

    def sees(self, what: str) -> str:
        """Counted by the line of the user's code, which it returns."""
        place = user_line()
        self.lines[what][place] += 1
        self.work += what == "evaluation_frequent"
        return place

    def updates(self, optimizer: torch.optim.Optimizer, observed: bool) -> None:
        with self.aside():
            self.gradients.updates(optimizer)
        if not observed:
            return
        self.anew = not self.work or self._updated.get(optimizer) != self.work
        self._updated[optimizer] = self.work
        if not self.anew:
            self.sees("updates_again")
        self.sees("update")

    def cleared(self, args: Sequence[Any], kwargs: dict[str, Any]) -> None:
        """What `zero_grad` was given: whether gradients become zeros instead of nothing."""
        if kwargs.get("set_to_none", args[0] if args else True) is False:
            self.sees("gradients_zeroed")

    def look(self) -> None:
        self.on |= {mode.name for mode in MODES if mode.is_on()}

    def stepped(self, forwards: int) -> None:
        """A step of so many passes in training mode, or in the other where `learns_in_eval`."""
        self.look()
        self.learns_in_eval = not (forwards if not self.learns_in_eval else self.module.training)
        self.eval_steps += self.learns_in_eval
        self.backward_seconds += sum(self.passes)
        self.again_seconds += sum(sorted(self.passes)[: max(0, len(self.passes) - max(1, forwards))])
        self.passes = []
        self._outputs.clear()
        self.resident.append(host.resident_bytes())
        if len(self.resident) == LOOKED_AT:
            self._begin_look()
        elif len(self.resident) == LOOKED_AT + 1:
            self.end_look()
        if (graphs := _compiled_graphs()) > self._graphs:
            self.compiled.append(len(self.resident))
            self._graphs = graphs

    def _begin_look(self) -> None:
        if self.is_compiled or self.compiled:  # a hook of every module would have compiled ones compiled again
            return
        self.gradients.begin()
        if self.partition is not None and not _compiled_graphs():
            self._closely = CloseLook(self.partition, self.module, self.gradients.taken)
            self._closely.begin()

    def end_look(self) -> None:
        self.gradients.end()
        if self._closely is not None:
            self._closely.end()

    def facts(self, precision: str | None) -> dict[str, Any]:
        here = self.partition is not None
        return {
            "left_on": [
                {"name": mode.name, "saved": _saved_without(mode, self.call), "remedy": mode.remedy,
                 "place": line_calling(mode.names, self._files)}
                for mode in MODES if mode.name in self.on
            ],
            "float64": self._tried(self._most_weights() is torch.float64, None, torch.float32, DOUBLE),
            "half": self._tried(here and precision in ("bf16", "fp16"), None, torch.float32, HALF),
            "bf16": self._tried(here and precision == "fp32", torch.bfloat16, None),
            "passes_apart": self._apart(),
            "memory_grows": self._growth(),
            "graphs_again": self._again(),
            **{fact: self.most_seen(fact) for fact in ONCE_A_STEP},
            **self.gradients.facts(self._files),
            **(self._closely.facts(self.lines["forward pass"]) if self._closely is not None else {}),
            "padding": self._padding(),
            "left_in_eval": self._left_in_eval(),
            "unscaled": self._unscaled(precision),
            "places": self._places(),
            "rollouts": self.lines["rollout"].total() / max(1, self.lines["evaluation_frequent"].total()),
            "forwards_unread": self._unread(),
            "profiled": line_calling(PROFILERS, self._files) or "?" if self.profiled or self.traced else None,
        }  # fmt: skip

    def _unread(self) -> dict[str, Any] | None:
        """Forward passes with gradients enabled that no backward pass comes through."""
        if not self.read or self.read >= self.forwards:
            return None
        lines = [place for place, count in self.lines["unread pass"].most_common(3) if count]
        told = f"backward passes come through {self.read} of {self.forwards} forward passes"
        return {"part": 1 - self.read / self.forwards, "place": None, "lines": [*lines, told]}

    def _padding(self) -> dict[str, Any] | None:
        if not self.paddings:
            return None
        part, columns = (statistics.mean(parts) for parts in zip(*self.paddings, strict=True))
        return {"part": part, "columns": columns, "place": padding_line(self._files) or self._passes_at()}

    def _again(self) -> dict[str, Any] | None:
        """Backward passes that one of the sum of their losses would do, where the graph is kept for them."""
        kept = self.most_seen("graphs_retained")
        if kept is None or not self.again_seconds:
            return None
        return {"part": self.again_seconds / self.backward_seconds, "place": kept["place"]}

    def _passes_at(self) -> str:
        return self.lines["forward pass"].most_common(1)[0][0]

    def _left_in_eval(self) -> dict[str, Any] | None:
        """Where most steps learned without what training mode switches on, and the model has any of it."""
        differs = any(
            (isinstance(m, nn.modules.dropout._DropoutNd) and m.p > 0)
            or (isinstance(m, nn.modules.batchnorm._NormBase) and any(p.requires_grad for p in m.parameters()))
            for m in self.module.modules()
        )
        if not differs or 2 * self.eval_steps < len(self.resident):
            return None
        place = line_calling(("eval",), self._files) or self._passes_at()
        return {"place": place, "per_step": self.eval_steps / len(self.resident)}

    def _unscaled(self, precision: str | None) -> dict[str, Any] | None:
        scaled = any(issubclass(type(held), torch.amp.GradScaler) for held in gc.get_objects())
        if precision != "fp16" or scaled:
            return None
        return {"place": line_calling(("float16", "half", "fp16"), self._files), "per_step": 1.0}

    def _places(self) -> dict[str, str]:
        """Rule -> the line that it is about, where the run or the text of the code tells."""
        seen = {rule: self.lines[what].most_common(1)[0][0] for rule, what in SEEN.items() if self.lines[what]}
        named = {rule: line_calling(names, self._files) for rule, names in NAMED.items()}
        named["clipping"] = clipping_line(self._files)
        found = seen | {rule: place for rule, place in named.items() if place}
        softmax = self._closely.place_of("_softmax") if self._closely is not None else "?"
        found |= {"attention_unfused": softmax} if softmax != "?" else {}
        return {rule: place for rule, place in found.items() if place != "?"}

    def most_seen(self, what: str) -> dict[str, Any] | None:
        """The line where it was seen most, if about once per step."""
        steps = max(1, len(self.resident))
        place, count = max(self.lines[what].items(), key=lambda one: one[1], default=("", 0))
        return {"place": place, "per_step": count / steps} if count >= 0.5 * steps else None

    def recompile_seconds(self, steps: Sequence[float]) -> float:
        """Of the steps after the first few in which the compiler ran, above the median step."""
        usual = statistics.median(steps)
        return sum(max(0.0, steps[n - 1] - usual) for n in self.compiled if SETTLED < n <= len(steps))

    def _apart(self) -> dict[str, Any] | None:
        """Return the share of the passes that one pass over all parts of the batch saves. Micro-batches with a backward
        pass each, as memory may want them, are no parts; at most `MOST_MERGED` parts are tried."""
        times = min(MOST_MERGED, statistics.median_low(self.parts or [0]))
        tried = self.call is not None and self.partition is not None and times >= LEAST_MERGED
        one = self.call.passes() if self.call is not None and tried else None
        all_in_one = self.call.passes(times=times) if self.call is not None and one is not None else None
        if one is None or all_in_one is None:
            return None
        place = self._passes_at()
        told = f"{times} of them timed one by one and as one at the end of the run"

        def one_by_one() -> None:
            for _ in range(times):
                one()

        return {"part": share_saved(one_by_one, all_in_one), "place": place, "lines": [told]}

    def _most_weights(self) -> torch.dtype | None:
        sizes: Counter[torch.dtype] = Counter()
        for parameter in self.module.parameters():
            sizes[parameter.dtype] += parameter.numel()
        return max(sizes, key=lambda dtype: sizes[dtype], default=None)

    def _tried(
        self, wanted: bool, autocast: torch.dtype | None, dtype: torch.dtype | None, names: tuple[str, ...] = ()
    ) -> dict[str, Any] | None:
        """Share of a forward and backward pass that these types save, 0 where they cannot be tried; and the line that
        sets the type there is now."""
        if not wanted:
            return None
        then = replace(self.call, autocast=autocast).passes(dtype) if self.call is not None else None
        now = self.call.passes() if self.call is not None and then is not None else None
        saved = share_saved(now, then) if now is not None and then is not None else 0.0
        return {"saved": saved, "place": line_calling(names, self._files)}

    def _growth(self) -> dict[str, Any] | None:
        """Bytes per step by which the process grew, evenly, to the end of the loop."""
        settled = self.resident[len(self.resident) // 4 :]
        if len(settled) < LEAST_STEPS:
            return None
        size = len(settled) // 4
        middles = [statistics.median(settled[part * size : (part + 1) * size]) for part in range(4)]
        rises = [after - before for before, after in itertools.pairwise(middles)]
        grown = middles[-1] - middles[0]
        name, weight = holder_of(len(self.resident), self.graphs) or (None, 0.0)
        name = name if weight >= EVEN * grown else None
        graphs = weight == float("inf")
        doubt = 1 if name else UNNAMED
        even = grown >= doubt * max(LEAST_BYTES, LEAST_GROWTH * middles[0]) and min(rises) >= EVEN * grown / 3
        even &= len(settled) >= doubt * LEAST_STEPS
        even &= name is not None or not self.profiled  # a profiler's record grows too
        if not (even or graphs):  # graphs of all steps are a leak, however small each is
            return None
        return {
            "bytes_per_step": max(0.0, grown / (3 * size)), "holder": name,
            "place": growing_line(name, self._files) if name else None,
        }  # fmt: skip


def _compiled_graphs() -> int:
    """So far in this process, where the compiler has been imported at all."""
    counters = getattr(sys.modules.get("torch._dynamo.utils"), "counters", None)
    return int(counters["stats"]["unique_graphs"]) if counters else 0


def _saved_without(mode: Mode, call: ModuleCall | None) -> float:
    """Share of the model's passes that another position of the switch saves."""
    passes = call.passes() if call is not None else None
    if passes is None:
        return 0.0

    def under(on: bool) -> Callable[[], None]:
        def work() -> None:
            before = mode.is_on()
            mode.switch(on)
            try:
                passes()
            finally:
                mode.switch(before)

        return work

    return share_saved(under(True), under(False))
