"""A training step as a Program: the operations, collectives, updates and tensors of each rank, by pipeline stage.

    program = step(model, StepBatch(sequences=512, tokens=4096), Layout(dp=8, tp=2, micro_batch=2), Recipe("bf16"))
    for op, times in program.stages[0].operations(): ...          # of a micro-batch, layers of a kind folded
    for layer in program.stages[0].layers: layer.forward, layer.backward       # in order of execution
    program.collectives[0]                                        # of a rank at the first pipeline position, per step

A single process is `Layout()`, where all degrees are 1. A layout rewrites the program of one process: tensor, sequence
and context parallelism divide operations (`division.py`) and insert collectives (`collectives.py`), expert parallelism
inserts exchanges, ZeRO shards a rank's tensors and updates (`sharding.py`), a pipeline cuts the list of layers, and
recomputation repeats operations (`recompute.py`). Programs also come from traced modules (`step_of_trace`) and from
serving (`serving.py`). A program is independent of hardware: the planner computes seconds.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, lru_cache
from typing import TYPE_CHECKING, Any, NamedTuple

from ironlaw.ledger import Kind, Phase
from ironlaw.model.config import ModelConfig
from ironlaw.model.parameters import Parameter, model_parameters, of_blocks
from ironlaw.workload.blocks import FP32, INDEX, BlockAdapters, Policy, Shape
from ironlaw.workload.collectives import Collective, collectives, message_bytes
from ironlaw.workload.division import local_shape
from ironlaw.workload.kinds import both_passes, has_experts, layer_groups
from ironlaw.workload.layout import Layout
from ironlaw.workload.operations import Operation, fast_replace, with_memory
from ironlaw.workload.optimizers import PAGED, adamw_operations, check_patterns, state_bytes, update_operations
from ironlaw.workload.recipe import Recipe, StepBatch
from ironlaw.workload.recompute import freed_after_backward, freed_after_forward, recomputed_operations, weight_copies
from ironlaw.workload.schedule import layers_of, stages_of
from ironlaw.workload.sections import FROZEN, ObjectiveConfig
from ironlaw.workload.sharding import BUCKET_BYTES, local_parameters, shard_of, site_layout
from ironlaw.workload.updates import Loop

if TYPE_CHECKING:  # a trace needs torch, a program does not
    from ironlaw.workload.trace_store import ModuleTrace


EMBEDDING, HEAD = "embedding.weight", "head.weight"


@dataclass(frozen=True)
class Layer:
    """A part of the model in one micro-batch: the embedding, one block or the output layer. FSDP gathers its weights by
    `name`. Operations with `repeat` 0 take memory but no time."""

    name: str
    kind: str  # the group of its operations
    forward: tuple[Operation, ...]
    backward: tuple[Operation, ...] = ()
    recomputed: tuple[Operation, ...] = ()  # run before `backward`: the recomputed part of the forward pass
    cast_weight_bytes: int = 0  # of a recomputed block, cached by autocast until the end of the forward pass


@dataclass(frozen=True)
class Stage:
    """The work of one rank of a pipeline stage: layers of a micro-batch, and the update once per step."""

    layers: tuple[Layer, ...]
    parameters: tuple[Parameter, ...] = ()  # as held by a tensor parallel rank
    shards: tuple[Parameter, ...] = ()  # the part of the parameters that this rank updates
    update: tuple[Operation, ...] = ()

    def operations(self) -> Iterator[tuple[Operation, int]]:
        """Yield a micro-batch's operations with their repetitions: forward then backward, layers of a kind folded."""
        return folded(self.layers)


