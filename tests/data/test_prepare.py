"""Preparation: complete or absent, reused, checked, and the same every time."""

from __future__ import annotations

import itertools
import json
import math
import os
import shutil
import subprocess
import sys
import threading
import time
from pathlib import Path

import numpy as np
import pytest

from ironlaw.data import building, shards
from ironlaw.data import corpus as corpora
from ironlaw.data import source as preparation
from ironlaw.data.config import DataConfig
from ironlaw.data.dataset import Dataset, open_dataset
from ironlaw.data.prepare import prepare
from ironlaw.data.stats import token_counts, unigram_loss
from ironlaw.errors import UserError

VOCAB = 320


def write_corpus(root: Path, files: int = 40) -> Path:
    root.mkdir(parents=True, exist_ok=True)
    for i in range(files):
        lines = [f"def function_{i}_{k}(value):\n    return value * {k} + {i}  # é\n" for k in range(12)]
        folder = root / f"part{i % 3}"
        folder.mkdir(exist_ok=True)
        (folder / f"file{i:03}.py").write_text("\n".join(lines), encoding="utf-8")
    return root


@pytest.fixture(scope="session")
def corpus_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_corpus(tmp_path_factory.mktemp("corpus"))


@pytest.fixture(scope="session")
def config(corpus_path: Path, tmp_path_factory: pytest.TempPathFactory) -> DataConfig:
    cache = tmp_path_factory.mktemp("cache")
    return DataConfig(path=str(corpus_path), validation_fraction=0.2, cache=str(cache))


@pytest.fixture(scope="session")
def dataset(config: DataConfig) -> Dataset:
    return prepare(config, VOCAB)


def texts(dataset: Dataset, split: str) -> list[str]:
    tokenizer = dataset.tokenizer()
    tokens, bounds = getattr(dataset, split).tokens, getattr(dataset, split).bounds
    assert all(tokens[end - 1] == dataset.end_of_text for end in bounds[1:])
    return [tokenizer.decode(tokens[a : b - 1]) for a, b in itertools.pairwise(bounds)]


def test_documents_come_back_and_splits_share_none(dataset: Dataset, config: DataConfig) -> None:
    corpus = corpora.find(config.path)
    everything = sorted(file.path.read_bytes().decode() for file in corpus.files)
    train, validation = texts(dataset, "train"), texts(dataset, "validation")
    assert sorted(train + validation) == everything
    assert train and validation and not set(train) & set(validation)
    assert (dataset.train.documents, dataset.validation.documents) == (len(train), len(validation))
    assert dataset.validation.bytes == sum(len(text.encode()) for text in validation)
    assert dataset.train.tokens.dtype == np.uint16
    assert dataset.vocab <= VOCAB and int(dataset.train.tokens.max()) < dataset.vocab
    assert set(dataset.seconds) == {"read", "train_tokenizer", "tokenise", "write", "unigram"}


