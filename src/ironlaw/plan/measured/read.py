"""Read measured runs from a CSV file, with assumptions for the values that a row does not give.

Columns may be in any order, and unknown ones are ignored; only `REQUIRED` must exist. A row that cannot be planned is
rejected with its reason, without affecting others.
"""

from __future__ import annotations

import difflib
import math
import re
from collections import Counter
from collections.abc import Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from ironlaw.catalog.accelerators import Accelerator
from ironlaw.catalog.formats import number_format
from ironlaw.catalog.nodes import Cluster, node
from ironlaw.errors import UserError, did_you_mean, shortened
from ironlaw.model.config import ModelConfig
from ironlaw.model.dimensions import MoEConfig
from ironlaw.plan.cluster.candidates import TrainingJob, plain_model
from ironlaw.plan.cluster.intervals import format_shares
from ironlaw.plan.engines.engine import TrainingEngine
from ironlaw.plan.engines.named import GENERIC, engine_of_framework
from ironlaw.plan.engines.named import engine as engine_named
from ironlaw.plan.measured.accelerator import accelerator_of, in_rack, named_experts
from ironlaw.plan.measured.network import described_node, resized
from ironlaw.plan.measured.parsing import EXCESS, Cells, read_table
from ironlaw.workload.layout import Layout, parse_layout
from ironlaw.workload.schedule import V_SHAPED, fewer_layers_at_ends
from ironlaw.workload.sections import Recompute

REQUIRED = ("layers", "hidden", "seq", "accelerator", "accelerators")
"""Columns that every row needs to be planned."""

NODE_WITHOUT_DESCRIPTION = {"a100-sxm-40gb": "dgx-a100"}
"""Node of a row without a description of its network, where published runs differ from usual rented nodes."""


HEAD_SIZE = 128  # where a row gives no heads: usual in recent models
USUAL_VOCAB = 50304  # GPT-2's, padded
COLUMNS = set("""
    id group source notes framework model params layers hidden heads kv_heads head_dim ffn gated_ffn vocab tied seq
    global_batch micro_batch accelerator accelerators per_node interconnect tp pp virtual_stages schedule cp cp_kind ep
    etp dp zero shard imbalance sequence_parallel recompute attention precision step_seconds peak_bytes
    tokens_per_second_per_accelerator experts experts_per_token expert_ffn shared_ffn expert_layers status checks
""".split())  # fmt: skip  # noqa: SIM905
"""Columns that a table may have."""

SAME_PARAMETERS = 0.04  # relative difference below which `params` decides what a row leaves open of the model
MAX_STEP_TOKENS = 5e8  # of a step: eight times the largest published batch; more are a batch counted in tokens
STATED = ("shard", "schedule", "cp_kind")  # columns that are keys of a layout, with the same values
SAME_RATE = 1.2  # ratio of step time and throughput above which they are not of one run


@dataclass(frozen=True)
class Alternative:
    """Other settings that a row may have had where it does not state them, instead of the assumed ones."""

    layout: Mapping[str, Any] = field(default_factory=dict)  # fields of the layout that differ
    job: Mapping[str, Any] = field(default_factory=dict)  # other fields of the job that differ
    constants: Mapping[str, Any] = field(default_factory=dict)  # constants of the engine that differ
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


def unread_columns(path: Path) -> list[str]:
    """Returns the columns that have no meaning here, each with the nearest that has one."""
    names, _ = read_table(path)
    unknown = [name for name in names if name and name not in COLUMNS]
    near = {name: difflib.get_close_matches(name, COLUMNS.difference(names), 1) for name in unknown}
    return [name + (f" ({near[name][0]}?)" if near[name] else "") for name in unknown]


def _count_formats(rows: Iterable[Cells]) -> dict[str, Counter[str]]:
    """Return, by group, the number of rows that state each number format."""
    found: dict[str, Counter[str]] = {}
    for cells in rows:
        with suppress(UserError):  # the same error rejects the row later
            if given := cells.precision():
                found.setdefault(cells.group(), Counter()).update([given])
    return found