@dataclass(frozen=True)
class Program:
    """A step of a layout: its `layout.pp x layout.virtual_stages` stages in order, and tensors by pipeline position."""

    layout: Layout
    stages: tuple[Stage, ...]
    micro_batches: int = 1  # per replica and step
    remainder: tuple[Layer, ...] = ()  # the last micro-batch, if smaller; one process only
    tensors: tuple[tuple[Tensor, ...], ...] = ((),)
    model: ModelConfig | None = None
    batch: StepBatch | None = None
    recipe: Recipe = field(default_factory=Recipe)
    shape: Shape | None = None  # of a rank's micro-batch
    sent: tuple[Collective, ...] | None = None  # collectives of each rank, if they do not follow from the layout

    @cached_property
    def collectives(self) -> tuple[tuple[Collective, ...], ...]:
        """The collectives of a rank at each pipeline position, in one step."""
        positions = range(self.layout.pp)
        if self.sent is not None or self.layout.accelerators == 1:
            return (self.sent or (),) * len(positions)
        assert self.model is not None and self.batch is not None
        return tuple(tuple(collectives(self.model, self.layout, self.batch, self.recipe, at)) for at in positions)

    @property
    def message_bytes(self) -> int:
        """Bytes of one rank's residual stream of a micro-batch, sent from stage to stage."""
        assert self.model is not None and self.batch is not None
        return message_bytes(self.model, self.layout, self.batch)

    def stages_at(self, position: int) -> list[int]:
        """Return the numbers of the stages held by a rank at a pipeline position."""
        return stages_of(self.layout.schedule, self.layout.pp, self.layout.virtual_stages, position)

    def operations(self, stage: int = 0) -> Iterator[tuple[Operation, int]]:
        """Yield the operations of a stage in one step, with their repetitions."""
        here = self.stages[stage]
        whole = self.micro_batches - bool(self.remainder)
        yield from ((op, times * whole) for op, times in here.operations())
        yield from folded(self.remainder)
        yield from ((op, op.repeat) for op in here.update if op.repeat)

    def flops(self) -> int:
        """Return the FLOPs of matrix products in one step, summed over one rank of every stage."""
        return sum((op.flops or 0) * times for stage in range(len(self.stages)) for op, times in self.operations(stage))

    @cached_property
    def last_stage(self) -> int:
        return len(self.stages) - 1


def step(
    model: ModelConfig, batch: StepBatch, layout: Layout | None = None, recipe: Recipe | None = None,
    position: int | None = None,
) -> Program:  # fmt: skip
    """Return the program of one training step of `model`. The layout must be valid for it (`Layout.check`).

    With a pipeline `position`, tensors and updates are computed for the ranks at that position only.
    """
    layout, recipe = layout or Layout(micro_batch=batch.sequences), recipe or Recipe()
    if recipe.optimizer.patterns:
        whole = recipe.adapters.trained(model, range(model.layers)) if recipe.adapters else model_parameters(model)
        check_patterns([parameter.name for parameter in whole], recipe.optimizer)
    micro_batches, rest = divmod(batch.sequences, layout.dp * layout.micro_batch)
    count, per_site = layout.pp * layout.virtual_stages, site_layout(layout, recipe.communication)
    shape = local_shape(micro_batch_shape(model, layout.micro_batch, batch, recipe), per_site)
    embedded, *blocks, output = _known_layers(shape)
    stages, frozen = [], [0] * count
    cut = layers_of(model.layers, count, layout.virtual_stages)
    positions = [stages_of(layout.schedule, layout.pp, layout.virtual_stages, at) for at in range(layout.pp)]
    wanted = range(count) if position is None else positions[position]
    for stage, numbers in enumerate(cut):
        first, last = [embedded] * (stage == 0), [output] * (stage == count - 1)
        layers = (*first, *(blocks[number] for number in numbers), *last)
        if stage not in wanted:
            stages.append(Stage(layers))
            continue
        parameters = recipe.parameters(model, per_site, stage, numbers)
        shards = local_parameters(model, per_site, [p for p in parameters if p.trained])
        if recipe.adapters:  # their frozen tensors are divided only by ZeRO 3
            ranks = per_site.sharing if per_site.zero == 3 else 1
            held = (shard_of(p, model, per_site.ep, ranks) for p in recipe.frozen(model, per_site, stage))
            scales = recipe.adapters.scale_bytes(of_blocks(model, numbers), per_site)
            frozen[stage] = scales + sum(p.bytes for p in held)
        update = update_operations(
            shards, recipe.optimizer, accumulation=micro_batches + bool(rest), cuda=recipe.cuda
        )  # fmt: skip
        if recipe.offloads_optimizer:  # the host updates; clipping stays on the device with the gradients
            update = [op for op in update if op.phase is not Phase.OPTIMIZER or runs_on_device(op)]
        stages.append(Stage(layers, tuple(parameters), tuple(shards), tuple(update)))
    return Program(
        layout, tuple(stages), micro_batches + bool(rest),
        layers_of_shape(replace(shape, micro_batch=rest)) if rest else (),
        tuple(
            tuple(
                persistent_tensors(
                    model, layout, batch, recipe, [n for stage in held for n in cut[stage]],
                    [p for stage in held for p in stages[stage].shards], sum(frozen[stage] for stage in held),
                )
                if held[0] in wanted else ()
            )
            for held in positions
        ),
        model, batch, recipe, shape,
    )  # fmt: skip


