"""The parameter tensors of a decoder, with the names, shapes and order of `transformer.py`, and their division.

Parameter counts are sums over these lists. No torch.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from ironlaw.model.dimensions import Dimensions


@dataclass(frozen=True)
class Parameter:
    """One tensor of a model, and its division over ranks."""

    name: str
    shape: tuple[int, ...]
    embedding: bool = False  # a lookup table, even if the output layer shares it
    divided: tuple[tuple[str, int], ...] = ()  # (degree of a layout, dimension that it divides)
    partial: bool = False  # whole on every tensor parallel rank, with partial gradients on each
    width: int = 4  # bytes per number
    trained: bool = True  # has a gradient

    @property
    def bytes(self) -> int:
        return self.elements * self.width

    @property
    def elements(self) -> int:
        return math.prod(self.shape)

    @property
    def is_block_matrix(self) -> bool:
        """Whether it is the matrix of a linear layer in a block, the target of matrix optimizers."""
        return len(self.shape) == 2 and not self.embedding and not self.is_small and self.name.startswith("blocks.")

    @property
    def is_small(self) -> bool:
        """Whether it is a vector, or the stacked biases of all experts."""
        return len(self.shape) < 2 or self.name.endswith("bias")


ROWS, COLUMNS = (("tp", 0),), (("tp", 1),)


def elements_of(parameters: Iterable[Parameter]) -> Any:
    """Return the total number of elements: an integer, or an array if sizes are arrays (`workload/sizes.py`)."""
    return sum(parameter.elements for parameter in parameters)


def model_parameters(model: Dimensions) -> list[Parameter]:
    """Return the tensors of `Transformer(model).named_parameters()`; a tied output layer is the embedding."""
    return of_embedding(model) + of_blocks(model, range(model.layers)) + of_head(model)


def of_blocks(model: Dimensions, layers: Iterable[int]) -> list[Parameter]:
    experts = {layer: model.moe is not None and model.moe.in_layer(layer) for layer in layers}
    return [p for layer, has in experts.items() for p in of_block(model, f"blocks.{layer}", experts=has)]


def of_embedding(model: Dimensions) -> list[Parameter]:
    result = [Parameter("embedding.weight", (model.vocab, model.hidden), embedding=True, divided=ROWS)]
    if model.positions == "learned":
        result.append(Parameter("positions.weight", (model.context, model.hidden), embedding=True))
    return result + (_norm(model, "embedding_norm") if model.embedding_norm else [])


def of_head(model: Dimensions) -> list[Parameter]:
    """The last norm and the output layer."""
    result = _norm(model, "final_norm")
    if not model.tied:
        result.append(Parameter("head.weight", (model.vocab, model.hidden), divided=ROWS))
    return result + ([Parameter("head.bias", (model.vocab,), divided=ROWS)] if model.head_bias else [])


def of_block(model: Dimensions, name: str = "", experts: bool = False) -> list[Parameter]:
    result = [] if model.norm_place == "post" else _norm(model, f"{name}.attention_norm")
    result += (_attention if model.latent is None else of_latent_attention)(model, f"{name}.attention")
    after = model.norm_place != "pre"
    result += _norm(model, f"{name}.attention_after") if after else []
    if model.norm_place != "post" and model.parallel_norms != 1:
        result += _norm(model, f"{name}.ffn_norm")
    network = f"{name}.ffn"
    result += _experts(model, network) if experts else _feed_forward(model, network, model.ffn_size)
    return result + (_norm(model, f"{name}.ffn_after") if after else [])


def _norm(model: Dimensions, name: str) -> list[Parameter]:
    parts = ("weight", "bias")[: model.norm_tensors]
    return [Parameter(f"{name}.{part}", (model.hidden,)) for part in parts]


def _linear(
    name: str, outputs: int, inputs: int, bias: bool = False, divided: tuple[tuple[str, int], ...] = (),
    partial: bool = False,
) -> list[Parameter]:  # fmt: skip
    """Return the weight (outputs, inputs) and bias of a linear layer; the bias is divided if rows are."""
    weight = Parameter(f"{name}.weight", (outputs, inputs), divided=divided, partial=partial)
    own = ROWS if divided == ROWS else ()
    return [weight, Parameter(f"{name}.bias", (outputs,), divided=own)] if bias else [weight]


def _feed_forward(model: Dimensions, name: str, width: int) -> list[Parameter]:
    """Return the tensors of up, gate (if any) and down."""
    result = []
    for which in ("up", "gate") if model.gated_ffn else ("up",):
        result += _linear(f"{name}.{which}", width, model.hidden, model.has_ffn_bias, divided=ROWS)
    return result + _linear(f"{name}.down", model.hidden, width, model.has_ffn_bias, divided=COLUMNS)


def _attention(model: Dimensions, name: str) -> list[Parameter]:
    qkv = model.query_size + 2 * model.key_value_size
    result = [Parameter(f"{name}.sinks", (model.heads,))] if model.attention_sinks else []
    result += _linear(f"{name}.qkv", qkv, model.hidden, model.has_qkv_bias, divided=ROWS)
    result += _linear(f"{name}.out", model.hidden, model.query_size, model.has_out_bias, divided=COLUMNS)
    if model.qk_norm:
        query, key = model.qk_norm_sizes
        result.append(Parameter(f"{name}.query_norm.weight", (query,), partial=True))
        result.append(Parameter(f"{name}.key_norm.weight", (key,), partial=True))
    return result


def of_latent_attention(model: Dimensions, name: str = "") -> list[Parameter]:
    """Return latent attention's tensors. Tensor parallelism divides only the up and output projections, by heads."""
    latent, hidden = model.latent, model.hidden
    assert latent is not None
    result = []
    if latent.query_rank is not None:
        result += _linear(f"{name}.query_down", latent.query_rank, hidden, partial=True)
        result.append(Parameter(f"{name}.query_norm.weight", (latent.query_rank,), partial=True))
    queries_from = hidden if latent.query_rank is None else latent.query_rank
    result += _linear(f"{name}.query_up", model.query_size, queries_from, divided=ROWS)
    result += _linear(f"{name}.latent_down", latent.down_size, hidden, partial=True)
    result.append(Parameter(f"{name}.latent_norm.weight", (latent.key_value_rank,), partial=True))
    result += _linear(f"{name}.latent_up", latent.up_size(model.heads), latent.key_value_rank, divided=ROWS)
    return result + _linear(f"{name}.out", hidden, model.mixed_size, divided=COLUMNS)


