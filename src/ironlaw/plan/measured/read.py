"""Read measured runs from a CSV file, with assumptions for the values that a row does not give.

Columns may be in any order, and unknown ones are ignored; only `REQUIRED` must exist. A row that cannot be planned is
rejected with its reason, without affecting others.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from ironlaw.catalog.accelerators import Accelerator
from ironlaw.catalog.formats import number_format
from ironlaw.catalog.nodes import Cluster, node
from ironlaw.errors import UserError, did_you_mean
from ironlaw.model.config import ModelConfig
from ironlaw.model.dimensions import MoEConfig
from ironlaw.plan.cluster.candidates import TrainingJob, plain_model
from ironlaw.plan.cluster.intervals import format_shares
from ironlaw.plan.engines.engine import TrainingEngine
from ironlaw.plan.engines.named import GENERIC, engine_of_framework
from ironlaw.plan.engines.named import engine as engine_named
from ironlaw.plan.measured.accelerator import accelerator_of, in_rack, named_experts
from ironlaw.plan.measured.network import described_node, resized
from ironlaw.plan.measured.parsing import Cells, read_table
from ironlaw.workload.layout import Layout
from ironlaw.workload.schedule import fewer_layers_at_ends
from ironlaw.workload.sections import Recompute

REQUIRED = ("layers", "hidden", "seq", "accelerator", "accelerators")
"""Columns that every row needs to be planned."""

NODE_WITHOUT_DESCRIPTION = {"a100-sxm-40gb": "dgx-a100"}
"""Node of a row without a description of its network, where published runs differ from usual rented nodes."""


HEAD_SIZE = 128  # where a row gives no heads: usual in recent models
USUAL_VOCAB = 50304  # GPT-2's, padded
SAME_PARAMETERS = 0.04  # relative difference below which `params` decides whether a model is gated and tied


@dataclass(frozen=True)
class Alternative:
    """Other settings that a row may have had where it does not state them, instead of the assumed ones."""

    layout: Mapping[str, Any] = field(default_factory=dict)  # fields of the layout that differ
    job: Mapping[str, Any] = field(default_factory=dict)  # other fields of the job that differ
    constants: Mapping[str, float] = field(default_factory=dict)  # constants of the engine that differ
    weight: float = 1.0  # weight of the difference in the interval: lower for rare settings


@dataclass(frozen=True)
class Run:
    """One row: the job, its engine and cluster, and its measurements."""

    id: str
    group: str
    engine: TrainingEngine
    cluster: Cluster
    precision: str
    job: TrainingJob
    step_seconds: float | None
    peak_bytes: float | None
    ran: bool
    checks: str
    assumed: tuple[str, ...]
    # Settings that are not stated and depend on what fits: no recomputation; without a pipeline, the largest
    # micro-batch; weights sharded only if necessary, for software without a default.
    open: frozenset[str] = frozenset()
    alternatives: tuple[Alternative, ...] = ()
    precisions: Mapping[str, float] = field(default_factory=dict)  # shares of possible formats, where none is stated


Rejected = tuple[str, str, str]
"""Id, group and reason of a row that cannot be planned."""


def read_runs(path: Path, engine: TrainingEngine | None = None) -> tuple[list[Run], list[Rejected]]:
    """Returns the plannable rows, and (id, group, reason) of the others. `engine` replaces that of every row."""
    runs: list[Run] = []
    rejected: list[Rejected] = []
    seen: Counter[str] = Counter()
    names, table = read_table(path)
    missing = [name for name in REQUIRED if name not in names]
    if missing:
        near = did_you_mean(missing[0], names) if names else "the file has no header line"
        raise UserError(f"{path} has no column '{missing[0]}', which every run needs: {near}")
    rows = [Cells(row) for row in table]
    stated = _count_formats(rows)
    for number, cells in enumerate(rows):
        identity = cells.text("id") or f"row {number + 2}"  # the line number in an editor
        seen[identity] += 1
        if seen[identity] > 1:
            identity = f"{identity} ({seen[identity]})"
        try:
            runs.append(_run(identity, cells, engine, stated.get(cells.group(), {})))
        except UserError as error:
            rejected.append((identity, cells.group(), str(error)))
    return runs, rejected


def _count_formats(rows: Iterable[Cells]) -> dict[str, Counter[str]]:
    """Return, by group, the number of rows that state each number format."""
    found: dict[str, Counter[str]] = {}
    for cells in rows:
        with suppress(UserError):  # the same error rejects the row later
            if given := cells.precision():
                found.setdefault(cells.group(), Counter()).update([given])
    return found


def _run(identity: str, cells: Cells, engine: TrainingEngine | None, stated: Mapping[str, int]) -> Run:
    count = cells.needed("accelerators")
    acc, note = accelerator_of(cells.text("accelerator"), cells.whole("per_node"))
    acc, rack = in_rack(acc, cells.text("interconnect"))
    cells.assumed += [text for text in (note, rack) if text]
    attention = cells.attention()
    if attention is None and not acc.has_flash:
        attention = "standard"
        cells.assumed.append(f"attention = standard (FlashAttention has no kernels for {acc.name})")
    engine = engine or _engine(cells, attention or "flash")
    if attention is None:
        attention = engine.attention or engine.default_attention
        cells.assumed.append(f"attention = {attention} (the engine's default)")
    model, flash = _model(cells), attention == "flash"
    job = _job(cells, engine, count, model, flash)
    if cells.recompute() is None and engine.default_recompute != "none":
        cells.assumed.append(f"recompute = {engine.default_recompute} (the engine's default)")
    seconds = cells.measured("step_seconds")
    if seconds is None and (rate := cells.measured("tokens_per_second_per_accelerator")):
        seconds = job.global_batch * job.sequence / (rate * count)
    precisions = {} if cells.precision() else format_shares(engine, acc, stated)
    cluster, precision = _cluster(cells, acc, count), _precision(cells, acc, precisions)
    open_settings = {
        "recompute": cells.recompute() is None and engine.default_recompute == "none",
        "micro_batch": cells.whole("micro_batch") is None and job.layout.pp == 1,
        "zero": cells.zero_stage() is None and engine.name == GENERIC,
    }
    return Run(
        id=identity,
        group=cells.group(),
        engine=engine,
        cluster=cluster,
        precision=precision,
        job=job,
        step_seconds=seconds,
        peak_bytes=cells.measured("peak_bytes"),
        ran=cells.lower("status") in ("", "ok", "success", "completed", "ran", "done", "pass"),
        checks=cells.text("checks") or "memory+time",
        assumed=tuple(cells.assumed),
        open=frozenset(name for name, is_open in open_settings.items() if is_open),
        alternatives=_alternatives(cells, job, acc, engine),
        precisions=precisions,
    )


def _alternatives(cells: Cells, job: TrainingJob, acc: Accelerator, engine: TrainingEngine) -> tuple[Alternative, ...]:
    """Returns other plausible settings of the row's software that affect the time, where the row is silent."""
    layout, found = job.layout, []
    if cells.whole("virtual_stages") is None and layout.pp > 1:
        possible = layout.virtual_stages == 1 and "virtual" not in engine.lacks
        other = _max_virtual_stages(job.model.layers, layout, job.global_batch) if possible else 1
        found += [Alternative({"virtual_stages": other})] if other != layout.virtual_stages else []
    if cells.whole("micro_batch") is None:
        per_replica = job.global_batch / layout.dp
        found += [
            Alternative({"micro_batch": size})
            for size in (1, 2, 4)
            if size != layout.micro_batch and per_replica % size == 0
        ]
    if cells.recompute() is None and not engine.recomputes_by_block:
        again = "none" if engine.default_recompute == "full" else "full"
        found.append(Alternative({"recompute": again}, weight=0.5))
    if cells.attention() is None and not engine.attention and engine.default_attention == "standard" and acc.has_flash:
        found.append(Alternative(job={"flash": True}))
    if engine.tp_overlap and layout.tp > 1:
        hidden = engine.on(acc.generation).tp_hidden
        found.append(Alternative(constants={"tp_hidden": engine.tp_overlap if hidden < engine.tp_overlap else 0.0}))
    return tuple(found)


