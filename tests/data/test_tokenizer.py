"""Tokenizers: any text round-trips, training repeats itself, and a foreign file cannot spoil a corpus."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from ironlaw.data import tokenizer as tokenizers
from ironlaw.data.corpus import cut_text
from ironlaw.errors import UserError

TEXTS = ["def f(x):\n    return x + 1\n" * 5, "the quick brown fox, the lazy dog\n" * 5, "naïve café\t\r\n"]


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> tokenizers.Tokenizer:
    return tokenizers.train(TEXTS, 300, tmp_path_factory.mktemp("tokenizer") / "tokenizer.json")


@pytest.mark.parametrize("text", [*TEXTS, "日本語 🎉\x01\u200b", "a <|endoftext|> b", "  \n\n\t x", ""])
def test_round_trip(trained: tokenizers.Tokenizer, text: str) -> None:
    ids = trained.encode(text)
    assert trained.decode(ids) == text
    assert all(0 <= i < trained.vocab for i in ids)
    assert trained.end_of_text not in ids
    assert trained.encode_many([text])[0].tolist() == ids


def test_training_repeats_itself_and_survives_saving(trained: tokenizers.Tokenizer, tmp_path: Path) -> None:
    again = tokenizers.train(TEXTS, 300, tmp_path / "tokenizer.json")
    assert again.path.read_bytes() == trained.path.read_bytes()
    assert tokenizers.load(again.path).encode(TEXTS[0]) == trained.encode(TEXTS[0])
    assert trained.end_of_text_token == "<|endoftext|>"


def test_pieces_have_the_tokens_of_the_whole_text(trained: tokenizers.Tokenizer) -> None:
    text = "def f(x):\n    return x\n\n\nclass A:\n    the = 1 \n\t\nthe fox\nx\n" * 40
    parts = [i for part in cut_text(text, 64) for i in trained.encode(part)]
    assert len(list(cut_text(text, 64))) > 10
    assert parts == trained.encode(text)


def test_padding_and_truncation_of_a_foreign_file_are_undone(trained: tokenizers.Tokenizer, tmp_path: Path) -> None:
    from tokenizers import Tokenizer

    foreign = Tokenizer.from_file(str(trained.path))
    foreign.enable_truncation(4)
    foreign.enable_padding(length=64)
    foreign.save(str(tmp_path / "foreign.json"))
    loaded = tokenizers.load(tmp_path / "foreign.json")
    assert loaded.encode(TEXTS[0]) == trained.encode(TEXTS[0])
    assert loaded.encode_many(["x", TEXTS[0]])[0].tolist() == trained.encode("x")


def test_too_large_for_the_model_says_what_to_set(trained: tokenizers.Tokenizer) -> None:
    tokenizers.check_fits(trained, trained.vocab)
    with pytest.raises(UserError, match=f"set model.vocab = {trained.vocab} or more") as caught:
        tokenizers.check_fits(trained, trained.vocab - 1)
    assert "\n" not in str(caught.value)


def test_bad_tokenizers_are_one_line(trained: tokenizers.Tokenizer, tmp_path: Path) -> None:
    broken = tmp_path / "broken.json"
    broken.write_text('{\n"model":\n1}')
    endless = tmp_path / "endless.json"
    content = json.loads(trained.path.read_text())
    content["added_tokens"] = []
    content["model"]["vocab"] = {
        ("end" if k == "<|endoftext|>" else k): v for k, v in content["model"]["vocab"].items()
    }
    endless.write_text(json.dumps(content))
    for act, words in (
        (lambda: tokenizers.load(tmp_path / "absent.json"), "is not a file"),
        (lambda: tokenizers.load(broken), "is not a Hugging Face tokenizer.json"),
        (lambda: tokenizers.load(broken, made_here=True), f"delete {tmp_path}, and it is made again"),
        (lambda: tokenizers.load(endless), "data.end_of_text"),
        (lambda: tokenizers.load(endless, "<nope>"), "has no token"),
        (lambda: tokenizers.check_vocab(256), "257"),
    ):
        with pytest.raises(UserError, match=words) as caught:
            act()
        assert "\n" not in str(caught.value)
    assert tokenizers.load(endless, "end").end_of_text == trained.end_of_text
