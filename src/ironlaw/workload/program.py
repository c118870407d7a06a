"""One step as a Program: what every rank computes, sends, updates and holds, by stage of the pipeline.

    program = step(model, Batch(sequences=512, tokens=4096), Layout(dp=8, tp=2, micro_batch=2), Recipe("bf16"))
    for op, times in program.stages[0].operations(): ...          # of a micro-batch, layers of a kind folded
    for layer in program.stages[0].layers: layer.forward, layer.backward       # in the order of execution
    program.collectives[0]                                        # of a rank of the first pipeline position, per step

A single process is `Layout()`, all ones. A layout rewrites the program of one process: tensor, sequence and context
parallelism divide operations (`division.py`) and insert collectives (`collectives.py`), expert parallelism its
exchanges, ZeRO shards what a rank holds and updates (`sharding.py`), a pipeline cuts the list of layers, recomputation
repeats operations (`recompute.py`). A traced module is another source of the same type (`step_of_trace`), serving a
third (`serving.py`). No hardware is known here: seconds are the planner's.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, lru_cache
from typing import TYPE_CHECKING, Any, NamedTuple

from ironlaw.ledger import Kind, Phase
from ironlaw.model.config import ModelConfig
from ironlaw.model.parameters import Parameter, of_blocks
from ironlaw.workload.blocks import FP32, INDEX, BlockAdapters, Policy, Shape
from ironlaw.workload.collectives import Collective, collectives, message_bytes
from ironlaw.workload.division import local_shape
from ironlaw.workload.finetune import Adapters
from ironlaw.workload.kinds import both_passes, has_experts, layer_groups
from ironlaw.workload.layout import Layout
from ironlaw.workload.operations import Operation, changed, grown
from ironlaw.workload.optimizers import BF16, PAGED, adamw_operations, state_bytes, update_operations
from ironlaw.workload.recipe import Recipe, StepBatch
from ironlaw.workload.recompute import again, dropped, freed_after_backward, weight_copies
from ironlaw.workload.schedule import layers_of, stages_of
from ironlaw.workload.sections import FROZEN, ObjectiveConfig
from ironlaw.workload.sharding import local_parameters, of_site, shard_of, stage_parameters
from ironlaw.workload.updates import Loop

if TYPE_CHECKING:  # a trace needs torch, a program does not
    from ironlaw.workload.trace_store import ModuleTrace


EMBEDDING, HEAD = "embedding.weight", "head.weight"


@dataclass(frozen=True)
class Layer:
    """A part of the model in one micro-batch: the embedding, one block, the output layer. FSDP gathers its weights by
    `name`. Operations with `repeat` 0 are memory and no time."""

    name: str
    kind: str  # the group of its operations
    forward: tuple[Operation, ...]
    backward: tuple[Operation, ...] = ()
    recomputed: tuple[Operation, ...] = ()  # before `backward`: what the forward pass runs again
    cast_weight_bytes: int = 0  # of a recomputed block: autocast remembers them until the forward pass is over


@dataclass(frozen=True)
class Stage:
    """What one rank of a pipeline stage computes: layers of a micro-batch, and the update once per step."""

    layers: tuple[Layer, ...]
    parameters: tuple[Parameter, ...] = ()  # as a tensor parallel rank has them
    shards: tuple[Parameter, ...] = ()  # the part of them that this rank updates
    update: tuple[Operation, ...] = ()

    def operations(self) -> Iterator[tuple[Operation, int]]:
        """Of a micro-batch with how often each runs: forward then backward, layers of a kind folded."""
        return folded(self.layers)


@dataclass(frozen=True)
class Program:
    """`stages` by number, `layout.pp x layout.virtual_stages` of them; `tensors` by pipeline position."""

    layout: Layout
    stages: tuple[Stage, ...]
    micro_batches: int = 1  # per replica and step
    remainder: tuple[Layer, ...] = ()  # the last micro-batch, where it is smaller; one process only
    tensors: tuple[tuple[Tensor, ...], ...] = ((),)
    model: ModelConfig | None = None
    batch: StepBatch | None = None
    recipe: Recipe = field(default_factory=Recipe)
    shape: Shape | None = None  # of a rank's micro-batch
    sent: tuple[Collective, ...] | None = None  # by each rank, where the layout does not say it

    @cached_property
    def collectives(self) -> tuple[tuple[Collective, ...], ...]:
        """Of a rank of each pipeline position, in a step."""
        positions = range(self.layout.pp)
        if self.sent is not None or self.layout.accelerators == 1:
            return (self.sent or (),) * len(positions)
        assert self.model is not None and self.batch is not None
        return tuple(tuple(collectives(self.model, self.layout, self.batch, self.recipe, at)) for at in positions)

    @property
    def message_bytes(self) -> int:
        """Of the residual stream that a stage hands on: a micro-batch's, on one rank."""
        assert self.model is not None and self.batch is not None
        return message_bytes(self.model, self.layout, self.batch)

    def stages_at(self, position: int) -> list[int]:
        """Numbers of the stages that a rank of a pipeline position holds."""
        return stages_of(self.layout.schedule, self.layout.pp, self.layout.virtual_stages, position)

    def operations(self, stage: int = 0) -> Iterator[tuple[Operation, int]]:
        """Of a stage in a step, with how often each runs."""
        here = self.stages[stage]
        whole = self.micro_batches - bool(self.remainder)
        yield from ((op, times * whole) for op, times in here.operations())
        yield from folded(self.remainder)
        yield from ((op, op.repeat) for op in here.update if op.repeat)

    def flops(self) -> int:
        """Of matrix products, of one rank of every stage, in a step."""
        return sum((op.flops or 0) * times for stage in range(len(self.stages)) for op, times in self.operations(stage))

    @cached_property
    def last_stage(self) -> int:
        return len(self.stages) - 1


