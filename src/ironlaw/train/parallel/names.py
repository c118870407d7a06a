"""What the tensors of a run are called on disk, whoever holds which part of them (`store.py`)."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from torch import Tensor, nn

COPY = "#copy"


def named_tensors(model: nn.Module, optimizer: Any = None) -> Iterator[tuple[str, Tensor]]:
    """(name, tensor) of weights and optimizer state: views into what is there, parts of it under the layout's ranks."""
    for name, buffer in saved_buffers(model):
        yield f"weights/{name}", buffer
    for name, parameter in model.named_parameters():
        common, copy = _common(name, model)
        yield from _pieces(f"weights/{common}", parameter.detach(), parameter, copy)
        if optimizer is None:
            continue
        for key, value in optimizer.state.get(parameter, {}).items():
            if isinstance(value, Tensor):
                yield from _pieces(f"optimizer/{common}/{key}", value, parameter, copy)


def saved_buffers(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """What is moved by something else than gradients: the biases that keep experts' load even."""
    return ((name, buffer) for name, buffer in model.named_buffers() if name.endswith(".router.bias"))


def named_like(model: nn.Module, prefix: str, tensors: Mapping[int, Tensor]) -> Iterator[tuple[str, Tensor]]:
    """The same of `tensors` that stand beside parameters, each of the shape of the one whose id it is under."""
    for name, parameter in model.named_parameters():
        if id(parameter) in tensors:
            common, copy = _common(name, model)
            yield from _pieces(f"{prefix}/{common}", tensors[id(parameter)], parameter, copy)


def _common(name: str, model: nn.Module) -> tuple[str, str]:
    """The name on disk, and a mark for a second tensor of that name."""
    config: Any = getattr(model, "config", None)
    # A tied output layer appears among the parameters by its own name only where it is a copy.
    if name == "head.weight" and config is not None and config.tied:
        return "embedding.weight", COPY
    return name, ""


def _pieces(name: str, tensor: Tensor, parameter: Tensor, copy: str) -> Iterator[tuple[str, Tensor]]:
    """A fused query, key and value matrix as its three parts."""
    sizes = getattr(parameter, "fused_rows", None)
    if sizes is None:
        yield name + copy, tensor
        return
    for part, view in by_parts(name, tensor, sizes if tensor.shape == parameter.shape else None):
        yield part + copy, view


def by_parts(name: str, tensor: Tensor, rows: Sequence[int] | None) -> Iterator[tuple[str, Tensor]]:
    """Query, key and value under the names that checkpoints have; `rows` None: a number that all three share."""
    parts = (tensor,) * 3 if rows is None else tensor.split(list(rows))
    for part, view in zip(("query", "key", "value"), parts, strict=True):
        yield name.replace(".qkv.", f".qkv.{part}."), view


def mark_fused(model: nn.Module) -> None:
    """Tell fused projections apart, so that they are read and written by parts."""
    config: Any = getattr(model, "config", None)
    assert config is not None
    for name, parameter in model.named_parameters():
        if name.endswith(("attention.qkv.weight", "attention.qkv.bias")):
            parameter.fused_rows = (  # type: ignore[attr-defined]
                config.query_size, config.key_value_size, config.key_value_size,
            )  # fmt: skip
