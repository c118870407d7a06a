"""Remedies of a config: each is a changed config, and its gain is what the planner predicts for it.

Adding a remedy is adding a function that proposes settings and an entry to `REMEDIES`; docs/remedies.md says how.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from ironlaw import units
from ironlaw.catalog.formats import number_format, precision_recipes
from ironlaw.config import RunConfig, build_config
from ironlaw.errors import UserError
from ironlaw.explain.remedy import (
    CHECKPOINT_SHARE,
    EVALUATION_SHARE,
    Effect,
    Proposal,
    Remedy,
    RemedyKind,
    Settings,
    find,
)
from ironlaw.ledger import Kind, Ledger
from ironlaw.machine.links import Link, RankFabric, load_costs
from ironlaw.machine.profile import Profile
from ironlaw.plan.layouts import best_layout
from ironlaw.plan.measured.accelerator import accelerator_of
from ironlaw.plan.step import plan_run
from ironlaw.workload.layout import Layout

TIGHT_MEMORY = 0.85  # of the machine's: from here on smaller is worth time
ATTENTION_SHARE = 0.20
MAX_HEAD_SIZE = 128  # wider than any head in use


@dataclass(frozen=True)
class Situation:
    """What a remedy may look at before it proposes anything."""

    config: RunConfig
    plan: Ledger  # of this config, made now, so that both sides of a comparison come from the same profile
    profile: Profile
    run: Ledger
    replan: Callable[[RunConfig], Ledger] = field(repr=False)  # a changed config, on as many ranks

    def planned_share(self, kind: Kind) -> float:
        step = self.plan.totals["step_seconds"].value
        return self.plan.seconds_by_kind().get(kind, 0.0) / step

    def wall_share(self, name: str) -> float | None:
        wall = self.run.facts.get("wall_seconds") or {}
        training, seconds = wall.get("training"), wall.get(name)
        return seconds / (training + seconds) if training and seconds is not None else None


def _precisions(now: Situation) -> Iterable[Settings | Proposal]:
    """Of products; and of a frozen base, whose nf4 is dequantised for each of them."""
    wide: list[Settings] = [{"finetune.method": "lora"}] if now.config.finetune.method == "qlora" else []
    measured = wide + [{"train.precision": p} for p in now.profile.matmul if p != now.plan.decided.precision]
    return [*measured, *(_faster_formats(now) if now.profile.device != "cpu" else ())]


def _faster_formats(now: Situation) -> Iterable[Proposal]:
    """Fewer bits, where the catalogue says that the accelerator multiplies them and a library trains in them. Nobody
    timed them here: the gain is that between two plans by catalogued rates."""
    from ironlaw.train.parallel.planning import plan_on_accelerators

    try:
        accelerator, ranks = accelerator_of(now.profile.name)[0], ranks_of(now.run)
        before = plan_on_accelerators(now.config, now.profile, ranks)
    except UserError:  # nobody catalogued it
        return
    multiplied = [known for known in map(number_format, precision_recipes()) if known.multiplied_by(accelerator)]
    basis = f"planned by {accelerator.name}'s catalogued rates"
    if missing := [known.name for known in multiplied if not known.library]:
        basis += f"; without {' and '.join(missing)}, which torchao does not train in"
    for name in (known.name for known in multiplied if known.library):
        settings: Settings = {"train.precision": name}
        try:
            after = plan_on_accelerators(with_settings(now.config, settings), now.profile, ranks)
        except UserError:  # not with this model, or these adapters
            continue
        gain = 1 - after.step_seconds / before.step_seconds
        saved, step = (gain * now.plan.totals[of].value for of in ("total_seconds", "step_seconds"))
        if after.fits:
            yield Proposal(settings, gain, saved, step, before.peak_bytes - after.peak_bytes, basis)


def _micro_batches(now: Situation) -> Iterable[Settings]:
    """Every other way to cut the batch: larger spends memory on fewer calls, smaller stays in the caches."""
    batch = now.config.train.global_batch
    return [{"train.micro_batch": m} for m in range(1, batch + 1) if batch % m == 0 and m != now.config.micro_batch]


def _smaller_micro_batches(now: Situation) -> Iterable[Settings]:
    return [s for s in _micro_batches(now) if s["train.micro_batch"] < now.config.micro_batch]


def _keep_activations(now: Situation) -> Iterable[Settings]:
    mode = now.config.recompute.mode
    lighter = {"none": (), "selective": ("none",)}.get(mode, ("none", "selective"))
    return [{"recompute.mode": other} for other in lighter]


def _recompute_more(now: Situation) -> Iterable[Settings]:
    heavier = {"none": ("selective", "full"), "selective": ("full",), "every": ("full",)}
    return [{"recompute.mode": mode} for mode in heavier.get(now.config.recompute.mode, ())]


def _other_losses(now: Situation) -> Iterable[Settings]:
    """All logits at once, or a few hundred tokens' at a time: the one that the run does not do."""
    if not now.config.model.logits_are_a_product:
        return []
    return [{"train.loss": "full" if now.plan.decided.loss_chunk else "chunked"}]


