"""Every tensor of a model with its names here and in Hugging Face safetensors.

Differences are of form only. Query, key and value (or gate and up) may be one matrix, with the three of a head or of a
group of heads next to each other; matrices may have inputs first; experts are one stack here and often one by one
there; rotary positions may turn neighbours instead of halves, which is an order of rows; norms may multiply by one and
their weight.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

from ironlaw.model.config import ModelConfig
from ironlaw.model.huggingface.spec import Names

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True)
class Entry:
    """One tensor here, and the ones it consists of there, one after the other by rows. `sizes` are their rows.

    Where theirs holds several of ours, ours is number `which` of `count`: halves, or with `turns` every second row.
    """

    ours: str
    theirs: tuple[str, ...]
    sizes: tuple[int, ...] = ()
    transposed: bool = False
    each: bool = False  # each of theirs is one entry of our first dimension
    stack: bool = False  # theirs is such a stack, whose rows are the second dimension
    inputs_first: bool = False  # of a stack: rows are the last dimension there
    order: tuple[int, ...] = ()  # of our rows, which of theirs each one is; empty: the same
    which: int = 0
    count: int = 1
    turns: bool = False
    row: bool = False  # theirs has a first dimension of one
    flat: int = 0  # theirs has so many of a stack's first two dimensions as one
    skipped: int = 0  # first rows of theirs, which nothing reads
    plus: float = 0.0  # ours are theirs and this (norms that multiply by one and their weight)

    def here(self, shapes: list[tuple[int, ...]]) -> tuple[int, ...]:
        """The shape here of tensors that have these shapes there."""
        import torch

        return tuple(self.join([torch.empty(shape, device="meta") for shape in shapes]).shape)

    def join(self, tensors: list[Tensor]) -> Tensor:
        import torch

        if self.each:
            return torch.stack(tensors)
        tensor = torch.cat(tensors) if len(tensors) > 1 else tensors[0]
        tensor = tensor[0] if self.row else tensor
        tensor = self._part(tensor.unflatten(0, (self.flat, -1)) if self.flat else tensor)
        tensor = tensor[torch.tensor(self.order, device=tensor.device)] if self.order else tensor
        tensor = tensor.float() + self.plus if self.plus else tensor
        return tensor.t() if self.transposed else tensor

    def put(self, tensor: Tensor, there: dict[str, Tensor]) -> None:
        """Ours into theirs; some tensors of theirs are made of several of ours."""
        import torch

        tensor = tensor - self.plus if self.plus else tensor
        tensor = tensor.t() if self.transposed else tensor
        if self.order:
            tensor = torch.empty_like(tensor).index_copy_(0, torch.tensor(self.order), tensor)
        if self.count > 1 or self.skipped or self.inputs_first:
            shape = list(tensor.shape)
            shape[int(self.stack)] = shape[int(self.stack)] * self.count + self.skipped
            if self.inputs_first:
                shape.append(shape.pop(1))
            whole = there.setdefault(self.theirs[0], tensor.new_zeros(shape))
            self._part(whole).copy_(tensor)
            if self.flat:
                there[self.theirs[0]] = whole.flatten(0, 1)
            return
        tensor = tensor.flatten(0, 1) if self.flat else tensor[None] if self.row else tensor
        split = tensor.unbind() if self.each else tensor.split(self.sizes) if self.sizes else (tensor,)
        # A copy of their own: three views of one matrix would be saved as three whole matrices, or refused.
        there |= {name: part.clone(memory_format=torch.contiguous_format)
                  for name, part in zip(self.theirs, split, strict=True)}  # fmt: skip

    def _part(self, theirs: Tensor) -> Tensor:
        """A view of what is ours."""
        if self.inputs_first:
            theirs = theirs.movedim(-1, 1)
        axis = int(self.stack)
        rows = theirs.shape[axis]
        if self.turns:
            chosen = slice(self.which, None, self.count)
        else:
            start = self.skipped + self.which * (rows // self.count)
            chosen = slice(start, start + rows // self.count if self.count > 1 else None)
        return theirs[(slice(None),) * axis + (chosen,)]


def entries(config: ModelConfig, names: Names) -> Iterator[Entry]:
    walk = _Walk(config, names)
    yield Entry("embedding.weight", (f"{names.embedding}.weight",))
    if config.positions == "learned":
        yield Entry("positions.weight", (f"{names.positions}.weight",), skipped=names.positions_skipped)
    if config.embedding_norm:
        yield from walk.norm("embedding_norm", names.embedding_norm)
    for layer in range(config.layers):
        yield from walk.block(layer)
    yield from walk.norm("final_norm", names.final_norm)
    if not config.tied:
        yield Entry("head.weight", (f"{names.head}.weight",))
    if config.head_bias:
        yield Entry("head.bias", (f"{names.head}.bias",))


@dataclass(frozen=True)
class _Walk:
    config: ModelConfig
    names: Names

    def block(self, layer: int) -> Iterator[Entry]:
        config, names = self.config, self.names
        ours, theirs = f"blocks.{layer}", f"{names.layers}.{layer}"
        there = names.two_norms if names.two_norms and config.parallel_norms == 2 else names.norms
        for norm, name in zip(_norms(config), there, strict=False):
            yield from self.norm(f"{ours}.{norm}", f"{theirs}.{name}")
        yield from self._attention(f"{ours}.attention", theirs)
        if config.moe is not None and config.moe.in_layer(layer):
            yield from self._experts(f"{ours}.ffn", theirs)
        else:
            yield from self._network(f"{ours}.ffn", theirs)

    def norm(self, ours: str, theirs: str) -> Iterator[Entry]:
        for part in ("weight", "bias")[: self.config.norm_tensors]:
            yield Entry(f"{ours}.{part}", (f"{theirs}.{part}",), plus=float(self.names.plus_one and part == "weight"))

    def _linear(
        self, ours: str, theirs: tuple[str, ...], bias: bool, sizes: tuple[int, ...] = (), order: tuple[int, ...] = (),
        which: int = 0, count: int = 1,
    ) -> Iterator[Entry]:  # fmt: skip
        for part in ("weight", "bias") if bias else ("weight",):
            there = tuple(f"{name}.{part}" for name in theirs)
            yield Entry(
                f"{ours}.{part}", there, sizes if len(theirs) > 1 else (), order=order, which=which, count=count,
                transposed=self.names.transposed and part == "weight",
            )  # fmt: skip

    def _attention(self, ours: str, theirs: str) -> Iterator[Entry]:
        config, names = self.config, self.names
        if config.latent is not None:
            yield from self._latent(ours, f"{theirs}.self_attn")
        else:
            fused = tuple(f"{theirs}.{name}" for name in names.query_key_value)
            sizes = (config.query_size, config.key_value_size, config.key_value_size)
            yield from self._linear(f"{ours}.qkv", fused, config.has_qkv_bias, sizes, _order(config, names))
        if config.qk_norm:
            for which, name in (("query", names.query_norm), ("key", names.key_norm)):
                order = _neighbours(config, config.qk_norm_sizes[which == "key"]) if names.neighbours else ()
                there = (f"{theirs}.{name}.weight",)
                yield Entry(f"{ours}.{which}_norm.weight", there, order=order, plus=float(names.plus_one))
        yield from self._linear(f"{ours}.out", (f"{theirs}.{names.out}",), config.has_out_bias)
        if config.attention_sinks:
            yield Entry(f"{ours}.sinks", (f"{theirs}.self_attn.sinks",))

    def _latent(self, ours: str, theirs: str) -> Iterator[Entry]:
        """What comes before latent attention's output layer."""
        latent = self.config.latent
        assert latent is not None

        def turned(start: int, plain: int) -> Iterator[int]:
            yield from range(start, start + plain)
            yield from (start + plain + row for row in _halves(latent.rotary_size))

        heads = range(0, self.config.query_size, latent.head_size)
        query = tuple(row for start in heads for row in turned(start, latent.plain_size))
        if latent.query_rank:
            yield Entry(f"{ours}.query_down.weight", (f"{theirs}.q_a_proj.weight",))
            yield Entry(f"{ours}.query_norm.weight", (f"{theirs}.q_a_layernorm.weight",))
        name = "q_b_proj" if latent.query_rank else "q_proj"
        yield Entry(f"{ours}.query_up.weight", (f"{theirs}.{name}.weight",), order=query)
        shared = tuple(turned(0, latent.key_value_rank))
        yield Entry(f"{ours}.latent_down.weight", (f"{theirs}.kv_a_proj_with_mqa.weight",), order=shared)
        yield Entry(f"{ours}.latent_norm.weight", (f"{theirs}.kv_a_layernorm.weight",))
        yield Entry(f"{ours}.latent_up.weight", (f"{theirs}.kv_b_proj.weight",))

    def _network(self, ours: str, theirs: str) -> Iterator[Entry]:
        """The dense one."""
        config, names = self.config, self.names
        fused = config.gated_ffn and names.gate == names.up
        for which, part in enumerate(("gate", "up") if config.gated_ffn else ("up",)):
            there = (f"{theirs}.{getattr(names, part)}",)
            yield from self._linear(f"{ours}.{part}", there, config.has_ffn_bias, which=which * fused, count=1 + fused)
        yield from self._linear(f"{ours}.down", (f"{theirs}.{names.down}",), config.has_ffn_bias)

    def _experts(self, ours: str, theirs: str) -> Iterator[Entry]:
        """The router and the experts, routed and shared."""
        moe, names = self.config.moe, self.names.experts
        assert moe is not None
        yield Entry(f"{ours}.router.weight", (f"{theirs}.{names.router}.weight",))
        if moe.bias:
            yield Entry(f"{ours}.router.score_bias", (f"{theirs}.{names.router}.bias",))
        if moe.balance == "bias":
            yield Entry(f"{ours}.router.bias", (f"{theirs}.{names.choice_bias}",), row=names.choice_row)
        for which, part in enumerate(("gate", "up", "down")):
            name, kind = f"{theirs}.{getattr(names, part)}", f"{ours}.experts.{part}"
            if "{}" in name:
                yield Entry(f"{kind}.weight", tuple(name.format(n) for n in range(moe.experts)), each=True)
                continue
            fused = names.gate == names.up and part != "down"
            for ours_name, end in ((f"{kind}.weight", ""), (f"{kind}.bias", names.bias))[: 1 + moe.bias]:
                yield Entry(
                    ours_name, (name + end,), stack=True, which=which * fused, count=1 + fused,
                    inputs_first=part in names.inputs_first, turns=fused and part in names.inputs_first,
                    flat=names.flat * moe.experts,
                )  # fmt: skip
        for part in ("gate", "up", "down") if moe.shared_experts else ():
            yield Entry(f"{ours}.shared.{part}.weight", (f"{theirs}.{names.shared}.{part}_proj.weight",))
        if moe.shared_gate:
            yield Entry(f"{ours}.shared_gate.weight", (f"{theirs}.{names.shared_gate}.weight",))


def _norms(config: ModelConfig) -> list[str]:
    """A block's norms in the order in which they run."""
    if config.norm_place == "post":
        return ["attention_after", "ffn_after"]
    if config.norm_place == "sandwich":
        return ["attention_norm", "attention_after", "ffn_norm", "ffn_after"]
    return ["attention_norm"] if config.parallel_norms == 1 else ["attention_norm", "ffn_norm"]


def _halves(turned: int) -> tuple[int, ...]:
    """Of neighbours, the first ones first."""
    return (*range(0, turned, 2), *range(1, turned, 2))


def _order(config: ModelConfig, names: Names) -> tuple[int, ...]:
    """Of our rows of query, key and value, which of theirs each one is; empty: the same."""
    size, groups = config.size_of_head, config.key_value_heads
    if names.by_head:  # of a group its queries, then its key, then its value
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
    """Of heads `width` wide together that turn neighbours, as of their norms' weights."""
    size, turned = config.size_of_head, config.size_of_rotary
    return tuple(start + row for start in range(0, width, size) for row in (*_halves(turned), *range(turned, size)))
