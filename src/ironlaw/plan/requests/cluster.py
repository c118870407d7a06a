"""A request on a catalogued cluster: what was said, what is assumed, and the answer."""

from __future__ import annotations

import re
from dataclasses import replace

from ironlaw.catalog.accelerators import Accelerator, taken_for
from ironlaw.catalog.formats import computing_formats, number_format
from ironlaw.catalog.models import taken_model
from ironlaw.catalog.nodes import Cluster, parse_cluster
from ironlaw.errors import UserError, did_you_mean
from ironlaw.plan.adapters import plan_adapters
from ironlaw.plan.cluster.request import ClusterRequest
from ironlaw.plan.cluster.update_cost import update_cost
from ironlaw.plan.emit.trainers import emit, trainer_named
from ironlaw.plan.measured.network import described_node, resized
from ironlaw.plan.request_types import Options, PlanOutcome, RequestedModel
from ironlaw.plan.requests.engine_choice import result_under, software_for
from ironlaw.plan.work import Assumption, settle
from ironlaw.workload.layout import Layout, parse_layout
from ironlaw.workload.moe import IMBALANCE


def plan_on_cluster(requested: RequestedModel, on: str, options: Options) -> PlanOutcome:
    """Plan the given layout, or search; every default taken is among the assumptions."""
    config = requested.config
    if config is not None and config.finetune.adapts:
        return plan_adapters(requested, on, options)
    cluster, layout, assumed = _where(on, options)
    if layout is None and cluster.count == 1 and config and config.train.offload != "none":
        # A config that says where its memory goes says all of a single device.
        layout = Layout(micro_batch=config.micro_batch, recompute=config.recompute, offload=config.train.offload)
    work = settle(requested.model, options.work, cluster.count, config)
    precision = _precision(requested, cluster.accelerator, options, assumed)
    trainer = trainer_named(options.emit) if options.emit else None
    if requested.model.moe is not None and requested.model.moe.capacity_factor is None:
        load = f"{IMBALANCE:g} x the mean on the busiest expert parallel rank"
        why = "no measurement; balancing aims at 1 (arXiv 2408.15664)"
        assumed.append(Assumption("expert load", load, why, "a capacity factor"))
    if not cluster.accelerator.has_flash:
        why = f"FlashAttention has no kernels for {cluster.accelerator.name}"
        assumed.append(Assumption("attention", "scores in memory", why, ""))
    if (other := taken_model(requested.model.name)) and other[1]:
        assumed.append(Assumption("model", other[0], f"'{requested.model.name}' is {other[1]}", ""))
    assumed += [Assumption("left out", part, "the model is built without it", "") for part in requested.left_out]
    if config and config.train.micro_batch and layout is None:
        assumed.append(Assumption("micro-batch", "searched", "the config's own is for one device", "--layout"))
    optimizer = _optimizer(requested, options)
    request = ClusterRequest(
        requested.model, cluster, work.sequence, work.global_batch, precision, optimizer=optimizer, config=config,
        steps=work.steps, assumed=work.assumed + assumed, prices=options.prices, layout=layout,
    )  # fmt: skip
    if trainer:
        trainer.check(request, layout)

        def excluded(candidate: Layout) -> str | None:
            reason = trainer.cannot(candidate, requested.model, optimizer)
            return f"{trainer.name}: {reason}" if reason else None

        request = replace(request, excluded=excluded)
    request, answer = result_under(request, software_for(options.engine, trainer, cluster.accelerator))
    if trainer and answer.fits and answer.layout:
        answer.more["emit"] = emit(trainer.name, request, answer.layout)
    return answer


def _where(on: str, options: Options) -> tuple[Cluster, Layout | None, list[Assumption]]:
    """Cluster and layout; each may say how many accelerators the other leaves open."""
    assumed: list[Assumption] = []
    cluster = _described(parse_cluster(on), options, assumed)
    named = re.sub(r"^\s*[\d_,.]+\s*[x*]|@.*", "", on).strip()
    if (other := taken_for(named)) and other[1]:
        assumed.append(Assumption("accelerator", other[0], f"'{named}': {other[1]}", "--on"))
    if options.layout is None:
        return cluster, None, assumed
    layout = parse_layout(options.layout)
    counted = re.match(r"\s*[\d_,.]+\s*[x*]", on) is not None
    if not counted and layout.accelerators > 1:
        cluster = Cluster(cluster.accelerator, layout.accelerators, cluster.node)
        assumed.append(Assumption("accelerators", f"{cluster.count:,}", "the product of the layout", "--on COUNTx..."))
    rest = layout.tp * layout.pp * layout.cp
    if "dp=" not in options.layout.replace(" ", "") and counted and cluster.count % rest == 0:
        layout = replace(layout, dp=cluster.count // rest)
        assumed.append(Assumption("dp", str(layout.dp), "what tp, pp and cp leave", "--layout"))
    return cluster, layout, assumed


def _described(cluster: Cluster, options: Options, assumed: list[Assumption]) -> Cluster:
    """The cluster with nodes as described; UserError where the words say no network."""
    if options.per_node is not None:
        cluster = replace(cluster, node=resized(cluster.node, options.per_node))
    if options.network is None:
        return cluster
    found, note = described_node(cluster.node, options.network)
    if note and found.fabric == cluster.node.fabric:
        raise UserError(
            f"--network '{options.network}' names no kind of network with a rate: write for example "
            '--network "8x 200 Gb/s RoCE per node, 2:1"'
        )
    if note:
        assumed.append(Assumption("network", f"{found.fabric} at the node's usual rate", "none is said", "--network"))
    return replace(cluster, node=found)


def _precision(requested: RequestedModel, acc: Accelerator, options: Options, assumed: list[Assumption]) -> str:
    """The given precision; else the config's; else the widest 16-bit format the accelerator multiplies fast."""
    said = options.precision
    if said is None and requested.config and requested.config.train.precision != "auto":
        said = requested.config.train.precision
    if said is None:
        said = next((name for name in ("bf16", "fp16") if name in acc.peak_flops_per_second), "bf16")
        assumed.append(Assumption("precision", said, f"usual on {acc.name}", "--precision"))
    if said not in computing_formats():
        raise UserError(f"unknown precision '{said}': {did_you_mean(said, computing_formats())}")
    usable = [name for name in computing_formats() if number_format(name).multiplied_by(acc)]
    if not usable:
        raise UserError(
            f"the catalogue has no rate of products on {acc.name}, for its maker prints none: choose another"
        )
    if said not in usable:
        raise UserError(f"the catalogue has no {said} peak of {acc.name}: use --precision {' or '.join(usable)}")
    return said


def _optimizer(requested: RequestedModel, options: Options) -> str:
    """The given optimizer, else the config's, else AdamW."""
    said = options.optimizer or (requested.config.optimizer.name if requested.config else None)
    if said is None:
        return "adamw"
    return update_cost(said, requested.model).name
