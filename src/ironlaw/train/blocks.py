"""How a step runs its blocks: which kernel computes attention, what is compiled, what is computed again.

- The attention kernel is the one PyTorch's own dispatch would choose: the function it asks is asked here.
- `torch.compile` goes block by block; where it does not work, the step runs without it and the reason is said.
- Recomputation is `torch.utils.checkpoint`, selective where a policy keeps results.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from functools import cache, partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.profiler import record_function
from torch.nn.attention import SDPBackend
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from ironlaw.config import RunConfig
from ironlaw.kernels.attention import available
from ironlaw.model.latent import LatentAttention
from ironlaw.model.masks import BlockMask
from ironlaw.model.moe import MixtureOfExperts, expert_layers
from ironlaw.model.transformer import Attention, Transformer
from ironlaw.observe.profile import RECOMPUTE_SCOPE
from ironlaw.train.precision import autocast, product_type
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


def compile_blocks(
    model: Transformer, tokens: Tensor, autocast: Callable[[], Any], say: Callable[[str], None], *, graphs: bool = False
) -> bool:
    """Compile every block (5 to 9 times quicker to compile than the whole model, as fast afterwards) and try it.

    Returns False, with the blocks as they were, when compilation fails: no C++ compiler, no Triton, ...
    """
    random_state = torch.get_rng_state()
    for block in model.blocks:
        # Graphs replay a block's kernels in one launch; shapes are static here but for a smaller last micro-batch.
        block.compile(mode="reduce-overhead" if graphs else None)
    say("compiling the blocks")
    try:
        with autocast():
            loss = model(tokens, tokens)
        loss.backward()
    except Exception as error:  # the compiler fails in many ways, and none of them should stop the run
        for block in model.blocks:
            block._compiled_call_impl = None
        torch._dynamo.reset()
        reason = str(error).strip().splitlines()
        say(f"torch.compile failed, training without it: {reason[0] if reason else type(error).__name__}")
        return False
    finally:
        model.zero_grad(set_to_none=True)
        torch.set_rng_state(random_state)
    return True


NAMES = {
    SDPBackend.MATH: "math", SDPBackend.FLASH_ATTENTION: "flash", SDPBackend.CUDNN_ATTENTION: "cuDNN",
    SDPBackend.EFFICIENT_ATTENTION: "memory-efficient", SDPBackend.OVERRIDEABLE: "the device's own",
}  # fmt: skip


def attention_kernel(model: Transformer, config: RunConfig, device: torch.device, precision: str) -> str:
    """`SDPA: flash`, `SDPA: math`, `FlexAttention` and so on, of training steps of this run on this device.

    Asked with one sequence of the run's shapes, precision, mask and dropout: the choice does not hang on the batch.
    """
    sequence = config.sequence
    if model.config.dropout and config.layout is not None:
        return "scores in memory: with a [layout] dropout is drawn by sample, which no fused kernel does"
    if model.config.composes_scores and device.type != "cuda":
        return "scores in memory: caps and sinks change them, which no fused kernel does on this device"
    dtype = product_type(precision) or torch.float32
    documents = torch.zeros(1, sequence, dtype=torch.int32, device=device) if config.data.masks_documents else None
    with torch.no_grad(), autocast(device, precision):
        mask = model.attention_mask(sequence, device, documents, None)
    if isinstance(mask, BlockMask):
        return "FlexAttention"
    ours = any(isinstance(module, Attention) and module.native for module in model.modules())
    if mask is None and ours and available(dtype):
        return "Ironlaw's own, for CPUs"

    def like(heads: int, size: int = model.config.size_of_head) -> torch.Tensor:
        shape = (1, sequence, heads, size)  # laid out as the projection leaves it
        return torch.empty(shape, dtype=dtype, device=device, requires_grad=True).transpose(1, 2)

    query, key = like(model.config.heads), like(model.config.key_value_heads)
    padded = device.type == "cpu" and not model.config.dropout  # values as wide as keys (model/latent.py)
    value = like(model.config.key_value_heads, model.config.size_of_head if padded else model.config.size_of_value)
    asked: dict[str, Any] = {"is_causal": mask is None, "enable_gqa": key.shape[1] != query.shape[1]}
    chosen = torch._fused_sdp_choice(query, key, value, mask, model.config.dropout, **asked)
    return f"SDPA: {NAMES.get(SDPBackend(chosen), 'none')}"
