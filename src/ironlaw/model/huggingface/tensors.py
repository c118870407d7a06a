"""The mapping between a model's tensors here ("ours") and in Hugging Face safetensors ("theirs").

Differences are only of form. Query, key and value (or gate and up) may be one matrix, ordered by head or by group of
heads; matrices may have inputs first; experts are one stack here and often separate there; rotary positions may rotate
neighbouring elements instead of halves, which permutes rows; norms may multiply by 1 + weight.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import chain
from typing import TYPE_CHECKING, Any

from ironlaw.model.config import ModelConfig
from ironlaw.model.dimensions import LatentConfig
from ironlaw.model.huggingface.spec import Names
from ironlaw.model.parameters import model_parameters, of_block

if TYPE_CHECKING:
    import torch
    from torch import Tensor


@dataclass(frozen=True)
class Entry:
    """One of our tensors, and the ones of theirs that it consists of, concatenated by rows. `sizes` are their rows.

    If theirs contains several of ours, ours is number `which` of `count`: halves, or alternating rows.
    """

    ours: str
    theirs: tuple[str, ...]
    sizes: tuple[int, ...] = ()
    transposed: bool = False
    unstacked: bool = False  # each of theirs is one index of our first dimension
    stacked: bool = False  # theirs is a stack of matrices too, with rows as second dimension
    inputs_first: bool = False  # theirs is a stack with rows as last dimension
    order: tuple[int, ...] = ()  # index of each of our rows in theirs; empty: the same order
    which: int = 0
    count: int = 1
    interleaved: bool = False  # alternating rows of theirs are ours
    extra_dimension: bool = False  # theirs has a first dimension of one
    merged_experts: int = 0  # matrices of the stack if theirs merges its first two dimensions
    skipped: int = 0  # unused first rows of theirs
    plus: float = 0.0  # ours minus theirs (norms that multiply by 1 + weight)

    def from_theirs(self, tensors: list[Tensor]) -> Tensor:
        import torch

        parts = [self._part(tensor) for tensor in tensors]
        tensor = torch.stack(parts) if self.unstacked else torch.cat(parts) if len(parts) > 1 else parts[0]
        tensor = tensor[torch.tensor(self.order, device=tensor.device)] if self.order else tensor
        return tensor.float() + self.plus if self.plus else tensor

    def rounded(self, tensor: Tensor, dtype: torch.dtype) -> Tensor:
        """Return ours as it is read from theirs in `dtype`."""
        return (tensor - self.plus).to(dtype).to(tensor.dtype) + self.plus

    def to_theirs(self, tensor: Tensor, there: dict[str, Tensor], dtype: torch.dtype | None = None) -> None:
        """Write ours into `there`, the tensors of theirs in `dtype`, each of which may consist of several of ours."""
        import torch

        tensor = (tensor - self.plus if self.plus else tensor).to(dtype or tensor.dtype)
        if self.order:
            tensor = torch.empty_like(tensor).index_copy_(0, torch.tensor(self.order), tensor)
        split = tensor.unbind() if self.unstacked else tensor.split(self.sizes) if self.sizes else (tensor,)
        for name, part in zip(self.theirs, split, strict=True):
            if name not in there:  # of its own: three views of one matrix would be saved as three whole matrices
                there[name] = part.new_zeros(self._shape(part.shape))
            self._part(there[name]).copy_(part)

    def _shape(self, part: Sequence[int]) -> list[int]:
        """Return the shape of theirs with a part of this shape."""
        shape = list(part)
        shape[int(self.stacked)] = shape[int(self.stacked)] * self.count + self.skipped
        shape = shape[::-1] if self.transposed else shape
        shape = [shape[0], *shape[2:], shape[1]] if self.inputs_first else shape
        shape = [shape[0] * shape[1], *shape[2:]] if self.merged_experts else shape
        return [1, *shape] if self.extra_dimension else shape

    def _part(self, theirs: Tensor) -> Tensor:
        """Return the view of theirs that is ours, but for the order of rows."""
        theirs = theirs[0] if self.extra_dimension else theirs
        theirs = theirs.unflatten(0, (self.merged_experts, -1)) if self.merged_experts else theirs
        theirs = theirs.movedim(-1, 1) if self.inputs_first else theirs
        theirs = theirs.t() if self.transposed else theirs
        axis = int(self.stacked)
        rows = theirs.shape[axis] // self.count
        first = self.skipped + self.which * rows
        chosen = slice(self.which, None, self.count) if self.interleaved else slice(first, None)
        ours = theirs[(slice(None),) * axis + (chosen,)]
        return ours.narrow(axis, 0, rows) if self.count > 1 else ours


def to_theirs(
    config: ModelConfig, names: Names, weights: Mapping[str, Tensor], dtype: torch.dtype | None = None
) -> dict[str, Tensor]:
    """Return theirs, in `dtype`, that consist of the given ones of ours."""
    there: dict[str, Tensor] = {}
    for entry in entries(config, names):
        if entry.ours in weights:
            entry.to_theirs(weights[entry.ours].detach(), there, dtype)
    return there


def shapes_of(config: ModelConfig) -> dict[str, tuple[int, ...]]:
    """Return the shapes by name of the tensors in `model/parameters.py`, and of the routers' biases."""
    found = {parameter.name: parameter.shape for parameter in model_parameters(config)}
    if config.moe is None or config.moe.balance != "bias":
        return found
    layers = filter(config.moe.in_layer, range(config.layers))
    return found | {f"blocks.{layer}.ffn.router.bias": (config.moe.experts,) for layer in layers}


