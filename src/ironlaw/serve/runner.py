"""One step of the engine on the model: scheduled tokens in, logits out, keys and values kept in pages."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ironlaw.model.cached import Group, LayerCache, Pages
from ironlaw.model.config import ModelConfig
from ironlaw.model.transformer import Transformer
from ironlaw.serve.request import Request

KV_TYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp8": torch.float8_e4m3fn, "int8": torch.int8}
# Pages that a group may read for nothing, because its sequences are not equally long, before it is divided in two:
# about what one more attention call costs in each layer.
_SPARE_PAGES = 64
# Of more tokens than this there are only multiples: oneDNN makes a kernel for every number of rows that it has not
# multiplied yet, which takes about a millisecond and stays in memory (`model/grouped.py`).
_ROWS = 16


def kv_heads_and_sizes(config: ModelConfig) -> tuple[int, tuple[int, ...]]:
    """What is kept of a token in one layer: so many heads of so many elements, for each part of the cache."""
    if config.latent is not None:
        return 1, (config.latent.key_value_rank + config.latent.rotary_size,)
    return config.key_value_heads, (config.size_of_head, config.size_of_value)


def kv_bytes_per_token(config: ModelConfig, store: str) -> int:
    """In all layers; 8-bit formats have an fp32 scale for each head's key and value."""
    heads, sizes = kv_heads_and_sizes(config)
    width = {"fp32": 4, "bf16": 2, "fp8": 1, "int8": 1}[store]
    return config.layers * heads * sum(size * width + (4 if width == 1 else 0) for size in sizes)


@dataclass(frozen=True)
class Work:
    """Tokens of one request to compute: `tokens` from place `start` on; logits after the last `wanted` of them."""

    request: Request
    tokens: Sequence[int]
    start: int
    wanted: int


class Runner:
    def __init__(self, model: Transformer, pages: int, page: int, store: str, device: torch.device,
                 autocast: bool = False) -> None:  # fmt: skip
        self.model, self.config, self.device, self.page = model, model.config, device, page
        heads, sizes = kv_heads_and_sizes(model.config)
        kept = KV_TYPES[store]
        self.pages = [Pages(pages, page, heads, sizes, kept, device) for _ in range(model.config.layers)]
        self.autocast = autocast
        self.windowed = [windowed for windowed, _ in model.kinds()]

    @property
    def kv_bytes(self) -> int:
        return sum(pages.bytes for pages in self.pages)

    @torch.inference_mode()
    def run(self, work: Sequence[Work]) -> tuple[Tensor | None, list[Work]]:
        """Logits (R, V) of the wanted rows, and `work` in the order that they have."""
        ordered, parts = self.arrange(work)
        tokens: list[int] = []
        places: list[int] = []
        held: list[int] = []  # page of each token
        wanted: list[int] = []
        for w in ordered:
            end = w.start + len(w.tokens)
            tokens += w.tokens
            places += range(w.start, end)
            blocks, page = w.request.blocks, self.page
            held += [blocks[place // page] for place in range(w.start, end)]
            wanted += range(len(tokens) - w.wanted, len(tokens))
        spare = -len(tokens) % _ROWS if len(tokens) > _ROWS and self.device.type == "cpu" else 0
        if spare:  # they see nothing but themselves, and write to the page that is nobody's
            parts.append((len(tokens), [Work(ordered[0].request, [0], 0, 0)] * spare))
            tokens, places, held = tokens + [0] * spare, places + [0] * spare, held + [0] * spare
        # A chunk in the middle of a prompt wants none: the least that the model gives is one token's.
        rows = None if len(wanted) == len(tokens) else self._tensor(wanted or [len(tokens) - 1])
        long = None
        if self.config.rope_long:
            long = self._tensor([w.request.is_long for w in ordered for _ in w.tokens] + [False] * spare, torch.bool)
        positions = self._tensor(places)
        at = self.pages[0].rows(self._tensor(held), positions % self.page)
        groups = [self._group(part, positions) for part in parts]
        caches = [LayerCache(self.config, p, at, groups, w) for p, w in zip(self.pages, self.windowed, strict=True)]
        with self.precision():
            logits = self.model.continued(self._tensor(tokens), positions, caches, rows, long)
        return (logits if wanted else None), ordered

    def precision(self) -> Any:
        return torch.autocast(self.device.type, torch.bfloat16) if self.autocast else nullcontext()

    def arrange(self, work: Sequence[Work]) -> tuple[list[Work], list[tuple[int, list[Work]]]]:
        """Work in the order of its groups; of each group the first row and its members."""
        ordered = sorted(work, key=lambda w: (len(w.tokens), w.start == 0 and len(w.tokens) > 1, len(w.request.blocks)))
        parts: list[tuple[int, list[Work]]] = []
        row = spare = 0
        for w in ordered:
            last = parts[-1][1] if parts else []
            fits = bool(last) and len(last[0].tokens) == len(w.tokens) and (last[0].start == 0) == (w.start == 0)
            if fits and w.start:
                # Ordered by length: those before become as long as this one.
                spare += (len(w.request.blocks) - len(last[-1].request.blocks)) * len(last)
                fits = spare <= _SPARE_PAGES
            if fits:
                last.append(w)
            else:
                parts.append((row, [w]))
                spare = 0
            row += len(w.tokens)
        return ordered, parts

    def _group(self, part: tuple[int, list[Work]], places: Tensor) -> Group:
        row, members = part
        count, each = len(members), len(members[0].tokens)
        rows = slice(row, row + count * each)
        positions = places[rows].view(count, each)
        if members[0].start == 0:
            return Group(rows, count, each, positions, None)
        width = max(-(-(w.start + each) // self.page) for w in members)
        table = [w.request.blocks[:width] + [0] * (width - len(w.request.blocks)) for w in members]
        return Group(rows, count, each, positions, self.pages[0].blocks(self._tensor(table)))

    def _tensor(self, values: Any, dtype: torch.dtype = torch.int64) -> Tensor:
        return torch.tensor(values, dtype=dtype, device=self.device)
