"""`with ironlaw.observe(model, optimizer, out="runs/mine") as watch:` around any training loop of PyTorch.

    for batch in loader:                 # the wait for a DataLoader is seen by itself
        loss = model(batch).mean()       # so are forward, backward, the optimizer, torch.save and evaluation
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        watch.log(loss=loss.detach())    # optional

Afterwards `ironlaw explain runs/mine` reads what was written.
"""

from __future__ import annotations

import contextlib
import datetime
import platform
import time
import warnings
from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict
from html import escape
from pathlib import Path
from types import TracebackType
from typing import Any, Self, TypeVar

import torch
from torch import Tensor, nn
from torch.profiler import profile

from ironlaw.cores import usable_cores
from ironlaw.errors import UserError
from ironlaw.files import as_path, check_can_be_folder
from ironlaw.ledger import Phase, subtract
from ironlaw.machine import host, interference
from ironlaw.machine.host import OtherLoad
from ironlaw.machine.measure import Probe
from ironlaw.machine.profile import Profile, load_profile
from ironlaw.observe.energy import EnergyMeter
from ironlaw.observe.events import SyncPoints, describe_sync_points, recorded_allocations, recorded_events
from ironlaw.observe.gpu_monitor import find_gpu_monitor, processor_throttle_count
from ironlaw.observe.gradients import parameters_of
from ironlaw.observe.habits import LOOKED_AT, Habits
from ironlaw.observe.hooks import Listener, listening, sync_points
from ironlaw.observe.inputs import describe_inputs
from ironlaw.observe.measured import storage_bytes, tree_bytes
from ironlaw.observe.memory_peak import KnownStorages
from ironlaw.observe.module_profile import ModuleProfile, mark, module_paths, read_modules
from ironlaw.observe.observed_run import Observed, write_observed
from ironlaw.observe.partition import Interval, Partition
from ironlaw.observe.profile import profiled
from ironlaw.observe.sampler import StackSampler
from ironlaw.observe.spans import scopes_recorded
from ironlaw.observe.trials import (
    ModuleCall,
    fused_update_saves,
    head_size,
    misaligned_weights,
    odd_sizes,
    threads_unlike_cores,
)
from ironlaw.observe.updates import updates_of
from ironlaw.observe.user_code import user_line
from ironlaw.package import __version__

MOST_PROFILED = 1000  # steps
RECORD_AT = 6  # steps done before the recording: the first ones allocate what later ones reuse
SAMPLE_EVERY_SECONDS = 0.5
PROBE_EVERY_SECONDS = 2.0  # a probe takes some 10 ms: half a percent of the loop, and in no step
Item = TypeVar("Item")


