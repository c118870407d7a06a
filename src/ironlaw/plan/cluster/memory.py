"""Peak bytes of a rank over the pipeline stages, for many candidates at once.

    static       weights, gradients, master copy and optimizer moments of the stage's parameters, divided by tp and by
                 what ZeRO shards over data parallel ranks (arXiv 1910.02054)
    activations  layers of the stage x micro-batches in flight x bytes of one layer (arXiv 2205.05198, with the tensors
                 of a gated feed-forward network and of a flash kernel)
    temporaries  logits and their gradients on the last stage, one recomputed layer, gathered weights under ZeRO-3

In flight on stage s of p under 1F1B: min(m, p - s); interleaved with v chunks: 2 (p - s - 1) + (v - 1) p + 1 chunks of
1/v of the stage (arXiv 2104.04473); all m under GPipe; p on every stage under zero-bubble schedules, whose early stages
hold what 1F1B holds and whose late ones keep activations for delayed weight gradients (arXiv 2401.10241); half a
micro-batch more under DualPipe (arXiv 2412.19437, table 2). The stage with the highest peak decides.

Our own trainer's peak comes from walking its program (`plan/memory.py`). This module gives a lower bound of it:
persistent state, activations in flight, gradients of earlier micro-batches, message buffers.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from ironlaw.plan.cluster.candidates import Array, Candidates
from ironlaw.plan.cluster.collective_costs import buffer_bytes
from ironlaw.plan.cluster.stages import stage_layers
from ironlaw.plan.engines.engine import TrainingEngine
from ironlaw.workload.blocks import FP32, Shape, attention_core_bytes
from ironlaw.workload.kinds import forward_of, has_experts
from ironlaw.workload.latent import widened_bytes
from ironlaw.workload.moe import routed
from ironlaw.workload.recompute import kept_bytes, weight_copies
from ironlaw.workload.sizes import Size


@dataclass(frozen=True)
class PeakMemory:
    """Bytes per job on the stage with the highest peak, by component; they add up to `total`."""

    total: Array
    stage: Array  # which stage that is, from 0
    weights: Array
    gradients: Array
    master: Array
    moments: Array
    activations: Array
    logits: Array
    temporaries: Array
    context: Array


PARTS = ("weights", "gradients", "master", "moments", "activations", "logits", "temporaries", "context")
"""Components of `PeakMemory`."""


def layer_activation_bytes(
    candidates: Candidates, engine: TrainingEngine, shape: Shape | None = None
) -> tuple[Array, Array, Array]:
    """Returns the bytes that one block keeps per micro-batch on one rank: all, its attention core, its input alone."""
    shape = shape or candidates.shape(engine)
    everything = sum(
        share * sum(op.saved_bytes for op in forward_of(shape, kind)) for kind, share in candidates.kinds.items()
    )
    entrance = shape.tokens / candidates.stream_shards * shape.model.hidden * shape.stream_bytes
    slack = engine.activation_slack
    return slack * everything, slack * attention_core_bytes(shape), slack * entrance


def kept_activation_bytes(candidates: Candidates, engine: TrainingEngine) -> tuple[Array, Array, Array]:
    """Returns bytes of one block and micro-batch: kept between forward and backward, on average; restored by
    recomputation, one block at a time; of cast weights, which autocast caches until a forward pass is over."""
    found = candidates.of_blocks(engine, "bytes", lambda part: _block_bytes(part, engine))
    everything, partly, entrance = (found[name] for name in ("everything", "partly", "entrance"))
    full, selective = (candidates.has("recompute", word) for word in ("full", "selective"))
    again = candidates.recomputed_share
    kept = np.where(full, again * entrance + (1 - again) * everything, np.where(selective, partly, everything))
    back = np.where(full, everything, np.where(selective, everything - partly, 0.0))
    return kept, back, found["copies"] * np.where(full, again, np.where(selective, 1.0, 0.0))


def _block_bytes(candidates: Candidates, engine: TrainingEngine) -> dict[str, Array]:
    """Returns the bytes one block keeps: without, under selective and under full recomputation; and of cast weights."""
    shape, kinds = candidates.shape(engine), candidates.kinds.items()
    everything, core, entrance = layer_activation_bytes(candidates, engine, shape)
    copies = np.zeros(len(candidates))
    if not engine.fused:  # our trainer keeps products and attention
        copies = copies + sum(share * weight_copies(shape, kind) for kind, share in kinds)
        partly = entrance
        for kind, of_layers in kinds:
            for policy, share in candidates.policies(kind).items():
                beside = everything - entrance if policy is None else kept_bytes(shape, policy, kind)
                partly = partly + of_layers * share * beside
    elif engine.selective_kept_share > 0:
        experts, exchanged = _expert_bytes(candidates, engine, shape)
        partly = entrance + engine.selective_kept_share * (everything - entrance - experts) + exchanged
    elif engine.repeats_up_projections(candidates.model):
        partly = everything - engine.activation_slack * widened_bytes(shape)
    else:
        partly = everything - core
    return {"everything": everything, "partly": partly, "entrance": entrance, "copies": copies}


def _expert_bytes(candidates: Candidates, engine: TrainingEngine, shape: Shape) -> tuple[Size, Size]:
    """Returns the bytes that a block keeps for its routed experts, if selective recomputation repeats them in full, and
    what it keeps of their exchange."""
    if engine.selective_experts == "alike" or not candidates.has_experts:
        return 0.0, 0.0
    kept, sent = 0.0, 0.0
    for kind, share in candidates.kinds.items():
        of_experts = routed(forward_of(shape, kind)) if has_experts(kind) else []
        kept = kept + share * sum(op.saved_bytes for op in of_experts)
        sent = sent + share * sum(op.saved_bytes for op in of_experts[:1])  # rows as they arrive
    keeps = (candidates.ep > 1) & (engine.selective_experts == "exchanged")
    return engine.activation_slack * kept, engine.activation_slack * np.where(keeps, 2 * sent, 0.0)


def in_flight(candidates: Candidates, stage: int | Array) -> Array:
    """Returns the most micro-batches whose activations a stage holds at once, as whole-stage equivalents."""
    plain = np.minimum(candidates.accumulation, candidates.pp - stage)
    chunks = 2 * (candidates.pp - stage - 1) + (candidates.virtual_stages - 1) * candidates.pp + 1
    interleaved = np.minimum(candidates.accumulation * candidates.virtual_stages, chunks) / candidates.virtual_stages
    alternating = np.where(candidates.virtual_stages > 1, interleaved, plain)
    full = candidates.pp + np.where(candidates.has("schedule", "dualpipe"), 0.5, 0.0)
    zero_bubble = np.minimum(candidates.accumulation, full)
    held = np.where(candidates.has("schedule", "1f1b"), alternating, zero_bubble)
    held = np.where(candidates.has("schedule", "gpipe"), candidates.accumulation, held)
    return np.maximum(held, 1.0)


def peak_memory(candidates: Candidates, engine: TrainingEngine) -> PeakMemory:
    """Returns the stage with the highest peak of each job, and the components of that peak.

    Later stages hold fewer micro-batches, and with an equal partition none has more layers than the second: the first,
    the second and the last are enough. A number of -1 stands for a stage that a job lacks or that is listed already.
    """
    pp = candidates.pp
    numbers = [np.zeros(len(candidates)), np.where(pp > 1, pp - 1, -1.0), np.where(pp > 2, 1.0, -1.0)]
    if engine.partition != "equal":
        numbers = [np.where(stage < pp, float(stage), -1.0) for stage in range(int(pp.max(initial=1)))]
    kept = kept_activation_bytes(candidates, engine)
    highest, *others = (_StageMemory(candidates, engine, number, kept).peak() for number in numbers)
    for here in others:
        wins, before = here.total > highest.total, highest
        highest = PeakMemory(**{name: np.where(wins, size, getattr(before, name)) for name, size in vars(here).items()})
    return highest


def reported_bytes(candidates: Candidates, engine: TrainingEngine) -> Array:
    """Returns the peak bytes of the rank that the engine's own log reports, which is not always the fullest."""
    if engine.reporting_stage == "first":
        kept = kept_activation_bytes(candidates, engine)
        return _StageMemory(candidates, engine, np.zeros(len(candidates)), kept).peak().total
    return peak_memory(candidates, engine).total


