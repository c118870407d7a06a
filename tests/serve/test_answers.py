"""Tokens as text: kinds of tokenizers, characters of several tokens, stop strings."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).parent))  # for `serving`
from serving import write_server_directory
from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers

from ironlaw.data import tokenizer as tokenizers
from ironlaw.data.chat import Text
from ironlaw.errors import UserError
from ironlaw.serve.answers import TextDecoder, TokenReader
from ironlaw.serve.config import ServeConfig
from ironlaw.serve.constrain import token_table
from ironlaw.serve.loading import load_served
from ironlaw.serve.request import SampledToken

WORDS = "the model serves the page, naïve and größer: 日本語 🎉"


def byte_level() -> Any:
    made = Tokenizer(models.BPE())
    made.pre_tokenizer, made.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    made.train_from_iterator([WORDS], trainers.BpeTrainer(special_tokens=["</s>"], initial_alphabet=alphabet))
    return made


def byte_fallback() -> Any:
    """Llama 2's kind: a space before the first word, and bytes for characters that are no tokens."""
    names = ["<unk>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), *"▁themodlsrvpag,", "▁t", "he", "▁the"]
    merges = [("▁", "t"), ("h", "e"), ("▁t", "he")]
    made = Tokenizer(models.BPE({n: i for i, n in enumerate(names)}, merges, unk_token="<unk>", byte_fallback=True))
    made.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    steps = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    made.decoder = decoders.Sequence(steps)
    made.add_special_tokens([AddedToken("</s>", special=True)])
    return made


def metaspace() -> Any:
    made = Tokenizer(models.BPE())
    made.pre_tokenizer, made.decoder = pre_tokenizers.Metaspace(), decoders.Metaspace()
    made.train_from_iterator([WORDS], trainers.BpeTrainer(special_tokens=["</s>"]))
    return made


def word_piece() -> Any:
    made = Tokenizer(models.WordPiece(unk_token="[SEP]"))  # type: ignore[call-arg]
    made.pre_tokenizer, made.decoder = pre_tokenizers.WhitespaceSplit(), decoders.WordPiece(cleanup=False)
    made.train_from_iterator([WORDS], trainers.WordPieceTrainer(special_tokens=["[SEP]"]))
    return made


def words() -> Any:
    made = Tokenizer(models.WordLevel({"[SEP]": 0} | {w: i for i, w in enumerate(WORDS.split(), 1)}, "[SEP]"))
    made.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return made


def text_of(made: Any, folder: Path) -> Text:
    made.save(str(folder / "tokenizer.json"))
    return Text(tokenizers.load(folder), None, {})


@pytest.mark.parametrize("made", [byte_level, byte_fallback, metaspace, word_piece, words])
def test_an_answer_goes_on_with_its_prompt_or_begins_a_message(made: Callable[[], Any], tmp_path: Path) -> None:
    text = text_of(made(), tmp_path)
    ids = text.encode(WORDS)
    assert "".join(map(TokenReader(text, begins=True), ids)) == WORDS
    prompts = [text.decode(ids[:end]) for end in range(1, len(ids))]
    answers = [text.decode_behind(ids[end:]) for end in range(1, len(ids))]
    whole = [prompt + answer for prompt, answer in zip(prompts, answers, strict=True) if WORDS.startswith(prompt)]
    assert len(whole) > 8 and set(whole) == {WORDS}


@pytest.mark.parametrize("made", [byte_level, byte_fallback])
def test_bytes_of_no_character_fail_no_answer_and_take_no_other_characters_away(
    made: Callable[[], Any], tmp_path: Path
) -> None:
    text = text_of(made(), tmp_path)
    broken, whole = text.tokenizer.token_to_id("È" if made is byte_level else "<0xC8>"), text.encode("日")
    assert text.bytes_of(broken) == b"\xc8"
    for ids in (
        [*whole, broken],
        [broken, *whole],
        [*whole, broken, broken, *whole],
        [*whole, broken, *text.encode("the")],
    ):
        shown = "".join(map(TokenReader(text, begins=True), ids))
        assert shown == b"".join(map(text.bytes_of, ids)).decode(errors="replace").strip().removesuffix("�")


def test_a_stop_string_among_the_first_tokens_stays_in_the_answer(tmp_path: Path) -> None:
    text = text_of(byte_level(), tmp_path)
    decode = TextDecoder(TokenReader(text), stop=["the"])
    assert not any(decode(SampledToken(token), False) for token in text.encode("the a"))
    assert any(decode(SampledToken(token), True) for token in text.encode(" the"))
    assert decode.take(True) == "the a "


def test_a_tokenizer_that_forms_cannot_use_is_told_in_one_line(tmp_path: Path) -> None:
    pytest.importorskip("llguidance")
    text = text_of(metaspace(), tmp_path)
    with pytest.raises(UserError, match="do not go with this model's tokenizer"):
        token_table(text.file, [0], 50)


def test_an_end_of_text_that_the_model_does_not_have_is_refused(tmp_path: Path) -> None:
    folder = write_server_directory(tmp_path / "tiny")
    file, config = folder / "config.json", json.loads((folder / "config.json").read_text())
    file.write_text(json.dumps(config | {"eos_token_id": [config["eos_token_id"], 4321]}))
    with pytest.raises(UserError, match=r"eos_token_id = 4321 .* and the model 287 tokens"):
        load_served(folder, ServeConfig())
    file.write_text(json.dumps(config))
    file = folder / "tokenizer_config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"eos_token": "<|nobody|>"}))
    with pytest.raises(UserError, match=r'names eos_token "<\|nobody\|>", which the tokenizer does not have'):
        load_served(folder, ServeConfig())
