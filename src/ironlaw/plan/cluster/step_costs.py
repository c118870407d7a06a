"""Ingredients of a step: seconds of every kernel and collective of one micro-batch, for many candidates at once.

    costs = step_costs(candidates, system)
    for cost in operation_costs(candidates, system):        # of a block, forward and backward
        cost.operation.name, cost.part, cost.seconds, cost.again

Operations come from `workload/` under the engine's conventions, seconds from the models of single operations in
`machine/efficiency`. `timeline.py` adds the engine's slowdowns, overlap and launches, so that fitting an engine to
measured runs need not evaluate the operations again. Ranks are placed tp, cp, dp, pp from the inside out, as in
Megatron.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import numpy.typing as npt

from ironlaw.catalog.formats import number_format
from ironlaw.ledger import Kind, Phase
from ironlaw.machine.efficiency.attention import attention_seconds
from ironlaw.machine.efficiency.hardware import Hardware
from ironlaw.machine.efficiency.matmul import matmul_seconds
from ironlaw.machine.efficiency.streaming import streaming_seconds
from ironlaw.model.config import ModelConfig
from ironlaw.plan.cluster.candidates import Array, Candidates
from ironlaw.plan.cluster.collective_costs import (
    collective,
    context_kinds,
    layer_collectives,
    shared_states,
    small_collectives,
)
from ironlaw.plan.cluster.layout_table import code, distinct_rows
from ironlaw.plan.cluster.memory import kept_activation_bytes
from ironlaw.plan.cluster.stages import stage_layers
from ironlaw.plan.cluster.system import ClusterSystem
from ironlaw.plan.engines.engine import TrainingEngine
from ironlaw.workload.blocks import Policy, Shape
from ironlaw.workload.conventions import whole_tiles
from ironlaw.workload.kinds import EXPERT, IN_16_BITS, both_passes, shape_of
from ironlaw.workload.latent import WIDE as WIDENING
from ironlaw.workload.operations import Operation
from ironlaw.workload.recompute import RECOMPUTED_SUFFIX, recomputed_operations
from ironlaw.workload.sizes import Size, larger, smaller

FLASH2_SLOWDOWN = {"hopper": 616 / 335, "blackwell": 3.0, "blackwell_ultra": 3.0}
"""Time of FlashAttention-2 over that of a kernel written for the generation. Hopper: causal forward, head size 128,
16k tokens, 335 against FlashAttention-3's 616 TFLOP/s (arXiv 2407.08608, figure 5). Blackwell: assumed."""

NEWER_LIBRARY = {"volta": 0.75}
"""Time of a matmul in a training library over that of the kernels measured alone, where those are much older. Volta was
measured with cuBLAS 9, in the year of the V100 (DeepBench, 2017). From four runs of 2020 on 1 to 8 V100s."""


LINE_BYTES = 128
UNALIGNED = {"ampere": 1.3}
"""Time of a linear layer whose weight rows are not a whole number of cache lines over that of others: a row of a tile
then lies in two lines instead of one. NVIDIA's "Matrix Multiplication Background User's Guide" asks for whole lines on
A100s only. The loss is from one published pair of runs (BLOOM's tuning, tensor degree 8: 94 TFLOP/s at a hidden size
of 14,400, 120 at 13,824), because no measured product has such a shape."""

PARTS = ("matmul", "attention", "scores", "stream", "shard")
"""Parts of a block's operations: linear layers with the casts of their operands; attention; traffic of materialised
scores; element-wise kernels on the residual stream; element-wise kernels on tensors that tensor parallelism divides."""


@dataclass(frozen=True)
class OperationCost:
    """One operation of a block, embedding or output layer, and the part it belongs to (`PARTS`).

    `seconds` is None where all operations of the part are timed together by their bytes.
    """

    operation: Operation
    part: str
    share: Size  # of the layers that have it
    seconds: Array | None
    again: tuple[float, float] = (0.0, 0.0)  # repetitions under full and under selective recomputation


def operation_costs(candidates: Candidates, system: ClusterSystem) -> Iterator[OperationCost]:
    """Yields every operation of every kind of block, forward and backward, with its cost."""
    shape, engine = candidates.shape(system.engine), system.engine
    for kind, share in candidates.kinds.items():
        forward, backward = both_passes(shape, kind)
        repetitions: Callable[[Operation, str], tuple[float, float]] = partial(_repetitions, candidates.model, engine)
        if not engine.fused:
            repetitions = _own_repetitions(shape, kind, candidates.policies(kind))
        for op in (*forward, *backward):
            for part, seconds in seconds_by_part(op, shape, candidates, system):
                again = repetitions(op, part) if op.phase is Phase.FORWARD else (0.0, 0.0)
                yield OperationCost(op, part, share, seconds, again)