def step_of_trace(trace: ModuleTrace, accumulation: int = 1, loop: Loop | None = None, cpu: bool = False) -> Program:
    """Return the program of a traced module: one process, and one micro-batch as traced. The optimizers are those of
    `loop`, by default AdamW on every trained parameter.

    Gradients have the parameters' dtype; recomputation and dtypes are those of the module. On a `cpu` the scratch
    memory of kernels is counted.
    """
    operations = [with_memory(op, scratch=op.cpu_scratch_bytes if cpu else 0) for op in trace.operations]
    turn = next((n for n, op in enumerate(operations) if op.phase is not Phase.FORWARD), len(operations))
    forward: list[Operation] = [*operations[:turn]]
    gradients = loop.gradients if loop else "none"
    if gradients == "forward" and accumulation > 1:  # those of the micro-batch before exist anyway
        gradients = "none"
    if gradients == "forward":
        cleared = -trace.trained_bytes
        forward.append(Operation("zero_grad", Kind.OTHER, Phase.OPTIMIZER, "", "", repeat=0, gradient_bytes=cleared))
    layer = Layer(trace.name, "module", tuple(forward), tuple(operations[turn:]))
    if loop is None:
        update = adamw_operations(trace.trained_parameters, trace.trained_tensors, accumulation=accumulation)
        state, note = 2 * trace.trained_bytes, "two moments of AdamW"
    else:
        update = loop.operations(trace.trained_parameters, accumulation)
        state, note = loop.state_bytes(), loop.names()
    tensors = (
        Tensor("weights", trace.parameter_bytes + trace.buffer_bytes, "parameters and buffers"),
        Tensor("optimizer", state, note),
        Tensor("batch", trace.input_bytes, "inputs"),
        Tensor("gradients", trace.trained_bytes if gradients != "none" else 0, "of the step before"),
    )
    return Program(Layout(), (Stage((layer,), update=tuple(update)),), accumulation, tensors=(tensors,))


