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
import statistics
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

from ironlaw.cores import usable_cores
from ironlaw.errors import UserError
from ironlaw.files import as_path, check_can_be_folder
from ironlaw.ledger import Phase, subtract
from ironlaw.machine import host, interference
from ironlaw.machine.host import OtherLoad
from ironlaw.machine.measure import Probe
from ironlaw.machine.profile import Profile, load_profile
from ironlaw.observe.energy import EnergyMeter
from ironlaw.observe.gpu_monitor import find_gpu_monitor, processor_throttle_count
from ironlaw.observe.habits import Habits
from ironlaw.observe.hooks import listening
from ironlaw.observe.inputs import unwrapped
from ironlaw.observe.measured import tree_bytes, updates_of
from ironlaw.observe.observed_run import Observed, larger_by, write_observed
from ironlaw.observe.other_programs import OtherPrograms
from ironlaw.observe.partition import Partition
from ironlaw.observe.recording import LoopRecording
from ironlaw.observe.sampler import StepGrowth
from ironlaw.observe.trials import head_size, misaligned_weights, odd_sizes, thread_gain, time_fused_update
from ironlaw.package import __version__

MAX_PROFILED = 1000  # steps
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
        if not isinstance(profile_steps, int) or not 0 <= profile_steps <= MAX_PROFILED:
            raise UserError(f"profile_steps = {profile_steps!r}: give a number of steps, 0 to {MAX_PROFILED}")
        self.optimizers = [getattr(o, "optimizer", o) for o in optimizers]  # wrappers of Accelerate
        if not optimizers or not all(isinstance(o, torch.optim.Optimizer) for o in self.optimizers):
            raise UserError("observe(model, optimizer) needs the torch optimizer that the loop steps")
        stamp = datetime.datetime.now().strftime("%Y%m%d-%H%M%S")
        self.out, self.plan = as_path(f"runs/observed-{stamp}" if out is None else out, "out"), plan
        check_can_be_folder(self.out, "out=")
        if (self.out / "ledger.json").exists():
            raise UserError(f"{self.out} holds a run already: give another out=")
        self.model: nn.Module = model if isinstance(model, nn.Module) else nn.ModuleList(models)
        self.name = str(name or type(unwrapped(self.model)).__name__)
        self.device = next((p.device for p in self.model.parameters()), torch.device("cpu"))
        self.partition = Partition(cuda=self.device.type == "cuda")
        self.metrics: list[dict[str, Any]] = []
        self.recorded: set[int] = set()  # steps under the profiler
        self.micro_batches: list[int] = []  # of each step
        self.probes: list[dict[str, float]] = []
        self.peak_resident = 0
        self._steps_wanted, self._asked = profile_steps, False
        self._logged: dict[str, Any] = {}
        self._stack = ExitStack()
        self._sampled = self._probed = 0.0

    def _repr_html_(self) -> str:
        where = f"<code>{escape(str(self.out))}</code>"
        return f"Observed run {where}, {len(self.metrics)} steps: <code>ironlaw.explain(watch)</code>"

    # -- the loop's side -------------------------------------------------------------------------------------

    def __enter__(self) -> Self:
        is_compiled, inner = _is_compiled(self.model), unwrapped(self.model)
        closely = self.device.type == "cpu" and not _is_distributed() and not is_compiled
        self._recording = LoopRecording(self.model, self.optimizers, self.partition, is_compiled)
        self._habits = Habits(
            inner, self.optimizers, self.partition if closely else None, is_compiled, self._recording, self._step_ended
        )
        self._stack.enter_context(listening(self.model, self.optimizers, self.partition, self._habits))
        self._growth = StepGrowth()
        accelerated = self.device.type == "cuda"
        self._gpu = find_gpu_monitor(self.device.index or 0) if accelerated else None
        self._energy = EnergyMeter(accelerated=accelerated, gpu=self._gpu)
        self._load, self._others = OtherLoad(), OtherPrograms()
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
        self._recording.end()
        self._habits.end_look()
        self._growth.end()
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
            try:
                write_observed(self.out / f"rank{rank}" if rank else self.out, self._observed(seconds, kind))
            except Exception as problem:  # the loop's own result may not be saved yet
                warnings.warn(f"the observed run is lost, {self.out}: {problem or type(problem)}", stacklevel=2)

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

    def phase(self, phase: Phase | str) -> contextlib.AbstractContextManager[None]:
        """Name what the hooks cannot see: `with watch.phase("transfer"):`."""
        return self.partition.within(Phase(phase))

    @contextmanager
    def forward(self) -> Iterator[None]:
        """A forward pass that does not begin with calling the model, as in Lightning's `training_step`: one, whatever
        parts it calls."""
        before = self._habits.forwards
        with self.phase(Phase.FORWARD):
            yield
        self._habits.forwards = before + 1

    def evaluation(self) -> contextlib.AbstractContextManager[None]:
        return self.phase(Phase.EVALUATION)

    def checkpoint(self) -> contextlib.AbstractContextManager[None]:
        return self.phase(Phase.CHECKPOINT)

    def log(self, **values: float | Tensor) -> None:
        """Numbers of this step for the run's curves; a tensor is read when the run is written, not now."""
        self._logged.update(values)

    def profile(self, steps: int = 4) -> None:
        """Record the next `steps` steps in detail: time by operation, and every allocation."""
        self._steps_wanted, self._asked = steps, True

    # -- at the end of a step --------------------------------------------------------------------------------

    def _step_ended(self, forwards: int) -> None:
        intervals = self.partition.intervals
        self.partition.cut()
        number = len(self.metrics) + 1
        self.metrics.append({"step": number, **self._logged})
        self._logged = {}
        self.micro_batches.append(forwards)
        if self._recording.is_running:
            self.recorded.add(number)
            self._recording.step_ended(intervals)
        elif self._steps_wanted and not torch.autograd._profiler_enabled() and (number >= RECORD_AT or self._asked):
            self._probe()
            self._recording.begin(self._steps_wanted)
            self._steps_wanted, self._asked = 0, False
        self._growth.step_ended(number, may_look=not self._recording.is_running)
        now = time.perf_counter()
        if not self._recording.is_running and now - self._probed > PROBE_EVERY_SECONDS:
            self._probe()
            self.partition.start()  # the probe is in no step
        if now - self._sampled > SAMPLE_EVERY_SECONDS:
            self._sampled = now
            self.peak_resident = max(self.peak_resident, host.resident_bytes())
            self._energy.joules()
            if self._gpu is not None:
                self._gpu.sample()

    def _probe(self) -> None:
        """Is the machine as fast as when it was measured? A few kernels, some 10 ms, outside of any step."""
        if self._machine is not None and self._prober is not None:
            self.probes.append(self._prober.ratios(self._machine))
            self._probed = time.perf_counter()

    # -- the end ---------------------------------------------------------------------------------------------

    def _observed(self, seconds: float, error: type[BaseException] | None) -> Observed:
        done, inner, inputs = self.partition.done, unwrapped(self.model), self._habits.inputs
        for entry, times in zip(self.metrics, done, strict=False):
            entry["seconds"] = times.wall_seconds
            entry |= {f"{phase}_seconds": s for phase, s in times.phase_seconds.items()}
            entry |= {name: float(value) for name, value in entry.items() if isinstance(value, Tensor)}
            if entry["step"] in self.recorded:
                entry["recorded"] = True
        waited = sum(t.phase_seconds.get(Phase.DATA, 0.0) for t in done)
        rows, precision = inputs.get("tokens_per_micro_batch"), inputs.get("precision")
        on_cpu, threads, cores = self.device.type == "cpu", torch.get_num_threads(), usable_cores()
        facts: dict[str, Any] = {
            "source": "observe",
            "machine": host.cpu_name(),
            "device": self.device.type,
            "threads": threads,
            "cores": cores,
            "memory_bytes": host.memory_bytes(),
            "versions": {"ironlaw": __version__, "torch": torch.__version__, "python": platform.python_version()},
            "compile": _is_compiled(self.model),
            "accumulation": max(1, statistics.median_high(self.micro_batches)),
            "started": self.started_at,
            "finished": datetime.datetime.now().astimezone().isoformat(timespec="seconds"),
            "interrupted": error.__name__ if error is not None else None,
            "data_cpu_fraction": sum(t.data_cpu_seconds for t in done) / waited if waited else None,
            "processor_throttled": subtract(processor_throttle_count(), self._throttled),
            "rank": _rank(),
            "world_size": torch.distributed.get_world_size() if _is_distributed() else 1,
            "machine_slowdown": interference.trimmed_mean(self.probes),
            "other_load": interference.other_load(self.probes) if self.probes else self._load.share(),
            "steps_grow": self._growth.facts([t.wall_seconds - t.delayed_seconds for t in done]),
            "programs_beside": self._others.facts(),
            "virtual": host.is_virtual(),
            "host": platform.node(),
            "thread_gain": thread_gain(inner, threads, cores, rows, precision) if on_cpu else None,
            "autocast": None, "precision": None,
            "model": {"name": self.name, "parameters": sum(p.numel() for p in self.model.parameters())},
            **self._recording.facts(),
            **self._habits.facts([t.wall_seconds for t in done]),
            "updates": [asdict(update) for update in updates_of(self.optimizers)],
            "fused_update": time_fused_update(self.optimizers) if on_cpu else None,
            "misaligned": misaligned_weights(inner, rows, precision),
            "odd_sizes": odd_sizes(rows, head_size(inner)),
        }  # fmt: skip
        facts["larger_batch"] = self._habits.larger_batch(larger_by(facts)) if on_cpu else None
        if self.device.type == "cuda":
            facts |= self._gpu.facts() if self._gpu is not None else {}
            facts |= {
                "machine": torch.cuda.get_device_name(),
                "reserved_bytes": torch.cuda.max_memory_reserved(self.device),
                "compute_units": torch.cuda.get_device_properties(self.device).multi_processor_count,
            }
        return Observed(
            steps=done,
            recorded=self.recorded,
            metrics=self.metrics,
            profile=self._recording.profile,
            held={"weights": tree_bytes([*self.model.parameters(), *self.model.buffers()]),
                  "optimizer": tree_bytes([optimizer.state for optimizer in self.optimizers])},
            resident_peak_bytes=max(self.peak_resident, host.resident_bytes()),
            cuda_peak_bytes=torch.cuda.max_memory_allocated() if self.device.type == "cuda" else None,
            joules=self._energy.joules(),
            joules_basis=self._energy.basis,
            seconds=seconds,
            profiling_seconds=self._recording.seconds,
            facts=facts,
            module=inner if self.plan else None,
            signature=inputs.get("signature"),
        )  # fmt: skip


def _is_distributed() -> bool:
    return torch.distributed.is_available() and torch.distributed.is_initialized()


def _rank() -> int:
    return torch.distributed.get_rank() if _is_distributed() else 0


def _is_compiled(model: nn.Module) -> bool:
    return any(hasattr(m, "_orig_mod") or m._compiled_call_impl is not None for m in model.modules())


def _measured_machine() -> Profile | None:
    """This machine's profile, when it has been measured with as many threads as the loop uses."""
    try:
        profile = load_profile()
    except UserError:
        return None
    same = profile.name == host.cpu_name() and profile.threads == torch.get_num_threads()
    return profile if same else None
