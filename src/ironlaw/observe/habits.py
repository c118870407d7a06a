"""What a loop leaves switched on, keeps and repeats: counted step by step, and timed both ways at the end.

Every fact carries the line of the user's code where it begins, as far as the run or the text of the code tells it.
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
from dataclasses import dataclass, replace
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import nn

from ironlaw.machine import host
from ironlaw.observe.close_look import CloseLook
from ironlaw.observe.gradients import GradientUse, parameters_of
from ironlaw.observe.inputs import describe_inputs, padding, unwrapped
from ironlaw.observe.measured import storage_bytes
from ironlaw.observe.partition import Partition
from ironlaw.observe.recording import LoopRecording
from ironlaw.observe.trials import ModuleCall, share_saved
from ironlaw.observe.user_code import (
    clipping_line,
    files_of,
    find_holder,
    growing_line,
    line_calling,
    padding_line,
    user_line,
)
from ironlaw.workload.trace_kernels import tensors

MIN_STEPS, MIN_BYTES, MIN_GROWTH = 12, 2**22, 0.02  # steps and bytes, and share of the resident memory
UNNAMED = 3  # times as many: growth that nothing of the user's holds may be a heap or a loader that still settles
LOOKED_AT = 2  # steps done before the one whose operations and gradients are looked at: once, as it takes time
MAX_BATCHES = 32  # looked into for padding
SHORT_SECONDS, ROOM_BYTES = 0.02, 2**32  # of a backward pass that is tried for a larger batch, and what is free then
MIN_MERGED, MAX_MERGED = 4, 16  # parts of a batch that are tried as one; two or three are views, or real and made
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

CALLS_OF_RULES: dict[str, tuple[str, ...]] = {
    **dict.fromkeys(("oversubscribed", "threads_few"), ("set_num_threads", "OMP_NUM_THREADS", "MKL_NUM_THREADS")),
    "batch_small": ("batch_size", "BATCH_SIZE", "per_device_train_batch_size", "micro_batch", "bs"),
    **dict.fromkeys(("attention_unfused", "attention_slow"), ("softmax", "Softmax", "need_weights", "eager")),
    "recompute_needless": (
        "checkpoint",
        "checkpoint_sequential",
        "gradient_checkpointing",
        "gradient_checkpointing_enable",
    ),
    "recompiles": ("compile",),
    "vocabulary_unused": ("Embedding",),
}
"""Rule -> the names that the code it is about calls, or sets; of an update that is not fused the optimizers' own."""
EVENTS_OF_RULES = {
    **{name: name for name in ("evaluation_frequent", "checkpoint_frequent")},
    **dict.fromkeys(("precision", "batch_small"), "forward pass"),
}
"""Rule -> the event that happens where it begins."""
ONCE_A_STEP = ("updates_again", "optimizer_rebuilt", "graphs_retained", "gradients_uncleared")
PROFILERS = ("profile", "emit_itt", "Profile", "setprofile", "settrace", "tracemalloc")
DOUBLE = ("double", "float64", "set_default_dtype")
HALF = ("autocast", "bfloat16", "float16", "half", "bf16", "fp16")


