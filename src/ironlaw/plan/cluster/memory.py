"""Peak bytes of a rank on every pipeline stage, for many jobs at once.

    static       weights, gradients, master copy and optimizer moments of the stage's parameters, divided by tp and by
                 what ZeRO shards over data parallel ranks (arXiv 1910.02054)
    activations  layers of the stage x micro-batches in flight x bytes of one layer (arXiv 2205.05198, with the tensors
                 of a gated feed-forward network and of a flash kernel)
    temporaries  logits and their gradients on the last stage, one recomputed layer, gathered weights under ZeRO-3

In flight on stage s of p under 1F1B: min(m, p - s); interleaved with v chunks: 2 (p - s - 1) + (v - 1) p + 1 chunks of
1/v of the stage (arXiv 2104.04473); all m under GPipe; p on every stage under zero-bubble schedules, whose early stages
hold what 1F1B holds and whose late ones keep activations for weight gradients that wait (arXiv 2401.10241); half a
micro-batch more under DualPipe (arXiv 2412.19437, table 2). The stage that needs most decides.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from ironlaw.plan.cluster import latent
from ironlaw.plan.cluster.context_parallel import buffer_bytes
from ironlaw.plan.cluster.experts import expert_activation_bytes
from ironlaw.plan.cluster.jobs import RECOMPUTE, SCHEDULES, Array, Jobs
from ironlaw.plan.cluster.stages import StageLayers, owned_parameters, stage_layers
from ironlaw.plan.engines.engine import Engine

FP32 = 4.0


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


def layer_activation_bytes(jobs: Jobs, engine: Engine) -> tuple[Array, Array, Array]:
    """Bytes one block keeps per micro-batch on one rank: everything; its attention core; its input alone."""
    tokens, tp, shards, width = jobs.tokens, jobs.tp, jobs.stream_shards, engine.element_bytes
    residual = tokens * jobs.hidden / shards * engine.stream_bytes
    gathered = np.where(jobs.sp > 0, engine.gathered_inputs, 0.0)
    held = engine.held
    normed = tokens * jobs.hidden * held.input_bytes * (gathered + (1 - gathered) / shards)
    qkv = jobs.query_size / tp + 2 * np.maximum(jobs.key_value_size / tp, jobs.head_size)
    rotated = np.where(jobs.rotary > 0, (jobs.query_size + jobs.key_value_size) / tp, 0.0) * engine.unrotated_kept
    if jobs.has_latent:
        is_latent = jobs.latent_rank > 0
        wide = (jobs.query_size + jobs.key_value_size + jobs.values_size) / tp
        qkv = np.where(is_latent, wide, qkv)
        # Values that are a view of their product keep the part of it that keys are copied from.
        plain = jobs.heads * (jobs.head_size - jobs.rotary_size) / tp * engine.unrotated_kept
        rotated = np.where(is_latent, plain, rotated)
    attention = tokens * width * (qkv + rotated + jobs.mixed_size / tp)
    if jobs.has_latent:
        attention = attention + latent.kept_bytes(jobs, engine)
    attention = attention + tokens * jobs.mixed_size / tp * held.attention_copy_bytes
    # Flash keeps one fp32 log-sum-exp per query and head; else softmax, its dropout and a one-byte mask per score.
    core = np.where(jobs.flash > 0, FP32, jobs.sequence * (2 * width + 1)) * tokens * jobs.heads / tp
    eager = engine.activation_saves - 1
    # Of the inner tensors one is the input of the layer that narrows again, the others are the activation's.
    inner = width * np.where(jobs.gated > 0, 2.0 + eager, 1.0 + eager) + held.input_bytes
    ffn = tokens * jobs.ffn / tp * inner
    if jobs.has_experts:
        ffn = ffn + expert_activation_bytes(
            jobs, inner, held.input_bytes, width if engine.keeps_expert_outputs else 0.0
        )
    masks = engine.dropout_mask_bytes * tokens * jobs.hidden / shards
    everything = jobs.kept_streams * residual + jobs.kept_normed * normed + attention + core + ffn + masks
    slack = engine.activation_slack
    return slack * everything, slack * core, slack * residual


def kept_activation_bytes(jobs: Jobs, engine: Engine) -> tuple[Array, Array]:
    """Bytes of one block and micro-batch between forward and backward, on average; and of a block that is recomputed.

    The second is what comes back for one block at a time.
    """
    everything, core, entrance = layer_activation_bytes(jobs, engine)
    full, selective = jobs.recompute == RECOMPUTE["full"], jobs.recompute == RECOMPUTE["selective"]
    share = engine.selective_kept_share
    if jobs.has_latent and engine.selective_widens:
        core = np.where(jobs.latent_rank > 0, engine.activation_slack * latent.widened_bytes(jobs, engine), core)
    partly = entrance + share * (everything - entrance) if share > 0 else everything - core
    again = jobs.recomputed_share
    kept = np.where(full, again * entrance + (1 - again) * everything, np.where(selective, partly, everything))
    back = np.where(full, everything, np.where(selective, everything - partly, 0.0))
    return kept, back


def in_flight(jobs: Jobs, stage: int | Array) -> Array:
    """Micro-batches whose activations a stage holds at its fullest, as whole-stage equivalents."""
    plain = np.minimum(jobs.accumulation, jobs.pp - stage)
    chunks = 2 * (jobs.pp - stage - 1) + (jobs.virtual - 1) * jobs.pp + 1
    interleaved = np.minimum(jobs.accumulation * jobs.virtual, chunks) / jobs.virtual
    alternating = np.where(jobs.virtual > 1, interleaved, plain)
    full = jobs.pp + np.where(jobs.schedule == SCHEDULES["dualpipe"], 0.5, 0.0)
    zero_bubble = np.minimum(jobs.accumulation, full)
    gpipe = jobs.schedule == SCHEDULES["gpipe"]
    held = np.where(gpipe, jobs.accumulation, np.where(jobs.schedule > 0, zero_bubble, alternating))
    return np.maximum(held, 1.0)


def peak_memory(jobs: Jobs, engine: Engine, layers: StageLayers | None = None) -> PeakMemory:
    """The stage with the highest peak of each job, and what the peak is made of."""
    layers = layers or stage_layers(jobs, engine.partition)
    best: PeakMemory | None = None
    for stage in _stages(jobs, engine.partition):
        here = _stage(jobs, engine, layers, stage)
        best = here if best is None else _higher(here, best)
    assert best is not None
    return best


def _stages(jobs: Jobs, partition: str) -> list[Array]:
    """Stages of which one has the highest peak; -1 where a job has it already.

    Equal stages hold fewer micro-batches the later they come and none has more layers than the second, so that the
    first, the second and the last are enough.
    """
    most = int(jobs.pp.max(initial=1))
    if partition != "equal":
        return [np.where(stage < jobs.pp, float(stage), -1.0) for stage in range(most)]
    first = [np.zeros(len(jobs))]
    if most > 1:
        first.append(np.where(jobs.pp > 1, jobs.pp - 1, -1.0))
    if most > 2:
        first.append(np.where(jobs.pp > 2, 1.0, -1.0))
    return first


def reported_bytes(jobs: Jobs, engine: Engine, layers: StageLayers | None = None) -> Array:
    """Peak bytes of the rank that the engine's own log speaks of: not always the one that needs most."""
    layers = layers or stage_layers(jobs, engine.partition)
    if engine.reporting_stage == "first":
        return _stage(jobs, engine, layers, np.zeros(len(jobs))).total
    return peak_memory(jobs, engine, layers).total


