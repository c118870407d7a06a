"""What a Hugging Face directory says is what is trained: its config, not its name; its tokenizer, whatever its form."""

from __future__ import annotations

import importlib.util
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from tokenizers import Tokenizer

from ironlaw.config import build_config, load_config
from ironlaw.data import tokenizer
from ironlaw.errors import UserError
from ironlaw.model.config import ModelConfig
from ironlaw.model.huggingface.weights import write_model, write_tokenizer
from ironlaw.model.transformer import Transformer

needs_transformers = pytest.mark.skipif(
    importlib.util.find_spec("transformers") is None, reason="transformers is not installed"
)
LLAMA: dict[str, Any] = {
    "layers": 2, "hidden": 32, "heads": 4, "kv_heads": 2, "ffn": 48, "gated_ffn": True, "activation": "silu",
    "norm": "rmsnorm", "norm_eps": 1e-5, "positions": "rope", "bias": False, "vocab": 300, "context": 32,
    "tied": False,
}  # fmt: skip
GPT2: dict[str, Any] = {"layers": 2, "hidden": 32, "heads": 4, "vocab": 300, "context": 32}


@pytest.fixture
def saved(tmp_path: Path, user_cache: Path) -> Callable[..., Path]:
    """A directory with weights and a tokenizer."""

    def save(folder: Path, model: dict[str, Any] = GPT2) -> Path:
        torch.manual_seed(0)
        config = ModelConfig(**model)
        text = [Path(torch.__file__).read_text(encoding="utf-8")[:50_000]]
        made = tokenizer.train(text, 300, tmp_path / "made.json")
        write_model(folder, config, Transformer(config).state_dict(), eos_token_id=made.end_of_text)
        write_tokenizer(folder, made.path, made.end_of_text_token, config.context)
        return folder

    return save


def in_parts(folder: Path) -> None:
    """As tokenizers were saved before there was a `tokenizer.json`."""
    file = folder / "tokenizer.json"
    Tokenizer.from_file(str(file)).model.save(str(folder))
    file.unlink()
    fields = {"tokenizer_class": "GPT2Tokenizer", "eos_token": tokenizer.END_OF_TEXT}
    (folder / "tokenizer_config.json").write_text(json.dumps(fields))


@pytest.mark.parametrize(("name", "model"), [("llama3-8b", LLAMA), ("gpt2", GPT2), ("qwen2.5-7b", GPT2)])
def test_the_name_of_a_directory_decides_nothing(
    saved: Callable[..., Path], tmp_path: Path, name: str, model: dict[str, Any]
) -> None:
    folder = saved(tmp_path / name, model)
    config = build_config({"model": {"from": str(folder)}})
    plain = build_config({"model": {"from": str(shutil.copytree(folder, tmp_path / "plain"))}})
    assert config.model.model_dump(exclude={"name"}) == plain.model.model_dump(exclude={"name"})
    assert config.model.model_dump(exclude={"name"})["rope_scaling"] is None
    # Nor when the run is resumed from the config that it saved.
    (tmp_path / "config.toml").write_text(config.to_toml(), encoding="utf-8")
    assert load_config(tmp_path / "config.toml").model == config.model


@needs_transformers
def test_a_converted_tokenizer_ends_where_its_model_stops(saved: Callable[..., Path], tmp_path: Path) -> None:
    folder = saved(tmp_path / "model")
    in_parts(folder)
    (folder / "generation_config.json").write_text('{"eos_token_id": [7, 0]}')
    assert tokenizer.load(folder).ends == {0, 7}


