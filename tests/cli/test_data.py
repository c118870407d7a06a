"""`ironlaw data`: prepare, stats, inspect, check, export."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from ironlaw.config import load_config
from ironlaw.data import shards
from ironlaw.data.megatron import open_indexed
from ironlaw.data.prepare import prepare

Here = Callable[..., tuple[int, str, str]]
File = Callable[..., Path]


def test_prepared_once_and_then_found(tiny_file: File, ironlaw_here: Here, corpus: Path) -> None:
    config = tiny_file(data={"shard_tokens": 4096})
    code, out, err = ironlaw_here("data", "prepare", config)
    assert code == 0 and f"{corpus} prepared: " in out and "next        ironlaw train" in out
    assert "Tokenising" in err and "/s" in err
    code, out, err = ironlaw_here("data", "prepare", config)
    assert code == 0 and "was prepared already" in out and "Tokenising" not in err


def test_stats_add_up(tiny_file: File, ironlaw_here: Here) -> None:
    config = tiny_file()
    code, out, _ = ironlaw_here("data", "stats", config, "--json")
    stats = json.loads(out)
    dataset = prepare(load_config(config).data, 300)
    train = stats["splits"]["train"]
    assert (
        code == 0
        and train["tokens"] == len(dataset.train.tokens)
        and train["documents"] == len(dataset.train.bounds) - 1
    )
    assert train["document_tokens"]["mean"] == pytest.approx(train["tokens"] / train["documents"])
    assert train["vocabulary_used"] == len(np.unique(dataset.train.tokens))
    assert stats["packing"]["best_fit"]["documents_cut_fraction"] == 1.0  # files of thousands of tokens, rows of 16
    code, out, _ = ironlaw_here("data", "stats", config)
    assert code == 0 and "best_fit" in out and "tokens per document" in out


def test_inspect_shows_text_that_is_in_the_corpus(tiny_file: File, ironlaw_here: Here, corpus: Path) -> None:
    everything = "\n".join(file.read_text() for file in corpus.iterdir())
    for packing in ("concat", "best_fit"):
        arguments = ("data", "inspect", tiny_file(data={"packing": packing}), "--step", 3, "--rows", 5)
        code, out, _ = ironlaw_here(*map(str, arguments), "--json")
        rows: list[dict[str, Any]] = json.loads(out)["rows"]
        assert code == 0 and len(rows) == 5
        for row in rows:
            assert row["tokens"] + row["padding"] == 16
            assert all(document["text"] in everything for document in row["documents"])
        code, out, _ = ironlaw_here(*map(str, arguments))
        assert code == 0 and out.startswith("row 0")


def test_check_finds_damage_and_prepare_repairs_it(tiny_file: File, ironlaw_here: Here) -> None:
    config = tiny_file()
    code, _, err = ironlaw_here("data", "check", config)
    assert code == 2 and "ironlaw data prepare" in err and err.count("\n") == 1
    ironlaw_here("data", "prepare", config)
    assert ironlaw_here("data", "check", config)[0] == 0
    folder = prepare(load_config(config).data, 300).folder
    assert folder is not None
    (folder / "train-00000.bin").write_bytes(b"\0" * (folder / "train-00000.bin").stat().st_size)
    code, out, _ = ironlaw_here("data", "check", config, "--json")
    document = json.loads(out)
    assert code == 1 and not document["intact"] and "train-00000.bin" in document["folders"][0]["damage"][0]
    code, _, err = ironlaw_here("data", "prepare", config)
    assert code == 0 and "making them again" in " ".join(err.split())  # the line is folded where the path is long
    assert ironlaw_here("data", "check", config)[0] == 0


def test_exported_data_is_what_was_prepared(tiny_file: File, ironlaw_here: Here, tmp_path: Path) -> None:
    config = tiny_file()
    assert ironlaw_here("data", "export", config, tmp_path / "out" / "set")[0] == 0
    dataset = prepare(load_config(config).data, 300)
    indexed = open_indexed(tmp_path / "out" / "set_train")
    np.testing.assert_array_equal(indexed.tokens, np.asarray(dataset.train.tokens))
    np.testing.assert_array_equal(indexed.bounds, dataset.train.bounds)


def test_ctrl_c_says_what_is_kept(tiny_file: File, ironlaw_here: Here, monkeypatch: pytest.MonkeyPatch) -> None:
    finish, finished = shards.ShardWriter.finish, iter(range(3))

    def stop_at_third(self: shards.ShardWriter) -> dict[str, Any]:
        if next(finished) == 2:
            raise KeyboardInterrupt
        return finish(self)

    config = tiny_file(data={"shard_tokens": 4096})
    with monkeypatch.context() as patch:
        patch.setattr(shards.ShardWriter, "finish", stop_at_third)
        code, _, err = ironlaw_here("data", "prepare", config)
    assert code == 130 and "2 finished shards are kept" in err and err.endswith("ironlaw: interrupted\n")
    code, out, err = ironlaw_here("data", "prepare", config)
    assert code == 0 and "Going on behind 2 finished shards" in err and "prepared: " in out
