"""A trace of our own decoder gives the same table as the analytic list."""

from __future__ import annotations

import itertools
import random

import psutil
import pytest
import torch
from micro_batch import highest, unfolded
from torch.utils.checkpoint import checkpoint
from workload_cases import FAMILIES as SWITCHED
from workload_cases import LATENT

from ironlaw.ledger import Kind, Phase
from ironlaw.model.config import ModelConfig
from ironlaw.model.parameters import model_parameters
from ironlaw.model.transformer import Transformer
from ironlaw.workload.blocks import Precision, Shape
from ironlaw.workload.module_source import Input
from ironlaw.workload.operations import Operation, saved_bytes, total_flops
from ironlaw.workload.program import training_operations
from ironlaw.workload.trace import trace
from ironlaw.workload.trace_store import ModuleTrace

GPT = {}
LLAMA = {
    "kv_heads": 2, "positions": "rope", "norm": "rmsnorm", "gated_ffn": True, "activation": "silu", "bias": False,
    "tied": False, "ffn": 160,
}  # fmt: skip
FAMILIES = {
    "gpt": GPT,
    "gpt-untied": {"tied": False, "activation": "gelu"},
    "gpt-qk-norm": {"qk_norm": True},
    "llama": LLAMA,
    "llama-tied": LLAMA | {"tied": True},
    "qwen3": LLAMA | {"qk_norm": True, "head_size": 32},
    "qwen2": LLAMA | {"qkv_bias": True},
    "mixtral": LLAMA | {"moe": {"experts": 6, "experts_per_token": 2}},
    "qwen2-moe": LLAMA
    | {
        "moe": {
            "experts": 5,
            "experts_per_token": 2,
            "expert_ffn": 40,
            "shared_experts": 1,
            "shared_gate": True,
            "dense_layers": 1,
            "normalize": False,
        }
    },
    "gpt-dropout": {"dropout": 0.1},
    "gpt-dropout-qk-norm": {"dropout": 0.1, "qk_norm": True},
    "llama-dropout": LLAMA | {"dropout": 0.1},
    "qwen3-dropout": LLAMA | {"dropout": 0.1, "qk_norm": True},
} | {name: LLAMA | table for name, table in LATENT.items()}
FAMILIES["latent-dropout"] = LLAMA | LATENT["latent"] | {"dropout": 0.1}
FAMILIES |= SWITCHED
DROPPED = tuple(name for name in FAMILIES if "dropout" in name)
SCALARS = 8  # bytes: the analytic list leaves out the loss and the sum of its weights


def config(**overrides: object) -> ModelConfig:
    sizes = {"layers": 2, "hidden": 64, "heads": 4, "vocab": 100, "context": 48}
    return ModelConfig(**(sizes | overrides))  # type: ignore[arg-type]


def traced(model: ModelConfig, precision: str = "fp32", batch: int = 3, sequence: int = 40) -> ModuleTrace:
    inputs = [Input(name, (batch, sequence), "int64") for name in ("tokens", "targets")]
    return trace(lambda: Transformer(model), inputs, precision="as is" if precision == "fp32" else precision)  # type: ignore[arg-type]


def analytic(model: ModelConfig, precision: Precision = "fp32") -> list[Operation]:
    return training_operations(Shape(model, 3, 40, precision))


