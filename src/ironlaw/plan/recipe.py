"""What a config asks of our trainer, in the words of the planner."""

from __future__ import annotations

from typing import Any, cast

from ironlaw.catalog.formats import number_format
from ironlaw.config import LayoutConfig, RunConfig, build_config
from ironlaw.errors import UserError
from ironlaw.model.config import ModelConfig
from ironlaw.workload.blocks import FP32, Precision
from ironlaw.workload.layout import SPLIT_BACKWARD, Layout, undivided
from ironlaw.workload.optimizers import MATRIX_OPTIMIZERS, PAGED, QUANTIZED
from ironlaw.workload.recipe import Recipe, StepBatch
from ironlaw.workload.recompute import policies
from ironlaw.workload.sharding import expert_dp

FULL_LOGITS_BYTES = 64 * 2**20  # above, the three copies of the logits rule the peak of a small machine
CHUNK_BYTES = 128 * 2**20


def batch_of(config: RunConfig) -> StepBatch:
    return StepBatch(
        config.train.global_batch, config.sequence, config.data.masks_documents, config.data.packing == "best_fit",
        config.micro_batch,
    )  # fmt: skip


def layout_of(layout: LayoutConfig, micro_batch: int, dp: int = 1) -> Layout:
    """A config's layout with what it leaves open: the replicas, and the sequences of a forward pass of each."""
    return Layout(**layout.model_dump() | {"dp": layout.dp or dp}, micro_batch=micro_batch)


