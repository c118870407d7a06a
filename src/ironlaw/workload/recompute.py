"""Recomputation: a block saves less for its backward pass and runs parts of its forward pass again. No torch.

A *policy* is the set of expensive results that a block keeps; `None` keeps everything (nothing is recomputed). Cheap
operations (norms, activations, rotations, casts) are always recomputed. PyTorch stops a recomputation as soon as it has
every tensor that the backward pass needs, so that the last product of a block never runs twice.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from ironlaw.ledger import Kind, Phase
from ironlaw.model.config import ModelConfig
from ironlaw.workload.blocks import FP32, Policy, Shape, attention_saved_bytes
from ironlaw.workload.kinds import forward_of, has_experts, layer_groups
from ironlaw.workload.latent import WIDE
from ironlaw.workload.operations import Operation, with_memory, without_work
from ironlaw.workload.sections import KEEPABLE, Recompute
from ironlaw.workload.sizes import is_nonzero

RECOMPUTED_SUFFIX = " again"  # suffix of the names of recomputed operations
GENERATOR_BYTES = 5056  # state of PyTorch's CPU generator, kept per block so that dropout draws the same noise twice


def policies(config: Recompute, model: ModelConfig) -> tuple[Policy, ...]:
    """Return one policy per layer; none for mode "budget", whose policies are solved for in `plan/recipe.py`."""
    match config.mode:
        case "full":
            return (frozenset(),) * model.layers
        case "every":
            return tuple(frozenset() if layer % config.every == 0 else None for layer in range(model.layers))
        case "selective":
            return tuple(frozenset(config.keep) & keepable(model, kind) for kind in layer_groups(model))
        case _:
            return ()


def keepable(model: ModelConfig, kind: str = "block") -> frozenset[str]:
    """Return the results that a block of this kind can keep: not those of experts, whose rows are sorted by expert."""
    if has_experts(kind):
        return frozenset(KEEPABLE) - {"ffn_gate", "ffn_up"}
    return frozenset(KEEPABLE) if model.gated_ffn else frozenset(KEEPABLE) - {"ffn_gate"}


def kept_results(shape: Shape, policy: frozenset[str]) -> frozenset[str]:
    """Return the results that are actually kept: composed attention has no single result."""
    return policy - {"attention"} if shape.composes_attention else policy


def _result(op: Operation) -> str:
    """Return the name in `recompute.keep` of an operation's result."""
    return "qkv" if op.name in WIDE else op.name


def kept_bytes(shape: Shape, policy: frozenset[str], kind: str = "block") -> int:
    """Return the bytes of the kept results of one block, without its input."""
    kept = kept_results(shape, policy)
    products = [op.matmul for op in forward_of(shape, kind) if op.matmul is not None and _result(op) in kept]
    total = sum(rows * width * shape.matmul_bytes for rows, width, _ in products)
    return total + (attention_saved_bytes(shape) if "attention" in kept else 0)


def recomputed_operations(shape: Shape, policy: frozenset[str], kind: str = "block") -> list[Operation]:
    """Return the forward operations of one block that run a second time, in the backward phase.

    Operations whose result was kept do not run: they have `repeat` 0, and take memory but no time.
    """
    kept = kept_results(shape, policy)
    result = []
    for op in _operations_to_recompute(shape, kind):
        exists = op.kind in (Kind.MATMUL, Kind.ATTENTION) and _result(op) in kept
        op = replace(op, name=f"{op.name}{RECOMPUTED_SUFFIX}", phase=Phase.BACKWARD)
        if exists:
            # The result exists: it stays saved if the backward pass needs it, and becomes temporary otherwise.
            freed = 0 if is_nonzero(op.saved_bytes) else op.temporary_bytes
            op = without_work(op, saved_bytes=0, frees_saved_bytes=freed)
        result.append(op)
    remaining = sum(op.temporary_bytes - op.frees_temporary_bytes for op in result)  # freed when the recomputation ends
    result[-1] = with_memory(result[-1], frees_temporary=remaining)
    return result


def _operations_to_recompute(shape: Shape, kind: str) -> list[Operation]:
    """Return a block's forward operations up to the last one that saves a tensor for the backward pass."""
    *operations, _ = forward_of(shape, kind)  # the last one is the sum that the next block saves
    moe = shape.model.moe if has_experts(kind) else None
    # These save the last product's result only when they are done: oneDNN's layer, and the sum over experts.
    if (shape.onednn and not shape.casts) or (moe is not None and not moe.shared_experts):
        return operations
    return operations[: 1 + max(i for i, op in enumerate(operations) if is_nonzero(op.saved_bytes))]


def weight_copies(shape: Shape, kind: str = "block") -> int:
    """Return the bytes of one block's weights cast by autocast, which caches them until the end of the forward pass.

    The weights of routed experts are cast by the experts themselves, and freed with the block.
    """
    if not shape.casts or shape.adapters:  # autocast does not cache frozen weights
        return 0
    products = [op for op in forward_of(shape, kind) if op.matmul and not op.name.startswith(("router", "expert_"))]
    return sum(op.matmul[1] * op.matmul[2] * shape.matmul_bytes for op in products if op.matmul)


def freed_after_forward(shape: Shape, policy: frozenset[str], kind: str = "block") -> Operation:
    """The end of a block's forward pass: frees everything but the result, the results kept and the cast weights."""
    saved = sum(op.saved_bytes for op in forward_of(shape, kind))
    result = shape.elements * FP32 // shape.stream_parts
    kept = result + kept_bytes(shape, policy, kind) + weight_copies(shape, kind)
    kept += GENERATOR_BYTES if shape.model.dropout else 0
    return _memory("drop", Phase.FORWARD, saved - kept)


def freed_after_backward(dropped: Operation, recomputed: Sequence[Operation], weight_copies: int) -> Operation:
    """The end of a recomputed block's backward pass: frees the tensors kept for recomputation, so that no more is left
    than without recomputation."""
    remaining = sum(op.saved_bytes - op.frees_saved_bytes for op in (dropped, *recomputed))
    return _memory("kept results", Phase.BACKWARD, remaining - weight_copies)


def _memory(name: str, phase: Phase, frees_saved: int) -> Operation:
    """Return an operation that frees saved bytes and takes no time."""
    return Operation(name, Kind.OTHER, phase, "block", "", repeat=0, frees_saved_bytes=frees_saved)