def seconds_by_part(
    op: Operation, shape: Shape, candidates: Candidates, system: ClusterSystem
) -> Iterator[tuple[str, Array | None]]:
    """Yields the seconds of an operation by part; None where all operations of the part are timed together."""
    if op.matmul is not None:
        precision, (m, n, k) = precision_of(op, system), op.matmul
        slower = _unaligned(*_weight_of(op), system, precision)
        yield "matmul", slower * product_seconds(m, n, k, op.batch, system.hardware, precision)
    elif op.kernel == "quantise":
        yield "matmul", np.asarray(streaming_seconds(op.bytes_moved, system.hardware))
    elif op.kind is Kind.ATTENTION:
        window = shape_of(shape, op.group).model.sliding_window
        seconds, scores = _attention(op, window, candidates, shape, system)
        yield "attention", seconds
        yield "scores", scores
    else:
        # What works on the residual stream, which tp without sp does not divide.
        on_stream = op.name in ("residual", "dispatch", "combine") or (op.kind is Kind.NORM and op.name != "qk_norm")
        yield "stream" if on_stream else "shard", None


def precision_of(op: Operation, system: ClusterSystem) -> str:
    """Returns the precision of a matrix product in a block."""
    wide = op.precision == "fp32" or IN_16_BITS in op.group or not whole_tiles(system.engine.tile, *_weight_of(op))
    return system.wide_precision if wide else system.precision


def _weight_of(op: Operation) -> tuple[Size, Size]:
    """Returns the rows and columns of a product's weight."""
    assert op.matmul is not None
    m, n, k = op.matmul
    return (m, n) if op.kernel == "matmul_weight_gradient" else (n, k)


def _repetitions(model: ModelConfig, engine: TrainingEngine, op: Operation, part: str) -> tuple[float, float]:
    """Returns how often full and selective recomputation repeat an operation of the forward pass.

    Selectively, Megatron repeats the attention core (NeMo, for latent attention, the projections that widen its
    inputs); torchtitan repeats every other matmul, all of experts and element-wise operations, seldom attention.
    """
    if not engine.repeats_attention_alone:
        matmuls, attention = engine.selective_shares
        if op.name.startswith(EXPERT) and engine.selective_experts != "alike":
            matmuls = 1.0
        return 1.0, {"matmul": matmuls, "stream": 1.0, "shard": 1.0}.get(part, attention)
    if engine.repeats_up_projections(model):
        return 1.0, float(op.name.removesuffix("_cast") in WIDENING)
    return 1.0, float(part in ("attention", "scores"))


def _own_repetitions(
    shape: Shape, kind: str, policies: Mapping[Policy, float]
) -> Callable[[Operation, str], tuple[float, float]]:
    """Returns `_repetitions` of our trainer, which stops once all tensors exist. `policies`: shares of blocks."""
    whole = frozenset[str]()
    run = {
        policy: {
            (op.name.removesuffix(RECOMPUTED_SUFFIX), op.kernel)
            for op in recomputed_operations(shape, policy, kind)
            if op.repeat != 0
        }
        for policy in {whole, *policies}
        if policy is not None
    }

    def times(op: Operation, part: str) -> tuple[float, float]:
        found = {policy for policy, calls in run.items() if (op.name, op.kernel) in calls}
        return float(whole in found), sum(share for policy, share in policies.items() if policy in found)

    return times


def _unaligned(rows: Size, columns: Size, system: ClusterSystem, precision: str) -> Array:
    """Returns the slowdown of weights whose rows do not start at cache lines; 1 for others."""
    elements = LINE_BYTES / number_format(precision).bytes_per_element()
    odd = (np.asarray(rows) % elements != 0) | (np.asarray(columns) % elements != 0)
    return np.where(odd, UNALIGNED.get(system.hardware.efficiency.generation, 1.0), 1.0)


