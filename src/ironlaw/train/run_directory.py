"""The run directory. All names of its files are defined here, but for what lies beside a tokenizer (`data/chat.py`)."""

from __future__ import annotations

import atexit
import contextlib
import datetime
import errno
import fcntl
import glob
import itertools
import json
import os
import shutil
import signal
import socket
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Any

import psutil

from ironlaw.config import RunConfig, load_config
from ironlaw.errors import UserError, reported
from ironlaw.files import FULL, as_name, check_can_be_folder, is_taken, lock_file, write_text
from ironlaw.train.jsonl import append_line, read_lines

LOCK = ".lock"
ENDING_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
Handler = Callable[[int, FrameType | None], None]  # of a signal
_held: set[Path] = set()  # locked by this process: file locks do not exclude other threads of the process


class _Inside:
    """Descriptor for a path within the run directory."""

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
    checkpoints = _Inside("checkpoints")
    adapter = _Inside("adapter")
    # Step of the newest complete checkpoint ever written, which shows that there was one even if all are deleted.
    last_checkpoint_file = _Inside("last_checkpoint")

    @property
    def is_run(self) -> bool:
        return self.config_file.is_file()

    def metrics(self) -> list[dict[str, Any]]:
        """Return the complete metrics lines; a killed run may have left a partial last line, which is ignored."""
        entries = read_lines(self.metrics_file)
        for number, entry in enumerate(entries, 1):
            if not isinstance(entry.get("step"), int) or "seconds" not in entry or not _has_numbers(entry):
                raise UserError(f"line {number} of {self.metrics_file} is of no step: remove it, or give a new --out")
        return entries

    def write_event(self, event: str, **fields: Any) -> None:
        """Append an event to events.jsonl and sync it to disk. Raises OSError if that fails."""
        append_line(self.events_file, {"event": event, "time": now(), **fields}, sync=True)

    def drop_after(self, step: int) -> None:
        """Drop the metrics of steps that a resumed run will take again."""
        kept = [json.dumps(entry) + "\n" for entry in self.metrics() if entry["step"] <= step]
        write_text(self.metrics_file, "".join(kept))


def now() -> str:
    return datetime.datetime.now().astimezone().isoformat(timespec="seconds")


def _has_numbers(entry: dict[str, Any]) -> bool:
    """Whether all fields that a resumed session reads are numbers; non-finite ones are stored as strings."""
    names = ("loss", "grad_norm", "resident_bytes", "seconds")
    read = [value for name, value in entry.items() if name in names or name.endswith("_seconds")]
    return all(isinstance(value, float | int) or value in ("nan", "inf", "-inf") for value in read)


def path_beside(path: Path, word: str) -> Path:
    """Return the default output path for something made from a run or model: `path` with `-word` appended."""
    whole = Path(os.path.realpath(path))  # unlike `resolve`, without an exception for links in a circle
    return (path if path.name == whole.name else whole).with_name(f"{whole.name}-{as_name(word)}")


def new_run_directory(model: str) -> Path:
    """Create and return a directory for a new run, unique even among runs started in the same second. It is removed at
    exit if it is still empty."""
    path = first = Path("runs") / f"{as_name(model)}-{datetime.datetime.now():%Y%m%d-%H%M%S}"
    for number in itertools.count(2):
        try:
            path.mkdir(parents=True)
            break
        except FileExistsError:
            path = first.with_name(f"{first.name}-{number}")
        except OSError:  # reported when the run is created
            break
    atexit.register(_remove_empty, path.absolute())
    return path


def _remove_empty(folder: Path) -> None:
    with contextlib.suppress(OSError):
        folder.rmdir()


def find_run(path: Path, config: RunConfig, resume: bool) -> RunDirectory:
    """Return the directory of a new run or, with `resume`, of an existing one. Writes nothing.

    Raises UserError if the directory exists without `resume`, or holds something other than this run.
    """
    run = RunDirectory(path)
    check_can_be_folder(path, "--out")
    if path.exists() and any(entry.name != LOCK for entry in path.iterdir()):
        if not resume:
            raise UserError(f"{path} exists: add --resume to continue it, or give another --out")
        if run.config_file.is_file():
            check_same_run(load_config(run.config_file), config, path)
        elif any(entry.name not in (run.checkpoints.name, LOCK) and not _is_partial(entry) for entry in path.iterdir()):
            raise UserError(f"{path} holds files but no config.toml, so it is no run: give --out a new directory")
    return run


def create_run(run: RunDirectory, config: RunConfig) -> None:
    """Create the directory and write the config. This is the first write of a run, after its input has been checked."""
    with reported(f"cannot write to {run.path}: {{reason}}; give --out a directory you can write to", OSError):
        run.checkpoints.mkdir(parents=True, exist_ok=True)
        remove_partial(run.path)
        remove_partial(run.checkpoints)
        write_text(run.config_file, config.to_toml())


def existing_folder(path: Path) -> Path:
    """Return `path` or its nearest existing parent folder."""
    path = path.absolute()
    return next(folder for folder in (path, *path.parents) if folder.is_dir())


