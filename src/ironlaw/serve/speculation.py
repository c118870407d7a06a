"""Speculative decoding: propose tokens that the model then verifies, several in one pass (arXiv 2211.17192).

The sampler draws the model's own token at every proposed position, with that position's own random number. Proposals
are accepted as long as they equal the drawn tokens, so that the answer is, token by token, that without speculation. A
proposed token t is accepted with probability p(t), as in rejection sampling with a deterministic proposal.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Sequence

from ironlaw.serve.request import Request
from ironlaw.serve.runner import Runner, RunnerWork
from ironlaw.serve.sampler import most_likely


class Proposer:
    """Proposes nothing."""

    def propose(self, request: Request) -> list[int]:
        """Return tokens that may come next, or placeholders if `fill` finds them for all requests at once."""
        return []

    def fill(self, requests: Iterable[Request]) -> None:
        """Replace placeholders by proposed tokens. Pages for them are allocated."""

    def computed(self, work: Sequence[RunnerWork]) -> None:
        """Called with the work that the model has computed."""


class NGram(Proposer):
    """Proposes what followed the last occurrence of the newest tokens (prompt lookup): no model, no cost."""

    def __init__(self, longest: int, count: int) -> None:
        self.longest, self.count = longest, count

    def propose(self, request: Request) -> list[int]:
        tokens = request.tokens
        data = array("i", tokens).tobytes()
        for length in range(min(self.longest, len(tokens) - 1), 0, -1):
            newest = data[-4 * length :]
            found = data.rfind(newest, 0, len(data) - 4)
            while found % 4 > 0:  # not aligned to a token; -1 (not found), since -1 % 4 is 3, ends the search
                found = data.rfind(newest, 0, found + 4 * length - 1) if found > 0 else -4
            if found >= 0:
                start = found // 4 + length
                return tokens[start : start + self.count]
        return []


class DraftModel(Proposer):
    """Proposes a smaller model's most likely tokens. Its keys and values have the same page numbers as the model's."""

    def __init__(self, runner: Runner, count: int) -> None:
        self.runner, self.count = runner, count

    def propose(self, request: Request) -> list[int]:
        return [-1] * min(self.count, self.runner.config.context - len(request.tokens))

    def computed(self, work: Sequence[RunnerWork]) -> None:
        """Compute the same tokens by the small model, as far as its context reaches, and those that it has not yet."""
        without = [
            RunnerWork(w.request, w.request.tokens[w.request.drafted_for : end], w.request.drafted_for, 0)
            for w in work
            if not w.request.drafted and (end := w.start + len(w.tokens)) <= self.runner.config.context
        ]
        if without:
            self.runner.run(without)
        for w in without:
            w.request.drafted_for = w.start + len(w.tokens)

    def fill(self, requests: Iterable[Request]) -> None:
        wanted = [request for request in requests if request.drafted]
        if not wanted:
            return
        work = [RunnerWork(r, r.tokens[r.drafted_for :], r.drafted_for, 1) for r in wanted]
        for number in range(max(len(r.drafted) for r in wanted)):
            logits, ordered = self.runner.run(work)
            assert logits is not None
            work = []
            for w, token in zip(ordered, most_likely(logits).tolist(), strict=True):
                w.request.drafted[number] = token
                w.request.drafted_for = w.start + len(w.tokens)
                if number + 1 < len(w.request.drafted):
                    work.append(RunnerWork(w.request, [token], w.start + len(w.tokens), 1))
            if not work:
                return