def product_seconds(m: Size, n: Size, k: Size, batch: Size, hardware: Hardware, precision: str) -> Array:
    """Returns the seconds of a matrix product alone. A newer library is no faster than full tiles in all units."""
    sizes = np.broadcast_arrays(*(np.atleast_1d(np.asarray(size, dtype=float)) for size in (m, n, k, batch)))
    # Many layouts have the same products.
    first, sort = distinct_rows(sizes, sizes[0].size)
    m, n, k, batch = (size[first] for size in sizes)
    seconds = np.atleast_1d(matmul_seconds(m, n, k, batch, precision, hardware=hardware, sustained=True))
    newer = NEWER_LIBRARY.get(hardware.efficiency.generation)
    if newer is not None:
        rate = hardware.peak(precision) * hardware.efficiency.matmul_for(precision).attainable_fraction
        seconds = np.maximum(newer * seconds, 2.0 * batch * m * n * k / rate)
    return np.asarray(seconds[sort])


def kernel_slowdown(engine: TrainingEngine, hardware: Hardware) -> float:
    """Returns the time of an engine's fused attention over that of the kernel measured on this generation."""
    return FLASH2_SLOWDOWN.get(hardware.efficiency.generation, 1.0) if engine.attention_kernel == "flash2" else 1.0


def _attention(
    op: Operation, window: int | None, candidates: Candidates, shape: Shape, system: ClusterSystem
) -> tuple[Array, Array]:
    """Returns the seconds of one layer's attention in one direction, and of the traffic of materialised scores."""
    assert op.attention is not None
    hardware, precision, engine = system.hardware, system.wide_precision, system.engine
    sequences, sequence, heads, kv_heads, head_size = op.attention
    backward = op.phase is Phase.BACKWARD
    if shape.materialised:  # every (query, key) pair is computed, masked or not
        batch, rows = sequences * heads, sequence / shape.cp
        scores = product_seconds(rows, sequence, head_size, batch, hardware, precision)
        seconds = scores + product_seconds(rows, shape.model.size_of_value, sequence, batch, hardware, precision)
        # scale + mask + softmax read and write 16-bit scores; dropout reads and writes them and keeps a one-byte mask
        moved = batch * rows * sequence * (4 * engine.element_bytes + 1)
        traffic = np.asarray(streaming_seconds(moved, hardware))
        return (2 * seconds, 2 * traffic) if backward else (seconds, traffic)

    # All-to-all leaves fewer heads and the whole sequence. The calls of a ring alternate between two streams, and one
    # fills the other's idle units (`cp_stream` of Transformer Engine), so their smaller size loses nothing.
    swapped = (candidates.cp > 1) & (context_kinds(candidates, engine) == code("cp_kind", "all_to_all"))
    fewer, calls = np.where(swapped, candidates.cp, 1.0), np.where(swapped, 1.0, 1 / candidates.cp)
    # FlashAttention-2 needs values as wide as keys: trainers pad them with zeros.
    value = head_size if engine.attention_kernel == "flash2" else shape.model.size_of_value
    found = attention_seconds(
        sequences, sequence, heads / fewer, larger(kv_heads / fewer, 1.0), head_size, True, precision,
        hardware=hardware, direction="backward" if backward else "forward",
        window=sequence if window is None else smaller(window, sequence), sustained=True, value_size=value,
    )  # fmt: skip
    return np.asarray(found) * calls * kernel_slowdown(engine, hardware), np.zeros(len(candidates))


def end_costs(candidates: Candidates, system: ClusterSystem) -> Iterator[OperationCost]:
    """Yields every operation of the embedding (part "stream") and of output layer and loss ("matmul", "loss")."""
    shape = candidates.shape(system.engine)
    (looked_up, added), (predicted, learned) = (both_passes(shape, end) for end in ("embedding", "head"))
    for op in [*looked_up, *predicted, *learned, *added]:
        if op.matmul is not None:
            seconds = product_seconds(*op.matmul, 1.0, system.hardware, system.wide_precision)
            yield OperationCost(op, "matmul", 1.0, seconds)
        else:
            yield OperationCost(op, "stream" if op.group == "embedding" else "loss", 1.0, None)


