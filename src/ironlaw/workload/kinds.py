"""Kinds of layers: the groups into which a decoder's blocks fold, and the operations of one block of each.

A group is named `block`, or `moe_block` where a layer has experts. Among layers with a sliding window, those that look
at all tokens add ` full` to that; among rotated ones, those without positions add ` unrotated`.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

from ironlaw.model.config import ModelConfig
from ironlaw.workload.arrangements import arranged, arranged_backward
from ironlaw.workload.backward import block_backward
from ironlaw.workload.blocks import Shape
from ironlaw.workload.division import on_rank
from ironlaw.workload.forward import block
from ironlaw.workload.moe import GROUP as MOE_GROUP
from ironlaw.workload.moe import moe_block, moe_block_backward
from ironlaw.workload.operations import Operation


def layer_groups(model: ModelConfig) -> list[str]:
    """Of each layer, the group of its operations."""
    groups = []
    for layer in range(model.layers):
        group = MOE_GROUP if model.moe and model.moe.in_layer(layer) else "block"
        if model.sliding_window is not None and not model.is_windowed(layer):
            group += FULL
        groups.append(group if model.is_rotated(layer) else group + UNROTATED)
    return groups


FULL, UNROTATED = " full", " unrotated"


def shape_of(shape: Shape, kind: str) -> Shape:
    """The shape of a model whose layers are all of that kind."""
    model = shape.model
    if not (model.full_every or model.full_first or model.unrotated_every):
        return shape
    return replace(shape, model=model.of_kind(FULL not in kind, UNROTATED not in kind))


def is_block(group: str) -> bool:
    return group.startswith(("block", MOE_GROUP))


def has_experts(kind: str) -> bool:
    return kind.startswith(MOE_GROUP)


def forward_of(shape: Shape, kind: str) -> list[Operation]:
    """The forward pass of one block of a kind."""
    shape = shape_of(shape, kind)
    if has_experts(kind):
        return _grouped(kind, moe_block(shape))
    return _grouped(kind, on_rank(shape, arranged(shape)) if _is_arranged(shape.model) else block(shape))


def backward_of(shape: Shape, kind: str) -> list[Operation]:
    """`forward_of` in reverse."""
    shape = shape_of(shape, kind)
    if has_experts(kind):
        return _grouped(kind, moe_block_backward(shape))
    arrangement = _is_arranged(shape.model)
    return _grouped(kind, on_rank(shape, arranged_backward(shape)) if arrangement else block_backward(shape))


def _is_arranged(model: ModelConfig) -> bool:
    return bool(model.parallel_norms) or model.norm_place != "pre"


def _grouped(kind: str, operations: Iterable[Operation]) -> list[Operation]:
    """Of one block: each call once."""
    return [replace(op, group=kind, repeat=1) for op in operations]