def step(
    model: ModelConfig, batch: StepBatch, layout: Layout | None = None, recipe: Recipe | None = None,
    position: int | None = None,
) -> Program:  # fmt: skip
    """The program of one training step of `model`. The layout must be one that divides it (`Layout.check`).

    Given a pipeline `position`, what is held and updated is worked out of its ranks alone.
    """
    layout, recipe = layout or Layout(micro_batch=batch.sequences), recipe or Recipe()
    micro_batches, rest = divmod(batch.sequences, layout.dp * layout.micro_batch)
    count, per_site = layout.pp * layout.virtual_stages, of_site(layout, recipe.communication)
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
        if recipe.adapters:
            adapted = _adapted(recipe.adapters, model, per_site, recipe, stage, numbers)
            parameters, shards, frozen[stage] = adapted
        else:
            parameters = stage_parameters(model, per_site, stage)
            shards = local_parameters(model, per_site, parameters)
        update = update_operations(
            shards, recipe.optimizer, accumulation=micro_batches + bool(rest), cuda=recipe.cuda
        )  # fmt: skip
        if recipe.offloads_optimizer:  # the update is the host's; clipping stays with the gradients
            update = [op for op in update if op.phase is not Phase.OPTIMIZER or runs_on_device(op)]
        stages.append(Stage(layers, tuple(parameters), tuple(shards), tuple(update)))
    return Program(
        layout, tuple(stages), micro_batches + bool(rest),
        layers_of_shape(replace(shape, micro_batch=rest)) if rest else (),
        tuple(
            tuple(
                lasting_tensors(
                    model, layout, batch, recipe, [n for stage in held for n in cut[stage]],
                    [p for stage in held for p in stages[stage].shards], sum(frozen[stage] for stage in held),
                )
                if held[0] in wanted else ()
            )
            for held in positions
        ),
        model, batch, recipe, shape,
    )  # fmt: skip


