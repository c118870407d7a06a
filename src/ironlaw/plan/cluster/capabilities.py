"""What layouts a training framework can run: its engine lists what it lacks.

lacking(engine("composer-fsdp"), layout)                # "tensor parallelism, pipeline parallelism"; "" if nothing
engines_for(layout)                                     # names of the shipped engines that can run it
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import numpy.typing as npt

from ironlaw.plan.cluster.layout_table import Table, code, layout_table
from ironlaw.plan.engines.engine import TrainingEngine
from ironlaw.plan.engines.named import GENERIC, engines
from ironlaw.workload.layout import SCHEDULES, Layout

Needs = Callable[[Table], npt.NDArray[np.bool_]]


def _schedule(name: str) -> Needs:
    return lambda c: (c["schedule"] == code("schedule", name)) & (c["pp"] > 1)


def _zero(stage: int) -> Needs:
    return lambda c: c["zero"] == stage


CAPABILITIES: dict[str, tuple[str, Needs]] = {
    "tp": ("tensor parallelism", lambda c: c["tp"] > 1),
    "sp": ("sequence parallelism", lambda c: (c["sp"] > 0) & (c["tp"] > 1)),
    "pp": ("pipeline parallelism", lambda c: c["pp"] > 1),
    "virtual": ("virtual stages", lambda c: c["virtual_stages"] > 1),
    "cp": ("context parallelism", lambda c: c["cp"] > 1),
    "ep": ("expert parallelism", lambda c: c["ep"] > 1),
    "shard": ("hybrid sharding", lambda c: c["shard"] > 0),
    "offload": ("offloading to the host", lambda c: c["offload"] != code("offload", "none")),
    "zero1": ("sharding of the optimizer state alone", _zero(1)),
    "zero2": ("sharding of gradients", _zero(2)),
    "zero3": ("sharding of weights", _zero(3)),
    "pp zero2": ("sharding of gradients in a pipeline", lambda c: (c["pp"] > 1) & (c["zero"] >= 2)),
} | {name: (f"the {name} schedule", _schedule(name)) for name in SCHEDULES if name != "1f1b"}
"""Word of an engine's `lacks`: what it means, and which layouts need it."""


def constraints(engine: TrainingEngine, table: Table) -> dict[str, npt.NDArray[np.bool_]]:
    """What the engine lacks, in words, and which of the layouts need it."""
    return {CAPABILITIES[word][0]: CAPABILITIES[word][1](table) for word in engine.lacks}


def lacking(engine: TrainingEngine, layout: Layout) -> str:
    """What this layout needs and the engine lacks, in words; empty where it can run it."""
    found = constraints(engine, layout_table([layout]))
    return ", ".join(words for words, needed in found.items() if needed[0])


def engines_for(layout: Layout) -> list[str]:
    """Shipped engines of known software that can run the layout."""
    return [name for name, engine in engines().items() if name != GENERIC and not lacking(engine, layout)]
