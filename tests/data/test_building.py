"""Shards: interrupted, killed, damaged, out of space or made by other workers, they come out the same."""

from __future__ import annotations

import errno
import hashlib
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from ironlaw.data import building, shards
from ironlaw.data.config import DataConfig
from ironlaw.data.dataset import Dataset
from ironlaw.data.prepare import prepare
from ironlaw.errors import UserError

VOCAB = 300


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("corpus")
    for i in range(60):
        lines = [f"value_{i}_{k} = {k * i % 97}  # é\n" for k in range(40)]
        (folder / f"file{i:02}.py").write_text("".join(lines), encoding="utf-8")
    return folder


def settings(corpus: Path, cache: Path, **more: Any) -> DataConfig:
    given = {"path": str(corpus), "validation_fraction": 0.1, "cache": str(cache), "shard_tokens": 4096}
    return DataConfig(**(given | more))


@pytest.fixture(scope="module")
def whole(corpus: Path, tmp_path_factory: pytest.TempPathFactory) -> Dataset:
    """Made in one go."""
    dataset = prepare(settings(corpus, tmp_path_factory.mktemp("cache")), VOCAB)
    assert dataset.shards > 5
    return dataset


def digests(folder: Path | None) -> dict[str, str]:
    assert folder is not None
    files = [file for file in folder.iterdir() if file.name != "index.json"]  # which holds the seconds
    return {file.name: hashlib.sha256(file.read_bytes()).hexdigest() for file in files}


def test_shards_read_as_one(whole: Dataset, corpus: Path, tmp_path: Path) -> None:
    single = prepare(settings(corpus, tmp_path, shard_tokens=2**26), VOCAB)
    assert single.shards == 1 and isinstance(single.train.tokens, np.ndarray)
    assert isinstance(whole.train.tokens, shards.Tokens) and len(whole.train.tokens) == len(single.train.tokens)
    np.testing.assert_array_equal(np.asarray(whole.train.tokens), single.train.tokens)
    np.testing.assert_array_equal(whole.train.bounds, single.train.bounds)
    for start in range(0, len(single.train.tokens), 501):
        for length in (0, 1, 700, 9000):
            np.testing.assert_array_equal(
                whole.train.tokens[start : start + length], single.train.tokens[start : start + length]
            )
    assert whole.unigram_loss == single.unigram_loss
    assert whole.validation.documents == single.validation.documents


@pytest.mark.parametrize("error", [KeyboardInterrupt(), OSError(errno.ENOSPC, "No space left on device")], ids=str)
def test_stopped_it_goes_on_behind_the_finished_shards(
    whole: Dataset, corpus: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: BaseException
) -> None:
    finish, count = shards.ShardWriter.finish, 0

    def stop_at_fourth(self: shards.ShardWriter) -> dict[str, Any]:
        nonlocal count
        count += 1
        if count == 4:
            raise error
        return finish(self)

    monkeypatch.setattr(shards.ShardWriter, "finish", stop_at_fourth)
    config = settings(corpus, tmp_path)
    with pytest.raises((KeyboardInterrupt, UserError)) as caught:
        prepare(config, VOCAB)
    if caught.type is UserError:
        assert "finished shards are kept" in str(caught.value) and "\n" not in str(caught.value)
    (partial,) = tmp_path.iterdir()
    finished = sorted(file.name for file in partial.glob("*.bin"))
    assert finished == sorted(f"{split}-{n:05d}.bin" for split in ("train", "validation") for n in range(3))
    before = {file.name: file.stat().st_mtime_ns for file in partial.iterdir() if file.name != "progress.json"}

    said: list[str] = []
    dataset = prepare(config, VOCAB, say=said.append)
    assert said == ["Going on behind 3 finished shards"]
    assert digests(dataset.folder) == digests(whole.folder)
    assert dataset.folder is not None and list(tmp_path.iterdir()) == [dataset.folder]
    for name, modified in before.items():
        assert (dataset.folder / name).stat().st_mtime_ns == modified, f"{name} was made again"


