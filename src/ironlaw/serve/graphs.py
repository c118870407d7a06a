"""Decode steps as CUDA graphs: one launch instead of hundreds of launches of small kernels by the host."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from ironlaw.model.config import ModelConfig

Step = Callable[..., Tensor]
Record = Callable[[Callable[[], Tensor]], tuple[Tensor, Callable[[], Any]]]


def can_record(config: ModelConfig) -> bool:
    """Whether a decode step always has the same operations, all on the device. It has not with experts (the host reads
    their numbers of tokens), two rotary tables (the choice may change), or ALiBi (slopes come from the host)."""
    return config.moe is None and not config.rope_long and config.positions != "alibi"


class Graphs:
    """Graphs by shapes, recorded when these first occur. `record` takes a function, and returns its result and a
    function that runs it again; tests replace it."""

    def __init__(self, record: Record | None = None) -> None:
        self.record = record or _recorder()
        # By shapes: the buffers that inputs are copied into, the result, and what writes it.
        self.found = dict[tuple[int, ...], tuple[Sequence[Tensor], Tensor, Callable[[], Any]]]()

    def __call__(self, step: Step, *inputs: Tensor) -> Tensor:
        """Return the result of `step(*inputs)`, which is valid until the next call."""
        shapes = tuple(map(len, inputs))
        if shapes not in self.found:
            self.found[shapes] = inputs, *self.record(lambda: step(*inputs))
        buffers, result, replay = self.found[shapes]
        for buffer, tensor in zip(buffers, inputs, strict=True):
            buffer.copy_(tensor)
        replay()
        return result


def _recorder() -> Record:
    pool = torch.cuda.graph_pool_handle()  # shared by all graphs, which never run at the same time

    def record(step: Callable[[], Tensor]) -> tuple[Tensor, Callable[[], Any]]:
        beside = torch.cuda.Stream()
        beside.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(beside):  # libraries allocate workspaces before the recording
            step()
        torch.cuda.current_stream().wait_stream(beside)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=pool):
            result = step()
        return result, graph.replay

    return record
