"""Which files count as text, in which order, and which are held out."""

from __future__ import annotations

import itertools
import os
from pathlib import Path

import pytest

from ironlaw.data import corpus as corpora
from ironlaw.data import splits
from ironlaw.errors import UserError


def test_files_are_sorted_and_only_text_is_kept(tmp_path: Path) -> None:
    (tmp_path / "b.md").write_bytes(b"\xef\xbb\xbfsecond")
    (tmp_path / "a").mkdir()
    (tmp_path / "a" / "first").write_text("first", encoding="utf-8")
    (tmp_path / ".git").mkdir()
    (tmp_path / ".git" / "config").write_text("hidden")
    (tmp_path / "picture.png").write_bytes(b"\x89PNG\0\0")
    (tmp_path / "latin.txt").write_bytes("é".encode("latin-1"))
    (tmp_path / "blank.txt").write_text("  \n")
    (tmp_path / "nothing.txt").write_text("")
    (tmp_path / "huge.txt").write_text("x" * 101)
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "dangling").symlink_to("nowhere")
    corpus = corpora.find(str(tmp_path), maximum_file_bytes=100)
    corpus.scan(lambda file, text: None)
    assert [file.name for file in corpus.files] == ["a/first", "b.md"]
    assert next(corpus.documents((1, 0))).content == "second"
    assert corpus.skipped == {
        "binary": 1,
        "empty": 2,
        "not UTF-8": 1,
        "not a file": 1,
        "too large": 1,
        "unreadable": 1,
    }


def test_link_loops_end_and_linked_folders_count_once(tmp_path: Path) -> None:
    (tmp_path / "real").mkdir()
    (tmp_path / "real" / "text").write_text("text")
    (tmp_path / "real" / "loop").symlink_to(tmp_path)
    (tmp_path / "again").symlink_to(tmp_path / "real")
    assert len(corpora.find(str(tmp_path)).files) == 1


def test_fingerprint_changes_with_a_file(tmp_path: Path) -> None:
    file = tmp_path / "a.txt"
    file.write_text("one")
    before = corpora.find(str(tmp_path)).fingerprint()
    assert corpora.find(str(tmp_path)).fingerprint() == before
    os.utime(file, ns=(1, 1))
    assert corpora.find(str(tmp_path)).fingerprint() != before


def test_stdlib_leaves_out_what_not_every_machine_has() -> None:
    corpus = corpora.find("stdlib")
    folders = {part for file in corpus.files for part in file.name.split("/")[:-1]}
    assert not folders & {"site-packages", "test", "idlelib", "tkinter", "encodings", "__pycache__"}
    assert {"argparse.py", "json/decoder.py", "asyncio/tasks.py"} <= {file.name for file in corpus.files}
    assert corpus.bytes > 5_000_000


def held_out(names: list[str], fraction: float, seed: int) -> set[str]:
    numbers = {name: splits.number(name.encode(), seed) for name in names}
    below = splits.threshold(numbers.values(), fraction)
    return {name for name in names if numbers[name] < below}


def test_held_out_is_stable_when_files_are_added() -> None:
    names = [f"f{i}" for i in range(1000)]
    held = held_out(names, 0.1, seed=0)
    assert 60 < len(held) < 140
    more = held_out([*names, "new1", "new2"], 0.1, seed=0)
    assert more & set(names) == held
    assert held_out(names, 0.1, seed=1) != held


def test_held_out_takes_some_and_leaves_some() -> None:
    assert len(held_out(["a", "b"], 0.0001, seed=0)) == 1
    assert len(held_out(["a", "b", "c"], 0.9999, seed=0)) == 2


def split_texts(path: Path, fraction: float, seed: int = 0) -> dict[str, list[str]]:
    corpus = corpora.find(str(path))
    splitter = splits.split(corpus, fraction, seed)
    parts: dict[str, list[str]] = {"train": [], "validation": []}
    for document in corpus.documents():
        assert document.content is not None
        for split, text in splitter.parts(document.file, document.content):
            parts[split].append(str(text))
    return parts


def test_a_single_file_holds_out_its_tail(tmp_path: Path) -> None:
    text = "".join(f"line {i}\n" for i in range(100))
    (tmp_path / "only.txt").write_text(text)
    parts = split_texts(tmp_path / "only.txt", 0.1)
    (train,), (validation,) = parts["train"], parts["validation"]
    assert train + validation == text
    assert validation.startswith("line ")
    assert 0.05 < len(validation) / len(text) < 0.15


def test_duplicates_fall_into_one_split_whatever_their_names(tmp_path: Path) -> None:
    for i in range(120):
        (tmp_path / f"file{i}").write_text(f"text number {i % 30}" + " \n" * (i // 30))  # blanks do not tell apart
    for seed in range(4):
        parts = split_texts(tmp_path, 0.3, seed)
        train, validation = ({text.strip() for text in parts[split]} for split in ("train", "validation"))
        assert train and validation and not train & validation
        assert len(train | validation) == 30 and len(parts["train"]) + len(parts["validation"]) == 120


def test_pieces_join_to_the_text_and_cut_between_two_full_lines() -> None:
    text = "alpha\n  \nbeta \n gamma\ndelta\n\n" * 50
    parts = list(corpora.cut_text(text, 40))
    assert "".join(parts) == text
    assert len(parts) > 10
    for left, right in itertools.pairwise(parts):
        assert left.endswith("\n") and not left[-2].isspace() and not right[0].isspace()
    assert list(corpora.cut_text("x" * 100, 10)) == ["x" * 100]


@pytest.mark.parametrize("content", [None, b"\0", b"\xff\xfe", b"", b"x" * 20])
def test_a_corpus_without_text_is_one_line(tmp_path: Path, content: bytes | None) -> None:
    if content is not None:
        (tmp_path / "file").write_bytes(content)
    with pytest.raises(UserError, match="has no text") as caught:
        corpus = corpora.find(str(tmp_path), maximum_file_bytes=10)
        corpus.scan(lambda file, text: None)
        corpora.check_has_text(corpus)
    assert "\n" not in str(caught.value)


def test_a_path_that_does_not_exist_is_one_line() -> None:
    with pytest.raises(UserError, match="does not exist") as caught:
        corpora.find("no/such/folder")
    assert "\n" not in str(caught.value)
