"""A frozen model with adapters on a layout. Widening matrices are divided by outputs, narrowing ones by inputs, as
without adapters (`tensor.py`), and the adapters with them. For y = x W^T + s (x A^T) B^T:

    outputs divided     A is whole, B divided by rows: every rank has a part of A's gradient
    inputs divided      A is divided by columns, B whole: results are parts of a sum, and so is B's gradient

Divided adapters are DTensors, which FSDP, norms and checkpoints support; the frozen matrix is a plain part. Checkpoints
and PEFT's files hold whole adapters, which are small and can be read on any layout (`store.py`).
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard

from ironlaw.model.adapters import AdaptedLinear, adapted_layers
from ironlaw.model.config import ModelConfig
from ironlaw.model.linear import Linear
from ironlaw.model.transformer import Transformer
from ironlaw.numerics.frozen_linear import FrozenLinear, FrozenMatrix
from ironlaw.workload.finetune import NARROWING


def shard_layers(part: Transformer, mesh: DeviceMesh, rank: int) -> None:
    """Reduce every matrix of the blocks that `part` has, and its adapters, to this rank's part."""
    for block in part.blocks:
        for name, layer in block.named_modules():
            if isinstance(layer, Linear):
                if name in NARROWING:
                    _by_inputs(layer, mesh, rank)
                else:
                    _by_outputs(layer, rows_of_ranks(name, layer.out_features, part.config, mesh.size()), mesh, rank)


def rows_of_ranks(name: str, rows: int, config: ModelConfig, ranks: int) -> list[Tensor]:
    """Return the rows of a widening matrix that each rank holds; queries, keys and values are divided by heads."""
    sizes = config.qkv_sizes if name == "attention.qkv" else (rows,)
    parts = [chunk.chunk(ranks) for chunk in torch.arange(rows).split(sizes)]
    return [torch.cat([chunks[rank] for chunks in parts]) for rank in range(ranks)]


def _by_outputs(layer: Linear, rows: list[Tensor], mesh: DeviceMesh, rank: int) -> None:
    here, inputs = rows[rank], layer.in_features
    _keep(layer, here, slice(0, inputs))
    layer.out_features = len(here)
    if layer.bias is not None:
        layer.bias = nn.Parameter(layer.bias.detach()[here], requires_grad=False)
    start = 0
    for adapter in layer.adapters.each() if isinstance(layer, AdaptedLinear) else ():
        within = [some[(some >= adapter.start) & (some < adapter.stop)] - adapter.start for some in rows]
        adapter.order = torch.cat(within)
        adapter.b = _part(adapter.b, within[rank], 0, mesh)
        if adapter.magnitude is not None:
            adapter.magnitude = _part(adapter.magnitude, within[rank], 0, mesh)
        adapter.start, start = start, start + len(within[rank])
        adapter.stop = start


def _by_inputs(layer: Linear, mesh: DeviceMesh, rank: int) -> None:
    """Divide a layer by inputs. Only the first rank adds the bias."""
    width = layer.in_features // mesh.size()
    columns = slice(rank * width, (rank + 1) * width)
    _keep(layer, None, columns)
    layer.in_features = width
    if layer.bias is not None:
        layer.bias = nn.Parameter(layer.bias.detach() * (rank == 0), requires_grad=False)
    group = mesh.get_group()

    def whole_lengths(lengths: Tensor) -> Tensor:
        squares = lengths.square()
        dist.all_reduce(squares, group=group)
        return squares.sqrt()

    for adapter in layer.adapters.each() if isinstance(layer, AdaptedLinear) else ():
        adapter.a = _part(adapter.a, torch.arange(columns.start, columns.stop), 1, mesh)
        adapter.whole_lengths = whole_lengths


def _keep(layer: Linear, rows: Tensor | None, columns: slice) -> None:
    if isinstance(layer, FrozenLinear):
        layer.shard(rows, columns)
        return
    weight = layer.weight.detach()[:, columns]
    layer.weight = nn.Parameter(weight.clone() if rows is None else weight[rows], requires_grad=False)


def _part(tensor: Tensor, chosen: Tensor, dimension: int, mesh: DeviceMesh) -> nn.Parameter:
    local = tensor.detach().index_select(dimension, chosen)
    return nn.Parameter(DTensor.from_local(local, mesh, [Shard(dimension)], run_check=False))


def partial_parameters(part: nn.Module) -> list[nn.Parameter]:
    """Return whole parameters for which a tensor-parallel rank computes a part of the gradient."""
    found: list[nn.Parameter] = []
    for name, layer in adapted_layers(part).items():
        for adapter in layer.adapters.each():
            if not name.endswith(NARROWING):
                found.append(adapter.a)
            else:
                found += [p for p in (adapter.b, adapter.magnitude) if p is not None]
    return found


def make_codes_parameters(part: nn.Module) -> None:
    """Turn codes into parameters, which FSDP divides."""
    for layer in part.modules():
        for name in ("codes", "scale_codes") if isinstance(layer, FrozenMatrix) else ():
            codes = layer._buffers.pop(name)
            assert codes is not None
            layer.register_parameter(name, nn.Parameter(codes.contiguous(), requires_grad=False))
