"""Combinations of settings that a run does not support, each with its error message, in the order they are checked."""

from __future__ import annotations

from typing import Any

from ironlaw.catalog.formats import precision_recipe
from ironlaw.schema import Refusals
from ironlaw.workload.optimizers import MATRIX_OPTIMIZERS, USED_BY, leaves_no_matrix

Run = Any
"""A `RunConfig`, untyped because its module imports this one."""


def refusals(run: Run) -> Refusals:
    yield from _of_steps(run)
    if run.finetune.adapts:
        yield from _of_adapters(run, f'finetune.method = "{run.finetune.method}"')
    if run.train.qat is not None:
        yield from _of_rounded_weights(run, f'train.qat = "{run.train.qat}"')
    yield from _of_objective(run, f'objective.kind = "{run.objective.kind}"')
    yield from _of_lengths(run)


def _of_steps(run: Run) -> Refusals:
    train, checkpoint, communication, model = run.train, run.checkpoint, run.communication, run.model
    layout = run.layout
    validated = run.evaluation.every and checkpoint.every % run.evaluation.every == 0
    written = checkpoint.every and checkpoint.keep_every % checkpoint.every == 0
    yield from (
        (run.finetune.model_fields_set and "method" not in run.finetune.model_fields_set,
         'the keys of [finetune] are for adapters: add finetune.method = "lora", or leave them out'),
        (run.objective.model_fields_set - {"teacher"} and "kind" not in run.objective.model_fields_set,
         'the keys of [objective] are for a kind: add objective.kind = "distillation" or "dpo", or leave them out'),
        (run.micro_batch > train.global_batch,
         f"train.micro_batch = {run.micro_batch} is larger than train.global_batch = {train.global_batch}: use "
         f"train.micro_batch = {train.global_batch}"),
        (train.noise_scale_every and run.accumulation == 1,
         "train.noise_scale_every compares the gradients of a micro-batch and of the whole batch: use "
         f"train.micro_batch = {max(1, train.global_batch // 2)} or less, of a larger train.global_batch"),
        (model.moe and _rounds(run),
         f'train.precision = "{train.precision}" does not reach experts yet: use train.precision = "bf16"'),
        (train.loss == "chunked" and not model.logits_are_a_product,
         'train.loss = "chunked" takes logits that are a product, and these have '
         f'{"a bias" if model.head_bias else "a cap"}: use "full"'),
        (leaves_no_matrix(model, run.optimizer),
         f"galore projects matrices with both sides longer than optimizer.rank = {run.optimizer.rank}, and this model "
         'has none: lower it, or use optimizer.name = "adamw"'),
        (run.schedule.kind == "exponential" and not run.schedule.min_lr_fraction,
         'schedule.kind = "exponential" never reaches 0: use schedule.min_lr_fraction = 0.01'),
        (layout and layout.virtual_stages > 1 and layout.pp == 1,
         "layout.virtual_stages are of a pipeline: leave it out, or use layout.pp = 2 or more"),
        (layout and layout.ep > 1 and not model.moe,
         f"layout.ep = {layout and layout.ep} shares out experts, and this model has none: leave it out"),
        (checkpoint.keep_best and checkpoint.every and not validated,
         "checkpoint.keep_best needs a validation at every checkpoint: use evaluation.every = "
         f"{checkpoint.every} or a divisor of it"),
        (checkpoint.keep_every and not written,
         f"checkpoint.keep_every = {checkpoint.keep_every} is not a multiple of checkpoint.every = "
         f"{checkpoint.every}: no checkpoint would be kept for it"),
        (communication.sites and not communication.local_steps,
         "communication.sites average their weights: say how often with communication.local_steps"),
        (communication.local_steps and communication.gradients == "powersgd",
         'communication.gradients = "powersgd" does not go with communication.local_steps: use "fp32" or "bf16"'),
        (communication.local_steps and train.average_decay is not None,
         "train.average_decay has no one model to follow with communication.local_steps: leave one out"),
        (train.noise_scale_every and (communication.local_steps or communication.gradients == "powersgd"),
         "train.noise_scale_every needs the gradients that all ranks share: leave out communication.local_steps and "
         '"powersgd"'),
        (train.compile == "graphs" and _ranks(run) > 1,
         'train.compile = "graphs" is not supported with several ranks yet: use train.compile = "on"'),
    )  # fmt: skip


def _of_adapters(run: Run, asked: str) -> Refusals:
    communication, saved, optimizer = run.communication, run.finetune.modules_to_save, run.optimizer.name
    tp, pp, ep = (run.layout.tp, run.layout.pp, run.layout.ep) if run.layout is not None else (1, 1, 1)
    yield from (
        (run.model.moe and tp * ep > 1,
         f"{asked} does not divide experts: use dp, cp, pp or zero of [layout]"),
        (tp > 1 and run.model.latent, f"{asked} does not divide latent attention: use dp, cp, pp or zero of [layout]"),
        (communication.local_steps or communication.gradients == "powersgd",
         f"{asked} has little to send: leave out communication.local_steps and powersgd"),
        (saved and tp * pp > 1,
         "finetune.modules_to_save trains whole tables on each rank: use dp, cp or zero of [layout]"),
        (saved and run.objective.kind == "dpo",
         'the reference of objective.kind = "dpo" is the base: leave finetune.modules_to_save out'),
        (_ranks(run) > 1 and run.finetune.dropout,
         f"{asked} draws its dropout on each rank anew: use finetune.dropout = 0 on several"),
        (_rounds(run), f'{asked} multiplies in 16 bits or more: use train.precision = "bf16"'),
        (optimizer in MATRIX_OPTIMIZERS,
         f'{asked} trains narrow matrices, for which {optimizer} is not meant: use optimizer.name = "adamw"'),
        (run.recompute.mode in ("selective", "budget"),
         f'{asked} recomputes whole blocks: use recompute.mode = "full" or "every"'),
        (run.train.offload != "none", f'{asked} leaves little to offload: use train.offload = "none"'),
    )  # fmt: skip


