"""Fine-tuning with adapters on catalogued accelerators: the trainer's own program, timed by the device's constants.

    ironlaw plan llama3-70b --on rtx-4090 --set finetune.method=qlora
    ironlaw plan llama3-70b --on 2xrtx-4090 --set finetune.method=qlora --seq 512

Nothing is recomputed where that fits, else every block; a config file says which itself. Several are replicas, which
share the base too (ZeRO 3) where one does not hold it; what they send passes behind the computation while that lasts.
"""

from __future__ import annotations

from ironlaw import units
from ironlaw.catalog.nodes import Cluster, parse_cluster
from ironlaw.config import RunConfig
from ironlaw.errors import UserError
from ironlaw.ledger import Ledger
from ironlaw.plan.module import accelerator_target, ledger_on
from ironlaw.plan.recipe import batch_of, recipe_of
from ironlaw.plan.request_types import Options, PlanOutcome, RequestedModel
from ironlaw.plan.step import finetuning, with_adapters, with_objective
from ironlaw.plan.totals import fits
from ironlaw.plan.work import Assumption
from ironlaw.workload.layout import Layout
from ironlaw.workload.program import step

USUAL_SEQUENCE = 2048


def plan_adapters(requested: RequestedModel, on: str, options: Options) -> PlanOutcome:
    """UserError for layouts of other kinds and for models whose adapters are not planned."""
    assert requested.config is not None
    if requested.model.latent is not None or requested.model.moe is not None:
        raise UserError("adapters of latent attention and experts are not planned: give a dense model")
    if options.layout or options.emit:
        raise UserError("adapters are planned on replicas alone here: leave --layout and --emit out")
    cluster = parse_cluster(on)
    config, assumed = _settled(requested.config, options, cluster.count)
    # A config file says itself what is recomputed.
    modes = [config.recompute.mode] if requested.has_file else ["none", "full"]
    choices = [(mode, zero) for zero in ((0, 3) if cluster.count > 1 else (0,)) for mode in modes]
    for mode, zero in choices:
        config = config.model_copy(update={"recompute": config.recompute.model_copy(update={"mode": mode})})
        ledger = _ledger(config, cluster, zero, options.precision or config.train.precision)
        if fits(ledger):
            break
    if cluster.count > 1:
        assumed.append(Assumption("layout", f"dp {cluster.count}, ZeRO {zero}", "the first that fits of 0 and 3", ""))
    if not requested.has_file:
        assumed.append(Assumption("recomputation", mode, "the first that fits of none and full", "a config file"))
    return PlanOutcome.of(ledger, assumed)


def _settled(config: RunConfig, options: Options, replicas: int) -> tuple[RunConfig, list[Assumption]]:
    assumed: list[Assumption] = []
    train = config.train
    sequence = options.sequence or train.sequence
    if sequence is None:
        sequence = min(config.model.context, USUAL_SEQUENCE)
        assumed.append(Assumption("sequence", f"{sequence:,} tokens", "usual for fine-tuning", "--seq"))
    batch = options.global_batch or train.global_batch
    if batch % replicas:
        why = f"{batch} do not divide among {replicas} replicas"
        assumed.append(Assumption("global batch", f"{replicas} sequences", why, "--batch"))
        batch = replicas
    micro = train.micro_batch or 1
    if train.micro_batch is None:
        assumed.append(Assumption("micro-batch", "1 sequence", "the least memory", "train.micro_batch"))
    update = {"sequence": sequence, "global_batch": batch, "micro_batch": min(micro, batch // replicas)}
    return config.model_copy(update={"train": train.model_copy(update=update)}), assumed


def _ledger(config: RunConfig, cluster: Cluster, zero: int, precision: str) -> Ledger:
    target = accelerator_target(cluster, precision)
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
