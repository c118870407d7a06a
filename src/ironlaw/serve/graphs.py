"""Decode steps on CUDA as recorded graphs: one launch in place of hundreds of small kernels that the host launches.

A graph has fixed shapes: a number of requests and a number of pages each, both powers of two. It is recorded when a
step of such shapes first comes, and reads what changes from tensors of its own. Spare requests are nobody's (page 0).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from ironlaw.model.cached import Group, Now
from ironlaw.model.config import ModelConfig

if TYPE_CHECKING:
    from ironlaw.serve.runner import Runner, Work

Record = Callable[[Callable[[], Tensor]], tuple[Tensor, Callable[[], Any]]]


@dataclass(frozen=True)
class Recorded:
    inputs: list[Tensor]  # tokens and positions (P,), rows (P x K,), pages (P x K x W,)
    logits: Tensor  # (P, V), written by `replay`
    replay: Callable[[], Any]


def can_record(config: ModelConfig) -> bool:
    """Whether a decode step has the same operations every time, all on the device: how many tokens each expert gets is
    asked by the host, which of two tables turns a position changes, ALiBi's slopes come from the host."""
    return config.moe is None and not config.rope_long and config.positions != "alibi"


class Graphs:
    """`record`: of a function what it gives and what runs it again; another one in tests."""

    def __init__(self, runner: Runner, record: Record | None = None) -> None:
        self.runner, self.found = runner, dict[tuple[int, int], Recorded]()
        self.record = record or _recorder()

    def __call__(self, work: Sequence[Work]) -> Tensor:
        """Logits (P, V) of one new token each."""
        runner, spare = self.runner, _whole(len(work)) - len(work)
        pages = _whole(max(w.start // runner.page + 1 for w in work))
        padded = [*work, *[runner.spare] * spare]
        positions = runner.tensor([w.start for w in padded])
        table = runner.caches[0].pages.blocks(runner.table(padded, pages))
        inputs = [runner.tensor([w.tokens[0] for w in padded]), positions, runner.rows(padded, positions), table]
        graph = self.found.get((len(padded), pages))
        if graph is None:
            graph = self.found[len(padded), pages] = self._made(inputs)
        for mine, now in zip(graph.inputs, inputs, strict=True):
            mine.copy_(now)
        graph.replay()
        return graph.logits[: len(work)]

    def _made(self, inputs: list[Tensor]) -> Recorded:
        runner, (tokens, positions, rows, pages) = self.runner, inputs

        def step() -> Tensor:
            group = Group(slice(0, len(tokens)), len(tokens), 1, positions[:, None], pages)
            for cache in runner.caches:
                cache.now = Now(rows, None, [group])
            with runner.precision():
                return runner.model.continued(tokens, positions, runner.caches)

        return Recorded(inputs, *self.record(step))


def _whole(count: int) -> int:
    return 1 << (count - 1).bit_length()


def _recorder() -> Record:
    pool = torch.cuda.graph_pool_handle()  # one for all graphs: no two run at a time

    def record(step: Callable[[], Tensor]) -> tuple[Tensor, Callable[[], Any]]:
        beside = torch.cuda.Stream()
        beside.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(beside):  # libraries make their workspaces before anything is recorded
            step()
        torch.cuda.current_stream().wait_stream(beside)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=pool):
            logits = step()
        return logits, graph.replay

    return record
