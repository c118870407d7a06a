"""The plan's bytes are autograd's and the allocator's: what a forward pass leaves saved, and the peak of a step."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from micro_batch import highest, unfolded
from torch.autograd.graph import saved_tensors_hooks
from workload_cases import FAMILIES, LATENT, MOE, highest_allocated

from ironlaw.ledger import Phase
from ironlaw.model.config import ModelConfig
from ironlaw.model.transformer import Transformer, use_native_attention
from ironlaw.workload.blocks import Precision, Shape
from ironlaw.workload.operations import saved_bytes
from ironlaw.workload.program import training_operations

GPT: dict[str, Any] = {"layers": 3, "hidden": 64, "heads": 4, "vocab": 101, "context": 48}
LLAMA: dict[str, Any] = GPT | {
    "kv_heads": 2, "ffn": 96, "gated_ffn": True, "activation": "silu", "norm": "rmsnorm", "positions": "rope",
    "bias": False, "tied": False,
}  # fmt: skip
CASES: dict[str, dict[str, Any]] = (
    {
        "gpt": GPT,
        "gpt untied": GPT | {"tied": False},
        "gpt without biases": GPT | {"bias": False},
        "gpt exact gelu": GPT | {"activation": "gelu"},
        "gpt of many words": GPT | {"vocab": 2000, "layers": 1},
        "gpt of wide blocks": GPT | {"ffn": 700, "vocab": 60},
        "llama": LLAMA,
        "llama of wide blocks": LLAMA | {"ffn": 700, "vocab": 60},
        "llama tied": LLAMA | {"tied": True},
        "llama all heads": LLAMA | {"kv_heads": 4},
        "qwen": LLAMA | {"qk_norm": True, "head_size": 24},
        "windowed": LLAMA | {"sliding_window": 9},
        "olmoe": LLAMA | {"qk_norm": True, "qk_norm_whole": True},
        "experts of two matrices": GPT | {"bias": False, "moe": MOE["sparse at times"]},
    }
    | {name: LLAMA | {"moe": table} for name, table in MOE.items()}
    | {name: LLAMA | table for name, table in LATENT.items()}
)
CASES |= {name: GPT | {"ffn": 112} | family for name, family in FAMILIES.items()}
BATCH, SEQUENCE = 4, 48
NATIVE = {  # several blocks of queries, the last one smaller
    "gpt": GPT | {"context": 150}, "llama": LLAMA | {"context": 150},
    "qwen": LLAMA | {"qk_norm": True, "head_size": 24, "context": 150},
}  # fmt: skip
LOSS_SCALARS = 16  # bytes: the total weight that the loss keeps, and the loss itself


def step(config: ModelConfig, precision: str, native: bool = False) -> tuple[Transformer, torch.Tensor, Any]:
    torch.manual_seed(0)
    model = Transformer(config)
    use_native_attention(model, native)
    tokens = torch.randint(0, config.vocab, (BATCH, config.context))
    return model, tokens, torch.autocast("cpu", dtype=torch.bfloat16, enabled=precision == "bf16")


def saved_by_autograd(config: ModelConfig, precision: str, native: bool = False) -> int:
    """Bytes of the storages that the graph of one forward pass keeps alive, each once, less what is there anyway."""
    model, tokens, autocast = step(config, precision, native)
    targets = tokens.roll(-1, 1)
    saved: list[torch.Tensor] = []

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        saved.append(tensor)  # held, so that no address is used twice
        return tensor

    with saved_tensors_hooks(pack, lambda tensor: tensor), autocast:
        model(tokens, targets)
    known = {t.untyped_storage().data_ptr() for t in (*model.parameters(), *model.buffers(), tokens, targets)}
    storages = {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in saved}
    return sum(size for pointer, size in storages.items() if pointer not in known)


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("name", CASES)
def test_saved_bytes_are_those_of_autograd(name: str, precision: Precision) -> None:
    config = ModelConfig(**CASES[name])
    planned = saved_bytes(training_operations(Shape(config, BATCH, SEQUENCE, precision)))
    assert abs(planned - saved_by_autograd(config, precision)) <= LOSS_SCALARS


def highest_moment(config: ModelConfig, precision: str, gradients_held: bool = False, native: bool = False) -> int:
    """Bytes allocated by one forward and backward pass at its highest moment, by the profiler's record.

    `gradients_held`: gradients of an earlier micro-batch are there, and not counted.
    """
    model, tokens, autocast = step(config, precision, native)
    targets = tokens.roll(-1, 1)

    def once() -> None:
        with autocast:
            loss = model(tokens, targets)
        loss.backward()

    once()  # caches and one-time buffers
    if not gradients_held:
        model.zero_grad(set_to_none=True)
    return highest_allocated(once)


# In reduced precision oneDNN's workspaces and autocast's cache add a little that the plan does not list.
@pytest.mark.parametrize(("precision", "tolerance"), [("fp32", 0.01), ("bf16", 0.03)])
@pytest.mark.parametrize("name", CASES)
def test_the_peak_of_a_step_is_that_of_the_allocator(name: str, precision: Precision, tolerance: float) -> None:
    config = ModelConfig(**CASES[name])
    planned = highest(list(unfolded(Shape(config, BATCH, SEQUENCE, precision)))).total
    assert planned == pytest.approx(highest_moment(config, precision), rel=tolerance)


@pytest.mark.parametrize("name", ["gpt", "gpt of wide blocks", "llama", "llama tied"])
def test_the_peak_of_a_second_micro_batch_holds_the_gradients_of_the_first(name: str) -> None:
    config = ModelConfig(**CASES[name])
    held = 4 * config.parameters
    peak = highest(list(unfolded(Shape(config, BATCH, SEQUENCE))), gradients_held=held)
    assert peak.components["gradients"] == held
    planned = peak.total - held
    assert planned == pytest.approx(highest_moment(config, "fp32", gradients_held=True), rel=0.01)


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("name", CASES)
def test_everything_saved_is_freed_and_every_gradient_is_made(name: str, precision: Precision) -> None:
    config = ModelConfig(**CASES[name])
    operations = list(unfolded(Shape(config, BATCH, SEQUENCE, precision)))
    assert sum(op.gradient_bytes for op in operations) == 4 * config.parameters
    saved = sum(op.saved_bytes for op in operations)
    freed = sum(op.frees_saved_bytes for op in operations)
    assert saved == freed
    assert all(op.gradient_bytes == 0 for op in operations if op.phase is Phase.FORWARD)


@pytest.mark.parametrize(("precision", "tolerance"), [("fp32", 0.02), ("bf16", 0.03)])
@pytest.mark.parametrize("name", NATIVE)
def test_our_own_attention_holds_the_bytes_that_are_planned(name: str, precision: Precision, tolerance: float) -> None:
    config = ModelConfig(**NATIVE[name])
    shape = Shape(config, BATCH, config.context, precision, native=True)
    operations = training_operations(shape)
    assert abs(saved_bytes(operations) - saved_by_autograd(config, precision, native=True)) <= LOSS_SCALARS
    assert sum(op.saved_bytes for op in operations) == sum(op.frees_saved_bytes for op in operations)
    planned = highest(list(unfolded(shape))).total
    assert planned == pytest.approx(highest_moment(config, precision, native=True), rel=tolerance)
