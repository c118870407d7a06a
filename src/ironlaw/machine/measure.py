"""Find this machine's real ceilings: time every kernel of a training step over its sizes, in interleaved rounds.

Rounds are interleaved because a shared machine slows down for seconds at a time: with all repeats of one kernel
in a row, one slow second would spoil that kernel; spread over the whole measurement, the median shrugs it off.
"""

from __future__ import annotations

import contextlib
import datetime
import itertools
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch

import ironlaw
from ironlaw.machine import host
from ironlaw.machine.kernels import Call, Pool, attention_builder, elementwise_builders, matmul_builders
from ironlaw.machine.profile import Curve, MatmulFit, Profile

# From what fits the first cache to what no cache holds.
ELEMENTWISE_SIZES = (2**12, 2**16, 2**19, 2**21, 2**23)
MATMUL_SHAPES = (
    (64, 64, 64),
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
ATTENTION_TOKENS, HEAD_SIZES = (64, 128, 256, 512, 1024), (32, 64, 128)
PRECISIONS = {"fp32": torch.float32, "bf16": torch.bfloat16}
REFERENCE_SHAPE = (512, 512, 512)  # the probe that a run repeats now and then
CACHE_DEFEATING_BYTES = 48 * 2**20  # inputs of one kernel taken in turn: more than a core's share of the last cache
MAX_COPIES = 8
SAMPLE_SECONDS = 2e-3  # short kernels are repeated until a sample lasts this long


@dataclass
class Sampler:
    """One kernel at one size: calls that take turns, and the seconds seen so far."""

    key: tuple[Any, ...]
    calls: list[Call]
    seconds: list[float] = field(default_factory=list)
    repeats: int = 1

    def __post_init__(self) -> None:
        self._turn: Iterator[Call] = itertools.cycle(self.calls)

    def sample(self, synchronize: Callable[[], None]) -> None:
        synchronize()
        start = time.perf_counter()
        for _ in range(self.repeats):
            next(self._turn)()
        synchronize()
        elapsed = time.perf_counter() - start
        if self.seconds or self.repeats > 1:
            self.seconds.append(elapsed / self.repeats)
        else:  # the first call warms up and decides how often to repeat
            self.repeats = max(1, min(100, int(SAMPLE_SECONDS / max(elapsed, 1e-7))))
            self.seconds.append(elapsed)

    def median(self) -> float:
        return float(np.median(self.seconds[1:] or self.seconds))

    def spread(self) -> float:
        """Half the width of the middle 80% of the samples, over the median."""
        low, high = np.percentile(self.seconds[1:] or self.seconds, [10, 90])
        return float((high - low) / 2 / self.median())


def measure(
    *,
    device: str | None = None,
    threads: int | None = None,
    budget_seconds: float = 22.0,
    tokenizer_rate: Callable[[], float] | None = None,
    progress: Callable[[str, float], None] | None = None,
) -> Profile:
    """Time this machine and return its profile. `progress(what, fraction)` is called as it goes."""
    started = time.perf_counter()
    say = progress or (lambda what, fraction: None)
    chosen = torch.device(device or ("cuda" if torch.cuda.is_available() else "cpu"))
    host.keep_freed_memory()
    torch.set_num_threads(threads or host.usable_cores())
    torch.manual_seed(0)

    say("storage and tokenizer", 0.0)
    storage = _storage_read_rate()
    tokenizer = tokenizer_rate() if tokenizer_rate else None
    runtime_bytes = _fresh_process_bytes()

    say("preparing kernels", 0.1)
    samplers = _samplers(chosen)
    synchronize = torch.cuda.synchronize if chosen.type == "cuda" else (lambda: None)
    rounds = 0
    spent = time.perf_counter() - started
    while rounds < 3 or time.perf_counter() - started < budget_seconds:
        for sampler in samplers:
            sampler.sample(synchronize)
        rounds += 1
        say(f"round {rounds}", min(0.99, max(0.1, (time.perf_counter() - started) / budget_seconds)))
        round_seconds = (time.perf_counter() - started - spent) / rounds
        if rounds >= 3 and time.perf_counter() - started + round_seconds > budget_seconds:
            break
    return _profile(chosen, samplers, storage, tokenizer, runtime_bytes)


def _samplers(device: torch.device) -> list[Sampler]:
    """Everything that is timed, ready to be called in turn."""
    pool = Pool(device)
    samplers = []
    for precision, dtype in PRECISIONS.items():
        for kernel, build in matmul_builders(pool, dtype).items():
            for shape in MATMUL_SHAPES:
                m, n, k = shape
                samplers.append(
                    _sampler(("matmul", precision, kernel, shape), partial(build, m, n, k), 4 * k * (m + n))
                )
        for kernel, builder in elementwise_builders(pool, dtype).items():
            for elements in ELEMENTWISE_SIZES:
                key = ("curve", precision, kernel, elements)
                samplers.append(_sampler(key, partial(builder, elements), 12 * elements))
        for tokens, head_size, direction in itertools.product(ATTENTION_TOKENS, HEAD_SIZES, ("forward", "backward")):
            sequences, heads = 1024 // tokens, 256 // head_size
            build_attention = partial(
                attention_builder, pool, dtype, sequences, tokens, heads, head_size, direction == "backward"
            )
            pairs = sequences * heads * tokens * tokens / 2
            name = ("attention", precision, direction, tokens, head_size, pairs)
            samplers.append(_sampler(name, build_attention, 16 * sequences * tokens * heads * head_size))
    source = torch.empty(2**25, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    samplers.append(Sampler(("copy", 2.0 * source.numel()), [lambda: target.copy_(source)]))
    one = torch.zeros(1, device=device)
    samplers.append(Sampler(("small",), [lambda: one + one]))
    return samplers


def _sampler(key: tuple[Any, ...], build: Callable[[], Call], input_bytes: int) -> Sampler:
    copies = max(1, min(MAX_COPIES, CACHE_DEFEATING_BYTES // max(1, input_bytes)))
    return Sampler(key, [build() for _ in range(copies)])


def _profile(
    device: torch.device,
    samplers: list[Sampler],
    storage: float | None,
    tokenizer: float | None,
    runtime_bytes: int,
) -> Profile:
    by_key = {sampler.key: sampler for sampler in samplers}
    matmul: dict[str, dict[str, MatmulFit]] = {}
    for precision in PRECISIONS:
        for kernel in ("matmul_bias", "matmul", "matmul_weight_gradient"):
            points = [s for s in samplers if s.key[:3] == ("matmul", precision, kernel)]
            fit = MatmulFit.fit([s.key[3] for s in points], [s.median() for s in points])
            matmul.setdefault(precision, {})[kernel] = fit
    curves: dict[str, dict[str, Curve]] = {precision: {} for precision in PRECISIONS}
    for _, precision, kernel, elements in [s.key for s in samplers if s.key[0] == "curve"]:
        if elements == ELEMENTWISE_SIZES[0]:
            points = [by_key[("curve", precision, kernel, size)] for size in ELEMENTWISE_SIZES]
            curves[precision][kernel] = Curve(
                tuple(float(size) for size in ELEMENTWISE_SIZES), tuple(s.median() for s in points)
            )
    attention: dict[str, dict[str, list[tuple[int, int, float]]]] = {
        precision: {"forward": [], "backward": []} for precision in PRECISIONS
    }
    for sampler in samplers:
        if sampler.key[0] == "attention":
            _, precision, direction, tokens, head_size, pairs = sampler.key
            attention[precision][direction].append((tokens, head_size, sampler.median() / pairs))
    copy = next(s for s in samplers if s.key[0] == "copy")
    reference = by_key[("matmul", "fp32", "matmul", REFERENCE_SHAPE)]
    cuda = device.type == "cuda"
    return Profile(
        device=device.type,
        name=torch.cuda.get_device_name(device) if cuda else host.cpu_name(),
        created=datetime.datetime.now().astimezone().isoformat(timespec="seconds"),
        versions={"ironlaw": ironlaw.__version__, "torch": torch.__version__, "python": sys.version.split()[0]},
        threads=torch.get_num_threads(),
        memory_bytes=torch.cuda.get_device_properties(device).total_memory if cuda else host.memory_bytes(),
        runtime_bytes=runtime_bytes,
        matmul=matmul,
        curves=curves,
        attention=attention,
        copy_bytes_per_second=copy.key[1] / copy.median(),
        small_operation_seconds=by_key[("small",)].median(),
        storage_bytes_per_second=storage,
        tokenizer_tokens_per_second=tokenizer,
        spread=float(np.median([s.spread() for s in samplers])),
        reference={"seconds": reference.median()},
    )


def probe_seconds(repeats: int = 3) -> float:
    """The reference product once more, quickest of a few: has the machine changed since it was measured?"""
    m, n, k = REFERENCE_SHAPE
    a, b = torch.ones(m, k), torch.ones(k, n)
    times = []
    for _ in range(repeats):
        start = time.perf_counter()
        a @ b
        times.append(time.perf_counter() - start)
    return min(times)


def _storage_read_rate(size: int = 64 * 2**20) -> float | None:
    """Bytes per second of reading a file that the page cache does not hold; None where that cannot be arranged."""
    if not hasattr(os, "posix_fadvise"):
        return None
    folder = host.cache_folder()
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
    """Resident memory of a Python that has imported PyTorch and run one operation: what no tensor explains."""
    program = "import psutil, torch; torch.ones(8) @ torch.ones(8); print(psutil.Process().memory_info().rss)"
    result = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    return int(result.stdout)
