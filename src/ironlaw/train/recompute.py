"""Recomputation applied to the blocks: `torch.utils.checkpoint`, selective where a policy keeps results."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from contextlib import nullcontext
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.autograd.profiler import record_function
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from ironlaw.ledger import Ledger
from ironlaw.observe.profile import RECOMPUTE_SCOPE
from ironlaw.workload.blocks import Policy

_LINEAR = {"mm", "addmm", "_scaled_mm", "_int_mm"}


class _Chooser:
    """Tells one run of a block which results to keep, by the order in which its expensive operations come."""

    def __init__(self, keep: frozenset[str], linears: Sequence[str]) -> None:
        self.keep, self.linears = keep, linears
        self.seen = {False: 0, True: 0}  # by whether it is the recomputation

    def __call__(self, context: Any, operation: Any, *arguments: Any, **named: Any) -> CheckpointPolicy:
        name = operation.__name__.split(".")[0] if hasattr(operation, "__name__") else str(operation)
        if ("attention" in name and "scaled_dot_product" in name) or name == "flex_attention":
            return self._answer("attention" in self.keep)
        if name in _LINEAR:
            index = self.seen[context.is_recompute]
            self.seen[context.is_recompute] = index + 1
            return self._answer(index < len(self.linears) and self.linears[index] in self.keep)
        return CheckpointPolicy.PREFER_RECOMPUTE

    @staticmethod
    def _answer(keep: bool) -> CheckpointPolicy:
        return CheckpointPolicy.MUST_SAVE if keep else CheckpointPolicy.PREFER_RECOMPUTE


class _Recording:
    """The recomputation under a name in the trace, around the context that selects."""

    def __init__(self, inner: Any) -> None:
        self.inner, self.scope = inner, record_function(RECOMPUTE_SCOPE)

    def __enter__(self) -> None:
        self.scope.__enter__()
        self.inner.__enter__()

    def __exit__(self, *error: Any) -> Any:
        self.inner.__exit__(*error)
        return self.scope.__exit__(*error)


def _contexts(keep: frozenset[str], linears: Sequence[str]) -> tuple[Any, Any]:
    forward, recomputation = create_selective_checkpoint_contexts(_Chooser(keep, linears))
    if torch.compiler.is_compiling():
        return forward, recomputation
    return forward, _Recording(recomputation)


def _unselective() -> tuple[Any, Any]:
    return nullcontext(), record_function(RECOMPUTE_SCOPE)


def solved_policies(plan: Ledger) -> list[Policy]:
    """What the plan chose for each layer; empty where nothing is recomputed."""
    return [None if kept is None else frozenset(kept) for kept in plan.facts.get("recompute", ())]


def recompute_blocks(blocks: Iterable[nn.Module], policies: Sequence[Policy]) -> None:
    """Give every block that has a policy a forward pass that keeps only what the policy says."""
    for block, policy in zip(blocks, policies, strict=False):
        if policy is not None:
            block.forward = _recomputed(block, block.forward, policy)


def _recomputed(block: nn.Module, forward: Callable[..., Any], policy: frozenset[str]) -> Callable[..., Any]:
    ffn = ("ffn_gate", "ffn_up") if getattr(getattr(block, "ffn", None), "gate", None) is not None else ("ffn_up",)
    options: dict[str, Any] = {
        "use_reentrant": False,
        # Without dropout nothing is drawn: saving the generators of every block would be time for nothing.
        "preserve_rng_state": any(isinstance(m, nn.Dropout) for m in block.modules()),
    }
    if policy:
        options["context_fn"] = partial(_contexts, policy, ("qkv", "attention_out", *ffn))
    else:
        options["context_fn"] = _unselective

    def run(*arguments: Any) -> Any:
        if not torch.is_grad_enabled():
            return forward(*arguments)
        return checkpoint(forward, *arguments, **options)

    return run
