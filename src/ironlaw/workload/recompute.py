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
from ironlaw.workload.operations import Operation, with_memory
from ironlaw.workload.sections import KEEPABLE, Recompute
from ironlaw.workload.sizes import any_of

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


def kept_bytes(shape: Shape, policy: frozenset[str]) -> int:
    """Return the bytes of the kept results of one block, without its input."""
    model, w = shape.model, shape.matmul_bytes
    widths = {
        "qkv": model.query_size + 2 * model.key_value_size,
        "attention_out": model.hidden,
        "ffn_gate": model.ffn_size,
        "ffn_up": model.ffn_size,
    }
    if model.latent is not None:
        widths["qkv"] = model.query_size + model.latent.up_size(model.heads)
    kept = kept_results(shape, policy)
    total = sum(shape.tokens * widths[name] * w for name in kept if name != "attention")
    return total + (attention_saved_bytes(shape) if "attention" in kept else 0)


def recomputed_operations(shape: Shape, policy: frozenset[str], kind: str = "block") -> list[Operation]:
    """Return the forward operations of one block that run a second time, in the backward phase.

    Operations whose result was kept do not run: they have `repeat` 0, and take memory but no time.
    """
    kept = kept_results(shape, policy)
    result = []
    for op in _operations_to_recompute(shape, kind):
        name, big = f"{op.name}{RECOMPUTED_SUFFIX}", op.kind in (Kind.MATMUL, Kind.ATTENTION)
        op = replace(op, name=name, phase=Phase.BACKWARD)
        result_of = op.name.removesuffix(RECOMPUTED_SUFFIX)
        if big and ("qkv" if result_of in WIDE else result_of) in kept:
            # The result exists: it stays saved if the backward pass needs it, and becomes temporary otherwise.
            op = replace(
                op, repeat=0, flops=None, matmul=None, attention=None, saved_bytes=0,
                frees_saved_bytes=0 if any_of(op.saved_bytes) else op.temporary_bytes,
            )  # fmt: skip
        result.append(op)
    left = sum(op.temporary_bytes - op.frees_temporary_bytes for op in result)  # freed when the recomputation ends
    result[-1] = with_memory(result[-1], frees_temporary=left)
    return result


def _operations_to_recompute(shape: Shape, kind: str) -> list[Operation]:
    """Return a block's forward operations up to the last one that creates or saves a tensor for the backward pass."""
    operations = forward_of(shape, kind)
    # These save tensors only after the last product has run again: a norm after it (its input), dropout (its noise),
    # and oneDNN's layer (its input, when done).
    to_the_end = bool(shape.model.dropout) or (shape.onednn and not shape.casts) or shape.model.norm_place != "pre"
    last = "ffn_down"
    if has_experts(kind):
        assert shape.model.moe is not None
        # Combining, and the gate of the shared experts, save the last product's result.
        last = "shared_ffn_down" if shape.model.moe.shared_experts else "combine"
        if shape.model.moe.shared_gate:
            last = "shared_sum"
    kept = [i for i, op in enumerate(operations) if op.name == f"{last}_adapter" and op.saved_bytes]
    if kept and not to_the_end:  # an adapter saves its input and its first matrix's output
        return operations[: kept[-1] + 1]
    if to_the_end or last == "combine":
        return operations[:-1]
    if last == "shared_sum":
        return operations[: max(i for i, op in enumerate(operations) if op.kernel == "multiply" and op.name == last)]
    return operations[: max(i for i, op in enumerate(operations) if op.name == last and op.kind is Kind.MATMUL)]


def weight_copies(shape: Shape, kind: str = "block") -> int:
    """Return the bytes of one block's weights cast by autocast, which caches them until the end of the forward pass.

    The weights of routed experts are cast by the experts themselves, and freed with the block.
    """
    if not shape.casts or shape.adapters:  # autocast does not cache frozen weights
        return 0
    names = {"qkv", "query_down", "query_up", "latent_down", "latent_up"}
    names |= {"attention_out", "ffn_gate", "ffn_up", "ffn_down"}
    names |= {"shared_ffn_gate", "shared_ffn_up", "shared_ffn_down", "shared_gate"}
    products = [op.matmul for op in forward_of(shape, kind) if op.name in names and op.matmul is not None]
    return sum(n * k * shape.matmul_bytes for _, n, k in products)


def freed_after_forward(shape: Shape, policy: frozenset[str], kind: str = "block") -> Operation:
    """The end of a block's forward pass: frees everything but the result, the results kept and the cast weights."""
    saved = sum(op.saved_bytes for op in forward_of(shape, kind))
    result = shape.tokens * shape.model.hidden * FP32 // shape.stream_parts
    held = result + kept_bytes(shape, policy) + weight_copies(shape, kind)
    held += GENERATOR_BYTES if shape.model.dropout else 0
    return _memory("drop", Phase.FORWARD, saved - held)


def freed_after_backward(dropped: Operation, recomputed: Sequence[Operation], weight_copies: int) -> Operation:
    """The end of a recomputed block's backward pass: frees the tensors kept for recomputation, so that no more is left
    than without recomputation."""
    left = sum(op.saved_bytes - op.frees_saved_bytes for op in (dropped, *recomputed))
    return _memory("kept results", Phase.BACKWARD, left - weight_copies)


def _memory(name: str, phase: Phase, frees_saved: int) -> Operation:
    """Return an operation that frees saved bytes and takes no time."""
    return Operation(name, Kind.OTHER, phase, "block", "", repeat=0, frees_saved_bytes=frees_saved)
