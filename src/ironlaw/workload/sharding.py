"""The tensors that one rank of a layout holds, and their groups in communication.

stage_parameters(model, layout, stage)                                     # as held by one tensor parallel rank
parameter_groups(model, parameters), bucket_bytes(parameters)                      # FSDP's units, DDP's buckets
"""

from __future__ import annotations

from dataclasses import replace
from functools import lru_cache

from ironlaw.model.config import ModelConfig
from ironlaw.model.parameters import ROWS, Parameter, of_blocks, of_embedding, of_head
from ironlaw.workload.layout import Layout
from ironlaw.workload.operations import fast_replace
from ironlaw.workload.schedule import layers_of
from ironlaw.workload.sections import CommunicationConfig

FP32 = 4
EXPERTS = ".experts"  # suffix of the FSDP unit of a block's experts if ep divides them


def site_layout(layout: Layout, communication: CommunicationConfig) -> Layout:
    """Return the layout of one site with local steps; the whole layout without local steps."""
    if not communication.local_steps:
        return layout
    return replace(layout, dp=layout.dp // (communication.sites or layout.dp))


def expert_dp(dp: int, cp: int, ep: int) -> int:
    """Return the number of ranks with the same experts, which reduce their gradients and share their ZeRO shards.

    An expert parallel group consists of ranks of dp x cp; each tensor parallel rank has a part of every expert.
    """
    return dp * cp // ep


def shards_hidden(model: ModelConfig | None, ep: int, ranks: int) -> bool:
    """Whether FSDP shards experts over `ranks` ranks by hidden size instead of by expert.

    True with ep > 1, and otherwise if FSDP would have to pad ranks without an expert to one each.
    """
    if model is None or model.moe is None:
        return False
    return ep > 1 or (ranks > 1 and model.moe.experts % ranks != 0 and model.hidden % ranks == 0)


def shard_of(parameter: Parameter, model: ModelConfig | None, ep: int, ranks: int) -> Parameter:
    """Return one rank's part of a tensor sharded by FSDP: padded rows, or for some experts part of the hidden size."""
    if ranks == 1:
        return parameter
    rows, *rest = parameter.shape
    if model is not None and of_experts(parameter) and shards_hidden(model, ep, ranks):
        if model.hidden in rest:  # divide once, even if the experts' width equals the hidden size
            rest[rest.index(model.hidden)] //= ranks
    else:
        rows = -(-rows // ranks)
    return fast_replace(parameter, shape=(rows, *rest))


def stage_parameters(model: ModelConfig, layout: Layout, stage: int, fused: bool = False) -> list[Parameter]:
    """Return the tensors of one stage on one tensor parallel rank; the last stage has a copy of a tied embedding.
    `fused`: query, key and value stay one matrix in every layout."""
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
    """Split qkv into query, key and value if ranks divide tensors, then return one rank's part of each."""
    parts = [parameter]
    if ".attention.qkv." in parameter.name and (layout.tp > 1 or layout.zero > 0) and not fused:
        sizes = {"query": model.query_size, "key": model.key_value_size, "value": model.key_value_size}
        parts = [
            fast_replace(
                parameter, name=parameter.name.replace("qkv.", f"qkv.{which}."), shape=(rows, *parameter.shape[1:])
            )
            for which, rows in sizes.items()
        ]
    return [fast_replace(part, shape=local_shape_of(part, layout)) if part.divided else part for part in parts]


def local_shape_of(parameter: Parameter, layout: Layout) -> tuple[int, ...]:
    shape = list(parameter.shape)
    for degree, dimension in parameter.divided:
        shape[dimension] = -(-shape[dimension] // getattr(layout, degree))
    return tuple(shape)


def of_experts(parameter: Parameter) -> bool:
    return ".experts." in parameter.name


def is_plain(layout: Layout) -> bool:
    """Whether DDP manages the replicas, because nothing divides the weights."""
    return layout.zero == 0 and layout.tp * layout.pp * layout.ep == 1


FIRST_BUCKET_BYTES, BUCKET_BYTES = 2**20, 25 * 2**20
"""DDP's bucket sizes: the first is small, so that communication starts early."""


def bucket_bytes(parameters: list[Parameter]) -> list[int]:
    """Return the bytes of DDP's buckets in the order they fill, last parameters first."""
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
    """Return FSDP's units: each block, the embedding and the output layer unless they are one tensor, and the root.

    With a `chunked` loss the output layer belongs to the root, since the loss uses its weight without calling it.

    Expert parallel experts are sharded over other ranks than the rest of their block, and form their own units.
    """
    names = {p.name for p in parameters}
    own_units = {"embedding.weight", "head.weight"}
    if (
        model is not None
        and model.tied
        and "embedding.weight" in names
        and "head.weight" not in names
        and "final_norm.weight" in names
    ):
        own_units = set()  # one tensor, used at both ends
    if chunked:
        own_units.discard("head.weight")
    groups: dict[str, list[Parameter]] = {}
    for parameter in parameters:
        unit = "root"
        if parameter.name.startswith("blocks."):
            unit = ".".join(parameter.name.split(".")[:2])
            if ep > 1 and of_experts(parameter):
                unit += EXPERTS
        elif parameter.name in own_units:
            unit = parameter.name
        groups.setdefault(unit, []).append(parameter)
    return groups


def local_parameters(model: ModelConfig, layout: Layout, parameters: list[Parameter]) -> list[Parameter]:
    """Return the part of a stage's tensors that this rank updates: its shards under ZeRO, else all of them."""
    shards = layout.sharing
    apart = expert_dp(layout.dp, layout.cp, layout.ep) if layout.zero and layout.ep > 1 else shards
    return [shard_of(p, model, layout.ep, apart if of_experts(p) else shards) for p in parameters]