def _step_seconds(cells: Cells, job: TrainingJob, count: int) -> float | None:
    """Returns the measured seconds of a step, from the throughput where the row does not give them."""
    seconds, rate = cells.measured("step_seconds"), cells.measured("tokens_per_second_per_accelerator")
    by_rate = job.global_batch * job.sequence / (rate * count) if rate else None
    if seconds and by_rate and not 1 / SAME_RATE < seconds / by_rate < SAME_RATE:
        batch = f"{job.global_batch:g} sequences of {job.sequence:g} tokens"
        raise UserError(
            f"step_seconds {seconds:g} is not what tokens_per_second_per_accelerator {rate:g} is with {batch}"
        )
    return seconds or by_rate


def _run(identity: str, cells: Cells, engine: TrainingEngine | None, stated: Mapping[str, int]) -> Run:
    if extra := cells.text(EXCESS):
        raise UserError(f"a cell too many, '{shortened(extra)}': quote text that holds the separator")
    count = cells.needed("accelerators")
    acc, note = accelerator_of(cells.text("accelerator"), cells.whole("per_node"))
    acc, rack = in_rack(acc, cells.text("interconnect"))
    cells.assumed += [text for text in (note, rack) if text]
    attention = cells.attention()
    if attention is None and not acc.has_flash:
        attention = "standard"
        cells.assumed.append(f"attention = standard (FlashAttention has no kernels for {acc.name})")
    engine = engine or _engine(cells, attention or "flash")
    if re.search("deepep|hybridep", cells.lower("framework") + cells.lower("notes")):
        engine = replace(engine, rows_sent="ranks")
    if attention is None:
        attention = engine.attention or engine.default_attention
        cells.assumed.append(f"attention = {attention} (the engine's default)")
    cluster = _cluster(cells, acc, count)
    model, flash = _model(cells), attention == "flash"
    job = _job(cells, engine, cluster, model, flash)
    if cells.recompute() is None and engine.default_recompute != "none":
        cells.assumed.append(f"recompute = {engine.default_recompute} (the engine's default)")
    precisions = {} if cells.precision() else format_shares(engine, acc, stated)
    precision = _precision(cells, acc, precisions)
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
        step_seconds=_step_seconds(cells, job, count),
        peak_bytes=cells.measured_bytes("peak_bytes"),
        ran=cells.ran(),
        checks=cells.checks(),
        assumed=tuple(cells.assumed),
        open=frozenset(name for name, is_open in open_settings.items() if is_open),
        alternatives=_alternatives(cells, job, acc, engine),
        precisions=precisions,
    )


def _alternatives(cells: Cells, job: TrainingJob, acc: Accelerator, engine: TrainingEngine) -> tuple[Alternative, ...]:
    """Returns other plausible settings of the row's software that affect the time, where the row is silent."""
    layout, found = job.layout, []
    if cells.whole("virtual_stages") is None and layout.pp > 1 and layout.schedule not in V_SHAPED:
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
    if layout.ep > 1 and engine.rows_sent == "choices":
        found.append(Alternative(constants={"rows_sent": "ranks", "ep_hidden_across": 0.8}))
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


