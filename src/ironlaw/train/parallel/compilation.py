"""`torch.compile` per block on many ranks. A block's collectives are part of its compiled code, and counted there too
(`communication.py`); what does not compile runs as it would without a compiler."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch._dynamo import lookup_backend
from torch.distributed._functional_collectives import AsyncCollectiveTensor

from ironlaw.config import RunConfig
from ironlaw.errors import first_line
from ironlaw.model.moe import expert_layers
from ironlaw.train.blocks import recompute_blocks
from ironlaw.train.parallel.ranks import Ranks
from ironlaw.workload.blocks import Policy
from ironlaw.workload.layout import SPLIT_BACKWARD


def reason_not_to_compile(config: RunConfig, ranks: Ranks, policies: Sequence[Policy]) -> str | None:
    """Return why blocks are not compiled, None if they are: the same on every rank, and called on each."""
    layout = ranks.layout
    if layout.pp > 1 and layout.schedule in SPLIT_BACKWARD:
        return f"{layout.schedule} splits backward passes, and a compiled one would run twice: use schedule=1f1b"
    if layout.tp * layout.cp > 1 and any(policies):
        return "PyTorch cannot recompute a part of a compiled block that has collectives: use recompute.mode = full"
    if config.communication.gradients == "powersgd":
        return "PowerSGD compresses buckets, which gradients of compiled blocks fill in another order"
    problem = None
    try:
        torch.compile(lambda x: x.cos() + 1)(torch.zeros(8, device=ranks.device))
    except Exception as error:  # compilers fail in many ways
        problem = f"it failed: {first_line(error)}"
    return next((reason for reason in ranks.gather(problem) if reason is not None), None)


def compiler(say: Callable[[str], None]) -> Callable[[Callable[..., Tensor]], Callable[..., Tensor]]:
    """Return a function that compiles the forward passes of blocks. `say` is told once about parts that fail."""
    failed: list[str] = []

    def backend(graph: Any, inputs: Any) -> Any:
        try:
            return lookup_backend("inductor")(graph, inputs)
        except Exception as error:
            if not failed:
                say(f"torch.compile failed for a part of a block, which runs without it: {first_line(error)}")
            failed.append(first_line(error))
            return graph.forward

    return partial(_compiled, backend)


def compile_and_recompute(
    blocks: Iterable[nn.Module], policies: Sequence[Policy], compile_block: Callable[..., Any] | None
) -> None:
    """Compile blocks, if `compile_block` is given, and recompute them by their policies.

    The compiler must see what a policy keeps. A block that keeps nothing is compiled by itself, and its recomputation
    runs the same code: PyTorch 2.13 cannot compile a recomputation of DTensors. A block with experts that is recomputed
    stays eager: compilation breaks it there, so that the recomputation would run other code."""
    for block, policy in zip(blocks, policies, strict=True):
        eager = policy is not None and any(expert_layers(block))
        if compile_block is not None and not eager and not policy:
            block.forward = compile_block(block.forward)
        recompute_blocks([block], [policy])
        if compile_block is not None and not eager and policy:
            block.forward = compile_block(block.forward)


def _compiled(backend: Any, forward: Callable[..., Tensor]) -> Callable[..., Tensor]:
    compiled = torch.compile(forward, backend=backend)  # one backend for all blocks, which then share their code

    def waiting(x: Tensor, *rest: Any) -> Tensor:
        # Compiled code would wait for x itself, but lose the gradient of what it waited for.
        return compiled(_Wait.apply(x) if isinstance(x, AsyncCollectiveTensor) else x, *rest)

    return waiting


class _Wait(torch.autograd.Function):
    """Wait for a tensor that DTensor is still gathering or reducing."""

    @staticmethod
    def forward(ctx: Any, x: AsyncCollectiveTensor) -> Tensor:
        return x.wait()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Tensor:
        return gradients[0]