class Habits:
    """Is told by hooks what the loop does, counts it by line of the user's code, and gives `facts` at the end.

    `partition`: given where operations can be looked at one by one too. `is_compiled`: the model, or a part of it.
    `on_step` is called when a step has ended.
    """

    def __init__(
        self, module: nn.Module, optimizers: Sequence[torch.optim.Optimizer], partition: Partition | None,
        is_compiled: bool, recording: LoopRecording, on_step: Callable[[int], None],
    ) -> None:  # fmt: skip
        self._module, self._optimizers, self._partition = module, optimizers, partition
        self._is_compiled, self._recording, self._on_step = is_compiled, recording, on_step
        self._files = files_of(module)
        self._profiled_steps = 0  # by a profiler that is not ours
        self._is_traced = any((sys.getprofile(), sys.gettrace(), tracemalloc.is_tracing()))  # Python itself, by anybody
        self._gradients = GradientUse(module, optimizers)
        self._close_look: CloseLook | None = None
        self.events: dict[str, Counter[str]] = defaultdict(Counter)  # event -> times by line
        self._modes_on: set[str] = set()
        self._resident: list[int] = []  # bytes, after each step
        self.forwards = 0  # forward passes of this step
        self._all_forwards = 0
        self._parts: list[int] = []  # forward passes before each backward pass, of parts of the batch
        self._parts_now = 0
        self._outputs: dict[int, Callable[[], Any]] = {}  # address -> what to call when this output is used
        self._graphs: list[int] = []  # of each step: autograd's count of nodes at its forward pass
        self._backwards: list[float] = []  # seconds of this step's backward passes
        self._backward_seconds = 0.0
        self._repeated_seconds = 0.0  # of backward passes through a graph that another one of the step has been through
        self._work = 0  # passes and evaluations so far
        self._work_at_update: WeakKeyDictionary[torch.optim.Optimizer, int] = WeakKeyDictionary()
        self._is_new_step = True  # whether there was work between the last update and the one before by its optimizer
        self._compiled_graphs, self._compiled_in = _compiled_graphs(), list[int]()  # steps in which the compiler ran
        self._learns_in_eval, self._eval_steps = False, 0  # whether the last step was of passes in evaluation mode only
        self._paddings: list[tuple[float, float]] = []  # of the first batches, as `inputs.padding`
        self._uncleared = ""  # line of the step's first backward pass, while all passes of the step found gradients
        self._zeroed_steps = 0  # whose first backward pass found gradients of zeros
        self.gradients_found = "none"  # by the forward pass: as `Loop.gradients`
        self.call: ModuleCall | None = None  # the first one of the model
        self.inputs: dict[str, Any] = {}
        self.data_workers: int | None = None
        self.gradient_syncs = self.skipped_updates = 0

    def is_training(self, module: nn.Module) -> bool:
        """Whether the loop learns from a pass of this module with gradients."""
        return module.training or self._learns_in_eval

    def record(self, event: str) -> str:
        """Count an event by the line of the user's code, which is returned."""
        place = user_line()
        self.events[event][place] += 1
        self._work += event == "evaluation_frequent"
        return place

    def _pause_close_look(self) -> AbstractContextManager[None]:
        """Operations within are not the loop's."""
        return self._close_look.paused() if self._close_look is not None else nullcontext()

    def forward_begins(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self.forwards += 1
        self._all_forwards += 1
        self._work += 1
        if self.forwards == 1 and len(self._resident) == LOOKED_AT:
            self.gradients_found = "kept" if self._has_gradients() else "none"
        if self.call is None and (args or kwargs):
            self.call = ModuleCall.of(unwrapped(module), args, kwargs)
            self.inputs = describe_inputs(self.call.module, args, kwargs)
            if self.call.module is not self._module:  # a part of it: no plan of the whole can be made from these
                self.inputs["signature"] = None
        if self._recording.is_running:
            self._recording.forward_begins(self.forwards == 1, [args, kwargs])
            args, kwargs = (), {}  # what looks into them would be recorded
        self._parts_now += not any(t.requires_grad and not t.is_leaf for t in tensors([args, kwargs]))  # no output
        if self._close_look is not None:
            self._close_look.pass_begins()
        if len(self._paddings) < MAX_BATCHES and (found := padding(args, kwargs)) is not None:
            self._paddings.append(found)
        self._place = self.record("forward pass")
        for address in storage_bytes([args, kwargs]):  # of one part of the model, for another: detached, and of use
            self._outputs.pop(address, bool)()

    def forward_ended(self, output: Any) -> None:
        """Count the pass as unread until a gradient comes to any of its outputs."""
        place, is_read = self._place, False
        self.events["unread pass"][place] += 1

        def read(gradient: torch.Tensor | None = None) -> None:
            nonlocal is_read
            self.events["unread pass"][place] -= not is_read
            is_read = True

        for tensor in tensors(output):
            if tensor.requires_grad:
                tensor.register_hook(read)
                self._outputs |= dict.fromkeys(storage_bytes([tensor]), read)
                if tensor.grad_fn is not None and len(self._graphs) <= len(self._resident):
                    self._graphs.append(tensor.grad_fn._sequence_nr())

    def backward_begins(self, roots: Any) -> None:
        is_first = not self._backwards and self.forwards == 1 and len(self._resident) >= LOOKED_AT
        self._work += 1
        self._parts.append(self._parts_now)
        self._parts_now = 0
        with self._pause_close_look():
            self._gradients.backward_begins(roots)
            self._look_for_gradients(is_first)
        if self._close_look is not None:
            self._close_look.pass_begins(roots)
        self._backward_began = time.perf_counter()

    def _look_for_gradients(self, is_first: bool) -> None:
        """Whether all backward passes of a step find gradients of the last one. A pass for another model's update may
        come before they are cleared."""
        is_first = is_first and self.gradients_found != "none"
        if is_first and not self._has_gradients():
            self.gradients_found = "forward"
        elif is_first or self._uncleared:
            gradients = [p.grad for p in parameters_of(self._optimizers) if p.grad is not None]
            found = any(bool(gradient.any()) for gradient in gradients)
            self._uncleared = (self._uncleared or user_line()) if found else ""
            self._zeroed_steps += is_first and bool(gradients) and not found

    def _has_gradients(self) -> bool:
        return any(p.grad is not None for p in self._module.parameters())

    def backward_ended(self, keeps_graph: bool) -> None:
        self._backwards.append(time.perf_counter() - self._backward_began)
        if keeps_graph:
            self.record("graphs_retained")
        self._gradients.backward_ended()
        self._look_for_modes()
        self._recording.backward_ended()

    def update_begins(self, optimizer: torch.optim.Optimizer, is_observed: bool) -> None:
        with self._pause_close_look():
            self._gradients.update_begins(optimizer)
            if self._close_look is not None:
                self._close_look.update_begins(parameters_of([optimizer]))
        if not is_observed:
            return
        self._is_new_step = not self._work or self._work_at_update.get(optimizer) != self._work
        self._work_at_update[optimizer] = self._work
        if not self._is_new_step:
            self.record("updates_again")
        self.record("update")

    def gradients_cleared(self, set_to_none: bool) -> None:
        if set_to_none is False:
            self.record("gradients_zeroed")
        self._recording.gradients_cleared()

    def _look_for_modes(self) -> None:
        self._modes_on |= {mode.name for mode in MODES if mode.is_on()}

    def updated(self) -> None:
        """The optimizer has updated, the last one where there are several: the step ends, if there was one."""
        if not self._is_new_step:
            return
        if self._uncleared:
            self.events["gradients_uncleared"][self._uncleared] += 1
            self._uncleared = ""
        forwards, self.forwards = self.forwards, 0
        self._look_for_modes()
        self._learns_in_eval = not (self._module.training if self._learns_in_eval else forwards)
        self._eval_steps += self._learns_in_eval
        self._backward_seconds += sum(self._backwards)
        self._repeated_seconds += sum(sorted(self._backwards)[: max(0, len(self._backwards) - max(1, forwards))])
        self._backwards = []
        self._outputs.clear()
        self._profiled_steps += torch.autograd._profiler_enabled() and not self._recording.is_running
        self._resident.append(host.resident_bytes())
        if len(self._resident) == LOOKED_AT:
            self._begin_look()
        elif len(self._resident) == LOOKED_AT + 1:
            self.end_look()
        if (graphs := _compiled_graphs()) > self._compiled_graphs:
            self._compiled_in.append(len(self._resident))
            self._compiled_graphs = graphs
        self._on_step(forwards)

    def _begin_look(self) -> None:
        if self._is_compiled or self._compiled_in:  # a hook of every module would have compiled ones compiled again
            return
        self._gradients.begin()
        if self._partition is not None and not _compiled_graphs():
            self._close_look = CloseLook(self._partition, self._module, self._gradients.operation_called)
            self._close_look.begin()

    def end_look(self) -> None:
        self._gradients.end()
        if self._close_look is not None:
            self._close_look.end()

    def facts(self, steps: Sequence[float]) -> dict[str, Any]:
        """`steps`: their seconds."""
        precision = self.inputs.get("precision")
        closely = self._partition is not None
        rebuilt = self._most_frequent("loader started")
        is_profiled = self._is_traced or 2 * self._profiled_steps >= max(1, len(self._resident))
        return {
            "left_on": [
                {"name": mode.name, "saved": self._saved_without(mode), "remedy": mode.remedy,
                 "place": line_calling(mode.names, self._files)}
                for mode in MODES if mode.name in self._modes_on
            ],
            "float64": self._try_types(self._is_float64(), None, torch.float32, DOUBLE),
            "half": self._try_types(closely and precision in ("bf16", "fp16"), None, torch.float32, HALF),
            "bf16": self._try_types(closely and precision == "fp32", torch.bfloat16, None),
            "passes_apart": self._passes_apart(),
            "memory_grows": self._growth(),
            "graphs_again": self._graphs_again(),
            **{fact: self._most_frequent(fact) for fact in ONCE_A_STEP},
            "gradients_zeroed": self._most_frequent("gradients_zeroed") or self._zeroed_by_hand(),
            **self._gradients.facts(self._files, self._close_look.tables_part if self._close_look is not None else 0.0),
            **(self._close_look.facts(self.events["forward pass"]) if self._close_look is not None else {}),
            "padding": self._padding(),
            "left_in_eval": self._left_in_eval(),
            "unscaled": self._unscaled(precision),
            "places": self._places(),
            "update_lines": list(self.events["update"]),
            "rollouts": self.events["rollout"].total() / max(1, self.events["evaluation_frequent"].total()),
            "evaluations_per_step": self.events["evaluation_frequent"].total() / len(steps),
            "forwards_unread": self._forwards_unread(),
            "profiled": line_calling(PROFILERS, self._files) or "?" if is_profiled else None,
            "recompile_seconds": self._recompile_seconds(steps),
            "gradients_found": self.gradients_found,
            "gradient_syncs_per_step": self.gradient_syncs / len(steps),
            "skipped_updates": self.skipped_updates,
            "data_workers": self.data_workers,
            **({"data_stage": "rebuilt", "data_place": rebuilt["place"]} if rebuilt else {}),
            **{key: value for key, value in self.inputs.items() if key != "signature"},
        }  # fmt: skip

    def _forwards_unread(self) -> dict[str, Any] | None:
        """Forward passes with gradients enabled that no backward pass comes through."""
        unread, whole = self.events["unread pass"], self._all_forwards
        if not 0 < unread.total() < whole:
            return None
        lines = [place for place, count in unread.most_common(3) if count]
        text = f"backward passes come through {whole - unread.total()} of {whole} forward passes"
        return {"part": unread.total() / whole, "place": None, "lines": [*lines, text]}

    def _padding(self) -> dict[str, Any] | None:
        if not self._paddings:
            return None
        part, columns = (statistics.mean(parts) for parts in zip(*self._paddings, strict=True))
        return {"part": part, "columns": columns, "place": padding_line(self._files) or self._forward_line()}

    def _graphs_again(self) -> dict[str, Any] | None:
        """Backward passes that one of the sum of their losses would do, where the graph is kept for them."""
        kept = self._most_frequent("graphs_retained")
        if kept is None or not self._repeated_seconds:
            return None
        return {"part": self._repeated_seconds / self._backward_seconds, "place": kept["place"]}

    def _zeroed_by_hand(self) -> dict[str, Any] | None:
        """Where most steps fill gradients with zeros, and not by `zero_grad`."""
        place, steps = line_calling(("zero_", "_foreach_zero_"), self._files), max(1, len(self._resident))
        is_habit = place is not None and 2 * self._zeroed_steps >= steps
        return {"place": place, "per_step": self._zeroed_steps / steps} if is_habit else None

    def _forward_line(self) -> str:
        return self.events["forward pass"].most_common(1)[0][0]

    def _left_in_eval(self) -> dict[str, Any] | None:
        """Where most steps learned without what training mode switches on, and the model has any of it."""
        differs = any(
            (isinstance(m, nn.modules.dropout._DropoutNd) and m.p > 0)
            or (isinstance(m, nn.modules.batchnorm._NormBase) and any(p.requires_grad for p in m.parameters()))
            for m in self._module.modules()
        )
        if not differs or 2 * self._eval_steps < len(self._resident):
            return None
        place = line_calling(("eval",), self._files) or self._forward_line()
        return {"place": place, "per_step": self._eval_steps / len(self._resident)}

    def _unscaled(self, precision: str | None) -> dict[str, Any] | None:
        scaled = any(issubclass(type(held), torch.amp.GradScaler) for held in gc.get_objects())
        if precision != "fp16" or scaled:
            return None
        return {"place": line_calling(("float16", "half", "fp16"), self._files), "per_step": 1.0}

    def _places(self) -> dict[str, str]:
        """Rule -> the line that it is about, where the run or the text of the code tells."""
        found = {rule: self.events[event].most_common(1)[0][0] for rule, event in EVENTS_OF_RULES.items()
                 if self.events[event]}  # fmt: skip
        optimizers = tuple({type(optimizer).__name__ for optimizer in self._optimizers})
        for rule, names in {**CALLS_OF_RULES, "update_unfused": optimizers}.items():
            found[rule] = line_calling(names, self._files) or found.get(rule, "?")
        found["clipping"] = clipping_line(self._files) or "?"
        if self._close_look is not None:
            found["attention_unfused"] = self._close_look.place_of("_softmax") or found["attention_unfused"]
        return {rule: place for rule, place in found.items() if place != "?"}

    def _most_frequent(self, event: str) -> dict[str, Any] | None:
        """The line where it happened most, if about once per step."""
        steps = max(1, len(self._resident))
        place, count = max(self.events[event].items(), key=lambda one: one[1], default=("", 0))
        return {"place": place, "per_step": count / steps} if count >= 0.5 * steps else None

    def _recompile_seconds(self, steps: Sequence[float]) -> float:
        """Of the steps after the first few in which the compiler ran, above the median step."""
        usual = statistics.median(steps)
        return sum(max(0.0, steps[n - 1] - usual) for n in self._compiled_in if SETTLED < n <= len(steps))

    def _passes_apart(self) -> dict[str, Any] | None:
        """Several passes for parts of a batch, and the share of them that one for all saves. Micro-batches with a
        backward pass each, as memory may want them, are no parts."""
        times = min(MAX_MERGED, statistics.median_low(self._parts or [0]))
        part = self._saved_merged(times) if times >= MIN_MERGED else None
        if part is None:
            return None
        text = f"{times} of them timed one by one and as one at the end of the run"
        return {"part": part, "place": self._forward_line(), "lines": [text]}

    def larger_batch(self, times: int) -> float | None:
        """Returns the share of the passes that so many micro-batches in one save. Those that take longer than calling
        operations does are bound by what they compute, and not tried."""
        is_whole = self.call is not None and self.call.module is self._module
        mean = self._backward_seconds / max(1, len(self._parts))
        has_room = mean < SHORT_SECONDS and host.available_bytes() > ROOM_BYTES
        return self._saved_merged(min(MAX_MERGED, times)) if is_whole and has_room else None

    def _saved_merged(self, times: int) -> float | None:
        if self.call is None or self._partition is None:
            return None
        one, merged = self.call.passes(), self.call.passes(times=times)
        return share_saved(lambda: [one() for _ in range(times)], merged) if one and merged else None

    def _is_float64(self) -> bool:
        """Most weights are."""
        sizes = [(p.dtype is torch.float64, p.numel()) for p in self._module.parameters()]
        return 2 * sum(size for is_double, size in sizes if is_double) > sum(size for _, size in sizes)

    def _try_types(
        self, wanted: bool, autocast: torch.dtype | None, dtype: torch.dtype | None, names: tuple[str, ...] = ()
    ) -> dict[str, Any] | None:
        """Share of a forward and backward pass that these types save, 0 where they cannot be tried; and the line that
        sets the present type."""
        if not wanted:
            return None
        now, then = None, replace(self.call, autocast=autocast).passes(dtype) if self.call is not None else None
        if self.call is not None and then is not None:
            now = self.call.passes()
        saved = share_saved(now, then) if now is not None and then is not None else 0.0
        return {"saved": saved, "place": line_calling(names, self._files)}

    def _saved_without(self, mode: Mode) -> float:
        """Share of the model's passes that the other position of the switch saves."""
        passes = self.call.passes() if self.call is not None else None
        if passes is None:
            return 0.0
        was_on = mode.is_on()

        def run(on: bool) -> None:
            mode.switch(on)
            passes()

        try:
            return share_saved(lambda: run(True), lambda: run(False))
        finally:
            mode.switch(was_on)

    def _growth(self) -> dict[str, Any] | None:
        """Bytes per step by which the process grew, evenly, to the end of the loop."""
        settled = self._resident[len(self._resident) // 4 :]
        if len(settled) < MIN_STEPS:
            return None
        size = len(settled) // 4
        middles = [statistics.median(settled[part * size : (part + 1) * size]) for part in range(4)]
        grown, rises = middles[-1] - middles[0], [after - before for before, after in itertools.pairwise(middles)]
        name, weight = find_holder(len(self._resident), self._graphs) or (None, 0.0)
        name = name if weight >= EVEN * grown else None
        doubt = 1 if name else UNNAMED
        is_even = (
            grown >= doubt * max(MIN_BYTES, MIN_GROWTH * middles[0])
            and min(rises) >= EVEN * grown / 3
            and len(settled) >= doubt * MIN_STEPS
            and (name is not None or not self._profiled_steps)  # a profiler's record grows too
        )
        if not is_even and weight != float("inf"):  # graphs of all steps are a leak, however small each is
            return None
        place = growing_line(name, self._files) if name else None
        return {"bytes_per_step": max(0.0, grown / (3 * size)), "holder": name, "place": place}


def _compiled_graphs() -> int:
    """So far in this process, where the compiler has been imported at all."""
    counters = getattr(sys.modules.get("torch._dynamo.utils"), "counters", None)
    return int(counters["stats"]["unique_graphs"]) if counters else 0