def host_bytes(jobs: Jobs, engine: Engine, layers: StageLayers) -> Array:
    """Bytes that one rank keeps in its host's memory: optimizer state with its gradients, and activations."""
    parameters = owned_parameters(jobs, layers)
    wide = engine.master_bytes if engine.master_bytes else engine.weight_bytes
    state = parameters * (wide + engine.moment_bytes + engine.gradient_communication_bytes)
    kept, _ = kept_activation_bytes(jobs, engine)
    flight = np.maximum(in_flight(jobs, 0), 1.0)
    activations = layers.counts.max(axis=1) * flight * kept
    return np.where(jobs.offloads_optimizer, state, 0.0) + np.where(jobs.offloads_activations, activations, 0.0)


def _higher(a: PeakMemory, b: PeakMemory) -> PeakMemory:
    wins = a.total > b.total
    return PeakMemory(**{name: np.where(wins, value, getattr(b, name)) for name, value in vars(a).items()})


def _stage(jobs: Jobs, engine: Engine, layers: StageLayers, stage: Array) -> PeakMemory:
    """What one stage of each job holds; nothing where `stage` is negative."""
    exists, first = stage >= 0, stage == 0
    count = layers.counts[np.arange(len(jobs)), np.maximum(stage, 0).astype(int)]
    has_head = layers.head_stage == stage
    embedding = np.where(first, jobs.embedding_parameters, 0.0)
    shared = (jobs.tied > 0) & first
    head = np.where(has_head & ~shared, jobs.hidden * jobs.vocab, 0.0)
    final_norm = np.where(has_head, jobs.hidden * (1 + jobs.biased), 0.0)
    blocks = count * (jobs.block_parameters / jobs.tp + jobs.copied_parameters)
    parameters = blocks + (embedding + head + final_norm) / jobs.tp
    shards = jobs.shard_ranks
    # What is not sharded leaves out the experts of other ranks. What is sharded ends up the same: an expert has fewer
    # (or, folded, more) replicas to be sharded over, by as much as there are fewer (or more) of them on a rank.
    held = parameters + count * jobs.local_block_parameters - blocks
    weights = np.where(jobs.zero >= 3, parameters, held) * engine.weight_bytes / np.where(jobs.zero >= 3, shards, 1.0)
    if engine.master_bytes == 0 and engine.weight_bytes > engine.element_bytes:
        # fp32 weights that are gathered in 16 bits: kept so under ZeRO-2, and the wide ones are the optimizer's.
        narrow = engine.element_bytes
        weights = np.where(jobs.zero == 2, parameters * (narrow + engine.weight_bytes / shards), weights)
        off = parameters * narrow / np.where(jobs.zero >= 3, shards, 1.0)
        weights = np.where(jobs.offloads_optimizer, off, weights)
    # Quantised copies; of sharded weights they are made when those are gathered.
    matrices = count * jobs.local_block_parameters
    weights = weights + np.where(jobs.zero >= 3, 0.0, matrices * engine.held.copy_bytes)
    # With one micro-batch and no pipeline a 16-bit gradient is reduced and freed as soon as it is there.
    lasting = np.where((jobs.accumulation > 1) | (jobs.pp > 1), engine.half_gradient_bytes, 0.0)
    gradients = np.where(jobs.zero >= 2, parameters, held) * (engine.gradient_bytes + lasting)
    whole = engine.pipeline_keeps & (jobs.pp > 1)
    gradients = gradients / np.where((jobs.zero >= 2) & ~whole, shards, 1.0)
    sharded = np.where(jobs.zero >= 1, shards, 1.0)
    here = np.where(jobs.offloads_optimizer, 0.0, 1.0) / sharded
    stated = np.where(jobs.zero >= 1, parameters, held)
    master = stated * engine.master_bytes * here
    blocks_share = np.where(jobs.zero >= 1, blocks, count * jobs.local_block_parameters)
    ends = engine.moment_bytes if engine.end_moment_bytes is None else engine.end_moment_bytes
    moments = (blocks_share * engine.moment_bytes + (stated - blocks_share) * ends) * here

    kept, back = kept_activation_bytes(jobs, engine)
    flight = in_flight(jobs, stage)
    # Offloaded, two blocks' activations are on the device: the one at work and the one on its way.
    kept_blocks = np.where(jobs.offloads_activations, np.minimum(count * flight, 2.0), count * flight)
    activations = kept_blocks * kept
    width = jobs.ffn / jobs.tp * engine.element_bytes
    working = engine.activation_slack * engine.backward_ffn_tensors * jobs.tokens * width * (count > 0)
    recomputed = back * (count > 0) + working
    block = jobs.local_block_parameters
    # Two gathered blocks under ZeRO-3; the gradients of one before they are scattered, under ZeRO-2 too.
    # Gathered weights are quantised a block at a time; stored so, both gathered blocks are of that width.
    copies = engine.held.copy_bytes * np.where(engine.narrow_parameters, 2.0, 1.0)
    gathered = np.where(jobs.zero >= 3, 2 * engine.element_bytes + copies, 0.0)
    gathered = (gathered + np.where(jobs.zero >= 2, engine.gradient_bytes, 0.0)) * block
    logits = np.where(has_head, jobs.tokens * jobs.vocab / jobs.tp * engine.logit_bytes, 0.0)
    # A stage that ends in the loss waits for no message, so the host runs ahead of the device, and tensors that it gave
    # to collectives come free only when the device gets there. One micro-batch gives it half the way.
    ahead = engine.run_ahead_bytes * np.where(jobs.accumulation > 1, 1.0, 0.5)
    logits = logits + np.where(has_head & (jobs.sp > 0), ahead * jobs.tokens * jobs.hidden, 0.0)
    context = np.full(len(jobs), engine.context_bytes)
    # The embedding's output before it is scattered over the tensor parallel ranks.
    gathered = gathered + np.where(first & (jobs.sp > 0), engine.entrance_bytes * jobs.tokens * jobs.hidden, 0.0)
    gathered = gathered + np.where(count > 0, buffer_bytes(jobs, engine), 0.0)
    # Chunks take turns: the next one's input and gradient arrive while another is at work.
    message = jobs.tokens * jobs.hidden / jobs.stream_shards * engine.element_bytes
    gathered = gathered + np.where(jobs.virtual > 1, 2 * message, 0.0)
    # Logits and a block's backward pass are never alive together.
    temporaries = gathered + np.maximum(recomputed - logits, 0.0)
    parts = (weights, gradients, master, moments, activations, logits, temporaries, context)
    zero = np.zeros(len(jobs))
    weights, gradients, master, moments, activations, logits, temporaries, context = (
        np.where(exists, part, zero) for part in parts
    )
    total = weights + gradients + master + moments + activations + logits + temporaries + context
    return PeakMemory(
        total, stage, weights, gradients, master, moments, activations, logits,
        temporaries, context,
    )  # fmt: skip
