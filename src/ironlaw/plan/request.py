"""From what a user asks (`ironlaw plan WHAT --on WHERE`) to an answer.

WHAT is a config file, a catalogued model, or a Hugging Face config (its file or directory); WHERE is `this`, the
measured machine, or a catalogued cluster such as `64xh100-sxm-80gb`.
"""

from __future__ import annotations

import re
import tomllib
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from ironlaw.catalog.accelerators import Accelerator
from ironlaw.catalog.models import model_names
from ironlaw.catalog.nodes import Cluster, parse_cluster
from ironlaw.config import RunConfig, TrainConfig, build_config, load_config
from ironlaw.errors import UserError, did_you_mean
from ironlaw.machine.profile import load_profile
from ironlaw.model.config import ModelConfig
from ironlaw.model.huggingface import is_config_file, read_config
from ironlaw.plan.answer import Answer, answer_on_cluster
from ironlaw.plan.ask import Ask
from ironlaw.plan.budget import Prices
from ironlaw.plan.checked import DEFAULT_ON, RUNS
from ironlaw.plan.cluster import DEFAULT_ENGINE
from ironlaw.plan.emit import ENGINE_OF_TRAINER, Trainer, emit, trainer_named
from ironlaw.plan.engine import engine as engine_named
from ironlaw.plan.estimate import fits, plan_run
from ironlaw.plan.layout import Layout, parse_layout
from ironlaw.plan.work import Assumption, Wishes, settle

__all__ = ["Answer", "Options", "plan_on_this", "plan_request"]

WIDE = ("fp32", "tf32")
PRECISIONS = ("bf16", "fp16", "fp8", "fp8_block", "mxfp8", "nvfp4")


@dataclass(frozen=True)
class Options:
    """What else can be said; None: not said."""

    work: Wishes = field(default_factory=Wishes)
    precision: str | None = None
    engine: str | None = None
    layout: str | None = None
    emit: str | None = None
    prices: Prices = field(default_factory=Prices)


@dataclass(frozen=True)
class Subject:
    """The model, and the run around it where a config file gives one."""

    model: ModelConfig
    config: RunConfig | None = None


def plan_request(
    what: str, *, on: str, overrides: Sequence[str] = (), layout: str | None = None, options: Options | None = None
) -> Answer:
    """The planned answer. UserError for whatever cannot be planned."""
    options = options or Options()
    options = replace(options, layout=layout or options.layout)
    subject = resolve(what, overrides)
    if on == "this":
        return _on_this(subject, options)
    return _on_cluster(subject, on, options)


def resolve(what: str, overrides: Sequence[str] = ()) -> Subject:
    """The model behind WHAT."""
    path = Path(what)
    holds_run = path.is_dir() and (path / "config.toml").is_file()
    if path.suffix == ".toml" or holds_run:
        config = load_config(path, overrides)
        return Subject(config.model, config)
    if is_config_file(path):
        return Subject(_overridden(read_config(path), overrides))
    if what in model_names():
        return Subject(_overridden(ModelConfig.named(what), overrides))
    if re.fullmatch(r"[\w.]+:\w+", what):
        raise UserError(f"'{what}' names a torch module: traced modules are not planned on clusters yet")
    if path.suffix == ".json" or path.is_dir() or "/" in what:
        raise UserError(f"no config at {what}: give a .toml run config, a config.json, or a directory that holds one")
    raise UserError(f"unknown model '{what}': {did_you_mean(what, model_names())}")


def _overridden(model: ModelConfig, overrides: Sequence[str]) -> ModelConfig:
    """The model with `--set model.KEY=VALUE`; other sections belong to a config file."""
    if not overrides:
        return model
    values: dict[str, Any] = model.model_dump(exclude_none=True)
    for override in overrides:
        key, _, text = override.partition("=")
        if not key.startswith("model."):
            raise UserError(f"--set {override}: only model.KEY=VALUE can be set without a config file")
        try:
            values[key.removeprefix("model.")] = tomllib.loads(f"value = {text}")["value"]
        except tomllib.TOMLDecodeError:
            values[key.removeprefix("model.")] = text
    return build_config({"model": values | {"name": f"{model.name} changed"}}, where="--set").model


