"""Proposing tokens that the model then checks, several in one pass (arXiv 2211.17192).

The sampler draws the model's own token at every proposed place, with that place's own random number, and a proposal
stands while it is the token drawn. So the answer is, token by token, the one without speculation; a proposed token t
is accepted with probability p(t), as in rejection sampling of a proposal without spread.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence

from ironlaw.serve.request import Request
from ironlaw.serve.runner import Runner, RunnerWork
from ironlaw.serve.sampler import likeliest


class Proposer:
    def propose(self, request: Request) -> list[int]:
        """Tokens that may come next; a placeholder each where `fill` finds them for all requests at once."""
        raise NotImplementedError

    def fill(self, requests: Sequence[Request]) -> None:
        """Put proposed tokens in the place of placeholders; pages for them are there."""

    def computed(self, work: Sequence[RunnerWork]) -> None:
        """The model has computed this."""


class NGram(Proposer):
    """What followed the last time that the newest tokens occurred (prompt lookup): no model, no cost."""

    def __init__(self, longest: int, count: int) -> None:
        self.longest, self.count = longest, count

    def propose(self, request: Request) -> list[int]:
        tokens = request.tokens
        data = array("i", tokens).tobytes()
        for length in range(min(self.longest, len(tokens) - 1), 0, -1):
            newest = data[-4 * length :]
            found = data.rfind(newest, 0, len(data) - 4)
            while found % 4 > 0:  # within a number; -1 % 4 is 3, so not found ends by the next search
                found = data.rfind(newest, 0, found + 4 * length - 1) if found > 0 else -4
            if found >= 0:
                start = found // 4 + length
                return tokens[start : start + self.count]
        return []


class DraftModel(Proposer):
    """A smaller model's likeliest tokens. It keeps its keys and values in pages of the same numbers as the model's."""

    def __init__(self, runner: Runner, count: int) -> None:
        self.runner, self.count = runner, count

    def propose(self, request: Request) -> list[int]:
        return [-1] * min(self.count, self.runner.config.context - len(request.tokens))

    def computed(self, work: Sequence[RunnerWork]) -> None:
        without = [RunnerWork(w.request, w.tokens, w.start, 0) for w in work if not w.request.drafted]
        if without:
            self.runner.run(without)
        for w in without:
            w.request.drafted_for = w.start + len(w.tokens)

    def fill(self, requests: Sequence[Request]) -> None:
        wanted = [request for request in requests if request.drafted]
        if not wanted:
            return
        work = [RunnerWork(r, r.tokens[r.drafted_for :], r.drafted_for, 1) for r in wanted]
        for number in range(max(len(r.drafted) for r in wanted)):
            logits, ordered = self.runner.run(work)
            assert logits is not None
            work = []
            for w, token in zip(ordered, likeliest(logits).tolist(), strict=True):
                w.request.drafted[number] = token
                w.request.drafted_for = w.start + len(w.tokens)
                if number + 1 < len(w.request.drafted):
                    work.append(RunnerWork(w.request, [token], w.start + len(w.tokens), 1))
            if not work:
                return
