"""Copies whole tensors into the parts that a rank holds: initial weights, and checkpoints of one process. Names of
tensors on disk do not depend on how ranks divide them (`named_tensors`).

A model may be on PyTorch's `meta` device (`build_on_meta`), without data. After the layout is applied, every rank
generates all weights, one tensor at a time, in the order and from the generator of one process, and keeps its parts.
The values are those of one process, and no rank holds more than its parts, one whole tensor and, while generators are
advanced to the state that one process has, one block. This takes as long as on one process.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import partial
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

from ironlaw.model.config import ModelConfig
from ironlaw.model.parameters import model_parameters
from ironlaw.model.transformer import Block, Transformer, build_norm, initialize_tensor

COPY = "#copy"
QKV = ("query", "key", "value")  # parts of the fused projection, which have their own names in checkpoints and layouts


def named_tensors(model: nn.Module, states: Mapping[str, Any] = MappingProxyType({})) -> Iterator[tuple[str, Tensor]]:
    """Yield (name, tensor) of weights, and of optimizer state and averages if `states` has them, as views; on a
    layout, of the parts this rank holds."""
    optimizer, average = states.get("optimizer"), states.get("average")
    # Router biases, which balance the load of experts, are updated without gradients.
    yield from ((f"weights/{name}", buffer) for name, buffer in model.named_buffers() if name.endswith(".router.bias"))
    for name, parameter in model.named_parameters():
        yield from _named_on_disk("weights", name, "", parameter.detach(), model)
        for key, value in () if optimizer is None else optimizer.state.get(parameter, {}).items():
            if isinstance(value, Tensor):
                yield from _named_on_disk("optimizer", name, f"/{key}", value, model)
    if average is not None:
        yield from named_like(model, "average", average.by_parameter())


def named_like(model: nn.Module, prefix: str, tensors: Mapping[int, Tensor]) -> Iterator[tuple[str, Tensor]]:
    """Yield (name, tensor) of `tensors`, each stored under the id of the parameter whose shape and name it shares."""
    for name, parameter in model.named_parameters():
        if id(parameter) in tensors:
            yield from _named_on_disk(prefix, name, "", tensors[id(parameter)], model)


def _named_on_disk(prefix: str, name: str, key: str, tensor: Tensor, model: Any) -> Iterator[tuple[str, Tensor]]:
    """Yield a tensor by its names on disk. A tied output layer is a parameter of its own only if it is a copy."""
    copied = name == "head.weight" and model.config.tied
    common = "embedding.weight" if copied else name
    for part, view in split_projection(f"{prefix}/{common}{key}", tensor, model.config):
        yield part + COPY * copied, view


def split_projection(name: str, tensor: Tensor, config: ModelConfig) -> Iterator[tuple[str, Tensor]]:
    """Yield a fused projection as its three parts, with their names in checkpoints, and other tensors unchanged. All
    three parts share a scalar, or a tensor that ranks have divided."""
    if not re.search(r"\.attention\.qkv\.(weight|bias)(/|$)", name):
        yield name, tensor
        return
    fused = tensor.dim() and tensor.shape[0] == sum(config.qkv_sizes) and not hasattr(tensor, "to_local")
    parts = tensor.split(config.qkv_sizes) if fused else (tensor,) * 3
    for part, view in zip(QKV, parts, strict=True):
        yield name.replace(".qkv.", f".qkv.{part}."), view


SplitTensor = Callable[[str, Tensor], Iterable[tuple[str, Tensor]]]
"""Splits a tensor of one process, given by name, into the tensors that ranks have instead, with their names on disk."""


def build_on_meta(config: ModelConfig) -> Transformer:
    """Return the model on the meta device, without data."""
    with torch.device("meta"):
        return Transformer(config)


@torch.no_grad()
def materialize(parts: Iterable[Transformer], device: torch.device, initialize: bool = True) -> None:
    """Allocate the parts' memory and, if `initialize`, draw the weights: torch's generator must be freshly seeded."""
    parts = list(parts)
    for part in parts:
        tied = part.is_tied
        part.to_empty(device=device)
        if tied:  # `to_empty` has separated them
            assert part.embedding is not None
            part.head.weight = part.embedding.weight
        for name, buffer in part.named_buffers():
            if not name.startswith("rotary"):
                buffer.zero_()
        part.make_rotary_tables(device)
    if initialize:
        copy_from(parts, lambda wanted: initial_weights(parts[0].config))


@torch.no_grad()
def copy_from(
    parts: Iterable[Transformer], source: Callable[[Callable[[str], bool]], Iterable[tuple[str, Tensor]]]
) -> None:
    """Copy whole tensors from `source`, one at a time, into the parts. `source` takes a filter for names."""
    parts = list(parts)
    targets = {name: tensor for part in parts for name, tensor in named_tensors(part)}
    known = {name.removeprefix("weights/").removesuffix(COPY).replace(".qkv.query.", ".qkv.") for name in targets}
    for name, whole in source(known.__contains__):
        copy_parts(f"weights/{name}", whole, targets, partial(split_projection, config=parts[0].config))


def initial_weights(config: ModelConfig) -> Iterator[tuple[str, Tensor]]:
    """Yield (name, tensor) of a new `Transformer(config)`, one at a time, from the same generator."""
    # Advance the generator as the constructors of PyTorch's layers do; `Transformer` overwrites their weights.
    nn.Embedding(config.vocab, config.hidden)
    if config.positions == "learned":
        nn.Embedding(config.context, config.hidden)
    for layer in range(config.layers):
        Block(config, layer)
    build_norm(config)
    nn.Linear(config.hidden, config.vocab, bias=config.head_bias)
    for parameter in model_parameters(config):
        tensor = torch.empty(parameter.shape)
        initialize_tensor(parameter.name, tensor, config)
        yield parameter.name, tensor


def copy_part(target: Tensor, whole: Tensor) -> None:
    """Copy this rank's part of `whole` into `target`."""
    if not isinstance(target, DTensor):
        target.copy_(whole)
        return
    size, offset = compute_local_shape_and_global_offset(whole.shape, target.device_mesh, target.placements)
    local = target.to_local()
    if local.numel():
        local.copy_(whole[tuple(slice(first, first + n) for first, n in zip(offset, size, strict=True))])


def copy_parts(name: str, whole: Tensor, targets: Mapping[str, Tensor], split: SplitTensor) -> None:
    """Split a whole tensor by `split`, and copy this rank's share into the `targets` with the same names."""
    for part, tensor in split(name, whole):
        for target in (targets.get(part), targets.get(part + COPY)):
            if target is not None:
                copy_part(target, tensor)
