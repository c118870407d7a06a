"""Applies a layout to a model. The order of the steps matters, and a comment at each step gives the reason. The result,
`RankModel`, is what a rank holds."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, cast

import torch
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.nn.parallel import DistributedDataParallel

from ironlaw.config import RunConfig
from ironlaw.model.adapters import adapted_layers
from ironlaw.model.moe import expert_layers
from ironlaw.model.transformer import Transformer
from ironlaw.train.parallel import adapted, compilation, experts, materialize, pipeline, tensor
from ironlaw.train.parallel.partition import RankPartition
from ironlaw.train.parallel.ranks import Ranks
from ironlaw.workload.blocks import Policy
from ironlaw.workload.schedule import stages_of
from ironlaw.workload.sharding import shards_hidden


@dataclass
class RankModel:
    """The model as held by this rank: callable `stages` by number, and the `transformers` inside them."""

    ranks: Ranks
    stages: dict[int, nn.Module]
    transformers: dict[int, Transformer]
    tp_partial: list[nn.Parameter] = field(default_factory=list)  # parameters whose gradients are summed over tp
    tied_head_copy: nn.Parameter | None = None  # the last stage's copy of a tied embedding
    ep_parameters: list[nn.Parameter] = field(default_factory=list)  # experts, whose gradients cover all ep ranks

    def __post_init__(self) -> None:
        self.model = pipeline.join_stages(self.transformers)  # local parameters, named as in the whole model

    def parameters(self) -> list[nn.Parameter]:
        return [parameter for part in self.transformers.values() for parameter in part.parameters()]


def apply(
    model: Transformer, config: RunConfig, ranks: Ranks, policies: Sequence[Policy] = (),
    compile_block: Callable[..., Any] | None = None, initialize: bool = True,
) -> RankModel:  # fmt: skip
    """Divide `model` according to the layout. It must be equal on every rank, or on the meta device.

    `policies`: recomputation of each layer; `compile_block`: compiles a block's forward pass. `initialize`: draw random
    weights for a model on the meta device; otherwise they must be read from a checkpoint.
    """
    layout = ranks.layout
    model.dropout_seed = config.train.seed

    # First the parts of sequences and heads that a rank computes: all later steps only distribute weights.
    if layout.tp > 1 or layout.cp > 1:
        model.partition = partition = RankPartition(ranks)
        for block in tensor.blocks_of(model):
            block.attention.partition = partition

    # Split the fused projection in three if rows are divided, since a shard of it would mix queries and values.
    fsdp = layout.zero > 0 or (ranks.size_of("replicate") > 1 and layout.tp * layout.pp * layout.ep > 1)
    # Not with adapters, which may span several projections and are divided together with them.
    adapts = config.finetune.adapts
    if (layout.tp > 1 or fsdp) and not adapts:
        tensor.split_projections(model)

    # Process groups of the experts: every layer needs them, whichever stage it is in.
    if config.model.moe is not None:
        experts.set_groups(model, config, ranks)

    # Cut the stages before anything is divided, so that no rank divides or holds layers of other stages.
    transformers = _stages(model, ranks)

    # Tensor parallelism divides full weights; FSDP then shards each rank's part and gathers only that.
    if layout.tp > 1:
        for part in transformers.values():
            if adapts:
                adapted.shard_layers(part, ranks.mesh["tp"], ranks.index("tp"))
            tensor.parallelize(part, ranks.mesh["tp"], layout.sp, adapts)

    # Experts likewise, over the ranks that exchange rows and over tp.
    if layout.tp > 1 or layout.ep > 1:
        for layer in (layer for part in transformers.values() for layer in expert_layers(part)):
            experts.shard_experts(layer.experts, ranks)

    # Then recomputation and compilation: FSDP must gather weights around them, for the recomputation too.
    for part in transformers.values():
        layers = [int(name) for name, _ in part.blocks.named_children()]
        chosen = [policies[layer] if policies else None for layer in layers]
        compilation.compile_and_recompute(part.blocks, chosen, compile_block)

    # Data parallelism last, around everything: its units are the blocks in their final form.
    stages = _replicated(model, transformers, config, ranks, initialize, fsdp)

    # Collected only now, since FSDP replaces the model's parameters by its own.
    tp_partial = [p for part in transformers.values() for p in tensor.partial_parameters(part, layout.sp)]
    last = transformers.get(layout.pp * layout.virtual_stages - 1) if layout.pp > 1 and config.model.tied else None
    tied_head_copy = None if last is None else cast(nn.Parameter, last.head.weight)
    experts_here = (layer.experts for part in transformers.values() for layer in expert_layers(part))
    ep_parameters = [p for some in experts_here for p in some.parameters()] if layout.ep > 1 else []
    tp_partial = tp_partial if layout.tp > 1 else []
    return RankModel(ranks, stages, transformers, tp_partial, tied_head_copy, ep_parameters)


def _stages(model: Transformer, ranks: Ranks) -> dict[int, Transformer]:
    """Return this rank's pipeline stages of the model, by stage number."""
    layout = ranks.layout
    if layout.pp == 1:
        return {0: model}
    stages = layout.pp * layout.virtual_stages
    numbers = stages_of(layout.schedule, layout.pp, layout.virtual_stages, ranks.index("pp"))
    return {number: pipeline.cut_stage(model, stages, layout.virtual_stages, number) for number in numbers}


