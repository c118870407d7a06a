"""Tensor parallelism (arXiv 1909.08053), with sequence parallelism (arXiv 2205.05198), as DTensor placements.

Widening matrices are divided by outputs, narrowing ones by inputs, the vocabulary by rows. For attention, and again for
the feed-forward network, a block needs one all-reduce of the residual stream in each direction, or with sequence
parallelism an all-gather and a reduce-scatter.
"""

from __future__ import annotations

from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    ParallelStyle,
    PrepareModuleInput,
    RowwiseParallel,
    parallelize_module,
)

from ironlaw.model.config import ModelConfig
from ironlaw.model.latent import LatentAttention
from ironlaw.model.linear import Linear, linear
from ironlaw.model.moe import MixtureOfExperts
from ironlaw.model.parameters import COLUMNS, ROWS, of_block
from ironlaw.model.transformer import Attention, Block, Transformer
from ironlaw.train.parallel import adapted
from ironlaw.train.parallel.materialize import QKV


class SplitProjection(nn.Module):
    """Query, key and value as separate matrices, each of which can be divided by heads and has a name of its own."""

    def __init__(self, attention: Attention) -> None:
        super().__init__()
        fused, sizes = attention.qkv, attention.config.qkv_sizes
        rows = fused.weight.detach().split(sizes)
        biases = fused.bias.detach().split(sizes) if fused.bias is not None else (None,) * 3
        for name, weight, bias in zip(QKV, rows, biases, strict=True):
            part = Linear(weight.shape[1], weight.shape[0], bias=bias is not None, device="meta")
            part.weight = nn.Parameter(weight.clone())
            if bias is not None:
                part.bias = nn.Parameter(bias.clone())
            setattr(self, name, part)

    def forward(self, x: Tensor) -> tuple[Tensor, ...]:
        return tuple(part(x) for part in self.children())


def blocks_of(model: Transformer) -> list[Block]:
    return cast(list[Block], list(model.blocks))


def split_projections(model: Transformer) -> None:
    for block in blocks_of(model):
        if isinstance(block.attention, Attention):  # latent attention has no fused projection
            block.attention.qkv = SplitProjection(block.attention)  # type: ignore[assignment]


def parallelize(model: Transformer, mesh: DeviceMesh, sequence_parallel: bool, adapts: bool = False) -> None:
    """Divide the parts that `model` has (a pipeline stage has only some) over `mesh`.

    `adapts`: the matrices of its blocks are frozen, and already divided (`adapted.py`).
    """
    stream = Shard(1) if sequence_parallel else Replicate()
    tied = model.is_tied  # which the division ends: each weight gets its own
    styles: dict[str, object] = {}
    if model.embedding is not None:
        styles["embedding"] = RowwiseParallel(input_layouts=Replicate(), output_layouts=stream)
    for name, block in model.blocks.named_children():
        here = f"blocks.{name}."
        if adapts:
            styles |= {here + "attention": PartialSumParallel(stream), here + "ffn": PartialSumParallel(stream)}
        else:
            styles |= _of_block(model.config, here, cast(Block, block), stream)
    if model.head is not None:
        # Logits stay divided by vocabulary; the loss is computed on the parts (`loss_parallel`).
        styles["head"] = ColwiseParallel(input_layouts=stream, output_layouts=Shard(-1), use_local_output=False)
    # All ranks have built the same weights, so that nothing is sent.
    parallelize_module(model, mesh, styles, src_data_rank=None)  # type: ignore[arg-type]
    if tied:
        assert model.embedding is not None
        model.head.weight = model.embedding.weight


