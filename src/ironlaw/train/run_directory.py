"""A run is a directory; this module is the only one that knows its file names."""

from __future__ import annotations

import atexit
import contextlib
import datetime
import itertools
import json
import os
import shutil
import socket
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil

from ironlaw.config import RunConfig, load_config
from ironlaw.errors import UserError
from ironlaw.files import as_name, lock_file, write_text
from ironlaw.train.jsonl import read_lines

LOCK = ".lock"
_held: set[Path] = set()  # by this process: the system's locks do not stand between its own threads


class _Inside:
    """A path within the run's directory."""

    def __init__(self, name: str) -> None:
        self.name = name

    def __get__(self, run: RunDirectory, owner: type) -> Path:
        return run.path / self.name


@dataclass(frozen=True)
class RunDirectory:
    path: Path

    config_file = _Inside("config.toml")
    plan_file = _Inside("plan.json")
    metrics_file = _Inside("metrics.jsonl")
    events_file = _Inside("events.jsonl")
    sessions_file = _Inside("sessions.jsonl")
    profile_file = _Inside("profile.json")
    ledger_file = _Inside("ledger.json")
    compression_file = _Inside("compression.json")
    tokenizer_file = _Inside("tokenizer.json")
    chat_file = _Inside("tokenizer_config.json")  # of conversations: their template and what it names
    checkpoints = _Inside("checkpoints")
    adapter = _Inside("adapter")
    # The step of the newest checkpoint that was ever complete: says that there was one when all are gone.
    last_checkpoint_file = _Inside("last_checkpoint")

    @property
    def is_run(self) -> bool:
        return self.config_file.is_file()

    def metrics(self) -> list[dict[str, Any]]:
        """Complete lines only: a run that was killed may have left half of its last one."""
        entries = read_lines(self.metrics_file)
        for number, entry in enumerate(entries, 1):
            if not isinstance(entry.get("step"), int) or "seconds" not in entry or not _has_numbers(entry):
                raise UserError(f"line {number} of {self.metrics_file} is of no step: remove it, or give a new --out")
        return entries

    def forget_after(self, step: int) -> None:
        """Drop the metrics of steps that a resumed run will take again."""
        kept = [json.dumps(entry) + "\n" for entry in self.metrics() if entry["step"] <= step]
        write_text(self.metrics_file, "".join(kept))


def _has_numbers(entry: dict[str, Any]) -> bool:
    """Where a session that goes on reads them; those that are not finite are text."""
    names = ("loss", "grad_norm", "resident_bytes", "seconds")
    read = [value for name, value in entry.items() if name in names or name.endswith("_seconds")]
    return all(isinstance(value, float | int) or value in ("nan", "inf", "-inf") for value in read)


def beside(path: Path, word: str) -> Path:
    """Where what is made of a run or a directory of weights goes unless told: next to it, under its name and a word."""
    whole = path.resolve()
    return (path if path.name == whole.name else whole).with_name(f"{whole.name}-{as_name(word)}")


def default_name(model: str) -> Path:
    """A directory for a new run, made so that another run begun in the same second gets another; gone at exit where
    nothing came into it."""
    path = first = Path("runs") / f"{as_name(model)}-{datetime.datetime.now():%Y%m%d-%H%M%S}"
    for number in itertools.count(2):
        try:
            path.mkdir(parents=True)
            break
        except FileExistsError:
            path = first.with_name(f"{first.name}-{number}")
        except OSError:  # said when the run is created
            break
    atexit.register(_remove_empty, path.absolute())
    return path


def _remove_empty(folder: Path) -> None:
    with contextlib.suppress(OSError):
        folder.rmdir()


def find_run(path: Path, config: RunConfig, resume: bool) -> RunDirectory:
    """The directory of a new run, or with `resume` also of the run that is there. Only looks: nothing is written.

    Raises UserError when it exists without `resume`, or holds something else than this run.
    """
    run = RunDirectory(path)
    for there in (path, *path.parents):
        if there.exists() and not there.is_dir():
            raise UserError(f"{there} is a file: give --out a directory")
    if path.exists() and any(entry.name != LOCK for entry in path.iterdir()):
        if not resume:
            raise UserError(f"{path} exists: add --resume to continue it, or give another --out")
        if run.config_file.is_file():
            check_same_run(load_config(run.config_file), config, path)
        elif any(entry.name not in (run.checkpoints.name, LOCK) and not _is_torn(entry) for entry in path.iterdir()):
            raise UserError(f"{path} holds files but no config.toml, so it is no run: give --out a new directory")
    return run