def remove_partial(folder: Path, of: str = "*") -> None:
    """Delete partial files of terminated processes, which would otherwise fill the disk after many kills."""
    for path in folder.glob(f".{of}.partial"):
        process = path.name.split(".")[-2]
        # A process of a container may have the number of one that ended in it.
        runs = process.isdecimal() and int(process) != os.getpid() and psutil.pid_exists(int(process))
        if _is_partial(path) and not runs:
            if path.is_dir():
                shutil.rmtree(path, ignore_errors=True)
            else:
                path.unlink(missing_ok=True)


@contextlib.contextmanager
def complete_or_nothing(folder: Path) -> Iterator[Path]:
    """Yield a temporary directory beside `folder` that is renamed to `folder` if the block succeeds.

    Otherwise it is removed, also on SIGTERM. What a killed process left is removed by the next one that writes there.
    UserError, before the block, if `folder` holds something or cannot be made.
    """
    if is_taken(folder):
        raise UserError(f"{folder} exists: give a new directory")
    partial = folder.absolute().with_name(f".{folder.absolute().name}.{os.getpid()}.partial")
    remove_partial(partial.parent, f"{glob.escape(folder.absolute().name)}.*")
    try:
        # What would end the process without a word raises KeyboardInterrupt, as Ctrl-C does.
        with handled_signals(_raise_interrupt, lambda before: before is signal.SIG_DFL):
            partial.mkdir(parents=True)
            yield partial
            partial.rename(folder)  # also replaces an empty directory
    except OSError as error:
        if error.errno in FULL or "requested and" in str(error):  # NumPy's own, of a file that was cut short
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(folder)) from None
        reason = error.strerror or error
        raise UserError(f"cannot write to {folder}: {reason}; give a directory you can write to") from None
    finally:
        shutil.rmtree(partial, ignore_errors=True)


@contextlib.contextmanager
def handled_signals(handler: Handler, replaces: Callable[[Any], bool]) -> Iterator[None]:
    """Handle the signals that end a process whose present handlers `replaces` selects. Python delivers signals to the
    main thread only, and in others this does nothing."""
    here = ENDING_SIGNALS if threading.current_thread() is threading.main_thread() else ()
    before = {number: signal.getsignal(number) for number in here if replaces(signal.getsignal(number))}
    for number in before:
        signal.signal(number, handler)
    try:
        yield
    finally:
        for number, handler_before in before.items():
            signal.signal(number, handler_before)


def _raise_interrupt(number: int, frame: FrameType | None) -> None:
    raise KeyboardInterrupt(number)


def _is_partial(path: Path) -> bool:
    """Whether `path` is left from an interrupted atomic write: `.NAME.PROCESS.partial`."""
    return path.name.startswith(".") and path.name.endswith(".partial")


_STATE = ("name", "rank", "groups", "no_decay")
"""Fields of an optimizer's config that determine its state and which tensors have it."""
_KEPT = ("average_decay", "qat")
"""Settings of [train] that a run may take up on its way, or change, but not drop."""


def check_same_run(before: RunConfig, now: RunConfig, path: Path) -> None:
    """Raise UserError if a setting that determines weights or the order of samples has changed."""
    fixed = {
        "model": (before.model, now.model),
        "data": (before.data.samples_key(), now.data.samples_key()),
        "train.global_batch": (before.train.global_batch, now.train.global_batch),
        "train.sequence": (before.sequence, now.sequence),
        "train.seed": (before.train.seed, now.train.seed),
        "finetune": (before.finetune, now.finetune),
        "objective.kind": (before.objective.kind, now.objective.kind),
        **{f"optimizer.{k}": (getattr(before.optimizer, k), getattr(now.optimizer, k)) for k in _STATE},
        **{f"train.{k}": (True, False) for k in _KEPT if getattr(before.train, k) and not getattr(now.train, k)},
    }
    for name, (old, new) in fixed.items():
        if old != new:
            raise UserError(f"{path} holds a run with another {name}: resume with its own config, or give a new --out")


def sync_folder(path: Path) -> None:
    """Sync a directory to disk, so that a power failure cannot undo a rename in it."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


@contextlib.contextmanager
def locked(folder: Path) -> Iterator[None]:
    """Lock the existing directory `folder` for this process; its workers do not inherit the lock. Raises UserError if
    it is locked already. The content of the lock file only names the holder."""
    path = folder.absolute() / LOCK
    if path in _held:
        raise UserError(f"{folder} is in use by this process: give another --out")

    def lock(descriptor: int) -> None:
        try:
            fcntl.lockf(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            holder = os.read(descriptor, 200).decode(errors="replace").strip() or "another process"
            raise UserError(f"{folder} is in use by {holder}: wait for it to end, or give another --out") from None

    with contextlib.ExitStack() as held:
        with reported(f"cannot write to {folder}: {{reason}}; give --out a directory of yours", OSError):
            descriptor = held.enter_context(lock_file(path, lock))
        _held.add(path)
        held.callback(_held.discard, path)
        with contextlib.suppress(OSError):  # if the disk is full, the lock holds but names no holder
            os.ftruncate(descriptor, 0)
            os.pwrite(descriptor, f"process {os.getpid()} on {socket.gethostname()} since {now()}\n".encode(), 0)
        yield
