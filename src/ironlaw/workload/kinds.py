"""Kinds of layers: the groups into which a decoder's blocks fold, and the two passes of one layer of each.

A group is named `block`, or `moe_block` where a layer has experts. Among layers with a sliding window, those that look
at all tokens add ` full` to that; among rotated ones, those without positions add ` unrotated`.
"""

from __future__ import annotations

from dataclasses import replace

from ironlaw.model.config import ModelConfig
from ironlaw.workload.adapted import frozen
from ironlaw.workload.arrangements import norms_after, side_by_side
from ironlaw.workload.blocks import Shape
from ironlaw.workload.division import on_rank
from ironlaw.workload.forward import block, embedding, head
from ironlaw.workload.moe import GROUP as MOE_GROUP
from ironlaw.workload.moe import moe_block
from ironlaw.workload.operations import Operation, changed, differentiate


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
    if not is_block(kind) or not (model.full_every or model.full_first or model.unrotated_every):
        return shape
    return replace(shape, model=model.of_kind(FULL not in kind, UNROTATED not in kind))


def is_block(group: str) -> bool:
    return group.startswith(("block", MOE_GROUP))


def has_experts(kind: str) -> bool:
    return kind.startswith(MOE_GROUP)


def both_passes(shape: Shape, kind: str) -> tuple[list[Operation], list[Operation]]:
    """The forward and the backward pass of one layer: of a block of a kind, the "embedding" or the "head"."""
    alike = shape_of(shape, kind)
    whole = _listed(alike, kind)
    shape.forward[kind] = _on_rank(alike, kind, whole)
    return shape.forward[kind], _on_rank(alike, kind, differentiate(whole))


def forward_of(shape: Shape, kind: str) -> list[Operation]:
    """Each call once, in the order of execution."""
    if kind not in shape.forward:
        alike = shape_of(shape, kind)
        shape.forward[kind] = _on_rank(alike, kind, _listed(alike, kind))
    return shape.forward[kind]


def _on_rank(shape: Shape, kind: str, operations: list[Operation]) -> list[Operation]:
    return [changed(op, group=kind) for op in on_rank(shape, operations)]


def _listed(shape: Shape, kind: str) -> list[Operation]:
    whole = _whole(shape, kind)
    return list(frozen(shape, kind, whole)) if shape.adapters else whole


def _whole(shape: Shape, kind: str) -> list[Operation]:
    if kind == "embedding":
        return embedding(shape)
    if kind == "head":
        return head(shape)
    if has_experts(kind):
        return moe_block(shape)
    if shape.model.parallel_norms:
        return side_by_side(shape)
    return block(shape) if shape.model.norm_place == "pre" else norms_after(shape)
