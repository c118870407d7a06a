"""Pipeline schedules: the layers of each stage, the stages of each rank, and the order of each rank's passes.

    layers_of(61, 32, virtual=2)                    # layers of each of 16 x 2 stages
    stages_of("1f1b", pp=16, virtual=2, rank=3)     # numbers of a rank's stages: [3, 19]
    orders = passes("1f1b", pp=2, virtual=1, micro_batches=4)     # per rank: Pass(kind, stage, micro_batch)

Kinds: F forward, B backward, I only the input gradients of a backward pass, W only its weight gradients. Orders that
are not written here are taken from PyTorch's schedules.
"""

from __future__ import annotations

from collections import Counter
from functools import lru_cache
from typing import Any, NamedTuple

V_SHAPED = ("zbv", "dualpipe")


def fewer_layers_at_ends(layers: int, chunks: int) -> tuple[int, int] | None:
    """Return how many layers fewer the first and the last chunk hold; None if the chunks cannot be made equal.

    The embedding and the output layer count as a layer each if that makes chunks equal (arXiv 2407.21783, 3.3.2).
    """
    for less in ((0, 0), (0, 1), (1, 1)):
        if (layers + sum(less)) % chunks == 0:
            return less
    return None


@lru_cache(maxsize=1024)
def layers_of(layers: int, stages: int, virtual: int) -> tuple[range, ...]:
    """Return the layers of each stage, as equal as possible. The last stage, then the first, hold fewer."""
    less = fewer_layers_at_ends(layers, stages)
    if virtual > 1 and less is not None:
        counts = [(layers + sum(less)) // stages] * stages
        counts[0] -= less[0]
        counts[-1] -= less[1]
    else:
        whole, rest = divmod(layers, stages)
        turns = [*range(1, stages - 1), 0, stages - 1] if stages > 1 else [0]
        counts = [whole + (turns.index(stage) < rest) for stage in range(stages)]
    starts = [sum(counts[:stage]) for stage in range(stages)]
    return tuple(range(start, start + count) for start, count in zip(starts, counts, strict=True))


def stages_of(schedule: str, pp: int, virtual: int, rank: int) -> list[int]:
    """Return the numbers of a pipeline rank's stages, in order."""
    if schedule in V_SHAPED:
        return [rank, 2 * pp - 1 - rank]
    return [rank + pp * chunk for chunk in range(virtual)]


def reason_unfilled(schedule: str, pp: int, virtual: int, micro_batches: int) -> str | None:
    """Return why a schedule cannot run this number of micro-batches, or None."""
    if virtual > 1 and schedule not in V_SHAPED and micro_batches % pp:
        return f"interleaving needs the {micro_batches} micro-batches divisible by pp = {pp}"
    if schedule in V_SHAPED and micro_batches < 2 * pp:
        return f"schedule={schedule} needs 2 pp = {2 * pp} micro-batches or more, there are {micro_batches}"
    if schedule == "zb" and micro_batches % max(1, micro_batches // pp):  # PyTorch's runs them in equal rounds
        return f"schedule=zb needs the {micro_batches} micro-batches divisible by pp = {pp}"
    return None


def rank_of_last(schedule: str, pp: int) -> int:
    """Return the pipeline rank of the last stage, which has the output layer and the loss."""
    return 0 if schedule in V_SHAPED else pp - 1


CLASSES = {
    "1f1b": "ScheduleInterleaved1F1B", "gpipe": "ScheduleGPipe", "zb": "ScheduleInterleavedZeroBubble",
    "zbv": "ScheduleZBVZeroBubble", "dualpipe": "ScheduleDualPipeV",
}  # fmt: skip
"""Classes in `torch.distributed.pipelining.schedules`; all but gpipe's support several chunks per rank."""


class Pass(NamedTuple):
    kind: str
    stage: int
    micro_batch: int


def passes(schedule: str, pp: int, virtual: int, micro_batches: int) -> list[list[Pass]]:
    """Return each pipeline rank's passes in order."""
    return [passes_of_rank(schedule, pp, virtual, micro_batches, rank) for rank in range(pp)]


def passes_of_rank(schedule: str, pp: int, virtual: int, micro_batches: int, rank: int) -> list[Pass]:
    if schedule == "gpipe":
        return [Pass(kind, rank, m) for kind in "FB" for m in range(micro_batches)]
    if schedule in ("1f1b", "zb"):
        return _alternating(rank, pp, virtual, micro_batches, split=schedule == "zb")
    if schedule in V_SHAPED:
        return _v_shaped(schedule, rank, pp, micro_batches)
    return list(pytorch_passes(schedule, pp, virtual, micro_batches)[rank])


def _alternating(rank: int, pp: int, virtual: int, micro_batches: int, split: bool) -> list[Pass]:
    """One forward, one backward pass (1F1B, arXiv 2104.04473), taking turns among chunks every `in_turn` micro-batches.

    `split`: weight gradients are computed as many passes later as there are earlier ranks (ZB-H1, arXiv 2401.10241).
    """
    in_turn, all_passes = micro_batches // max(1, micro_batches // pp), virtual * micro_batches
    # With several chunks, messages overlap the passes, and forward passes run twice as far ahead.
    ahead = (virtual - 1) * in_turn + (2 if virtual > 1 and not split else 1) * (pp - 1 - rank)

    def nth(kind: str, number: int) -> list[Pass]:
        if not 0 <= number < all_passes:
            return []
        turn, place = divmod(number, in_turn)
        chunk = turn % virtual if kind == "F" else virtual - 1 - turn % virtual
        return [Pass(kind, rank + pp * chunk, turn // virtual * in_turn + place)]

    order = [each for number in range(min(ahead, all_passes)) for each in nth("F", number)]
    for number in range(all_passes + rank * split):
        order += nth("F", ahead + number) + nth("I" if split else "B", number)
        order += nth("W", number - rank) if split else []
    return order


def _v_shaped(schedule: str, rank: int, pp: int, micro_batches: int) -> list[Pass]:
    """Passes of chunks 0 and 1, equally far from the first and the last stage (2401.10241; V form of 2412.19437)."""
    behind, before = pp - rank - 1, rank + 1
    if schedule == "zbv":
        steady = max(2 * pp - 1, micro_batches) - 2 * pp + before
        words = "F0 " * (2 * behind + 1) + "F1 F0 " * rank + "F1 I1 W1 " * (behind + 1)
        words += "F0 I0 W0 F1 I1 W1 " * steady + "I0 W0 F1 I1 W1 " * behind
        words += "I0 I1 " * rank + "I0 W0 " * (behind + 1) + "W1 " * rank + "W0 " * rank
    else:
        words = "F0 " * 2 * behind + "F0 F1 " * before + "I1 W F1 " * behind
        words += "F0 B1 F1 B0 " * (micro_batches - 2 * pp + before) + "B1 F1 B0 " * behind
        ends = ("1 0 " * before).split()
        words += " ".join(("B" if n < before else "I") + chunk for n, chunk in enumerate(ends))
        words += " W I0" * behind + " W" * before
    order, done, waiting = list[Pass](), Counter[str](), list[tuple[str, Pass]]()
    for kind, chunk in ((word[0], word[1:]) for word in words.split()):
        if kind == "W":  # belongs to the first pending I pass, of the given chunk if there is one
            each = next(each for each in waiting if chunk in ("", each[0]))
            waiting.remove(each)
            order.append(each[1]._replace(kind="W"))
            continue
        count = f"{'F' if kind == 'F' else 'B'}{chunk}"
        order.append(Pass(kind, 2 * pp - 1 - rank if chunk == "1" else rank, done[count]))
        done[count] += 1
        if kind == "I":
            waiting.append((chunk, order[-1]))
    return [each for each in order if each.micro_batch < micro_batches]


@lru_cache(maxsize=16)
def pytorch_passes(schedule: str, pp: int, virtual: int, micro_batches: int) -> tuple[tuple[Pass, ...], ...]:
    """Return each pipeline rank's passes in the order of PyTorch's schedules."""
    from torch.distributed.pipelining import schedules

    class StageStub:
        """The attributes of a stage that PyTorch needs to order passes."""

        is_first, is_last, group_rank, group, submod, device = True, False, 0, None, None, "cpu"
        has_backward, num_stages, group_size = True, pp * virtual, pp

        def __init__(self, index: int) -> None:
            self.stage_index = index
            self.stage_index_to_group_rank: dict[int, int] = {}

    class Order(getattr(schedules, CLASSES[schedule])):  # type: ignore[misc]
        def _prepare_schedule_with_comms(self, actions: Any) -> None:
            """Skip the placement of messages: they are not passes, and it takes quadratic time."""

    stages: list[Any] = [StageStub(index) for index in stages_of(schedule, pp, virtual, 0)]
    order_of = Order(stages, micro_batches, loss_fn=None).pipeline_order
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
