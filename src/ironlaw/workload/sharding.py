"""What one rank of a layout holds of a model: layers and tensors of its stages, and how they travel together.

stage_parameters(model, layout, stage)                                     # as one tensor parallel rank holds them
parameter_groups(model, parameters), bucket_bytes(parameters)                      # what FSDP gathers, what DDP reduces
"""

from __future__ import annotations

from dataclasses import replace
from functools import lru_cache

from ironlaw.model.config import ModelConfig
from ironlaw.model.parameters import ROWS, Parameter, of_blocks, of_embedding, of_head
from ironlaw.workload.layout import Layout
from ironlaw.workload.operations import changed
from ironlaw.workload.schedule import layers_of
from ironlaw.workload.sections import CommunicationConfig

FP32 = 4
EXPERTS = ".experts"  # ends the name of what FSDP gathers of a block's experts, where ep divides them


def of_site(layout: Layout, communication: CommunicationConfig) -> Layout:
    """The layout of one of the sites that train by themselves; the whole one without local updates."""
    if not communication.local_steps:
        return layout
    return replace(layout, dp=layout.dp // (communication.sites or layout.dp))


def expert_dp(dp: int, cp: int, ep: int) -> int:
    """Ranks that hold the same experts: they reduce gradients of these together and share what ZeRO shards of them.

    Ranks of an expert parallel group are taken from dp x cp; each tensor parallel rank has its part of every expert.
    """
    return dp * cp // ep


def shards_hidden(model: ModelConfig | None, ep: int, ranks: int) -> bool:
    """Whether FSDP divides experts by their hidden size over the `ranks` that hold the same ones, not one from another.

    Always over ep; else where some ranks would have no expert, and FSDP pad them to one each.
    """
    if model is None or model.moe is None:
        return False
    return ep > 1 or (ranks > 1 and model.moe.experts % ranks != 0 and model.hidden % ranks == 0)


def shard_of(parameter: Parameter, model: ModelConfig | None, ep: int, ranks: int) -> Parameter:
    """One rank's part of a tensor that FSDP shards over `ranks`: rows, padded; of experts perhaps the hidden size."""
    if ranks == 1:
        return parameter
    rows, *rest = parameter.shape
    if model is not None and of_experts(parameter) and shards_hidden(model, ep, ranks):
        if model.hidden in rest:  # once, where the experts are as wide
            rest[rest.index(model.hidden)] //= ranks
    else:
        rows = -(-rows // ranks)
    return changed(parameter, shape=(rows, *rest))


def stage_parameters(model: ModelConfig, layout: Layout, stage: int, fused: bool = False) -> list[Parameter]:
    """Tensors of one stage as one tensor parallel rank holds them; the last has a copy of a tied embedding. `fused`:
    query, key and value stay one matrix on every layout."""
    degrees = {name: getattr(layout, name) for name in ("tp", "pp", "virtual_stages", "ep", "etp")}
    return [*_stage_parameters(model, Layout(**degrees, zero=min(layout.zero, 1)), stage, fused)]


@lru_cache(maxsize=256)
def _stage_parameters(model: ModelConfig, layout: Layout, stage: int, fused: bool) -> tuple[Parameter, ...]:
    stages = layout.pp * layout.virtual_stages
    layers = layers_of(model.layers, stages, layout.virtual_stages)[stage]
    first, last = stage == 0, stage == stages - 1
    whole = (of_embedding(model) if first else []) + of_blocks(model, layers) + (of_head(model) if last else [])
    if last and not first and model.tied:
        whole.append(Parameter("head.weight", (model.vocab, model.hidden), divided=ROWS))
    return tuple(part for parameter in whole for part in _divided(parameter, model, layout, fused))


def _divided(parameter: Parameter, model: ModelConfig, layout: Layout, fused: bool) -> list[Parameter]:
    """Query, key and value apart where ranks hold parts of tensors; then what the layout leaves of each."""
    parts = [parameter]
    if ".attention.qkv." in parameter.name and (layout.tp > 1 or layout.zero > 0) and not fused:
        sizes = {"query": model.query_size, "key": model.key_value_size, "value": model.key_value_size}
        parts = [
            changed(parameter, name=parameter.name.replace("qkv.", f"qkv.{which}."), shape=(rows, *parameter.shape[1:]))
            for which, rows in sizes.items()
        ]
    return [changed(part, shape=local_shape_of(part, layout)) if part.divided else part for part in parts]


def local_shape_of(parameter: Parameter, layout: Layout) -> tuple[int, ...]:
    shape = list(parameter.shape)
    for degree, dimension in parameter.divided:
        shape[dimension] = -(-shape[dimension] // getattr(layout, degree))
    return tuple(shape)


def of_experts(parameter: Parameter) -> bool:
    return ".experts." in parameter.name


def is_plain(layout: Layout) -> bool:
    """Whether replicas are DDP's: nothing divides weights."""
    return layout.zero == 0 and layout.tp * layout.pp * layout.ep == 1


FIRST_BUCKET_BYTES, BUCKET_BYTES = 2**20, 25 * 2**20
"""DDP's own: the first bucket is small, so that something travels early."""


def bucket_bytes(parameters: list[Parameter]) -> list[int]:
    """DDP's buckets in the order they fill, last parameters first: one is full once it has reached its size."""
    buckets, limit = [0], FIRST_BUCKET_BYTES
    for parameter in reversed(parameters):
        buckets[-1] += parameter.elements * FP32
        if buckets[-1] >= limit:
            buckets.append(0)
            limit = BUCKET_BYTES
    return [size for size in buckets if size]


def parameter_groups(
    model: ModelConfig | None, parameters: list[Parameter], ep: int = 1, chunked: bool = False
) -> dict[str, list[Parameter]]:
    """What FSDP gathers at a time: each block, embedding and output layer unless they are one tensor, and the rest.

    With a `chunked` loss the output layer is among the rest: the loss takes its weight without calling it.

    Expert parallel experts are divided over other ranks than the rest of their block, and gathered apart.
    """
    names = {p.name for p in parameters}
    apart = {"embedding.weight", "head.weight"}
    if (
        model is not None
        and model.tied
        and "embedding.weight" in names
        and "head.weight" not in names
        and "final_norm.weight" in names
    ):
        apart = set()  # one tensor, used at both ends
    if chunked:
        apart.discard("head.weight")
    groups: dict[str, list[Parameter]] = {}
    for parameter in parameters:
        unit = "root"
        if parameter.name.startswith("blocks."):
            unit = ".".join(parameter.name.split(".")[:2])
            if ep > 1 and of_experts(parameter):
                unit += EXPERTS
        elif parameter.name in apart:
            unit = parameter.name
        groups.setdefault(unit, []).append(parameter)
    return groups


def local_parameters(model: ModelConfig, layout: Layout, parameters: list[Parameter]) -> list[Parameter]:
    """The tensors of a stage as this rank updates them: its shards of them, where ZeRO divides them."""
    shards = layout.sharing
    apart = expert_dp(layout.dp, layout.cp, layout.ep) if layout.zero and layout.ep > 1 else shards
    return [shard_of(p, model, layout.ep, apart if of_experts(p) else shards) for p in parameters]