def _on_cluster(subject: Subject, on: str, options: Options) -> Answer:
    cluster, layout, assumed = _where(on, options)
    work = settle(subject.model, options.work, cluster.count, subject.config)
    precision = _precision(subject, cluster.accelerator, options, assumed)
    trainer = trainer_named(options.emit) if options.emit else None
    engine = _engine(options, trainer, cluster.accelerator, assumed)
    if subject.model.sliding_window and subject.model.sliding_window < work.sequence:
        window = f"{subject.model.sliding_window:,} tokens"
        assumed.append(Assumption("attention", "full", f"its window of {window} is not used", "--seq, or fewer tokens"))
    if subject.config and subject.config.train.micro_batch and layout is None:
        assumed.append(Assumption("micro-batch", "searched", "the config's own is for one device", "--layout"))
    work = replace(work, assumed=work.assumed + assumed)
    ask = Ask(subject.model, cluster, work, precision, engine, options.prices, layout)
    if trainer:
        ask = replace(ask, excluded=lambda candidate: trainer.cannot(candidate, subject.model))
        if layout is not None and (reason := trainer.cannot(layout, subject.model)):
            raise UserError(f"layout '{layout}' cannot be written for {trainer.name}: {reason}")
    answer = answer_on_cluster(ask)
    if trainer and answer.fits:
        values = answer.more["layout"]
        chosen = Layout(**{key: value for key, value in values.items() if key != "text"})
        answer.more["emit"] = emit(trainer.name, ask, chosen)
    return answer


def _where(on: str, options: Options) -> tuple[Cluster, Layout | None, list[Assumption]]:
    """Cluster and layout; each may say how many accelerators the other leaves open."""
    cluster = parse_cluster(on)
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


def _precision(subject: Subject, acc: Accelerator, options: Options, assumed: list[Assumption]) -> str:
    """The given precision; else the config's; else the widest 16-bit format the accelerator multiplies fast."""
    said = options.precision
    if said is None and subject.config and subject.config.train.precision != "auto":
        said = subject.config.train.precision
    if said in WIDE:
        raise UserError(
            f"{said} is not planned on clusters, whose memory is counted in 16 and 8 bits: use bf16 or fp16"
        )
    if said is None:
        said = next((name for name in ("bf16", "fp16") if name in acc.peak_flops_per_second), "bf16")
        assumed.append(Assumption("precision", said, f"usual on {acc.name}", "--precision"))
    if said not in PRECISIONS:
        raise UserError(f"unknown precision '{said}': {did_you_mean(said, PRECISIONS)}")
    return said


def _engine(options: Options, trainer: Trainer | None, acc: Accelerator, assumed: list[Assumption]) -> str:
    """The given engine; else that of the trainer to emit for; else one checked on this generation, or the default."""
    if options.engine is not None:
        return engine_named(options.engine).name
    known = DEFAULT_ON.get(acc.generation)
    if trainer:
        name, reason = ENGINE_OF_TRAINER[trainer.name], f"whose constants describe {trainer.name}"
    elif known:
        name, reason = known, f"checked on {RUNS[known][acc.generation]} runs on {acc.generation}"
    else:
        name, reason = DEFAULT_ENGINE, "today's Megatron core in NVIDIA's tuning"
    assumed.append(Assumption("engine", name, reason, "--engine"))
    return name


def plan_on_this(config: RunConfig) -> Answer:
    """The plan of a config on the measured machine."""
    ledger = plan_run(config, load_profile())
    return Answer(ledger, fits(ledger))


THIS_SEQUENCE, THIS_BATCH, THIS_STEPS = 1024, 8, 1000
"""Assumed on this machine, where a model comes without a config: small enough to be tried."""


def _on_this(subject: Subject, options: Options) -> Answer:
    for name in ("layout", "engine", "emit"):
        if getattr(options, name):
            raise UserError(f"--{name} is for clusters: add --on, for example --on 8xh100-sxm-80gb")
    if options.precision not in (None, "fp32", "bf16"):
        raise UserError(f"--precision {options.precision}: this machine is measured in fp32 and bf16")
    config, assumed = subject.config, []
    if config is None:
        sequence = min(subject.model.context, THIS_SEQUENCE)
        train = TrainConfig(sequence=sequence, global_batch=THIS_BATCH, steps=THIS_STEPS)
        config = RunConfig(model=subject.model, train=train)
        given = options.work
        wanted = (
            ("sequence", given.sequence, f"{sequence:,} tokens", "--seq"),
            ("global batch", given.global_batch, f"{THIS_BATCH} sequences", "--global-batch"),
            ("steps", given.steps or given.tokens, f"{THIS_STEPS:,}", "--steps or --tokens"),
        )
        reason = "a first try on one machine"
        assumed = [Assumption(name, value, reason, flag) for name, said, value, flag in wanted if said is None]
    work = settle(subject.model, options.work, 1, config)
    changed = {"sequence": work.sequence, "global_batch": work.global_batch, "steps": work.steps}
    if options.precision:
        changed["precision"] = options.precision  # type: ignore[assignment]
    document = config.model_dump(exclude_none=True)
    document["train"] |= changed
    answer = plan_on_this(build_config(document, where="the options"))
    return replace(answer, more={"assumed": [assumption.to_json() for assumption in assumed]})