def _adapted(
    adapters: Adapters, model: ModelConfig, layout: Layout, recipe: Recipe, stage: int, layers: Sequence[int]
) -> tuple[list[Parameter], list[Parameter], int]:
    """What FSDP or DDP has of a stage, this rank's part of what is trained, and bytes of what is frozen. ZeRO 3 alone
    divides that."""
    trained = adapters.trained(model, layers, layout)
    product_bytes = FP32 if recipe.precision == "fp32" else BF16
    frozen = list(adapters.frozen(stage_parameters(model, layout, stage, fused=True), product_bytes))
    scales, ranks = adapters.scale_bytes(of_blocks(model, layers), layout), layout.sharing
    shards = [shard_of(p, model, layout.ep, ranks) for p in trained]
    if layout.zero < 3:
        return trained, shards, scales + sum(p.bytes for p in frozen)
    return [*trained, *frozen], shards, scales + sum(shard_of(p, model, layout.ep, ranks).bytes for p in frozen)


def step_of_trace(trace: ModuleTrace, accumulation: int = 1, loop: Loop | None = None, cpu: bool = False) -> Program:
    """The program of a traced module: one process, one micro-batch as it was traced, AdamW on every trained parameter
    unless the optimizers of a loop are known.

    Gradients have the parameters' own type; what is recomputed and which types are used, the module has decided. A
    `cpu`'s kernels take what they need for themselves.
    """
    operations = [grown(op, passing=op.cpu_scratch_bytes if cpu else 0) for op in trace.operations]
    turn = next((n for n, op in enumerate(operations) if op.phase is not Phase.FORWARD), len(operations))
    forward: list[Operation] = [*operations[:turn]]
    found = loop.gradients if loop else "none"
    if found == "forward" and accumulation > 1:  # forward passes find gradients of the micro-batch before anyway
        found = "none"
    if found == "forward":
        cleared = -trace.trained_bytes
        forward.append(Operation("zero_grad", Kind.OTHER, Phase.OPTIMIZER, "", "", repeat=0, gradient_bytes=cleared))
    layer = Layer(trace.name, "module", tuple(forward), tuple(operations[turn:]))
    if loop is None:
        update = adamw_operations(trace.trained_parameters, trace.trained_tensors, accumulation=accumulation)
        state, whose = 2 * trace.trained_bytes, "two moments of AdamW"
    else:
        update = loop.operations(trace.trained_parameters, accumulation)
        state, whose = loop.state_bytes(), loop.names()
    tensors = (
        Tensor("weights", trace.parameter_bytes + trace.buffer_bytes, "parameters and buffers"),
        Tensor("optimizer", state, whose),
        Tensor("batch", trace.input_bytes, "inputs"),
        Tensor("gradients", trace.trained_bytes if found != "none" else 0, "of the step before"),
    )
    return Program(Layout(), (Stage((layer,), update=tuple(update)),), accumulation, tensors=(tensors,))