def create_run(run: RunDirectory, config: RunConfig) -> None:
    """Make the directory and write its config: the first trace of a run on disk, once its input is known to work."""
    try:
        run.checkpoints.mkdir(parents=True, exist_ok=True)
        remove_torn(run.path)
        remove_torn(run.checkpoints)
        write_text(run.config_file, config.to_toml())
    except OSError as error:
        raise UserError(
            f"cannot write to {run.path}: {error.strerror}; give --out a directory you can write to"
        ) from None


def existing_folder(path: Path) -> Path:
    """`path` or the nearest folder above it that exists."""
    path = path.absolute()
    return next(folder for folder in (path, *path.parents) if folder.is_dir())


def remove_torn(folder: Path) -> None:
    """Delete what processes that are gone left half-written: after many kills they would fill the disk."""
    for path in folder.glob(".*.partial"):
        process = path.name.split(".")[-2]
        if _is_torn(path) and not (process.isdecimal() and psutil.pid_exists(int(process))):
            if path.is_dir():
                shutil.rmtree(path, ignore_errors=True)
            else:
                path.unlink(missing_ok=True)


@contextlib.contextmanager
def complete_or_nothing(folder: Path) -> Iterator[Path]:
    """A directory to fill beside `folder`, which gets that name once the block has ended well."""
    partial = folder.absolute().with_name(f".{folder.absolute().name}.{os.getpid()}.partial")
    try:
        partial.mkdir(parents=True)
        yield partial
        partial.rename(folder)  # also over an empty directory
    except OSError as error:
        raise UserError(
            f"cannot write to {folder}: {error.strerror or error}; give a directory you can write to"
        ) from None
    finally:
        shutil.rmtree(partial, ignore_errors=True)


def _is_torn(path: Path) -> bool:
    """What an atomic write leaves when it is killed: `.NAME.PROCESS.partial`."""
    return path.name.startswith(".") and path.name.endswith(".partial")


_STATE = ("name", "rank", "groups", "no_decay")
"""Keys of an optimizer that decide what its state is, and of which tensors."""


def check_same_run(before: RunConfig, now: RunConfig, path: Path) -> None:
    """What decides the weights and the order of samples must not change between sessions of one run."""
    fixed = {
        "model": (before.model, now.model),
        "data": (before.data.samples_key(), now.data.samples_key()),
        "train.global_batch": (before.train.global_batch, now.train.global_batch),
        "train.sequence": (before.sequence, now.sequence),
        "train.seed": (before.train.seed, now.train.seed),
        "finetune": (before.finetune, now.finetune),
        **{f"optimizer.{k}": (getattr(before.optimizer, k), getattr(now.optimizer, k)) for k in _STATE},
    }
    for name, (old, new) in fixed.items():
        if old != new:
            raise UserError(
                f"{path} holds a run with another {name}: resume it with its own config, or give a new --out"
            )


def sync_folder(path: Path) -> None:
    """Wait until what a folder lists is on the disk: a power cut must not undo a rename."""
    if os.name != "posix":
        return
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


@contextlib.contextmanager
def locked(folder: Path) -> Iterator[None]:
    """Hold `folder`, which exists, for this process, whose workers do not inherit the lock. UserError when another
    holds it. The file's content only names the holder."""
    path = folder.absolute() / LOCK
    if path in _held:
        raise UserError(f"{folder} is in use by this process: give another --out")

    def lock(descriptor: int) -> None:
        if sys.platform == "win32":
            return
        import fcntl

        try:
            fcntl.lockf(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            holder = os.read(descriptor, 200).decode(errors="replace").strip() or "another process"
            raise UserError(f"{folder} is in use by {holder}: wait for it to end, or give another --out") from None

    with contextlib.ExitStack() as held:
        try:
            descriptor = held.enter_context(lock_file(path, lock))
        except OSError as error:
            raise UserError(f"cannot write to {folder}: {error.strerror}; give --out a directory of yours") from None
        _held.add(path)
        held.callback(_held.discard, path)
        started = datetime.datetime.now().astimezone().isoformat(timespec="seconds")
        with contextlib.suppress(OSError):  # a full disk: locked all the same, without a name
            os.ftruncate(descriptor, 0)
            os.pwrite(descriptor, f"process {os.getpid()} on {socket.gethostname()} since {started}\n".encode(), 0)
        yield