def entries(config: ModelConfig, names: Names) -> Iterator[Entry]:
    """Return the entries of `shapes_of`."""
    there = shapes_of(config)
    first = (
        *_both("embedding", names.embedding),
        *_both("positions", names.positions, skipped=names.positions_skipped),
        *_norm("embedding_norm", names.embedding_norm, names),
    )
    last = (*_norm("final_norm", names.final_norm, names), *_both("head", names.head))
    block = [*_attention(config, names), *_network(config, names)]
    of_blocks = (
        replace(
            entry, ours=f"blocks.{layer}.{entry.ours}",
            theirs=tuple(f"{names.layers}.{layer}.{name}" for name in entry.theirs),
        )
        for layer in range(config.layers) for entry in block
    )  # fmt: skip
    return (entry for entry in chain(first, of_blocks, last) if entry.ours in there)


_NORMS = ("attention_norm", "attention_after", "ffn_norm", "ffn_after")
"""Norms that a block may have, in order of execution."""


def _both(ours: str, *theirs: str, transposed: bool = False, **how: Any) -> Iterator[Entry]:
    """Yield weight and bias; only a weight can be transposed."""
    for part in ("weight", "bias"):
        there = tuple(f"{name}.{part}" for name in theirs)
        yield Entry(f"{ours}.{part}", there, transposed=transposed and part == "weight", **how)


def _norm(ours: str, theirs: str, names: Names, **how: Any) -> Iterator[Entry]:
    weight, bias = _both(ours, theirs, **how)
    yield from (replace(weight, plus=float(names.plus_one)), bias)


def _attention(config: ModelConfig, names: Names) -> Iterator[Entry]:
    """Yield all norms and attention tensors that a block may have."""
    norms = names.two_norms if names.two_norms and config.parallel_norms == 2 else names.norms
    there = {parameter.name for parameter in of_block(config)}
    ours = (norm for norm in _NORMS if f".{norm}.weight" in there)
    for norm, theirs in zip(ours, norms, strict=False):
        yield from _norm(norm, theirs, names)
    if config.latent is not None:
        yield from _latent(config, config.latent)
    else:
        sizes = config.qkv_sizes if len(names.query_key_value) > 1 else ()
        order, transposed = _order(config, names), names.transposed
        yield from _both("attention.qkv", *names.query_key_value, sizes=sizes, order=order, transposed=transposed)
        for which, theirs in (("query", names.query_norm), ("key", names.key_norm)):
            order = _neighbours(config, config.qk_norm_sizes[which == "key"]) if names.neighbours else ()
            yield from _norm(f"attention.{which}_norm", theirs, names, order=order)
    yield from _both("attention.out", names.out, transposed=names.transposed)
    yield Entry("attention.sinks", ("self_attn.sinks",))


