"""In which order the ranks of a pipeline make their passes.

    orders = passes("1f1b", pp=2, virtual=1, micro_batches=4)     # per rank: Pass(kind, stage, micro_batch)

Kinds: F forward, B backward, I its gradients of inputs alone, W its gradients of weights. The orders of `gpipe` and
`1f1b` are written here; those with several chunks or split backward passes are PyTorch's own, asked for when needed.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any, NamedTuple

from ironlaw.workload.pipeline import stages_of

CLASSES = {
    "1f1b": "ScheduleInterleaved1F1B", "gpipe": "ScheduleGPipe", "zb": "ScheduleInterleavedZeroBubble",
    "zbv": "ScheduleZBVZeroBubble", "dualpipe": "ScheduleDualPipeV",
}  # fmt: skip
"""Of `torch.distributed.pipelining.schedules`, for several chunks per rank but for gpipe."""


class Pass(NamedTuple):
    kind: str
    stage: int
    micro_batch: int


def passes(schedule: str, pp: int, virtual: int, micro_batches: int) -> list[list[Pass]]:
    """Per pipeline rank, its passes in order."""
    if schedule == "gpipe":
        forward = [[Pass("F", rank, m) for m in range(micro_batches)] for rank in range(pp)]
        return [order + [Pass("B", rank, m) for m in range(micro_batches)] for rank, order in enumerate(forward)]
    if schedule == "1f1b" and virtual == 1:
        return [_alternating(rank, pp, micro_batches) for rank in range(pp)]
    return [list(order) for order in pytorch_passes(schedule, pp, virtual, micro_batches)]


def _alternating(rank: int, pp: int, micro_batches: int) -> list[Pass]:
    ahead = min(micro_batches, pp - rank)
    order = [Pass("F", rank, m) for m in range(ahead)]
    for m in range(micro_batches):
        order.append(Pass("B", rank, m))
        if ahead + m < micro_batches:
            order.append(Pass("F", rank, ahead + m))
    return order


@lru_cache(maxsize=16)
def pytorch_passes(schedule: str, pp: int, virtual: int, micro_batches: int) -> tuple[tuple[Pass, ...], ...]:
    """The same, as PyTorch's schedules order them."""
    from torch.distributed.pipelining import schedules

    class Stage:
        """As much of a stage as an order needs."""

        is_first, is_last, group_rank, group, submod, device = True, False, 0, None, None, "cpu"
        has_backward, num_stages, group_size = True, pp * virtual, pp

        def __init__(self, index: int) -> None:
            self.stage_index = index
            self.stage_index_to_group_rank: dict[int, int] = {}

    held: list[Any] = [Stage(index) for index in stages_of(schedule, pp, virtual, 0)]
    order_of = getattr(schedules, CLASSES[schedule])(held, micro_batches, loss_fn=None).pipeline_order
    kinds = schedules._ComputationType
    short = {
        kinds.FORWARD: "F", kinds.FULL_BACKWARD: "B", kinds.BACKWARD_INPUT: "I", kinds.BACKWARD_WEIGHT: "W",
    }  # fmt: skip
    result = []
    for rank in range(pp):
        order = []
        for action in order_of[rank]:
            for part in [] if action is None else (getattr(action, "sub_actions", None) or [action]):
                order.append(Pass(short[part.computation_type], part.stage_index, part.microbatch_index))
        result.append(tuple(order))
    return tuple(result)
