"""What latent attention (DeepSeek-V2, arXiv 2405.04434) changes of a job: its projections, what they keep and send.

Per token: the residual stream (hidden h) becomes a narrow vector for queries (rank r_q; none: straight to queries) and
one for keys and values (rank r), beside the rotated key that all heads share (R). Of these every head's query and key
(D elements, R of them rotated) and value (W) are computed:

    weights     h r_q + r_q A D + h (r + R) + r A (D - R + W) + A W h, and r_q + r of norms
    tensor      products that widen are divided by heads, and attention's output layer; those that narrow are whole on
    parallel    every rank, and so are their norms. Under sequence parallelism Megatron core narrows a rank's own
                tokens and gathers narrow vectors (`multi_latent_attention.py`, `narrows_own_tokens` of the engine);
                torchtitan and our trainer gather the stream and narrow all of it
    attention   as many key/value heads as queries, D wide keys against W wide values; context parallel ranks send
                both as attention takes them

Functions give zeros for jobs whose attention is not latent.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from ironlaw.plan.cluster.jobs import Array, Jobs
    from ironlaw.plan.engines.engine import Engine


def narrow_width(jobs: Jobs) -> Array:
    """Elements per token of both narrow vectors and the shared key."""
    return np.where(jobs.latent_rank > 0, jobs.query_rank + jobs.latent_rank + jobs.rotary_size, 0.0)


def up_width(jobs: Jobs) -> Array:
    """Elements per token of what keys and values are made of, without the shared key."""
    return jobs.heads * (jobs.head_size - jobs.rotary_size + jobs.value_head)


def narrow_weights(jobs: Jobs) -> Array:
    """Weights that every tensor parallel rank has whole; with their norms."""
    norms = np.where(jobs.latent_rank > 0, jobs.query_rank + jobs.latent_rank, 0.0)
    return jobs.hidden * narrow_width(jobs) + norms


def projection_weights(jobs: Jobs) -> Array:
    """Of the products that give queries, keys and values: what a token's FLOPs are twice of."""
    plain = jobs.hidden * (jobs.query_size + 2 * jobs.key_value_size)
    if not jobs.has_latent:
        return plain
    wide = np.where(jobs.query_rank > 0, jobs.query_rank, jobs.hidden) * jobs.query_size
    latent = jobs.hidden * narrow_width(jobs) + wide + jobs.latent_rank * up_width(jobs)
    return np.where(jobs.latent_rank > 0, latent, plain)


def narrow_tokens(jobs: Jobs, engine: Engine) -> Array:
    """Tokens whose narrow vectors a rank computes and keeps."""
    return jobs.tokens / (jobs.stream_shards if engine.narrows_own_tokens else 1.0)


WIDENING = ("query_up", "latent_up")
"""Of the products below, those that make queries, keys and values wide."""


def products(jobs: Jobs, engine: Engine) -> dict[str, tuple[Array, Array, Array, Array, Array]]:
    """Outputs, inputs, rows, products side by side and share of the layers, in place of the one projection."""
    ones = np.ones(len(jobs))
    latent, queried = (jobs.latent_rank > 0) * ones, (jobs.latent_rank > 0) * (jobs.query_rank > 0) * ones
    own = narrow_tokens(jobs, engine)
    rank = np.where(jobs.query_rank > 0, jobs.query_rank, jobs.hidden)
    return {
        "query_down": (np.maximum(jobs.query_rank, 1.0), jobs.hidden, own, ones, queried),
        "query_up": (jobs.query_size / jobs.tp, rank, jobs.tokens, ones, latent),
        "latent_down": (np.maximum(jobs.latent_rank + jobs.rotary_size, 1.0), jobs.hidden, own, ones, latent),
        "latent_up": (up_width(jobs) / jobs.tp, np.maximum(jobs.latent_rank, 1.0), jobs.tokens, ones, latent),
    }


def norm_elements(jobs: Jobs, engine: Engine) -> Array:
    """Of the norms of narrow vectors on a rank."""
    return narrow_tokens(jobs, engine) * (narrow_width(jobs) - jobs.rotary_size)


def kept_bytes(jobs: Jobs, engine: Engine) -> Array:
    """Of one block and micro-batch: narrow vectors before and after their norms."""
    ranks = narrow_width(jobs) - jobs.rotary_size
    return narrow_tokens(jobs, engine) * engine.element_bytes * (2 * ranks + jobs.rotary_size)


def widened_bytes(jobs: Jobs, engine: Engine) -> Array:
    """Of one block and micro-batch: queries, keys and values as attention takes them, and before their rotation."""
    wide = jobs.query_size + jobs.key_value_size + jobs.values_size
    plain = jobs.heads * (jobs.head_size - jobs.rotary_size) * engine.unrotated_kept
    return np.where(jobs.latent_rank > 0, jobs.tokens * engine.element_bytes * (wide + plain) / jobs.tp, 0.0)


def spared_collectives(jobs: Jobs, engine: Engine) -> Array:
    """Of the two tensor parallel collectives of a layer, what gathering narrow vectors in place of the stream saves.

    Half of one collective is the gathering before attention. Queries that come straight from the stream still need it.
    """
    if not jobs.has_latent or not engine.narrows_own_tokens:
        return np.zeros(len(jobs))
    gathered = np.where(jobs.query_rank > 0, 0.0, jobs.hidden) + narrow_width(jobs)
    return np.where((jobs.latent_rank > 0) & (jobs.sp > 0), 0.5 * (1 - gathered / jobs.hidden), 0.0)
