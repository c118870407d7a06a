"""Seconds of every operation of a block, and of both ends of a model, as `workload/` lists them under an engine's
conventions; for many candidates at once.

    for cost in operation_costs(candidates, system):
        cost.operation.name, cost.part, cost.seconds, cost.again
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

import numpy as np

from ironlaw.catalog.formats import number_format
from ironlaw.ledger import Kind, Phase
from ironlaw.machine.efficiency.attention import attention_seconds
from ironlaw.machine.efficiency.matmul import matmul_seconds
from ironlaw.machine.efficiency.streaming import streaming_seconds
from ironlaw.model.config import ModelConfig
from ironlaw.plan.cluster.candidates import Array, Candidates
from ironlaw.plan.cluster.collective_costs import context_kinds, distinct
from ironlaw.plan.cluster.layout_table import code
from ironlaw.plan.cluster.system import ClusterSystem
from ironlaw.plan.engines.engine import TrainingEngine
from ironlaw.workload.blocks import Policy, Shape
from ironlaw.workload.kinds import both_passes, shape_of
from ironlaw.workload.latent import WIDE as WIDENING
from ironlaw.workload.operations import Operation
from ironlaw.workload.recompute import AGAIN, again
from ironlaw.workload.sizes import Size, larger, smaller

FLASH2_SLOWDOWN = {"hopper": 616 / 335, "blackwell": 3.0, "blackwell_ultra": 3.0}
"""Time of FlashAttention-2 over that of a kernel written for the generation. Hopper: causal forward, head size 128,
16k tokens, 335 against FlashAttention-3's 616 TFLOP/s (arXiv 2407.08608, figure 5). Blackwell: assumed."""

NEWER_LIBRARY = {"volta": 0.75}
"""Time of a matmul in a training library over that of the kernels measured alone, where those are much older: Volta's
are of cuBLAS 9, in the year of the V100 (DeepBench, 2017). From four runs of 2020 on 1 to 8 V100s."""


LINE_BYTES = 128
UNALIGNED = {"ampere": 1.3}
"""Time of a linear layer whose weights have rows of no whole number of cache lines over that of others: a row of a
tile then lies in two lines and not in one. NVIDIA's "Matrix Multiplication Background User's Guide" asks for whole
lines on A100s only; how much is lost is from one published pair of runs (BLOOM's tuning, tensor degree 8: 94 TFLOP/s
at a hidden size of 14,400, 120 at 13,824), for no product among the measured ones has such a shape."""

PARTS = ("matmul", "attention", "scores", "stream", "shard")
"""What the operations of a block are told apart by: linear layers with the casts of their operands; attention; traffic
of materialised scores; element-wise kernels on the residual stream, and on what tensor parallelism divides."""


@dataclass(frozen=True)
class OperationCost:
    """One operation of a block or of an end, and which of `PARTS` it belongs to.

    `seconds` is None where only the bytes of all operations of a part together give a time.
    """

    operation: Operation
    part: str
    share: Size  # of the layers that have it
    seconds: Array | None
    again: tuple[float, float] = (0.0, 0.0)  # how often it runs again under full and under selective recomputation


def operation_costs(candidates: Candidates, system: ClusterSystem) -> Iterator[OperationCost]:
    """Every operation of a block, forward and backward, with what it costs; of several kinds of blocks all of them."""
    shape, engine = candidates.shape(system.engine), system.engine
    for kind, share in candidates.kinds.items():
        forward, backward = both_passes(shape, kind)
        runs_again = _ours_again(shape, kind, candidates.policies(kind)) if not engine.fused else None
        for op in forward:
            for part, seconds in seconds_by_part(op, shape, candidates, system):
                again = _again(op, part, candidates.model, engine) if runs_again is None else runs_again(op)
                yield OperationCost(op, part, share, seconds, again)
        for op in backward:
            for part, seconds in seconds_by_part(op, shape, candidates, system):
                yield OperationCost(op, part, share, seconds)


def seconds_by_part(
    op: Operation, shape: Shape, candidates: Candidates, system: ClusterSystem
) -> Iterator[tuple[str, Array | None]]:
    """By part; None where all operations of a part are timed together."""
    if op.matmul is not None:
        precision = system.wide_precision if op.precision == "fp32" else system.precision
        m, n, k = op.matmul
        slower = _unaligned(*((m, n) if op.kernel == "matmul_weight_gradient" else (n, k)), system, precision)
        yield "matmul", slower * product_seconds(m, n, k, op.batch, system, precision)
    elif op.kernel == "quantise":
        yield "matmul", np.asarray(streaming_seconds(op.bytes_moved, system.hardware))
    elif op.kind is Kind.ATTENTION:
        window = shape_of(shape, op.group).model.sliding_window
        seconds, scores = _attention(op, window, candidates, shape, system)
        yield "attention", seconds
        yield "scores", scores
    else:
        yield "stream" if is_on_stream(op) else "shard", None


def _again(op: Operation, part: str, model: ModelConfig, engine: TrainingEngine) -> tuple[float, float]:
    """How often recomputation in full, and selective one, runs an operation of the forward pass again.

    Megatron repeats the attention core (NeMo of latent attention what widens it); torchtitan every other matmul and
    what is element-wise, seldom attention.
    """
    if not engine.repeats_attention_alone:
        shares = {"matmul": engine.selective_matmul_share, "stream": 1.0, "shard": 1.0}
        return 1.0, shares.get(part, engine.selective_attention_share)
    if engine.widens_again(model):
        return 1.0, float(op.name.removesuffix("_cast") in WIDENING)
    return 1.0, float(part in ("attention", "scores"))


