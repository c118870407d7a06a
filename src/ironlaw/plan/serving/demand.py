"""What serving a model asks of hardware, in numbers: weights by how often they are read, cache per token, attention.

    demand = demand_of(ModelConfig.named("llama3-70b"))
    demand.cached                # elements a token leaves in the cache, all layers
    demand.touched(tokens=32)    # expert weights that a pass over 32 tokens reads, on average

`workload/serving.py` lists the same pass operation by operation; `tests/plan/serving` holds the sums against it.
Everything may be an array over many models, which is how constants are fitted.
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
    """Of one model, or of many."""

    layers: Number
    hidden: Number
    vocab: Number
    dense: Number  # weights that every pass reads: all but the embedding table and experts
    table: Number  # weights of the embedding table where it is not the output layer's too
    head: Number  # weights of the output layer, within `dense`
    experts: Number  # weights of all routed experts; 0 without
    expert_share: Number  # experts a token visits over experts of a layer
    cached: Number  # elements of keys and values (or the narrow vector of latent attention) a token leaves, all layers
    windowed: Number  # share of them in layers that keep `window` tokens only
    window: Number
    heads_cached: Number  # key/value heads, the most ranks that can divide the cache (1 of latent attention)
    pair_flops: Number  # of a query and a key that it sees, all heads and layers
    chosen: Number = 0.0  # experts a token visits in a layer
    expert_layers: Number = 0.0  # layers that have some

    @property
    def parameters(self) -> Number:
        return self.dense + self.table + self.experts

    @property
    def active(self) -> Number:
        """Weights that one token is multiplied by."""
        return self.dense + self.experts * self.expert_share

    def touched(self, tokens: Number) -> Number:
        """Expert weights that a pass over so many tokens reads, where tokens choose independently."""
        return self.experts * (1.0 - (1.0 - self.expert_share) ** tokens)

    def cached_tokens(self, length: Number) -> Number:
        """Tokens of a sequence that the cache holds, as a mean over layers: windows keep no more than they see."""
        return length - self.windowed * np.maximum(length - self.window, 0.0)


def demand_of(model: ModelConfig) -> Demand:
    """The sums over a model's parameters and layers."""
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
    if model.tied:  # read whole by the output layer
        table, dense = table - head, dense + head
    windowed = sum(model.sliding_window is not None and model.is_windowed(layer) for layer in range(model.layers))
    latent = model.latent
    width = 2 * model.key_value_size if latent is None else latent.down_size
    query, mixed = model.query_size, model.mixed_size
    if latent is not None:  # absorbed: a head's query meets the narrow vector itself (arXiv 2405.04434, 2.1.2)
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
        cached=float(width * model.layers),
        windowed=windowed / model.layers,
        window=float(model.sliding_window or 0),
        heads_cached=1.0 if latent is not None else float(model.key_value_heads),
        pair_flops=2.0 * (query + mixed) * model.layers,
        chosen=float(moe.experts_per_token) if moe else 0.0,
        expert_layers=float(model.moe_layers),
    )