def _of_block(config: ModelConfig, here: str, block: Block, stream: Placement) -> dict[str, object]:
    """Return the styles that divide a block's matrices as in `model/parameters.py`. Every rank computes the narrow
    vectors of latent attention in full; routed experts are divided in `experts.py`."""
    styles: dict[str, object] = {}
    parts = {"attention": isinstance(block.attention, LatentAttention), "ffn": isinstance(block.ffn, MixtureOfExperts)}
    for name, sums in parts.items():
        # All products read the input as one DTensor, so that their gradients are summed first and reduced once.
        beside = (None,) * 3 if name == "attention" else ()
        gathered = PrepareModuleInput(input_layouts=(stream, *beside), desired_input_layouts=(Replicate(), *beside))
        styles[here + name] = PartialSumParallel(stream) if sums else gathered
    for parameter in of_block(config, here[:-1], experts=parts["ffn"]):
        module, _, kind = parameter.name.rpartition(".")
        if kind != "weight" or parameter.divided not in (ROWS, COLUMNS):
            continue
        rows = parameter.divided == ROWS
        for name in [f"{module}.{part}" for part in QKV] if module.endswith("qkv") else [module]:
            if parts[name.removeprefix(here).partition(".")[0]]:
                styles[name] = ShardedLinearParallel(0 if rows else 1)
            else:
                styles[name] = ColwiseParallel() if rows else RowwiseParallel(output_layouts=stream)
    return styles


class PartialSumParallel(ParallelStyle):
    """Style of a module that computes a part of a sum on every rank, from the whole input and with plain tensors.

    The parts are summed at its end, as are the gradients of its input. Gradients of whole weights inside (a router's)
    are also parts, and are summed with the others of `partial_parameters`. Further inputs are passed unchanged.
    """

    def __init__(self, stream: Placement) -> None:
        super().__init__()
        self.stream = stream

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        def gathered(module: nn.Module, inputs: tuple[Any, ...]) -> tuple[Any, ...]:
            x = DTensor.from_local(inputs[0], device_mesh, [self.stream], run_check=False)
            whole = x.redistribute(placements=[Replicate()]).to_local(grad_placements=[Partial()])
            return whole, *inputs[1:]

        def summed(module: nn.Module, inputs: tuple[Any, ...], output: Tensor) -> Tensor:
            whole = DTensor.from_local(output, device_mesh, [Partial()], run_check=False)
            return whole.redistribute(placements=[self.stream]).to_local()

        module.register_forward_pre_hook(gathered)
        module.register_forward_hook(summed)
        return module


class ShardedLinearParallel(ParallelStyle):
    """Style of a linear layer whose ranks compute with their own parts of it: of the outputs (0) or the inputs (1)."""

    def __init__(self, dimension: int) -> None:
        super().__init__()
        self.dimension = dimension

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        layer = cast(Linear, module)
        placements = [Shard(self.dimension)]
        layer.weight = nn.Parameter(
            distribute_tensor(layer.weight.detach(), device_mesh, placements, src_data_rank=None)
        )

        def forward(x: Tensor) -> Tensor:
            weight = cast(DTensor, layer.weight).to_local()
            return linear(x, weight) if layer.onednn else nn.functional.linear(x, weight)

        layer.forward = forward  # type: ignore[method-assign]
        return module


def partial_parameters(model: Transformer, sequence_parallel: bool) -> list[nn.Parameter]:
    """Return whole parameters that see only the rank's heads or positions; their gradients are summed over tp."""
    found: list[nn.Parameter] = []
    for block in blocks_of(model):
        attention = block.attention
        if isinstance(attention, LatentAttention):
            found += [*attention.latent_down.parameters(), *attention.latent_norm.parameters()]
            if attention.latent.query_rank:
                found += [*attention.query_down.parameters(), *attention.query_norm.parameters()]
        elif attention.config.qk_norm:
            found += [attention.query_norm.weight, attention.key_norm.weight]
        if isinstance(block.ffn, MixtureOfExperts):
            found.append(block.ffn.router.weight)
            if block.ffn.shared_gate is not None:
                found += block.ffn.shared_gate.parameters()
        if sequence_parallel:
            norms = (block.attention_norm, block.attention_after, block.ffn_norm, block.ffn_after)
            found += [p for norm in norms if norm is not None for p in norm.parameters()]
    if sequence_parallel and model.final_norm is not None:
        found += model.final_norm.parameters()
    if sequence_parallel and model.embedding is not None:
        found += [p for part in (model.positions, model.embedding_norm) if part is not None for p in part.parameters()]
    found += adapted.partial_parameters(model)
    return [parameter for parameter in found if isinstance(parameter, torch.nn.Parameter) and parameter.requires_grad]
