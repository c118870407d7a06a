"""Measurement of this machine's real ceilings: every kernel of a training step at several sizes, in interleaved rounds.

Rounds are interleaved because a shared machine slows down for seconds at a time. If all repeats of a kernel were in
a row, one slow second would spoil that kernel; spread over the whole measurement, it does not change the median.
"""

from __future__ import annotations

import contextlib
import datetime
import itertools
import math
import os
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch

from ironlaw import files
from ironlaw.cores import usable_threads
from ironlaw.kernels.attention import available
from ironlaw.ledger import Phase
from ironlaw.machine import host
from ironlaw.machine.host import OtherLoad
from ironlaw.machine.interference import OTHER_LOAD, trimmed_mean, undisturbed
from ironlaw.machine.kernels import (
    Call,
    Pool,
    attention_builder,
    elementwise_builders,
    engine_builder,
    matmul_builders,
    shared_builder,
    step_builders,
    tiny_builder,
    update_builder,
)
from ironlaw.machine.measure_links import timed
from ironlaw.machine.profile import STEP_PHASES, Curve, FP32Products, MatmulFit, Profile
from ironlaw.model.linear import capability, onednn_available
from ironlaw.package import __version__

CPU_SHAPES = (
    (16, 16, 16),
    (64, 64, 64),
    (2048, 1024, 256),
    (256, 256, 256),
    (512, 512, 512),
    (1024, 1024, 1024),
    (2048, 256, 256),
    (2048, 768, 256),
    (1024, 256, 2048),
    (256, 1024, 1024),
    (1024, 128, 512),
    (512, 2048, 128),
    (2048, 2048, 512),
    (128, 128, 4096),
)
# Rows are tokens: from a decoded batch to a long micro-batch, at widths of models that fill an accelerator.
CUDA_SHAPES = (
    *((side, side, side) for side in (64, 256, 512, 1024, 2048, 4096, 8192)),
    *((rows, 4096, 4096) for rows in (16, 128, 512, 2048, 16384)),
    *((rows, wide, 1024) for rows in (2048, 16384) for wide in (1024, 4096, 32768)),
    *((1024, wide, rows) for rows in (2048, 16384) for wide in (1024, 4096)),
    (16384, 1024, 4096), (8192, 16384, 4096), (8192, 4096, 16384), (4096, 16384, 8192), (32768, 2048, 2048),
)  # fmt: skip
SLOW_SECONDS = 0.15  # of one product: larger ones are left out, or a type without instructions would take minutes


@dataclass(frozen=True)
class KernelSizes:
    """Sizes at which kernels are timed on a kind of device."""

    shapes: tuple[tuple[int, int, int], ...]  # M, N, K of matrix products
    elements: tuple[int, ...]  # of elementwise kernels: from sizes that fit the first cache to sizes that none holds
    tokens: tuple[int, ...]  # of a sequence under attention
    head_sizes: tuple[int, ...]
    attention_tokens: int  # of a call, in one or more sequences
    width: int  # heads times head size
    cache_bytes: int  # total of a kernel's alternating inputs: above a core's share of the last cache
    copy_bytes: int


CPU_SIZES = KernelSizes(
    CPU_SHAPES, (2**12, 2**16, 2**19, 2**21, 2**23), (64, 128, 256, 512, 1024), (16, 32, 64, 128), 1024, 256,
    48 * 2**20, 2**25,
)  # fmt: skip


def sizes_of(device: torch.device) -> KernelSizes:
    if device.type == "cpu":
        return CPU_SIZES
    memory = torch.cuda.get_device_properties(device).total_memory
    largest = int(math.log2(memory)) - 9  # 2^27 elements of 80 GB: all that is alive at once fits
    return KernelSizes(
        CUDA_SHAPES, (2**12, 2**16, 2**19, 2**21, 2**23, 2**largest), (128, 512, 2048, 8192), (64, 128), 16384, 2048,
        128 * 2**20, 2**30,
    )  # fmt: skip


