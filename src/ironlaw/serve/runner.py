"""Runs one step of the engine on the model: takes scheduled tokens, returns logits, keeps keys and values in pages."""

from __future__ import annotations

import math
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ironlaw.catalog.formats import number_format
from ironlaw.kernels.library import INT4
from ironlaw.kernels.native import Shapes, compiled
from ironlaw.model.cached import DecodeTokens, Group, LayerCache, Pages, StepTokens
from ironlaw.model.config import ModelConfig
from ironlaw.model.moe import ExpertLinear
from ironlaw.model.packed import PackedLinear, PackedNorm, compiled_blocks
from ironlaw.serve.graphs import Graphs, can_record
from ironlaw.serve.loading import LoadedModel
from ironlaw.serve.request import Request, SamplingParams
from ironlaw.serve.trace import bucket

KV_TYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp8": torch.float8_e4m3fn, "int8": torch.int8,
            "int4": INT4}  # fmt: skip
# Pages that a group may read in vain, because its sequences differ in length, before it is split in two: about the cost
# of one more attention call in each layer.
_MAX_SPARE_PAGES = 64
# Numbers of tokens above this are rounded up to multiples of it where oneDNN multiplies: it compiles a kernel for every
# new number of rows, which takes about a millisecond and stays in memory (`model/grouped.py`).
_ROWS = 16
# Sequences with up to this many new tokens use compiled attention, which reads pages in place; others, matrix products.
_MAX_DECODE_TOKENS = 8


def kv_heads_and_sizes(config: ModelConfig) -> tuple[int, tuple[int, ...]]:
    """Return what the cache holds of a token in one layer: the number of heads, and their elements in each part."""
    if config.latent is not None:
        return 1, (config.latent.key_value_rank + config.latent.rotary_size,)
    return config.key_value_heads, (config.size_of_head, config.size_of_value)


def kv_bytes_per_token(config: ModelConfig, store: str) -> int:
    """Return the bytes of a token in one layer. At 8 and 4 bits each head's key and value have an fp32 scale."""
    heads, sizes = kv_heads_and_sizes(config)
    bits = number_format(store).bits
    return heads * sum(math.ceil(size * bits / 8) + (4 if bits <= 8 else 0) for size in sizes)


@dataclass(frozen=True)
class RunnerWork:
    """Tokens of one request to compute: `tokens` from position `start` on; logits after the last `wanted` of them."""

    request: Request
    tokens: Sequence[int]
    start: int
    wanted: int


