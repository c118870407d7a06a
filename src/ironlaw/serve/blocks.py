"""Which pages of keys and values are whose: counted references, equal beginnings shared, the least recent reused first.

A full page is known by the digest of all tokens up to its end. A page that nobody uses any more keeps its content, and
its digest, until it is needed for something else.
"""

from __future__ import annotations

from array import array
from collections import OrderedDict
from collections.abc import Sequence
from hashlib import blake2b

from ironlaw.serve.request import Request


class Blocks:
    """`count` pages of `size` tokens. Page 0 is nobody's: rows that only fill up a batch write there, and it stands
    where a request had pages that are behind its `window`: of all layers, None where one sees everything."""

    def __init__(self, count: int, size: int, share: bool = True, window: int | None = None) -> None:
        self.count, self.size, self.share, self.window = count, size, share, window
        self._users = [0] * count
        self._digest: list[bytes | None] = [None] * count
        self._known: dict[bytes, int] = {}
        self._empty = list(range(count - 1, 0, -1))  # without content
        self._unused: OrderedDict[int, None] = OrderedDict()  # with content that somebody may ask for again
        self.queried = self.hits = 0  # tokens of prompts that were looked up, and found

    @property
    def free(self) -> int:
        return len(self._empty) + len(self._unused)

    @property
    def used(self) -> int:
        return self.count - 1 - self.free

    @property
    def usage(self) -> float:
        return self.used / (self.count - 1)

    def digests(self, tokens: Sequence[int], known: Sequence[bytes], salt: bytes) -> list[bytes]:
        """Of the full pages of `tokens`, the first of which are `known`; equal tokens of another `salt` are others."""
        found = list(known)
        before = found[-1] if found else salt
        for start in range(len(found) * self.size, len(tokens) - self.size + 1, self.size):
            data = array("q", tokens[start : start + self.size]).tobytes()
            before = blake2b(before + data, digest_size=16).digest()
            found.append(before)
        return found

    def find(self, request: Request) -> list[int]:
        """Pages that hold the beginning of a request, but for its last token: that one's logits are wanted."""
        if not self.share:
            return []
        request.digests = self.digests(request.tokens, request.digests, request.salt)
        found = []
        for digest in request.digests[: (len(request.tokens) - 1) // self.size]:
            page = self._known.get(digest)
            if page is None:
                break
            found.append(page)
        return found

    def needed(self, request: Request, tokens: int) -> int:
        """Pages to add for a request to hold `tokens`."""
        return -(-tokens // self.size) - len(request.blocks)

    def can_take(self, found: Sequence[int], more: int) -> bool:
        return more <= self.free - sum(self._users[page] == 0 for page in found)

    def take(self, request: Request, found: Sequence[int]) -> None:
        """The pages `found` become the request's first."""
        for page in found:
            if self._users[page] == 0:
                del self._unused[page]
            self._users[page] += 1
        request.blocks, request.remembered = list(found), len(found)

    def extend(self, request: Request, count: int) -> None:
        """Add `count` pages, which `free` says are there."""
        for _ in range(count):
            if self._empty:
                page = self._empty.pop()
            else:
                page, _ = self._unused.popitem(last=False)
                digest = self._digest[page]
                assert digest is not None
                del self._known[digest]
                self._digest[page] = None
            self._users[page] = 1
            request.blocks.append(page)

    def remember(self, request: Request, computed: int) -> None:
        """The full pages among the first `computed` tokens can be shared from now on."""
        full = computed // self.size
        if not self.share or full == request.remembered:
            return
        if len(request.digests) < full:
            request.digests = self.digests(request.tokens[: full * self.size], request.digests, request.salt)
        start, request.remembered = request.remembered, full
        for page, digest in zip(request.blocks[start:full], request.digests[start:full], strict=True):
            if page and self._digest[page] is None and digest not in self._known:
                self._digest[page] = digest
                self._known[digest] = page

    def release(self, request: Request) -> None:
        """Last pages first: beginnings are shared more often, and so live longer."""
        self._give_back(request.blocks)
        request.blocks = []
        request.computed = 0

    def forget(self, request: Request) -> None:
        """Give back the pages that no token to come can see."""
        if self.window is None:
            return
        unseen = max(0, request.computed - self.window + 1) // self.size
        if unseen and request.blocks[unseen - 1]:
            self._give_back(request.blocks[:unseen])
            request.blocks[:unseen] = [0] * unseen

    def _give_back(self, pages: Sequence[int]) -> None:
        for page in filter(None, reversed(pages)):
            self._users[page] -= 1
            if self._users[page] == 0:
                if self._digest[page] is None:
                    self._empty.append(page)
                else:
                    self._unused[page] = None
