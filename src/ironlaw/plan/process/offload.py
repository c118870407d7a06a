"""What a run on one device leaves to its host's memory: bytes that move, what of their time shows, what is held where.

Activations: every block's but the last one's leave behind the forward pass of the next block and come back behind the
backward pass of the one after; two blocks' are on the device at a time (`train/offload.py` bounds it by bytes).
Optimizer state: gradients go to the host, the processor updates, weights come back, bucket by bucket, so that the
slowest of the three sets the time (`train/host_optimizer.py`). The same words and rates as the planner of clusters has.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from ironlaw.catalog import parse_cluster
from ironlaw.catalog.accelerators import catalogued
from ironlaw.config import RunConfig
from ironlaw.errors import UserError
from ironlaw.ledger import Kind, Line, Phase
from ironlaw.machine.profile import Profile
from ironlaw.workload.blocks import FP32, Policy, Shape
from ironlaw.workload.kinds import forward_of, has_experts, is_block, layer_groups
from ironlaw.workload.operations import Operation
from ironlaw.workload.optimizers import state_bytes, update_operations
from ironlaw.workload.parameters import model_parameters
from ironlaw.workload.program import unfolded
from ironlaw.workload.recompute import dropped

if TYPE_CHECKING:
    from ironlaw.plan.cluster.setting import Host

SMALLEST_BYTES = 2**20  # of a tensor that is worth a copy: as in train/offload.py


@dataclass(frozen=True)
class Offload:
    """Per optimizer step; bytes are those of one direction."""

    block_bytes: int  # saved by the block that saves most, in tensors worth a copy
    activation_bytes: int  # each way over the link, over all micro-batches
    optimizer_bytes: int  # gradients to the host; as many of weights come back
    host_bytes: int  # held in the host's memory
    exposed: dict[Phase, float]  # seconds that the step is longer for it


def host_of_machine(profile: Profile) -> Host:
    """The link and the memory of the host, by the catalogue. UserError where it does not know them."""
    from ironlaw.plan.cluster.setting import host_of  # the cluster planner: a plan without offloading has no need of it

    try:
        found = host_of(parse_cluster(f"1x{catalogued(profile.name)}"))
    except UserError:
        found = None
    if found is None:
        raise UserError(
            f"train.offload on {profile.name}: the catalogue lacks the host's memory, its rate or the link to it: use "
            'train.offload = "none"'
        )
    return found


def plan_offload(config: RunConfig, shape: Shape, host: Host, seconds: dict[Phase, float]) -> Offload:
    """`seconds`: of all blocks of one micro-batch, forward and backward, recomputation included."""
    train, layers = config.train, shape.model.layers
    saved = saved_by_layer(shape)
    leaving = [big for big, _ in saved[:-1]]
    rate = min(host.link_bytes_per_second, host.memory_bytes_per_second)
    exposed: dict[Phase, float] = {}
    moved = held = leaves = 0
    if train.offloads_activations:
        for phase in (Phase.FORWARD, Phase.BACKWARD):
            waits = sum(max(0.0, big / rate - seconds[phase] / layers) for big in leaving)
            exposed[phase] = config.accumulation * waits
        held = sum(leaving)
        moved = config.accumulation * held
    if train.offloads_optimizer:
        parameters = model_parameters(shape.model)
        leaves = shape.model.parameters * FP32
        updates = [op for op in update_operations(parameters, config.optimizer) if not _on_the_device(op)]
        update = sum(op.bytes_moved * op.repeat for op in updates) / host.memory_bytes_per_second
        exposed[Phase.OPTIMIZER] = max(leaves / rate, update)
        held += 2 * leaves + state_bytes(parameters, config.optimizer)  # weights, gradients and the state
    return Offload(max(big for big, _ in saved), moved, leaves, held, exposed)


def _on_the_device(op: Operation) -> bool:
    return op.name.startswith("clip")


def saved_by_layer(shape: Shape) -> list[tuple[int, int]]:
    """Bytes that each block keeps for its backward pass: in tensors worth a copy, and in others."""
    kinds = layer_groups(shape.model)
    chosen: Sequence[Policy] = shape.recompute or (None,) * len(kinds)
    layers = list(zip(kinds, chosen, strict=True))
    found = {layer: _saved(shape, *layer) for layer in set(layers)}
    return [found[layer] for layer in layers]


def _saved(shape: Shape, kind: str, policy: Policy) -> tuple[int, int]:
    operations = forward_of(shape, kind)
    if policy is not None:
        # What a policy keeps is held by the recomputation itself, out of reach: only the block's input leaves.
        whole = sum(op.saved_bytes for op in operations) - dropped(shape, policy, kind).frees_saved_bytes
        stream = shape.tokens * shape.model.hidden * FP32
        return (stream, whole - stream) if stream >= SMALLEST_BYTES else (0, whole)
    big = sum(op.saved_bytes for op in operations if op.saved_bytes >= SMALLEST_BYTES)
    return big, sum(op.saved_bytes for op in operations) - big


def held_operations(shape: Shape) -> Iterator[Operation]:
    """One micro-batch as the device's memory sees it: two blocks, the small tensors and the gradients of the others."""
    layers = shape.model.layers
    if layers <= 2:
        yield from unfolded(shape)
        return
    model = shape.model
    small = sum(small for _, small in saved_by_layer(shape)[:-2])
    sizes = (model.block_parameters, model.moe_block_parameters)
    gradients = sum(sizes[has_experts(kind)] for kind in layer_groups(model)[:-2]) * FP32
    before = [_memory("other blocks", Phase.FORWARD, saved=small)]
    after = [_memory("other blocks", Phase.BACKWARD, gradient=gradients, frees=small)]
    for op in unfolded(_last_two(shape)):
        yield from before
        before = []
        if op.phase is Phase.BACKWARD and is_block(op.group):
            yield from after
            after = []
        yield op