def replicated(program: Program, trace: ModuleTrace, layout: Layout) -> Program:
    """Return the program of one of `layout.dp` replicas of a traced module. ZeRO shards its state over `layout.shard`
    replicas, if given; the other copies then reduce what they hold (hybrid sharding).

    ZeRO 0: DDP, whose buckets hold a second copy of the gradients. 1: the same buckets, scattered; updated weights are
    gathered. 2 and 3: FSDP gathers units of weights ahead of their use and scatters their gradients. Under 2 weights
    stay until the backward pass is over, under 3 two units at a time, gathered again for that pass.
    """
    ((tensors,), (stage,)), passes, zero = (program.tensors, program.stages), program.micro_batches, layout.zero
    weights, trained, ranks = trace.parameter_bytes, trace.trained_bytes, layout.sharing
    units, largest = len(trace.unit_bytes), max(trace.unit_bytes, default=0)
    divided = {"optimizer": sum(t.bytes for t in tensors if t.component == "optimizer")} if zero else {}
    if zero < 2:
        calls, reduced = -(-trained // BUCKET_BYTES), trained
        added = [Tensor("communication", trained, "buckets of gradients")]
        sent = [Collective("shard", "all_gather", units, trained)] if zero else []
    else:
        calls, reduced = passes * units, passes * trained
        divided["weights"] = weights
        gathered = (2 * largest, "of a unit and the next") if zero == 3 else (weights + largest, "of all units")
        added = [Tensor("gathered", *gathered), Tensor("reducing", largest, "of a unit")]
        times = passes * (zero - 1)
        sent = [Collective("shard", "all_gather", times * units, times * weights)]
    sent += [Collective("shard", "reduce_scatter", calls, reduced)] if zero else []
    if layout.dp > ranks:
        sent.append(Collective("replicate", "all_reduce", calls, reduced // ranks))
    own_tensors = [t._replace(bytes=t.bytes - divided.get(t.component, 0) * (1 - 1 / ranks)) for t in tensors]
    (layer,), own = stage.layers, ranks if zero >= 2 else 1
    backward = tuple(replace(op, gradient_bytes=op.gradient_bytes // own) for op in layer.backward)
    update = tuple(
        replace(op, elements=op.elements // of, bytes_moved=op.bytes_moved // of)
        for op in stage.update
        for of in [ranks if op.phase is Phase.OPTIMIZER else own]  # gradients of micro-batches are added before
    )
    stage = replace(stage, layers=(replace(layer, backward=backward),), update=update)
    return replace(program, layout=layout, stages=(stage,), tensors=((*own_tensors, *added),), sent=tuple(sent))


def runs_on_device(update: Operation) -> bool:
    """Whether an operation of an offloaded optimizer runs on the device: only clipping does."""
    return update.name.startswith("clip")


def micro_batch_shape(model: ModelConfig, micro_batch: int, batch: StepBatch, recipe: Recipe) -> Shape:
    """Return the shape of one micro-batch of the whole model."""
    recomputes_first = bool(recipe.recompute) and recipe.recompute[0] is not None
    return Shape(
        model, micro_batch, batch.tokens, recipe.precision, fused_rmsnorm=recipe.cuda,
        recompute=recipe.recompute, loss_chunk=recipe.loss_chunk, documents=batch.documents, onednn=recipe.onednn,
        native=recipe.native, adapters=recipe.adapters.of_blocks(model, recomputes_first) if recipe.adapters else (),
    )  # fmt: skip


def layers_of_shape(shape: Shape) -> tuple[Layer, ...]:
    """Return all layers in order of the forward pass; those of the same kind, policy and adapters share operations."""
    made: dict[tuple[str, Policy, tuple[BlockAdapters, ...]], Layer] = {}
    kinds = layer_groups(shape.model)
    policies: Sequence[Policy] = shape.recompute or (None,) * len(kinds)
    layers = [fast_replace(_layer(shape, "embedding"), name=EMBEDDING)]
    for number, (kind, policy) in enumerate(zip(kinds, policies, strict=True)):
        adapters = shape.adapters[number : number + 1]
        layer = made.get((kind, policy, adapters))
        if layer is None:
            layer = made[kind, policy, adapters] = _layer(replace(shape, adapters=adapters), kind, policy)
        layers.append(fast_replace(layer, name=f"blocks.{number}"))
    return (*layers, fast_replace(_layer(shape, "head"), name=HEAD))


_known_layers = lru_cache(maxsize=32)(layers_of_shape)


def _layer(shape: Shape, kind: str, policy: Policy = None) -> Layer:
    forward, backward = both_passes(shape, kind)
    if policy is None:
        return Layer("", kind, tuple(forward), tuple(backward))
    drop, copies = freed_after_forward(shape, policy, kind), weight_copies(shape, kind)
    recomputed = recomputed_operations(shape, policy, kind)
    freed = freed_after_backward(drop, recomputed, copies)
    # The stream's gradient is cast for the last branch before that branch is recomputed.
    before = 1 if backward[0].name == "residual_cast" else 0
    recomputed = [*backward[:before], *recomputed]
    return Layer("", kind, (*forward, drop), (*backward[before:], freed), tuple(recomputed), copies)


def folded(layers: Iterable[Layer]) -> Iterator[tuple[Operation, int]]:
    """Yield a micro-batch's calls, forward then backward, with their repetitions; layers that share operations once."""
    groups: dict[tuple[int, int], list[Layer]] = {}
    for layer in layers:
        groups.setdefault((id(layer.forward), id(layer.recomputed)), []).append(layer)
    counted = [(group[0], len(group)) for group in groups.values()]
    output, other_layers = ([one for one in counted if (one[0].name == HEAD) is last] for last in (True, False))
    passes = [(layer.forward, times) for layer, times in counted]
    passes += [(layer.backward, times) for layer, times in output]
    passes += [(layer.recomputed, times) for layer, times in other_layers]
    passes += [(layer.backward, times) for layer, times in reversed(other_layers)]
    for operations, times in passes:
        yield from ((op, op.repeat * times) for op in operations if op.repeat)


def training_operations(shape: Shape) -> list[Operation]:
    """Return every call of one micro-batch, forward then backward, with layers folded into `repeat`."""
    return [replace(op, repeat=times) for op, times in folded(layers_of_shape(shape))]


# -- what a rank holds from one step to the next --------------------------------------------------------------------


DOCUMENT_BYTES = 4  # int32: each token's document number, if attention stays within documents


class Tensor(NamedTuple):
    """A component of a rank's permanent memory: weights, optimizer state, a cache, ..."""

    component: str
    bytes: float
    note: str = ""


def persistent_tensors(
    model: ModelConfig, layout: Layout, batch: StepBatch, recipe: Recipe, layers: Sequence[int],
    shards: Sequence[Parameter], frozen: int = 0,
) -> Iterator[Tensor]:  # fmt: skip
    """Yield the tensors that a rank holds from step to step; `plan/memory.py` tracks the others. The rank has these
    layers, updates `shards` and holds `frozen` bytes of frozen tensors. Weights are fp32."""
    elements = sum(p.elements for p in shards) * FP32
    buffers = rotary_table_bytes(model) + routing_buffer_bytes(model, layers)
    hosted, paged = recipe.offloads_optimizer, PAGED.get(recipe.optimizer.name)
    state = 0 if hosted else state_bytes(shards, recipe.optimizer)
    average = elements if recipe.average else 0
    formats = recipe.adapters.held_as(recipe.precision) if recipe.adapters else "fp32 parameters"
    yield Tensor("weights", frozen + elements + buffers, formats)
    where = ", on the host" if hosted else f", {paged}" if paged else ""
    yield Tensor("optimizer", state, f"{recipe.optimizer.name}{where}")
    yield Tensor("batch", batch_bytes(batch) // layout.dp, "tokens and targets")
    if recipe.average:
        yield Tensor("average", average, "exponential average of the weights")
    if recipe.checkpoints and not recipe.cuda:
        note = "on a CPU beside the steps that run while a checkpoint is written"
        yield Tensor("checkpoint copy", elements + state + average, note)


def rotary_table_bytes(model: ModelConfig) -> int:
    tables = 1 + (model.rope_theta_local is not None) + (model.rope_long is not None)
    return tables * model.context * model.size_of_rotary * FP32 if model.positions == "rope" else 0


def routing_buffer_bytes(model: ModelConfig, layers: Sequence[int]) -> int:
    """Return the bytes of each MoE layer's loads per expert, dropped choices and routing biases."""
    if model.moe is None:
        return 0
    kinds = layer_groups(model)
    routed = sum(has_experts(kinds[layer]) for layer in layers)
    return routed * (model.moe.experts * (INDEX + FP32 * (model.moe.balance == "bias")) + INDEX)


def batch_bytes(batch: StepBatch) -> int:
    """Return the bytes of a step's tokens and targets, int64, and of document numbers if attention uses them."""
    return batch.sequences * batch.tokens * (2 * INDEX + (DOCUMENT_BYTES if batch.documents else 0))


# -- objectives with a second model ---------------------------------------------------------------------------------


def with_second_model(program: Program, objective: ObjectiveConfig, second: ModelConfig, held: bool) -> Program:
    """Add the forward pass of a second model, a teacher or the reference of preferences, before each micro-batch's own,
    in one process. Only its logits are saved, for the loss, which holds more tensors of their size than cross-entropy
    does. `held`: its weights are in memory besides the model's, in fp32."""
    assert program.shape is not None
    stage = program.stages[0]
    layers = _with_frozen_model(program.shape, objective, second, stage.layers)
    remainder: tuple[Layer, ...] = ()
    if program.remainder:
        assert program.batch is not None
        rest = program.batch.sequences % program.layout.micro_batch
        remainder = _with_frozen_model(replace(program.shape, micro_batch=rest), objective, second, program.remainder)
    tensors = program.tensors[0]
    if held:
        tensors = (*tensors, Tensor(FROZEN, second.parameters * FP32, "of the objective, in fp32"))
    return replace(
        program, stages=(replace(stage, layers=layers),), remainder=remainder, tensors=(tensors, *program.tensors[1:])
    )


def _with_frozen_model(
    shape: Shape, objective: ObjectiveConfig, second: ModelConfig, layers: Sequence[Layer]
) -> tuple[Layer, ...]:
    here = replace(shape, model=second, recompute=(), loss_chunk=0, adapters=())
    forward = [
        replace(op, name=FROZEN, group="", saved_bytes=0, temporary_bytes=0, frees_saved_bytes=0,
                frees_temporary_bytes=0, gradient=())
        for layer in layers_of_shape(here) for op in layer.forward if op.kind is not Kind.LOSS
    ]  # fmt: skip
    logits = shape.tokens * second.vocab
    distils = objective.kind == "distillation"
    if distils:
        forward[-1] = replace(forward[-1], saved_bytes=logits * shape.matmul_bytes)
    *others, head = layers
    assert head.name == HEAD
    if distils:
        head = _with_distillation(head, logits, shape.matmul_bytes)
    return (Layer(FROZEN, FROZEN, tuple(forward)), *others, head)


def _with_distillation(head: Layer, logits: int, width: int) -> Layer:
    """Add distillation to the loss: both models' logits of the trained rows are copied to fp32, three log-softmaxes are
    saved instead of one, and the divergence takes three more tensors of that size."""
    size = logits * FP32

    def op(phase: Phase, **memory: Any) -> Operation:
        kernel = f"loss_{'forward' if phase is Phase.FORWARD else 'backward'}"
        return Operation(
            "distillation", Kind.LOSS, phase, "head", kernel, repeat=3, elements=logits, bytes_moved=2 * size,
            **memory,
        )  # fmt: skip

    rows = op(Phase.FORWARD, saved_bytes=2 * size, temporary_bytes=6 * size, frees_temporary_bytes=6 * size,
              frees_saved_bytes=logits * width)  # fmt: skip
    back = op(Phase.BACKWARD, temporary_bytes=size, frees_temporary_bytes=size, frees_saved_bytes=2 * size)
    return replace(head, forward=(*head.forward, rows), backward=(back, *head.backward))
