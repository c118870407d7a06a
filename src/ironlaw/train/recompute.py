"""Recomputation applied to the blocks: `torch.utils.checkpoint`, selective where a policy keeps results."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from functools import cache, partial
from typing import Any

import torch
from torch import nn
from torch.autograd.profiler import record_function
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from ironlaw.model.latent import LatentAttention
from ironlaw.model.moe import MixtureOfExperts, expert_layers
from ironlaw.observe.profile import RECOMPUTE_SCOPE
from ironlaw.workload.blocks import Policy

_LINEAR = {"mm", "addmm", "_scaled_mm", "_int_mm", "_linear_pointwise"}  # the last is oneDNN's


def _name(operation: Any) -> str:
    return operation.__name__.split(".")[0] if hasattr(operation, "__name__") else str(operation)


def _is_attention(name: str) -> bool:
    return ("attention" in name and "scaled_dot_product" in name) or name == "flex_attention"


def _chooser(keep: frozenset[str], linears: Sequence[str]) -> Callable[..., CheckpointPolicy]:
    """Tells one run of a block which results to keep, by the order in which its expensive operations come."""
    seen = {False: 0, True: 0}  # by whether it is the recomputation

    def choose(context: Any, operation: Any, *arguments: Any, **named: Any) -> CheckpointPolicy:
        name, kept = _name(operation), False
        if _is_attention(name):
            kept = "attention" in keep
        elif name in _LINEAR:
            index = seen[context.is_recompute]
            seen[context.is_recompute] = index + 1
            kept = index < len(linears) and linears[index] in keep
        return CheckpointPolicy.MUST_SAVE if kept else CheckpointPolicy.PREFER_RECOMPUTE

    return choose


@contextmanager
def _recording(inner: Any, experts: Sequence[MixtureOfExperts]) -> Iterator[None]:
    """The recomputation under a name in the trace, around the context that selects; experts count nothing twice."""
    with record_function(RECOMPUTE_SCOPE), inner:
        for layer in experts:
            layer.again = True
        try:
            yield
        finally:
            for layer in experts:
                layer.again = False


@cache
def _expensive_only(mode: type) -> type:
    """PyTorch's mode, asked only about what may be kept. It refuses a recomputation that calls more than the forward
    pass did, as FSDP's gathering within a block does."""

    def dispatch(self: Any, operation: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = _name(operation)
        if name in _LINEAR or _is_attention(name):
            return mode.__torch_dispatch__(self, operation, types, args, kwargs)  # type: ignore[attr-defined]
        return operation(*args, **(kwargs or {}))

    return type(mode.__name__, (mode,), {"__torch_dispatch__": dispatch})


def _contexts(keep: frozenset[str], linears: Sequence[str], experts: Sequence[MixtureOfExperts]) -> tuple[Any, Any]:
    forward, recomputation = create_selective_checkpoint_contexts(_chooser(keep, linears))
    if torch.compiler.is_compiling():
        return forward, recomputation
    for mode in (forward, recomputation):
        mode.__class__ = _expensive_only(type(mode))  # type: ignore[arg-type]
    return forward, _recording(recomputation, experts)


def _unselective(experts: Sequence[MixtureOfExperts]) -> tuple[Any, Any]:
    return nullcontext(), _recording(nullcontext(), experts) if experts else record_function(RECOMPUTE_SCOPE)


def recompute_blocks(blocks: Iterable[nn.Module], policies: Sequence[Policy]) -> None:
    """Give every block that has a policy a forward pass that keeps only what the policy says."""
    for block, policy in zip(blocks, policies, strict=False):
        if policy is not None:
            block.forward = _recomputed(block, block.forward, policy)


def _recomputed(block: nn.Module, forward: Callable[..., Any], policy: frozenset[str]) -> Callable[..., Any]:
    ffn: tuple[str, ...] = ("ffn_gate", "ffn_up")
    if getattr(getattr(block, "ffn", None), "gate", None) is None:
        ffn = ("ffn_up",)
    experts = list(expert_layers(block))
    if experts:
        ffn = ()  # whose rows are never kept
    attention = getattr(block, "attention", None)
    projections = attention.linears if isinstance(attention, LatentAttention) else ("qkv",)
    options: dict[str, Any] = {
        "use_reentrant": False,
        # Without dropout nothing is drawn: saving the generators of every block would be time for nothing.
        "preserve_rng_state": any(isinstance(m, nn.Dropout) for m in block.modules()),
    }
    if policy:
        options["context_fn"] = partial(_contexts, policy, (*projections, "attention_out", *ffn), experts)
    else:
        options["context_fn"] = partial(_unselective, experts)
    checkpointed: Callable[..., Any] = partial(checkpoint, forward, **options)
    if experts:  # A compiled block breaks at its experts, and would be recomputed by other code than it was computed.
        checkpointed = torch.compiler.disable(checkpointed)

    def run(*arguments: Any) -> Any:
        if not torch.is_grad_enabled():
            return forward(*arguments)
        return checkpointed(*arguments)

    return run