def _job(cells: Cells, engine: TrainingEngine, cluster: Cluster, model: ModelConfig, flash: bool) -> TrainingJob:
    ep = cells.given("ep", 1)
    if ep > 1 and model.moe is None:
        raise UserError(
            "ep > 1 is a mixture of experts, and neither its columns nor its model's name say how many experts, nor "
            "how many work: experts, experts_per_token and expert_ffn would"
        )
    dp, tp, pp, cp = _degrees(cells, cluster.count)
    etp = _expert_tp(cells, ep, dp * cp, tp, engine.default_etp)
    imbalance = cells.number("imbalance", 1)
    if imbalance is None and ep > 1 and engine.default_imbalance:
        imbalance = cells.assume("imbalance", engine.default_imbalance, "as in the vendor's published runs")
    micro_batch, global_batch = _batch(cells, dp, pp, cluster.count)
    zero, sp = cells.zero_stage(), cells.flag("sequence_parallel")
    stated = parse_layout(" ".join(f"{name}={cells.lower(name)}" for name in STATED if cells.text(name)))
    layout = replace(
        stated, dp=dp, tp=tp, pp=pp, cp=cp, ep=ep, etp=etp, micro_batch=micro_batch,
        sp=(engine.default_sp if sp is None else sp) and tp > 1,
        recompute=Recompute.parse(cells.recompute() or engine.default_recompute),
    )  # fmt: skip
    virtual = _virtual(cells, engine, model.layers, layout, global_batch)
    if pp * virtual > model.layers:
        cells.assumed.append(f"some of the {pp} x {virtual} stages hold no layer: there are {model.layers}")
    if global_batch < dp * micro_batch:
        raise UserError(f"global_batch {global_batch} is less than dp {dp} x micro_batch {micro_batch}")
    if layout.shard is None and cells.is_hybrid():
        within = math.gcd(max(cluster.node.accelerators // (tp * cp), 1), dp)
        layout = replace(layout, shard=cells.assume("shard", within, "hybrid sharding is within a node"))
    if zero == 3 and pp > 1 and engine.pipeline_keeps:
        zero = cells.assume("zero", 2, "this software keeps weights gathered over a step in pipelines")
    if zero is None and pp > 1 and engine.default_zero == 3 and not engine.pipeline_keeps:
        zero = cells.assume("zero", 1, "the engine's default is 3, which pipelines would gather for every micro-batch")
    if zero is None:
        zero = cells.assume("zero", engine.default_zero, "the engine's default")
    layout = replace(layout, zero=zero, virtual_stages=virtual)
    if reason := layout.reason_sharding():
        raise UserError(reason)
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


def _batch(cells: Cells, dp: int, pp: int, count: int) -> tuple[int, int]:
    """Returns the sequences of a micro-batch and of a step."""
    batch, micro = cells.whole("global_batch"), cells.whole("micro_batch")
    if micro is None and batch is None:
        raise UserError("micro_batch and global_batch are not given")
    if batch is not None and batch * cells.needed("seq") > MAX_STEP_TOKENS:
        raise UserError(f"global_batch counts sequences: {batch} of {cells.needed('seq')} tokens are no published step")
    if micro is None:
        assert batch is not None
        micro = 1 if pp == 1 else cells.assume("micro_batch", 1, "assumed")
    if batch is None:
        seconds, rate = cells.measured("step_seconds"), cells.measured("tokens_per_second_per_accelerator")
        rounds = seconds * rate * count / (cells.needed("seq") * dp * micro) if seconds and rate else 1.0
        why = "what step_seconds and the throughput say" if seconds and rate else "one micro-batch"
        batch = cells.assume("global_batch", max(round(rounds), 1) * dp * micro, why)
    return micro, batch


def _virtual(cells: Cells, engine: TrainingEngine, layers: int, layout: Layout, global_batch: int) -> int:
    """Returns the row's virtual stages; else the most possible where users of this software shorten a long bubble."""
    given = cells.whole("virtual_stages")
    if given is None and layout.schedule in V_SHAPED:
        given = layout.virtual_stages
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
    hidden, size = cells.needed("hidden"), cells.whole("head_dim")
    heads = cells.given("heads", max(hidden // (size or HEAD_SIZE), 1), f"heads of {size or HEAD_SIZE}")
    kv_heads = cells.given("kv_heads", heads)
    if hidden < heads:
        raise UserError(f"heads {heads} are more than hidden {hidden}")
    if heads < kv_heads:
        raise UserError(f"kv_heads {kv_heads} are more than heads {heads}")
    sizes: dict[str, Any] = {
        "layers": cells.needed("layers"), "hidden": hidden, "heads": heads,
        "kv_heads": kv_heads, "head_size": size or hidden / heads,
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
    return _closest_model(cells, options, gated, tied)


def _closest_model(cells: Cells, options: list[ModelConfig], gated: bool | None, tied: bool | None) -> ModelConfig:
    """Chooses what the row does not state of gated, tied and the size of a head: by `params` if an option has them,
    with or without learned positions, else by shape."""
    wanted, first, why = cells.number("params", 0) or math.inf, options[0], "by the width of its feed-forward network"

    def off(model: ModelConfig) -> float:
        return min(abs(m.parameters / wanted - 1) for m in (model, model.model_copy(update={"context": 1})))

    best, sizes = first, [first.head_size]
    if first.head_size is not None and cells.whole("head_dim") is None:
        sizes.append(HEAD_SIZE)
    for size in sizes:
        closest = min((option.model_copy(update={"head_size": size}) for option in options), key=off)
        if off(closest) < SAME_PARAMETERS:
            best, why = closest, "what its params say"
            break
    found = {"gated_ffn": gated, "tied": tied, "head_dim": True if best.head_size == first.head_size else None}
    values = {"gated_ffn": best.gated_ffn, "tied": best.tied, "head_dim": best.head_size}
    cells.assumed += [f"{name} = {values[name]} ({why})" for name, given in found.items() if given is None]
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
