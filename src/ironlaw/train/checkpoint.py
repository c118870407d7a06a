"""Checkpoints: written whole or not at all, checked when read, and exact, so that a resumed run repeats no step.

A checkpoint is a directory `step-00000200/` with the weights (safetensors, readable by anything), the training
state (optimizer moments, random generator) and `checkpoint.json` with the checksums. It is written under another
name and renamed when complete, so that a torn one is never chosen.
"""

from __future__ import annotations

import errno
import hashlib
import json
import os
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import nn

from ironlaw import units
from ironlaw.errors import UserError
from ironlaw.model.config import ModelConfig
from ironlaw.model.transformer import Transformer
from ironlaw.train.run_directory import existing_folder, write_atomically

SCHEMA_VERSION = 1
WEIGHTS, STATE, INDEX = "model.safetensors", "training.pt", "checkpoint.json"


@dataclass(frozen=True)
class Checkpoint:
    """A complete checkpoint on disk. `step` optimizer steps are done."""

    path: Path
    step: int
    tokens: int
    index: dict[str, Any]


def checkpoint_bytes(model: ModelConfig) -> int:
    """Weights and two moments in fp32; the rest is small."""
    return 12 * model.parameters


def check_space(folder: Path, model: ModelConfig, keep: int) -> None:
    """Before any work is lost: is there room for all that is kept, and one more while it is written?"""
    there = min(keep, len(_complete(folder)))
    needed, free = (keep + 1 - there) * checkpoint_bytes(model), shutil.disk_usage(existing_folder(folder)).free
    if free < needed:
        raise UserError(
            f"the disk of {folder} has {units.bytes_(free)} free, checkpoints need {units.bytes_(needed)}: "
            "free some space, lower checkpoint.keep, or give --out on another disk"
        )


def save(
    folder: Path, step: int, tokens: int, model: nn.Module, optimizer: torch.optim.Optimizer, config: ModelConfig,
    keep: int,
) -> Checkpoint:  # fmt: skip
    """Write `folder/step-N` and drop all but the newest `keep`. A full disk is a UserError that leaves no trace."""
    final = folder / f"step-{step:08d}"
    partial = folder / f".step-{step:08d}.{os.getpid()}.partial"
    try:
        partial.mkdir(parents=True)
        save_file(unique_weights(model), partial / WEIGHTS)
        state = {"optimizer": optimizer.state_dict(), "random": torch.get_rng_state()}
        if torch.cuda.is_available():
            state["cuda_random"] = torch.cuda.get_rng_state_all()
        torch.save(state, partial / STATE)
        index: dict[str, Any] = {
            "schema_version": SCHEMA_VERSION,
            "step": step,
            "tokens": tokens,
            "model": config.model_dump(mode="json"),
            "sha256": {name: _sha256(partial / name) for name in (WEIGHTS, STATE)},
        }
        index["index_sha256"] = _index_sha256(index)
        write_atomically(partial / INDEX, json.dumps(index, indent=1) + "\n")
        _sync(partial)
        if final.exists():  # a resumed run came to the same step again
            shutil.rmtree(final)
        partial.rename(final)
    except (OSError, RuntimeError, SafetensorError) as error:
        shutil.rmtree(partial, ignore_errors=True)
        # The writers wrap the system's error in their own types; the disk itself tells whether it is full.
        if getattr(error, "errno", None) == errno.ENOSPC or shutil.disk_usage(folder).free < checkpoint_bytes(config):
            raise UserError(
                f"the disk is full: the checkpoint of step {step} was not written, earlier ones are intact; "
                "free some space and run again with --resume"
            ) from None
        raise
    for old in _complete(folder)[:-keep]:
        shutil.rmtree(old, ignore_errors=True)
    return Checkpoint(final, step, tokens, index)


def newest(folder: Path, warn: Any = None) -> Checkpoint | None:
    """The newest checkpoint whose checksums hold; `warn(message)` is told of every one passed over."""
    for path in reversed(_complete(folder)):
        try:
            return read_index(path)
        except UserError as error:
            if warn is not None:
                warn(f"{error}, so it is passed over")
    return None


def read_index(path: Path) -> Checkpoint:
    """Check a checkpoint's files against its checksums; UserError if anything is missing or changed."""
    try:
        index = json.loads((path / INDEX).read_text(encoding="utf-8"))
        intact = index["index_sha256"] == _index_sha256(index)
        intact = intact and all(_sha256(path / name) == digest for name, digest in index["sha256"].items())
    except (OSError, ValueError, KeyError, TypeError):
        intact = False
    if not intact:
        raise UserError(f"the checkpoint {path} is damaged")
    return Checkpoint(path, index["step"], index["tokens"], index)


def check_model(checkpoint: Checkpoint, config: ModelConfig) -> None:
    """UserError when the checkpoint is of another model than `config`."""
    saved = ModelConfig(**checkpoint.index["model"])
    if saved.model_dump(exclude={"name", "dropout"}) != config.model_dump(exclude={"name", "dropout"}):
        fields = [f for f in ModelConfig.model_fields if getattr(saved, f) != getattr(config, f)]
        raise UserError(
            f"the checkpoint {checkpoint.path} is of another model ({_differences(saved, config, fields)}): "
            "use the config it was trained with, or another --out"
        )


def load(
    checkpoint: Checkpoint, model: nn.Module, config: ModelConfig, optimizer: torch.optim.Optimizer | None
) -> None:
    """Restore weights, and with an optimizer also its moments and the random generators."""
    check_model(checkpoint, config)
    weights = load_file(checkpoint.path / WEIGHTS)
    missing = model.load_state_dict(weights, strict=False).missing_keys
    assert all(name == "head.weight" for name in missing), missing  # tied: loaded with the embedding
    if optimizer is not None:
        state = torch.load(checkpoint.path / STATE, weights_only=True)
        optimizer.load_state_dict(state["optimizer"])
        torch.set_rng_state(state["random"])
        if "cuda_random" in state and torch.cuda.is_available():
            torch.cuda.set_rng_state_all(state["cuda_random"])


def unique_weights(model: nn.Module) -> dict[str, torch.Tensor]:
    """The state dict without second names of shared tensors and without the names that compilation inserts."""
    seen: set[int] = set()
    weights = {}
    for name, tensor in model.state_dict().items():
        if tensor.data_ptr() not in seen:
            seen.add(tensor.data_ptr())
            weights[name] = tensor.detach().contiguous().cpu()
    return weights


def _differences(saved: ModelConfig, now: ModelConfig, fields: list[str]) -> str:
    return ", ".join(f"{f} {getattr(saved, f)} there, {getattr(now, f)} here" for f in fields[:3])


def _complete(folder: Path) -> list[Path]:
    return sorted(path for path in folder.glob("step-*") if path.is_dir())


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _index_sha256(index: dict[str, Any]) -> str:
    """The index vouches for the files; this vouches for the index, whose step decides where a run goes on."""
    rest = {key: value for key, value in index.items() if key != "index_sha256"}
    return hashlib.sha256(json.dumps(rest, sort_keys=True).encode()).hexdigest()


def _sync(folder: Path) -> None:
    """Wait until the files are on the disk: a rename must not overtake its content."""
    for path in folder.iterdir():
        with path.open("rb") as file:
            os.fsync(file.fileno())


def load_for_inference(folder: Path, config: ModelConfig) -> Transformer:
    """The newest checkpoint's model, in evaluation mode."""
    found = newest(folder)
    if found is None:
        raise UserError(f"no intact checkpoint in {folder}: train the run first")
    model = Transformer(config)
    load(found, model, config, optimizer=None)
    return model.eval()
