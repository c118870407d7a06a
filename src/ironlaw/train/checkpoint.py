"""Checkpoints on disk: atomic, verified when read, and exact, so that a resumed run equals an uninterrupted one.

A checkpoint is a directory `step-00000200/` with the weights (safetensors), the training state (optimizer moments,
random generators, ...) and `checkpoint.json` with checksums. It is written under a temporary name and renamed when
complete, so that an incomplete one is never used. `checkpointer.py` writes checkpoints in the background while the
next steps run.
"""

from __future__ import annotations

import os
import random
import shutil
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torch.utils._pytree import tree_map_only

from ironlaw import units
from ironlaw.config import RunConfig
from ironlaw.errors import UserError, reported
from ironlaw.files import is_sealed, read_json, seal, sha256, write_json
from ironlaw.model.config import ModelConfig
from ironlaw.model.huggingface.configs import names_of
from ironlaw.model.parameters import model_parameters
from ironlaw.train.run_directory import RunDirectory, existing_folder, sync_folder
from ironlaw.workload.blocks import FP32
from ironlaw.workload.finetune import adapter_parameters
from ironlaw.workload.optimizers import state_bytes


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
            # The run may go on with fewer devices than it was saved with.
            torch.cuda.set_rng_state_all(state_dict["cuda"][: torch.cuda.device_count()])


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


SCHEMA_VERSION = 2  # version 1, whose training.pt had only the optimizer and torch's generators, is still read
WEIGHTS, STATE, INDEX = "model.safetensors", "training.pt", "checkpoint.json"


@dataclass(frozen=True)
class Checkpoint:
    """A complete checkpoint on disk, after `step` optimizer steps."""

    path: Path
    step: int
    tokens: int
    index: dict[str, Any]


class Store(Protocol):
    """The storage format of a checkpoint in its directory, such as `WholeFiles` for one process.

    `take` runs between two steps and returns values that no later step changes. `write` runs in a separate thread on
    every rank, with a folder visible to all ranks, and returns the SHA-256 of each file that this rank wrote. `read`
    runs on every rank and returns the names of the states that it did not find.
    """

    name: str

    def take(self, model: nn.Module, states: Mapping[str, Stateful]) -> Any: ...
    def write(self, folder: Path, taken: Any) -> dict[str, str]: ...
    def read(self, folder: Path, model: nn.Module, states: Mapping[str, Stateful]) -> list[str]: ...


class WholeFiles:
    """Stores everything in two files, written by one process."""

    name = "whole"

    def take(self, model: nn.Module, states: Mapping[str, Stateful]) -> tuple[dict[str, Tensor], dict[str, Any]]:
        return host_copy((self._weights(model), {name: part.state_dict() for name, part in states.items()}))

    def write(self, folder: Path, taken: tuple[dict[str, Tensor], dict[str, Any]]) -> dict[str, str]:
        weights, states = taken
        save_file(weights, folder / WEIGHTS)
        torch.save(states, folder / STATE)
        return {name: sha256(folder / name) for name in (WEIGHTS, STATE)}

    def read(self, folder: Path, model: nn.Module, states: Mapping[str, Stateful]) -> list[str]:
        self._load(model, load_file(folder / WEIGHTS), folder)
        if not states:
            return []
        saved = torch.load(folder / STATE, weights_only=True)
        if isinstance(saved["random"], Tensor):  # schema version 1
            saved["random"] = {"cpu": saved["random"]} | (
                {"cuda": saved.pop("cuda_random")} if "cuda_random" in saved else {}
            )
        for name in states.keys() & saved.keys():
            told = (
                f"the {name} state in {folder} is of another kind ({{reason}}): resume with the config it was trained "
                "with, or start anew from its weights with train.start_from"
            )
            with reported(told, ValueError, KeyError, RuntimeError):
                states[name].load_state_dict(saved[name])
        return sorted(states.keys() - saved.keys())

    def _weights(self, model: nn.Module) -> dict[str, Tensor]:
        return unique_weights(model)

    def _load(self, model: nn.Module, weights: dict[str, Tensor], folder: Path) -> None:
        load_unique_weights(model, weights)


class AdapterFiles(WholeFiles):
    """Stores trained parameters only; the `base` field of the index locates the frozen ones."""

    name = "adapters"

    def _weights(self, model: nn.Module) -> dict[str, Tensor]:
        return {name: tensor.detach() for name, tensor in model.named_parameters() if tensor.requires_grad}

    def _load(self, model: nn.Module, weights: dict[str, Tensor], folder: Path) -> None:
        if weights.keys() != self._weights(model).keys():
            raise UserError(f"the checkpoint {folder} is of other adapters: resume with its own [finetune]")
        model.load_state_dict(weights, strict=False)


