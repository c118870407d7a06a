"""Names of a run's tensors on disk, which do not depend on how ranks divide them (`store.py`)."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Any

from torch import Tensor, nn

from ironlaw.model.config import ModelConfig

COPY = "#copy"
QKV = ("query", "key", "value")  # parts of the fused projection, which have their own names in checkpoints and layouts


def named_tensors(model: nn.Module, optimizer: Any = None) -> Iterator[tuple[str, Tensor]]:
    """Yield (name, tensor) of weights and optimizer state, as views; on a layout, of the parts this rank holds."""
    # Router biases, which balance the load of experts, are updated without gradients.
    yield from ((f"weights/{name}", buffer) for name, buffer in model.named_buffers() if name.endswith(".router.bias"))
    for name, parameter in model.named_parameters():
        yield from _named_on_disk("weights", name, "", parameter.detach(), model)
        for key, value in () if optimizer is None else optimizer.state.get(parameter, {}).items():
            if isinstance(value, Tensor):
                yield from _named_on_disk("optimizer", name, f"/{key}", value, model)


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