def _of_rounded_weights(run: Run, asked: str) -> Refusals:
    optimizer = run.optimizer.name
    yield from (
        (_ranks(run) > 1, f"{asked} trains in one process: start it without torchrun, and leave out [layout]"),
        (run.finetune.adapts, f'{asked} trains the matrices that adapters leave alone: use finetune.method = "none"'),
        (run.model.moe, f"{asked} does not reach experts: use a dense model"),
        (_rounds(run), f'{asked} rounds weights itself: use train.precision = "bf16"'),
        (optimizer in MATRIX_OPTIMIZERS,
         f'{asked} keeps pruned weights at 0, and {optimizer} moves them: use optimizer.name = "adamw"'),
    )  # fmt: skip


def _of_objective(run: Run, asked: str) -> Refusals:
    kind, whole = run.objective.kind, run.objective.needs_logits
    yield from (
        ((run.objective.teacher is not None) != (kind == "distillation"),
         'objective.kind = "distillation" and objective.teacher = "DIR" go together: give both'),
        (run.data.pairs != (kind == "dpo"), 'objective.kind = "dpo" and data.format = "pairs" go together: give both'),
        (kind == "dpo" and run.train.start_from is None,
         f"{asked} improves a model that is there: say which with model.from"),
        (whole and _ranks(run) > 1,
         f"{asked} is computed by one process: start it without torchrun, and leave out [layout]"),
        (whole and run.model.moe, f"{asked} balances no experts: use a dense model"),
        (whole and run.train.loss == "chunked", f'{asked} compares whole logits: use train.loss = "full"'),
    )  # fmt: skip


def _of_lengths(run: Run) -> Refusals:
    context, steps = run.model.context, run.train.steps
    yield from (
        (run.sequence > context,
         f"train.sequence = {run.sequence} is longer than model.context = {context}: use train.sequence = {context} or "
         "a larger model.context"),
        (run.warmup_steps > steps,
         f"schedule.warmup_steps = {run.warmup_steps} is longer than the run, train.steps = {steps}: the learning rate "
         f"would never reach optimizer.lr; use schedule.warmup_steps = {steps // 10}"),
    )  # fmt: skip


def _ranks(run: Run) -> int:
    """As far as the config says."""
    return run.layout.ranks if run.layout is not None else 1


def _rounds(run: Run) -> bool:
    """Whether the precision rounds the operands of matrix products to a narrow format, such as FP8."""
    return run.train.precision != "auto" and precision_recipe(run.train.precision) is not None


_ADAPTERS = ("lora", "qlora", "dora")
_DECAYING = ("cosine", "linear", "inverse_sqrt", "exponential", "step", "wsd")
USED_WITH: tuple[tuple[str, tuple[str, ...], str], ...] = (
    ("schedule.kind", ("step",), "schedule: step_every step_factor"),
    ("schedule.kind", ("wsd",), "schedule: decay_fraction"),
    ("schedule.kind", _DECAYING, "schedule: min_lr_fraction"),
    ("schedule.lr_scaling", ("linear", "sqrt"), "schedule: reference_batch"),
    *(("optimizer.name", names, f"optimizer: {key}") for key, names in USED_BY.items()),
    ("finetune.method", _ADAPTERS, "optimizer: adapter_lr_scale"),
    ("finetune.method", _ADAPTERS, "finetune: rank alpha dropout targets modules_to_save start_from"),
    ("train.precision", ("fp16", "auto"), "scaler: initial growth growth_steps backoff"),
    ("recompute.mode", ("every",), "recompute: every"),
    ("recompute.mode", ("selective",), "recompute: keep"),
    ("recompute.mode", ("budget",), "recompute: budget"),
    ("objective.kind", ("distillation",), "objective: temperature weight hidden"),
    ("objective.kind", ("dpo",), "objective: beta"),
    ("communication.gradients", ("powersgd",), "communication: rank start_step"),
    ("communication.local_steps", (), "communication: outer_lr outer_momentum"),
    ("tracking.to", (), "tracking: every project name"),
    ("data.tokenizer", (), "data: end_of_text"),
    ("layout.zero", (), "layout: shard"),
    ("layout.tp", (), "layout: sp"),
    ("layout.pp", (), "layout: schedule"),
)
"""A key, its values and the keys that are used only with one of them; without values, only if the first key is set."""


def unused_keys(run: Run) -> list[str]:
    """Return a line for each key that is given although nothing reads it with the other settings. A saved config also
    lists the defaults, so that a key equal to its default does not count as given."""
    found = []
    for choice, values, keys in USED_WITH:
        chosen, unset = _value(run, choice)
        if chosen in values if values else chosen != unset:
            continue
        wanted = ", ".join(f'"{value}"' for value in values)
        reason = f'{choice} = {wanted}, not "{chosen}"' if values else f"{choice}, which is not set"
        section, *names = keys.replace(":", "").split()
        for key in (f"{section}.{name}" for name in names):
            given, default = _value(run, key)
            if given != default:
                found.append(f"{key} = {given!r} is not used: it belongs to {reason}")
    return found


def _value(run: Run, key: str) -> tuple[Any, Any]:
    """Return a key's value and its default; None for both in a table that is left out."""
    section, _, name = key.partition(".")
    table = getattr(run, section)
    return (None, None) if table is None else (getattr(table, name), type(table).model_fields[name].default)
