"""Decode steps on CUDA as recorded graphs: one launch in place of hundreds of small kernels that the host launches."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ironlaw.model.config import ModelConfig

Step = Callable[..., Tensor]
Record = Callable[[Callable[[], Tensor]], tuple[Tensor, Callable[[], Any]]]


@dataclass(frozen=True)
class Graph:
    inputs: Sequence[Tensor]  # of its own: what changes is copied there
    result: Tensor  # written by `replay`
    replay: Callable[[], Any]


def can_record(config: ModelConfig) -> bool:
    """Whether a decode step has the same operations every time, all on the device: how many tokens each expert gets is
    asked by the host, which of two tables turns a position changes, ALiBi's slopes come from the host."""
    return config.moe is None and not config.rope_long and config.positions != "alibi"


class Graphs:
    """One for each set of shapes, recorded when they first come. `record`: of a function what it gives, and what runs
    it again; tests have another one."""

    def __init__(self, record: Record | None = None) -> None:
        self.record, self.found = record or _recorder(), dict[tuple[int, ...], Graph]()

    def __call__(self, step: Step, *inputs: Tensor) -> Tensor:
        """What `step(*inputs)` gives, until the next call."""
        shapes = tuple(map(len, inputs))
        graph = self.found.get(shapes)
        if graph is None:
            graph = self.found[shapes] = Graph(inputs, *self.record(lambda: step(*inputs)))
        for mine, now in zip(graph.inputs, inputs, strict=True):
            mine.copy_(now)
        graph.replay()
        return graph.result


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
            result = step()
        return result, graph.replay

    return record