def test_a_second_run_reuses_and_a_fresh_one_repeats(
    dataset: Dataset, config: DataConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fresh = prepare(config.model_copy(update={"cache": str(tmp_path)}), VOCAB)
    assert not fresh.reused
    np.testing.assert_array_equal(fresh.train.tokens, dataset.train.tokens)
    np.testing.assert_array_equal(fresh.validation.tokens, dataset.validation.tokens)
    monkeypatch.setattr(preparation, "_build", lambda *a: pytest.fail("tokenised again"))
    again = prepare(config, VOCAB)
    assert again.reused and again.folder == dataset.folder and again.unigram_loss == dataset.unigram_loss


def test_whatever_changes_the_tokens_changes_the_folder(dataset: Dataset, config: DataConfig, tmp_path: Path) -> None:
    assert dataset.tokenizer_path is not None
    own = tmp_path / "tokenizer.json"
    shutil.copy(dataset.tokenizer_path, own)
    folders = [dataset.folder, prepare(config, VOCAB - 20).folder]
    for change in ({"seed": 1}, {"validation_fraction": 0.3}, {"tokenizer": str(own)}):
        folders.append(prepare(config.model_copy(update=change), VOCAB).folder)
    corpus = write_corpus(tmp_path / "corpus")
    moved = config.model_copy(update={"path": str(corpus)})
    folders.append(prepare(moved, VOCAB).folder)
    (corpus / "part0" / "file000.py").write_text("x = 1\n")
    folders.append(prepare(moved, VOCAB).folder)
    assert len(set(folders)) == len(folders)


def test_own_tokenizer_gives_the_same_tokens(dataset: Dataset, config: DataConfig) -> None:
    given = prepare(config.model_copy(update={"tokenizer": str(dataset.tokenizer_path)}), VOCAB)
    np.testing.assert_array_equal(given.train.tokens, dataset.train.tokens)


def test_long_documents_are_tokenised_as_a_whole(
    dataset: Dataset, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    text = "def f(x):\n    return x\n" * 30_000
    texts = [text, text + "x"]
    for name, content in zip("ab", texts, strict=True):
        (tmp_path / name).write_text(content)
    calls: list[tuple[int, int]] = []
    config = DataConfig(path=str(tmp_path), cache=str(tmp_path / ".c"), tokenizer=str(dataset.tokenizer_path))
    monkeypatch.setattr(os, "cpu_count", lambda: 1)
    long = prepare(config, VOCAB, lambda done, total: calls.append((done, total)))
    assert long.train.tokens[:-1].tolist() in [dataset.tokenizer().encode(text) for text in texts]
    assert long.train.documents == long.validation.documents == 1
    assert len(calls) >= 2 and calls == sorted(calls) and calls[-1] == (2 * len(text) + 1, 2 * len(text) + 1)


@pytest.mark.parametrize("error", [KeyboardInterrupt, OSError(28, "No space left on device")])
def test_interrupted_leaves_nothing(
    config: DataConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: BaseException
) -> None:
    def fail(*_: object) -> None:
        assert list(tmp_path.glob(".partial-*/train-00000.bin"))
        raise error

    monkeypatch.setattr(shards.SplitWriter, "end_document", fail)
    with pytest.raises((KeyboardInterrupt, UserError)) as caught:
        prepare(config.model_copy(update={"cache": str(tmp_path)}), VOCAB)
    assert list(tmp_path.iterdir()) == []
    if caught.type is UserError:
        assert "No space left" in str(caught.value) and "\n" not in str(caught.value)


def test_of_two_processes_the_slower_one_finds_the_folder_made(tmp_path: Path) -> None:
    final, order = tmp_path / "x", []

    def first(place: Path) -> None:
        threads.append(threading.Thread(target=lambda: building.make(final, order.append)))
        threads[0].start()
        time.sleep(0.05)
        order.append(place)
        (place / "who").write_text("first")

    threads: list[threading.Thread] = []
    building.make(final, first)
    threads[0].join()
    assert order == [tmp_path / ".partial-x"]
    assert (final / "who").read_text() == "first" and list(tmp_path.iterdir()) == [final]


def test_the_first_releases_folders_are_still_read(dataset: Dataset, tmp_path: Path) -> None:
    """Schema 1: one shard, whose files have no number."""
    assert dataset.folder is not None
    index = json.loads((dataset.folder / "index.json").read_text())
    shard, _ = index.pop("shards")[0], index.pop("index_sha256")
    old = index | {"schema": 1, "splits": {}}
    for split in ("train", "validation"):
        entry = shard[split]
        shutil.copy(dataset.folder / entry.pop("file"), tmp_path / f"{split}.bin")
        shutil.copy(dataset.folder / entry.pop("documents_file"), tmp_path / f"{split}_documents.npy")
        old["splits"][split] = entry
    shutil.copy(dataset.folder / "tokenizer.json", tmp_path)
    (tmp_path / "index.json").write_text(json.dumps(old))
    opened = open_dataset(tmp_path)
    np.testing.assert_array_equal(opened.train.tokens, dataset.train.tokens)
    np.testing.assert_array_equal(opened.validation.bounds, dataset.validation.bounds)
    assert (opened.seconds, opened.skipped) == (dataset.seconds, dataset.skipped)


@pytest.mark.parametrize(
    "name", ["train-00000.bin", "validation-00000.bin", "train-00000_documents.npy", "tokenizer.json"]
)
@pytest.mark.parametrize("how", ["flip", "cut", "remove"])
def test_damage_is_found_in_one_line(dataset: Dataset, tmp_path: Path, name: str, how: str) -> None:
    assert dataset.folder is not None
    folder = tmp_path / "copy"
    shutil.copytree(dataset.folder, folder)
    open_dataset(folder)
    content = bytearray((folder / name).read_bytes())
    if how == "remove":
        (folder / name).unlink()
    elif how == "cut":
        (folder / name).write_bytes(content[:-2])
    else:
        content[len(content) // 2] ^= 1
        (folder / name).write_bytes(content)
    with pytest.raises(UserError, match=rf"{name}.*delete that folder") as caught:
        open_dataset(folder)
    assert "\n" not in str(caught.value) and str(folder) in str(caught.value)


def test_a_folder_without_a_readable_index_is_damaged(dataset: Dataset, tmp_path: Path) -> None:
    assert dataset.folder is not None
    folder = tmp_path / "copy"
    shutil.copytree(dataset.folder, folder)
    index = json.loads((folder / "index.json").read_text())
    tokenizer = index["tokenizer"] | {"end_of_text": 8}  # one byte on disk
    for content in ("{", "[]", json.dumps(index | {"schema": 99}), json.dumps(index | {"tokenizer": tokenizer})):
        (folder / "index.json").write_text(content)
        with pytest.raises(UserError, match="delete that folder"):
            open_dataset(folder)


def test_unigram_loss_by_hand() -> None:
    train, validation = np.array([0, 0, 0, 1], np.uint16), np.array([0, 1, 2], np.uint16)
    # counts + 1: 4, 2, 1 of 7
    expected = -(math.log(4 / 7) + math.log(2 / 7) + math.log(1 / 7)) / 3
    assert unigram_loss(train, validation, 3) == pytest.approx(expected, rel=1e-12)
    assert unigram_loss(train, validation[:0], 3) is None


def test_counts_do_not_depend_on_the_chunk(monkeypatch: pytest.MonkeyPatch, dataset: Dataset) -> None:
    whole = np.bincount(dataset.train.tokens, minlength=dataset.vocab)
    monkeypatch.setattr("ironlaw.data.stats._CHUNK", 100)
    np.testing.assert_array_equal(token_counts(dataset.train.tokens, dataset.vocab), whole)


def test_bits_per_byte(dataset: Dataset) -> None:
    # A loss of ln 2 per token is one bit per token.
    expected = len(dataset.validation.tokens) / dataset.validation.bytes
    assert dataset.bits_per_byte(math.log(2)) == pytest.approx(expected)


def test_mock_data_needs_no_files(tmp_path: Path) -> None:
    mock = prepare(DataConfig(mock=True, path="absent", cache=str(tmp_path / "c")), 1000)
    assert int(mock.train.tokens.max()) == 999 and mock.folder is None and not (tmp_path / "c").exists()
    assert mock.unigram_loss == pytest.approx(math.log(1000))
    loss = unigram_loss(mock.train.tokens[:100_000], mock.validation.tokens, 1000)
    assert loss == pytest.approx(math.log(1000), rel=1e-2)


def test_tokens_fit_their_type() -> None:
    assert shards.token_dtype(65_536) == np.uint16
    assert shards.token_dtype(65_537) == np.uint32


def test_bad_input_is_one_line(dataset: Dataset, config: DataConfig, tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    (tmp_path / "binary").write_bytes(b"\0\1")
    (tmp_path / "taken").write_text("a file where the cache should be")
    for change, vocab, words in (
        ({"path": str(tmp_path / "absent")}, VOCAB, "does not exist"),
        ({"path": str(tmp_path / "empty")}, VOCAB, "has no text"),
        ({"path": str(tmp_path / "binary")}, VOCAB, "1 binary"),
        ({"maximum_file_bytes": 10}, VOCAB, "maximum_file_bytes"),
        ({}, 100, "model.vocab"),
        ({"tokenizer": str(dataset.tokenizer_path)}, 300, "set model.vocab"),
        ({"tokenizer": str(tmp_path / "absent.json")}, VOCAB, "tokenizer.json"),
        ({"cache": str(tmp_path / "taken")}, VOCAB, "data.cache"),
    ):
        cache = tmp_path / "cache"
        with pytest.raises(UserError, match=words) as caught:
            prepare(config.model_copy(update={"cache": str(cache)} | change), vocab)
        assert "\n" not in str(caught.value)
        assert not cache.exists() or list(cache.iterdir()) == []


def test_the_room_needs_no_torch() -> None:
    code = "import ironlaw.data.prepare, ironlaw.data.loader, sys; print(*sys.modules)"
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert not {"torch", "tokenizers"} & set(run.stdout.split())


def test_a_long_first_reading_is_announced(corpus: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ironlaw.data.source._LARGE_BYTES", 1)
    said: list[str] = []
    prepare(DataConfig(path=str(corpus), cache=str(tmp_path / "cache")), 300, say=said.append)
    assert [line for line in said if line.startswith("Reading ")] == said[:1]
