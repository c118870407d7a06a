"""GGUF files: read back by the package's own reader and by transformers, they hold our numbers and our tokens."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tokenizers import Tokenizer
from transformers import AutoModelForCausalLM, AutoTokenizer

from ironlaw.data import tokenizer as tokenizers
from ironlaw.errors import UserError
from ironlaw.model.config import ModelConfig
from ironlaw.model.gguf import check_gguf, tokenizer_fields, write_gguf
from ironlaw.model.transformer import Transformer

from ..conftest import TINY_GPT, TINY_LLAMA

gguf = pytest.importorskip("gguf")

QWEN3 = TINY_LLAMA | {"qk_norm": True, "head_size": 128}  # transformers passes over the file's own size of heads
STARCODER2 = TINY_GPT | {"positions": "rope"}
LLAMA31 = TINY_LLAMA | {
    "context": 64,
    "rope_scaling": {"factor": 4.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_context": 64},
}
MODELS = {
    "llama": TINY_LLAMA, "qwen2": TINY_LLAMA | {"qkv_bias": True}, "qwen3": QWEN3,
    "gpt2": TINY_GPT | {"context": 1024}, "starcoder2": STARCODER2,
}  # fmt: skip


def model_of(fields: dict[str, Any]) -> Transformer:
    torch.manual_seed(0)
    model = Transformer(ModelConfig(**fields)).eval()
    with torch.no_grad():
        for parameter in model.parameters():  # biases and norms too: a tensor left out must show
            parameter.add_(0.1 * torch.randn_like(parameter))
    return model


def read(file: Path) -> dict[str, np.ndarray]:
    """Every tensor, dequantised by the package."""
    return {t.name: gguf.quants.dequantize(t.data, t.tensor_type) for t in gguf.GGUFReader(file).tensors}


@pytest.fixture(scope="module")
def tokenizer(corpus: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("tokenizer") / "tokenizer.json"
    tokenizers.train([file.read_text(encoding="utf-8") for file in corpus.iterdir()], 290, path)
    return path


@pytest.mark.parametrize("name", MODELS)
def test_transformers_reads_the_same_logits_and_tokens(name: str, tokenizer: Path, tmp_path: Path) -> None:
    model = model_of(MODELS[name])
    write_gguf(tmp_path / "model.gguf", model.config, model.state_dict(), "fp32", tokenizer=tokenizer, end=0)
    theirs = AutoModelForCausalLM.from_pretrained(tmp_path, gguf_file="model.gguf", dtype=torch.float32).eval()
    tokens = torch.randint(0, 300, (2, 16))
    with torch.no_grad():
        assert torch.allclose(theirs(tokens).logits, model(tokens), atol=2e-4), name
    text = "def value(self): return 3.14"
    read_back = AutoTokenizer.from_pretrained(tmp_path, gguf_file="model.gguf")
    assert read_back.encode(text, add_special_tokens=False) == Tokenizer.from_file(str(tokenizer)).encode(text).ids


def test_llama_3_1s_frequencies_are_those_of_the_model(tmp_path: Path) -> None:
    model = model_of(LLAMA31)  # transformers does not read them from here, llama.cpp does
    write_gguf(tmp_path / "model.gguf", model.config, model.state_dict())
    divisors = torch.from_numpy(read(tmp_path / "model.gguf")["rope_freqs.weight"].copy())
    plain = model.config.rope_theta ** (-torch.arange(4) / 4)
    assert divisors.max() == 4.0 and divisors.min() == 1.0
    assert torch.allclose(plain / divisors, torch.atan2(model.rotary_sin[1], model.rotary_cos[1]))


def test_eight_and_four_bits_are_as_near_as_their_scales_allow(tmp_path: Path) -> None:
    model = model_of(TINY_LLAMA | {"hidden": 64, "ffn": 96})
    for dtype in ("fp32", "q8_0", "q4_0"):
        write_gguf(tmp_path / f"{dtype}.gguf", model.config, model.state_dict(), dtype)
    exact, eight, four = (read(tmp_path / f"{dtype}.gguf") for dtype in ("fp32", "q8_0", "q4_0"))
    for name, tensor in exact.items():
        if tensor.ndim == 1:
            assert np.array_equal(eight[name], tensor) and np.array_equal(four[name], tensor)
            continue
        largest = np.abs(tensor.reshape(len(tensor), -1, 32)).max(-1).repeat(32).reshape(tensor.shape)
        assert (np.abs(eight[name] - tensor) <= largest / 127 * 0.57).all()
        off = np.abs(four[name] - tensor) / largest
        ends = name in ("token_embd.weight", "output.weight")
        assert off.max() <= (0.005 if ends else 0.126) and (ends or off.max() > 0.05)


@pytest.mark.parametrize("dtype", ["fp16", "q8_0", "q4_0"])
def test_numbers_beyond_fp16_are_refused(dtype: str, tmp_path: Path) -> None:
    model = model_of(TINY_LLAMA)
    model.get_parameter("blocks.0.attention.out.weight").data[0, 0] = 1e8  # a scale of Q8_0 and Q4_0 is fp16, too
    with pytest.raises(UserError, match=r"o_proj.weight has numbers too large for .*: export it with --dtype bf16"):
        write_gguf(tmp_path / "model.gguf", model.config, model.state_dict(), dtype)
    write_gguf(tmp_path / "wide.gguf", model.config, model.state_dict(), "bf16")


def test_what_llama_cpp_does_not_compute_is_refused(tokenizer: Path, tmp_path: Path) -> None:
    for fields, told in (
        (TINY_GPT | {"activation": "gelu"}, "gelu_tanh"),
        (TINY_LLAMA | {"sliding_window": 8}, "sliding window"),
        (TINY_GPT | {"positions": "rope", "parallel_norms": 2}, "use --to hf"),
        (STARCODER2 | {"rotary_size": 4}, "turns whole heads, here 4 of"),
        (STARCODER2 | {"bias": False}, "biases in all linear layers"),
        (TINY_LLAMA | {"qkv_bias": True, "head_size": 16}, "as wide together as the model"),
        (LLAMA31 | {"qkv_bias": True}, "as Llama 3.1's in a Llama"),  # llama.cpp loads none of the last three
    ):
        with pytest.raises(UserError, match=told):
            check_gguf(ModelConfig(**fields))
    document = json.loads(tokenizer.read_text())
    document["pre_tokenizer"] = {"type": "Whitespace"}
    other = tmp_path / "tokenizer.json"
    other.write_text(json.dumps(document))
    with pytest.raises(UserError, match="byte-level BPE"):
        tokenizer_fields(other, 300)
