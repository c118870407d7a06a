"""Listing the cache of prepared data and removing entries from it."""

from __future__ import annotations

import shutil
import time
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from ironlaw.data import shards
from ironlaw.data.building import is_being_made
from ironlaw.errors import UserError, did_you_mean, reported
from ironlaw.files import read_json_or_empty

PARTIAL = ".partial-"


@dataclass(frozen=True)
class CacheEntry:
    """One folder of the cache. `kind`: prepared, unfinished, stream (positions of its blocks) or tokenizer."""

    path: Path
    kind: str
    source: str | None  # as data.path was written; None if it was not recorded
    bytes: int
    used: float  # time of the last write or, if the file system records it, the last read; seconds since the epoch
    busy: bool = False  # a process is making it now

    @property
    def name(self) -> str:
        return self.path.name.removeprefix(PARTIAL)

    @property
    def days(self) -> float:
        return max(0.0, (time.time() - self.used) / 86_400)


def entries(folder: Path) -> list[CacheEntry]:
    """Return all cache entries that preparation made, the largest first. Other files are left out."""
    found = []
    for path in sorted(folder.iterdir()) if folder.is_dir() else []:
        kind = _kind(path)
        if kind is None or path.is_symlink():
            continue
        files = {file.name: file.stat() for file in path.rglob("*") if file.is_file()}
        # Listing the cache reads the index; only training reads the other files.
        times = [max(status.st_mtime, status.st_atime) for name, status in files.items() if name != shards.INDEX]
        used = max(times, default=path.stat().st_mtime)
        size = sum(status.st_size for status in files.values())
        busy = is_being_made(folder / path.name.removeprefix(PARTIAL))
        source = read_json_or_empty(path / shards.INDEX).get("path")
        found.append(CacheEntry(path, kind, None if source is None else str(source), size, used, busy))
    return sorted(found, key=lambda entry: -entry.bytes)


def select_entries(found: list[CacheEntry], names: list[str], unused_days: float | None) -> list[CacheEntry]:
    """Return the entries with these names or beginnings of names (none: all) that are unused for `unused_days`."""
    picked = found
    if names:
        picked = []
        for name in names:
            matching = [e for e in found if e.name == name] or [e for e in found if e.name.startswith(name)]
            if not matching:
                known = [entry.name for entry in found]
                raise UserError(f"nothing in the cache is called {name!r}: {did_you_mean(name, known)}")
            picked += [entry for entry in matching if entry not in picked]
    return [entry for entry in picked if unused_days is None or entry.days >= unused_days]


def remove(entry: CacheEntry) -> bool:
    """Delete an entry. Return False, and delete nothing, while a process is making it."""
    if is_being_made(entry.path.parent / entry.name):
        return False
    # Renamed first, so that a process that opens the entry now finds nothing instead of half of it.
    doomed = entry.path.with_name(f".removed-{entry.path.name}")
    with suppress(OSError):
        shutil.rmtree(doomed, ignore_errors=True)
    with reported(f"{entry.path} cannot be removed ({{reason}}): check its permissions", OSError):
        entry.path.rename(doomed)
        shutil.rmtree(doomed)
    return True


def _kind(path: Path) -> str | None:
    if not path.is_dir():
        return None
    if path.name.startswith((PARTIAL, ".removed-")):
        return "unfinished"
    if (path / shards.INDEX).is_file():
        return "prepared"
    return next((kind for kind in ("stream", "tokenizer") if path.name.startswith(f"{kind}-")), None)
