"""Timing of two processes of this machine while they communicate over gloo, and while they compute at the same time.

    costs = measure_links(profile)      # about ten seconds; `ironlaw measure` and the first run on several ranks do it

Both are forked from a process that has only imported PyTorch, with the group on this machine's own addresses. Every
figure is a low quantile of the slower rank over interleaved rounds: the reproducible time without disturbance. The
overhead of a wrapper is taken from the thread's processor time, which excludes waiting.
"""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from ironlaw.cores import usable_cores
from ironlaw.errors import UserError
from ironlaw.files import read_json
from ironlaw.machine.links import KINDS, MEASURED_RANKS, RankCosts
from ironlaw.machine.profile import Curve, Profile

SIZES = (2**8, 2**12, 2**15, 2**18, 2**20, 2**22, 2**24)
ROUNDS = 7
QUANTILE = 25
BLOCKS, WIDTH, ROWS = 6, 16, 8  # so small that wrapping them adds only the wrapper's overhead
MICRO_BATCHES = 4  # micro-batches
Call = Callable[[], Any]


def measure_links(profile: Profile, timeout_seconds: float = 240.0) -> RankCosts:
    """Measure the costs of ranks. UserError if two processes of this machine cannot reach each other."""
    with tempfile.TemporaryDirectory() as folder:
        program = [sys.executable, "-W", "ignore", "-m", "ironlaw.machine.measure_links"]
        environment = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
        for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT"):
            environment.pop(name, None)
        done = subprocess.run(
            [*program, folder, str(profile.threads)], env=environment, capture_output=True, text=True,
            timeout=timeout_seconds, check=False,
        )  # fmt: skip
        try:
            found = [read_json(Path(folder, f"rank{rank}.json")) for rank in range(MEASURED_RANKS)]
        except (OSError, json.JSONDecodeError):
            last = (done.stderr.strip().splitlines() or ["no reason given"])[-1]
            raise UserError(f"two processes of this machine could not be timed together: {last}") from None
    return costs_of(profile, found)


def costs_of(profile: Profile, found: list[dict[str, Any]]) -> RankCosts:
    """Build the costs from each rank's document of samples, written by `_rank`."""
    # A collective ends with its last rank: take the slower one of each round.
    best = {
        name: float(np.percentile(np.max([rank["samples"][name] for rank in found], axis=0), QUANTILE))
        for name in found[0]["samples"]
    }
    curves = {}
    for kind in KINDS:
        # A smaller buffer that took longer was disturbed. A send was timed as a round trip.
        seconds = np.minimum.accumulate([best[f"{kind} {size}"] for size in reversed(SIZES)])[::-1]
        seconds = seconds / (2 if kind == "send" else 1)
        curves[kind] = Curve(tuple(float(size) for size in SIZES), tuple(float(s) for s in seconds))
    processor_seconds = {
        name: float(np.percentile([s for rank in found for s in rank["processor"][name]], QUANTILE))
        for name in found[0]["processor"]
    }

    def own(kind: str, plain: str, collectives: dict[str, int], calls: int) -> float:
        talking = sum(count * processor_seconds[f"{name} {SIZES[0]}"] for name, count in collectives.items())
        return max(0.0, processor_seconds[kind] - processor_seconds[plain] - talking) / calls

    return RankCosts(
        profile.machine, profile.created, found[0]["cores"], curves,
        {kind: max(1.0, best[f"{kind} shared"] / best[f"{kind} alone"]) for kind in ("compute", "memory")},
        unit_seconds=own("fsdp", "plain", {"all_gather": 2 * BLOCKS, "reduce_scatter": BLOCKS}, 3 * BLOCKS),
        dtensor_seconds=own("tensor", "plain", {"all_reduce": 2 * BLOCKS}, 2 * BLOCKS),
        # Each rank sends and receives one message per micro-batch, as in a round trip.
        pass_seconds=own("pipeline", "passes", {"send": MICRO_BATCHES}, 2 * MICRO_BATCHES),
    )  # fmt: skip


# -- in the two processes ------------------------------------------------------------------------------------------


