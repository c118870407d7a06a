"""Plans requests that replicas answer, which are not divided but for what ZeRO shares: traced modules and adapters."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path

from ironlaw import units
from ironlaw.catalog.nodes import Cluster
from ironlaw.config import RunConfig
from ironlaw.errors import UserError
from ironlaw.ledger import Ledger
from ironlaw.plan.budget import add_costs, run_seconds
from ironlaw.plan.module import PlannedTarget, accelerator_target, ledger_on, plan_module
from ironlaw.plan.recipe import batch_of, recipe_of
from ironlaw.plan.request_types import (
    ANY,
    REPLICATED,
    TRACED,
    Assumption,
    Options,
    PlanOutcome,
    RequestedModel,
    assume_missing,
    settle,
    with_work,
)
from ironlaw.plan.requests.hardware import assumed_links, parse_hardware
from ironlaw.plan.step import finetuning, with_adapters, with_objective
from ironlaw.plan.totals import fits
from ironlaw.workload.layout import Layout
from ironlaw.workload.module_source import Input, causal_decoder, read_inputs, resolve_module
from ironlaw.workload.program import step
from ironlaw.workload.sections import Recompute

USUAL_SEQUENCE = 2048
"""Default tokens of a sequence: usual for fine-tuning, and short, because recurrent layers are traced step by step."""

OURS = "ironlaw"  # the engine of our own trainer


def _outcome(
    ledger: Ledger, cluster: Cluster | None, steps: int | None, options: Options, assumed: Iterable[Assumption]
) -> PlanOutcome:
    """Returns the plan with the time and the costs of `steps` steps, if they are known."""
    traced = (Assumption(*one) for one in ledger.facts.get("assumed", ()))
    answer = PlanOutcome.of(ledger, [*assumed, *traced])
    if steps is None:
        if options.limits or any(value is not None for value in vars(options.prices).values()):
            raise UserError("prices, --grid, --pue and limits are for a whole run: add --steps")
        return answer
    ledger.facts["steps"] = steps
    ledger.totals["total_seconds"] = run_seconds(ledger.totals["step_seconds"], steps)
    if cluster is None or not answer.fits:
        return answer
    answer = replace(answer, more=answer.more | {"budget": add_costs(ledger, cluster, options.prices)})
    return answer.check_limits(options.limits)


# -- traced modules ----------------------------------------------------------------------------------------------------


def plan_traced(spec: str, on: str, options: Options) -> PlanOutcome:
    """Plans `package.module:factory` for inputs such as `name=8x2048:int64`. Raises UserError without inputs."""
    options.check_subjects(TRACED, *([REPLICATED] if on != "this" else []))
    if not options.inputs:
        raise UserError(f"{spec} needs its inputs: add --input NAME=SIZES:DTYPE, such as tokens=8x2048:int64")
    cluster, layout, assumed = parse_replicas(on, options)
    ledger = plan_module(
        resolve_module(spec), read_inputs(options.inputs), cluster or on, name=spec, real=options.real or None,
        precision=options.precision or "auto", layout=layout, optimizer=options.optimizer or "adamw",
    )  # fmt: skip
    return _outcome(ledger, cluster, options.steps, options, assumed)


def parse_replicas(on: str, options: Options) -> tuple[Cluster | None, Layout | None, list[Assumption]]:
    """Returns the accelerators (None: this machine) and the layout of replicas, if one is given, of a traced module.
    Raises UserError for a layout that divides the module."""
    if on == "this":
        return None, None, []
    if on == ANY:
        raise UserError("hardware is sought for decoders alone: add --on 8xh100-sxm-80gb")
    cluster, layout, assumed = parse_hardware(on, options)
    assumed += assumed_links(cluster)
    if layout is None:
        return cluster, None, assumed
    plain = Layout(dp=layout.dp, zero=layout.zero, shard=layout.shard, accumulation=layout.accumulation)
    reason = "a traced module is replicated whole" if layout != plain else layout.reason_sharding()
    if not reason and layout.dp != cluster.count:
        reason = f"dp = {layout.dp} is not the {cluster.count} accelerators asked for"
    if reason:
        raise UserError(f'--layout "{options.layout}": {reason}: write dp, zero, shard, accumulation as "dp=8 zero=2"')
    return cluster, layout, assumed


def plan_by_tracing(path: Path, refusal: UserError, on: str, options: Options) -> PlanOutcome:
    """Plans a decoder that only transformers can build, by tracing. Raises UserError with `refusal` if that fails."""
    own = "any module can be planned by tracing: ironlaw plan PACKAGE.MODULE:FUNCTION --input NAME=SIZES:DTYPE"
    try:
        build, context = causal_decoder(path)
    except (UserError, ValueError, OSError) as error:
        raise UserError(f"{refusal} ({error}); {own}") from None
    of_clusters = () if on != "this" else ("layout", "network", "per_node", "steps")
    unread = ("ranks", "emit", "engine", "tokens", *of_clusters)
    if given := [f"--{name.replace('_', '-')}" for name in unread if getattr(options, name)]:
        raise UserError(
            f"{refusal}; by tracing one step is planned, on replicas alone: leave {' and '.join(given)} out"
        )
    cluster, layout, assumed = parse_replicas(on, options)
    rounds = (cluster.count if cluster else 1) * ((layout and layout.accumulation) or 1)
    sequence = options.sequence or min(context or USUAL_SEQUENCE, USUAL_SEQUENCE)
    batch = options.global_batch or rounds
    if batch % rounds:
        raise UserError(
            f"--global-batch {batch} is no multiple of a step's {rounds} micro-batches: give --global-batch {rounds}"
        )
    inputs = [Input(name, (batch // rounds, sequence), "int64", "zeros") for name in ("input_ids", "labels")]
    ledger = plan_module(
        build, inputs, cluster or on, precision=options.precision or "auto", name=str(path), repeated=True,
        layout=layout, optimizer=options.optimizer or "adamw",
    )  # fmt: skip
    kind = "a fused kernel of a recurrent layer is faster than the calls that transformers makes without it"
    assumed.append(Assumption("planned by", "tracing", f"{refusal}; {kind}", ""))
    assumed += assume_missing(
        "a first try",
        ("sequence", options.sequence, f"{sequence:,} tokens", "--seq"),
        ("global batch", options.global_batch, f"{batch} sequence{'s' * (batch > 1)}", "--global-batch"),
    )
    return _outcome(ledger, cluster, options.steps, options, assumed)


# -- adapters --------------------------------------------------------------------------------------------------------


def plan_adapters(requested: RequestedModel, cluster: Cluster, options: Options) -> PlanOutcome:
    """Plans fine-tuning with adapters on catalogued accelerators, as Ironlaw's trainer runs it.

    Every block is recomputed if the job does not fit otherwise; a config file sets recomputation itself. Several
    accelerators hold replicas, which also shard the base (ZeRO 3) if it does not fit on one. Raises UserError for other
    layouts.
    """
    assert requested.config is not None
    if options.layout or options.emit or options.network or options.per_node or options.engine not in (None, OURS):
        raise UserError(
            "adapters are planned on replicas alone here, as this trainer runs them: leave --layout, --emit, --engine, "
            "--network and --per-node out"
        )
    config, assumed = adapter_config(requested, options, cluster.count)
    adapters_target(cluster, options)
    modes = [config.recompute.mode] if requested.has_file else ["none", "full"]
    choices = [(mode, zero) for zero in ((0, 3) if cluster.count > 1 else (0,)) for mode in modes]
    for mode, zero in choices:
        config = config.model_copy(update={"recompute": config.recompute.model_copy(update={"mode": mode})})
        ledger = _ledger(config, cluster, zero)
        if fits(ledger):
            break
    ledger.facts["layout"] = str(Layout(dp=cluster.count, zero=zero, recompute=Recompute.parse(mode)))
    assumed += assumed_links(cluster)
    if cluster.count > 1:
        assumed.append(Assumption("layout", f"dp {cluster.count}, ZeRO {zero}", "the first that fits of 0 and 3", ""))
    if not requested.has_file:
        assumed.append(Assumption("recomputation", mode, "the first that fits of none and full", "a config file"))
    return _outcome(ledger, cluster, config.train.steps, options, assumed)


def adapters_target(cluster: Cluster, options: Options) -> PlannedTarget:
    """Returns the target of a plan of adapters. Raises UserError for hardware that this trainer does not run on."""
    if cluster.accelerator.vendor == "google":
        raise UserError("adapters are planned as this trainer runs them, which is not on TPUs")
    return accelerator_target(cluster, options.precision or "auto")


USUAL_BATCH, USUAL_STEPS = 16, 1000
"""Sequences per step with which QLoRA fine-tuned its smaller models (arXiv 2305.14314, appendix B.2), and steps of a
first try."""


def adapter_config(requested: RequestedModel, options: Options, replicas: int) -> tuple[RunConfig, list[Assumption]]:
    """Returns the config of a run of so many replicas, and what it assumes."""
    assert requested.config is not None
    config, train, has_file = requested.config, requested.config.train, requested.has_file
    given = options.sequence or train.sequence
    usual = min(config.model.context, USUAL_SEQUENCE)
    batch = options.global_batch or (train.global_batch if has_file else USUAL_BATCH)
    whole = -(-batch // replicas) * replicas
    if whole != batch and options.global_batch:
        raise UserError(f"--global-batch {batch} is no multiple of {replicas} replicas: give --global-batch {whole}")
    assumed = assume_missing(
        "usual for fine-tuning",
        ("sequence", given, f"{usual:,} tokens", "--seq"),
        ("global batch", options.global_batch or has_file or None, f"{whole} sequences", "--global-batch"),
    )
    assumed += assume_missing(
        "a first try",
        ("steps", options.steps or options.tokens or has_file or None, f"{USUAL_STEPS:,}", "--tokens or --steps"),
    )
    if whole != batch and has_file:
        why = f"{batch} do not divide among {replicas} replicas"
        assumed.append(Assumption("global batch", f"{whole} sequences", why, "--global-batch"))
    work = settle(config.model, replace(options, sequence=given or usual, global_batch=whole), replicas, config)
    micro = train.micro_batch or 1
    if train.micro_batch is None:
        assumed.append(Assumption("micro-batch", "1 sequence", "the least memory", "train.micro_batch"))
    return with_work(config, work, options, micro_batch=min(micro, whole // replicas)), assumed


def _ledger(config: RunConfig, cluster: Cluster, zero: int) -> Ledger:
    target = accelerator_target(cluster, config.train.precision)
    recipe = with_adapters(recipe_of(config, target.precision, cuda=True, gloo=False), config)
    layout = Layout(dp=cluster.count, zero=zero, micro_batch=config.micro_batch)
    program = step(config.model, batch_of(config), layout, recipe)
    program = with_objective(program, config)
    ledger = ledger_on(target, program, config.model.parameters, {
        "model": config.model.model_dump(mode="json", exclude_none=True), "sequence": config.sequence,
        "global_batch": config.train.global_batch, "micro_batch": config.micro_batch,
        "accumulation": program.micro_batches, "steps": config.train.steps,
    })  # fmt: skip
    held = {"weights", "optimizer", "gradients", "average"}
    states = sum(line.bytes or 0.0 for line in ledger.memory if line.component in held)
    left = target.system.memory_bytes - target.system.context_bytes - states
    room = f"{units.bytes_(left)} are left for activations" if left > 0 else f"{units.bytes_(-left)} too much already"
    ledger.facts["finetune"] = f"{finetuning(config, program)}; held throughout: {units.bytes_(states)}, {room}"
    return ledger
