"""Which layers the stages of a pipeline hold, and which stages its ranks.

layers_of(61, 32, virtual=2)                    # layers of each of 16 x 2 stages
stages_of("1f1b", pp=16, virtual=2, rank=3)     # numbers of a rank's stages: [3, 19]
"""

from __future__ import annotations

from functools import lru_cache

V_SHAPED = ("zbv", "dualpipe")


def ends_lighter(layers: int, chunks: int) -> tuple[int, int] | None:
    """Layers that the first and the last chunk hold less than the others; None where the chunks cannot be made equal.

    The embedding and the output layer count as a layer each where that makes it even (arXiv 2407.21783, 3.3.2).
    """
    for less in ((0, 0), (0, 1), (1, 1)):
        if (layers + sum(less)) % chunks == 0:
            return less
    return None


@lru_cache(maxsize=1024)
def layers_of(layers: int, stages: int, virtual: int) -> tuple[range, ...]:
    """Layers of each stage: as equal as can be. The last and the first are the first to hold one less."""
    less = ends_lighter(layers, stages)
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
    """Stages of a pipeline rank, in order."""
    if schedule in V_SHAPED:
        return [rank, 2 * pp - 1 - rank]
    return [rank + pp * chunk for chunk in range(virtual)]


def rank_of_last(schedule: str, pp: int) -> int:
    """The pipeline rank of the last stage, which has the output layer and the loss."""
    return 0 if schedule in V_SHAPED else pp - 1
