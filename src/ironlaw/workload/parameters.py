"""The parameter tensors of a decoder: names and shapes as `model/transformer.py` has them, in its order. No torch."""

from __future__ import annotations

from collections.abc import Iterable

from ironlaw.model.config import ModelConfig
from ironlaw.workload.latent import latent_parameters
from ironlaw.workload.moe import expert_parameters
from ironlaw.workload.operations import COLUMNS, ROWS, Parameter, feed_forward_parameters, linear_parameters

__all__ = ["Parameter", "model_parameters"]


def model_parameters(model: ModelConfig, layers: Iterable[int] | None = None) -> list[Parameter]:
    """Every tensor of `Transformer(model).named_parameters()`; a tied output layer is the embedding. `layers`: of
    blocks, theirs alone."""
    result = [Parameter("embedding.weight", (model.vocab, model.hidden), embedding=True, divided=ROWS)]
    if model.positions == "learned":
        result.append(Parameter("positions.weight", (model.context, model.hidden), embedding=True))
    if model.embedding_norm:
        result += _norm(model, "embedding_norm")
    for layer in range(model.layers) if layers is None else layers:
        result += _block(model, f"blocks.{layer}", experts=model.moe is not None and model.moe.in_layer(layer))
    result += _norm(model, "final_norm")
    if not model.tied:
        result.append(Parameter("head.weight", (model.vocab, model.hidden), divided=ROWS))
    if model.head_bias:
        result.append(Parameter("head.bias", (model.vocab,), divided=ROWS))
    return result


def _block(model: ModelConfig, name: str, experts: bool) -> list[Parameter]:
    result = [] if model.norm_place == "post" else _norm(model, f"{name}.attention_norm")
    result += (_attention if model.latent is None else latent_parameters)(model, f"{name}.attention")
    after = model.norm_place != "pre"
    result += _norm(model, f"{name}.attention_after") if after else []
    if model.norm_place != "post" and model.parallel_norms != 1:
        result += _norm(model, f"{name}.ffn_norm")
    network = f"{name}.ffn"
    result += expert_parameters(model, network) if experts else feed_forward_parameters(model, network, model.ffn_size)
    return result + (_norm(model, f"{name}.ffn_after") if after else [])


def _attention(model: ModelConfig, name: str) -> list[Parameter]:
    qkv = model.query_size + 2 * model.key_value_size
    result = [Parameter(f"{name}.sinks", (model.heads,))] if model.attention_sinks else []
    result += linear_parameters(f"{name}.qkv", qkv, model.hidden, model.has_qkv_bias, divided=ROWS)
    result += linear_parameters(f"{name}.out", model.hidden, model.query_size, model.has_out_bias, divided=COLUMNS)
    if model.qk_norm:
        query, key = model.qk_norm_sizes
        result.append(Parameter(f"{name}.query_norm.weight", (query,), partial=True))
        result.append(Parameter(f"{name}.key_norm.weight", (key,), partial=True))
    return result


def _norm(model: ModelConfig, name: str) -> list[Parameter]:
    parts = ("weight", "bias")[: model.norm_tensors]
    return [Parameter(f"{name}.{part}", (model.hidden,)) for part in parts]
