"""Compression of a trained model's linear layers by quantisation, pruning or both.

target = read_target("int4,2:4")                          # a format, a pruning, or both
held = compress(model, target, method="gptq", batches=calibration)
held["blocks.0.ffn.up.weight"].dequantize()               # the weight that the model now multiplies with

Router, norms, biases and position tables are unchanged, as are the embedding and the output layer by default.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from contextlib import ExitStack
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from ironlaw.catalog.formats import CompressionTarget, Method, NumberFormat, Score
from ironlaw.errors import UserError
from ironlaw.model.linear import Linear
from ironlaw.model.moe import ExpertLinear
from ironlaw.model.transformer import Transformer
from ironlaw.numerics.gptq import check_gptq, gptq
from ironlaw.numerics.hqq import check_hqq, hqq
from ironlaw.numerics.pruning import pruning_mask
from ironlaw.numerics.quantized import Quantized, quantize
from ironlaw.numerics.scaling import Inputs, balance, can_scale_channels
from ironlaw.numerics.sensitivity import layer_formats, squared_gradients

SCALING = ("awq", "smoothquant")  # methods that scale input channels
MEASURING = ("gptq", *SCALING)  # methods that measure the layers' inputs


def check_method(model: nn.Module, target: CompressionTarget, method: Method, mixes: bool = False) -> None:
    """Raises UserError for a method that the target or the model does not support. mixes: formats by layer."""
    if mixes and (target.pruning is not None or method not in ("rtn", "gptq")):
        raise UserError("--within mixes formats by rtn or gptq, without pruning: leave the others out")
    if method == "gptq":
        check_gptq(target.format)
    if method == "hqq":
        check_hqq(target.format)
        if target.pruning is not None:
            raise UserError("hqq weighs errors of rounding, not of pruning: use --method gptq or rtn")
    if method in SCALING and not any(can_scale_channels(module) for module in model.modules()):
        raise UserError(f"{method} scales norms before layers, and this model has none: use --method gptq or rtn")
    if method in SCALING and target.format.bits > 8:
        raise UserError(f"{method} has nothing to gain in {target.format.name}: give a format of 8 bits or fewer")
    if any(isinstance(module, ExpertLinear) for module in model.modules()):
        if method in MEASURING:
            raise UserError(f"{method} does not reach experts, each of which sees few tokens: use --method rtn")
        if target.pruning is not None:
            raise UserError("pruning does not reach experts: give a format only")


@torch.no_grad()
def compress(
    model: Transformer, target: CompressionTarget, *, method: Method = "rtn", score: Score = "magnitude",
    whole: bool = False, batches: Iterable[Tensor] = (), formats: Mapping[str, NumberFormat] | None = None,
) -> dict[str, Quantized]:  # fmt: skip
    """Compress `model` in place. Returns the compressed weights by name.

    method:   "rtn" rounds each weight to nearest, "hqq" does so with its own scales; "gptq" corrects errors in later
              columns; "awq" and "smoothquant" scale input channels. The last three use the inputs of the layers.
    score:    score of the weights for pruning; "wanda" uses the inputs too.
    whole:    also compress the embedding and the output layer: rounded to nearest, not pruned.
    batches:  tokens (B, S) that the inputs are measured on, block by block: a layer's inputs are the outputs of the
              compressed blocks before it, as in use.
    formats:  by name, formats of weights that differ from the target's (`mixed_formats`).
    """
    check_method(model, target, method)
    measured = method in MEASURING or (target.pruning is not None and score == "wanda")
    seen = BlockInputs(model, batches) if measured else None
    held: dict[str, Quantized] = {}
    for number, block in enumerate(model.blocks):
        layers = {name: module for name, module in block.named_modules() if isinstance(module, Linear | ExpertLinear)}
        inputs = seen.inputs_of(number, block, layers.values()) if seen is not None else {}
        if method in SCALING:
            balance(block, inputs, target.format, method)
        for name, module in layers.items():
            key = f"blocks.{number}.{name}.weight"
            format = (formats or {}).get(key, target.format)
            moment = inputs[module].moment if module in inputs else None
            made = held[key] = _compressed(module.weight, replace(target, format=format), method, score, moment)
            module.weight.copy_(made.dequantize())
        if seen is not None:
            seen.inputs = seen.run(number, block)  # outputs of the compressed block are inputs of the next one
    ends: dict[str, Tensor] = {"embedding.weight": model.embedding.weight} if whole and model.embedding else {}
    if whole and not model.config.tied:
        ends["head.weight"] = model.head.weight
    for name, weight in ends.items():
        held[name] = quantize(weight, target.format.name, block=target.format.weight_block)
        weight.copy_(held[name].dequantize())
    return held


def mixed_formats(
    model: Transformer, target: CompressionTarget, within: int, wide: torch.dtype, batches: Iterable[Tensor]
) -> dict[str, NumberFormat]:
    """Returns formats of the blocks' matrices such that the model takes at most `within` bytes, with the other weights
    `stored` in `wide`. Raises UserError if that is impossible."""
    linears = ((name, m) for name, m in model.blocks.named_modules(prefix="blocks") if isinstance(m, Linear))
    weights = {f"{name}.weight": module.weight.detach() for name, module in linears}
    others = sum(stored(tensor.detach(), wide).nbytes for n, tensor in model.named_parameters() if n not in weights)
    squares = squared_gradients(model, weights, batches)
    return layer_formats(weights, squares, target.format, within - others)


def stored(weight: Tensor, wide: torch.dtype) -> Tensor:
    """Returns an uncompressed weight in the type that it was read in; in its own if that would change it, as norms of
    1 + weight and those that a method has scaled."""
    narrow = weight.to(wide)
    return narrow if torch.equal(narrow.to(weight.dtype), weight) else weight


def _compressed(
    weight: Tensor, target: CompressionTarget, method: Method, score: Score, moment: Tensor | None
) -> Quantized:
    format, kept = target.format, None
    if target.pruning is not None:
        norms = moment.diagonal().sqrt() if score == "wanda" and moment is not None else None
        kept = pruning_mask(weight, target.pruning, norms)
    if method == "gptq":
        assert moment is not None
        made = gptq(weight, moment, format, kept)
    elif method == "hqq":
        made = hqq(weight, format)
    else:
        made = quantize(weight if kept is None else weight * kept, format.name, block=format.weight_block)
    return made if kept is None else made.pruned(kept)


class BlockInputs:
    """The inputs of the blocks for each batch."""

    def __init__(self, model: Transformer, batches: Iterable[Tensor]) -> None:
        """Run the uncompressed model once; keep the first block's inputs and the other arguments of every block."""
        self.inputs: list[Tensor] = []
        self.others: list[list[tuple[Any, ...]]] = []  # by batch, by block

        def keep(block: nn.Module, arguments: tuple[Any, ...]) -> None:
            if block is model.blocks[0]:
                self.inputs.append(arguments[0])
                self.others.append([])
            self.others[-1].append(arguments[1:])

        with ExitStack() as hooks:
            for block in model.blocks:
                hooks.enter_context(block.register_forward_pre_hook(keep))
            for tokens in batches:
                model(tokens)
        if not self.inputs:
            raise UserError("there is nothing to measure the inputs of layers on: give --data")

    def inputs_of(self, number: int, block: nn.Module, layers: Iterable[nn.Module]) -> dict[nn.Module, Inputs]:
        found: dict[nn.Module, Inputs] = {}

        def add(module: nn.Module, arguments: tuple[Any, ...]) -> None:
            rows = arguments[0].flatten(0, -2).float()
            here = Inputs(rows.t() @ rows, rows.abs().amax(0))
            found[module] = found[module] + here if module in found else here

        with ExitStack() as hooks:
            for layer in layers:
                hooks.enter_context(layer.register_forward_pre_hook(add))
            self.run(number, block)
        return found

    def run(self, number: int, block: nn.Module) -> list[Tensor]:
        return [block(x, *others[number]) for x, others in zip(self.inputs, self.others, strict=True)]
