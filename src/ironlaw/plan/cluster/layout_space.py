"""Every layout whose numbers divide, for a search to plan; and the reasons why the others cannot be formed.

    constraints = {}
    table = possible_layouts(model, 64, sequence=8192, global_batch=1024, ruled_out=constraints)
    saving(table, savings(model, offload=False)[0])     # the same layouts, trading time for memory

Memory and step time of a layout are planned later. An engine lists the features that its software lacks:

    lacking(engine("composer-fsdp"), layout)        # "tensor parallelism, pipeline parallelism"; "" if nothing
    engines_for(layout, model)                      # names of the shipped engines that can run it
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import product

import numpy as np
import numpy.typing as npt

from ironlaw.errors import UserError, did_you_mean
from ironlaw.model.config import ModelConfig
from ironlaw.plan.cluster.layout_table import ROW, Table, code, layout_table
from ironlaw.plan.engines.engine import TrainingEngine
from ironlaw.plan.engines.named import GENERIC, engines
from ironlaw.plan.recipe import not_trained_here
from ironlaw.workload.layout import CP_KINDS, OFFLOAD, SCHEDULES, Layout
from ironlaw.workload.schedule import V_SHAPED, fewer_layers_at_ends, reason_unfilled
from ironlaw.workload.sizes import divisors

MAX_TP = 64  # and never beyond an island or a node: no measured run shows how much would be hidden there
MAX_CP = 64
MAX_MICRO_BATCH = 64
GRID_CONSTRAINTS = (
    "tensor parallelism across the network",
    "heads or feed-forward width not divisible by tp",
    "key/value heads not divisible by tp",
    "more pipeline stages than layers",
    "sequence too short for cp",
    "global batch not divisible by dp",
)
"""Reasons that rule out a whole grid (dp, tp, pp, cp) before its layouts are formed."""

EXPERT_CONSTRAINT = "experts not divisible by ep, or their width by tp"
"""Reason that rules out a grid with one degree of expert parallelism, folded or not."""

MICRO_BATCH_CONSTRAINT = f"micro-batches above {MAX_MICRO_BATCH} sequences"
SCHEDULE_CONSTRAINT = "number of micro-batches not what the pipeline schedule needs"
"""Reasons that rule out a layout before it is planned."""


UNITS = dict.fromkeys(GRID_CONSTRAINTS, "grids") | {EXPERT_CONSTRAINT: "grids with ep"}
"""What a constraint counts, if not layouts."""


def grids(
    model: ModelConfig, count: int, sequence: int, global_batch: int, ruled_out: dict[str, int], widest_tp: int
) -> Iterator[tuple[int, ...]]:
    """Yields every (dp, tp, pp, cp) with product `count` that can run; count the others in `ruled_out` by reason."""
    # Feed-forward widths that tensor parallelism splits however the experts are divided.
    widths = [*([model.ffn_size] if model.dense_layers else []), model.shared_ffn_size]
    for tp, pp, cp in product(divisors(count), repeat=3):
        if count % (tp * pp * cp):
            continue
        dp = count // (tp * pp * cp)
        broken = (
            tp > widest_tp,
            model.heads % tp or any(width % tp for width in widths),
            model.key_value_heads % tp and tp % model.key_value_heads,
            pp > model.layers,
            sequence % (cp * tp) or cp > MAX_CP or (sequence // cp < 1024 and cp > 1),
            global_batch % dp,
        )
        reason = next((reason for reason, is_so in zip(GRID_CONSTRAINTS, broken, strict=True) if is_so), None)
        if reason is None:
            yield dp, tp, pp, cp
        else:
            _count(ruled_out, reason, 1)


def possible_layouts(
    model: ModelConfig,
    count: int,
    sequence: int,
    global_batch: int,
    ruled_out: dict[str, int],
    widest_tp: int = MAX_TP,
    groups: bool = True,
    cp_kinds: tuple[str, ...] = ("ring",),
) -> Table:
    """Returns every combination that can run, without those that trade time for memory (`savings`).

    `cp_kinds`: kinds of context parallel attention to try."""
    parts = [np.zeros(0, dtype=ROW)]
    for dp, tp, pp, cp in grids(model, count, sequence, global_batch, ruled_out, widest_tp):
        per_replica = global_batch // dp
        sharding = _shardings(dp, cp, groups)
        experts = _expert_parallel(model, dp * cp, tp, ruled_out)
        kinds = [code("cp_kind", kind) for kind in usable_kinds(model, sequence, cp, tp, cp_kinds)]
        # These do not depend on the micro-batch or the schedule.
        ways = [
            (zero, shard, sp, kind, ep, etp)
            for (zero, shard), sp, kind, (ep, etp) in product(
                sharding, (0, 1) if tp > 1 else (0,), kinds or [0], experts
            )
            if (sp or not etp) and (shard or dp) * cp * (tp if etp else 1) % ep == 0
        ]
        chunks = _pipelines(model.layers, pp)
        for micro_batch in divisors(per_replica):
            if micro_batch > MAX_MICRO_BATCH:
                _count(ruled_out, MICRO_BATCH_CONSTRAINT, len(chunks) * len(ways))
                continue
            accumulation = per_replica // micro_batch
            allowed = [(v, name) for v, name in chunks if not reason_unfilled(SCHEDULES[name], pp, v, accumulation)]
            _count(ruled_out, SCHEDULE_CONSTRAINT, (len(chunks) - len(allowed)) * len(ways))
            if ways and allowed:
                fixed = {"dp": dp, "tp": tp, "pp": pp, "cp": cp, "micro_batch": micro_batch}
                parts.append(_rows(fixed, ways, allowed))
    return np.concatenate(parts)


_WAY = ("zero", "shard", "sp", "cp_kind", "ep", "etp")
_PIPELINE = ("virtual_stages", "schedule")


def _rows(fixed: dict[str, int], ways: Sequence[tuple[int, ...]], pipelines: Sequence[tuple[int, int]]) -> Table:
    """Returns every way with every pipeline; the columns of `fixed` are the same in all rows."""
    rows = np.empty(len(ways) * len(pipelines), dtype=ROW)
    for name, value in (fixed | NO_SAVING).items():
        rows[name] = value
    for name, values in zip(_WAY, np.array(ways).T, strict=True):
        rows[name] = np.repeat(values, len(pipelines))
    for name, values in zip(_PIPELINE, np.array(pipelines).T, strict=True):
        rows[name] = np.tile(values, len(ways))
    return rows


def _count(ruled_out: dict[str, int], constraint: str, number: int) -> None:
    if number:
        ruled_out[constraint] = ruled_out.get(constraint, 0) + number


def _expert_parallel(model: ModelConfig, replicas: int, tp: int, ruled_out: dict[str, int]) -> list[tuple[int, int]]:
    """Returns the (ep, etp) possible on `replicas` = dp x cp groups of tp ranks; count those the experts rule out.

    An expert is split over tp like the dense layers (etp 0), or folded and whole (etp 1); other values need `--layout`.
    """
    if model.moe is None:
        return [(1, 0)]
    plain = [(ep, 0) for ep in divisors(replicas)]
    folded = [(ep, 1) for ep in divisors(replicas * tp)] if tp > 1 else []
    allowed = [(ep, 0) for ep, _ in plain if model.moe.experts % ep == 0 and model.expert_ffn_size % tp == 0]
    allowed += [(ep, 1) for ep, _ in folded if model.moe.experts % ep == 0]
    _count(ruled_out, EXPERT_CONSTRAINT, len(plain) + len(folded) - len(allowed))
    return allowed


def usable_kinds(model: ModelConfig, sequence: int, cp: int, tp: int, kinds: Iterable[str]) -> list[str]:
    """Returns those of `kinds` of context parallel attention that can run."""
    tried = {kind: Layout(cp=cp, tp=tp, cp_kind=kind) for kind in kinds}
    return [kind for kind, layout in tried.items() if layout.reason_context(model, sequence) is None]


Saving = dict[str, int]
"""Columns of a layout that trade time for memory."""

NO_SAVING: Saving = {"recompute": code("recompute", "none"), "every": 1, "offload": code("offload", "none")}
MAX_EVERY = 8  # sparser recomputation saves less memory than the width of the memory interval


def savings(model: ModelConfig, offload: bool) -> list[Saving]:
    """Returns every recomputation, with offloading or without, that trades time for memory."""
    partly = [("full", k) for k in divisors(model.layers) if 1 < k <= MAX_EVERY]
    again = [("none", 1), ("selective", 1), *partly, ("full", 1)]
    found = [
        {"recompute": code("recompute", word), "every": every, "offload": code("offload", kind)}
        for kind in (OFFLOAD[1:] if offload else OFFLOAD[:1])
        for word, every in again
    ]
    return [one for one in found if one != NO_SAVING]


def saving(table: Table, columns: Saving) -> Table:
    """Returns the same layouts with these columns."""
    result = table.copy()
    for name, value in columns.items():
        result[name] = value
    return result


def _shardings(dp: int, cp: int, hybrid: bool) -> list[tuple[int, int]]:
    """Returns the (zero, shard) of dp replicas: no sharding, over all of them, or (`hybrid`) over groups of them."""
    if dp * cp == 1:
        return [(0, 0)]
    groups = [0] + [d for d in divisors(dp)[:-1] if hybrid and d * cp > 1]
    return [(0, 0)] + [(zero, shard) for zero in (1, 2, 3) for shard in groups]


def _pipelines(layers: int, pp: int) -> list[tuple[int, int]]:
    """Returns the (virtual stages, schedule) of a pipeline, without GPipe: as slow as 1F1B, it never holds less."""
    if pp == 1:
        return [(1, code("schedule", "1f1b"))]
    most = layers // pp + 1
    even = [v for v in range(1, most + 1) if v == 1 or fewer_layers_at_ends(layers, pp * v) is not None]
    found = [(v, code("schedule", name)) for v in even for name in ("1f1b", "zb")]
    return found + [(2, code("schedule", name)) for name in V_SHAPED if 2 in even]


# -- what software lacks --------------------------------------------------------------------------------------------


Needs = Callable[[Table], npt.NDArray[np.bool_]]


CAPABILITIES: dict[str, tuple[str, Needs]] = {
    "tp": ("tensor parallelism", lambda c: c["tp"] > 1),
    "sp": ("sequence parallelism", lambda c: (c["sp"] > 0) & (c["tp"] > 1)),
    "pp": ("pipeline parallelism", lambda c: c["pp"] > 1),
    "virtual": ("virtual stages", lambda c: c["virtual_stages"] > 1),
    "cp": ("context parallelism", lambda c: c["cp"] > 1),
    "ep": ("expert parallelism", lambda c: c["ep"] > 1),
    "shard": ("hybrid sharding", lambda c: c["shard"] > 0),
    "offload": ("offloading to the host", lambda c: c["offload"] != code("offload", "none")),
    "zero1": ("sharding of the optimizer state alone", lambda c: c["zero"] == 1),
    "zero2": ("sharding of gradients", lambda c: c["zero"] == 2),
    "zero3": ("sharding of weights", lambda c: c["zero"] == 3),
    "pp zero2": ("sharding of gradients in a pipeline", lambda c: (c["pp"] > 1) & (c["zero"] >= 2)),
} | {
    name: (f"{name} schedule", lambda c, name=name: (c["schedule"] == code("schedule", name)) & (c["pp"] > 1))
    for name in SCHEDULES
    if name != "1f1b"
}
"""For each word of an engine's `lacks`: its meaning, and a mask of the layouts that need it."""