def micro_batch_of(config: RunConfig, share: int, stages: int | None = None) -> int:
    """Sequences per forward pass of a replica that has `share` of them: train.micro_batch, or the largest divisor
    below it, so that a job that goes on with fewer ranks need not be configured anew.

    Where it is not given, pipeline stages (the config's layout's unless given) get four micro-batches each, or as many
    as there are: their bubble is then a fifth of the step at most (arXiv 2104.04473, section 2.2).
    """
    if stages is None:
        stages = config.layout.pp if config.layout is not None else 1
    wanted = config.micro_batch
    if config.train.micro_batch is None and stages > 1:
        wanted = max(1, share // (4 * stages))
    return next(size for size in range(min(wanted, share), 0, -1) if share % size == 0)


def recipe_of(
    config: RunConfig, precision: str, *, cuda: bool = False, onednn: bool = False, gloo: bool = True
) -> Recipe:
    """Nothing is recomputed for a budget until it is solved (`decisions.py`)."""
    return Recipe(
        cast(Precision, number_format(precision).held_as), cuda, onednn, gloo,
        policies(config.recompute, config.model), loss_chunk(config), config.optimizer, config.communication,
        config.train.offload, config.train.average_decay is not None,
        0 < config.checkpoint.every < config.train.steps,
    )  # fmt: skip


def loss_chunk(config: RunConfig) -> int:
    """Tokens whose logits exist at a time; 0: all of a micro-batch.

    An eighth of the micro-batch, but at most 128 MiB of logits; fewer than 64 tokens make a poor product. None where
    logits are more than a product.
    """
    if not config.model.logits_are_a_product or config.objective.needs_logits:
        return 0
    tokens, row = config.micro_batch * config.sequence, config.model.vocab * FP32
    wanted = config.train.loss == "chunked" or (config.train.loss == "auto" and tokens * row > FULL_LOGITS_BYTES)
    return max(64, min(-(-tokens // 8), CHUNK_BYTES // row)) if wanted else 0


NOT_ON_THE_HOST = (*QUANTIZED, *PAGED, *MATRIX_OPTIMIZERS)


def check_supported(config: RunConfig, device: str) -> None:
    """UserError for what needs CUDA on a device without it. What a CUDA device itself lacks is found when it trains."""
    train = config.train
    if train.offloads_optimizer and config.optimizer.name in NOT_ON_THE_HOST:
        raise UserError(
            f'train.offload = "{train.offload}" updates on the host, which {config.optimizer.name} does not: use '
            'optimizer.name = "adamw"'
        )
    if train.offloads_optimizer and train.precision == "fp16":
        raise UserError(
            f'train.offload = "{train.offload}" updates on the host, where no loss scale is undone: use '
            'train.precision = "bf16"'
        )
    if device == "cuda":
        return
    if train.precision == "tf32":
        raise UserError('train.precision = "tf32" needs an NVIDIA GPU; a CPU computes fp32 in full: use "fp32"')
    if train.compile == "graphs":
        raise UserError('train.compile = "graphs" needs CUDA graphs, which a CPU has not: use train.compile = "on"')
    if config.optimizer.name in PAGED:
        raise UserError(
            f'optimizer.name = "{config.optimizer.name}" pages its state between a GPU and the host, and there is no '
            f'GPU: use "{"adam8bit" if config.optimizer.name in QUANTIZED else "adamw"}"'
        )
    if train.offload != "none":
        raise UserError(
            f'train.offload = "{train.offload}" moves memory from a GPU to the host, and there is no GPU: use "none"'
        )


def not_trained_here(layout: Layout, model: ModelConfig) -> str | None:
    """Why Ironlaw's own trainer cannot run this, or None."""
    if layout.offload != "none" and layout.accelerators > 1:
        return "Ironlaw's own trainer offloads on one device only so far: use offload=none"
    if layout.cp > 1 and layout.cp_kind not in (None, "all_gather"):
        return f"Ironlaw's own trainer gathers keys and values: use cp_kind=all_gather, not {layout.cp_kind}"
    if layout.schedule in SPLIT_BACKWARD and (layout.zero == 3 or layout.recompute.mode != "none"):
        # Between the two backward passes ZeRO 3 may give weights back, and gradients of those that are gone are lost;
        # PyTorch runs a recomputed block again for each group of its weights, ten times.
        return f"Ironlaw's own trainer has {layout.schedule} with neither ZeRO 3 nor recomputation: use schedule=1f1b"
    if model.moe is not None and layout.accelerators > 1:
        if layout.etp not in (None, layout.tp):
            return "Ironlaw's own trainer splits experts over tp like the rest: leave out etp"
        if layout.ep > 1 and layout.shard is not None:
            return "Ironlaw's own trainer has no expert parallelism inside hybrid sharding: leave out shard"
        sharing = expert_dp(layout.dp, layout.cp, layout.ep)
        if layout.ep > 1 and layout.zero and model.hidden % sharing:
            return f"Ironlaw's own trainer shards experts by hidden = {model.hidden}, not divisible by {sharing} ranks"
    if reason := undivided(model, layout.tp, layout.cp, layout.ep):
        return reason
    if model.key_value_heads % layout.tp:
        return f"Ironlaw's own trainer does not copy {model.key_value_heads} key/value heads over tp = {layout.tp}"
    return None


def recipe_of_layout(
    model: ModelConfig, layout: Layout, sequence: int, global_batch: int, precision: str, optimizer: str,
    config: RunConfig | None = None,
) -> tuple[StepBatch, Recipe]:  # fmt: skip
    """What our trainer does on accelerators in this layout; what it does not say is as in the config, if any."""
    document: dict[str, Any] = config.model_dump(exclude_none=True, exclude={"layout"}) if config else {}
    document["train"] = document.get("train", {}) | {
        "sequence": sequence, "global_batch": global_batch, "micro_batch": layout.micro_batch,
        "precision": precision, "offload": layout.offload,
    }  # fmt: skip
    document["optimizer"] = document.get("optimizer", {}) | {"name": optimizer}
    document["recompute"] = layout.recompute.section()
    document["model"] = model.model_dump(mode="json", exclude_none=True)
    settled = build_config(document)
    return batch_of(settled), recipe_of(settled, precision, cuda=True, gloo=False)
