"""A pass of an engine has the FLOPs of PyTorch's counter on a model with a cache of keys and values."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from ironlaw.model.config import ModelConfig
from ironlaw.model.transformer import Transformer
from ironlaw.serve.loading import LoadedModel
from ironlaw.serve.request import Request, SamplingParams
from ironlaw.serve.runner import Runner, RunnerWork, kv_bytes_per_token
from ironlaw.workload.program import Program
from ironlaw.workload.serving import Chunk, forward_pass, scores

SIZES: dict[str, Any] = {
    "name": "llama", "layers": 3, "hidden": 48, "heads": 4, "kv_heads": 2, "ffn": 72, "vocab": 101, "context": 128,
    "gated_ffn": True, "activation": "silu", "norm": "rmsnorm", "positions": "rope", "bias": False, "tied": False,
}  # fmt: skip
LLAMA = ModelConfig(**SIZES)


class WithCache:
    """A public implementation of the same model, with its own cache, on tensors without memory."""

    def __init__(self, sequences: int) -> None:
        transformers = pytest.importorskip("transformers")
        sizes = transformers.LlamaConfig(
            num_hidden_layers=3, hidden_size=48, num_attention_heads=4, num_key_value_heads=2, intermediate_size=72,
            vocab_size=101, attn_implementation="sdpa",
        )  # fmt: skip
        with torch.device("meta"):
            self.model = transformers.LlamaForCausalLM(sizes).eval()
        self.cache, self.sequences, self.cached = transformers.DynamicCache(), sequences, 0

    def flops(self, tokens: int) -> int:
        """Of a pass over new tokens, which the cache has afterwards; every score counts, masked or not."""
        given = torch.zeros(self.sequences, tokens, dtype=torch.long, device="meta")
        at = torch.arange(self.cached, self.cached + tokens, device="meta")
        seen = torch.ones(self.sequences, 1, tokens, self.cached + tokens, dtype=torch.bool, device="meta")
        with torch.no_grad(), sdpa_kernel(SDPBackend.MATH), FlopCounterMode(display=False) as counter:
            self.model(
                given, past_key_values=self.cache, use_cache=True, position_ids=at[None], attention_mask=seen,
                logits_to_keep=1,
            )  # fmt: skip
        self.cached += tokens
        return counter.get_total_flops()


def unmasked(program: Program, all_scores: int) -> int:
    """FLOPs with every score counted, as the counter does."""
    attention = [op for op, times in program.operations() for _ in range(times) if op.attention is not None]
    masked = sum(op.flops or 0 for op in attention)
    return (
        program.flops()
        - masked
        + masked * all_scores * LLAMA.layers * LLAMA.heads // sum(op.elements for op in attention)
    )


def test_prefill_chunks_of_it_and_decoding_have_the_counters_flops() -> None:
    counted = WithCache(sequences=3)
    assert unmasked(forward_pass(LLAMA, [Chunk(20)] * 3), 3 * 20 * 20) == counted.flops(20)
    assert unmasked(forward_pass(LLAMA, [Chunk(12, 20)] * 3), 3 * 12 * 32) == counted.flops(12)
    # A single query sees all that is there: nothing is masked.
    assert forward_pass(LLAMA, [Chunk(1, 32)] * 3).flops() == counted.flops(1)


def test_chunks_of_a_prompt_compute_what_the_whole_prompt_does_but_for_logits() -> None:
    def attention(program: Program) -> int:
        return sum((op.flops or 0) * times for op, times in program.operations() if op.attention is not None)

    whole = forward_pass(LLAMA, [Chunk(64)] * 1)
    parts = [forward_pass(LLAMA, [Chunk(16, done)] * 1) for done in range(0, 64, 16)]
    assert attention(whole) == sum(map(attention, parts))
    head = 2 * LLAMA.hidden * LLAMA.vocab
    assert sum(part.flops() for part in parts) - 3 * head == whole.flops()


def test_one_pass_takes_sequences_of_many_lengths() -> None:
    mixed = forward_pass(LLAMA, [Chunk(16, 32), Chunk(1, 7), Chunk(1, 90)])
    apart = [
        forward_pass(LLAMA, [Chunk(16, 32)] * 1),
        forward_pass(LLAMA, [Chunk(1, 7)] * 1),
        forward_pass(LLAMA, [Chunk(1, 90)] * 1),
    ]
    assert mixed.flops() == sum(one.flops() for one in apart)


def test_a_window_limits_scores() -> None:
    for tokens, cached, window in [(5, 0, 3), (4, 9, 6), (7, 2, 4), (1, 30, 8), (6, 1, 50)]:
        expected = sum(min(window, cached + i + 1) for i in range(tokens))
        assert scores(Chunk(tokens, cached), window) == expected


def test_nothing_waits_for_a_backward_pass_and_everything_dies() -> None:
    for layer in forward_pass(LLAMA, [Chunk(1, 10)] * 4).stages[0].layers:
        assert not any(op.saved_bytes or op.gradient_bytes for op in layer.forward) and not layer.backward
        assert sum(op.temporary_bytes - op.frees_temporary_bytes for op in layer.forward) == 0


LATENT = {"query_rank": 20, "key_value_rank": 12, "plain_size": 8, "rotary_size": 6, "value_size": 10}


@pytest.mark.parametrize(
    "more",
    [{}, {"moe": {"experts": 4, "experts_per_token": 2}}, {"kv_heads": 4, "latent": LATENT}],
    ids=["dense", "experts", "latent"],
)
def test_our_own_engine_computes_what_is_planned(more: dict[str, Any]) -> None:
    """Pages and rows are full, so that nothing is computed twice or for nobody."""
    model = ModelConfig(**SIZES | more)
    cpu = torch.device("cpu")
    served = LoadedModel("", Transformer(model).eval(), cpu, "fp32", "fp32", 1)
    runner = Runner(served, [0] * model.layers, 40, 8, compiles=False)
    for tokens, cached, sequences in ((1, 47, 4), (16, 16, 2), (64, 16, 2), (16, 0, 2)):
        work = [
            RunnerWork(
                Request([0], SamplingParams(), blocks=[list(range(10 * n + 1, 10 * n + 11))]), [1] * tokens, cached, 1
            )
            for n in range(sequences)
        ]
        with sdpa_kernel(SDPBackend.MATH), FlopCounterMode(display=False) as counter:
            runner.run(work)
        planned = forward_pass(model, [Chunk(tokens, cached)] * sequences, precision="fp32")
        seen, every = scores(Chunk(tokens, cached), None), tokens * (tokens + cached)
        attention = sum((op.flops or 0) * times for op, times in planned.operations() if op.attention is not None)
        assert planned.flops() - attention + attention * every // seen == counter.get_total_flops()
    assert kv_bytes_per_token(model, "fp32") == 4 * model.cached_size


def test_a_small_batch_reads_the_experts_that_it_touches() -> None:
    model = ModelConfig(**SIZES | {"moe": {"experts": 64, "experts_per_token": 2}})
    few, many = (
        next(op for op, _ in forward_pass(model, [Chunk(1, 8)] * sequences).operations() if op.name == "expert_up")
        for sequences in (1, 1000)
    )
    assert (few.batch, few.matmul[0], many.batch) == (2, 1, 64) and few.bytes_moved < many.bytes_moved / 20
