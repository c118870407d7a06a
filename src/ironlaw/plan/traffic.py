"""What every rank of a layout sends in a step of Ironlaw's own trainer, by mesh dimension and kind of collective.

    table = traffic(model, layout, sequence=4096, global_batch=512)     # one mapping per pipeline rank
    table[0]["shard", "all_gather"]                                      # Sent(count, bytes)

Exact for replicas, ZeRO, FSDP and tensor parallel layouts, and checked there against collectives counted in a run
(`tests/train/parallel`). Bytes are those of the whole buffer: what is reduced, what is gathered, what is sent; a ring
moves 2 (n-1)/n of the first and (n-1)/n of the others per rank. Weights and gradients travel in fp32, as the trainer
holds them. Dimensions are those of the trainer's mesh: `replicate` (copies of the state), `shard` (ranks that share
one), `tp`, `cp`, `pp`, `ep`, and `expert_replicate` and `expert_shard` for the experts' own state; `micro_batch` are
the ranks that count experts' load together, `site` sites that average their weights. The loss and the gradient norm are
one all-reduce of 24 bytes (and 8 more per further site) over all ranks, not listed, nor is that of the experts' loads
after the step, nor that of the numbers of targets where rows are padded.

Without a capacity, how many rows a rank's experts receive depends on what the routers choose. Every rank sends as many
as its tokens choose and gets them back, which is exact; what it returns to others is listed with the mean, exact for
the expert parallel group as a whole. Under a capacity that several ranks share, rows are listed as if none was dropped.

FSDP2 gathers a block at a time, each tensor padded to a multiple of the ranks in its first dimension.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, replace

from ironlaw.config import CommunicationConfig
from ironlaw.model.config import ModelConfig
from ironlaw.plan.layout import V_SHAPED, Layout, ends_lighter
from ironlaw.workload.parameters import Parameter, model_parameters

FP32, BF16, INT64 = 4, 2, 8


@dataclass(frozen=True)
class Sent:
    """`count` collectives with buffers of `bytes` in all. Not counted: what PowerSGD makes of DDP's buckets, and a
    meeting's chunks. Then it is 0."""

    count: int
    bytes: int


Table = dict[tuple[str, str], Sent]


