"""Answers to plan requests (`ironlaw plan WHAT --on WHERE`).

WHAT is a config file, a catalogued model, or a Hugging Face config (its file or directory); WHERE is `this`, the
measured machine, a catalogued cluster such as `64xh100-sxm-80gb`, or `any` hardware within limits on time and rent.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from ironlaw.catalog.models import is_model, model_names, released_names
from ironlaw.config import RunConfig, TrainConfig, apply_override, build_config, load_config
from ironlaw.errors import InvalidConfig, UserError, did_you_mean
from ironlaw.machine.profile import load_profile
from ironlaw.model.config import ModelConfig
from ironlaw.plan.request_types import (
    CLUSTER,
    DECODER,
    RANKS,
    Options,
    PlanOutcome,
    RequestedModel,
    assume_missing,
    settle,
    with_work,
)
from ironlaw.plan.step import plan_run


def plan_request(
    what: str | RunConfig,
    *,
    on: str,
    overrides: Sequence[str] = (),
    options: Options | None = None,
    report: Callable[[float, str], None] = lambda share, what: None,
) -> PlanOutcome:
    """Returns the plan. Raises UserError for requests that cannot be planned.

    `report` receives how far a search for hardware is, 0 to 1, and what is tried.
    """
    options = options or Options()
    if isinstance(what, RunConfig):
        return _planned(RequestedModel(what.model, what), on, options, report)
    if re.fullmatch(r"[\w.]+:\w+", what):
        from ironlaw.plan.requests.replicas import plan_traced

        if overrides:
            raise UserError("--set is for a config or a known model: leave it out, and change the module itself")
        return plan_traced(what, on, options)
    try:
        requested = resolve(what, overrides)
    except UserError as refusal:
        from ironlaw.model.huggingface.configs import is_config_file

        if overrides or isinstance(refusal, InvalidConfig) or not is_config_file(Path(what)):
            raise
        from ironlaw.plan.requests.replicas import plan_by_tracing

        return plan_by_tracing(Path(what), refusal, on, options)
    return _planned(requested, on, options, report)


def _planned(requested: RequestedModel, on: str, options: Options, report: Callable[[float, str], None]) -> PlanOutcome:
    if on == "this":
        return _on_this(requested, options)
    options.check_subjects(DECODER, CLUSTER)
    from ironlaw.plan.requests.cheapest import leaves_hardware_open, plan_within_limits
    from ironlaw.plan.requests.cluster import plan_on_cluster

    if leaves_hardware_open(on, options):
        return plan_within_limits(requested, on, options, report)
    return plan_on_cluster(requested, on, options)


def resolve(what: str, overrides: Sequence[str] = ()) -> RequestedModel:
    """Returns the model that `what` names. Raises UserError if there is none."""
    path = Path(what)
    holds_run = path.is_dir() and (path / "config.toml").is_file()
    if path.suffix == ".toml" or holds_run:
        config = load_config(path, overrides)
        return RequestedModel(config.model, config, has_file=True)
    from ironlaw.model.huggingface.configs import is_config_file, left_out, read_config

    if is_config_file(path):
        return replace(_overridden(read_config(path), overrides), left_out=left_out(path))
    if is_model(what):
        return _overridden(ModelConfig.named(what), overrides)
    if path.suffix == ".json" or path.is_dir() or "/" in what:
        raise UserError(f"no config at {what}: give a .toml run config, a config.json, or a directory that holds one")
    raise UserError(f"unknown model '{what}': {did_you_mean(what, [*model_names(), *released_names()])}")


def _overridden(model: ModelConfig, overrides: Sequence[str]) -> RequestedModel:
    """Applies `--set model.KEY=VALUE` and `finetune.KEY=VALUE` (adapters); UserError for others: these need a config
    file."""
    document: dict[str, Any] = {"model": model.model_dump(exclude_none=True)}
    for override in overrides:
        if not override.startswith(("model.", "finetune.")):
            raise UserError(
                f"--set {override}: only model.KEY=VALUE and finetune.KEY=VALUE can be set without a config file"
            )
        apply_override(document, override)
    if any(override.startswith("model.") for override in overrides):
        document["model"]["name"] = f"{model.name} changed"
        model = build_config({"model": document["model"]}, where="--set").model
    if "finetune" not in document:
        return RequestedModel(model)
    config = build_config(document | {"train": {"global_batch": 1}}, where="--set")
    return RequestedModel(model, config if config.finetune.adapts else None)


THIS_SEQUENCE, THIS_BATCH, THIS_STEPS = 1024, 8, 1000
"""Assumed on this machine for a model without a config: small enough for a first try."""


def _on_this(requested: RequestedModel, options: Options) -> PlanOutcome:
    options.check_subjects(DECODER, *([RANKS] if options.ranks else []))
    if options.precision not in (None, "fp32", "bf16"):
        raise UserError(f"--precision {options.precision}: this machine is measured in fp32 and bf16")
    config, assumed = requested.config, []
    if config is None:
        sequence = min(requested.model.context, THIS_SEQUENCE)
        train = TrainConfig(sequence=sequence, global_batch=THIS_BATCH, steps=THIS_STEPS)
        config = RunConfig(model=requested.model, train=train)
        assumed = assume_missing(
            "a first try on one machine",
            ("sequence", options.sequence, f"{sequence:,} tokens", "--seq"),
            ("global batch", options.global_batch, f"{THIS_BATCH} sequences", "--global-batch"),
            ("steps", options.steps or options.tokens, f"{THIS_STEPS:,}", "--steps or --tokens"),
        )
    work = settle(requested.model, options, 1, config)
    settled = with_work(config, work, options)
    if options.ranks:
        from ironlaw.plan.layouts import result_on_ranks

        answer = result_on_ranks(settled, options)
        return replace(answer, more=answer.more | {"assumed": [assumption.to_json() for assumption in assumed]})
    return PlanOutcome.of(plan_run(settled, load_profile()), assumed)
