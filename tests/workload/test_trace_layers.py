"""A stack of which one layer of each kind runs has the rows of the whole stack; decoders by config are planned so."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import ironlaw.workload.trace as trace_of
from ironlaw.errors import UserError
from ironlaw.plan.memory import peak_memory
from ironlaw.plan.request import plan_request
from ironlaw.plan.request_types import Options
from ironlaw.workload.module_source import Input, causal_decoder
from ironlaw.workload.program import step_of_trace
from ironlaw.workload.trace import trace
from ironlaw.workload.trace_layers import longest_stack
from ironlaw.workload.trace_store import ModuleTrace

SIZES = {"hidden_size": 64, "intermediate_size": 96, "vocab_size": 128, "num_attention_heads": 4}
GROUPED = SIZES | {"num_key_value_heads": 2, "use_cache": False}
MAMBA2 = {"mamba_n_heads": 8, "mamba_d_head": 16, "mamba_d_state": 16, "mamba_n_groups": 1, "mamba_chunk_size": 16}
DECODERS: dict[str, dict[str, Any]] = {
    "mamba2": {"hidden_size": 64, "num_heads": 8, "head_dim": 16, "state_size": 16, "n_groups": 1, "chunk_size": 16,
               "vocab_size": 128, "num_hidden_layers": 5},
    "bamba": GROUPED | MAMBA2 | {"num_hidden_layers": 6, "attn_layer_indices": [2, 4]},
    "falcon_h1": GROUPED | MAMBA2 | {"num_hidden_layers": 4, "mamba_d_ssm": 64, "mamba_n_heads": 4},
    "nemotron_h": GROUPED | {"hybrid_override_pattern": "M-M*M-M-", "num_hidden_layers": 8, "mamba_num_heads": 8,
                             "mamba_head_dim": 16, "ssm_state_size": 16, "n_groups": 1, "chunk_size": 16,
                             "head_dim": 16},
    "jamba": GROUPED | {"num_hidden_layers": 8, "num_experts": 4, "num_experts_per_tok": 2, "attn_layer_period": 4,
                        "attn_layer_offset": 2, "mamba_d_state": 8, "mamba_dt_rank": 8, "use_mamba_kernels": False},
}  # fmt: skip


class Block(nn.Module):
    def __init__(self, width: int, wide: bool) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up, self.down = (
            nn.Linear(width, 4 * width if wide else width),
            nn.Linear(4 * width if wide else width, width),
        )

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(nn.functional.gelu(self.up(self.norm(x))))


class Stacked(nn.Module):
    def __init__(self, shared: bool = False) -> None:
        super().__init__()
        self.embedding, self.head = nn.Embedding(100, 64), nn.Linear(64, 100, bias=False)
        self.head.weight = self.embedding.weight
        self.norm = nn.LayerNorm(64)  # without it, the last layer's gradient is a view, and added out of place
        self.layers = nn.ModuleList(Block(64, wide=i % 3 == 2) for i in range(7))
        if shared:
            self.layers[3] = self.layers[0]

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens)
        for layer in self.layers:
            x = layer(x)
        return self.head(self.norm(x))


def same_rows(build: Callable[[], nn.Module], inputs: list[Input]) -> tuple[ModuleTrace, ModuleTrace]:
    whole, repeated = (trace(build, inputs, repeated=kind, real=False) for kind in (False, True))

    def rows(found: ModuleTrace) -> Counter[tuple[Any, ...]]:
        return Counter((op.phase, op.name, op.kernel, op.matmul, op.flops, op.bytes_moved) for op in found.operations)

    assert rows(whole) == rows(repeated)
    for name in ("saved_bytes", "gradient_bytes", "temporary_bytes"):
        assert sum(getattr(op, name) for op in whole.operations) == sum(getattr(op, name) for op in repeated.operations)
    peaks = [peak_memory(step_of_trace(found)) for found in (whole, repeated)]
    assert peaks[0].total == peaks[1].total
    assert whole.parameters == repeated.parameters
    return whole, repeated


def test_two_kinds_of_layers() -> None:
    stack = longest_stack(Stacked())
    assert stack is not None and stack.path == "layers" and stack.first == (0, 0, 2, 0, 0, 2, 0)
    same_rows(Stacked, [Input("tokens", (2, 16), "int64")])


def test_layers_that_share_weights_are_not_repeated() -> None:
    assert longest_stack(Stacked(shared=True)) is None
    same_rows(lambda: Stacked(shared=True), [Input("tokens", (2, 16), "int64")])


def decoder(kind: str) -> nn.Module:
    transformers = pytest.importorskip("transformers")
    config = transformers.AutoConfig.for_model(kind, **DECODERS[kind])
    config.use_cache = False
    module: nn.Module = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    return module


@pytest.mark.parametrize(
    "fields",
    [{"model_type": "mamba2", "num_hidden_layers": 10**9}, {"model_type": "jamba", "num_experts": 10**6},
     {"model_type": "qwen3_5", "text_config": {"num_hidden_layers": 10**9}}],
)  # fmt: skip
def test_no_more_layers_and_experts_are_built_than_can_be(fields: dict[str, Any], tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    (tmp_path / "config.json").write_text(json.dumps(fields))
    with pytest.raises(UserError, match=r"num_\w+ = 1,000,.*000, and a model that is traced has at most 1,000 of them"):
        causal_decoder(tmp_path)


@pytest.mark.parametrize("kind", [k if k == "bamba" else pytest.param(k, marks=pytest.mark.long) for k in DECODERS])
def test_recurrent_and_hybrid_decoders(kind: str) -> None:
    inputs = [Input(name, (2, 32), "int64") for name in ("input_ids", "labels")]
    _, repeated = same_rows(lambda: decoder(kind), inputs)
    assert repeated.parameters == sum(p.numel() for p in decoder(kind).parameters())


class Recurrence(nn.Module):
    """A loop over tokens, whose steps look back no further than `window` tokens."""

    def __init__(self, window: int) -> None:
        super().__init__()
        self.window, self.embedding, self.mix = window, nn.Embedding(50, 8), nn.Linear(8, 8)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens)
        state, states = torch.zeros_like(x[:, 0]), []
        for t in range(x.shape[1]):
            state = torch.sigmoid(state) * x[:, t]
            states.append(state)
        recent = torch.stack(states, 1)[:, -self.window :]
        return (self.mix(recent) @ recent.transpose(1, 2)).mean()


@pytest.mark.parametrize("window, short", [(1000, True), (97, False)])
def test_a_loop_over_tokens_is_known_from_short_sequences(
    window: int, short: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    inputs = [Input("tokens", (2, 100), "int64", "zeros")]
    whole = trace(lambda: Recurrence(window), inputs)
    traced = [0]

    def counted(*given: Any, **how: Any) -> Any:
        traced[0] += 1
        return original(*given, **how)

    original = trace_of.__dict__["_traced"]
    monkeypatch.setattr(trace_of, "_traced", counted)
    monkeypatch.setattr(trace_of, "MAX_KERNELS", 100)
    monkeypatch.setattr(trace_of, "MIN_EXTRAPOLATED_TOKENS", 10)
    found = trace(lambda: Recurrence(window), inputs, repeated=True)
    assert replace(found, assumptions=()) == whole
    assert traced == [5 if short else 1]  # too long, then four lengths; the whole where a window lies between


@pytest.fixture
def hybrid(tmp_path: Path) -> Path:
    transformers = pytest.importorskip("transformers")
    transformers.AutoConfig.for_model("bamba", **DECODERS["bamba"]).save_pretrained(tmp_path)
    return tmp_path


def test_a_hybrid_config_is_planned_by_tracing(hybrid: Path) -> None:
    answer = plan_request(str(hybrid / "config.json"), on="h200", options=Options(sequence=32))
    assert answer.fits
    assert answer.ledger.totals["parameters"].value == sum(p.numel() for p in decoder("bamba").parameters())
    assert [one["name"] for one in answer.more["assumed"]] == ["planned by", "global batch"]
    for asked, said in (({"engine": "nemo"}, "leave --engine out"), ({"precision": "fp8"}, "under autocast")):
        with pytest.raises(UserError, match=said):
            plan_request(str(hybrid), on="h200", options=Options(sequence=32, **asked))


def test_what_is_no_decoder_is_offered_tracing(tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    transformers.ViTConfig().save_pretrained(tmp_path)
    with pytest.raises(UserError, match=r"PACKAGE\.MODULE:FUNCTION --input"):
        plan_request(str(tmp_path), on="h200")