def test_killed_with_workers_it_goes_on_and_no_worker_stays(whole: Dataset, corpus: Path, tmp_path: Path) -> None:
    script = (
        "import sys\nfrom ironlaw.data.config import DataConfig\nfrom ironlaw.data import prepare, shards\n"
        "from time import sleep\n"
        "if __name__ == '__main__':\n"
        "    finish = shards.ShardWriter.finish\n"
        "    # The fourth shard is never done: whoever kills this may come when he has time.\n"
        "    shards.ShardWriter.finish = lambda self: (sleep(1000 if self.number == 3 else 0), finish(self))[1]\n"
        "    prepare.prepare(DataConfig.model_validate_json(sys.argv[1]), 300)\n"
    )
    program = tmp_path / "script.py"
    program.write_text(script)
    cache = tmp_path / "cache"
    config = settings(corpus, cache, workers=2)
    process = subprocess.Popen([sys.executable, str(program), config.model_dump_json()], start_new_session=True)
    while len(list(cache.glob(".partial-*/train-*.bin"))) < 4:
        assert process.poll() is None
        time.sleep(0.01)
    os.kill(process.pid, signal.SIGKILL)
    process.wait()
    finished = list(cache.glob(".partial-*/progress.json"))
    assert finished, "nothing was finished before the kill"
    for _ in range(600):  # the workers see that their parent is gone
        try:
            os.killpg(process.pid, 0)
        except ProcessLookupError:
            break
        time.sleep(0.05)
    else:
        os.killpg(process.pid, signal.SIGKILL)
        pytest.fail("worker processes outlive their parent")
    said: list[str] = []
    dataset = prepare(config, VOCAB, say=said.append)
    assert "Going on behind" in said[0]
    assert digests(dataset.folder) == digests(whole.folder)


def test_workers_change_nothing(whole: Dataset, corpus: Path, tmp_path: Path) -> None:
    dataset = prepare(settings(corpus, tmp_path, workers=1), VOCAB)
    assert digests(dataset.folder) == digests(whole.folder)
    again = prepare(settings(corpus, tmp_path, workers=0), VOCAB)
    assert again.reused and again.folder == dataset.folder  # whoever made it


@pytest.mark.parametrize("how", ["flip", "cut", "remove"])
def test_a_damaged_shard_and_those_after_it_are_made_again(
    whole: Dataset, corpus: Path, tmp_path: Path, how: str
) -> None:
    config = settings(corpus, tmp_path)
    dataset = prepare(config, VOCAB)
    assert dataset.folder is not None
    damaged = dataset.folder / "train-00002.bin"
    content = bytearray(damaged.read_bytes())
    content[7] ^= 1
    damaged.unlink()
    if how != "remove":
        damaged.write_bytes(content if how == "flip" else content[:-2])
    before = {file.name: file.stat().st_mtime_ns for file in dataset.folder.iterdir()}
    said: list[str] = []
    again = prepare(config, VOCAB, say=said.append)
    assert "train-00002.bin" in said[0] and "again" in said[0] and said[1:] == ["Going on behind 2 finished shards"]
    assert digests(again.folder) == digests(whole.folder)
    after = {file.name: file.stat().st_mtime_ns for file in dataset.folder.iterdir()}
    changed = {name for name in after if after[name] != before.get(name)}
    assert not any("-00000" in name or "-00001" in name for name in changed), changed
    assert prepare(config, VOCAB).reused


def test_a_shard_damaged_while_others_were_missing_is_made_again(whole: Dataset, corpus: Path, tmp_path: Path) -> None:
    config = settings(corpus, tmp_path)
    folder = prepare(config, VOCAB).folder
    assert folder is not None
    index = shards.read_index(folder)
    # As if it had been stopped behind the fourth shard, and the second had been damaged since.
    partial = folder.rename(tmp_path / f".partial-{folder.name}")
    head = {"tokenizer": index["tokenizer"], "dtype": index["dtype"], "held_out": index["held_out"]}
    work = building.FinishedShards(partial, head, index["shards"][:4])
    work.save()
    (partial / "train-00001.bin").write_bytes(b"torn")
    said: list[str] = []
    again = prepare(config, VOCAB, say=said.append)
    assert said == ["Going on behind 1 finished shards"]
    assert digests(again.folder) == digests(whole.folder)


def test_a_disk_that_is_full_keeps_what_is_finished(whole: Dataset, corpus: Path, tmp_path: Path) -> None:
    """A real limit of the system, in a process of its own: no file may grow past it."""
    script = (
        "import resource, signal, sys\nfrom ironlaw.data.config import DataConfig\nfrom ironlaw.data import prepare\n"
        "signal.signal(signal.SIGXFSZ, signal.SIG_IGN)\n"  # so that the write fails with EFBIG instead
        "resource.setrlimit(resource.RLIMIT_FSIZE, (9000, 9000))\n"
        "prepare.prepare(DataConfig.model_validate_json(sys.argv[1]), 300)\n"
    )
    config = settings(corpus, tmp_path / "cache", tokenizer=str(whole.tokenizer_path))
    size = max(file.stat().st_size for file in whole.folder.glob("*") if "bin" in file.name)  # type: ignore[union-attr]
    code = script.replace("9000, 9000", f"{size - 2}, {size - 2}")
    process = subprocess.run([sys.executable, "-c", code, config.model_dump_json()], capture_output=True, text=True)
    assert process.returncode and "cannot write token files" in process.stderr.splitlines()[-1], process.stderr[-500:]
    dataset = prepare(config, VOCAB)
    np.testing.assert_array_equal(np.asarray(dataset.train.tokens), np.asarray(whole.train.tokens))