ONEDNN = "fp32_onednn"
PRECISIONS = {"fp32": torch.float32, "bf16": torch.bfloat16}
BEST_PERCENTILE = 20
# Samplers whose rounds show the machine's speed, by the first part of their key. On a CPU data that the cores share
# passes at a speed of its own, which kernels timed alone do not have.
KINDS = {"compute": ("matmul", "attention", "native"), "memory": ("curve",)}
CPU_KINDS = KINDS | {"memory": ("probe memory",)}
UPDATE_TENSORS = (8, 64, 256)
MAX_COPIES = 4
STEADY_SECONDS = 0.4  # of whole steps on CUDA: under load for this long a GPU lowers its clock to its power limit
SAMPLE_SECONDS = 1e-3  # short kernels are repeated until a sample lasts this long
SPIN_HERTZ = 2e9  # at least the clock of a GPU, which `torch.cuda._sleep` counts
MAX_QUEUED = 40  # calls of one sample: a stream takes some 1,000 kernels before the host has to wait
MAX_SPIN_SECONDS = 0.02


@dataclass
class Sampler:
    """One kernel at one size: alternating calls, and the seconds measured so far.

    On CUDA these are the device's seconds: it spins until all calls are queued, so that it never waits for the host;
    with `by_host` they are the host's, to queue the calls.
    """

    key: tuple[Any, ...]
    calls: list[Call]
    seconds: list[float] = field(default_factory=list)
    repeats: int = 1
    earlier: float = math.inf  # best seconds of an earlier measurement
    by_host: bool = False
    sample_seconds: float = SAMPLE_SECONDS
    _host_seconds: float = 0.0  # of the last call

    def __post_init__(self) -> None:
        self._turn: Iterator[Call] = itertools.cycle(self.calls)

    def sample(self, device: torch.device) -> None:
        timed = self._time_on_cuda if device.type == "cuda" else self._time
        if not self.seconds:  # warm up, then choose the number of repeats
            seconds = timed(1)
            if seconds < SLOW_SECONDS:  # a longer call needs no warm-up
                seconds = timed(1)
            max_repeats = MAX_QUEUED if device.type == "cuda" else 100
            self.repeats = max(1, min(max_repeats, int(self.sample_seconds / max(seconds, 1e-7))))
        self.seconds.append(timed(self.repeats))

    def _time(self, repeats: int) -> float:
        """Return the mean seconds per call."""
        start = time.perf_counter()
        for _ in range(repeats):
            next(self._turn)()
        return (time.perf_counter() - start) / repeats

    def _time_on_cuda(self, repeats: int) -> float:
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        torch.cuda.synchronize()
        torch.cuda._sleep(int(SPIN_HERTZ * min(MAX_SPIN_SECONDS, 1.5 * repeats * self._host_seconds)))
        start.record()
        began = time.perf_counter()
        for _ in range(repeats):
            next(self._turn)()
        self._host_seconds = (time.perf_counter() - began) / repeats
        end.record()
        torch.cuda.synchronize()
        return self._host_seconds if self.by_host else start.elapsed_time(end) / 1e3 / repeats

    def best(self) -> float:
        """Return the undisturbed time: a low quantile, since the minimum may be an outlier.

        If an earlier measurement of the same machine was better, return that one.
        """
        return min(float(np.percentile(self.seconds, BEST_PERCENTILE)), self.earlier)

    def ratios(self) -> list[float]:
        """Return each round's time over the best time."""
        return [seconds / self.best() for seconds in self.seconds]


def measure(
    *,
    threads: int | None = None,
    budget_seconds: float = 22.0,
    tokenizer_rate: Callable[[], float] | None = None,
    earlier: Profile | None = None,
    progress: Callable[[float, str], Any] | None = None,
) -> Profile:
    """Measure this machine and return its profile. `progress(fraction, what)` is called repeatedly.

    `earlier`: the previous profile; if it is of the same machine, its best times are kept where they are better.
    """
    started = time.perf_counter()
    report = progress or (lambda fraction, what: None)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    host.keep_freed_memory()
    torch.set_num_threads(threads or usable_threads())
    torch.manual_seed(0)

    report(0.0, "storage and tokenizer")
    storage = _storage_read_rate()
    tokenizer = tokenizer_rate() if tokenizer_rate else None
    runtime_bytes = _fresh_process_bytes() if device.type == "cpu" else 0

    report(0.1, "preparing kernels")
    fp32_products = fastest_fp32_products(device)
    samplers = _samplers(device, fp32_products)
    probe, load = Probe(fp32_products), OtherLoad()
    probed: list[dict[str, float]] = []
    other_loads: list[float] = []
    spent = seconds = time.perf_counter() - started
    # At least three rounds, and no round that would end after the budget.
    while len(probed) < 3 or seconds + (seconds - spent) / len(probed) <= budget_seconds:
        for sampler in samplers:
            sampler.sample(device)
        probed.append(probe.seconds())
        other_loads.append(load.share() or 0.0)
        seconds = time.perf_counter() - started
        report(min(0.99, max(0.1, seconds / budget_seconds)), f"round {len(probed)}")
    for kind in KINDS:
        samplers.append(Sampler((f"probe {kind}",), [], [times[kind] for times in probed]))
    if device.type == "cuda":
        runtime_bytes = host.context_bytes(device)
    profile = _profile(
        device, samplers, earlier, fp32_products=fp32_products, runtime_bytes=runtime_bytes,
        storage_bytes_per_second=storage, tokenizer_tokens_per_second=tokenizer,
    )  # fmt: skip
    profile.interference[OTHER_LOAD] = other_loads
    return profile


