"""The program of a step whose objective asks a second model: a teacher, or the reference of preferences.

A rewrite: before each micro-batch's own forward pass comes the second model's, of which nothing is kept but its logits;
they wait for the loss, which holds more of their size than cross-entropy does.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from ironlaw.ledger import Kind, Phase
from ironlaw.model.config import ModelConfig
from ironlaw.workload.blocks import FP32, Shape
from ironlaw.workload.objective import FROZEN, ObjectiveConfig
from ironlaw.workload.operations import Operation
from ironlaw.workload.program import HEAD, Layer, Program, Tensor, layers_of_shape


def with_second_model(program: Program, objective: ObjectiveConfig, second: ModelConfig, held: bool) -> Program:
    """Of one process. `held`: its weights are in memory beside the model's, in fp32."""
    assert program.shape is not None
    stage = program.stages[0]
    layers = _layers(program.shape, objective, second, stage.layers)
    remainder: tuple[Layer, ...] = ()
    if program.remainder:
        assert program.batch is not None
        rest = program.batch.sequences % program.layout.micro_batch
        remainder = _layers(replace(program.shape, micro_batch=rest), objective, second, program.remainder)
    tensors = program.tensors[0]
    if held:
        tensors = (*tensors, Tensor(FROZEN, second.parameters * FP32, "of the objective, in fp32"))
    return replace(
        program, stages=(replace(stage, layers=layers),), remainder=remainder, tensors=(tensors, *program.tensors[1:])
    )


def _layers(
    shape: Shape, objective: ObjectiveConfig, second: ModelConfig, layers: Sequence[Layer]
) -> tuple[Layer, ...]:
    here = replace(shape, model=second, recompute=(), loss_chunk=0, adapters=())
    forward = [
        replace(op, name=FROZEN, group="", saved_bytes=0, temporary_bytes=0, frees_saved_bytes=0,
                frees_temporary_bytes=0, gradient=())
        for layer in layers_of_shape(here) for op in layer.forward if op.kind is not Kind.LOSS
    ]  # fmt: skip
    logits = shape.tokens * second.vocab
    distils = objective.kind == "distillation"
    if distils:
        forward[-1] = replace(forward[-1], saved_bytes=logits * shape.matmul_bytes)
    *others, head = layers
    assert head.name == HEAD
    if distils:
        head = _distilling(head, logits, shape.matmul_bytes)
    return (Layer(FROZEN, FROZEN, tuple(forward)), *others, head)


def _distilling(head: Layer, logits: int, width: int) -> Layer:
    """In the loss both models' learned rows are copied to fp32 beside the logits, three log-softmaxes wait instead of
    one, and the divergence takes three more of their size."""
    size = logits * FP32

    def op(phase: Phase, **memory: Any) -> Operation:
        kernel = f"loss_{'forward' if phase is Phase.FORWARD else 'backward'}"
        return Operation(
            "distillation", Kind.LOSS, phase, "head", kernel, repeat=3, elements=logits, bytes_moved=2 * size,
            **memory,
        )  # fmt: skip

    rows = op(Phase.FORWARD, saved_bytes=2 * size, temporary_bytes=6 * size, frees_temporary_bytes=6 * size,
              frees_saved_bytes=logits * width)  # fmt: skip
    back = op(Phase.BACKWARD, temporary_bytes=size, frees_temporary_bytes=size, frees_saved_bytes=2 * size)
    return replace(head, forward=(*head.forward, rows), backward=(back, *head.backward))