def _latent(config: ModelConfig, latent: LatentConfig) -> Iterator[Entry]:
    """Yield the tensors of latent attention before its output layer."""

    def turned(start: int, plain: int) -> Iterator[int]:
        yield from range(start, start + plain)
        yield from (start + plain + row for row in _rotary_halves(latent.rotary_size))

    heads = range(0, config.query_size, latent.head_size)
    query = tuple(row for start in heads for row in turned(start, latent.plain_size))
    shared = tuple(turned(0, latent.key_value_rank))
    parts: tuple[tuple[str, str, tuple[int, ...]], ...] = (
        ("query_down", "q_a_proj", ()), ("query_norm", "q_a_layernorm", ()),
        ("query_up", "q_b_proj" if latent.query_rank else "q_proj", query),
        ("latent_down", "kv_a_proj_with_mqa", shared), ("latent_norm", "kv_a_layernorm", ()),
        ("latent_up", "kv_b_proj", ()),
    )  # fmt: skip
    for ours, theirs, order in parts:
        yield Entry(f"attention.{ours}.weight", (f"self_attn.{theirs}.weight",), order=order)


def _network(config: ModelConfig, names: Names) -> Iterator[Entry]:
    """Yield all network tensors that a block may have: dense, router, routed and shared experts."""
    fused, transposed = config.gated_ffn and names.gate == names.up, names.transposed
    for which, part in enumerate(("gate", "up", "down")):
        how = {"which": which, "count": 2} if fused and part != "down" else {}
        yield from _both(f"ffn.{part}", getattr(names, part), transposed=transposed, **how)
    if config.moe is None:
        return
    experts = names.experts
    yield Entry("ffn.router.weight", (f"{experts.router}.weight",))
    yield Entry("ffn.router.score_bias", (f"{experts.router}.bias",))
    yield Entry("ffn.router.bias", (experts.choice_bias,), extra_dimension=experts.choice_extra_dimension)
    for which, part in enumerate(("gate", "up", "down")):
        name, ours = getattr(experts, part), f"ffn.experts.{part}"
        if "{}" in name:
            yield Entry(f"{ours}.weight", tuple(name.format(n) for n in range(config.moe.experts)), unstacked=True)
            continue
        both, inputs_first = experts.gate == experts.up and part != "down", part in experts.inputs_first
        for kind, end in (("weight", ""), ("bias", experts.bias)):
            yield Entry(
                f"{ours}.{kind}", (name + end,), stacked=True, which=which * both, count=1 + both,
                inputs_first=inputs_first, interleaved=both and inputs_first,
                merged_experts=experts.merged_experts * config.moe.experts,
            )  # fmt: skip
    for part in ("gate", "up", "down"):
        yield Entry(f"ffn.shared.{part}.weight", (f"{experts.shared}.{part}_proj.weight",))
    yield Entry("ffn.shared_gate.weight", (f"{experts.shared_gate}.weight",))


def _rotary_halves(turned: int) -> tuple[int, ...]:
    """Return the order that puts the first elements of neighbouring pairs before the second ones."""
    return (*range(0, turned, 2), *range(1, turned, 2))


def _order(config: ModelConfig, names: Names) -> tuple[int, ...]:
    """Return the index of each of our qkv rows in theirs; empty: the same order."""
    size, groups = config.size_of_head, config.key_value_heads
    if names.by_head:  # each group's queries, then its key, then its value
        queries = config.heads // groups
        starts = [group * (queries + 2) * size for group in range(groups)]
        parts = [(0, queries), (queries, queries + 1), (queries + 1, queries + 2)]
        return tuple(
            start + row for first, last in parts for start in starts for row in range(first * size, last * size)
        )
    if not names.neighbours:
        return ()
    turned = config.query_size + config.key_value_size
    return (*_neighbours(config, turned), *range(turned, turned + config.key_value_size))


def _neighbours(config: ModelConfig, width: int) -> tuple[int, ...]:
    """Return the row order of heads with rotated neighbours and a total `width`, or of their norms' weights."""
    size, turned = config.size_of_head, config.size_of_rotary
    return tuple(
        start + row for start in range(0, width, size) for row in (*_rotary_halves(turned), *range(turned, size))
    )
