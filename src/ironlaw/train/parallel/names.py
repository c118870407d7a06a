"""What the tensors of a run are called on disk, whoever holds which part of them (`store.py`)."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Any

from torch import Tensor, nn

from ironlaw.model.config import ModelConfig

COPY = "#copy"
QKV = ("query", "key", "value")  # parts of the fused projection, by which checkpoints and layouts name them


def named_tensors(model: nn.Module, optimizer: Any = None) -> Iterator[tuple[str, Tensor]]:
    """(name, tensor) of weights and optimizer state: views into what is there, parts of it under the layout's ranks."""
    # What is moved by something else than gradients: the biases that keep experts' load even.
    yield from ((f"weights/{name}", buffer) for name, buffer in model.named_buffers() if name.endswith(".router.bias"))
    for name, parameter in model.named_parameters():
        yield from _pieces("weights", name, "", parameter.detach(), model)
        for key, value in () if optimizer is None else optimizer.state.get(parameter, {}).items():
            if isinstance(value, Tensor):
                yield from _pieces("optimizer", name, f"/{key}", value, model)


def named_like(model: nn.Module, prefix: str, tensors: Mapping[int, Tensor]) -> Iterator[tuple[str, Tensor]]:
    """The same of `tensors` that stand beside parameters, each of the shape of the one whose id it is under."""
    for name, parameter in model.named_parameters():
        if id(parameter) in tensors:
            yield from _pieces(prefix, name, "", tensors[id(parameter)], model)


def _pieces(prefix: str, name: str, key: str, tensor: Tensor, model: Any) -> Iterator[tuple[str, Tensor]]:
    """By the names on disk. A tied output layer is among the parameters by its own name only where it is a copy."""
    copied = name == "head.weight" and model.config.tied
    common = "embedding.weight" if copied else name
    for part, view in pieces(f"{prefix}/{common}{key}", tensor, model.config):
        yield part + COPY * copied, view


def pieces(name: str, tensor: Tensor, config: ModelConfig) -> Iterator[tuple[str, Tensor]]:
    """A fused projection as its three parts, under the names that checkpoints have; a number is shared by all three,
    and so is what ranks divide."""
    if not re.search(r"\.attention\.qkv\.(weight|bias)(/|$)", name):
        yield name, tensor
        return
    fused = tensor.dim() and tensor.shape[0] == sum(config.qkv_sizes) and not hasattr(tensor, "to_local")
    parts = tensor.split(config.qkv_sizes) if fused else (tensor,) * 3
    for part, view in zip(QKV, parts, strict=True):
        yield name.replace(".qkv.", f".qkv.{part}."), view
