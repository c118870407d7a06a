"""Peak bytes of a rank on every pipeline stage, for many jobs at once.

    static       weights, gradients, master copy and optimizer moments of the stage's parameters, divided by tp and by
                 what ZeRO shards over data parallel ranks (arXiv 1910.02054)
    activations  layers of the stage x micro-batches in flight x bytes of one layer (arXiv 2205.05198, with the tensors
                 of a gated feed-forward network and of a flash kernel)
    temporaries  logits and their gradients on the last stage, one recomputed layer, gathered weights under ZeRO-3

In flight on stage s of p under 1F1B: min(m, p - s); interleaved with v chunks: 2 (p - s - 1) + (v - 1) p + 1 chunks of
1/v of the stage (arXiv 2104.04473). The stage that needs most decides.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from ironlaw.plan.engine import Engine
from ironlaw.plan.jobs import Array, Jobs
from ironlaw.plan.stages import StageLayers, stage_layers

HALF = 2.0
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
    tokens, tp, shards = jobs.tokens, jobs.tp, jobs.stream_shards
    residual = tokens * jobs.hidden / shards * engine.stream_bytes
    gathered = np.where(jobs.sp > 0, engine.gathered_inputs, 0.0)
    normed = tokens * jobs.hidden * HALF * (gathered + (1 - gathered) / shards)
    qkv = jobs.query_size / tp + 2 * np.maximum(jobs.key_value_size / tp, jobs.head_size)
    rotated = np.where(jobs.biased > 0, 0.0, (jobs.query_size + jobs.key_value_size) / tp)
    attention = tokens * HALF * (qkv + rotated + jobs.query_size / tp)
    # Flash keeps one fp32 log-sum-exp per query and head; else softmax, its dropout and a one-byte mask per score.
    core = np.where(jobs.flash > 0, FP32, jobs.sequence * (2 * HALF + 1)) * tokens * jobs.heads / tp
    eager = engine.activation_saves - 1
    ffn = tokens * jobs.ffn / tp * HALF * np.where(jobs.gated > 0, 3.0 + eager, 2.0 + eager)
    masks = engine.dropout_mask_bytes * tokens * jobs.hidden / shards
    extra = tokens * jobs.heads / tp * engine.attention_extra_bytes
    return 2 * residual + 2 * normed + attention + core + ffn + masks + extra, core, residual


def in_flight(jobs: Jobs, stage: int) -> Array:
    """Micro-batches whose activations a stage holds at its fullest, as whole-stage equivalents."""
    plain = np.minimum(jobs.accumulation, jobs.pp - stage)
    chunks = 2 * (jobs.pp - stage - 1) + (jobs.virtual - 1) * jobs.pp + 1
    interleaved = np.minimum(jobs.accumulation * jobs.virtual, chunks) / jobs.virtual
    return np.maximum(np.where(jobs.virtual > 1, interleaved, plain), 1.0)


def peak_memory(jobs: Jobs, engine: Engine, layers: StageLayers | None = None) -> PeakMemory:
    """The stage with the highest peak of each job, and what the peak is made of."""
    layers = layers or stage_layers(jobs, engine.partition)
    best: PeakMemory | None = None
    stages = int(jobs.pp.max(initial=1))
    for stage in range(stages):
        here = _stage(jobs, engine, layers, stage)
        best = here if best is None else _higher(here, best)
    assert best is not None
    return best


def reported_bytes(jobs: Jobs, engine: Engine, layers: StageLayers | None = None) -> Array:
    """Peak bytes of the rank that the engine's own log speaks of: not always the one that needs most."""
    layers = layers or stage_layers(jobs, engine.partition)
    if engine.reporting_stage == "first":
        return _stage(jobs, engine, layers, 0).total
    return peak_memory(jobs, engine, layers).total


def _higher(a: PeakMemory, b: PeakMemory) -> PeakMemory:
    wins = a.total > b.total
    return PeakMemory(**{name: np.where(wins, value, getattr(b, name)) for name, value in vars(a).items()})


def _stage(jobs: Jobs, engine: Engine, layers: StageLayers, stage: int) -> PeakMemory:
    exists = stage < jobs.pp
    count = layers.counts[:, stage] if stage < layers.counts.shape[1] else np.zeros(len(jobs))
    has_head = layers.head_stage == stage
    embedding = jobs.embedding_parameters if stage == 0 else np.zeros(len(jobs))
    shared = (jobs.tied > 0) & (stage == 0)
    head = np.where(has_head & ~shared, jobs.hidden * jobs.vocab, 0.0)
    final_norm = np.where(has_head, jobs.hidden * (1 + jobs.biased), 0.0)
    parameters = (count * jobs.block_parameters + embedding + head + final_norm) / jobs.tp
    shards = jobs.dp * jobs.cp
    weights = parameters * engine.weight_bytes / np.where(jobs.zero >= 3, shards, 1.0)
    # With one micro-batch and no pipeline a 16-bit gradient is reduced and freed as soon as it is there.
    lasting = np.where((jobs.accumulation > 1) | (jobs.pp > 1), engine.half_gradient_bytes, 0.0)
    gradients = parameters * (engine.gradient_bytes + lasting) / np.where(jobs.zero >= 2, shards, 1.0)
    sharded = np.where(jobs.zero >= 1, shards, 1.0)
    master = parameters * engine.master_bytes / sharded
    moments = parameters * engine.moment_bytes / sharded

    everything, core, entrance = layer_activation_bytes(jobs, engine)
    full, selective = jobs.recompute == 2, jobs.recompute == 1
    share = engine.selective_kept_share
    partly = entrance + share * (everything - entrance) if share > 0 else everything - core
    kept = np.where(full, entrance, np.where(selective, partly, everything))
    flight = in_flight(jobs, stage)
    activations = count * kept * flight
    recomputed = np.where(full, everything, np.where(selective, everything - partly, 0.0)) * (count > 0)
    block = jobs.block_parameters / jobs.tp
    gathered = np.where(jobs.zero >= 3, block * (2 * HALF + engine.gradient_bytes), 0.0)
    logits = np.where(has_head, jobs.tokens * jobs.vocab / jobs.tp * engine.logit_bytes, 0.0)
    logits = logits + np.where(has_head & (jobs.sp > 0), engine.head_gathered_bytes * jobs.tokens * jobs.hidden, 0.0)
    context = np.full(len(jobs), engine.context_bytes)
    if stage == 0:  # the embedding's output before it is scattered over the tensor parallel ranks
        gathered = gathered + np.where(jobs.sp > 0, engine.entrance_bytes * jobs.tokens * jobs.hidden, 0.0)
    # Logits and a recomputed block are never alive together.
    temporaries = gathered + np.maximum(recomputed - logits, 0.0)
    parts = (weights, gradients, master, moments, activations, logits, temporaries, context)
    zero = np.zeros(len(jobs))
    weights, gradients, master, moments, activations, logits, temporaries, context = (
        np.where(exists, part, zero) for part in parts
    )
    total = weights + gradients + master + moments + activations + logits + temporaries + context
    return PeakMemory(
        total, np.full(len(jobs), float(stage)), weights, gradients, master, moments, activations, logits,
        temporaries, context,
    )  # fmt: skip