def layers_of(layers: int, stages: int, virtual: int) -> list[range]:
    """Layers of each stage as the planner deals them (`plan/stages.py`): as equal as can be, less at the ends."""
    less = ends_lighter(layers, stages)
    if virtual > 1 and less is not None:
        counts = [(layers + sum(less)) // stages] * stages
        counts[0] -= less[0]
        counts[-1] -= less[1]
    else:
        whole, rest = divmod(layers, stages)
        turns = [*range(1, stages - 1), 0, stages - 1] if stages > 1 else [0]
        counts = [whole + (turns.index(stage) < rest) for stage in range(stages)]
    starts = [sum(counts[:stage]) for stage in range(stages)]
    return [range(start, start + count) for start, count in zip(starts, counts, strict=True)]


def stages_of(schedule: str, pp: int, virtual: int, rank: int) -> list[int]:
    """Stages of a pipeline rank, in order."""
    if schedule in V_SHAPED:
        return [rank, 2 * pp - 1 - rank]
    return [rank + pp * chunk for chunk in range(virtual)]


def stage_parameters(model: ModelConfig, layout: Layout, stage: int) -> list[Parameter]:
    """Tensors of one stage as one tensor parallel rank holds them; the last has a copy of a tied embedding."""
    stages = layout.pp * layout.virtual_stages
    layers = layers_of(model.layers, stages, layout.virtual_stages)[stage]
    first, last = stage == 0, stage == stages - 1
    found = []
    for parameter in model_parameters(model):
        part, _, rest = parameter.name.partition(".")
        here = {"embedding": first, "positions": first, "final_norm": last, "head": last}
        if here.get(part, part == "blocks" and int(rest.split(".")[0]) in layers):
            found += _divided(parameter, model, layout)
    if last and not first and model.tied:
        found += _divided(Parameter("head.weight", (model.vocab, model.hidden)), model, layout)
    return found


def _divided(parameter: Parameter, model: ModelConfig, layout: Layout) -> list[Parameter]:
    """Query, key and value apart where ranks hold parts of tensors; then what tp leaves of each."""
    parts = [parameter]
    if ".attention.qkv." in parameter.name and (layout.tp > 1 or layout.zero > 0):
        sizes = {"query": model.query_size, "key": model.key_value_size, "value": model.key_value_size}
        parts = [
            Parameter(parameter.name.replace("qkv.", f"qkv.{which}."), (rows, *parameter.shape[1:]))
            for which, rows in sizes.items()
        ]
    return [Parameter(part.name, _local_shape(part, layout), part.embedding) for part in parts]


def _local_shape(parameter: Parameter, layout: Layout) -> tuple[int, ...]:
    """Outputs divided: projections in, up, gate, vocabulary. Inputs divided: the two that narrow. The rest is whole."""
    name, shape, tp = parameter.name, parameter.shape, layout.tp
    if _of_experts(parameter):
        count, outputs, inputs = shape
        narrows = ".down." in name
        return count // layout.ep, outputs // (1 if narrows else tp), inputs // (tp if narrows else 1)
    if tp == 1:
        return shape
    if (
        ".qkv." in name
        or name.endswith((".up.weight", ".gate.weight", ".up.bias", ".gate.bias"))
        or name in ("embedding.weight", "head.weight")
    ):
        return (-(-shape[0] // tp), *shape[1:])
    if name.endswith(("attention.out.weight", ".down.weight")):
        return (shape[0], -(-shape[1] // tp))
    return shape


def _of_experts(parameter: Parameter) -> bool:
    return ".experts." in parameter.name


PLAIN = CommunicationConfig()


def traffic(
    model: ModelConfig, layout: Layout, *, sequence: int, global_batch: int, communication: CommunicationConfig = PLAIN,
    meeting: bool = False, counted_batch: int | None = None,
) -> list[Table]:  # fmt: skip
    """One table per pipeline rank, of a step. `layout.accumulation` follows from the global batch.

    `communication` may send gradients as less than fp32, PowerSGD's from its start step on. With local updates the
    step is one between meetings, or one at whose end the sites meet. `counted_batch`: sequences over which the load of
    experts is counted, the config's micro-batch, where that is more than the layout's, which no replica's can exceed.
    """
    together = max(1, (counted_batch or 1) // (global_batch // layout.dp))
    micro_batches = global_batch // (layout.dp * layout.micro_batch)
    if communication.local_steps:
        layout = replace(layout, dp=layout.dp // (communication.sites or layout.dp))  # of one site
    tables = []
    for rank in range(layout.pp):
        total: Counter[tuple[str, str, str]] = Counter()
        for stage in stages_of(layout.schedule, layout.pp, layout.virtual_stages, rank):
            lines = [*stage_lines(model, layout, sequence, micro_batches, stage, communication, together)]
            if meeting and communication.local_steps:
                lines += _meeting(model, layout, stage, communication)
            for dimension, kind, count, size in lines:
                total[dimension, kind, "count"] += count
                total[dimension, kind, "bytes"] += size
        keys = sorted({(dimension, kind) for dimension, kind, _ in total})
        table = {key: Sent(total[*key, "count"], total[*key, "bytes"]) for key in keys}
        tables.append({key: sent for key, sent in table.items() if sent.bytes})
    return tables


def merged(table: Table, aliases: dict[str, str]) -> Table:
    """The table with dimensions renamed, where one process group serves two of them."""
    result: Table = {}
    for (dimension, kind), sent in table.items():
        key = aliases.get(dimension, dimension), kind
        known = result.get(key, Sent(0, 0))
        result[key] = Sent(known.count + sent.count, known.bytes + sent.bytes)
    return result


Line = tuple[str, str, int, int]


def stage_lines(
    model: ModelConfig, layout: Layout, sequence: int, micro_batches: int, stage: int,
    communication: CommunicationConfig = PLAIN, together: int = 1,
) -> Iterable[Line]:  # fmt: skip
    """(dimension, kind, count, bytes) of one stage in a step, a line for each size of buffer.

    `together`: replicas that count the load of experts together.
    """
    tokens = layout.micro_batch * sequence // layout.cp
    parameters = stage_parameters(model, layout, stage)
    yield from _data_parallel(model, layout, parameters, micro_batches, communication)
    if layout.tp > 1:
        yield from _tensor_parallel(model, layout, parameters, tokens, micro_batches, stage)
    blocks = len({p.name.split(".")[1] for p in parameters if p.name.startswith("blocks.")})
    if layout.cp > 1:
        gathered = 2 * layout.micro_batch * sequence * model.key_value_size // layout.tp * FP32
        yield "cp", "all_gather", blocks * micro_batches, blocks * micro_batches * gathered
        yield "cp", "reduce_scatter", blocks * micro_batches, blocks * micro_batches * gathered
    if model.moe is not None:
        yield from _experts(model, layout, sequence, micro_batches, stage, together * layout.cp)
    if layout.pp > 1:
        yield from _pipeline(model, layout, parameters, tokens, micro_batches, stage)


def _data_parallel(
    model: ModelConfig, layout: Layout, parameters: list[Parameter], micro_batches: int,
    communication: CommunicationConfig,
) -> Iterable[Line]:  # fmt: skip
    sharded = layout.zero > 0
    ranks = (layout.shard or layout.dp) * layout.cp if sharded else 1
    copies = layout.dp // (layout.shard or layout.dp) if sharded else layout.dp * layout.cp
    # A pipeline reduces when its schedule is through, whatever the stage of ZeRO.
    reductions = micro_batches if layout.zero >= 2 and layout.pp == 1 else 1
    plain = is_plain(layout)
    together = 0  # bytes of DDP's buckets
    for unit, tensors in units_of(model, parameters, layout.ep).items():
        if unit.endswith(".experts"):
            yield from _expert_parallel_data(layout, tensors, reductions, micro_batches, communication)
            continue
        elements = sum(-(-p.shape[0] // ranks) * ranks * math.prod(p.shape[1:]) for p in tensors)
        padded, gradients = elements * FP32, elements * (BF16 if communication.gradients == "bf16" else FP32)
        if communication.gradients == "powersgd":
            gradients = sum(compressed_elements(p.shape, communication.rank) for p in tensors) * FP32
        gathers = 1
        if layout.zero == 3:
            gathers = micro_batches * (1 if unit == "root" else 2)
        if ranks > 1:
            yield "shard", "all_gather", gathers, gathers * padded
            yield "shard", "reduce_scatter", reductions, reductions * gradients
        if copies > 1 and plain:
            together += gradients
        elif copies > 1:
            yield "replicate", "all_reduce", reductions, reductions * gradients // ranks
    if together:
        count = 0 if communication.gradients == "powersgd" else len(bucket_bytes(parameters))
        yield "replicate", "all_reduce", count, together


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


def compressed_elements(shape: tuple[int, ...], rank: int) -> int:
    """What PowerSGD sends of a gradient: two matrices of `rank` columns, or all of it where that saves less than half
    (PyTorch's `min_compression_rate` of 2)."""
    rows, columns = shape[0], math.prod(shape[1:])
    thin = (rows + columns) * min(rows, columns, rank)
    return thin if 2 * thin < rows * columns else rows * columns


def _meeting(model: ModelConfig, layout: Layout, stage: int, communication: CommunicationConfig) -> Iterable[Line]:
    """Each rank's part of the weights, once, to the same rank of the other sites; the largest where parts differ."""
    ranks = (layout.shard or layout.dp) * layout.cp if layout.zero > 0 else 1
    parameters = stage_parameters(model, layout, stage)
    elements = sum(-(-p.shape[0] // ranks) * math.prod(p.shape[1:]) for p in parameters)
    yield "site", "all_reduce", 0, elements * (BF16 if communication.gradients == "bf16" else FP32)


def _expert_parallel_data(
    layout: Layout, tensors: list[Parameter], reductions: int, micro_batches: int, communication: CommunicationConfig
) -> Iterable[Line]:
    """Experts of one layer over the ranks that hold the same ones; nothing is padded."""
    holders = layout.dp * layout.cp // layout.ep
    if holders == 1:
        return
    size = sum(p.elements for p in tensors) * FP32
    reduced = size // FP32 * (BF16 if communication.gradients == "bf16" else FP32)
    if layout.zero == 0:
        yield "expert_replicate", "all_reduce", reductions, reductions * reduced
        return
    gathers = 2 * micro_batches if layout.zero == 3 else 1
    yield "expert_shard", "all_gather", gathers, gathers * size
    yield "expert_shard", "reduce_scatter", reductions, reductions * reduced


def units_of(model: ModelConfig, parameters: list[Parameter], ep: int = 1) -> dict[str, list[Parameter]]:
    """What FSDP gathers at a time: each block, embedding and output layer unless they are one tensor, and the rest.

    Expert parallel experts are divided over other ranks than the rest of their block, and gathered apart.
    """
    names = {p.name for p in parameters}
    apart = {"embedding.weight", "head.weight"}
    if model.tied and "embedding.weight" in names and "head.weight" not in names and "final_norm.weight" in names:
        apart = set()  # one tensor, used at both ends
    units: dict[str, list[Parameter]] = {}
    for parameter in parameters:
        unit = "root"
        if parameter.name.startswith("blocks."):
            unit = ".".join(parameter.name.split(".")[:2])
            if ep > 1 and _of_experts(parameter):
                unit += ".experts"
        elif parameter.name in apart:
            unit = parameter.name
        units.setdefault(unit, []).append(parameter)
    return units


def _tensor_parallel(
    model: ModelConfig, layout: Layout, parameters: list[Parameter], tokens: int, micro_batches: int, stage: int
) -> Iterable[Line]:
    """Per block and direction one exchange of the residual stream for attention and one for the feed-forward part."""
    stream = tokens * model.hidden * FP32
    blocks = len({p.name.split(".")[1] for p in parameters if p.name.startswith("blocks.")})
    first = stage == 0
    last = stage == layout.pp * layout.virtual_stages - 1
    if layout.sp:
        # Gathered before and scattered after, forward; the same the other way round, backward. Ends likewise.
        ways = 4 * blocks + first + last
        yield "tp", "all_gather", ways * micro_batches, ways * micro_batches * stream
        yield "tp", "reduce_scatter", ways * micro_batches, ways * micro_batches * stream
    else:
        ways = 4 * blocks + first + last  # the embedding forward, the output layer backward
        yield "tp", "all_reduce", ways * micro_batches, ways * micro_batches * stream
    if last:  # of the divided logits: maximum, sum of exponentials, the target's own
        yield "tp", "all_reduce", 3 * micro_batches, 3 * micro_batches * tokens * FP32
    yield from _small_gradients(layout, parameters)


def _small_gradients(layout: Layout, parameters: list[Parameter]) -> Iterable[Line]:
    """Gradients of whole tensors of which a rank sees only its heads or positions."""
    ranks = (layout.shard or layout.dp) * layout.cp if layout.zero > 0 else 1
    partial = [p for p in parameters if p.name.endswith(("query_norm.weight", "key_norm.weight"))]
    partial += [p for p in parameters if p.name.endswith((".router.weight", ".shared_gate.weight"))]
    if layout.sp:
        partial += [p for p in parameters if "_norm." in p.name and p not in partial]
        partial += [p for p in parameters if p.name.startswith("positions.")]
    if partial:
        size = sum(-(-p.shape[0] // ranks) * math.prod(p.shape[1:]) for p in partial) * FP32
        yield "tp", "all_reduce", 1, size


def _experts(
    model: ModelConfig, layout: Layout, sequence: int, micro_batches: int, stage: int, together: int
) -> Iterable[Line]:
    """Rows to their experts and back, forward and backward, and what is counted together. Per tensor parallel rank."""
    moe = model.moe
    assert moe is not None
    stages = layout.pp * layout.virtual_stages
    layers = sum(moe.in_layer(layer) for layer in layers_of(model.layers, stages, layout.virtual_stages)[stage])
    passes = layers * micro_batches
    tokens = layout.micro_batch * sequence // layout.cp
    shared = together > 1
    if layout.ep > 1 and passes:
        capacity = None if shared else moe.capacity(tokens)
        rows = tokens * moe.experts_per_token if capacity is None else moe.experts * capacity
        yield "ep", "all_to_all", 4 * passes, 4 * passes * rows * model.hidden * FP32
        if capacity is None:  # rows for each expert, before they are sent
            yield "ep", "all_to_all", passes, passes * moe.experts * INT64
    if shared and moe.balance == "loss" and moe.balance_loss:
        yield "micro_batch", "all_reduce", passes, passes * moe.experts * INT64
    if shared and moe.capacity_factor is not None:
        chosen = together * tokens * moe.experts_per_token * INT64
        yield "micro_batch", "all_gather", passes, passes * chosen


def _pipeline(
    model: ModelConfig, layout: Layout, parameters: list[Parameter], tokens: int, micro_batches: int, stage: int
) -> Iterable[Line]:
    """Activations forward and their gradients back, to stages on other ranks; a tied weight's gradient both ways."""
    stages = layout.pp * layout.virtual_stages
    message = tokens * model.hidden * FP32 // (layout.tp if layout.sp else 1)

    def rank_of(number: int) -> int:
        return next(
            r for r in range(layout.pp)
            if number in stages_of(layout.schedule, layout.pp, layout.virtual_stages, r)
        )  # fmt: skip

    for other in (stage + 1, stage - 1):
        if 0 <= other < stages and rank_of(other) != rank_of(stage):
            yield "pp", "send", micro_batches, micro_batches * message
    ends = (0, stages - 1)
    if model.tied and stage in ends and rank_of(ends[0]) != rank_of(ends[1]):
        ranks = (layout.shard or layout.dp) * layout.cp if layout.zero > 0 else 1
        (weight,) = [p for p in parameters if p.name in ("embedding.weight", "head.weight")]
        yield "pp", "send", 1, -(-weight.shape[0] // ranks) * weight.shape[1] * FP32