def replicated(program: Program, trace: ModuleTrace, replicas: int, zero: int) -> Program:
    """The program of a traced module, as one of so many replicas runs it.

    ZeRO 0: each has everything, and DDP's buckets hold the gradients once more. ZeRO 3: each has a part of parameters,
    gradients and state; FSDP gathers the weights of a unit for either pass, the next one's meanwhile, and scatters its
    gradients.
    """
    ((tensors,), (stage,)), units = (program.tensors, program.stages), len(trace.unit_bytes)
    if zero == 0:
        buckets = Tensor("communication", trace.trained_bytes, "buckets of gradients")
        added = Collective("replicate", "all_reduce", units, trace.trained_bytes)
        return replace(program, tensors=((*tensors, buckets),), sent=(added,))
    assert zero == 3
    (layer,), elsewhere, largest = stage.layers, 1 - 1 / replicas, max(trace.unit_bytes, default=0)
    divided = {"weights": trace.parameter_bytes, "optimizer": 2 * trace.trained_bytes}
    held = [t._replace(bytes=t.bytes - divided.get(t.component, 0) * elsewhere) for t in tensors]
    held += [Tensor("gathered", 2 * largest, "of a unit and the next"), Tensor("reducing", largest, "of a unit")]
    backward = tuple(replace(op, gradient_bytes=op.gradient_bytes // replicas) for op in layer.backward)
    update = tuple(
        replace(op, elements=op.elements // replicas, bytes_moved=op.bytes_moved // replicas) for op in stage.update
    )
    passes = program.micro_batches
    sent = (
        Collective("shard", "all_gather", 2 * passes * units, 2 * passes * trace.parameter_bytes),
        Collective("shard", "reduce_scatter", passes * units, passes * trace.trained_bytes),
    )
    stage = replace(stage, layers=(replace(layer, backward=backward),), update=update)
    return replace(program, stages=(stage,), tensors=(tuple(held),), sent=sent)


def runs_on_device(update: Operation) -> bool:
    """Of an optimizer that updates on the host, what stays: clipping."""
    return update.name.startswith("clip")


def micro_batch_shape(model: ModelConfig, micro_batch: int, batch: StepBatch, recipe: Recipe) -> Shape:
    """One micro-batch of the whole model."""
    again = bool(recipe.recompute) and recipe.recompute[0] is not None
    return Shape(
        model, micro_batch, batch.tokens, recipe.precision, fused_rmsnorm=recipe.cuda,
        recompute=recipe.recompute, loss_chunk=recipe.loss_chunk, documents=batch.documents, onednn=recipe.onednn,
        native=recipe.native, adapters=recipe.adapters.of_blocks(model, again) if recipe.adapters else (),
    )  # fmt: skip


def layers_of_shape(shape: Shape) -> tuple[Layer, ...]:
    """All layers of a micro-batch in the order of the forward pass; those of one kind and policy share operations."""
    made: dict[tuple[str, Policy, tuple[BlockAdapters, ...]], Layer] = {}
    kinds = layer_groups(shape.model)
    policies: Sequence[Policy] = shape.recompute or (None,) * len(kinds)
    layers = [changed(_layer(shape, "embedding"), name=EMBEDDING)]
    for number, (kind, policy) in enumerate(zip(kinds, policies, strict=True)):
        adapters = shape.adapters[number : number + 1]
        known = made.get((kind, policy, adapters))
        if known is None:
            known = made[kind, policy, adapters] = _layer(replace(shape, adapters=adapters), kind, policy)
        layers.append(changed(known, name=f"blocks.{number}"))
    return (*layers, changed(_layer(shape, "head"), name=HEAD))


_known_layers = lru_cache(maxsize=32)(layers_of_shape)


def _layer(shape: Shape, kind: str, policy: Policy = None) -> Layer:
    forward, backward = both_passes(shape, kind)
    if policy is None:
        return Layer("", kind, tuple(forward), tuple(backward))
    drop, recomputed, copies = dropped(shape, policy, kind), again(shape, policy, kind), weight_copies(shape, kind)
    freed = freed_after_backward(drop, recomputed, copies)
    # The gradient that comes along the stream is cast for the last branch before that runs again.
    before = 1 if backward[0].name == "residual_cast" else 0
    recomputed = [*backward[:before], *recomputed]
    return Layer("", kind, (*forward, drop), (*backward[before:], freed), tuple(recomputed), copies)


def folded(layers: Iterable[Layer]) -> Iterator[tuple[Operation, int]]:
    """Calls of a micro-batch, forward then backward, with how often each is made: layers that share operations once."""
    same: dict[tuple[int, int], list[Layer]] = {}
    for layer in layers:
        same.setdefault((id(layer.forward), id(layer.recomputed)), []).append(layer)
    alike = list(same.values())
    for group in alike:
        yield from ((op, op.repeat * len(group)) for op in group[0].forward if op.repeat)
    ends = [group for group in alike if group[0].name in (EMBEDDING, HEAD)]
    blocks = [group for group in alike if group[0].name not in (EMBEDDING, HEAD)]
    output = [group for group in ends if group[0].name == HEAD]
    embedded = [group for group in ends if group[0].name == EMBEDDING]
    for group in output:
        yield from ((op, op.repeat) for op in group[0].backward if op.repeat)
    for group in blocks:
        yield from ((op, op.repeat * len(group)) for op in group[0].recomputed if op.repeat)
    for group in [*reversed(blocks), *embedded]:
        yield from ((op, op.repeat * len(group)) for op in group[0].backward if op.repeat)


def training_operations(shape: Shape) -> list[Operation]:
    """Every call of one micro-batch, forward then backward, layers folded into `repeat`."""
    return [replace(op, repeat=times) for op, times in folded(layers_of_shape(shape))]


# -- what a rank holds from one step to the next --------------------------------------------------------------------


DOCUMENT_BYTES = 4  # int32: the number of each token's document, where attention asks for it


class Tensor(NamedTuple):
    """What a rank holds throughout, by component: weights, the optimizer's state, a cache, ..."""

    component: str
    bytes: float
    note: str = ""


def lasting_tensors(
    model: ModelConfig, layout: Layout, batch: StepBatch, recipe: Recipe, layers: Sequence[int],
    shards: Sequence[Parameter], frozen: int = 0,
) -> Iterator[Tensor]:  # fmt: skip
    """What a rank holds from one step to the next; the rest comes and goes, and is walked (`plan/memory.py`). Of a rank
    with these layers, which updates `shards`, beside so many bytes of what is frozen. Weights are fp32."""
    elements = sum(p.elements for p in shards) * FP32
    buffers = rotary_table_bytes(model) + routing_buffer_bytes(model, layers)
    hosted, paged = recipe.offloads_optimizer, PAGED.get(recipe.optimizer.name)
    state = 0 if hosted else state_bytes(shards, recipe.optimizer)
    average = elements if recipe.average else 0
    yield Tensor("weights", frozen + elements + buffers)
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
    """Load per expert and dropped choices of every layer with experts, and the biases of the choice."""
    if model.moe is None:
        return 0
    kinds = layer_groups(model)
    routed = sum(has_experts(kinds[layer]) for layer in layers)
    return routed * (model.moe.experts * (INDEX + FP32 * (model.moe.balance == "bias")) + INDEX)


def batch_bytes(batch: StepBatch) -> int:
    """Tokens and targets of a step, int64, and where attention asks for it the number of each one's document."""
    return batch.sequences * batch.tokens * (2 * INDEX + (DOCUMENT_BYTES if batch.documents else 0))


# -- objectives with a second model ---------------------------------------------------------------------------------


def with_second_model(program: Program, objective: ObjectiveConfig, second: ModelConfig, held: bool) -> Program:
    """Of one process, whose objective asks a teacher, or the reference of preferences: before each micro-batch's own
    forward pass comes the second model's, of which nothing is kept but its logits; they wait for the loss, which holds
    more of their size than cross-entropy does. `held`: its weights are in memory beside the model's, in fp32."""
    assert program.shape is not None
    stage = program.stages[0]
    layers = _beside(program.shape, objective, second, stage.layers)
    remainder: tuple[Layer, ...] = ()
    if program.remainder:
        assert program.batch is not None
        rest = program.batch.sequences % program.layout.micro_batch
        remainder = _beside(replace(program.shape, micro_batch=rest), objective, second, program.remainder)
    tensors = program.tensors[0]
    if held:
        tensors = (*tensors, Tensor(FROZEN, second.parameters * FP32, "of the objective, in fp32"))
    return replace(
        program, stages=(replace(stage, layers=layers),), remainder=remainder, tensors=(tensors, *program.tensors[1:])
    )


def _beside(
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
        head = _distilling(head, logits, shape.matmul_bytes)
    return (Layer(FROZEN, FROZEN, tuple(forward)), *others, head)


def _distilling(head: Layer, logits: int, width: int) -> Layer:
    """In the loss both models' learned rows are copied to fp32 beside the logits, three log-softmaxes wait instead of
    one, and the divergence takes three more of their size."""
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
