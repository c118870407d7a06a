"""Every key of a family's config, changed: our logits are those of `transformers`, or it is refused. Minutes."""

from __future__ import annotations

import copy
import importlib.util
import json
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parent))  # for `huggingface_cases`
from huggingface_cases import OWN_NAMES, SMALL, TINY

from ironlaw.errors import UserError
from ironlaw.model.huggingface.configs import from_fields
from ironlaw.model.huggingface.weights import check_weights, load_weights
from ironlaw.model.transformer import Transformer

os.environ.setdefault("HF_HUB_OFFLINE", "1")  # read when transformers is imported: nothing here needs the network
pytestmark = [
    pytest.mark.long, pytest.mark.timeout(600),
    pytest.mark.skipif(importlib.util.find_spec("transformers") is None, reason="transformers is not installed"),
]  # fmt: skip
NOT_ARITHMETIC = ("model_type", "vocab_size", "_id", "initializer", "output_", "max_position", "n_positions", "seq")
ELSEWHERE: dict[str, Any] = {  # keys that some families read, and a file of any may have
    "head_dim": 8, "attention_bias": False, "mlp_bias": False, "tie_word_embeddings": False, "sliding_window": None,
    "partial_rotary_factor": 1.0, "num_key_value_heads": 2, "use_qk_norm": False, "logit_scale": 1.0,
    "final_logit_softcapping": None, "attn_logit_softcapping": None, "clip_qkv": None, "is_causal": True,
    "rope_theta": 1e4, "layer_types": ["full_attention"] * 3, "rope_scaling": None,
}  # fmt: skip
SCALINGS: list[Any] = [
    {"rope_type": "linear", "factor": 2.0}, {"rope_type": "dynamic", "factor": 2.0},
    {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16, "mscale_all_dim": 0.7},
    {"rope_type": "llama3", "factor": 4.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
     "original_max_position_embeddings": 16},
]  # fmt: skip


def others(key: str, value: Any) -> list[Any]:
    if key in ("rope_scaling", "rope_parameters"):
        return SCALINGS
    if isinstance(value, bool):
        return [not value]
    if isinstance(value, str):
        return ["relu", "gelu", "silu", "quick_gelu", "sigmoid", "greedy"]
    if isinstance(value, list):
        return [value[::-1], ["sliding_attention"] * len(value)]
    if value is None:
        return [True, 1, 8, 0.5]
    return [0, 1, 2 * value, None] if isinstance(value, int) else [0.5, 2 * value, None]


def changed(kind: str, fields: dict[str, Any]) -> Iterator[tuple[str, dict[str, Any]]]:
    from transformers import AutoConfig

    whole = json.loads(AutoConfig.for_model(kind, **copy.deepcopy(fields)).to_json_string(use_diff=False))
    for key, value in (ELSEWHERE | whole | fields).items():
        if not any(part in key for part in NOT_ARITHMETIC):
            for other in others(key, value) if not isinstance(value, dict) or key.startswith("rope") else ():
                yield f"{key} = {other}", fields | {key: other}


@pytest.mark.parametrize("name", TINY)
def test_every_key_is_honoured_or_refused(name: str, tmp_path: Path) -> None:
    from transformers import AutoConfig, AutoModelForCausalLM

    kind = name.split()[0]
    tokens, wrong, equal = torch.randint(1, 60, (2, 40), generator=torch.Generator().manual_seed(0)), [], 0
    base = TINY[name] if kind in OWN_NAMES else SMALL | TINY[name]
    rope: dict[str, Any] = {
        "cohere": {"rope_theta": 1e4},
        "olmo3": {"rope_theta": 5e5},
    }  # a file of theirs must have it
    for change, fields in changed(kind, base | rope.get(kind, {})):
        try:
            config = from_fields(fields | {"model_type": kind})
        except UserError:
            continue
        try:
            theirs = AutoModelForCausalLM.from_config(
                AutoConfig.for_model(kind, **copy.deepcopy(fields)), attn_implementation="eager"
            ).eval()
            with torch.no_grad():
                for parameter in theirs.parameters():
                    parameter.add_(torch.randn_like(parameter) * 0.1)
                logits = theirs(tokens).logits
        except Exception:  # of any kind: no model of theirs
            continue
        theirs.save_pretrained(tmp_path)
        try:
            check_weights(tmp_path, config)
            ours = Transformer(config).eval()
            load_weights(tmp_path, ours, config)
        except UserError:
            continue
        with torch.no_grad():
            if float((ours(tokens) - logits).abs().max()) <= 2e-4 * float(logits.abs().max()):
                equal += 1
            elif bool(logits.isfinite().all()):
                wrong.append(change)
    assert not wrong and equal > 10
