"""Offloading from one device to its host's memory: bytes transferred, exposed transfer time, and bytes held on each.

Activations: those of every block but the last are sent during the forward pass of the next block and return during the
backward pass of the block after it; two blocks' are on the device at a time (`train/offload.py` bounds it by bytes).
Optimizer state: gradients go to the host, the CPU updates, and weights come back, bucket by bucket, so that the
slowest of the three sets the time (`train/host_optimizer.py`). Options and rates are those of the cluster planner.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from ironlaw.catalog.accelerators import catalogued
from ironlaw.errors import UserError
from ironlaw.ledger import Kind, Line, Phase
from ironlaw.machine.profile import Profile
from ironlaw.workload.blocks import FP32
from ironlaw.workload.kinds import is_block
from ironlaw.workload.operations import Operation
from ironlaw.workload.optimizers import state_bytes, update_operations
from ironlaw.workload.program import Layer, Program, runs_on_device

if TYPE_CHECKING:
    from ironlaw.plan.cluster.system import Host

SMALLEST_BYTES = 2**20  # smallest tensor that is worth a copy


@dataclass(frozen=True)
class Offload:
    """Transfers of one optimizer step; bytes are those of one direction."""

    block_bytes: int  # largest of the blocks' saved bytes, in tensors worth a copy
    activation_bytes: int  # each way over the link, over all micro-batches
    optimizer_bytes: int  # gradients to the host; the same number of bytes of weights comes back
    host_bytes: int  # held in the host's memory
    exposed: dict[Phase, float]  # seconds that the transfers add to the step


def host_of_machine(profile: Profile) -> Host:
    """Returns the host's link and memory from the catalogue. Raises UserError if the catalogue lacks them."""
    from ironlaw.catalog.nodes import parse_cluster
    from ironlaw.plan.cluster.system import host_of  # imported late: only offloading needs the cluster planner

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


def plan_offload(program: Program, host: Host, seconds: dict[Phase, float]) -> Offload:
    """`seconds`: time of all blocks of one micro-batch in each pass; backward includes recomputation."""
    recipe, model = program.recipe, program.model
    assert model is not None
    blocks = blocks_of(program.stages[0].layers)
    saved = [saved_by(layer, stream_bytes(program)) for layer in blocks]
    leaving = [big for big, _ in saved[:-1]]
    rate = min(host.link_bytes_per_second, host.memory_bytes_per_second)
    exposed: dict[Phase, float] = {}
    moved = held = leaves = 0
    if recipe.offloads_activations:
        for phase in (Phase.FORWARD, Phase.BACKWARD):
            waits = sum(max(0.0, big / rate - seconds[phase] / len(blocks)) for big in leaving)
            exposed[phase] = program.micro_batches * waits
        held = sum(leaving)
        moved = program.micro_batches * held
    if recipe.offloads_optimizer:
        parameters = program.stages[0].shards
        leaves = sum(p.elements for p in parameters) * FP32
        updates = [op for op in update_operations(parameters, recipe.optimizer) if not runs_on_device(op)]
        update = sum(op.bytes_moved * op.repeat for op in updates) / host.memory_bytes_per_second
        exposed[Phase.OPTIMIZER] = max(leaves / rate, update)
        held += 2 * leaves + state_bytes(parameters, recipe.optimizer)  # weights, gradients and the state
    return Offload(max(big for big, _ in saved), moved, leaves, held, exposed)


def blocks_of(layers: Sequence[Layer]) -> list[Layer]:
    return [layer for layer in layers if is_block(layer.kind)]


def stream_bytes(program: Program) -> int:
    """Returns the bytes of a block's input, which is what a recomputed block keeps."""
    assert program.shape is not None
    return program.shape.tokens * program.shape.model.hidden * FP32


def saved_by(layer: Layer, stream: int) -> tuple[int, int]:
    """Returns the bytes that a block keeps for its backward pass: in tensors worth a copy, and in smaller ones."""
    whole = sum(op.saved_bytes - op.frees_saved_bytes for op in layer.forward)
    if layer.recomputed:
        # Results kept by a policy are held by the checkpoint itself and cannot be offloaded: only the input can.
        return (stream, whole - stream) if stream >= SMALLEST_BYTES else (0, whole)
    big = sum(op.saved_bytes for op in layer.forward if op.saved_bytes >= SMALLEST_BYTES)
    return big, whole - big


def on_device(layers: Sequence[Layer], stream: int) -> list[Layer]:
    """Returns layers that hold what stays in device memory under activation offloading: two blocks, and the small
    tensors and the gradients of the other blocks."""
    blocks = blocks_of(layers)
    if len(blocks) <= 2:
        return list(layers)
    others, last = blocks[:-2], blocks[-1]
    small = sum(saved_by(layer, stream)[1] for layer in others)
    gradients = sum(op.gradient_bytes for layer in others for op in layer.backward)
    before = Operation("other blocks", Kind.OTHER, Phase.FORWARD, "block", "", repeat=0, saved_bytes=small)
    after = replace(
        before, phase=Phase.BACKWARD, saved_bytes=0, gradient_bytes=gradients, frees_saved_bytes=small
    )  # fmt: skip
    ends = [layer for layer in layers if not is_block(layer.kind)]
    first = replace(ends[0], forward=(before, *ends[0].forward))
    return [first, blocks[-2], replace(last, recomputed=(after, *last.recomputed)), *ends[1:]]


def lines_of(offload: Offload) -> list[Line]:
    """Returns ledger lines of the exposed transfer time, one per phase that waits."""
    each = {Phase.OPTIMIZER: offload.optimizer_bytes}
    return [
        Line(
            phase, Kind.OPTIMIZER if phase is Phase.OPTIMIZER else Kind.OTHER, "host_offload", seconds=seconds,
            bytes_moved=float(each.get(phase, offload.activation_bytes)), bound="memory",
        )
        for phase, seconds in offload.exposed.items()
    ]  # fmt: skip
