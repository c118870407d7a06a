"""The program of adapters has PyTorch's own FLOPs, the bytes that are held, and the allocator's peak."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from micro_batch import highest, in_order
from torch.utils.flop_counter import FlopCounterMode
from workload_cases import LATENT, highest_allocated

from ironlaw.ledger import Kind
from ironlaw.model.config import ModelConfig
from ironlaw.model.huggingface.configs import names_of
from ironlaw.model.transformer import Transformer
from ironlaw.observe.measured import tree_bytes
from ironlaw.train.blocks import recompute_blocks
from ironlaw.train.finetune import add_adapters
from ironlaw.train.optimizer import build_optimizer
from ironlaw.workload.finetune import FinetuneConfig, adapters_of
from ironlaw.workload.optimizers import OptimizerConfig
from ironlaw.workload.program import Program, step
from ironlaw.workload.recipe import Recipe, StepBatch

NOWHERE = Path("none")  # no Hugging Face directory: names of the family that would be written
SEQUENCES, TOKENS = 4, 48
GPT: dict[str, Any] = {"layers": 3, "hidden": 64, "heads": 4, "vocab": 101, "context": 48}
LLAMA: dict[str, Any] = GPT | {
    "kv_heads": 2, "ffn": 96, "gated_ffn": True, "activation": "silu", "norm": "rmsnorm", "positions": "rope",
    "bias": False, "tied": False,
}  # fmt: skip
EXPERTS: dict[str, Any] = {"experts": 4, "experts_per_token": 2, "expert_ffn": 24}
MODELS = {"gpt": GPT, "llama": LLAMA, "llama of wide blocks": LLAMA | {"ffn": 700, "vocab": 60}}
OF_EXPERTS = {
    "mixtral": LLAMA | {"moe": EXPERTS},
    "shared experts": LLAMA | {"moe": EXPERTS | {"shared_experts": 1, "shared_ffn": 40, "shared_gate": True}},
    "deepseek": LLAMA | LATENT["latent with experts"],
}
ADAPTED = [
    *((name, method) for name in MODELS for method in ("lora", "dora", "qlora")),
    ("mixtral", "lora"), ("mixtral", "qlora"), ("shared experts", "dora"), ("deepseek", "lora"),
]  # fmt: skip
CASES: list[tuple[str, str, tuple[str, ...]]] = [
    *((name, method, ()) for name, method in ADAPTED),
    ("gpt", "qlora", ("wte",)), ("llama", "lora", ("lm_head",)), ("llama", "dora", ("embed_tokens", "lm_head")),
]  # fmt: skip


def both(
    name: str,
    method: str,
    precision: Any,
    targets: tuple[str, ...] = ("all-linear",),
    again: bool = False,
    ends: tuple[str, ...] = (),
) -> tuple[Transformer, Program]:
    config, finetune = (
        ModelConfig(**(MODELS | OF_EXPERTS)[name]),
        FinetuneConfig(method=method, rank=8, targets=targets, modules_to_save=ends),
    )
    policies = (frozenset[str](),) * config.layers if again else ()
    torch.manual_seed(0)
    model = Transformer(config)
    add_adapters(model, config, finetune, str(NOWHERE), precision)
    recompute_blocks(model.blocks, policies)
    adapters = adapters_of(config, names_of(NOWHERE, config), finetune)
    return model, step(
        config, StepBatch(SEQUENCES, TOKENS), recipe=Recipe(precision, recompute=policies, adapters=adapters)
    )


def once(model: Transformer, precision: str) -> None:
    tokens = torch.zeros(SEQUENCES, TOKENS, dtype=torch.long)
    with torch.autocast("cpu", dtype=torch.bfloat16, enabled=precision == "bf16"):
        loss = model(tokens, tokens)
    loss.backward()


def peaks(model: Transformer, program: Program, precision: str) -> tuple[float, int]:
    """Planned and allocated, of one forward and backward pass."""
    once(model, precision)  # caches and one-time buffers
    model.zero_grad(set_to_none=True)
    found = highest_allocated(lambda: once(model, precision))
    return highest(list(in_order(program.stages[0].layers))).total, found


@pytest.mark.parametrize(("name", "method", "ends"), CASES)
def test_flops_and_held_bytes_are_exact(name: str, method: str, ends: tuple[str, ...]) -> None:
    model, program = both(name, method, "fp32", ends=ends)
    with FlopCounterMode(display=False) as counter:
        once(model, "fp32")
    operations = program.stages[0].operations()
    # PyTorch's counter does not see fused attention on a CPU.
    products = sum((op.flops or 0) * times for op, times in operations if op.kind is not Kind.ATTENTION)
    assert products == counter.get_total_flops()
    optimizer = build_optimizer(model, OptimizerConfig())
    optimizer.step()
    held = {tensor.component: tensor.bytes for tensor in program.tensors[0]}
    assert held["weights"] == tree_bytes([*model.parameters(), *model.buffers()])
    assert held["optimizer"] == tree_bytes(list(optimizer.state.values()))
    gradients = sum(op.gradient_bytes for op in in_order(program.stages[0].layers))
    assert gradients == tree_bytes([p.grad for p in model.parameters()])


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize(("name", "method", "ends"), CASES)
def test_the_peak_is_the_allocators(name: str, method: str, ends: tuple[str, ...], precision: str) -> None:
    planned, found = peaks(*both(name, method, precision, ends=ends), precision)
    exact = precision == "fp32" and name in ("gpt", "llama of wide blocks")
    assert abs(planned - found) < (2_000 if exact else 0.02 * found)


# In bf16 of blocks that are wide enough, or whose highest moment is no product: oneDNN's take 50 to 200 KB a thread for
# themselves, whatever the model, which is not planned. These models hold less than a megabyte.
@pytest.mark.parametrize(
    ("name", "method", "precision"),
    [*((name, method, "fp32") for name, method in ADAPTED),
     *(("llama of wide blocks", method, "bf16") for method in ("lora", "dora")),
     *((name, "qlora", "bf16") for name in (*MODELS, "mixtral"))],
)  # fmt: skip
def test_the_peak_with_recomputation(name: str, method: str, precision: str) -> None:
    planned, found = peaks(*both(name, method, precision, again=True), precision)
    assert planned == pytest.approx(found, rel=0.05 if precision == "bf16" and method != "qlora" else 0.02)


@pytest.mark.parametrize(("name", "method"), [("llama", "lora"), ("llama", "dora"), ("mixtral", "qlora")])
def test_the_peak_with_few_targets(name: str, method: str) -> None:
    planned, found = peaks(*both(name, method, "fp32", ("q_proj", "v_proj")), "fp32")
    assert planned == pytest.approx(found, rel=0.02)