def expected_flops(model: ModelConfig, operations: list[Operation], scores: int) -> int:
    """With every one of the `scores` where a mask is a tensor, which hides nothing from a trace."""
    always = model.positions == "alibi" or model.composes_scores
    total = 0
    for op in operations:
        masked = always or (model.sliding_window is not None and "full" not in op.group)
        flops = op.flops or 0
        total += op.repeat * (flops * scores // op.elements if op.attention and masked else flops)
    return total


@pytest.mark.parametrize(("family", "precision"), list(itertools.product(FAMILIES, ("fp32", "bf16"))))
def test_both_ways_agree(family: str, precision: Precision) -> None:
    model = config(**FAMILIES[family])
    found, listed = traced(model, precision), analytic(model, precision)
    assert total_flops(found.operations) == expected_flops(model, listed, 3 * model.heads * 40**2)
    assert saved_bytes(found.operations) == pytest.approx(saved_bytes(listed), abs=SCALARS)
    assert sum(op.gradient_bytes for op in found.operations) == 4 * model.parameters
    assert found.trained_parameters == found.parameters == model.parameters
    assert found.trained_tensors == len(model_parameters(model))
    in_order = list(unfolded(Shape(model, 3, 40, precision)))
    assert highest(found.operations).total == pytest.approx(highest(in_order).total, rel=1e-3, abs=SCALARS)


@pytest.mark.parametrize(("family", "precision"), list(itertools.product(("gpt", *DROPPED), ("fp32", "bf16"))))
def test_saved_bytes_are_those_of_autograd(family: str, precision: Precision) -> None:
    """On real tensors: unique storages that autograd holds, but for parameters, buffers and inputs."""
    model = config(**FAMILIES[family])
    module, tokens = Transformer(model), torch.randint(0, model.vocab, (3, 40))
    known = {t.untyped_storage().data_ptr() for t in [*module.parameters(), *module.buffers(), tokens]}
    kept: dict[int, torch.Tensor] = {}

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        if tensor.untyped_storage().data_ptr() not in known:
            kept[tensor.untyped_storage().data_ptr()] = tensor
        return tensor

    cast = torch.autocast("cpu", torch.bfloat16, enabled=precision == "bf16")
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t), cast:
        module(tokens, tokens)
    held = sum(tensor.untyped_storage().nbytes() for tensor in kept.values())
    assert saved_bytes(analytic(model, precision)) == pytest.approx(held, abs=SCALARS)


def test_dropout_keeps_a_byte_per_element_on_cuda() -> None:
    """There attention stays fused and dropout keeps a mask instead of its noise."""
    plain, dropped = (
        training_operations(Shape(config(dropout=rate), 3, 40, "bf16", fused_rmsnorm=True)) for rate in (0.0, 0.1)
    )
    assert saved_bytes(dropped) - saved_bytes(plain) == 2 * 2 * 3 * 40 * 64  # layers x two dropouts x elements


def test_both_ways_list_the_same_products() -> None:
    """Shapes, phases and curves of every product and every attention, not only their sums."""
    model = config(**LLAMA)

    def products(operations: list[Operation]) -> list[tuple[object, ...]]:
        return sorted(
            (str(op.phase), op.kernel, op.matmul or op.attention, op.flops)
            for op in operations
            if op.flops
            for _ in range(op.repeat)
        )  # type: ignore[type-var]

    assert products(list(traced(model).operations)) == products(analytic(model))


def test_both_ways_move_the_same_bytes_through_norms() -> None:
    model = config(**LLAMA)
    for phase in (Phase.FORWARD, Phase.BACKWARD):
        found = [op for op in traced(model).operations if op.kind is Kind.NORM and op.phase is phase]
        listed = [op for op in analytic(model) if op.kind is Kind.NORM and op.phase is phase]
        assert {op.kernel for op in found} == {op.kernel for op in listed} == {f"rmsnorm_{phase}"}
        assert sum(op.bytes_moved for op in found) == sum(op.bytes_moved * op.repeat for op in listed)


def test_names_are_module_paths() -> None:
    names = {op.name for op in traced(config()).operations}
    assert {
        "embedding",
        "blocks.1.attention.qkv",
        "blocks.1.attention.attention",
        "blocks.1.add",
        "head",
        "loss",
    } <= names
    backward = {op.name for op in traced(config()).operations if op.phase is Phase.BACKWARD and op.matmul}
    assert {"blocks.0.ffn.down", "blocks.1.attention.qkv", "head"} <= backward


def test_every_saved_byte_is_freed_again() -> None:
    operations = traced(config(**LLAMA)).operations
    saved = sum(op.saved_bytes for op in operations)
    assert sum(op.frees_saved_bytes for op in operations) == pytest.approx(saved, abs=SCALARS)