@needs_transformers
@pytest.mark.parametrize("named", ["LlamaTokenizer", "BertTokenizer"])
def test_files_of_another_tokenizer_than_the_named_one_are_refused(
    saved: Callable[..., Path], tmp_path: Path, named: str
) -> None:
    """Without its own files a class makes a tokenizer of special tokens alone, to which every text is empty."""
    folder = saved(tmp_path / "model")
    in_parts(folder)
    fields = {"tokenizer_class": named, "eos_token": tokenizer.END_OF_TEXT}
    (folder / "tokenizer_config.json").write_text(json.dumps(fields))
    with pytest.raises(UserError, match=r"could not be converted \(the tokenizer's class reads other files"):
        tokenizer.load(folder)


@needs_transformers
def test_vocabulary_and_merges_make_the_same_tokens(
    saved: Callable[..., Path], tmp_path: Path, ironlaw_here: Callable[..., tuple[int, str, str]],
    tiny_file: Callable[..., Path],
) -> None:  # fmt: skip
    folder = saved(tmp_path / "model")
    before = tokenizer.load(folder)
    in_parts(folder)
    after = tokenizer.load(build_config({"model": {"from": str(folder)}}).data.tokenizer or "")
    text = "def value(self):\n    return  'Grüße', 123 "
    assert after.encode(text) == before.encode(text) and after.decode(after.encode(text)) == text
    assert (after.vocab, after.end_of_text) == (before.vocab, before.end_of_text)
    student = tiny_file(train={"steps": 2, "sequence": 8})
    code, _, messages = ironlaw_here("distil", student, "--teacher", folder, "--out", "student")
    assert code == 0, messages
    assert tokenizer.load(tmp_path / "student").encode(text) == before.encode(text)  # the teacher's, not one of its own


def test_a_directory_whose_tokenizer_cannot_be_had_is_refused(
    saved: Callable[..., Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
    ironlaw_here: Callable[..., tuple[int, str, str]], tiny_document: Callable[..., dict[str, Any]],
) -> None:  # fmt: skip
    folder = saved(tmp_path / "model")
    in_parts(folder)
    with monkeypatch.context() as patch:
        patch.setattr(tokenizer.importlib.util, "find_spec", lambda name: None)
        with pytest.raises(UserError, match=r"no tokenizer.json, and vocab.json and merges.txt need transf") as error:
            tokenizer.load(folder)
    assert "\n" not in str(error.value)
    (folder / "merges.txt").unlink()
    with pytest.raises(UserError, match="has no tokenizer"):  # a vocabulary without merges would make single letters
        tokenizer.load(folder)
    (folder / "vocab.json").unlink()
    config = tmp_path / "config.toml"
    config.write_text(build_config(tiny_document() | {"model": {"from": str(folder)}}).to_toml(), encoding="utf-8")
    code, _, messages = ironlaw_here("train", config, "--out", "run")
    assert code == 2 and "has no tokenizer" in messages and "data.tokenizer" in messages
    assert not (tmp_path / "run").exists()
    (folder / "tokenizer.model").write_bytes(b"no sentencepiece")
    with pytest.raises(UserError, match=r"tokenizer.model could not be converted|need transformers") as error:
        tokenizer.load(folder)
    assert "\n" not in str(error.value)


@needs_transformers
@pytest.mark.parametrize("model", [GPT2, LLAMA])
def test_a_directory_continues_text_as_transformers_does(
    saved: Callable[..., Path], tmp_path: Path, ironlaw_here: Callable[..., tuple[int, str, str]], model: dict[str, Any]
) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    folder = saved(tmp_path / "model", model)
    code, out, messages = ironlaw_here(
        "generate", folder, "--prompt", "def value", "--tokens", "12", "--temperature", "0", "--json"
    )
    assert code == 0, messages
    theirs, words = AutoModelForCausalLM.from_pretrained(folder), AutoTokenizer.from_pretrained(folder)
    prompt = words("def value", return_tensors="pt")
    made = theirs.generate(**prompt, max_new_tokens=12, do_sample=False)[0, prompt["input_ids"].shape[1] :]
    assert json.loads(out)["text"] == words.decode(made, skip_special_tokens=True)
    assert "step" not in json.loads(out)
