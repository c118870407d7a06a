"""A decoder block in one compiled call gives what its modules give, in every format of the weights."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parent))  # for `serving`
from serving import engine

from ironlaw.model.cached import DecodeTokens, LayerCache, Pages
from ironlaw.model.config import ModelConfig
from ironlaw.model.transformer import Transformer
from ironlaw.serve.config import ServeConfig
from ironlaw.serve.loading import prepare
from ironlaw.serve.request import Request, SamplingParams
from ironlaw.serve.runner import RunnerWork

LLAMA = {
    "layers": 2, "hidden": 32, "heads": 4, "kv_heads": 2, "ffn": 48, "gated_ffn": True, "activation": "silu",
    "norm": "rmsnorm", "positions": "rope", "bias": False, "tied": False, "vocab": 70, "context": 64,
}  # fmt: skip
FORMS: dict[str, dict[str, Any]] = {
    "llama": {}, "biases, no gate, no positions": {
        "bias": True, "gated_ffn": False, "activation": "relu2", "positions": "none", "kv_heads": 4,
    },
    "GPT-2": {
        "bias": True, "gated_ffn": False, "activation": "gelu_tanh", "norm": "layernorm", "positions": "learned",
    },
    "GPT-NeoX": {
        "bias": True, "gated_ffn": False, "activation": "gelu", "norm": "layernorm", "parallel_norms": 2,
        "rotary_size": 4,
    },
    "one norm for both branches": {"norm": "layernorm", "norm_bias": False, "parallel_norms": 1, "positions": "alibi"},
    "window, sinks, part of a head turns": {"sliding_window": 5, "attention_sinks": True, "rotary_size": 4},
}  # fmt: skip


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize(("weights", "error"), [("fp32", 1e-5), ("bf16", 0.03), ("int8", 1e-5)])
def test_a_compiled_block_is_its_modules(weights: str, error: float, form: str) -> None:
    torch.manual_seed(4)
    model = Transformer(ModelConfig(**LLAMA | FORMS[form])).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.1)
    made = engine(prepare(model, ServeConfig(device="cpu", weights=weights), "tiny"))
    runner = made.runner
    if runner.blocks is None:
        assert runner.native is None or runner.native.block is None  # else a form that it does not know
        pytest.skip("this processor does not multiply it, or there is no C compiler")
    requests = [Request([3], SamplingParams(), blocks=[[] for _ in made.blocks.windows]) for _ in range(3)]
    for request in requests:
        made.blocks.extend(request, made.blocks.needed(request, 24))
    for start, count in ((0, 20), (20, 1), (21, 3)):  # a prompt, a token, and a token with two drafted ones
        work = [RunnerWork(r, [(7 * p + n) % 70 for p in range(start, start + count)], start, count)
                for n, r in enumerate(requests)]  # fmt: skip
        whole, _ = runner.run(work)
        blocks, runner.blocks = runner.blocks, None
        apart, _ = runner.run(work)
        runner.blocks = blocks
        assert whole is not None and apart is not None
        assert (whole - apart).norm() <= error * apart.norm()


def test_a_model_is_not_read_in_a_type_that_it_is_not_held_in() -> None:
    model = Transformer(ModelConfig(**LLAMA)).eval()
    runner = engine(prepare(model, ServeConfig(device="cpu", weights="bf16"), "tiny")).runner
    with pytest.raises(ValueError, match="held in bf16: load it again"):
        prepare(model, ServeConfig(device="cpu", weights="fp32"), "tiny")
    if runner.native is None:
        pytest.skip("there is no C compiler")
    few = DecodeTokens(1, torch.zeros(1, 1).int(), torch.zeros(1).int(), torch.zeros(1).int())
    good, native, layer = torch.zeros(1, 4, 8).bfloat16(), runner.native, runner.caches[0].layer
    assert native.attend(layer, few.step, good).shape == (1, 4, 8)
    for bad in (good.float(), good.expand(2, 4, 8), good[:, :2], good[..., :4], good.transpose(1, 2).reshape(1, 8, 4)):
        with pytest.raises(ValueError, match="was called with"):
            native.attend(layer, few.step, bad)
    with pytest.raises(ValueError, match="was called with"):
        native.keep(layer, few.step, good[:, :2], good[:, :1])
    with pytest.raises(ValueError, match="not those that code is compiled for"):
        pages = Pages(2, 8, 2, (8, 8), native.store, torch.device("cpu"))
        LayerCache(model.config, pages, False, native)