def _ours_again(
    shape: Shape, kind: str, policies: Mapping[Policy, float]
) -> Callable[[Operation], tuple[float, float]]:
    """The same of our trainer, which stops as soon as everything is there. `policies`: shares of the blocks."""
    whole = frozenset[str]()
    run = {
        policy: {(op.name.removesuffix(AGAIN), op.kernel) for op in again(shape, policy, kind) if op.repeat != 0}
        for policy in {whole, *policies}
        if policy is not None
    }

    def times(op: Operation) -> tuple[float, float]:
        found = {policy for policy, calls in run.items() if (op.name, op.kernel) in calls}
        return float(whole in found), sum(share for policy, share in policies.items() if policy in found)

    return times


def is_on_stream(op: Operation) -> bool:
    """Whether an element-wise operation of a block works on the residual stream, which tp alone does not divide."""
    return op.name in ("residual", "dispatch", "combine") or (op.kind is Kind.NORM and op.name != "qk_norm")


def _unaligned(rows: Size, columns: Size, system: ClusterSystem, precision: str) -> Array:
    """What weights of these sizes cost over others because their rows do not start at cache lines."""
    elements = LINE_BYTES / number_format(precision).bytes_per_element()
    odd = (np.asarray(rows) % elements != 0) | (np.asarray(columns) % elements != 0)
    return np.where(odd, UNALIGNED.get(system.hardware.efficiency.generation, 1.0), 1.0)


def product_seconds(m: Size, n: Size, k: Size, batch: Size, system: ClusterSystem, precision: str) -> Array:
    """Seconds of a matrix product alone."""
    hardware = system.hardware
    newer = NEWER_LIBRARY.get(hardware.efficiency.generation, 1.0)

    def seconds(m: Array, n: Array, k: Array, b: Array) -> Array:
        return newer * np.asarray(matmul_seconds(m, n, k, b, precision, hardware=hardware, sustained=True))

    return distinct(seconds, m, n, k, batch)


def _attention(
    op: Operation, window: int | None, candidates: Candidates, shape: Shape, system: ClusterSystem
) -> tuple[Array, Array]:
    """Seconds of one layer's attention in one direction, and of the traffic of materialised scores."""
    assert op.attention is not None
    hardware, precision, engine = system.hardware, system.wide_precision, system.engine
    sequences, sequence, heads, kv_heads, head_size = op.attention
    backward = op.phase is Phase.BACKWARD
    if shape.materialised:  # every (query, key) pair is computed, masked or not
        batch, rows = sequences * heads, sequence / shape.cp
        scores = product_seconds(rows, sequence, head_size, batch, system, precision)
        seconds = scores + product_seconds(rows, shape.model.size_of_value, sequence, batch, system, precision)
        # scale + mask + softmax read and write 16-bit scores; dropout reads, writes and keeps a one-byte mask
        moved = batch * rows * sequence * (4 * engine.element_bytes + 1)
        traffic = np.asarray(streaming_seconds(moved, hardware))
        return (2 * seconds, 2 * traffic) if backward else (seconds, traffic)

    # All-to-all leaves fewer heads and the whole sequence. The calls of a ring alternate between two streams, so that
    # one fills what the other leaves idle (`cp_stream` of Transformer Engine): no loss for their smaller size.
    swapped = (candidates.cp > 1) & (context_kinds(candidates, engine) == code("cp_kind", "all_to_all"))
    fewer, calls = np.where(swapped, candidates.cp, 1.0), np.where(swapped, 1.0, 1 / candidates.cp)
    # FlashAttention-2 wants values as wide as keys: trainers add zeros.
    value = head_size if engine.attention_kernel == "flash2" else shape.model.size_of_value
    old = FLASH2_SLOWDOWN.get(hardware.efficiency.generation, 1.0) if engine.attention_kernel == "flash2" else 1.0

    def flash(b: Array, s: Array, h: Array, kv: Array, d: Array, w: Array, v: Array) -> Array:
        return np.asarray(
            attention_seconds(
                b, s, h, kv, d, True, precision, hardware=hardware, direction="backward" if backward else "forward",
                window=w, sustained=True, value_size=v,
            )
        )  # fmt: skip

    span = sequence if window is None else smaller(window, sequence)
    kv = larger(kv_heads / fewer, 1.0)
    found = distinct(flash, sequences, sequence, heads / fewer, kv, head_size, span, value) * calls * old
    return found, np.zeros(len(candidates))


def end_costs(candidates: Candidates, system: ClusterSystem) -> Iterator[OperationCost]:
    """Every operation of the embedding ("stream") and of output layer and loss ("matmul", "loss")."""
    shape = candidates.shape(system.engine)
    (looked_up, added), (predicted, learned) = (both_passes(shape, end) for end in ("embedding", "head"))
    for op in [*looked_up, *predicted, *learned, *added]:
        if op.matmul is not None:
            yield OperationCost(op, "matmul", 1.0, product_seconds(*op.matmul, 1.0, system, system.wide_precision))
        else:
            yield OperationCost(op, "stream" if op.group == "embedding" else "loss", 1.0, None)