def fastest_fp32_products(device: torch.device, rounds: int = 7) -> FP32Products:
    """Return the library with the faster fp32 matrix products, by timing the three products of a linear layer."""
    if device.type != "cpu" or not onednn_available():
        return "default"
    pool = Pool(device, elements=2**23)
    calls = {
        onednn: [build(1024, 512, 512) for build in matmul_builders(pool, torch.float32, onednn).values()]
        for onednn in (False, True)
    }
    seconds: dict[bool, list[float]] = {False: [], True: []}
    for _ in range(rounds):
        for onednn, products in calls.items():
            seconds[onednn].append(sum(map(timed, products)))
    return "onednn" if np.median(seconds[True]) < np.median(seconds[False]) else "default"


def _samplers(device: torch.device, fp32_products: FP32Products) -> list[Sampler]:
    """Return samplers of everything that is timed."""
    sizes, cuda = sizes_of(device), device.type == "cuda"
    # Numbers for three operands of the largest kernel.
    pool = Pool(device, max(3 * max(sizes.elements), *(m * k + n * k for m, n, k in sizes.shapes)))
    onednn = fp32_products == "onednn"
    samplers = []
    for precision, dtype in PRECISIONS.items():
        samplers += _products(pool, sizes, dtype, precision)
        for kernel, builder in elementwise_builders(pool, dtype).items():
            for elements in sizes.elements:
                key = ("curve", precision, kernel, elements)
                samplers.append(_sampler(key, partial(builder, elements), sizes.cache_bytes, 12 * elements))
        samplers += _attention(pool, sizes, dtype, precision)
    if onednn:
        samplers += _products(pool, sizes, torch.float32, ONEDNN)
    for tensors in UPDATE_TENSORS:
        key = ("curve", "fp32", "update_tensors", tensors)
        update = _sampler(key, partial(update_builder, pool, tensors), sizes.cache_bytes, 2**24)
        samplers.append(replace(update, by_host=cuda))
    for layers, backward in itertools.product((1, 5), (False, True)):
        call = tiny_builder(device, layers, backward, onednn)
        samplers.append(Sampler(("tiny", layers, backward), [call], by_host=cuda))
    for precision, dtype in PRECISIONS.items():
        seconds = STEADY_SECONDS if cuda else SAMPLE_SECONDS
        for phase, call in step_builders(device, dtype, onednn).items():
            samplers.append(Sampler(("step", precision, phase), [call], sample_seconds=seconds))
    source = torch.empty(sizes.copy_bytes, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    samplers.append(Sampler(("copy", 2.0 * source.numel()), [lambda: target.copy_(source)]))
    samplers.append(Sampler(("engine",), [engine_builder()]))
    one = torch.zeros(1, device=device)
    samplers.append(Sampler(("small",), [lambda: one + one]))
    return samplers


def _attention(pool: Pool, sizes: KernelSizes, dtype: torch.dtype, precision: str) -> list[Sampler]:
    """Causal attention, forward and backward, by PyTorch's fused kernel and, on a CPU, by Ironlaw's own."""
    samplers = []
    kernels = ("attention", "native") if pool.device.type == "cpu" and available(dtype) else ("attention",)
    directions = ("forward", "backward")
    for kernel, tokens, size, direction in itertools.product(kernels, sizes.tokens, sizes.head_sizes, directions):
        sequences, heads = sizes.attention_tokens // tokens, sizes.width // size
        build = partial(
            attention_builder, pool, dtype, sequences, tokens, heads, size, direction == "backward", kernel == "native"
        )
        pairs = sequences * heads * tokens * tokens / 2
        key = (kernel, precision, direction, tokens, size, pairs)
        samplers.append(_sampler(key, build, sizes.cache_bytes, 16 * sequences * tokens * heads * size))
    return samplers


def _products(pool: Pool, sizes: KernelSizes, dtype: torch.dtype, label: str) -> list[Sampler]:
    """The products of a linear layer at every shape. `label`: the precision, or ONEDNN for oneDNN's fp32 products."""
    builders = matmul_builders(pool, dtype, onednn=label == ONEDNN)
    once = builders["matmul"](256, 256, 256)
    largest = 256**3 * SLOW_SECONDS / min(timed(once) for _ in range(3))  # products of numbers
    return [
        _sampler(("matmul", label, kernel, (m, n, k)), partial(build, m, n, k), sizes.cache_bytes, 4 * k * (m + n))
        for kernel, build in builders.items()
        for m, n, k in sizes.shapes
        if m * n * k < largest
    ]


def _sampler(key: tuple[Any, ...], build: Callable[[], Call], cache_bytes: int, input_bytes: int) -> Sampler:
    copies = max(1, min(MAX_COPIES, cache_bytes // max(1, input_bytes)))
    return Sampler(key, [build() for _ in range(copies)])


def _profile(device: torch.device, samplers: list[Sampler], earlier: Profile | None, **found: Any) -> Profile:
    """Build the profile from the samplers' times. `found`: the fields that no sampler timed."""
    profile = Profile(
        **_identity(device), **found, matmul={}, curves={precision: {} for precision in PRECISIONS}, attention={},
        copy_bytes_per_second=0.0, small_operation_seconds=0.0, tiny_block_seconds={}, reference_step_seconds={},
    )  # fmt: skip
    if earlier is not None and earlier.machine == profile.machine:
        for sampler in samplers:
            sampler.earlier = earlier.best_seconds.get(_name(sampler.key), math.inf)
    best = {sampler.key: sampler.best() for sampler in samplers}
    profile.matmul = {precision: _fits(best, precision) for precision in PRECISIONS}
    profile.onednn = _fits(best, ONEDNN)
    # A backward kernel is timed through the autograd engine, but a real backward pass starts the engine only once.
    # The device's own seconds contain none of it.
    engine = best["engine",] if device.type == "cpu" else 0.0
    for key, seconds in best.items():
        if "backward" in _name(key):
            seconds = max(seconds - engine, 0.1 * seconds)
        if key[0] == "curve":
            _, precision, kernel, elements = key
            before = profile.curves[precision].get(kernel, Curve((), ()))
            profile.curves[precision][kernel] = Curve((*before.elements, float(elements)), (*before.seconds, seconds))
        elif key[0] in ("attention", "native"):
            kernel, precision, direction, tokens, head_size, pairs = key
            measured = profile.attention if kernel == "attention" else profile.native_attention
            directions = measured.setdefault(precision, {"forward": [], "backward": []})
            directions[direction].append((tokens, head_size, seconds / pairs))
        elif key[0] == "copy":
            profile.copy_bytes_per_second = key[1] / seconds
    profile.small_operation_seconds = best["small",]
    forward, both = ((best["tiny", 5, backward] - best["tiny", 1, backward]) / 4 for backward in (False, True))
    profile.tiny_block_seconds = {"forward": forward, "backward": both - forward}
    for precision in PRECISIONS:
        profile.reference_step_seconds[precision] = best["step", precision, Phase.OPTIMIZER]
        profile.reference_step_shares[precision] = _shares(samplers, precision)
    kinds = CPU_KINDS if device.type == "cpu" else KINDS
    profile.interference = {kind: _rounds(samplers, keys) for kind, keys in kinds.items()}
    profile.probe = {kind: best[f"probe {kind}",] for kind in KINDS}
    profile.best_seconds = {_name(key): seconds for key, seconds in best.items()}
    return profile


def _name(key: tuple[Any, ...]) -> str:
    return " ".join(map(str, key))


def _shares(samplers: list[Sampler], precision: str) -> dict[Phase, float]:
    """Return the share of each phase in a step: the median over the rounds, in which the machine was equally fast."""
    until = {s.key[2]: np.array(s.seconds) for s in samplers if s.key[:2] == ("step", precision)}
    ends = [0.0, *(float(np.median(until[phase] / until[Phase.OPTIMIZER])) for phase in STEP_PHASES)]
    return {
        phase: max(0.0, end - start) for phase, (start, end) in zip(STEP_PHASES, itertools.pairwise(ends), strict=True)
    }


def _fits(best: Mapping[tuple[Any, ...], float], label: str) -> dict[str, MatmulFit]:
    """Return the fit of each timed kernel over its shapes."""
    points: dict[str, dict[tuple[int, int, int], float]] = defaultdict(dict)
    for key, seconds in best.items():
        if key[:2] == ("matmul", label):
            points[key[2]][key[3]] = seconds
    return {kernel: MatmulFit.fit([*timed], [*timed.values()]) for kernel, timed in points.items()}


def _identity(device: torch.device) -> dict[str, Any]:
    """Return the profile's fields that identify this machine."""
    cuda = device.type == "cuda"
    return {
        "device": device.type,
        "name": torch.cuda.get_device_name(device) if cuda else host.cpu_name(),
        "created": datetime.datetime.now().astimezone().isoformat(timespec="seconds"),
        "versions": {"ironlaw": __version__, "torch": torch.__version__, "python": sys.version.split()[0]},
        "threads": torch.get_num_threads(),
        "memory_bytes": torch.cuda.get_device_properties(device).total_memory if cuda else host.memory_bytes(),
        "capability": capability(device),
    }


def _rounds(samplers: list[Sampler], keys: tuple[str, ...]) -> list[float]:
    """Return for each round the median ratio of time to best time over the kernels of one kind."""
    ratios = [sampler.ratios() for sampler in samplers if sampler.key[0] in keys]
    return [float(np.median(samples)) for samples in zip(*ratios, strict=True)]


class Probe:
    """One kernel of each kind, timed again during a run to check the machine's speed.

    The measurement times them in the same way, in a row and in a warm cache, so that both can be compared.
    """

    def __init__(self, fp32_products: FP32Products) -> None:
        pool = Pool(torch.device("cpu"), elements=2**21)
        self._calls = {
            "compute": matmul_builders(pool, torch.float32, fp32_products == "onednn")["matmul"](512, 512, 512),
            "memory": shared_builder(pool),
        }
        self._load = OtherLoad()

    def seconds(self, repeats: int = 3) -> dict[str, float]:
        """Return the median seconds of the kernel of each kind. Takes some 10 ms."""
        times = {kind: [timed(call) for _ in range(repeats + 1)] for kind, call in self._calls.items()}
        return {kind: float(np.median(some[1:])) for kind, some in times.items()}

    def slowdown(self, profile: Profile, seconds: float) -> dict[str, float] | None:
        """Return the trimmed mean of `ratios` over `seconds`; None if other programs use the cores."""
        until = time.perf_counter() + seconds
        observations = [self.ratios(profile)]
        while time.perf_counter() < until:
            observations.append(self.ratios(profile))
        if not undisturbed(observations[-1:]):  # other programs come and go
            return None
        return trimmed_mean(observations[1:] or observations)  # the first call wakes the threads

    def ratios(self, profile: Profile) -> dict[str, float]:
        """Return by kind the present time over the best of the measurement (1.0: undisturbed).

        If the system reports it, also the share of the cores that other programs used since the last call.
        """
        share = self._load.share()
        found = {kind: seconds / profile.probe[kind] for kind, seconds in self.seconds().items()}
        return found if share is None else found | {OTHER_LOAD: share}


def _storage_read_rate(size: int = 64 * 2**20) -> float | None:
    """Return the bytes per second of reading an uncached file; None if the cache folder cannot be used."""
    folder = files.cache_folder()
    folder.mkdir(parents=True, exist_ok=True)
    with contextlib.suppress(OSError), tempfile.NamedTemporaryFile(dir=folder) as file:
        file.write(os.urandom(size))
        file.flush()
        os.fsync(file.fileno())
        os.posix_fadvise(file.fileno(), 0, size, os.POSIX_FADV_DONTNEED)
        start = time.perf_counter()
        with Path(file.name).open("rb", buffering=0) as reader:
            while reader.read(2**20):
                pass
        return size / (time.perf_counter() - start)
    return None


def _fresh_process_bytes() -> int:
    """Return the resident bytes of a Python process after one tiny training step: the memory that is not tensors."""
    program = (
        "import psutil, torch; model = torch.nn.Linear(8, 8);"
        "optimizer = torch.optim.AdamW(model.parameters(), fused=True);"
        "model(torch.ones(8, 8)).sum().backward(); optimizer.step();"
        "print(psutil.Process().memory_info().rss)"
    )
    result = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    return int(result.stdout)
