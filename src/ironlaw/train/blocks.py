"""Execution of transformer blocks: the choice of attention kernel, compilation, and recomputation.

- The attention kernel is found with the function that PyTorch's own dispatch uses.
- `torch.compile` is applied per block; if it fails, the step runs without it and the reason is reported.
- Recomputation uses `torch.utils.checkpoint`, selectively if a policy keeps some results.
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
from ironlaw.errors import first_line
from ironlaw.kernels.attention import available
from ironlaw.model.latent import LatentAttention
from ironlaw.model.masks import BlockMask
from ironlaw.model.moe import MixtureOfExperts, expert_layers
from ironlaw.model.transformer import Attention, Transformer
from ironlaw.observe.profile import RECOMPUTE_SCOPE
from ironlaw.train.precision import autocast, product_type
from ironlaw.workload.blocks import Policy

_LINEAR = {"mm", "addmm", "_scaled_mm", "_int_mm", "_linear_pointwise", "onednn_product"}  # the last two are oneDNN's


def _name(operation: Any) -> str:
    return operation.__name__.split(".")[0] if hasattr(operation, "__name__") else str(operation)


def _is_attention(name: str) -> bool:
    return ("attention" in name and "scaled_dot_product" in name) or name == "flex_attention"


def _chooser(keep: frozenset[str], linears: Sequence[str]) -> Callable[..., CheckpointPolicy]:
    """Return a policy function for one run of a block, which identifies linear layers by the order of their calls."""
    seen = {False: 0, True: 0}  # linear layers so far, in the forward pass and in the recomputation

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
    """Run the recomputation in the context `inner`, labelled in the trace. Experts do not count its tokens again."""
    with record_function(RECOMPUTE_SCOPE), inner:
        for layer in experts:
            layer.is_recomputation = True
        try:
            yield
        finally:
            for layer in experts:
                layer.is_recomputation = False


@cache
def _expensive_only(mode: type) -> type:
    """Derive from PyTorch's selective mode one that sees only operations whose results may be kept. The original
    rejects a recomputation with more operations than the forward pass, such as FSDP's gathers within a block."""

    def dispatch(self: Any, operation: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = _name(operation)
        if name in _LINEAR or _is_attention(name):
            return mode.__torch_dispatch__(self, operation, types, args, kwargs)  # type: ignore[attr-defined]
        return operation(*args, **(kwargs or {}))

    return type(mode.__name__, (mode,), {"__torch_dispatch__": dispatch})


def _selective(keep: frozenset[str], linears: Sequence[str]) -> tuple[object, object]:
    return create_selective_checkpoint_contexts(_chooser(keep, linears))


def _contexts(keep: frozenset[str], linears: Sequence[str], experts: Sequence[MixtureOfExperts]) -> tuple[Any, Any]:
    forward, recomputation = _selective(keep, linears) if keep else (nullcontext(), nullcontext())
    for mode in (forward, recomputation) if keep else ():
        mode.__class__ = _expensive_only(type(mode))  # type: ignore[arg-type]
    return forward, _recording(recomputation, experts)


def recompute_blocks(blocks: Iterable[nn.Module], policies: Sequence[Policy]) -> None:
    """Make every block that has a policy keep only the results that its policy names."""
    for block, policy in zip(blocks, policies, strict=False):
        if policy is not None:
            block.forward = _recomputed(block, block.forward, policy)


def _recomputed(block: nn.Module, forward: Callable[..., Any], policy: frozenset[str]) -> Callable[..., Any]:
    ffn: tuple[str, ...] = ("ffn_gate", "ffn_up")
    if getattr(getattr(block, "ffn", None), "gate", None) is None:
        ffn = ("ffn_up",)
    experts = list(expert_layers(block))
    if experts:
        ffn = ()  # results of experts are never kept
    attention = getattr(block, "attention", None)
    projections = attention.linears if isinstance(attention, LatentAttention) else ("qkv",)
    options: dict[str, Any] = {
        "use_reentrant": False,
        # Without dropout no random numbers are used, and saving the generators for every block would only cost time.
        "preserve_rng_state": any(isinstance(m, nn.Dropout) for m in block.modules()),
    }
    linears = (*projections, "attention_out", *ffn)
    contexts = partial(_contexts, policy, linears, experts)
    checkpointed: Callable[..., Any] = partial(checkpoint, forward, context_fn=contexts, **options)
    # A compiler takes no other contexts than those of a policy, and recomputes all without any.
    selective: dict[str, Any] = {"context_fn": partial(_selective, policy, linears)} if policy else {}
    traced: Callable[..., Any] = partial(checkpoint, forward, **selective, **options)
    if experts:  # compilation breaks a block at its experts, so that the recomputation would run other code
        traced = torch.compiler.disable(checkpointed)

    def run(*arguments: Any) -> Any:
        if not torch.is_grad_enabled():
            return forward(*arguments)
        return (traced if torch.compiler.is_compiling() else checkpointed)(*arguments)

    return run


def compile_blocks(
    model: Transformer, tokens: Tensor, autocast: Callable[[], Any], say: Callable[[str], None], *, graphs: bool = False
) -> bool:
    """Compile every block and test it: 5 to 9 times quicker to compile than the whole model, and as fast afterwards.

    Returns False, with the blocks unchanged, if compilation fails (no C++ compiler, no Triton, ...).
    """
    for block in model.blocks:
        # CUDA graphs replay a block's kernels in one launch. Shapes are static except for a smaller last micro-batch.
        block.compile(mode="reduce-overhead" if graphs else None)
    say("compiling the blocks")
    try:
        # The trial draws numbers for dropout, on the device too, which the run must not miss.
        with torch.random.fork_rng([tokens.device] if tokens.is_cuda else []):
            with autocast():
                loss = model(tokens, tokens)
            loss.backward()
    except Exception as error:  # compilers fail in many ways, none of which should stop the run
        for block in model.blocks:
            block._compiled_call_impl = None
        torch._dynamo.reset()
        say(f"torch.compile failed, training without it: {first_line(error)}")
        return False
    finally:
        model.zero_grad(set_to_none=True)
    return True


NAMES = {
    SDPBackend.MATH: "math", SDPBackend.FLASH_ATTENTION: "flash", SDPBackend.CUDNN_ATTENTION: "cuDNN",
    SDPBackend.EFFICIENT_ATTENTION: "memory-efficient", SDPBackend.OVERRIDEABLE: "the device's own",
}  # fmt: skip


def attention_kernel(model: Transformer, config: RunConfig, device: torch.device, precision: str) -> str:
    """Return the attention kernel of this run's training steps, such as `SDPA: flash`, `SDPA: math`, `FlexAttention`.

    It is determined with one sequence of the run's shapes, precision, mask and dropout; the batch has no influence.
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
        shape = (1, sequence, heads, size)  # memory layout as produced by the projection
        return torch.empty(shape, dtype=dtype, device=device, requires_grad=True).transpose(1, 2)

    query, key = like(model.config.heads), like(model.config.key_value_heads)
    padded = device.type == "cpu" and not model.config.dropout  # values padded to the width of keys (model/latent.py)
    value = like(model.config.key_value_heads, model.config.size_of_head if padded else model.config.size_of_value)
    asked: dict[str, Any] = {"is_causal": mask is None, "enable_gqa": key.shape[1] != query.shape[1]}
    chosen = torch._fused_sdp_choice(query, key, value, mask, model.config.dropout, **asked)
    return f"SDPA: {NAMES.get(SDPBackend(chosen), 'none')}"
