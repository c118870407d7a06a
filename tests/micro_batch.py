"""One micro-batch by itself, call by call: what autograd and the profiler are compared with."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from ironlaw.ledger import Kind, Phase
from ironlaw.plan.memory_walk import Peak, Walk
from ironlaw.workload.blocks import Shape
from ironlaw.workload.operations import Operation
from ironlaw.workload.program import Layer, layers_of_shape


def in_order(layers: Sequence[Layer]) -> Iterator[Operation]:
    """Every call of a micro-batch in the order of execution, layer by layer."""
    for layer in layers:
        yield from layer.forward
    if remembered := sum(layer.cast_weight_bytes for layer in layers):
        yield Operation("autocast", Kind.OTHER, Phase.FORWARD, "block", "", repeat=0, frees_saved_bytes=remembered)
    for layer in reversed(layers):
        yield from layer.recomputed
        yield from layer.backward


def unfolded(shape: Shape) -> Iterator[Operation]:
    """The same of the whole model."""
    return in_order(layers_of_shape(shape))


def highest(operations: Sequence[Operation], gradients_held: int = 0) -> Peak:
    """The peak. `gradients_held`: bytes that earlier micro-batches left."""
    walk = Walk(dict.fromkeys(("activations", "temporaries", "gradients"), 0.0))
    walk.now["gradients"] = gradients_held
    walk.look("start")
    walk.run(operations, keeps_gradients=not gradients_held)
    return walk.peak
