"""The plan's FLOPs are PyTorch's own, to the last unit.

The counter runs on the meta device with the math attention, because it counts nothing for the CPU's fused kernel.
It counts masked scores too; the plan does not: `unmasked` puts them back.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode
from workload_cases import FAMILIES, LATENT, MOE

from ironlaw.catalog.models import model_names
from ironlaw.config import build_config
from ironlaw.ledger import Phase
from ironlaw.machine.profile import Profile
from ironlaw.model.config import ModelConfig
from ironlaw.model.transformer import Transformer
from ironlaw.plan.step import plan_run
from ironlaw.workload.blocks import Shape, attention_score_pairs
from ironlaw.workload.operations import total_flops
from ironlaw.workload.program import training_operations

GPT: dict[str, Any] = {"layers": 3, "hidden": 48, "heads": 4, "vocab": 101, "context": 40}
LLAMA: dict[str, Any] = GPT | {
    "kv_heads": 2, "ffn": 72, "gated_ffn": True, "activation": "silu", "norm": "rmsnorm", "positions": "rope",
    "bias": False, "tied": False,
}  # fmt: skip
CASES: dict[str, dict[str, Any]] = (
    {
        "gpt": GPT,
        "gpt untied": GPT | {"tied": False},
        "gpt without biases": GPT | {"bias": False},
        "gpt qkv bias only": GPT | {"bias": False, "qkv_bias": True},
        "gpt grouped": GPT | {"kv_heads": 1},
        "gpt gated": GPT | {"gated_ffn": True, "ffn": 56},
        "llama": LLAMA,
        "llama tied": LLAMA | {"tied": True},
        "llama all heads": LLAMA | {"kv_heads": 4},
        "llama with biases": LLAMA | {"bias": True},
        "qwen": LLAMA | {"qk_norm": True, "head_size": 20},
        "windowed": LLAMA | {"sliding_window": 9},
        "olmoe": LLAMA | {"qk_norm": True, "qk_norm_whole": True, "moe": MOE["mixtral"]},
        "experts of two matrices": GPT | {"bias": False, "moe": MOE["sparse at times"]},
    }
    | {name: LLAMA | {"moe": table} for name, table in MOE.items()}
    | {name: LLAMA | table for name, table in LATENT.items()}
)
CASES |= {name: GPT | family for name, family in FAMILIES.items()}


def counted(config: ModelConfig, batch: int, sequence: int) -> tuple[int, int]:
    """Forward and backward FLOPs by PyTorch's counter."""
    with torch.device("meta"):
        model = Transformer(config)
        tokens = torch.zeros(batch, sequence, dtype=torch.long)
    with sdpa_kernel(SDPBackend.MATH):
        with FlopCounterMode(display=False) as forward:
            loss = model(tokens, tokens)
        with FlopCounterMode(display=False) as backward:
            loss.backward()
    return forward.get_total_flops(), backward.get_total_flops()


def planned(config: ModelConfig, batch: int, sequence: int) -> tuple[int, int]:
    """The same from the operations, with the masked attention scores put back."""
    flops = {Phase.FORWARD: 0, Phase.BACKWARD: 0}
    for op in training_operations(Shape(config, batch, sequence)):
        own = (op.flops or 0) * op.repeat
        if op.attention is not None:
            scores = batch * config.heads * sequence**2
            assert own * scores % op.elements == 0
            own = own * scores // op.elements
        flops[op.phase] += own
    return flops[Phase.FORWARD], flops[Phase.BACKWARD]


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize(("batch", "sequence"), [(3, 40), (1, 17)])
def test_flops_equal_the_counter(name: str, batch: int, sequence: int) -> None:
    config = ModelConfig(**CASES[name])
    assert planned(config, batch, sequence) == counted(config, batch, sequence)


@pytest.mark.parametrize("name", model_names())
def test_catalogued_models_too(name: str) -> None:
    # Two layers tell everything that 126 do, and the counter takes minutes for those.
    config = ModelConfig.named(name)
    config = config.model_copy(update={"layers": 2 if config.moe is None else config.moe.dense_layers + 2})
    assert planned(config, 1, 512) == counted(config, 1, 512)


def test_reduced_precision_changes_no_flops() -> None:
    config = ModelConfig(**LLAMA)
    fp32, bf16 = (training_operations(Shape(config, 2, 16, precision)) for precision in ("fp32", "bf16"))
    assert total_flops(fp32) == total_flops(bf16)


@pytest.mark.parametrize("window", [None, 1, 5, 16, 40])
@pytest.mark.parametrize("sequence", [1, 5, 16])
def test_score_pairs_are_twice_those_that_the_mask_lets_through(sequence: int, window: int | None) -> None:
    """Less one per query whose window is not full yet: a causal mask is planned as exactly half of all scores."""
    span = min(window or sequence, sequence)
    visible = sum(1 for q in range(sequence) for k in range(q + 1) if q - k < span)
    assert attention_score_pairs(sequence, window) == 2 * visible - span


def test_the_plan_gives_both_conventions(machine_profile: Profile) -> None:
    document = {"model": GPT, "train": {"global_batch": 6, "micro_batch": 2, "sequence": 32, "precision": "fp32"}}
    totals = plan_run(build_config(document), machine_profile).totals
    forward, backward = counted(ModelConfig(**GPT), 6, 32)
    assert totals["flops_per_step_unmasked"].value == forward + backward
    attention = 3 * 3 * 6 * 48 * 4 * 32**2  # layers, forward and twice backward, batch, width, QK and PV, scores
    assert totals["flops_per_step"].value == forward + backward - attention // 2