def test_a_mask_as_a_tensor_hides_nothing_from_the_count() -> None:
    """A sliding window is a tensor of values, which a trace does not have: all scores count."""
    windowed = config(sliding_window=8)
    attention = [op for op in traced(windowed).operations if op.attention and op.phase is Phase.FORWARD]
    assert attention[0].flops == 4 * 3 * 40 * 40 * 64
    assert saved_bytes(traced(windowed).operations) == pytest.approx(saved_bytes(analytic(windowed)), abs=SCALARS)


def test_weights_take_no_memory() -> None:
    model = ModelConfig.named("llama3-70b", layers=2, vocab=1000)
    before = psutil.Process().memory_info().rss
    found = trace(lambda: Transformer(model), [Input("tokens", (1, 4096), "int64")])
    assert found.parameter_bytes > 6e9
    assert psutil.Process().memory_info().rss - before < 300e6


@pytest.mark.parametrize("reentrant", [False, True])
def test_recomputation_runs_the_forward_pass_again_in_the_backward_phase(reentrant: bool) -> None:
    class Model(torch.nn.Module):
        def __init__(self, again: bool) -> None:
            super().__init__()
            self.first = torch.nn.Linear(32, 32)
            self.block = torch.nn.Sequential(torch.nn.Linear(32, 64), torch.nn.GELU(), torch.nn.Linear(64, 32))
            self.again = again

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            x = self.first(x)
            return (checkpoint(self.block, x, use_reentrant=reentrant) if self.again else self.block(x)).sum()

    once, again = (trace(Model(kind), [Input("x", (8, 32), "float32")]) for kind in (False, True))
    assert total_flops(again.operations) > total_flops(once.operations)
    forward = [total_flops([op for op in t.operations if op.phase is Phase.FORWARD]) for t in (once, again)]
    assert forward[0] == forward[1]


@pytest.mark.long
@pytest.mark.parametrize(("family", "precision"), list(itertools.product(FAMILIES, ("fp32", "bf16"))))
def test_both_ways_agree_on_other_sizes(family: str, precision: Precision) -> None:
    """Heads, widths, depths, vocabularies and batches drawn at random; window and experts where the family has them."""
    draw = random.Random(f"{family} {precision}")
    for _ in range(4):
        heads = draw.choice([4, 8, 12])
        hidden = heads * draw.choice([8, 16, 24])
        sizes = {"layers": draw.randint(1, 6), "heads": heads, "hidden": hidden, "vocab": draw.randint(50, 999)}
        sizes |= {"context": 96, "ffn": 8 * draw.randint(4, 60)}
        if FAMILIES[family].get("kv_heads"):
            sizes["kv_heads"] = draw.choice([1, 2, 4, heads])
        if "latent" in FAMILIES[family]:
            plain, rotary = 2 * draw.randint(2, 12), 2 * draw.randint(1, 8)
            sizes["latent"] = {
                "query_rank": draw.choice([None, draw.randint(8, 60)]), "key_value_rank": draw.randint(8, 60),
                "plain_size": plain, "rotary_size": rotary, "value_size": draw.randint(4, plain + rotary),
            }  # fmt: skip
        if sizes["layers"] == 1 and "moe" in FAMILIES[family]:
            sizes["layers"] = 2
        model = config(**(FAMILIES[family] | sizes))
        # Of one sequence composed attention copies its queries once less than listed: its heads need no reordering.
        batch, sequence = draw.randint(2 if family in DROPPED or model.composes_scores else 1, 5), draw.randint(9, 96)
        found = traced(model, precision, batch, sequence)
        listed = training_operations(Shape(model, batch, sequence, precision))
        scores = batch * model.heads * sequence**2
        wide = (model.sliding_window or 0) >= sequence  # no mask then
        assert wide or total_flops(found.operations) == expected_flops(model, listed, scores), sizes
        assert saved_bytes(found.operations) == pytest.approx(saved_bytes(listed), rel=0.02, abs=SCALARS), sizes
        assert sum(op.gradient_bytes for op in found.operations) == 4 * model.parameters