def _last_two(shape: Shape) -> Shape:
    """A model of the last two layers; one of each kind has the dense one first."""
    model, policies = shape.model, shape.recompute[-2:]
    kinds = layer_groups(model)[-2:]
    moe = model.moe
    if moe is not None:
        having = sum(map(has_experts, kinds))
        moe = moe.model_copy(update={"dense_layers": 0, "every": 3 - having}) if having else None
        policies = tuple(policies[i] for i in sorted(range(len(policies)), key=lambda i: kinds[i]))
    windowed, rotated = ([of(layer) for layer in (model.layers - 2, model.layers - 1)]
                         for of in (model.is_windowed, model.is_rotated))  # fmt: skip
    update = {
        "layers": 2, "moe": moe, "full_every": 2 if windowed == [True, False] else None,
        "full_offset": 0, "full_first": int(windowed == [False, True]),
        "unrotated_every": 2 if rotated == [True, False] else None,
        "sliding_window": model.sliding_window if any(windowed) else None,
    }  # fmt: skip
    return replace(shape, model=model.model_copy(update=update), recompute=policies)


def _memory(name: str, phase: Phase, saved: int = 0, gradient: int = 0, frees: int = 0) -> Operation:
    return Operation(
        name, Kind.OTHER, phase, "block", "", repeat=0, saved_bytes=saved, gradient_bytes=gradient,
        frees_saved_bytes=frees,
    )  # fmt: skip


def lines_of(offload: Offload) -> list[Line]:
    """What shows of the transfers, by the phase that waits."""
    each = {Phase.OPTIMIZER: offload.optimizer_bytes}
    return [
        Line(
            phase, Kind.OPTIMIZER if phase is Phase.OPTIMIZER else Kind.OTHER, "host_offload", seconds=seconds,
            bytes_moved=float(each.get(phase, offload.activation_bytes)), bound="memory",
        )
        for phase, seconds in offload.exposed.items()
    ]  # fmt: skip


def without_update(operations: Sequence[tuple[Operation, int]]) -> list[tuple[Operation, int]]:
    """The update is the processor's; clipping stays with the gradients."""
    return [(op, n) for op, n in operations if op.phase is not Phase.OPTIMIZER or _on_the_device(op)]