def host_bytes(candidates: Candidates, engine: TrainingEngine) -> Array:
    """Returns the bytes that one rank keeps in host memory: optimizer state with its gradients, and activations."""
    layers = stage_layers(candidates, engine.partition)
    wide = engine.master_bytes or engine.weight_bytes
    state = layers.owned_parameters * (wide + engine.moment_bytes + engine.gradient_communication_bytes)
    activations = layers.fullest * in_flight(candidates, 0) * kept_activation_bytes(candidates, engine)[0]
    state = np.where(candidates.offloads_optimizer, state, 0.0)
    return state + np.where(candidates.offloads_activations, activations, 0.0)


MIXED = 0.9
"""Factor on the lower bound where a pipeline has several kinds of blocks."""


class _StageMemory:
    """One stage of each job, empty where `number` is negative. Parameters are those of one rank, before ZeRO.

    `activations`: the result of `kept_activation_bytes`.
    """

    def __init__(
        self, candidates: Candidates, engine: TrainingEngine, number: Array, activations: tuple[Array, Array, Array]
    ) -> None:
        c, model, layers = candidates, candidates.model, stage_layers(candidates, engine.partition)
        self.candidates, self.engine, self.number = candidates, engine, number
        self.kept, self.back, self.copies = activations
        self.first, self.has_head, self.layers = number == 0, layers.head_stage == number, layers.on(number)
        embedding = np.where(self.first, model.embedding_parameters, 0.0)
        head = np.where(self.has_head & ~(model.tied & self.first), model.hidden * model.vocab, 0.0)
        final_norm = np.where(self.has_head, model.norm_parameters, 0.0)
        # Of the layers, with the experts of all ranks; and with the ends of the model on this stage.
        self.blocks = self.layers * (c.block_parameters / c.tp + c.copied_parameters)
        self.parameters = self.blocks + (embedding + head + final_norm) / c.tp
        # Unsharded state excludes the experts of other ranks. Sharded state comes out the same with them: a rank has
        # fewer (or, folded, more) experts, and by the same factor fewer (or more) replicas to shard each over.
        self.own = self.parameters + self.layers * c.local_block_parameters - self.blocks
        self.in_flight = in_flight(c, number)
        self.message = c.tokens * model.hidden / c.stream_shards  # elements

    def peak(self) -> PeakMemory:
        """Returns the bytes that the stage of each job holds; zero where there is none."""
        c, engine, some = self.candidates, self.engine, self.layers > 0
        master, moments = self._optimizer_state()
        # Under offloading the device holds two blocks' activations: of the block at work and of the one in transfer.
        held = self.layers * self.in_flight
        activations = np.where(c.offloads_activations, np.minimum(held, 2.0), held) * self.kept
        logits, width = self._logits(), c.model.ffn_size / c.tp * engine.element_bytes
        working = engine.activation_slack * engine.backward_ffn_tensors * c.tokens * width * some
        # After a forward pass or within a backward one: logits and a block's backward pass are never alive together.
        passing = np.maximum(self.back * some + working, logits + self.copies * self.layers / c.virtual_stages)
        parts = {
            "weights": self._weights(),
            "gradients": self._gradients(),
            "master": master,
            "moments": moments,
            "activations": activations,
            "logits": logits,
            "temporaries": self._gathered() + passing - logits,
            "context": np.full(len(c), engine.context_bytes),
        }
        if not engine.fused:
            parts |= self._lower_bound()
            # Blocks of all kinds are averaged, but the first stage may have the lighter ones.
            averaged = np.where((c.pp > 1) & (len(c.kinds) > 1), MIXED, 1.0)
            parts = {name: averaged * part for name, part in parts.items()}
        parts = {name: np.where(self.number >= 0, part, 0.0) for name, part in parts.items()}
        return PeakMemory(np.asarray(sum(parts.values())), self.number, **parts)

    def _weights(self) -> Array:
        c, engine, whole = self.candidates, self.engine, self.candidates.zero >= 3
        weights = np.where(whole, self.parameters, self.own) * engine.weight_bytes / np.where(whole, c.shard_ranks, 1.0)
        if engine.master_bytes == 0 and engine.weight_bytes > engine.element_bytes:
            # fp32 weights are gathered in 16 bits. ZeRO-2 keeps the 16-bit ones; the optimizer has the fp32 ones.
            narrow = engine.gathered_bytes
            kept = (c.zero == 2) | (engine.pipeline_keeps & (c.zero == 1))  # FSDP2 gathers for ZeRO 1 as for 2
            sharded = self.own * narrow + self.parameters * engine.weight_bytes / c.shard_ranks
            weights = np.where(kept, sharded, weights)
            off = self.parameters * narrow / np.where(whole, c.shard_ranks, 1.0)
            weights = np.where(c.offloads_optimizer, off, weights)
        # Quantised copies; those of sharded weights are made when the weights are gathered.
        matrices = self.layers * c.local_block_parameters
        return np.asarray(weights + np.where(whole, 0.0, matrices * engine.storage.copy_bytes))

    def _gradients(self) -> Array:
        c, engine = self.candidates, self.engine
        # With one micro-batch and no pipeline, a 16-bit gradient is reduced and freed as soon as it is computed.
        lasting = np.where((c.accumulation > 1) | (c.pp > 1), engine.half_gradient_bytes, 0.0)
        in_pieces = engine.reduces_in_pieces(c.zero, c.pp)
        gradients = np.where(in_pieces, self.parameters / c.shard_ranks, self.own)
        return np.asarray(gradients * (engine.gradient_bytes + lasting))

    def _optimizer_state(self) -> tuple[Array, Array]:
        """Returns the bytes of master copies and of moments."""
        c, engine, sharded = self.candidates, self.engine, self.candidates.zero >= 1
        share = np.where(c.offloads_optimizer, 0.0, 1.0) / np.where(sharded, c.shard_ranks, 1.0)
        stated = np.where(sharded, self.parameters, self.own)
        blocks = np.where(sharded, self.blocks, self.layers * c.local_block_parameters)
        ends = engine.moment_bytes if engine.end_moment_bytes is None else engine.end_moment_bytes
        moments = (blocks * engine.moment_bytes + (stated - blocks) * ends) * share
        return stated * engine.master_bytes * share, moments

    def _logits(self) -> Array:
        c, engine = self.candidates, self.engine
        logits = np.where(self.has_head, c.tokens * engine.logit_bytes * c.model.vocab / c.tp, 0.0)
        # A stage that ends in the loss waits for no message, so the host runs ahead of the device, and tensors passed
        # to collectives are freed only when the device gets there. With one micro-batch it gets half as far ahead.
        ahead = engine.run_ahead_bytes * np.where(c.accumulation > 1, 1.0, 0.5)
        queued = np.where(self.has_head & (c.sp > 0), ahead * c.tokens * c.model.hidden, 0.0)
        return np.asarray(logits + queued)

    def _lower_bound(self) -> dict[str, Array]:
        """Returns the bytes that our own trainer certainly holds while the most micro-batches are in flight."""
        c, kept, back, flight = self.candidates, self.kept, self.back, self.in_flight
        # If one block in k is recomputed, at most a share 1/k + (1 - 1/k)/c of a chunk of c blocks is; and some stage,
        # possibly the last, has no more than the average share.
        again = np.where(c.has("recompute", "full"), c.recomputed_share, 1.0)
        chunk = np.maximum(self.layers / c.virtual_stages, 1.0)
        evenly = kept - (1 / again - 1) / chunk * (back - kept) * (again < 1)
        blocks = np.maximum(evenly * flight, kept * np.minimum(flight, in_flight(c, c.pp - 1)))
        # The last gradients appear while forward passes still run: then all gradients coexist with all activations.
        enough = np.where(c.virtual_stages > 1, 2 * c.pp, flight)
        both = c.has("schedule", "1f1b") & (c.accumulation > enough)
        gradients = self._gradients()
        full = np.where(c.offloads_activations, 0.0, self.layers * blocks) + np.where(both, gradients, 0.0)
        passing = np.maximum(back * ((again == 1) & (self.layers > 0)), self.copies * self.layers / c.virtual_stages)
        # At the end a pipeline holds all gradients and the weights gathered by its backward passes.
        late = np.where(c.pp > 1, gradients + np.where(c.zero >= 3, self.own * FP32, 0.0), 0.0)
        # Replication by FSDP2: each rank's shard is the whole tensor, and is still gathered into a copy.
        copied = (c.zero == 0) & (c.dp * c.cp > 1) & (c.tp * c.pp * c.ep > 1)
        # Every chunk has a buffer for each micro-batch's input and for the gradient of its output.
        count = (2 * c.virtual_stages - self.first - self.has_head) * c.accumulation
        buffers = np.where(c.pp > 1, count * (self.message * FP32), 0.0)
        return {
            "activations": np.maximum(full + passing, late),
            "temporaries": np.where(copied, self.own * FP32, 0.0) + buffers,
        } | dict.fromkeys(("gradients", "logits"), np.zeros(len(c)))  # fmt: skip

    def _gathered(self) -> Array:
        """Returns the bytes of temporarily gathered weights, gradients in transfer and message buffers."""
        c, engine, stream = self.candidates, self.engine, self.candidates.tokens * self.candidates.model.hidden
        # Two gathered blocks under ZeRO-3; the gradients of one block where backward passes scatter them.
        # Gathered weights are quantised one block at a time; stored quantised, both gathered blocks have that width.
        copies = engine.storage.copy_bytes * np.where(engine.narrow_parameters, 2.0, 1.0)
        gathered = np.where(c.zero >= 3, 2 * engine.gathered_bytes + copies, 0.0)
        gathered = gathered + np.where(engine.reduces_in_pieces(c.zero, c.pp), engine.gradient_bytes, 0.0)
        gathered = gathered * c.local_block_parameters
        # The embedding's output before it is scattered over the tensor parallel ranks.
        gathered = gathered + np.where(self.first & (c.sp > 0), engine.entrance_bytes * stream, 0.0)
        gathered = gathered + np.where(self.layers > 0, buffer_bytes(c, engine), 0.0)
        # Chunks take turns: the next one's input and gradient arrive while another is computed.
        return np.asarray(gathered + np.where(c.virtual_stages > 1, 2 * (self.message * engine.element_bytes), 0.0))
