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
        return len(self.shape) == 2 and not self.embedding and self.name.startswith("blocks.")


def model_parameters(model: ModelConfig) -> list[Parameter]:
    """Every tensor of `Transformer(model).named_parameters()`; a tied output layer is the embedding."""
    result = [Parameter("embedding.weight", (model.vocab, model.hidden), embedding=True)]
    if model.positions == "learned":
        result.append(Parameter("positions.weight", (model.context, model.hidden), embedding=True))
    for layer in range(model.layers):
        result += _block(model, f"blocks.{layer}")
    result += _norm(model, "final_norm")
    if not model.tied:
        result.append(Parameter("head.weight", (model.vocab, model.hidden)))
    return result


def _block(model: ModelConfig, name: str) -> list[Parameter]:
    qkv = model.query_size + 2 * model.key_value_size
    result = _norm(model, f"{name}.attention_norm")
    result += _linear(f"{name}.attention.qkv", qkv, model.hidden, model.has_qkv_bias)
    result += _linear(f"{name}.attention.out", model.hidden, model.query_size, model.bias)
    if model.qk_norm:
        result += [
            Parameter(f"{name}.attention.{which}_norm.weight", (model.size_of_head,)) for which in ("query", "key")
        ]
    result += _norm(model, f"{name}.ffn_norm")
    for which in ("up", "gate") if model.gated_ffn else ("up",):
        result += _linear(f"{name}.ffn.{which}", model.ffn_size, model.hidden, model.bias)
    return result + _linear(f"{name}.ffn.down", model.hidden, model.ffn_size, model.bias)


def _norm(model: ModelConfig, name: str) -> list[Parameter]:
    parts = ("weight", "bias") if model.norm == "layernorm" else ("weight",)
    return [Parameter(f"{name}.{part}", (model.hidden,)) for part in parts]


def _linear(name: str, outputs: int, inputs: int, bias: bool) -> list[Parameter]:
    weight = [Parameter(f"{name}.weight", (outputs, inputs))]
    return [*weight, Parameter(f"{name}.bias", (outputs,))] if bias else weight