def checkpoint_bytes(config: RunConfig) -> int:
    """Return the bytes of trained weights, their average in fp32 and the optimizer state; the rest is negligible."""
    copies, trained = 1 if config.train.average_decay is None else 2, model_parameters(config.model)
    if config.finetune.adapts:
        names = names_of(Path(config.train.start_from or ""), config.model)
        trained = adapter_parameters(config.model, names, config.finetune)
    return copies * FP32 * sum(p.elements for p in trained) + state_bytes(trained, config.optimizer)


def check_space(folder: Path, bytes_each: float, count: int) -> None:
    """Raise UserError unless the disk has room for `count` checkpoints and one more while it is written."""
    there = min(count, len(complete(folder)))
    needed, free = (count + 1 - there) * bytes_each, shutil.disk_usage(existing_folder(folder)).free
    if free < needed:
        raise UserError(
            f"the disk of {folder} has {units.bytes_(free)} free, checkpoints need {units.bytes_(needed)}: "
            "free some space, lower checkpoint.keep, or give --out on another disk"
        )


def newest(
    folder: Path,
    warn: Callable[[str], Any] | None = None,
    usable: Callable[[Checkpoint], bool] = lambda checkpoint: True,
) -> Checkpoint | None:
    """Return the newest `usable` checkpoint with valid checksums. Calls `warn(message)` for each damaged one."""
    for path in reversed(complete(folder)):
        try:
            found = read_index(path)
        except UserError as error:
            if warn is not None:
                warn(f"{error}, so it is passed over")
            continue
        if usable(found):
            return found
    return None


def newest_of(run: Path, warn: Callable[[str], Any] | None = None) -> Checkpoint:
    """Return the newest intact checkpoint of a run directory, or raise UserError. For `warn` see `newest`."""
    found = newest(RunDirectory(run).checkpoints, warn)
    if found is None:
        raise UserError(f"no intact checkpoint in {run}: train the run first")
    return found


def check_none_lost(run: RunDirectory) -> None:
    """Raise UserError if a run without a usable checkpoint had some, since starting over would overwrite its metrics. A
    run that was killed before its first checkpoint was complete has nothing to lose."""
    if complete(run.checkpoints) or run.last_checkpoint_file.is_file():
        metrics = run.metrics()
        raise UserError(
            f"{run.path} has taken {metrics[-1]['step'] if metrics else 0} steps, and none of its checkpoints can be "
            f"used: put an intact one into {run.checkpoints}, or start over with another --out"
        )


def read_index(path: Path) -> Checkpoint:
    """Verify a checkpoint's files against its checksums. Raises UserError if any is missing or changed."""
    problem = "is damaged"
    with suppress(OSError, ValueError, KeyError, TypeError, AttributeError):
        index = read_json(path / INDEX)
        whole = is_sealed(index)
        if whole and index["schema_version"] > SCHEMA_VERSION:
            problem = "was written by a newer Ironlaw"
        elif whole and index["step"] == step_of(path) and isinstance(index.get("store", ""), str):
            ModelConfig(**index["model"])
            if all(sha256(path / name) == to for name, to in index["sha256"].items()):
                return Checkpoint(path, index["step"], index["tokens"], index)
    raise UserError(f"the checkpoint {path} {problem}")


def check_model(checkpoint: Checkpoint, config: ModelConfig) -> None:
    """Raise UserError if the checkpoint is of another model than `config`."""
    saved = ModelConfig(**checkpoint.index["model"])
    if saved.model_dump(exclude={"name", "dropout"}) != config.model_dump(exclude={"name", "dropout"}):
        fields = [f for f in ModelConfig.model_fields if getattr(saved, f) != getattr(config, f)]
        differences = ", ".join(f"{f} {getattr(saved, f)} there, {getattr(config, f)} here" for f in fields[:3])
        raise UserError(
            f"the checkpoint {checkpoint.path} is of another model ({differences}): "
            "use the config it was trained with, or another --out"
        )


def write_index(folder: Path, about: dict[str, Any]) -> dict[str, Any]:
    """Write the index with the files' checksums and its own, which protects the step from which a run resumes."""
    index = seal({"schema_version": SCHEMA_VERSION, **about})
    write_json(folder / INDEX, index)
    return index


def publish(partial: Path, final: Path) -> None:
    """Rename a complete checkpoint to its final name. Files are synced first, so the content precedes it."""
    for path in partial.rglob("*"):
        if path.is_file():
            with path.open("rb") as file:
                os.fsync(file.fileno())
    sync_folder(partial)
    if final.exists():  # a damaged checkpoint of the same step, ignored on resume
        shutil.rmtree(final)
    partial.rename(final)
    sync_folder(final.parent)


def complete(folder: Path) -> list[Path]:
    """Return the checkpoints with a final name, oldest first. Other names are the user's own copies."""
    found = (path for path in folder.glob("step-*") if path.is_dir() and path.name[5:].isdecimal())
    return sorted(found, key=step_of)


def step_of(path: Path) -> int:
    return int(path.name.removeprefix("step-"))


def name_of(step: int) -> str:
    return f"step-{step:08d}"
