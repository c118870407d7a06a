"""The parameter tensors of a decoder: names and shapes as `model/transformer.py` has them, in its order. No torch."""

from __future__ import annotations

import math
from dataclasses import dataclass

from ironlaw.model.config import ModelConfig


@dataclass(frozen=True)
class Parameter:
    """One trained tensor. `embedding`: a lookup table, also where the output layer shares it."""

    name: str
    shape: tuple[int, ...]
    embedding: bool = False

    @property
    def elements(self) -> int:
        return math.prod(self.shape)

    @property
    def is_block_matrix(self) -> bool:
        """A matrix of a linear layer inside a block: what optimizers for matrices are meant for."""
        return len(self.shape) == 2 and not self.embedding and not self.is_small and self.name.startswith("blocks.")

    @property
    def is_small(self) -> bool:
        """A vector, or those of all experts together."""
        return len(self.shape) < 2 or self.name.endswith("bias")


def model_parameters(model: ModelConfig) -> list[Parameter]:
    """Every tensor of `Transformer(model).named_parameters()`; a tied output layer is the embedding."""
    result = [Parameter("embedding.weight", (model.vocab, model.hidden), embedding=True)]
    if model.positions == "learned":
        result.append(Parameter("positions.weight", (model.context, model.hidden), embedding=True))
    if model.embedding_norm:
        result += _norm(model, "embedding_norm")
    for layer in range(model.layers):
        result += _block(model, f"blocks.{layer}", experts=model.moe is not None and model.moe.in_layer(layer))
    result += _norm(model, "final_norm")
    if not model.tied:
        result.append(Parameter("head.weight", (model.vocab, model.hidden)))
    if model.head_bias:
        result.append(Parameter("head.bias", (model.vocab,)))
    return result


def _block(model: ModelConfig, name: str, experts: bool) -> list[Parameter]:
    result = [] if model.norm_place == "post" else _norm(model, f"{name}.attention_norm")
    result += (_attention if model.latent is None else _latent_attention)(model, f"{name}.attention")
    if model.norm_place != "pre":
        result += _norm(model, f"{name}.attention_after")
        result += _norm(model, f"{name}.ffn_after")
    if model.norm_place != "post" and model.parallel_norms != 1:
        result += _norm(model, f"{name}.ffn_norm")
    if experts:
        return result + _experts(model, f"{name}.ffn")
    return result + _feed_forward(model, f"{name}.ffn", model.ffn_size)


def _attention(model: ModelConfig, name: str) -> list[Parameter]:
    qkv = model.query_size + 2 * model.key_value_size
    result = [Parameter(f"{name}.sinks", (model.heads,))] if model.attention_sinks else []
    result += _linear(f"{name}.qkv", qkv, model.hidden, model.has_qkv_bias)
    result += _linear(f"{name}.out", model.hidden, model.query_size, model.has_out_bias)
    if model.qk_norm:
        query, key = model.qk_norm_sizes
        result.append(Parameter(f"{name}.query_norm.weight", (query,)))
        result.append(Parameter(f"{name}.key_norm.weight", (key,)))
    return result


def _latent_attention(model: ModelConfig, name: str) -> list[Parameter]:
    latent, hidden = model.latent, model.hidden
    assert latent is not None
    result = []
    if latent.query_rank:
        result += _linear(f"{name}.query_down", latent.query_rank, hidden, bias=False)
        result.append(Parameter(f"{name}.query_norm.weight", (latent.query_rank,)))
    result += _linear(f"{name}.query_up", model.query_size, latent.query_rank or hidden, bias=False)
    result += _linear(f"{name}.latent_down", latent.down_size, hidden, bias=False)
    result.append(Parameter(f"{name}.latent_norm.weight", (latent.key_value_rank,)))
    result += _linear(f"{name}.latent_up", latent.up_size(model.heads), latent.key_value_rank, bias=False)
    return result + _linear(f"{name}.out", hidden, model.mixed_size, bias=False)


def _feed_forward(model: ModelConfig, name: str, width: int) -> list[Parameter]:
    result = []
    for which in ("up", "gate") if model.gated_ffn else ("up",):
        result += _linear(f"{name}.{which}", width, model.hidden, model.has_ffn_bias)
    return result + _linear(f"{name}.down", model.hidden, width, model.has_ffn_bias)


def _experts(model: ModelConfig, name: str) -> list[Parameter]:
    """Router, the matrices of all experts stacked, and the shared experts."""
    assert model.moe is not None
    count, hidden, width = model.moe.experts, model.hidden, model.expert_ffn_size
    result = [Parameter(f"{name}.router.weight", (count, hidden))]
    if model.moe.bias:
        result.append(Parameter(f"{name}.router.score_bias", (count,)))
    shapes = {"gate": (width, hidden), "up": (width, hidden), "down": (hidden, width)}
    for which in ("gate", "up", "down") if model.gated_ffn else ("up", "down"):
        outputs, inputs = shapes[which]
        result.append(Parameter(f"{name}.experts.{which}.weight", (count, outputs, inputs)))
        if model.moe.bias:
            result.append(Parameter(f"{name}.experts.{which}.bias", (count, outputs)))
    if model.moe.shared_experts:
        result += _feed_forward(model, f"{name}.shared", model.shared_ffn_size)
    if model.moe.shared_gate:
        result.append(Parameter(f"{name}.shared_gate.weight", (1, hidden)))
    return result


def _norm(model: ModelConfig, name: str) -> list[Parameter]:
    parts = ("weight", "bias")[: model.norm_tensors]
    return [Parameter(f"{name}.{part}", (model.hidden,)) for part in parts]


def _linear(name: str, outputs: int, inputs: int, bias: bool) -> list[Parameter]:
    weight = [Parameter(f"{name}.weight", (outputs, inputs))]
    return [*weight, Parameter(f"{name}.bias", (outputs,))] if bias else weight
