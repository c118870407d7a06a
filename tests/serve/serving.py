"""Small models for tests of serving: as `transformers` builds them, and here."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).parents[1] / "model"))  # for `huggingface_cases`
from huggingface_cases import SMALL, TINY

from ironlaw.model.huggingface.configs import read_config
from ironlaw.model.huggingface.weights import load_weights
from ironlaw.model.transformer import Transformer
from ironlaw.serve.config import ServeConfig
from ironlaw.serve.engine import Engine
from ironlaw.serve.loading import LoadedModel, prepare
from ironlaw.serve.request import Request, SamplingParams

os.environ.setdefault("HF_HUB_OFFLINE", "1")

FAMILIES: dict[str, dict[str, Any]] = TINY | {
    "llama": {}, "mistral": {"sliding_window": 8}, "qwen3": {"head_dim": 8},
    "gpt2": {"n_layer": 3, "n_embd": 32, "n_head": 4, "n_positions": 64, "vocab_size": 70},
    "mixtral": {"num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": None},
    "olmoe": {"num_experts": 4, "num_experts_per_tok": 2, "num_key_value_heads": 4},
    "qwen3_moe": {"head_dim": 8, "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24},
    "deepseek_v3": {
        "num_key_value_heads": 4, "q_lora_rank": 20, "kv_lora_rank": 12, "qk_nope_head_dim": 8, "qk_rope_head_dim": 6,
        "v_head_dim": 10, "n_routed_experts": 4, "n_shared_experts": 1, "num_experts_per_tok": 2, "n_group": 2,
        "topk_group": 1, "moe_intermediate_size": 24, "first_k_dense_replace": 1,
    },
}  # fmt: skip
OWN_FIELDS = ("gptj", "mpt", "gpt2", "gpt_neo")  # families whose fields have names of their own


def theirs(name: str) -> Any:
    """A model of `transformers` with random weights, in evaluation mode."""
    from transformers import AutoConfig, AutoModelForCausalLM

    kind = name.split()[0]
    fields = AutoConfig.for_model(kind, **(FAMILIES[name] if kind in OWN_FIELDS else SMALL | FAMILIES[name]))
    torch.manual_seed(2)
    model = AutoModelForCausalLM.from_config(fields, attn_implementation="eager").eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.1)
    model.generation_config.eos_token_id = None
    model.generation_config.pad_token_id = 0
    return model


def ours(model: Any, folder: Path) -> Transformer:
    model.save_pretrained(folder)
    config = read_config(folder)
    here = Transformer(config).eval()
    load_weights(folder, here, config)
    return here


def engine(model: Transformer | LoadedModel, **settings: Any) -> Engine:
    """Small pages and steps, so that short prompts cross them."""
    device = os.environ.get("IRONLAW_TEST_DEVICE", "cpu")
    usual = {"block": 4, "token_budget": 24, "device": device, "blocks": 400}
    config = ServeConfig(**(usual | ({} if device == "cpu" else {"weights": "fp32"}) | settings))
    served = model if isinstance(model, LoadedModel) else prepare(model, config, "tiny")
    return Engine(served, config)


def greedy(count: int, **more: Any) -> SamplingParams:
    return SamplingParams(max_tokens=count, temperature=0, ignore_eos=True, **more)


def answers(requests: list[Request]) -> list[list[int]]:
    return [request.answer for request in requests]


def expected(model: Any, prompt: list[int], count: int) -> list[int]:
    """What `transformers.generate` answers, greedily."""
    with torch.no_grad():
        out = model.generate(
            torch.tensor([prompt]), attention_mask=torch.ones(1, len(prompt), dtype=torch.long), max_new_tokens=count,
            do_sample=False,
        )  # fmt: skip
    return out[0, len(prompt) :].tolist()


def write_server_directory(folder: Path, template: bool = True) -> Path:
    """A Hugging Face directory of a tiny Llama with a byte-level tokenizer and a chat template."""
    import json

    from ironlaw.data.tokenizer import train
    from ironlaw.model.config import ModelConfig
    from ironlaw.model.huggingface.weights import write_model, write_tokenizer

    folder.mkdir(parents=True, exist_ok=True)
    tokenizer = train(["def f(x): return x + 1\n" * 50, "the model serves the page"], 300, folder / "made.json")
    config = ModelConfig(
        layers=2, hidden=32, heads=4, kv_heads=2, ffn=48, gated_ffn=True, activation="silu", norm="rmsnorm",
        positions="rope", bias=False, tied=False, vocab=tokenizer.vocab, context=256,
    )  # fmt: skip
    torch.manual_seed(1)
    model = Transformer(config)
    write_model(folder, config, model.state_dict(), eos_token_id=tokenizer.end_of_text)
    write_tokenizer(folder, folder / "made.json", tokenizer.end_of_text_token, config.context)
    if template:
        fields = json.loads((folder / "tokenizer_config.json").read_text())
        fields["chat_template"] = (
            "{% for m in messages %}<|endoftext|>{{ m.role }}: {{ m.content }}\n{% endfor %}assistant:"
        )
        (folder / "tokenizer_config.json").write_text(json.dumps(fields))
    return folder