class Runner:
    """Runs a model. `groups`: the group of each layer (`blocks.py`). The n-th layers of all groups share a tensor."""

    def __init__(
        self, served: LoadedModel, groups: Sequence[int], pages: int, page: int, compiles: bool = True,
        graphs: bool = False,
    ) -> None:  # fmt: skip
        model, config, device, kept = served.model, served.model.config, served.device, KV_TYPES[served.kv]
        self.model, self.config, self.device, self.page, self.pages = model, config, device, page, pages
        heads, sizes = kv_heads_and_sizes(config)
        self.autocast = served.autocast
        shapes = Shapes(config.heads, heads, sizes[0], sizes[-1], sizes[-1], page)
        if config.latent is not None:  # values are the first elements of keys
            shapes = replace(shapes, value=config.latent.key_value_rank)
        activation = torch.bfloat16 if self.autocast else torch.float32
        self.rounds = kept not in (activation, torch.float32)  # new keys and values are read as they are kept
        self.native = None
        if compiles and device.type == "cpu":
            self.native = compiled(shapes, kept, activation)
        for module in model.modules():
            if isinstance(module, PackedNorm):
                module.native = self.native
        self.groups, self.caches = groups, list[LayerCache]()
        self.stores = [Pages(pages, page, heads, sizes, kept, device) for _ in range(max(map(groups.count, groups)))]
        for layer, (block, (windowed, _)) in enumerate(zip(model.blocks, model.kinds(), strict=True)):
            sinks = getattr(block.attention, "sinks", None)
            store = self.stores[groups[:layer].count(groups[layer])]
            self.caches.append(LayerCache(config, store, windowed, self.native, sinks))
        self.blocks = compiled_blocks(model, self.native, self.caches)
        own = all(not isinstance(m, PackedLinear | torch.nn.Linear | ExpertLinear) for m in model.modules())
        self.rows = _ROWS if device.type == "cpu" and not own else 1
        nobody = Request([0], SamplingParams(), blocks=[[0] for _ in range(max(groups) + 1)])
        self.spare = RunnerWork(nobody, [0], 0, 0)  # padding rows, which write to page 0
        graphed = graphs and device.type == "cuda" and can_record(config)
        self.graphs = Graphs() if graphed else None

    @property
    def kv_bytes(self) -> int:
        return sum(store.bytes for store in self.stores)

    @torch.inference_mode()
    def run(self, work: Sequence[RunnerWork]) -> tuple[Tensor | None, list[RunnerWork]]:
        """Return the logits (R, V) of the wanted rows, or None, and `work` in their order."""
        if self.graphs is not None and all(len(w.tokens) == w.wanted == 1 for w in work):
            return self._graphed(self.graphs, work)[: len(work)], list(work)
        count = sum(len(w.tokens) for w in work)
        spare = -count % self.rows if count > self.rows else 0
        few, many = self.arrange([*work, *[self.spare] * spare])
        ordered = few + [w for part in many for w in part]
        tokens = [token for w in ordered for token in w.tokens]
        places = [place for w in ordered for place in range(w.start, w.start + len(w.tokens))]
        wanted: list[int] = []
        row = 0
        for w in ordered:
            row += len(w.tokens)
            wanted += range(row - w.wanted, row)
        # A chunk within a prompt wants no logits, but the model computes at least one row.
        rows = None if len(wanted) == len(tokens) else self._tensor(wanted or [len(tokens) - 1])
        long = None
        if self.config.rope_long:
            long = self._tensor([w.request.is_long for w in ordered for _ in w.tokens], torch.bool)
        positions = self._tensor(places)
        steps = [self._step_tokens(few, many, positions, group) for group in range(max(self.groups) + 1)]
        # Not under the profiler, which identifies operations by their modules.
        whole = self.blocks if steps[0].rows is None and not torch.autograd.profiler._is_profiler_enabled else None
        logits = self._forward(steps, self._tensor(tokens), positions, rows, long, whole)
        return (logits if wanted else None), [w for w in ordered if w is not self.spare]

    def _forward(self, steps: Sequence[StepTokens], tokens: Tensor, positions: Tensor, *more: Any) -> Tensor:
        """Return the model's logits, given the tokens of the step for each group of layers."""
        for cache, group in zip(self.caches, self.groups, strict=True):
            cache.step_tokens = steps[group]
        with torch.autocast(self.device.type, torch.bfloat16) if self.autocast else nullcontext():
            return self.model.forward_cached(tokens, positions, self.caches, *more)

    def _graphed(self, graphs: Graphs, work: Sequence[RunnerWork]) -> Tensor:
        """Return logits (P, V) of one new token each, by a graph: requests and pages are padded to powers of two."""
        work = [*work, *[self.spare] * (bucket(len(work)) - len(work))]
        positions, width = self._tensor([w.start for w in work]), bucket(max(w.start // self.page + 1 for w in work))
        tokens, groups = self._tensor([w.tokens[0] for w in work]), range(max(self.groups) + 1)
        rows = [self._rows(work, positions, group) for group in groups]
        blocks = [self.stores[0].blocks(self._table(work, group, width)) for group in groups]
        return graphs(self._decode, tokens, positions, *rows, *blocks)

    def _decode(self, tokens: Tensor, positions: Tensor, *places: Tensor) -> Tensor:
        """Return logits. `places`: the rows to write for each group, then the blocks to read for each group."""
        rows, blocks = places[: len(places) // 2], places[len(places) // 2 :]
        whole = slice(0, len(tokens))
        steps = [
            StepTokens(r, None, [Group(whole, len(tokens), 1, positions[:, None], b)])
            for r, b in zip(rows, blocks, strict=True)
        ]
        return self._forward(steps, tokens, positions)

    def arrange(self, work: Sequence[RunnerWork]) -> tuple[list[RunnerWork], list[list[RunnerWork]]]:
        """Split `work` into requests for compiled code, and groups of others with equal numbers of new tokens."""
        few = [w for w in work if len(w.tokens) <= _MAX_DECODE_TOKENS] if self.native is not None else []
        many = [w for w in work if len(w.tokens) > _MAX_DECODE_TOKENS] if self.native is not None else work
        parts: list[list[RunnerWork]] = []
        spare = 0
        for w in sorted(many, key=lambda w: (len(w.tokens), w.start == 0, len(w.request.blocks[0]))):
            last = parts[-1] if parts else []
            fits = bool(last) and len(last[0].tokens) == len(w.tokens) and (last[0].start == 0) == (w.start == 0)
            if fits and w.start:
                # In order of length: all earlier ones are padded to the length of this one.
                spare += (len(w.request.blocks[0]) - len(last[-1].request.blocks[0])) * len(last)
                fits = spare <= _MAX_SPARE_PAGES
            if fits:
                last.append(w)
            else:
                parts.append([w])
                spare = 0
        return few, parts

    def _step_tokens(
        self, few: Sequence[RunnerWork], many: Sequence[Sequence[RunnerWork]], positions: Tensor, group: int
    ) -> StepTokens:
        keeps = self.native is not None and self.native.keeps and not many
        decode, row = None, sum(len(w.tokens) for w in few)
        if few:
            sequence = [number for number, w in enumerate(few) for _ in w.tokens]
            decode = DecodeTokens(
                row,
                self._table(few, group, dtype=torch.int32),
                self._tensor(sequence, torch.int32),
                positions[:row].int(),
            )
        groups = []
        for part in many:
            count, each = len(part), len(part[0].tokens)
            rows = slice(row, row + count * each)
            row = rows.stop
            reads = self.rounds or part[0].start > 0
            blocks = self.stores[0].blocks(self._table(part, group)) if reads else None
            groups.append(Group(rows, count, each, positions[rows].view(count, each), blocks))
        ordered = [*few, *(w for part in many for w in part)]
        return StepTokens(None if keeps else self._rows(ordered, positions, group), decode, groups)

    def _rows(self, ordered: Sequence[RunnerWork], positions: Tensor, group: int) -> Tensor:
        page = self.page
        held = [w.request.blocks[group][p // page] for w in ordered for p in range(w.start, w.start + len(w.tokens))]
        return self.stores[0].rows(self._tensor(held), positions % page)

    def _table(
        self, part: Sequence[RunnerWork], group: int, width: int | None = None, dtype: torch.dtype = torch.int64
    ) -> Tensor:
        """Return a table (sequences, pages) of one group, `width` pages wide, or as wide as the longest needs."""
        width = width or max(-(-(w.start + len(w.tokens)) // self.page) for w in part)
        table = np.zeros((len(part), width), np.int32)  # NumPy reads lists in a third of PyTorch's time
        for row, w in zip(table, part, strict=True):
            held = w.request.blocks[group][:width]
            row[: len(held)] = held
        if table.max() >= self.pages:
            raise ValueError(f"page {table.max()} of {self.pages}: compiled code would read past them")
        return torch.from_numpy(table).to(self.device, dtype)

    def _tensor(self, values: Any, dtype: torch.dtype = torch.int64) -> Tensor:
        return torch.from_numpy(np.array(values, np.int64)).to(self.device, dtype)