def _smaller_loss(now: Situation) -> Iterable[Settings]:
    return [other for other in _other_losses(now) if other == {"train.loss": "chunked"}]


def _larger_batches(now: Situation) -> Iterable[Settings]:
    """The same tokens in fewer, larger steps; evaluations and warm-up stay where they were in tokens."""
    config, proposals = now.config, []
    for factor in (2, 4):
        if config.train.steps % factor or config.train.steps // factor < 100:
            continue
        settings: Settings = {
            "train.global_batch": config.train.global_batch * factor,
            "train.steps": config.train.steps // factor,
            "schedule.warmup_steps": config.warmup_steps // factor,
        }
        if config.train.micro_batch is not None:
            settings["train.micro_batch"] = config.train.micro_batch * factor
        if config.evaluation.every:
            settings["evaluation.every"] = max(1, config.evaluation.every // factor)
            settings["evaluation.batches"] = max(1, config.evaluation.batches // factor)
        proposals.append(settings)
    return proposals


def _fewer_evaluations(now: Situation) -> Iterable[Settings]:
    every, steps = now.config.evaluation.every, now.config.train.steps
    share = now.wall_share("evaluation")
    if not every or every >= steps or (share is not None and share < EVALUATION_SHARE):
        return []
    return [{"evaluation.every": min(steps, every * factor)} for factor in (2, 4)]


def _wider_heads(now: Situation) -> Iterable[Settings]:
    model = now.config.model
    sized = model.head_size is not None or model.kv_heads is not None or model.latent is not None
    if now.planned_share(Kind.ATTENTION) < ATTENTION_SHARE or sized:
        return []
    return [
        {"model.heads": model.heads // factor}
        for factor in (2, 4)
        if model.heads % factor == 0 and model.size_of_head * factor <= MAX_HEAD_SIZE
    ]


def _shorter_sequences(now: Situation) -> Iterable[Settings]:
    """Half the sequence, twice as many of them: the same tokens per step, half the attention."""
    config = now.config
    if now.planned_share(Kind.ATTENTION) < ATTENTION_SHARE or config.sequence % 2 or config.sequence < 256:
        return []
    settings: Settings = {
        "train.sequence": config.sequence // 2, "train.global_batch": config.train.global_batch * 2,
    }  # fmt: skip
    return [settings | ({"train.micro_batch": config.train.micro_batch * 2} if config.train.micro_batch else {})]


def _fewer_checkpoints(now: Situation) -> Iterable[Proposal]:
    """The planner does not model storage, so this one rests on what the run's own checkpoints took."""
    share, every = now.wall_share("checkpoint"), now.config.checkpoint.every
    if share is None or share < CHECKPOINT_SHARE or not every or every >= now.config.train.steps:
        return []
    wall = now.run.facts["wall_seconds"]
    saves, factor = now.config.train.steps // every, 4
    saved = wall["checkpoint"] * (1 - (saves // factor + 1) / (saves + 1))
    gain = saved / (wall["training"] + wall["checkpoint"])
    settings, basis = {"checkpoint.every": every * factor}, "measured seconds of this run's checkpoints"
    return [Proposal(settings, gain, saved, basis=basis)]


REMEDIES: tuple[RemedyKind, ...] = (
    RemedyKind(
        "precision", "Train in another precision", "this machine was measured in it, or its units multiply it",
        Effect.ROUNDING,
        "rounding differs: compare the loss of the first steps", _precisions,
    ),
    RemedyKind(
        "micro_batch", "Cut the batch into other micro-batches", "the batch divides", Effect.NONE,
        "none: gradients are the same up to the order of summation", _micro_batches,
    ),
    RemedyKind(
        "layout", "Spread the job over its ranks in another way", "the job has several ranks, on CPUs", Effect.NONE,
        "none: every layout computes the same, up to the order of summation",
        lambda now: other_layouts(now.config, now.profile, now.run),
    ),
    RemedyKind(
        "memory", "Smaller micro-batches, accumulated", "memory is more than 85% full", Effect.NONE,
        "may cost time; gradients are the same up to the order of summation", _smaller_micro_batches,
        saves_memory=True,
    ),
    RemedyKind(
        "recompute", "Keep activations instead of recomputing them", "something is recomputed", Effect.NONE,
        "none: the loss changes by no bit; takes memory", _keep_activations,
    ),
    RemedyKind(
        "recompute_more", "Recompute activations", "memory is more than 85% full", Effect.NONE,
        "costs time; the loss changes by no bit", _recompute_more, saves_memory=True,
    ),
    RemedyKind(
        "loss", "The loss over all tokens at once, or over some at a time", "always", Effect.NONE,
        "none: gradients are the same up to the order of summation", _other_losses,
    ),
    RemedyKind(
        "loss_chunks", "The loss over some tokens at a time", "memory is more than 85% full", Effect.NONE,
        "may cost time; gradients are the same up to the order of summation", _smaller_loss, saves_memory=True,
    ),
    RemedyKind(
        "evaluation", "Evaluate less often", "evaluation takes over 5% of the time", Effect.NONE,
        "none for the model; the validation curve has fewer points", _fewer_evaluations,
    ),
    RemedyKind(
        "batch", "Larger steps, fewer of them, for the same tokens", "at least 100 steps remain", Effect.TRAINING,
        "fewer updates: the learning rate needs retuning, and small batches often end lower", _larger_batches,
    ),
    RemedyKind(
        "heads", "Fewer and wider attention heads", "attention takes over 20% of the step", Effect.MODEL,
        "another model of the same size; checkpoints of this one do not load", _wider_heads,
    ),
    RemedyKind(
        "sequence", "Shorter sequences, more of them per step", "attention takes over 20% of the step",
        Effect.TRAINING, "the model learns from half the context", _shorter_sequences,
    ),
    RemedyKind(
        "checkpoint", "Save checkpoints less often", "checkpoints take over 5% of the time", Effect.NONE,
        "an interruption loses more steps", _fewer_checkpoints,
    ),
)  # fmt: skip


def find_remedies(now: Situation) -> list[Remedy]:
    """Returns remedies that pay by the planner's figures, ranked; those that save memory only if it is tight."""
    tight = now.plan.totals["resident_bytes"].value >= TIGHT_MEMORY * now.profile.memory_bytes
    kinds = [kind for kind in REMEDIES if tight or not kind.saves_memory]
    return find(now, kinds, lambda kind, settings: _compare(kind, now, settings))


def _compare(kind: RemedyKind, now: Situation, settings: Settings) -> Proposal | None:
    """Plan the changed config. Returns None if it is not valid, or does not fit."""
    try:
        plan = now.replan(with_settings(now.config, settings))
    except UserError:
        return None
    before, after = now.plan.totals, plan.totals
    if after["resident_bytes"].value > now.profile.memory_bytes and not kind.saves_memory:
        return None
    total = before["total_seconds"].value - after["total_seconds"].value
    bytes_saved = before["peak_bytes"].value - after["peak_bytes"].value
    gain = bytes_saved / before["peak_bytes"].value if kind.saves_memory else total / before["total_seconds"].value
    # Per step of the present size: a larger step is worth as many of them as its tokens.
    tokens = now.config.tokens_per_step / with_settings(now.config, settings).tokens_per_step
    step = before["step_seconds"].value - after["step_seconds"].value * tokens
    return Proposal(settings, gain, total, step, bytes_saved)


def with_settings(config: RunConfig, settings: Settings) -> RunConfig:
    """Returns the config with `section.key` values replaced, validated as any other."""
    document = config.model_dump(mode="json", exclude_none=True)
    for key, value in settings.items():
        section, name = key.split(".")
        document[section] = document.get(section, {}) | {name: value}
    if any(key.startswith("model.") for key in settings):
        document["model"] = {"name": "changed"} | {k: v for k, v in document["model"].items() if k != "name"}
    return build_config(document, where="the changed config")


def situation(config: RunConfig, profile: Profile, run: Ledger) -> Situation:
    """Plan the run's own config again, in the precision that it ran in."""
    precision = run.facts.get("precision")
    if precision in profile.matmul:
        config = with_settings(config, {"train.precision": precision})
    replan = planner_on_ranks(profile, run) if ranks_of(run) > 1 else partial(plan_run, profile=profile)
    return Situation(config, replan(config), profile, run, replan)


def ranks_of(run: Ledger) -> int:
    """Returns the ranks of a job that can be planned on as many; else 1."""
    known = "fabric" in run.facts or run.facts.get("device", "cpu") != "cpu"
    return int(run.facts.get("ranks") or 1) if known else 1


def fabric_of(run: Ledger) -> RankFabric:
    """Returns the links of the run; UserError if what two ranks of this machine cost each other was not measured."""
    facts = run.facts["fabric"]
    between = Link(**facts["between"]) if facts["between"] else None
    return RankFabric(load_costs(), facts["ranks_per_host"], between)


def planner_on_ranks(profile: Profile, run: Ledger) -> Callable[[RunConfig], Ledger]:
    """Returns a function that plans a config on the ranks of `run`; it raises UserError if that cannot run or fit."""
    from ironlaw.train.parallel.planning import plan_config, plan_on_accelerators

    ranks, fabric = ranks_of(run), fabric_of(run) if profile.device == "cpu" else None

    def replan(config: RunConfig) -> Ledger:
        plan = plan_config(config, profile, ranks, fabric) if fabric else plan_on_accelerators(config, profile, ranks)
        if not plan.fits:
            raise UserError(f"{plan.layout} does not fit: {units.bytes_(plan.peak_bytes)} a rank")
        return plan.ledger

    return replan


def other_layouts(config: RunConfig, profile: Profile, run: Ledger) -> Iterable[dict[str, Any]]:
    """Returns the settings of the best planned layout for as many ranks, if it is not the run's own."""
    if ranks_of(run) == 1 or "fabric" not in run.facts or (config.layout is not None and config.layout.shard):
        return []
    from ironlaw.train.parallel.planning import can_run

    free = config.model_copy(update={"train": config.train.model_copy(update={"micro_batch": None})})
    choice = best_layout(free, profile, ranks_of(run), fabric_of(run), lambda layout: can_run(free, layout))
    return [changed(config, choice.best.layout)]


def changed(config: RunConfig, layout: Layout) -> dict[str, Any]:
    """Returns the settings of `layout` that differ from the config."""
    names = ("dp", "zero", "tp", "sp", "pp", "virtual_stages", "schedule", "cp", "ep")
    now = config.layout.model_dump() if config.layout is not None else {}
    settings = {f"layout.{name}": getattr(layout, name) for name in names if now.get(name) != getattr(layout, name)}
    if layout.micro_batch != config.train.micro_batch:
        settings["train.micro_batch"] = layout.micro_batch
    return settings
