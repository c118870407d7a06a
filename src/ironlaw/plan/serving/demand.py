"""Demand of a served model on hardware: weights by how often they are read, cache per token, FLOPs of attention.

    demand = demand_of(ModelConfig.named("llama3-70b"))
    demand.cached                # elements that a token adds to the cache, all layers
    demand.touched(tokens=32)    # expert weights that a pass over 32 tokens reads, on average

`workload/serving.py` lists the same pass operation by operation; `tests/plan/serving` checks the sums against it.
Every number may be an array over many models, as in the fit of constants.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from ironlaw.model.config import ModelConfig
from ironlaw.model.parameters import model_parameters

Number = Any
"""A float, or an array over many rows."""


@dataclass(frozen=True)
class Demand:
    """Demand of one model, or of many as arrays."""

    layers: Number
    hidden: Number
    vocab: Number
    dense: Number  # weights that every pass reads: all but the embedding table and experts
    table: Number  # weights of the embedding table, unless the output layer shares it
    head: Number  # weights of the output layer, within `dense`
    experts: Number  # weights of all routed experts; 0 if there are none
    expert_share: Number  # experts chosen per token over experts of a layer
    cached: Number  # cached elements per token, all layers: keys and values, or latent attention's narrow vector
    windowed: Number  # share of the layers that keep `window` tokens only
    window: Number
    heads_cached: Number  # key/value heads, the most ranks that can divide the cache (1 for latent attention)
    pair_flops: Number  # FLOPs of a query and a visible key, all heads and layers
    score_heads: Number = 0.0  # query heads, all layers
    chosen: Number = 0.0  # experts chosen per token and layer
    expert_layers: Number = 0.0  # layers with experts

    @property
    def parameters(self) -> Number:
        return self.dense + self.table + self.experts

    @property
    def active(self) -> Number:
        """Weights used for one token."""
        return self.dense + self.experts * self.expert_share

    def touched(self, tokens: Number) -> Number:
        """Return the expert weights that a pass over `tokens` reads, if tokens choose independently."""
        return self.experts * (1.0 - (1.0 - self.expert_share) ** tokens)

    def expert_rows(self, tokens: Number) -> Number:
        """Return the mean rows of an expert that a pass over `tokens` reads; `tokens` if there are no experts."""
        read = 1.0 - (1.0 - self.expert_share) ** tokens
        return tokens * np.where(self.expert_share, self.expert_share / np.where(read, read, 1.0), 1.0)

    def cached_tokens(self, length: Number) -> Number:
        """Return the tokens of a sequence in the cache, as a mean over layers: a windowed layer keeps its window."""
        return length - self.windowed * np.maximum(length - self.window, 0.0)


def demand_of(model: ModelConfig) -> Demand:
    """Return the sums over a model's parameters and layers."""
    experts = dense = 0
    table = 0
    for parameter in model_parameters(model):
        if ".experts." in parameter.name:
            experts += parameter.elements
        elif parameter.embedding:
            table += parameter.elements
        else:
            dense += parameter.elements
    head = model.vocab * model.hidden
    if model.tied:  # the output layer reads the whole table
        table, dense = table - head, dense + head
    windowed = sum(model.sliding_window is not None and model.is_windowed(layer) for layer in range(model.layers))
    latent = model.latent
    query, mixed = model.query_size, model.mixed_size
    if latent is not None:  # absorbed: a head's query multiplies the narrow vector itself (arXiv 2405.04434, 2.1.2)
        query, mixed = model.heads * latent.down_size, model.heads * latent.key_value_rank
    moe = model.moe
    return Demand(
        layers=float(model.layers),
        hidden=float(model.hidden),
        vocab=float(model.vocab),
        dense=float(dense),
        table=float(table),
        head=float(head),
        experts=float(experts),
        expert_share=moe.experts_per_token / moe.experts if moe else 0.0,
        cached=float(model.cached_size * model.layers),
        windowed=windowed / model.layers,
        window=float(model.sliding_window or 0),
        heads_cached=1.0 if latent is not None else float(model.key_value_heads),
        pair_flops=2.0 * (query + mixed) * model.layers,
        score_heads=float(model.heads * model.layers),
        chosen=float(moe.experts_per_token) if moe else 0.0,
        expert_layers=float(model.moe_layers),
    )