def _replicated(
    model: Transformer, transformers: dict[int, Transformer], config: RunConfig, ranks: Ranks, initialize: bool,
    fsdp: bool,
) -> dict[int, nn.Module]:  # fmt: skip
    # Memory is allocated as late as possible: after FSDP, which can divide tensors on the meta device.
    deferred = any(parameter.is_meta for parameter in model.parameters())
    for part in transformers.values() if not deferred else ():
        part.to(ranks.device)
    for part in transformers.values() if fsdp else ():
        reduced = torch.bfloat16 if config.communication.gradients == "bf16" else None  # weights keep their type
        shard(part, ranks, MixedPrecisionPolicy(reduce_dtype=reduced))
    if deferred:
        materialize.materialize(transformers.values(), ranks.device, initialize)
    if fsdp or ranks.size_of("replicate") == 1:
        return dict(transformers)
    # DDP if nothing else divides the weights: it reduces gradients in buckets during the backward pass.
    group = ranks.group("replicate")
    with warnings.catch_warnings():  # PyTorch 2.11 lacks the option that replaces broadcast_buffers
        warnings.simplefilter("ignore", FutureWarning)
        wrapped = DistributedDataParallel(
            model, process_group=group, broadcast_buffers=False, gradient_as_bucket_view=True
        )
    return {**transformers, 0: wrapped}


def shard(part: Transformer, ranks: Ranks, policy: MixedPrecisionPolicy) -> None:
    """Shard a part with FSDP2 (arXiv 2304.11277): one unit per block, and units for both ends of the model.

    ZeRO 3 frees gathered weights after use; 1 and 2 keep them for the step. Without ZeRO (replicas of tensor-parallel
    or pipelined models) the shard dimension has size 1, and only gradients are reduced.
    """
    frozen = {p for p in part.parameters() if not p.requires_grad} if adapted_layers(part) else set()
    if frozen and ranks.layout.zero == 3:  # shard frozen parameters too; otherwise only trained ones
        adapted.make_codes_parameters(part)
        frozen = set()
    mesh = ranks.mesh["replicate", "shard"] if ranks.size_of("replicate") > 1 else ranks.mesh["shard"]
    unit = partial(fully_shard, reshard_after_forward=ranks.layout.zero == 3, mp_policy=policy)
    for layer in expert_layers(part) if ranks.experts is not None else ():
        # Expert gradients are averaged over the ranks that hold the same experts, fewer than there are replicas.
        dimensions = ("expert_replicate", "expert_shard") if ranks.layout.zero == 0 else ("expert_shard",)
        assert ranks.experts is not None
        placement = experts.hidden_dimension(layer.experts)
        unit(layer.experts, mesh=ranks.experts[dimensions], shard_placement_fn=placement)
    by_hidden = shards_hidden(part.config, ranks.layout.ep, ranks.size_of("shard"))
    for block in part.blocks:
        place = experts.hidden_dimension(block) if by_hidden and ranks.experts is None else None
        unit(block, mesh=mesh, shard_placement_fn=place, ignored_params=frozen)
    # A tied weight is used at both ends, so it belongs to the root unit, which stays gathered.
    if not part.is_tied and not frozen:
        if part.embedding is not None:
            unit(part.embedding, mesh=mesh)
        if part.head is not None and not part.loss_chunk:  # the chunked loss uses the head's weight directly
            unit(part.head, mesh=mesh)
    unit(part, mesh=mesh, reshard_after_forward=False, ignored_params=frozen)
