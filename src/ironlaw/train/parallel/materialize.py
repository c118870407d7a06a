"""Copies whole tensors into the parts that a rank holds: initial weights, and checkpoints of one process.

A model may be on PyTorch's `meta` device (`build_on_meta`), without data. After the layout is applied, every rank
generates all weights, one tensor at a time, in the order and from the generator of one process, and keeps its parts.
The values are those of one process, and no rank holds more than its parts, one whole tensor and, while generators are
advanced to the state that one process has, one block. This takes as long as on one process.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

from ironlaw.model.config import ModelConfig
from ironlaw.model.huggingface.weights import read_weights
from ironlaw.model.parameters import Parameter, model_parameters
from ironlaw.model.transformer import Block, Transformer, build_norm, initialize_tensor
from ironlaw.train.checkpoint import STATE, WEIGHTS, check_model, newest_of
from ironlaw.train.optimizer import grouped
from ironlaw.train.parallel.names import COPY, named_tensors, split_projection
from ironlaw.train.run_directory import RunDirectory
from ironlaw.workload.optimizers import OptimizerConfig

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


def read_first_weights(source: str, parts: Iterable[Transformer], joined: Transformer, store: Any) -> None:
    """Read `train.start_from` into this rank's tensors: a Hugging Face model, or another run with any layout.

    Every rank reads the files, but only its own rows of tensors that are stored as they are held. `joined` is a module
    with all `parts`; `store` reads checkpoints.
    """
    folder, parts = Path(source), list(parts)
    config = parts[0].config
    if RunDirectory(folder).is_run:
        found = newest_of(folder)
        check_model(found, config)
        store.read(found.path, joined, {})
    else:
        copy_from(parts, lambda wanted: read_weights(folder, config, wanted))


def initial_weights(config: ModelConfig) -> Iterator[tuple[str, Tensor]]:
    """Yield (name, tensor) of a new `Transformer(config)`, one at a time, from the same generator."""
    _draw_constructors(config)
    for parameter in model_parameters(config):
        tensor = torch.empty(parameter.shape)
        initialize_tensor(parameter.name, tensor, config)
        yield parameter.name, tensor


def _draw_constructors(config: ModelConfig) -> None:
    """Advance the generator as the constructors of PyTorch's layers do; `Transformer` overwrites their weights."""
    nn.Embedding(config.vocab, config.hidden)
    if config.positions == "learned":
        nn.Embedding(config.context, config.hidden)
    for layer in range(config.layers):
        Block(config, layer)
    build_norm(config)
    nn.Linear(config.hidden, config.vocab, bias=config.head_bias)


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


@torch.no_grad()
def read_checkpoint(
    folder: Path, wanted: dict[str, Tensor], optimizer: Any, settings: OptimizerConfig, unsharded: Sequence[Parameter],
    split: SplitTensor,
) -> dict[str, Any]:  # fmt: skip
    """Read a checkpoint of one process, with the tensors `unsharded`, into `wanted` (names as in `store.py`), split by
    `split`. Returns its small states."""
    saved: dict[str, Any] = torch.load(folder / STATE, weights_only=True, mmap=True)
    with safe_open(folder / WEIGHTS, framework="pt") as file:
        for name in tuple(file.keys()):
            copy_parts(f"weights/{name}", file.get_tensor(name), wanted, split)
    average = saved.get("average", {}).get("tensors", ())
    for parameter, whole in zip(unsharded, average, strict=False):
        copy_parts(f"average/{parameter.name}", whole, wanted, split)
    if optimizer is None:
        return saved
    if "state" not in saved["optimizer"]:  # of two optimizers, which need whole tensors: nothing is divided
        optimizer.load_state_dict(saved["optimizer"])
        return saved
    order = list(chain.from_iterable(grouped(unsharded, settings).values()))
    for index, state in saved["optimizer"]["state"].items():
        for key, value in state.items():
            if isinstance(value, Tensor):
                copy_parts(f"optimizer/{order[index]}/{key}", value, wanted, split)
    return saved