def lacked(engine: TrainingEngine, table: Table) -> dict[str, npt.NDArray[np.bool_]]:
    """Returns what the engine lacks, in words, each with a mask of the layouts that need it."""
    if unknown := set(engine.lacks) - CAPABILITIES.keys():
        word = min(unknown)
        raise UserError(f"engine {engine.name} lacks '{word}', which is nothing: {did_you_mean(word, CAPABILITIES)}")
    found = {CAPABILITIES[word][0]: CAPABILITIES[word][1](table) for word in engine.lacks}
    kinds = () if "cp" in engine.lacks else set(CP_KINDS) - set(engine.cp_kinds)
    return found | {f"cp_kind={kind}": table["cp_kind"] == code("cp_kind", kind) for kind in sorted(kinds)}


def lacking(engine: TrainingEngine, layout: Layout) -> str:
    """Returns what this layout needs and the engine lacks, in words; empty if the engine can run it."""
    found = lacked(engine, layout_table([layout]))
    return ", ".join(words for words, needed in found.items() if needed[0])


def engines_for(layout: Layout, model: ModelConfig, precision: str = "", optimizer: str = "adamw") -> list[str]:
    """Returns the names of the shipped engines of known software that can run the layout."""
    known = {name: engine for name, engine in engines().items() if name != GENERIC and not lacking(engine, layout)}
    ours = not_trained_here(layout, model, precision, optimizer) is None
    return [name for name, engine in known.items() if ours or engine.fused]
