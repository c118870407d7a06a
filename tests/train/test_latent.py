"""A small DeepSeek-V3 from config to text: planned, trained, sampled from, exported, and trained on from the export."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from ironlaw.config import build_config, load_config
from ironlaw.model.huggingface.configs import read_config
from ironlaw.model.huggingface.weights import check_weights, load_weights
from ironlaw.model.transformer import Transformer
from ironlaw.train.checkpoint import newest_of
from ironlaw.train.restore import load_for_inference

MODEL: dict[str, Any] = {
    "layers": 3, "hidden": 32, "heads": 4, "ffn": 64, "gated_ffn": True, "activation": "silu", "norm": "rmsnorm",
    "norm_eps": 1e-6, "positions": "rope", "bias": False, "tied": False, "context": 64, "vocab": 300,
    "rope_scaling": {
        "factor": 4.0, "beta_fast": 32.0, "beta_slow": 1.0, "original_context": 16.0, "mscale": 1.0,
        "mscale_all_dim": 1.0,
    },
    "latent": {"query_rank": 24, "key_value_rank": 16, "plain_size": 8, "rotary_size": 4, "value_size": 8},
    "moe": {
        "experts": 8, "experts_per_token": 2, "expert_ffn": 24, "shared_experts": 1, "dense_layers": 1,
        "score": "sigmoid", "groups": 4, "groups_per_token": 2, "routed_scale": 2.5, "balance": "bias",
    },
}  # fmt: skip


def test_from_config_to_text_and_back(
    tiny_document: Callable[..., dict[str, Any]], ironlaw_here: Callable[..., tuple[int, str, str]], tmp_path: Path
) -> None:
    config = tmp_path / "config.toml"
    config.write_text(build_config(tiny_document(MODEL)).to_toml(), encoding="utf-8")
    code, out, messages = ironlaw_here("plan", config, "--json")
    assert code == 0, messages
    assert json.loads(out)
    assert ironlaw_here("train", config, "--out", "run")[0] == 0
    losses = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    losses = [line["loss"] for line in losses if "loss" in line]
    assert losses[-1] < losses[0]
    code, out, messages = ironlaw_here("generate", "run", "--prompt", "def ", "--tokens", "8")
    assert code == 0 and out, messages
    assert ironlaw_here("export", "run", "there", "--to", "hf")[0] == 0
    assert json.loads((tmp_path / "there" / "config.json").read_text())["model_type"] == "deepseek_v3"

    ours = load_for_inference(newest_of(tmp_path / "run"), load_config(tmp_path / "run").model)
    again = read_config(tmp_path / "there")
    check_weights(tmp_path / "there", again)
    theirs = Transformer(again).eval()
    load_weights(tmp_path / "there", theirs, again)
    tokens = torch.randint(0, MODEL["vocab"], (2, 40))
    with torch.no_grad():
        torch.testing.assert_close(theirs(tokens), ours.eval()(tokens))
    document = tiny_document() | {"model": {"from": str(tmp_path / "there")}}
    config.write_text(build_config(document).to_toml(), encoding="utf-8")
    assert ironlaw_here("train", config, "--out", "second", "--set", "train.steps=2")[0] == 0
