"""A request on a catalogued cluster: what was said, what is assumed, and the answer."""

from __future__ import annotations

import re
from dataclasses import replace

from ironlaw.catalog.accelerators import Accelerator
from ironlaw.catalog.formats import computing_formats, number_format
from ironlaw.catalog.nodes import Cluster, parse_cluster
from ironlaw.config import RunConfig
from ironlaw.errors import UserError, did_you_mean
from ironlaw.plan.answer import Answer, Options
from ironlaw.plan.answers.cluster import answer_on_cluster
from ironlaw.plan.ask import Ask
from ironlaw.plan.cluster.checked import DEFAULT_ON, checked_runs
from ironlaw.plan.cluster.estimate import DEFAULT_ENGINE
from ironlaw.plan.cluster.experts import IMBALANCE
from ironlaw.plan.cluster.update_cost import update_cost
from ironlaw.plan.emit.trainers import ENGINE_OF_TRAINER, Trainer, check_words, emit, trainer_named
from ironlaw.plan.engines.named import engine as engine_named
from ironlaw.plan.measured.network import described_node, resized
from ironlaw.plan.subject import Subject
from ironlaw.plan.work import Assumption, settle
from ironlaw.workload.layout import Layout, parse_layout


def plan_on_cluster(subject: Subject, on: str, options: Options) -> Answer:
    """Plan the given layout, or search; every default taken is among the assumptions."""
    cluster, layout, assumed = _where(on, options)
    if layout is None and cluster.count == 1 and subject.config and subject.config.train.offload != "none":
        layout = _of_config(subject.config)  # a config that says where its memory goes says all of a single device
    work = settle(subject.model, options.work, cluster.count, subject.config)
    precision = _precision(subject, cluster.accelerator, options, assumed)
    trainer = trainer_named(options.emit) if options.emit else None
    engine = _engine(options, trainer, cluster.accelerator, assumed)
    if subject.model.moe is not None and subject.model.moe.capacity_factor is None:
        load = f"{IMBALANCE:g} x the mean on the busiest expert parallel rank"
        assumed.append(
            Assumption(
                "expert load", load, "no measurement; balancing aims at 1 (arXiv 2408.15664)", "a capacity factor"
            )
        )
    assumed += [Assumption("left out", part, "the model is built without it", "") for part in subject.left_out]
    if subject.config and subject.config.train.micro_batch and layout is None:
        assumed.append(Assumption("micro-batch", "searched", "the config's own is for one device", "--layout"))
    work = replace(work, assumed=work.assumed + assumed)
    optimizer = _optimizer(subject, options, assumed)
    ask = Ask(subject.model, cluster, work, precision, engine, options.prices, layout, optimizer)
    if trainer:
        check_words(trainer, precision, optimizer)

        def excluded(candidate: Layout) -> str | None:
            reason = trainer.cannot(candidate, subject.model, optimizer)
            return f"{trainer.name}: {reason}" if reason else None

        ask = replace(ask, excluded=excluded)
        if layout is not None and (reason := trainer.cannot(layout, subject.model, optimizer)):
            raise UserError(f"layout '{layout}' cannot be written for {trainer.name}: {reason}")
    answer = answer_on_cluster(ask)
    if trainer and answer.fits:
        values = answer.more["layout"]
        chosen = Layout(**{key: value for key, value in values.items() if key != "text"})
        answer.more["emit"] = emit(trainer.name, ask, chosen)
    return answer


def _where(on: str, options: Options) -> tuple[Cluster, Layout | None, list[Assumption]]:
    """Cluster and layout; each may say how many accelerators the other leaves open."""
    cluster = _described(parse_cluster(on), options)
    assumed: list[Assumption] = []
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


def _described(cluster: Cluster, options: Options) -> Cluster:
    """The cluster with nodes as described; UserError where the words say no network."""
    if options.per_node is not None:
        cluster = replace(cluster, node=resized(cluster.node, options.per_node))
    if options.network is None:
        return cluster
    found = described_node(cluster.node, options.network)
    if found == cluster.node:
        raise UserError(
            f"--network '{options.network}' names no kind of network with a rate: write for example "
            '--network "8x 200 Gb/s RoCE per node, 2:1"'
        )
    return replace(cluster, node=found)


def _of_config(config: RunConfig) -> Layout:
    """What a config says of one device, in the words of a layout."""
    wanted = config.recompute
    recompute = {"every": f"every:{wanted.every}", "budget": f"budget:{wanted.budget}"}.get(wanted.mode, wanted.mode)
    return Layout(micro_batch=config.micro_batch, recompute=recompute, offload=config.train.offload)


def _precision(subject: Subject, acc: Accelerator, options: Options, assumed: list[Assumption]) -> str:
    """The given precision; else the config's; else the widest 16-bit format the accelerator multiplies fast."""
    said = options.precision
    if said is None and subject.config and subject.config.train.precision != "auto":
        said = subject.config.train.precision
    if said is None:
        said = next((name for name in ("bf16", "fp16") if name in acc.peak_flops_per_second), "bf16")
        assumed.append(Assumption("precision", said, f"usual on {acc.name}", "--precision"))
    if said not in computing_formats():
        raise UserError(f"unknown precision '{said}': {did_you_mean(said, computing_formats())}")
    usable = [name for name in computing_formats() if number_format(name).multiplied_by(acc)]
    if said not in usable:
        raise UserError(f"the catalogue has no {said} peak of {acc.name}: use --precision {' or '.join(usable)}")
    return said


def _optimizer(subject: Subject, options: Options, assumed: list[Assumption]) -> str:
    """The given optimizer, else the config's, else AdamW."""
    said = options.optimizer or (subject.config.optimizer.name if subject.config else None)
    if said is None:
        return "adamw"
    return update_cost(said, subject.model).name


def _engine(options: Options, trainer: Trainer | None, acc: Accelerator, assumed: list[Assumption]) -> str:
    """The given engine; else that of the trainer to emit for; else one checked on this generation, or the default."""
    if options.engine is not None:
        return engine_named(options.engine).name
    known = DEFAULT_ON.get(acc.generation)
    if trainer:
        name, reason = ENGINE_OF_TRAINER[trainer.name], f"whose constants describe {trainer.name}"
    elif known:
        name, reason = known, f"checked on {checked_runs()[known][acc.generation]} runs on {acc.generation}"
    elif acc.vendor == "google":
        name, reason = "paxml", "JAX, which runs on TPUs; its constants are of H100s"
    elif acc.vendor != "nvidia":
        name, reason = "generic", f"no runs on {acc.generation} are known"
    else:
        name, reason = DEFAULT_ENGINE, "today's Megatron core in NVIDIA's tuning"
    assumed.append(Assumption("engine", name, reason, "--engine"))
    return name
