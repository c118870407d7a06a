"""The data cache: listed, and cleaned of what is asked for and nothing else."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from ironlaw.data import building
from ironlaw.data.cache import entries, remove, select_entries
from ironlaw.data.config import DataConfig
from ironlaw.data.prepare import prepare
from ironlaw.errors import UserError


@pytest.fixture
def cache(corpus: Path, tmp_path: Path) -> Path:
    folder = tmp_path / "cache"
    config = DataConfig(path=str(corpus), cache=str(folder))
    for vocab in (300, 320):
        prepare(config, vocab)
    (folder / ".partial-left").mkdir()
    (folder / ".partial-left" / "train-00000.bin").write_bytes(b"12")
    (folder / "mine").mkdir()
    (folder / "mine" / "notes.txt").write_text("not ours to remove", encoding="utf-8")
    return folder


def test_what_is_there_with_its_size(cache: Path, corpus: Path) -> None:
    found = entries(cache)
    assert [entry.kind for entry in found] == ["prepared", "prepared", "unfinished"]
    assert {entry.source for entry in found} == {str(corpus), None}
    for entry in found:
        assert entry.bytes == sum(file.stat().st_size for file in entry.path.iterdir())
    assert entries(cache / "nowhere") == []


def test_names_and_age_choose(cache: Path) -> None:
    found = entries(cache)
    first = found[0]
    assert select_entries(found, [first.name], None) == [first]
    assert select_entries(found, ["left"], None) == [found[2]]
    with pytest.raises(UserError, match="nothing in the cache is called 'lfet'"):
        select_entries(found, ["lfet"], None)
    assert select_entries(found, [], unused_days=1) == []
    long_ago = time.time() - 10 * 86_400
    for file in first.path.iterdir():
        os.utime(file, (long_ago, long_ago))
    assert [entry.name for entry in select_entries(entries(cache), [], unused_days=9)] == [first.name]


def test_what_is_removed_is_gone_and_the_rest_stays(cache: Path, corpus: Path) -> None:
    found = entries(cache)
    assert remove(found[0]) and not found[0].path.exists()
    assert [entry.name for entry in entries(cache)] == [entry.name for entry in found[1:]]
    assert (cache / "mine" / "notes.txt").is_file()
    assert not prepare(DataConfig(path=str(corpus), cache=str(cache)), 300).reused or found[0].path.exists()


def test_what_is_being_made_stays(tmp_path: Path) -> None:
    def fill(place: Path) -> None:
        (place / building.PROGRESS).write_text("{}", encoding="utf-8")
        (entry,) = entries(tmp_path)
        assert entry.busy and not remove(entry) and place.is_dir()

    building.make(tmp_path / "text-0", fill)
    (entry,) = entries(tmp_path) or [None]
    assert entry is None or not entry.busy


def test_the_command_lists_and_removes_only_when_told(
    cache: Path, ironlaw_here: Callable[..., tuple[int, str, str]]
) -> None:
    code, out, _ = ironlaw_here("data", "clean", "--cache", cache)
    assert code == 0 and "unfinished" in out and "--yes" in out
    assert len(entries(cache)) == 3
    code, out, _ = ironlaw_here("data", "clean", "left", "--cache", cache, "--yes", "--json")
    document = json.loads(out)
    assert code == 0 and [(e["name"], e["removed"]) for e in document["entries"]] == [("left", True)]
    assert len(entries(cache)) == 2
    code, _, messages = ironlaw_here("data", "clean", "nothing-like-it", "--cache", cache)
    assert code == 2 and "nothing in the cache" in messages
    assert ironlaw_here("data", "clean", "--cache", cache, "--yes")[0] == 0
    assert entries(cache) == [] and (cache / "mine").is_dir()