LONG_BUBBLE = 0.1
"""Share of a step's compute above which users are assumed to shorten a pipeline bubble by virtual stages."""


def _max_virtual_stages(layers: int, layout: Layout, global_batch: float) -> int:
    """Returns the most virtual stages of at least two layers that a pipeline can have; 1 if none."""
    pp = layout.pp
    if global_batch / (layout.dp * layout.micro_batch) % pp:
        return 1
    most = max((layers + 2) // pp // 2, 1)  # the first and the last may have one less
    return max(v for v in range(1, most + 1) if v == 1 or fewer_layers_at_ends(layers, pp * v) is not None)


def _engine(cells: Cells, attention: str) -> TrainingEngine:
    framework = cells.text("framework")
    try:
        return engine_of_framework(framework, attention)
    except UserError:
        reason = f"framework '{framework}' is not known" if framework else "no framework is given"
        cells.assumed.append(f"engine = {GENERIC} ({reason})")
        return engine_named(GENERIC)


def _job(cells: Cells, engine: TrainingEngine, count: int, model: ModelConfig, flash: bool) -> TrainingJob:
    ep = cells.given("ep", 1)
    if ep > 1 and model.moe is None:
        raise UserError(
            "ep > 1 is a mixture of experts, and neither its columns nor its model's name say how many experts, nor "
            "how many work: experts, experts_per_token and expert_ffn would"
        )
    dp, tp, pp, cp = _degrees(cells, count)
    etp = _expert_tp(cells, ep, dp * cp, tp, engine.default_etp)
    imbalance = cells.number("imbalance", 1)
    if imbalance is None and ep > 1 and engine.default_imbalance:
        imbalance = cells.assume("imbalance", engine.default_imbalance, "as in the vendor's published runs")
    micro_batch, global_batch = _batch(cells, dp, pp)
    zero, sp = cells.zero_stage(), cells.flag("sequence_parallel")
    layout = Layout(
        dp=dp, tp=tp, pp=pp, cp=cp, ep=ep, etp=etp, micro_batch=micro_batch,
        sp=(engine.default_sp if sp is None else sp) and tp > 1,
        recompute=Recompute.parse(cells.recompute() or engine.default_recompute),
    )  # fmt: skip
    virtual = _virtual(cells, engine, model.layers, layout, global_batch)
    if pp * virtual > model.layers:
        cells.assumed.append(f"some of the {pp} x {virtual} stages hold no layer: there are {model.layers}")
    if global_batch < dp * micro_batch:
        raise UserError(f"global_batch {global_batch} is less than dp {dp} x micro_batch {micro_batch}")
    if zero == 3 and pp > 1 and engine.pipeline_keeps:
        zero = cells.assume("zero", 2, "this software keeps weights gathered over a step in pipelines")
    if zero is None and pp > 1 and engine.default_zero == 3 and not engine.pipeline_keeps:
        zero = cells.assume("zero", 1, "the engine's default is 3, which pipelines would gather for every micro-batch")
    if zero is None:
        zero = cells.assume("zero", engine.default_zero, "the engine's default")
    layout = replace(layout, zero=zero, virtual_stages=virtual)
    return TrainingJob(model, layout, cells.needed("seq"), global_batch, flash, imbalance or 0.0)


def _degrees(cells: Cells, count: int) -> tuple[int, int, int, int]:
    """Returns dp, tp, pp and cp, whose product is `count`. One of tp and pp that is missing follows from the others."""
    given = {name: cells.whole(name) for name in ("dp", "tp", "pp", "cp")}
    missing, others = [n for n in ("tp", "pp") if given[n] is None], math.prod(n or 1 for n in given.values())
    follows = given["dp"] is not None and len(missing) == 1 and not count % others
    tp, pp, cp = (
        cells.given(name, count // others, "accelerators / the other degrees")
        if follows and name in missing
        else cells.given(name, 1)
        for name in ("tp", "pp", "cp")
    )
    model_parallel = tp * pp * cp
    if count % model_parallel:
        raise UserError(f"tp {tp} x pp {pp} x cp {cp} does not divide the {count} accelerators of the run")
    dp = cells.given("dp", count // model_parallel, "accelerators / (tp pp cp)")
    if dp * model_parallel != count:
        reason = f"dp {dp} x tp {tp} x pp {pp} x cp {cp} is not the {count} accelerators of the run"
        if dp != count / (tp * pp):  # some tables count context parallel ranks as data parallel ones
            raise UserError(reason)
        dp = cells.assume("dp", count // model_parallel, f"{reason}: cp taken out of dp")
    return dp, tp, pp, cp


def _batch(cells: Cells, dp: int, pp: int) -> tuple[int, int]:
    """Returns the sequences of a micro-batch and of a step."""
    batch, micro = cells.whole("global_batch"), cells.whole("micro_batch")
    if micro is None and batch is None:
        raise UserError("micro_batch and global_batch are not given")
    if micro is None:
        assert batch is not None
        micro = 1 if pp == 1 else cells.assume("micro_batch", 1, "assumed")
    return micro, cells.assume("global_batch", dp * micro, "one micro-batch") if batch is None else batch


def _virtual(cells: Cells, engine: TrainingEngine, layers: int, layout: Layout, global_batch: int) -> int:
    """Returns the row's virtual stages; else the most possible where users of this software shorten a long bubble."""
    given = cells.whole("virtual_stages")
    if given is not None:
        return given
    bubble = (layout.pp - 1) * layout.dp * layout.micro_batch / global_batch
    most = _max_virtual_stages(layers, layout, global_batch) if engine.interleaves and bubble > LONG_BUBBLE else 1
    why = f"without any the bubble would cost {bubble:.0%}, and this software has them" if most > 1 else "assumed"
    return cells.assume("virtual_stages", most, why)


def _expert_tp(cells: Cells, ep: int, replicas: int, tp: int, usual: int) -> int | None:
    """Returns the ranks an expert is split over, None for tp: the row's, else the engine's `usual`, else a number that
    leaves enough ranks for ep."""
    given = cells.whole("etp")
    if given is None and usual and usual < tp and ep > 1 and not replicas * tp / usual % ep:
        return cells.assume("etp", usual, "the engine's default")
    if not replicas * tp / (given or tp) % ep:
        return given
    if given is None and not replicas * tp % ep:
        return cells.assume("etp", 1, f"ep {ep} is more than dp x cp = {replicas} allow")
    raise UserError(f"ep {ep} ranks cannot be taken from dp x cp x tp = {replicas * tp}")


def _model(cells: Cells) -> ModelConfig:
    """Returns a model with the row's sizes, which need not be those of a buildable model."""
    hidden = cells.needed("hidden")
    heads = cells.given("heads", max(hidden // HEAD_SIZE, 1), f"heads of {HEAD_SIZE}")
    if hidden < heads:
        raise UserError(f"heads {heads} are more than hidden {hidden}")
    sizes: dict[str, Any] = {
        "layers": cells.needed("layers"), "hidden": hidden, "heads": heads,
        "kv_heads": min(cells.given("kv_heads", heads), heads), "head_size": hidden / heads,
        "ffn": cells.given("ffn", 4 * hidden), "vocab": cells.given("vocab", USUAL_VOCAB),
        "context": cells.needed("seq"),
    }  # fmt: skip
    sizes |= _experts(cells, sizes) if cells.whole("experts") else _named_experts(cells, sizes)
    moe, latent = sizes.get("moe"), sizes.get("latent")
    if latent is not None:
        sizes |= {"kv_heads": None, "head_size": None}
    gated, tied = cells.flag("gated_ffn"), cells.flag("tied")
    usual = sizes["ffn"] != 4 * hidden  # gated networks are narrower (8/3) or odd
    experts = moe is not None, moe is not None and moe.shared_experts > 0
    options = [
        plain_model((g, t, *experts, latent is not None, latent is not None and latent.query_rank is not None))
        .model_copy(update=sizes)
        for g in ([usual, not usual] if gated is None else [gated])
        for t in ([False, True] if tied is None else [tied])
    ]  # fmt: skip
    return options[0] if len(options) == 1 else _closest_model(cells, options, gated, tied)


def _closest_model(cells: Cells, options: list[ModelConfig], gated: bool | None, tied: bool | None) -> ModelConfig:
    """Chooses gated and tied where the row does not state them: by `params` if one option matches, else by shape."""
    wanted = cells.number("params", 0)
    best, why = options[0], "by the width of its feed-forward network"
    if wanted:
        off = [abs(option.model_copy(update={"context": 1}).parameters / wanted - 1) for option in options]
        if min(off) < SAME_PARAMETERS:
            best, why = options[off.index(min(off))], "what its params say"
    for name, given, value in (("gated_ffn", gated, best.gated_ffn), ("tied", tied, best.tied)):
        if given is None:
            cells.assumed.append(f"{name} = {value} ({why})")
    return best


def _experts(cells: Cells, sizes: dict[str, Any]) -> dict[str, Any]:
    """Returns a mixture of experts from columns beyond the schema."""
    layers, shared = sizes["layers"], cells.whole("shared_ffn")
    moe: dict[str, Any] = {
        "experts": cells.needed("experts"), "experts_per_token": cells.needed("experts_per_token"),
        "expert_ffn": cells.given("expert_ffn", sizes["ffn"], "the model's ffn"),
        "shared_experts": int(bool(shared)), "shared_ffn": shared, "groups_per_token": 1,
        "dense_layers": layers - cells.given("expert_layers", layers, "all of them"),
    }  # fmt: skip
    return {"moe": MoEConfig.model_construct(**moe)}


def _named_experts(cells: Cells, sizes: dict[str, Any]) -> dict[str, Any]:
    """Returns the fields of a mixture of experts known by the model's name, for a row without their columns."""
    known = named_experts(cells.text("model"), sizes["hidden"], sizes["layers"])
    if known is None:
        return {}
    name, found = known
    moe = found["moe"]
    cells.assumed.append(
        f"experts = {moe.experts}, {moe.experts_per_token} per token, of width {moe.expert_ffn} "
        f"in {moe.layers(sizes['layers'])} layers (its name says {name}"
        + (", whose attention is latent)" if "latent" in found else ")")
    )
    return found


def _precision(cells: Cells, acc: Accelerator, shares: Mapping[str, float]) -> str:
    """Returns the row's number format, or the likeliest, or the one at whose rate the accelerator runs it."""
    wanted = cells.precision()
    if wanted is None:
        wanted = max(shares, key=lambda name: shares[name])
        mixture = ", ".join(f"{share:.0%} {name}" for name, share in shares.items())
        cells.assumed.append(f"precision = {mixture} (what runs of this group and software state)")
    known = acc.peak_flops_per_second
    other = number_format(wanted).rate_of
    if number_format(wanted).peak in known:
        return wanted
    if other not in known:
        raise UserError(f"{acc.name} does not compute in {wanted}: it has peaks for {', '.join(sorted(known))}")
    cells.assumed.append(f"precision = {other} ({acc.name} has no peak for {wanted})")
    return other


def _cluster(cells: Cells, acc: Accelerator, count: int) -> Cluster:
    """Returns the accelerator's usual node with the size and network that the row describes."""
    usual = node(NODE_WITHOUT_DESCRIPTION.get(acc.name, acc.default_node))
    per_node = cells.whole("per_node")
    if per_node:
        usual = resized(usual, per_node)
    described, note = described_node(usual, cells.text("interconnect"))
    if note and count > usual.scale_up_accelerators:
        cells.assumed.append(note)
    return Cluster(acc, count, described)