@dataclass(frozen=True)
class StepCosts:
    """Seconds per candidate. `block`: of one block and micro-batch by (part, phase), as the mean over all blocks."""

    block: dict[tuple[str, Phase], Array]
    again: dict[tuple[str, int], Array]  # repeated by full (0) and by selective (1) recomputation, by part
    accumulate: Array  # adding a weight gradient of one block into the fp32 buffer
    tp_collective: Array  # one all-reduce, or one all-gather and one reduce-scatter
    tp_collectives: Array  # their number in a layer's forward pass: two, less where experts exchange rows instead
    cp_layer: Array  # one exchange of one layer between context parallel ranks, forward
    head_matmul: Array  # output layer, forward and backward
    head_streaming: Array  # loss
    embedding: Array
    pp_message: Array
    small_collectives: dict[str, Array]  # per step by name, where no engine constant covers them
    dp_reduce: Array
    dp_across: Array  # the part of dp_reduce over copies of the sharded state
    dp_gather: Array
    ep_layer: Array  # one exchange of rows between expert parallel ranks, there or back; mean over all layers
    fsdp_gather_layer: Array
    fsdp_scatter_layer: Array
    optimizer: Array
    host_update: Array  # of an offloaded optimizer: the longer of the processor's update and the weights' transfer back
    host_gradients: Array  # of an offloaded optimizer: their transfer to the host
    host_layer: Array  # one block's kept activations of one micro-batch, to the host or back
    crosses: dict[str, npt.NDArray[np.bool_]]  # whether traffic of a kind leaves the island; pp: of some pair of stages


def _update(candidates: Candidates, system: ClusterSystem) -> Array:
    """Returns the seconds of the optimizer on the stage with most parameters.

    Whole-matrix work (Muon's iterations, GaLore's projections) is distributed matrix by matrix over the ranks that
    shard the state, and divided by tp.
    """
    cost, hardware, layers = system.update, system.hardware, stage_layers(candidates, system.engine.partition)
    blocks = layers.fullest * candidates.local_block_parameters
    inside = np.minimum(1.0, blocks / np.maximum(layers.largest_parameters, 1.0))
    per_parameter = inside * cost.block_bytes + (1 - inside) * cost.end_bytes
    seconds = np.asarray(streaming_seconds(layers.owned_parameters * per_parameter, hardware))
    if not cost.matrices:
        return seconds
    products = sum(
        times * float(np.asarray(matmul_seconds(m, n, k, 1.0, "bf16", hardware=hardware, sustained=True)))
        for m, n, k, times in cost.matrices
    )
    dealt = layers.fullest * cost.owners
    ranks = np.where(candidates.zero > 0, candidates.shard_ranks, 1.0)
    return seconds + products / cost.owners * np.ceil(dealt / ranks) / candidates.tp


def _offloaded(candidates: Candidates, system: ClusterSystem) -> dict[str, Array]:
    """Returns the seconds of transfers to and from the host and of its update; zero where nothing is offloaded."""
    none = np.zeros(len(candidates))
    host, engine = system.host, system.engine
    if host is None or not (candidates.offload > 0).any():
        return {"host_update": none, "host_gradients": none, "host_layer": none}
    rate = min(host.link_bytes_per_second, host.memory_bytes_per_second)
    owned = stage_layers(candidates, engine.partition).owned_parameters
    update = owned * system.update.block_bytes / host.memory_bytes_per_second
    back = owned * engine.element_bytes / rate
    kept, *_ = kept_activation_bytes(candidates, engine)
    return {
        "host_update": np.where(candidates.offloads_optimizer, np.maximum(update, back), 0.0),
        "host_gradients": np.where(
            candidates.offloads_optimizer, owned * engine.gradient_communication_bytes / rate, 0.0
        ),
        "host_layer": np.where(candidates.offloads_activations, kept / rate, 0.0),
    }


def step_costs(candidates: Candidates, system: ClusterSystem) -> StepCosts:
    """Returns every ingredient of the step time."""
    island = float(system.fabric.island_ranks)
    found = candidates.of_blocks(
        system.engine,
        "seconds",
        lambda part: _block(part, system) | _ends(part, system) | layer_collectives(part, system),
    )
    blocks: dict[str, Any] = {name: column for name, column in found.items() if isinstance(name, str)}
    near, far = blocks.pop("message_inside"), blocks.pop("message_across")
    of_parts = {key: column for key, column in found.items() if not isinstance(key, str)}
    blocks["block"] = {key: column for key, column in of_parts.items() if isinstance(key[1], Phase)}
    blocks["again"] = {key: column for key, column in of_parts.items() if not isinstance(key[1], Phase)}
    blocks |= _state(candidates, system) | _offloaded(candidates, system)
    stage_fills_island = candidates.tp * candidates.cp * candidates.dp >= island
    return StepCosts(
        small_collectives=small_collectives(candidates, system),
        pp_message=np.where(candidates.pp > 1, np.where(stage_fills_island, far, near), 0.0),
        crosses={
            "tp": candidates.tp > island, "cp": candidates.tp * candidates.cp > island,
            "dp": candidates.tp * candidates.cp * candidates.dp > island, "pp": candidates.accelerators > island,
            "ep": candidates.expert_tp * candidates.ep > island,
        },
        **blocks,
    )  # fmt: skip


