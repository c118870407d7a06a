"""A chosen layout as another trainer's own options.

    trainer = trainer_named("torchtitan")
    trainer.cannot(layout, model)            # None, or one line on why this layout cannot be written for it
    emit("torchtitan", request, layout)          # {"trainer": .., "format": .., "text": .., "notes": [..]}

A layout for which a trainer has no option is refused, never approximated: options of another layout would silently make
the plan wrong. A test checks every option name against those of a release (`tests/plan/option_names.toml`: torchtitan
0.2.2 and 0.3.0, Megatron core 0.20, DeepSpeed 0.19, Accelerate 1.15).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import tomli_w

from ironlaw.errors import UserError, did_you_mean
from ironlaw.model.config import ModelConfig
from ironlaw.plan.cluster.estimate import ClusterRequest
from ironlaw.plan.cluster.system import NAMES
from ironlaw.plan.emit.accelerate import accelerate_cannot, accelerate_config, deepspeed_cannot, deepspeed_config
from ironlaw.plan.emit.megatron import OPTIMIZER_FLAGS, PRECISION_FLAGS, megatron_cannot, megatron_config
from ironlaw.plan.emit.torchtitan import torchtitan_cannot, torchtitan_config
from ironlaw.plan.recipe import not_trained_here
from ironlaw.workload.layout import Layout


@dataclass(frozen=True)
class TrainerOptions:
    """A trainer's precisions, optimizers and writer of options."""

    name: str
    format: str
    engine: str  # default engine of a plan for this trainer
    precisions: tuple[str, ...]
    optimizers: tuple[str, ...]  # named by its options, or passed to it by a script
    excludes: Callable[[Layout, ModelConfig], str | None]  # returns why a layout cannot be written, or None
    write: Callable[[ClusterRequest, Layout], tuple[str, list[str]]]  # returns the text and notes on it

    def cannot(self, layout: Layout, model: ModelConfig, optimizer: str = "adamw") -> str | None:
        """Returns why the options cannot express the layout of this model with this optimizer, or None."""
        if self.name == "megatron" and optimizer == "muon" and layout.zero >= 2:
            return "its FSDP has the optimizers adam and sgd only: use zero=0 or 1"
        return self.excludes(layout, model)

    def check(self, request: ClusterRequest, layout: Layout | None) -> None:
        """Raises UserError if the options cannot express the precision, the optimizer, the hardware or the layout."""
        if request.cluster.accelerator.vendor == "google":
            raise UserError(f"options of {self.name} are written for GPUs: leave --emit out on a TPU")
        for kind, word, known in (
            ("precision", request.precision, self.precisions),
            ("optimizer", request.optimizer, self.optimizers),
        ):
            if word not in known:
                usable = " or ".join(known)
                raise UserError(f"{word} cannot be written as options of {self.name}: use --{kind} {usable}")
        if layout is not None and (reason := self.cannot(layout, request.model, request.optimizer)):
            raise UserError(f"layout '{layout}' cannot be written for {self.name}: {reason}")


def trainer_named(name: str) -> TrainerOptions:
    if name not in TRAINERS:
        raise UserError(f"cannot emit options for '{name}': {did_you_mean(name, TRAINERS)}")
    return TRAINERS[name]


def emit(name: str, request: ClusterRequest, layout: Layout) -> dict[str, Any]:
    """Returns the options of trainer `name`. Raises UserError if they cannot express this layout."""
    trainer = trainer_named(name)
    trainer.check(request, layout)
    text, notes = trainer.write(request, layout)
    return {"trainer": name, "format": trainer.format, "text": text, "notes": notes}


def ironlaw_config(request: ClusterRequest, layout: Layout) -> tuple[str, list[str]]:
    """Returns a config file of our own trainer, and notes."""
    document: dict[str, Any] = {
        "model": request.model.model_dump(mode="json", exclude_defaults=True, exclude_none=True),
        "train": {
            "steps": request.steps,
            "global_batch": request.global_batch,
            "micro_batch": layout.micro_batch,
            "sequence": request.sequence,
            "precision": request.precision,
        },
        "optimizer": {"name": request.optimizer},
    }
    notes = ["for `ironlaw train`; [data] is yours to add"]
    if layout.recompute.mode != "none":
        document["recompute"] = layout.recompute.section()
    if layout.offload != "none":
        document["train"]["offload"] = layout.offload
    if layout.accelerators > 1:
        words = ("dp", "zero", "shard", "tp", "sp", "pp", "virtual_stages", "schedule", "cp", "ep")
        plain = Layout()
        document["layout"] = {
            word: getattr(layout, word)
            for word in words
            if word == "dp" or getattr(layout, word) != getattr(plain, word)
        }
        notes.append(f"start {layout.accelerators} processes with torchrun, one per device")
    return tomli_w.dumps(document), notes


WIDE = ("bf16", "fp16", "fp32")
TRAINERS = {
    trainer.name: trainer
    for trainer in (
        TrainerOptions("torchtitan", "toml", "torchtitan", ("bf16", "fp32", "fp8", "mxfp8"), ("adamw", "adam"),
                       torchtitan_cannot, torchtitan_config),
        TrainerOptions("megatron", "flags", "megatron-core", tuple(PRECISION_FLAGS), tuple(OPTIMIZER_FLAGS),
                       megatron_cannot, megatron_config),
        TrainerOptions("deepspeed", "json", "megatron-deepspeed", WIDE, NAMES, deepspeed_cannot, deepspeed_config),
        TrainerOptions("accelerate", "yaml", "composer-fsdp", WIDE, NAMES, accelerate_cannot, accelerate_config),
        TrainerOptions("ironlaw", "toml", "ironlaw", (*WIDE, "tf32"), NAMES, not_trained_here,
                       ironlaw_config),
    )
}  # fmt: skip
