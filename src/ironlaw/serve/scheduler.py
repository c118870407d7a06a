"""Chooses what runs in the next step: decode first, then prompts in chunks, within budgets of tokens and of pages.

Requests are not divided into phases: each has tokens, some of which are computed. A step computes more of them: one if
the request decodes, otherwise as many as the budget allows. When pages run out, the request that came last releases its
own and waits to be computed again, which prefix sharing makes cheap if its pages are still cached.
"""

from __future__ import annotations

import bisect
import time
from collections.abc import Callable

from ironlaw.serve.blocks import Blocks
from ironlaw.serve.config import ServeConfig
from ironlaw.serve.request import Request


class Scheduler:
    def __init__(self, config: ServeConfig, blocks: Blocks) -> None:
        self.config, self.blocks = config, blocks
        self.waiting: list[Request] = []  # in the order of admission
        self.running: list[Request] = []  # likewise
        self.preemptions = 0

    def order(self, request: Request) -> tuple[int, int]:
        return (request.priority if self.config.policy == "priority" else 0, request.number)

    def add(self, request: Request) -> None:
        bisect.insort(self.waiting, request, key=self.order)

    def remove(self, request: Request) -> None:
        """Remove a request from its queue and free its pages."""
        for queue in (self.running, self.waiting):
            if request in queue:
                queue.remove(request)
        self.blocks.release(request)

    def schedule(self, propose: Callable[[Request], list[int]]) -> dict[Request, int]:
        """Return the next step: the tokens of each request, from `request.computed` on, drafted ones included.
        `propose` drafts tokens of a decoding request, as far as budget and pages allow."""
        budget = self.config.token_budget
        step: dict[Request, int] = {}
        if any(self.blocks.windows):
            for request in self.running:
                self.blocks.forget(request)
        left, preempted = len(self.running), self.preemptions  # drafts get what other decoding requests leave
        for request in list(self.running):
            left -= 1
            if self.preemptions > preempted and request not in self.running:  # preempted for an earlier one
                continue
            known = request.left(request.computed)
            drafted = propose(request) if request.is_decoding else []
            request.drafted = drafted[: max(0, budget - known - left)]
            count = min(known, budget)
            if count and self._make_room(request, request.computed + count, step):
                step[request] = count + len(request.drafted)
                budget -= step[request]
        for decoding, count in step.items():
            self._remember(decoding, count)
        while self.waiting and budget > 0 and len(self.running) < self.config.batch:
            request = self.waiting[0]
            if not (count := self._admit(request, budget)):
                break
            step[request] = count
            budget -= count
            self._remember(request, count)
        return step

    def _remember(self, request: Request, count: int) -> None:
        """Let others share what the step will compute: keys are written before they are read, also within a step."""
        self.blocks.remember(request, min(request.computed + count, len(request.tokens)))

    def _admit(self, request: Request, budget: int) -> int:
        """Return the tokens of a request's first step; 0 if there is no room for it."""
        found = self.blocks.find(request)
        computed = len(found[0]) * self.blocks.size
        count = min(request.left(computed), budget)
        more = len(found) * (-(-(computed + count) // self.blocks.size) - len(found[0]))
        # Every running request may need a page next: do not admit a request that would be preempted a step later.
        if not self.blocks.can_take(found, more + min(len(found) * len(self.running), self.blocks.free // 8)):
            return 0
        self.waiting.pop(0)
        self.blocks.take(request, found)
        self.blocks.extend(request, more)
        request.computed = request.drafted_for = computed
        self.blocks.queried += len(request.tokens)
        self.blocks.hits += computed
        if request.admitted is None:
            request.admitted, request.shared_tokens = time.monotonic(), computed
        request.drafted = []
        self.running.append(request)
        return count

    def _make_room(self, request: Request, tokens: int, step: dict[Request, int]) -> bool:
        """Allocate pages for the first `tokens` of a request and, if enough are free, for its draft. Preempts requests,
        the last first. Returns False if that includes the request itself."""
        if self.blocks.needed(request, tokens + len(request.drafted)) <= 0:
            return True
        if self.blocks.needed(request, tokens + len(request.drafted)) > self.blocks.free:
            request.drafted = []
        while self.blocks.needed(request, tokens) > self.blocks.free:
            victim = max(self.running, key=self.order)
            self.preempt(victim)
            step.pop(victim, None)
            if victim is request:
                return False
        self.blocks.extend(request, max(0, self.blocks.needed(request, tokens + len(request.drafted))))
        return True

    def preempt(self, request: Request) -> None:
        self.running.remove(request)
        self.blocks.release(request)
        request.preemptions += 1
        self.preemptions += 1
        self.add(request)
