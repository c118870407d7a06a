"""A chosen layout as another trainer's own options.

    trainer = trainer_named("torchtitan")
    trainer.cannot(layout, model)            # None, or in one line why this layout cannot be written for it
    emit("torchtitan", request, layout)          # {"trainer": .., "format": .., "text": .., "notes": [..]}

What a trainer has no option for is refused, never approximated: options that run another layout than the planned one
would make the plan wrong without anybody noticing. Every option name is checked by a test against those of a release
(`tests/plan/option_names.toml`: torchtitan 0.2.2 and 0.3.0, Megatron core 0.20, DeepSpeed 0.19, Accelerate 1.15).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from ironlaw.errors import UserError, did_you_mean
from ironlaw.model.config import ModelConfig
from ironlaw.plan.cluster.request import ClusterRequest
from ironlaw.plan.cluster.update_cost import NAMES
from ironlaw.plan.emit.accelerate import accelerate_cannot, accelerate_config
from ironlaw.plan.emit.deepspeed import deepspeed_cannot, deepspeed_config
from ironlaw.plan.emit.ironlaw import IRONLAW_OPTIMIZERS, ironlaw_config
from ironlaw.plan.emit.megatron import MEGATRON_OPTIMIZERS, PRECISION_FLAGS, megatron_cannot, megatron_flags
from ironlaw.plan.emit.torchtitan import torchtitan_cannot, torchtitan_config
from ironlaw.plan.recipe import not_trained_here
from ironlaw.workload.layout import Layout

ENGINE_OF_TRAINER = {
    "torchtitan": "torchtitan",
    "megatron": "megatron-core",
    "deepspeed": "megatron-deepspeed",
    "accelerate": "composer-fsdp",
    "ironlaw": "ironlaw",
}
"""Whose constants a plan for that trainer uses unless told otherwise."""


WITHOUT_EXPERTS = {
    "deepspeed": "DeepSpeed builds experts in the model's code (deepspeed.moe.layer.MoE), not in its JSON",
    "accelerate": "its options say nothing of experts",
}
"""Trainers whose options cannot describe a mixture of experts, and why."""


@dataclass(frozen=True)
class TrainerOptions:
    """`excludes`: why a layout cannot be written, or None; `write`: the text and notes that go with it.

    `optimizers`: those that its options name, or that a script passes to it.
    """

    name: str
    format: str
    precisions: tuple[str, ...]
    optimizers: tuple[str, ...]
    excludes: Callable[[Layout, ModelConfig], str | None]
    write: Callable[[ClusterRequest, Layout], tuple[str, list[str]]]

    def cannot(self, layout: Layout, model: ModelConfig, optimizer: str = "adamw") -> str | None:
        """Why these options cannot say the layout of this model under this optimizer, or None."""
        if self.name == "megatron" and optimizer == "muon" and layout.zero >= 2:
            return "its FSDP has the optimizers adam and sgd only: use zero=0 or 1"
        if model.moe is not None and self.name in WITHOUT_EXPERTS:
            return WITHOUT_EXPERTS[self.name]
        return self.excludes(layout, model)


def trainer_named(name: str) -> TrainerOptions:
    if name not in TRAINERS:
        raise UserError(f"cannot emit options for '{name}': {did_you_mean(name, TRAINERS)}")
    return TRAINERS[name]


def emit(name: str, request: ClusterRequest, layout: Layout) -> dict[str, Any]:
    """The options of trainer `name`. UserError when they cannot say this layout."""
    trainer = trainer_named(name)
    check_words(trainer, request.precision, request.optimizer)
    if reason := trainer.cannot(layout, request.model, request.optimizer):
        raise UserError(f"layout '{layout}' cannot be written for {name}: {reason}")
    text, notes = trainer.write(request, layout)
    return {"trainer": name, "format": trainer.format, "text": text, "notes": notes}


def check_words(trainer: TrainerOptions, precision: str, optimizer: str) -> None:
    """UserError when the trainer's options cannot name the precision or the optimizer."""
    for kind, word, known in (
        ("precision", precision, trainer.precisions),
        ("optimizer", optimizer, trainer.optimizers),
    ):
        if word not in known:
            usable = " or ".join(known)
            raise UserError(f"{word} cannot be written as options of {trainer.name}: use --{kind} {usable}")


def _megatron(request: ClusterRequest, layout: Layout) -> tuple[str, list[str]]:
    flags = megatron_flags(request, layout, request.global_batch // (layout.dp * layout.micro_batch))
    head = f"# {request.model.name}, {request.cluster}: {layout}\n"
    return head + " \\\n".join(flags) + "\n", ["for pretrain_gpt.py; add tokenizer, data and learning rate"]


TRAINERS = {
    trainer.name: trainer
    for trainer in (
        TrainerOptions(
            "torchtitan",
            "toml",
            ("bf16", "fp32", "fp8", "mxfp8"),
            ("adamw", "adam"),
            torchtitan_cannot,
            torchtitan_config,
        ),
        TrainerOptions("megatron", "flags", tuple(PRECISION_FLAGS), MEGATRON_OPTIMIZERS, megatron_cannot, _megatron),
        TrainerOptions("deepspeed", "json", ("bf16", "fp16", "fp32"), NAMES, deepspeed_cannot, deepspeed_config),
        TrainerOptions("accelerate", "yaml", ("bf16", "fp16", "fp32"), NAMES, accelerate_cannot, accelerate_config),
        TrainerOptions(
            "ironlaw", "toml", ("bf16", "fp16", "fp32", "tf32"), IRONLAW_OPTIMIZERS, not_trained_here, ironlaw_config
        ),
    )
}
