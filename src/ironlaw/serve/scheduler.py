"""What runs in the next step: decode first, then prompts in chunks, under a budget of tokens and of pages.

A request is never divided into phases: it has tokens, of which some are computed. A step computes more of them, one
while it decodes, as many as the budget allows before. When pages run out, the request that came last gives up its own
and waits to be computed again; sharing makes that cheap where its pages are still there.
"""

from __future__ import annotations

import bisect
import time
from collections.abc import Callable
from dataclasses import dataclass

from ironlaw.serve.blocks import Blocks
from ironlaw.serve.config import ServeConfig
from ironlaw.serve.request import Request


@dataclass(eq=False)
class Scheduled:
    """One request's part of a step: `count` tokens from `request.computed` on, drafted ones included."""

    request: Request
    count: int

    @property
    def is_last_chunk(self) -> bool:
        """Logits are wanted: nothing known is left to compute."""
        return self.request.computed + self.count >= len(self.request.tokens)


class Scheduler:
    def __init__(self, config: ServeConfig, blocks: Blocks) -> None:
        self.config, self.blocks = config, blocks
        self.waiting: list[Request] = []  # in the order in which they will be admitted
        self.running: list[Request] = []  # in the order in which they were
        self.preemptions = 0

    def order(self, request: Request) -> tuple[int, int]:
        return (request.priority if self.config.policy == "priority" else 0, request.number)

    def add(self, request: Request) -> None:
        bisect.insort(self.waiting, request, key=self.order)

    def remove(self, request: Request) -> None:
        """Forget a request, wherever it is, and free its pages."""
        for queue in (self.running, self.waiting):
            if request in queue:
                queue.remove(request)
        self.blocks.release(request)

    def schedule(self, propose: Callable[[Request], list[int]] | None = None) -> list[Scheduled]:
        """`propose`: drafted tokens of a request that decodes, taken as far as budget and pages go."""
        budget = self.config.token_budget
        step: list[Scheduled] = []
        if any(self.blocks.windows):
            for request in self.running:
                self.blocks.forget(request)
        left, preempted = len(self.running), self.preemptions  # each that decodes goes before what is only drafted
        for request in list(self.running):
            left -= 1
            if self.preemptions > preempted and request not in self.running:  # for one before it
                continue
            known = len(request.tokens) - request.computed
            drafted = propose(request) if propose is not None and request.is_decoding else []
            request.drafted = drafted[: max(0, budget - known - left)]
            count = min(known, budget)
            if count and self._make_room(request, request.computed + count, step):
                step.append(Scheduled(request, count + len(request.drafted)))
                budget -= step[-1].count
        for decoding in step:
            self._remember(decoding)
        while self.waiting and budget > 0 and len(self.running) < self.config.batch:
            scheduled = self._admit(self.waiting[0], budget)
            if scheduled is None:
                break
            step.append(scheduled)
            budget -= scheduled.count
            self._remember(scheduled)
        return step

    def _remember(self, scheduled: Scheduled) -> None:
        """Others may share what the step will compute: keys are written before they are read, also within a step."""
        request = scheduled.request
        self.blocks.remember(request, min(request.computed + scheduled.count, len(request.tokens)))

    def _admit(self, request: Request, budget: int) -> Scheduled | None:
        found = self.blocks.find(request)
        computed = len(found[0]) * self.blocks.size
        count = min(len(request.tokens) - computed, budget)
        more = len(found) * (-(-(computed + count) // self.blocks.size) - len(found[0]))
        # One page of every running request may be full: to admit what is preempted a step later helps nobody.
        if not self.blocks.can_take(found, more + min(len(found) * len(self.running), self.blocks.free // 8)):
            return None
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
        return Scheduled(request, count)

    def _make_room(self, request: Request, tokens: int, step: list[Scheduled]) -> bool:
        """Pages for the first `tokens` of a request and for what is drafted after them, where there are any left.
        Others lose theirs, the last first, and at the end the request itself."""
        if self.blocks.needed(request, tokens + len(request.drafted)) <= 0:
            return True
        if self.blocks.needed(request, tokens + len(request.drafted)) > self.blocks.free:
            request.drafted = []
        while self.blocks.needed(request, tokens) > self.blocks.free:
            victim = max(self.running, key=self.order)
            self.preempt(victim)
            step[:] = [scheduled for scheduled in step if scheduled.request is not victim]
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