def _block(candidates: Candidates, system: ClusterSystem) -> dict[Any, Array]:
    """Returns the seconds of one block by part and phase, and those repeated by part and mode of recomputation."""
    none, hardware = np.zeros(len(candidates)), system.hardware
    seconds = {(part, phase): none for part in PARTS for phase in (Phase.FORWARD, Phase.BACKWARD)}
    again = {(part, mode): none for part in PARTS for mode in (0, 1)}
    moved: dict[tuple[str, Phase], Size] = {}
    for cost in operation_costs(candidates, system):
        key = cost.part, cost.operation.phase
        if cost.seconds is None:
            size = cost.share * cost.operation.bytes_moved
            moved[key] = moved.get(key, 0.0) + size
        else:
            size = cost.share * cost.seconds
            seconds[key] = seconds[key] + size
        for mode, times in enumerate(cost.again):
            again[cost.part, mode] = again[cost.part, mode] + times * size
    for key, size in moved.items():
        seconds[key] = np.asarray(streaming_seconds(size, hardware))
    for part in {part for part, _ in moved}:  # turn repeated bytes into their share of the time
        for mode in (0, 1):
            again[part, mode] = seconds[part, Phase.FORWARD] * again[part, mode] / moved[part, Phase.FORWARD]
    return {**seconds, **again}


def _ends(candidates: Candidates, system: ClusterSystem) -> dict[str, Array]:
    """Returns the seconds of the output layer, the loss and the embedding for one micro-batch."""
    sums: dict[str, Any] = dict.fromkeys(("matmul", "loss", "stream"), 0.0)
    for cost in end_costs(candidates, system):
        sums[cost.part] = sums[cost.part] + (cost.operation.bytes_moved if cost.seconds is None else cost.seconds)
    return {
        "head_matmul": np.asarray(sums["matmul"]),
        "head_streaming": np.asarray(streaming_seconds(sums["loss"], system.hardware)),
        "embedding": np.asarray(streaming_seconds(sums["stream"], system.hardware)),
    }


def _state(candidates: Candidates, system: ClusterSystem) -> dict[str, Array]:
    """Returns the seconds of reducing gradients, gathering weights and updating them."""
    engine, states = system.engine, shared_states(candidates, system)
    gradient, wide = engine.gradient_communication_bytes, 4.0 if engine.autocast else engine.storage.gather_bytes

    def sent(kind: str, size: float, *, layer: bool = False, by_all: bool = False) -> Array:
        parts = ((s.layer if layer else s.held, s.replicas if by_all else s.sharing, s.inside) for s in states)
        return np.asarray(sum(collective(kind, held * size, ranks, near, system) for held, ranks, near in parts))

    # Hybrid sharding: the gradients that a rank owns are averaged over the copies, once per step.
    copies_inside = np.maximum(1.0, float(system.fabric.island_ranks) // (candidates.tp * candidates.shard_ranks))
    shard = np.asarray(sum(s.held / s.sharing for s in states))
    across = collective("all_reduce", shard * gradient, candidates.copies, copies_inside, system)
    sharded, fsdp = candidates.zero > 0, candidates.zero >= 3
    in_pieces = engine.reduces_in_pieces(candidates.zero, candidates.pp)
    once = np.where(sharded, sent("reduce_scatter", gradient) + across, sent("all_reduce", gradient, by_all=True))
    return {
        "dp_reduce": np.where(in_pieces, across, once),
        "dp_across": np.where(sharded, across, 0.0),
        "dp_gather": np.where(sharded & ~fsdp, sent("all_gather", wide), 0.0),
        "fsdp_gather_layer": np.where(fsdp, sent("all_gather", wide, layer=True), 0.0),
        "fsdp_scatter_layer": np.where(in_pieces, sent("reduce_scatter", gradient, layer=True), 0.0),
        "optimizer": np.where(candidates.offloads_optimizer, 0.0, _update(candidates, system)),
    }