class Watch:
    """Observes a training loop; a context manager.

    Several models and optimizers, as of a GAN, are given as lists; a step ends where the last optimizer has updated.
    `out`: the run directory to write, `runs/observed-DATE` unless given. `profile_steps`: so many steps are recorded
    in detail after the first few (0: none, until `watch.profile()` asks); they are slower and count in no average.
    `plan`: trace the module at the end, so that a plan can be put beside what was measured.
    """

    def __init__(
        self, model: nn.Module | Sequence[nn.Module],
        optimizer: torch.optim.Optimizer | Sequence[torch.optim.Optimizer], out: str | Path | None = None, *,
        profile_steps: int = 3, plan: bool = True, name: str | None = None,
    ) -> None:  # fmt: skip
        models: list[Any] = list(model) if isinstance(model, list | tuple) else [model]
        optimizers: list[Any] = list(optimizer) if isinstance(optimizer, list | tuple) else [optimizer]
        if not models or not all(isinstance(m, nn.Module) for m in models):
            raise UserError("observe(model, optimizer) needs the torch.nn.Module that the loop trains")
        if not isinstance(profile_steps, int) or not 0 <= profile_steps <= MOST_PROFILED:
            raise UserError(f"profile_steps = {profile_steps!r}: give a number of steps, 0 to {MOST_PROFILED}")
        self.optimizers = [getattr(o, "optimizer", o) for o in optimizers]  # wrappers of Accelerate
        if not optimizers or not all(isinstance(o, torch.optim.Optimizer) for o in self.optimizers):
            raise UserError("observe(model, optimizer) needs the torch optimizer that the loop steps")
        stamp = datetime.datetime.now().strftime("%Y%m%d-%H%M%S")
        self.out, self.plan = as_path(f"runs/observed-{stamp}" if out is None else out, "out"), plan
        check_can_be_folder(self.out, "out=")
        if (self.out / "ledger.json").exists():
            raise UserError(f"{self.out} holds a run already: give another out=")
        self.model: nn.Module = model if isinstance(model, nn.Module) else nn.ModuleList(models)
        self.name = str(name or type(_inner(self.model)).__name__)
        self.device = next((p.device for p in self.model.parameters()), torch.device("cpu"))
        self.partition = Partition(cuda=self.device.type == "cuda")
        self.metrics: list[dict[str, Any]] = []
        self.recorded: set[int] = set()  # steps under the profiler
        self.inputs: dict[str, Any] = {}
        self.micro_batches: list[int] = []
        self.skipped = 0
        self.peak_resident = 0
        self.profiling_seconds = 0.0
        self.sync: SyncPoints = {}
        self._wanted = profile_steps
        self._forwards = 0
        self._logged: dict[str, Any] = {}
        self._recorder: profile | None = None
        self._recording: list[list[Interval]] = []
        self._recording_stack = ExitStack()
        self._held = KnownStorages()
        self._stack = ExitStack()
        self._sampled = 0.0
        self._probed = 0.0
        self._profile: ModuleProfile | None = None
        self.sampler: StackSampler | None = None
        self.probes: list[dict[str, float]] = []
        self._stop_at = 0

    def _repr_html_(self) -> str:
        where = f"<code>{escape(str(self.out))}</code>"
        return f"Observed run {where}, {len(self.metrics)} steps: <code>ironlaw.explain(watch)</code>"

    # -- the loop's side -------------------------------------------------------------------------------------

    def __enter__(self) -> Self:
        closely = self.device.type == "cpu" and not _distributed() and not _compiled(self.model)
        self._habits = Habits(
            _inner(self.model), self.optimizers, self.partition if closely else None, _compiled(self.model)
        )
        listener = Listener(
            lambda module: module.training or self._habits.learns_in_eval, self._forward_begins,
            self._habits.forward_ended, self._backward_begins, self._backward_ended,
            self._habits.updates, self._stepped, self._cleared, self._skipped, self._loader_asked, self._habits.sees,
        )  # fmt: skip
        self._stack.enter_context(listening(self.model, self.optimizers, self.partition, listener))
        accelerated = self.device.type == "cuda"
        self._gpu = find_gpu_monitor(self.device.index or 0) if accelerated else None
        self._energy = EnergyMeter(accelerated=accelerated, gpu=self._gpu)
        self._load = OtherLoad()
        self._throttled = processor_throttle_count()
        self._machine = _measured_machine() if self.device.type == "cpu" else None
        self._prober = Probe(self._machine.fp32_products) if self._machine is not None else None
        self.started_at = datetime.datetime.now().astimezone().isoformat(timespec="seconds")
        self.started = time.perf_counter()
        self.partition.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._recorder is not None:
            self._stop_recording()
        self._habits.end_look()
        seconds = time.perf_counter() - self.started
        self._probe()
        self.partition.resolve(wait=True)
        self._stack.close()
        if not self.partition.done:
            if error is None:
                raise UserError("no step was observed: call optimizer.step() of the observed optimizer inside `with`")
            return
        rank = _rank()
        with torch.random.fork_rng(devices=[]):  # what is tried at the end takes none of the user's random numbers
            observed = self._observed(seconds, kind)
            try:
                write_observed(self.out / f"rank{rank}" if rank else self.out, observed)
            except OSError as problem:  # the loop's own result may not be saved yet
                warnings.warn(f"the observed run is lost, {self.out}: {problem.strerror}", stacklevel=2)

    def batches(self, iterable: Iterable[Item]) -> Iterator[Item]:
        """Time the wait for each item of something that is no DataLoader."""
        iterator = iter(iterable)
        while True:
            with self.phase(Phase.DATA):
                try:
                    item = next(iterator)
                except StopIteration:
                    return
            yield item

    @contextmanager
    def phase(self, phase: Phase | str) -> Iterator[None]:
        """Name what the hooks cannot see: `with watch.phase("transfer"):`."""
        self.partition.begin(Phase(phase))
        try:
            yield
        finally:
            self.partition.end()

    @contextmanager
    def forward(self) -> Iterator[None]:
        """A forward pass that does not begin with calling the model, as in Lightning's `training_step`: one, whatever
        parts it calls."""
        before = self._forwards
        with self.phase(Phase.FORWARD):
            yield
        self._forwards = before + 1

    def evaluation(self) -> contextlib.AbstractContextManager[None]:
        return self.phase(Phase.EVALUATION)

    def checkpoint(self) -> contextlib.AbstractContextManager[None]:
        return self.phase(Phase.CHECKPOINT)

    def log(self, **values: float | Tensor) -> None:
        """Numbers of this step for the run's curves; a tensor is read when the run is written, not now."""
        self._logged.update(values)

    def profile(self, steps: int = 4) -> None:
        """Record the next `steps` steps in detail: time by operation, and every allocation."""
        self._wanted, self._asked = steps, True

    _asked = False

    # -- the hooks' side -------------------------------------------------------------------------------------

    def _forward_begins(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self._forwards += 1
        self._habits.forward_begins(module, *((args, kwargs) if self._recorder is None else ((), {})))
        if self._forwards == 1 and len(self.metrics) == LOOKED_AT:
            self.gradients_found = "kept" if self._gradients() else "none"
        if not self.inputs and (args or kwargs):
            self.inputs = describe_inputs(_inner(module), args, kwargs, self.device.type)
            self._habits.call = ModuleCall.of(_inner(module), args, kwargs)
            if module is not self.model:  # a part of it: no plan of the whole can be made from these
                self.inputs["signature"] = None
        if self._recorder is not None:
            if not self._recording and self._forwards == 1:
                self._forget_cleared()
            self._held.batch_bytes = sum(storage_bytes([args, kwargs]).values())

    def _cleared(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self._habits.cleared(args, kwargs)
        if self._recorder is not None and not self._recording:
            self._forget_cleared()

    gradients_found = "none"  # by the forward pass: as `Loop.gradients`

    def _forget_cleared(self) -> None:
        """Gradients that the loop has cleared since: the profiler does not see what it did not see allocated."""
        now = self._gradients()
        self._held.gradients = {a: size for a, size in self._held.gradients.items() if a in now}

    def _loader_asked(self, workers: int) -> None:
        self.data_workers = workers

    data_workers: int | None = None

    def _backward_begins(self, roots: Any) -> None:
        first = not self._habits.passes and self._forwards == 1 and len(self.metrics) >= LOOKED_AT
        first &= self.gradients_found != "none"
        self._habits.backward_begins(roots)
        if first and not self._gradients():
            self.gradients_found = "forward"
        elif first or self._uncleared:  # a pass for another model's update may come before they are cleared
            with self._habits.aside():
                held = any(bool(p.grad.any()) for p in parameters_of(self.optimizers) if p.grad is not None)
            self._uncleared = (self._uncleared or user_line()) if held else ""

    _uncleared = ""  # the line of the step's first backward pass, as long as all passes of the step found gradients

    def _backward_ended(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self._habits.backward_ended(args, kwargs)
        if getattr(self.model, "require_backward_grad_sync", False):
            self.gradient_syncs += 1
        if self._recorder is not None:
            self._held.gradient_addresses |= set(self._gradients())

    def _skipped(self) -> None:
        self.skipped += 1
        self._stepped()

    def _stepped(self) -> None:
        """The optimizer has updated, the last one where there are several: the step ends, if there was one."""
        if not self._habits.anew:
            return
        if self._uncleared:
            self._habits.lines["gradients_uncleared"][self._uncleared] += 1
            self._uncleared = ""
        self._habits.stepped(self._forwards)
        intervals = self.partition.intervals
        self.partition.cut()
        number = len(self.metrics) + 1
        entry: dict[str, Any] = {"step": number, **self._logged}
        self._logged = {}
        self.metrics.append(entry)
        self.micro_batches.append(self._forwards)
        self._forwards = 0
        if self._recorder is not None:
            self.recorded.add(number)
            self._recording.append(intervals)
            if len(self._recording) >= self._stop_at:
                self._stop_recording()
        elif self._wanted and not self._habits.profiled and (number >= RECORD_AT or self._asked):
            self._start_recording()
        now = time.perf_counter()
        if self._recorder is None and now - self._probed > PROBE_EVERY_SECONDS:
            self._probe()
            self.partition.start()  # the probe is in no step
        if now - self._sampled > SAMPLE_EVERY_SECONDS:
            self._sampled = now
            self.peak_resident = max(self.peak_resident, host.resident_bytes())
            self._energy.joules()
            if self._gpu is not None:
                self._gpu.sample()

    # -- recording -------------------------------------------------------------------------------------------

    def _start_recording(self) -> None:
        began = time.perf_counter()
        self._stop_at, self._wanted, self._asked = self._wanted, 0, False
        self._probe()
        self._recording = []
        self._held = KnownStorages(
            weights=storage_bytes([*self.model.parameters(), *self.model.buffers()]),
            gradients=self._gradients(),
            optimizer=storage_bytes([optimizer.state for optimizer in self.optimizers]),
        )
        if not _compiled(self.model):  # hooks inside a compiled module would make it compile again
            self._recording_stack.enter_context(scopes_recorded(module_paths(self.model)))
        self.sync = self._recording_stack.enter_context(sync_points(self.partition))
        self.sampler = self._recording_stack.enter_context(StackSampler(self.partition))
        self._recorder = self._recording_stack.enter_context(profiled(self.device.type))
        self.partition.on_mark = mark
        self.partition.start()
        self.profiling_seconds += time.perf_counter() - began

    def _stop_recording(self) -> None:
        began = time.perf_counter()
        assert self._recorder is not None
        self.partition.on_mark = None
        self._recording_stack.close()
        recorder, self._recorder = self._recorder, None
        if self._recording:
            self.sync_steps = len(self._recording)
            self._profile = read_modules(
                recorded_events(recorder), recorded_allocations(recorder), self._recording, self._held
            )
        self.partition.start()
        self.profiling_seconds += time.perf_counter() - began

    sync_steps = 1
    gradient_syncs = 0

    def _probe(self) -> None:
        """Is the machine as fast as when it was measured? A few kernels, some 10 ms, outside of any step."""
        if self._machine is not None and self._prober is not None:
            self.probes.append(self._prober.ratios(self._machine))
            self._probed = time.perf_counter()

    def _gradients(self) -> dict[int, int]:
        return storage_bytes([p.grad for p in self.model.parameters()])

    # -- the end ---------------------------------------------------------------------------------------------

    def _observed(self, seconds: float, error: type[BaseException] | None) -> Observed:
        done = self.partition.done
        for entry, times in zip(self.metrics, done, strict=False):
            entry["seconds"] = times.wall_seconds
            entry |= {f"{phase}_seconds": s for phase, s in times.phase_seconds.items()}
            entry |= {name: float(value) for name, value in entry.items() if isinstance(value, Tensor)}
            if entry["step"] in self.recorded:
                entry["recorded"] = True
        usual = sorted(self.micro_batches)[len(self.micro_batches) // 2]
        waited = sum(t.phase_seconds.get(Phase.DATA, 0.0) for t in done)
        anew = self._habits.most_seen("loader begun")
        facts: dict[str, Any] = {
            "source": "observe",
            "machine": torch.cuda.get_device_name() if self.device.type == "cuda" else host.cpu_name(),
            "device": self.device.type,
            "threads": torch.get_num_threads(),
            "cores": usable_cores(),
            "memory_bytes": host.memory_bytes(),
            "versions": {"ironlaw": __version__, "torch": torch.__version__, "python": platform.python_version()},
            "compile": _compiled(self.model),
            "accumulation": max(1, usual),
            "started": self.started_at,
            "finished": datetime.datetime.now().astimezone().isoformat(timespec="seconds"),
            "interrupted": error.__name__ if error is not None else None,
            "skipped_updates": self.skipped,
            "data_workers": self.data_workers,
            **(self.sampler.facts(self._recording) if self.sampler is not None else {}),
            **({"data_stage": "rebuilt", "data_place": anew["place"]} if anew else {}),
            "recompile_seconds": self._habits.recompile_seconds([t.wall_seconds for t in done]),
            "data_cpu_fraction": sum(t.data_cpu_seconds for t in done) / waited if waited else None,
            **({"reserved_bytes": torch.cuda.max_memory_reserved(self.device),
                "compute_units": torch.cuda.get_device_properties(self.device).multi_processor_count}
               if self.device.type == "cuda" else {}),
            **(self._gpu.facts() if self._gpu is not None else {}),
            "processor_throttled": subtract(processor_throttle_count(), self._throttled),
            "rank": _rank(),
            "world_size": torch.distributed.get_world_size() if _distributed() else 1,
            "gradient_syncs_per_step": self.gradient_syncs / len(done),
            "machine_slowdown": interference.trimmed_mean(self.probes),
            "other_load": interference.other_load(self.probes) if self.probes else self._load.share(),
            "virtual": host.is_virtual(),
            "host": platform.node(),
            "thread_gain": threads_unlike_cores(
                _inner(self.model), torch.get_num_threads(), usable_cores(),
                self.inputs.get("tokens_per_micro_batch"), self.inputs.get("precision"),
            )
            if self.device.type == "cpu" else None,
            "sync_points": describe_sync_points(self.sync, self.sync_steps),
            "autocast": None, "precision": None,
            **{key: value for key, value in self.inputs.items() if key != "signature"},
            "model": {"name": self.name, "parameters": sum(p.numel() for p in self.model.parameters())},
            **self._habits.facts(self.inputs.get("precision")),
            "updates": [asdict(update) for update in updates_of(self.optimizers)],
            "gradients_found": self.gradients_found,
            "fused_update": fused_update_saves(self.optimizers) if self.device.type == "cpu" else None,
            "misaligned": misaligned_weights(_inner(self.model), self.inputs.get("tokens_per_micro_batch"),
                                             self.inputs.get("precision")),
            "odd_sizes": odd_sizes(self.inputs.get("tokens_per_micro_batch"), head_size(_inner(self.model))),
        }  # fmt: skip
        return Observed(
            steps=done,
            recorded=self.recorded,
            metrics=self.metrics,
            profile=self._profile,
            held={"weights": tree_bytes([*self.model.parameters(), *self.model.buffers()]),
                  "optimizer": tree_bytes([optimizer.state for optimizer in self.optimizers])},
            resident_peak_bytes=max(self.peak_resident, host.resident_bytes()),
            cuda_peak_bytes=torch.cuda.max_memory_allocated() if self.device.type == "cuda" else None,
            joules=self._energy.joules(),
            joules_basis=self._energy.basis,
            seconds=seconds,
            profiling_seconds=self.profiling_seconds,
            facts=facts,
            module=_inner(self.model) if self.plan else None,
            signature=self.inputs.get("signature"),
        )  # fmt: skip


def _distributed() -> bool:
    return torch.distributed.is_available() and torch.distributed.is_initialized()


def _rank() -> int:
    return torch.distributed.get_rank() if _distributed() else 0


def _inner(model: nn.Module) -> nn.Module:
    """Without the wrappers of data parallelism and of the compiler."""
    while True:
        below = getattr(model, "_orig_mod", None)
        if below is None and type(model).__name__ in ("DistributedDataParallel", "DataParallel"):
            below = model.module
        if below is None:
            return model
        model = below


def _compiled(model: nn.Module) -> bool:
    return any(hasattr(m, "_orig_mod") or m._compiled_call_impl is not None for m in model.modules())


def _measured_machine() -> Profile | None:
    """This machine's profile, when it has been measured with as many threads as the loop uses."""
    try:
        profile = load_profile()
    except UserError:
        return None
    same = profile.name == host.cpu_name() and profile.threads == torch.get_num_threads()
    return profile if same else None