def of_experts(model: Dimensions, name: str = "") -> list[Parameter]:
    """Return the stacked matrices of a layer's routed experts, which ep and tp divide."""
    assert model.moe is not None
    count, hidden, width, result = model.moe.experts, model.hidden, model.expert_ffn_size, []
    shapes = {"gate": (count, width, hidden), "up": (count, width, hidden), "down": (count, hidden, width)}
    for which in ("gate", "up", "down") if model.gated_ffn else ("up", "down"):
        over = (("ep", 0), ("tp", 2 if which == "down" else 1))
        result.append(Parameter(f"{name}.{which}.weight", shapes[which], divided=over))
        if model.moe.bias:
            result.append(Parameter(f"{name}.{which}.bias", shapes[which][:2], divided=over[:1]))
    return result


def _experts(model: Dimensions, name: str) -> list[Parameter]:
    """Return the tensors of router, routed experts and shared experts."""
    assert model.moe is not None
    moe, hidden = model.moe, model.hidden
    result = _linear(f"{name}.router", moe.experts, hidden, partial=True)
    if moe.bias:
        result.append(Parameter(f"{name}.router.score_bias", (moe.experts,)))
    result += of_experts(model, f"{name}.experts")
    if moe.shared_experts:
        result += _feed_forward(model, f"{name}.shared", model.shared_ffn_size)
    return result + (_linear(f"{name}.shared_gate", 1, hidden, partial=True) if moe.shared_gate else [])