def _rank(rank: int, folder: str, threads: int) -> None:
    import torch
    import torch.distributed as dist

    torch.set_num_threads(max(1, threads // MEASURED_RANKS))
    torch.manual_seed(0)
    dist.init_process_group("gloo", init_method=f"file://{folder}/meet", rank=rank, world_size=MEASURED_RANKS)
    calls = _collectives(rank) | _kernels("shared") | _wrappers(rank)
    samples: dict[str, list[float]] = {name: [] for name in calls}
    processor: dict[str, list[float]] = {name: [] for name in calls}
    repeats = {name: _repeats(call) for name, call in calls.items()}
    for _ in range(ROUNDS):
        for name, call in calls.items():
            dist.barrier()
            worked = time.thread_time()
            samples[name].append(timed(call, repeats[name]))
            processor[name].append((time.thread_time() - worked) / repeats[name])
    torch.set_num_threads(threads)
    for name, call in _kernels("alone").items():
        samples[name] = []
        for turn in range(MEASURED_RANKS):  # one rank computes with all threads while the other waits
            for _ in range(ROUNDS):
                dist.barrier()
                if turn == rank:
                    samples[name].append(timed(call, 3))
                dist.barrier()
    document = {"samples": samples, "processor": processor, "cores": usable_cores()}
    Path(folder, f"rank{rank}.json").write_text(json.dumps(document), encoding="utf-8")
    dist.barrier()
    dist.destroy_process_group()


def _repeats(call: Call) -> int:
    """Return the number of repeats, agreed between the ranks."""
    import torch
    import torch.distributed as dist

    call()
    start = time.perf_counter()
    call()
    wanted = torch.tensor(int(2e-3 / max(1e-6, time.perf_counter() - start)))
    dist.all_reduce(wanted, op=dist.ReduceOp.MIN)
    return max(1, min(20, int(wanted)))


def timed(call: Call, repeats: int = 1) -> float:
    """Return the mean seconds of a call."""
    start = time.perf_counter()
    for _ in range(repeats):
        call()
    return (time.perf_counter() - start) / repeats


def _collectives(rank: int) -> dict[str, Call]:
    import torch
    import torch.distributed as dist

    def exchanges(size: int) -> dict[str, Call]:
        buffer, half = torch.zeros(size // 4), torch.zeros(size // 8)

        def send() -> None:  # a round trip: two messages
            dist.send(buffer, 1 - rank) if rank == 0 else dist.recv(buffer, 1 - rank)
            dist.recv(buffer, 1 - rank) if rank == 0 else dist.send(buffer, 1 - rank)

        return {
            "all_reduce": lambda: dist.all_reduce(buffer),
            "all_gather": lambda: dist.all_gather_into_tensor(buffer, half),
            "reduce_scatter": lambda: dist.reduce_scatter_tensor(half, buffer),
            "all_to_all": lambda: dist.all_to_all_single(buffer, buffer.clone()),
            "send": send,
        }

    return {f"{kind} {size}": call for size in SIZES for kind, call in exchanges(size).items()}


def _kernels(how: str) -> dict[str, Call]:
    """A matrix product and a pass over memory: the two kinds of kernels that a plan distinguishes."""
    import torch

    left, right = torch.randn(1024, 512), torch.randn(512, 512)
    wide = torch.randn(2**21)
    return {f"compute {how}": lambda: left @ right, f"memory {how}": lambda: torch.nn.functional.gelu(wide)}


def _wrappers(rank: int) -> dict[str, Call]:
    """Forward and backward of tiny layers, plain and in each wrapper: the difference is the wrapper's overhead."""
    import torch
    from torch import Tensor, nn
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard
    from torch.distributed.pipelining import PipelineStage, Schedule1F1B
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

    mesh = init_device_mesh("cpu", (MEASURED_RANKS,))
    rows = torch.randn(ROWS, WIDTH)

    def layers(count: int) -> nn.Sequential:
        def pair() -> nn.Module:
            return nn.Sequential(nn.Linear(WIDTH, 4 * WIDTH, bias=False), nn.Linear(4 * WIDTH, WIDTH, bias=False))

        return nn.Sequential(*(pair() for _ in range(count)))

    def trained(model: nn.Module) -> Call:
        def call() -> None:
            model(rows).sum().backward()
            model.zero_grad()

        return call

    plain, sharded, divided = layers(BLOCKS), layers(BLOCKS), layers(BLOCKS)
    for block in sharded:
        fully_shard(block, mesh=mesh)
    fully_shard(sharded, mesh=mesh)
    for block in divided:
        parallelize_module(block, mesh, {"0": ColwiseParallel(), "1": RowwiseParallel()})
    part = layers(BLOCKS // 2)
    micro = torch.zeros(ROWS // MICRO_BATCHES, WIDTH, requires_grad=True)
    with contextlib.redirect_stderr(None):
        stage = PipelineStage(part, rank, 2, torch.device("cpu"), input_args=micro, output_args=micro)
    schedule: Any = Schedule1F1B(stage, MICRO_BATCHES, loss_fn=lambda output, target: output.sum())

    def piped() -> None:
        given: dict[str, Tensor] = {"target": rows} if rank else {}
        schedule.step(*(() if rank else (rows,)), **given)
        part.zero_grad()

    def passed() -> None:
        for _ in range(MICRO_BATCHES):
            part(micro).sum().backward()
        micro.grad = None
        part.zero_grad()

    return {
        "plain": trained(plain), "passes": passed, "fsdp": trained(sharded), "tensor": trained(divided),
        "pipeline": piped,
    }  # fmt: skip


def main() -> None:
    import torch.multiprocessing as processes

    processes.start_processes(_rank, (sys.argv[1], int(sys.argv[2])), MEASURED_RANKS, start_method="fork")


if __name__ == "__main__":
    main()
