"""The state that a checkpoint saves: named parts with a `state_dict`, and copies that later steps cannot change."""

from __future__ import annotations

import random
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map_only


class Stateful(Protocol):
    """A part of the training state, such as the optimizer, the loss scaler, averaged weights or random generators.

    `state_dict` returns tensors, numbers, strings, None, and dicts, lists and tuples of them, which
    `torch.load(weights_only=True)` can read.
    """

    def state_dict(self) -> dict[str, Any]: ...
    def load_state_dict(self, state_dict: dict[str, Any], /) -> Any: ...


def seed_everything(seed: int) -> None:
    """Seed the generators that `RandomState` saves."""
    torch.manual_seed(seed)
    np.random.seed(seed % 2**32)
    random.seed(seed)


class RandomState:
    """The state of every random generator that a step may use: torch's on each device, NumPy's and Python's."""

    def state_dict(self) -> dict[str, Any]:
        name, keys, position, has_gauss, gauss = np.random.get_state(legacy=True)
        state: dict[str, Any] = {
            "cpu": torch.get_rng_state(),
            "numpy": [str(name), torch.from_numpy(np.asarray(keys).astype(np.int64)), position, has_gauss, gauss],
            "python": random.getstate(),
        }
        if torch.cuda.is_available():
            state["cuda"] = torch.cuda.get_rng_state_all()
        return state

    def load_state_dict(self, state_dict: dict[str, Any], /) -> None:
        torch.set_rng_state(state_dict["cpu"])
        if "numpy" in state_dict:
            name, keys, position, has_gauss, gauss = state_dict["numpy"]
            np.random.set_state((name, keys.numpy().astype(np.uint32), position, has_gauss, gauss))
        if "python" in state_dict:
            version, words, gauss_next = state_dict["python"]
            random.setstate((version, tuple(words), gauss_next))
        if "cuda" in state_dict and torch.cuda.is_available():
            torch.cuda.set_rng_state_all(state_dict["cuda"])


def host_copy(tree: Any) -> Any:
    """Return `tree` with every tensor copied to host memory. Shared tensors stay shared.

    Copies from CUDA go to pinned memory asynchronously; the function returns when all are complete.
    """
    seen: dict[tuple[Any, ...], Tensor] = {}
    waiting: set[torch.device] = set()

    def copy(tensor: Tensor) -> Tensor:
        key = (tensor.device, tensor.data_ptr(), tensor.shape, tensor.stride(), tensor.dtype)
        if tensor.numel() == 0 or key not in seen:
            seen[key] = _copied(tensor.detach(), waiting)
        return seen[key]

    copied = tree_map_only(Tensor, copy, tree)
    for device in waiting:
        torch.cuda.synchronize(device)
    return copied


def _copied(tensor: Tensor, waiting: set[torch.device]) -> Tensor:
    if tensor.device.type != "cuda":
        return tensor.to("cpu", copy=True, memory_format=torch.contiguous_format)
    waiting.add(tensor.device)
    there = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
    return there.copy_(tensor, non_blocking=True)


def unique_weights(model: nn.Module) -> dict[str, Tensor]:
    """Return the state dict with one name for each shared tensor, without the prefixes added by compilation."""
    seen: set[int] = set()
    weights = {}
    for name, tensor in model.state_dict().items():
        if tensor.data_ptr() not in seen:
            seen.add(tensor.data_ptr())
            weights[name] = tensor.detach()
    return weights


def load_unique_weights(model: nn.Module, weights: dict[str, Tensor]) -> None:
    """Load `unique_weights`. A tied output layer is loaded with the embedding."""
    missing = model.load_state_dict(weights, strict=False).missing_keys
    assert all(name == "head.weight" for name in missing), missing
