"""Preparation of a folder of shards: an interruption keeps the finished shards; the next call continues after them."""

from __future__ import annotations

import fcntl
import shutil
import time
from collections import defaultdict
from collections.abc import Callable
from contextlib import closing, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from ironlaw import units
from ironlaw.data import shards
from ironlaw.data.corpus import START, Corpus, Cursor
from ironlaw.data.splits import SPLITS, Splitter
from ironlaw.data.tokenise import Tokeniser, read_pieces
from ironlaw.errors import UserError
from ironlaw.files import FULL, lock_file, read_json, write_json

PROGRESS = "progress.json"


@dataclass
class FinishedShards:
    """The finished shards of a folder in order, the seconds spent on them, and the settings they were made with."""

    folder: Path
    head: dict[str, Any]  # tokenizer and split: shards made with other settings must not be mixed with these
    shards: list[dict[str, Any]] = field(default_factory=list)
    seconds: defaultdict[str, float] = field(default_factory=lambda: defaultdict(float))

    @property
    def next(self) -> Cursor:
        if not self.shards:
            return START
        number, position = self.shards[-1]["next"]
        return int(number), int(position)

    def save(self) -> None:
        """Write the progress file atomically: only the shards listed in it count as finished."""
        document = {"schema": shards.SCHEMA_VERSION, "head": self.head, "shards": self.shards}
        write_json(self.folder / PROGRESS, document | {"seconds": dict(self.seconds)})


def resume(folder: Path, head: dict[str, Any]) -> FinishedShards:
    """Return the finished shards in `folder` up to the first damaged one, if they were made with `head`; else none.

    Files that belong to no finished shard are removed: they may be half-written.
    """
    work = FinishedShards(folder, head)
    with suppress(OSError, ValueError, KeyError, TypeError):
        document = read_json(folder / PROGRESS)
        if document["schema"] == shards.SCHEMA_VERSION and document["head"] == head:
            width = np.dtype(head["dtype"]).itemsize
            for shard in document["shards"]:
                if shards.damage(folder, shard, width, checksums=True) is not None:
                    break  # this shard and those after it are made again
                work.shards.append(shard)
            work.seconds.update(document["seconds"])
    finished = {name for shard in work.shards for split in SPLITS for name, _ in shards.list_files(shard[split])}
    for file in folder.iterdir():
        if file.name not in finished | {PROGRESS, "tokenizer.json"}:
            file.unlink()
    return work


def build(
    work: FinishedShards, corpus: Corpus, splitter: Splitter, tokeniser: Tokeniser, end_of_text: int, shard_tokens: int,
    progress: shards.Progress | None,
) -> None:  # fmt: skip
    """Make the missing shards.

    After an interruption or on a full disk, the folder keeps the finished shards and no others.
    """
    dtype = np.dtype(work.head["dtype"])
    total, chat = corpus.bytes, corpus.chat is not None
    writer: shards.ShardWriter | None = None
    begun = dict(work.seconds)

    def finish(writer: shards.ShardWriter) -> None:
        work.shards.append(writer.finish())
        for stage, spent in (("read", tokeniser.read_seconds), ("tokenise", tokeniser.seconds)):
            work.seconds[stage] = begun.get(stage, 0.0) + spent
        work.save()

    if progress is not None:
        progress(min(sum(file.size for file in corpus.files[: work.next[0]]), total), total)
    try:
        with closing(tokeniser.encode(read_pieces(corpus, splitter, work.next))) as chunks:
            for chunk in chunks:
                start = time.perf_counter()
                for piece, ids in chunk:
                    if writer is None:
                        writer = shards.ShardWriter(work.folder, len(work.shards), dtype, end_of_text, chat)
                    writer.write(piece, ids)
                    if piece.next is not None and writer.tokens >= shard_tokens:
                        finish(writer)
                        writer = None
                work.seconds["write"] += time.perf_counter() - start
                if progress is not None:
                    progress(min(chunk[-1][0].done_bytes, total), total)
        if writer is not None or not work.shards:
            finish(writer or shards.ShardWriter(work.folder, 0, dtype, end_of_text, chat))
            writer = None
    finally:
        if writer is not None:
            writer.close()
            for file in work.folder.glob(f"*-{writer.number:05d}*"):  # frees space when the disk is full
                file.unlink(missing_ok=True)


def make(final: Path, fill: Callable[[Path], Any], damaged: dict[str, Any] | None = None) -> None:
    """Make the folder `final` with `fill` if it does not exist. One process makes it while the others wait for it.

    The folder gets its final name once it is filled. After a failure it is kept if it holds a finished shard and
    removed otherwise. A full disk or a read-only folder raises a UserError of one line. `damaged` is the index of an
    existing folder with damaged shards: they and those after them are made again.
    """
    if final.exists() and damaged is None:
        return
    partial = final.parent / f".partial-{final.name}"
    try:
        final.parent.mkdir(parents=True, exist_ok=True)
        with lock_file(final.parent / f".lock-{final.name}", _lock):
            if damaged is not None and final.exists():
                head = {key: damaged.get(key) for key in ("tokenizer", "dtype", "held_out")}
                FinishedShards(final, head, damaged["shards"], defaultdict(float, damaged["seconds"])).save()
                final.rename(partial)
            if final.exists():  # another process made it meanwhile
                return
            partial.mkdir(exist_ok=True)
            try:
                fill(partial)
                (partial / PROGRESS).unlink(missing_ok=True)
                partial.rename(final)
            finally:
                if partial.exists() and not (partial / PROGRESS).exists():
                    shutil.rmtree(partial, ignore_errors=True)
    except OSError as error:
        raise write_error(final.parent, error, kept=(partial / PROGRESS).exists()) from None


def is_being_made(final: Path) -> bool:
    """Return whether a process is making `final` now. False on file systems without locks."""
    try:
        with (final.parent / f".lock-{final.name}").open("rb") as file:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
        return False
    except BlockingIOError:
        return True
    except OSError:
        return False


def _lock(descriptor: int) -> None:
    """Wait for the lock of other processes. Does nothing on file systems without locks."""
    with suppress(OSError):
        fcntl.flock(descriptor, fcntl.LOCK_EX)


def write_error(folder: Path, error: OSError, kept: bool) -> UserError:
    reason = error.strerror or str(error)
    if error.errno in FULL:
        with suppress(OSError):
            reason = f"{reason}, {units.bytes_(shutil.disk_usage(folder).free)} free"
    finished = "; finished shards are kept, run again to go on" if kept else ""
    return UserError(
        f"cannot write token files to {folder} ({reason}): free space or set data.cache to another folder{finished}"
    )
