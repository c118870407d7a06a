"""Manages pages of keys and values: reference counts, sharing of equal prefixes, reuse of the least recently used page.

A page belongs to a group of layers. If a model has layers with and without a window, each group has one kind only, so
that pages behind a window can be freed. A request has a table of pages for each group. A full page is identified by its
group and the digest of all tokens up to its end. An unused page keeps its content, and its digest, until it is needed
for something else.
"""

from __future__ import annotations

import math
from array import array
from collections import OrderedDict
from collections.abc import Sequence
from hashlib import blake2b
from itertools import chain, cycle

from ironlaw.model.config import ModelConfig
from ironlaw.serve.request import Request

MAX_GROUPS = 8  # at most about so many, since every step builds a table of pages for each


def layer_groups(models: Sequence[ModelConfig]) -> tuple[list[int | None], list[list[int]]]:
    """Return the window of each group, None if one of its layers has none, and the group of each layer of each model.

    Groups are of one size: the number of layers of the first model's rarer kind, as in vLLM's hybrid cache manager, or
    more if there would be too many groups. The layers of a draft model join these groups.
    """
    first = models[0]
    windowed = sum(map(first.is_windowed, range(first.layers)))
    kinds = [first.layers - windowed, windowed]
    size = max(min(filter(None, kinds)), -(-first.layers // MAX_GROUPS))
    full, total = -(-kinds[0] // size), sum(-(-count // size) for count in kinds)
    windows: list[int | None] = [0] * total
    groups = []
    for model in models:
        places = [cycle(range(full) or range(total)), cycle(range(full, total) or range(total))]
        groups.append([next(places[model.is_windowed(layer)]) for layer in range(model.layers)])
        for layer, group in enumerate(groups[-1]):
            own, widest = model.sliding_window if model.is_windowed(layer) else None, windows[group]
            windows[group] = None if own is None or widest is None else max(own, widest)
    return windows, groups


class Blocks:
    """`count` pages of `size` tokens, for groups of layers with these `windows`. Page 0 is reserved: padding rows of a
    batch write to it, and it replaces the pages of a request that are behind a window."""

    def __init__(self, count: int, size: int, share: bool = True, windows: Sequence[int | None] = (None,)) -> None:
        self.count, self.size, self.share, self.windows = count, size, share, windows
        self._users = [0] * count
        self._key: list[tuple[int, bytes] | None] = [None] * count
        self._known: dict[tuple[int, bytes], int] = {}
        self._empty = list(range(count - 1, 0, -1))  # without content
        self._unused: OrderedDict[int, None] = OrderedDict()  # with content that may be shared again
        self.queried = self.hits = 0  # prompt tokens that were looked up, and found

    @property
    def free(self) -> int:
        return len(self._empty) + len(self._unused)

    @property
    def used(self) -> int:
        return self.count - 1 - self.free

    @property
    def usage(self) -> float:
        return self.used / (self.count - 1)

    @property
    def tokens(self) -> int:
        """Number of tokens that all pages hold if none are freed behind windows."""
        return (self.count - 1) // len(self.windows) * self.size

    def longest(self, budget: int) -> float:
        """Return the most tokens of a request that runs alone, with `budget` tokens computed at a time."""
        within = sum(-(-(window + budget) // self.size) + 1 for window in self.windows if window is not None)
        left, full = self.count - 1 - within, self.windows.count(None)
        behind = left // full * self.size if full else math.inf if left >= 0 else 0
        return max(self.tokens, behind)

    def _add_digests(self, request: Request) -> None:
        """Add the digests of a request's new full pages."""
        before = request.digests[-1] if request.digests else request.salt
        for start in range(len(request.digests) * self.size, len(request.tokens) - self.size + 1, self.size):
            data = array("q", request.tokens[start : start + self.size]).tobytes()
            before = blake2b(before + data, digest_size=16).digest()
            request.digests.append(before)

    def find(self, request: Request) -> list[list[int]]:
        """Return the pages by group that hold the beginning of a request, without its last token, whose logits are
        wanted. 0 stands for a page behind the window."""
        if not self.share:
            return [[] for _ in self.windows]
        self._add_digests(request)
        rows, known, longest = list[list[int]](), [0] * len(self.windows), 0
        for end, digest in enumerate(request.digests[: (len(request.tokens) - 1) // self.size], 1):
            rows.append([self._known.get((group, digest), 0) for group in range(len(self.windows))])
            known = [count + 1 if page else 0 for count, page in zip(known, rows[-1], strict=True)]
            unseen = [self._unseen(end * self.size, window) for window in self.windows]
            if all(count >= end - least for count, least in zip(known, unseen, strict=True)):
                longest = end
            elif any(window is None and not page for window, page in zip(self.windows, rows[-1], strict=True)):
                break
        unseen = [self._unseen(longest * self.size, window) for window in self.windows]
        return [[0] * least + [row[group] for row in rows[least:longest]] for group, least in enumerate(unseen)]

    def _unseen(self, computed: int, window: int | None) -> int:
        """Return how many of the pages of `computed` tokens no later token can see."""
        return 0 if window is None else max(0, computed - window + 1) // self.size

    def needed(self, request: Request, tokens: int) -> int:
        """Return the number of pages to add to a request that is to hold `tokens`."""
        return len(self.windows) * (-(-tokens // self.size) - len(request.blocks[0]))

    def can_take(self, found: Sequence[Sequence[int]], more: int) -> bool:
        return more <= self.free - sum(page > 0 and self._users[page] == 0 for page in chain(*found))

    def take(self, request: Request, found: Sequence[list[int]]) -> None:
        """Make the pages `found` the first ones of a request."""
        for page in filter(None, chain(*found)):
            if self._users[page] == 0:
                del self._unused[page]
            self._users[page] += 1
        request.blocks, request.remembered = [list(table) for table in found], len(found[0])

    def extend(self, request: Request, count: int) -> None:
        """Add `count` pages, which must be free, in equal numbers to each table."""
        for number in range(count):
            if self._empty:
                page = self._empty.pop()
            else:
                page, _ = self._unused.popitem(last=False)
                key = self._key[page]
                assert key is not None
                del self._known[key]
                self._key[page] = None
            self._users[page] = 1
            request.blocks[number % len(self.windows)].append(page)

    def remember(self, request: Request, computed: int) -> None:
        """Let other requests share the full pages among the first `computed` tokens."""
        full = computed // self.size
        if not self.share or full == request.remembered:
            return
        self._add_digests(request)
        start, request.remembered = request.remembered, full
        for group, table in enumerate(request.blocks):
            for page, digest in zip(table[start:full], request.digests[start:full], strict=True):
                if page and self._key[page] is None and (group, digest) not in self._known:
                    self._key[page] = group, digest
                    self._known[group, digest] = page

    def release(self, request: Request) -> None:
        """Free the pages of a request, last first: beginnings are shared more often, and should stay longer."""
        for table in request.blocks:
            self._give_back(table)
        request.blocks = [[] for _ in self.windows]
        request.computed = 0

    def forget(self, request: Request) -> None:
        """Free the pages that no later token can see."""
        for table, window in zip(request.blocks, self.windows, strict=True):
            unseen = self._unseen(request.computed, window)
            if unseen and table[unseen - 1]:
                self._give_back(table[:unseen])
                table[:unseen] = [0] * unseen

    def _give_back(self, pages: Sequence[int]) -> None:
        for page in filter(None, reversed(pages)):
            self._users[page] -= 1
            if self._users[page] == 0:
                if self._key[page] is None:
                    self._empty.append(page)
                else:
                    self._unused[page] = None
