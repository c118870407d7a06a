"""Plans of traced modules: from the words a user types to a ledger."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from ironlaw.catalog.accelerators import accelerator
from ironlaw.catalog.nodes import parse_cluster
from ironlaw.errors import UserError
from ironlaw.ledger import Kind, Ledger, Phase
from ironlaw.machine.efficiency.matmul import matmul_seconds
from ironlaw.machine.profile import Curve, MatmulFit, Profile
from ironlaw.machine.timing import AS_MATMUL, COPY_RATE
from ironlaw.plan import module as traced_plan
from ironlaw.plan.cluster.system import hardware_of
from ironlaw.plan.module import accelerator_target, plan_module
from ironlaw.plan.request import plan_request
from ironlaw.plan.request_types import Options, Prices
from ironlaw.plan.totals import fits
from ironlaw.workload.layout import Layout
from ironlaw.workload.module_source import Input, parse_input, resolve_module
from ironlaw.workload.operations import line_name, product
from ironlaw.workload.program import replicated, step_of_trace
from ironlaw.workload.trace_store import ModuleTrace

CODE = """
import torch
from torch import nn
from ironlaw.model.config import ModelConfig
from ironlaw.model.transformer import Transformer

answer = 42

def build():
    return Transformer(ModelConfig(layers=2, hidden=64, heads=4, vocab=100, context=64))

def wide():
    return nn.Sequential(nn.Linear(512, 200_000), nn.Linear(200_000, 512), nn.Linear(512, 200_000))

class Image(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(nn.Conv2d(3, 32, 3), nn.Hardswish(), nn.AdaptiveAvgPool2d(1))

    def forward(self, image):
        return self.layers(image)
"""
TOKENS = ["tokens=2x64:int64", "targets=2x64:int64"]


def plan_traced(spec: str, inputs: list[str], on: str, *, real: bool = False, **options: Any) -> Ledger:
    return plan_request(spec, on=on, options=Options(inputs=tuple(inputs), real=real, **options)).ledger


@pytest.fixture
def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    (tmp_path / "traced_example.py").write_text(CODE, encoding="utf-8")
    (tmp_path / "broken_example.py").write_text("import no_such_package\n", encoding="utf-8")
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    return "traced_example"


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Profile:
    """A machine of 1 GFLOP/s, 1 GB/s and 1 µs per call."""
    shapes = [(m, n, k) for m in (64, 1024) for n in (64, 1024) for k in (64, 1024)]
    fit = MatmulFit.fit(shapes, [2e-9 * m * n * k + 1e-6 for m, n, k in shapes])
    line = Curve((1e3, 1e6), (1e-6, 1e-3))
    kernels = ("add", "add_in_place", "multiply", "gelu_tanh_forward", "gelu_tanh_backward", "layernorm_forward",
               "layernorm_backward", "loss_forward", "loss_backward", "embedding_forward", "embedding_backward",
               "sum_rows", "concatenate", "adamw", "clip", "update_tensors")  # fmt: skip
    profile = Profile(
        device="cpu", name="Toy", created="2026-01-01", versions={"torch": "2"}, threads=1, memory_bytes=2**30,
        runtime_bytes=2**20, matmul={"fp32": dict.fromkeys(("matmul", "matmul_bias", "matmul_weight_gradient"), fit)},
        curves={"fp32": dict.fromkeys(kernels, line)},
        attention={"fp32": {d: [(64, 16, 1e-8), (128, 16, 1e-8)] for d in ("forward", "backward")}},
        copy_bytes_per_second=1e9, small_operation_seconds=1e-6,
        tiny_block_seconds={"forward": 1e-3, "backward": 1e-3}, reference_step_seconds={"fp32": 0.0},
        storage_bytes_per_second=None, tokenizer_tokens_per_second=None,
        interference={"compute": [1.0], "memory": [1.0]},
    )  # fmt: skip
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(traced_plan, "load_profile", lambda: profile)
    return profile


def check(ledger: Ledger) -> None:
    """What every plan must say, each number with its interval and where it comes from."""
    for name in ("parameters", "flops_per_step", "step_seconds", "peak_bytes", "resident_bytes", "mfu"):
        assert ledger.totals[name].basis
        assert ledger.totals[name].value > 0
    step = ledger.totals["step_seconds"]
    assert step.low is not None and step.high is not None and step.low < step.value < step.high
    assert step.value == pytest.approx(sum(line.seconds or 0.0 for line in ledger.lines))
    assert ledger.totals["peak_bytes"].value == sum(ledger.memory_bytes().values())
    assert Ledger.from_json(ledger.to_json()).to_json() == ledger.to_json()


def test_on_an_accelerator(package: str) -> None:
    ledger = plan_traced(f"{package}:build", TOKENS, "h200")
    check(ledger)
    assert fits(ledger)
    assert ledger.facts["precision"] == "bf16"
    assert ledger.facts["model"] == {"name": f"{package}:build"}
    layers = {line.operation for line in ledger.lines}
    assert "blocks.*.attention.qkv" in layers
    assert not any("blocks.0" in name for name in layers)
    (qkv,) = ledger.select(phase=Phase.FORWARD, operation="blocks.*.attention.qkv", kind=Kind.MATMUL)
    assert (qkv.count, qkv.flops) == (2, 2 * 2 * 128 * 192 * 64)


def test_on_this_machine(package: str, machine: Profile) -> None:
    ledger = plan_traced(f"{package}:build", TOKENS, "this")
    check(ledger)
    assert fits(ledger) and not [line for line in ledger.lines if line.bound == AS_MATMUL]
    products = sum(line.flops or 0 for line in ledger.select(kind=Kind.MATMUL))
    assert sum(line.seconds or 0 for line in ledger.select(kind=Kind.MATMUL)) == pytest.approx(
        products * 1e-9, rel=0.05
    )


def test_kernels_without_a_curve_go_by_bytes(package: str, machine: Profile) -> None:
    ledger = plan_traced(f"{package}:Image", ["image=8x3x34x34"], "this")
    check(ledger)
    bounds = {(line.operation, line.phase): line for line in ledger.lines}
    swish = bounds["layers.1", Phase.FORWARD]
    size = 8 * 32 * 32 * 32 * 4
    assert (swish.bound, swish.bytes_moved) == (COPY_RATE, 2 * size)
    assert swish.seconds == pytest.approx(2 * size / 1e9 + 1e-6)
    assert bounds["layers.0", Phase.FORWARD].bound == AS_MATMUL


def test_an_update_of_complex_parameters_is_not_fused(machine: Profile) -> None:
    from torch import complex64, nn, randn

    class Rotation(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(randn(64, 64, dtype=complex64))

        def forward(self, x: object) -> object:
            return (x @ self.weight).abs()

    ledger = plan_module(Rotation, [Input("x", (4, 64), "complex64")])
    assert "not fused" in ledger.facts["optimizers"][0]
    assert ledger.memory_bytes()["optimizer"] == 2 * 64 * 64 * 8 + 4  # and a count of steps
    passes = [line.count for line in ledger.lines if line.phase is Phase.OPTIMIZER and line.operation == "adamw"]
    assert passes == [7]


def test_what_does_not_fit(package: str, machine: Profile) -> None:
    ledger = plan_traced(f"{package}:wide", ["input=1x512"], "this")
    assert not fits(ledger)
    parameters = ledger.totals["parameters"].value
    assert ledger.memory_bytes()["optimizer"] == 8 * parameters
    assert ledger.totals["peak_bytes"].value == pytest.approx(16 * parameters, rel=0.01)


def test_more_tokens_take_longer_and_more_memory() -> None:
    from torch import nn

    plans = [
        plan_module(lambda: nn.Linear(4096, 4096), [Input("input", (rows, 4096))], "h200") for rows in (2**14, 2**16)
    ]
    small, large = (plan.totals for plan in plans)
    assert large["flops_per_step"].value == 4 * small["flops_per_step"].value
    assert large["step_seconds"].value > 2 * small["step_seconds"].value
    assert large["peak_bytes"].value > small["peak_bytes"].value


def test_a_tiny_module_waits_for_its_host() -> None:
    from torch import nn

    ledger = plan_module(lambda: nn.Sequential(*[nn.Linear(8, 8) for _ in range(50)]), [Input("input", (4, 8))], "h200")
    (dispatch,) = ledger.select(kind=Kind.HOST, phase=Phase.FORWARD)
    assert dispatch.count == 3 * 50 + 1  # products, casts of weights and biases, and of the input
    assert (dispatch.seconds or 0) > 0


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("tokens=8x2048:int64", Input("tokens", (8, 2048), "int64")),
        ("image = 32x3x224x224", Input("image", (32, 3, 224, 224), "float32")),
        ("x=4:bf16", Input("x", (4,), "bfloat16")),
        ("x=4:torch.float16", Input("x", (4,), "float16")),
        ("flag=scalar:bool", Input("flag", (), "bool")),
        ("mask=8x16:int64:ones", Input("mask", (8, 16), "int64", "ones")),
        ("tokens=8x16:int64:50257", Input("tokens", (8, 16), "int64", "50257")),
        ("targets.0.boxes=4x4", Input("targets.0.boxes", (4, 4))),
    ],
)
def test_inputs(text: str, expected: Input) -> None:
    assert parse_input(text) == expected


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("tokens", "tokens=8x2048:int64"),
        ("tokens=8,2048", "joined by x"),
        ("tokens=8x0", "positive"),
        ("tokens=8x-1", "positive"),
        ("tokens=8x2:int46", "did you mean int64"),
        ("=8x2", "NAME=SIZES"),
        ("tokens=8x2:int64:many", "zeros, ones, positions"),
        ("tokens=8x2:int64:0", "number to draw below"),
    ],
)
def test_wrong_inputs(text: str, says: str) -> None:
    with pytest.raises(UserError, match=says):
        parse_input(text)


@pytest.mark.parametrize(
    ("spec", "says"),
    [
        ("traced_example", "write PACKAGE.MODULE:FUNCTION"),
        ("no_such_module:build", "cannot import no_such_module"),
        ("broken_example:build", "no_such_package"),
        ("traced_example:bild", "did you mean build"),
        ("traced_example:answer", "is not callable"),
        ("traced_example.py:build", "write its module name, traced_example:build"),
    ],
)
def test_wrong_modules(package: str, spec: str, says: str) -> None:
    with pytest.raises(UserError, match=says) as raised:
        resolve_module(spec)
    assert "\n" not in str(raised.value)


@pytest.mark.parametrize(
    ("inputs", "on", "says"),
    [
        ([], "h200", "add --input"),
        (TOKENS, "h2000", "did you mean"),
        (TOKENS, "any", "add --on 8xh100"),
        (["tokns=2x64:int64", TOKENS[1]], "h200", "did you mean tokens"),
        (["tokens=2x640:int64", "targets=2x640:int64"], "h200", r"640 tokens are more than model\.context"),
    ],
)
def test_wrong_questions(package: str, inputs: list[str], on: str, says: str) -> None:
    with pytest.raises(UserError, match=says):
        plan_traced(f"{package}:build", inputs, on)


def test_layers_of_a_stack_share_a_line() -> None:
    assert line_name("layer1.0.conv2") == "layer1.*.conv2"
    assert line_name("features.3") == "features.3"
    assert line_name("0.1.weight") == "*.*.weight"


def test_planning_does_not_import_torch() -> None:
    code = "import sys, ironlaw.plan.module; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_inputs_from_a_function_and_a_real_step(package: str, machine: Profile, tmp_path: Path) -> None:
    more = "\ndef batch():\n    return {'image': torch.randn(4, 3, 20, 20)}\n"
    (tmp_path / "with_batch_example.py").write_text(CODE + more, encoding="utf-8")
    planned = {
        real: plan_traced("with_batch_example:Image", ["with_batch_example:batch"], "this", real=real)
        for real in (False, True)
    }
    assert planned[True].facts["inputs"] == planned[False].facts["inputs"] == {"image": "4x3x20x20:float32"}
    assert planned[True].totals["flops_per_step"].value == planned[False].totals["flops_per_step"].value


def test_what_was_assumed_of_inputs_is_said(package: str) -> None:
    answer = plan_request(f"{package}:build", on="h200", options=Options(inputs=tuple(TOKENS)))
    assert [one["name"] for one in answer.more["assumed"]] == ["values of tokens", "values of targets"]
    assert answer.more["assumed"][0]["how_to_set"] == "--input tokens=2x64:int64:VALUES"


def test_a_newer_library_multiplies_faster_on_a_v100_in_a_traced_plan_too() -> None:
    machine = accelerator_target(parse_cluster("v100-sxm-32gb"), "fp16").machine
    hardware, shape = hardware_of(accelerator("v100-sxm-32gb")), (2048, 1024, 1024)
    alone = matmul_seconds(*shape, dtype="fp16", hardware=hardware, sustained=True)
    assert machine.time(product("out", shape, 2)).seconds < alone


def test_on_several_accelerators(package: str) -> None:
    """A replica each: seconds and bytes of one, FLOPs of all."""
    one = plan_traced(f"{package}:build", TOKENS, "h200")
    eight = plan_traced(f"{package}:build", TOKENS, "8xh200", layout="zero=0")
    check(eight)
    assert eight.totals["flops_per_step"].value == 8 * one.totals["flops_per_step"].value
    (added,) = eight.select(kind=Kind.COLLECTIVE)
    assert (added.operation, added.bytes_moved) == ("replicate all_reduce", 4 * one.totals["parameters"].value)
    buckets = eight.memory_bytes()["communication"]
    assert buckets == added.bytes_moved and eight.totals["peak_bytes"].value > one.totals["peak_bytes"].value


def test_what_replicas_send_takes_time_beyond_the_passes_that_hide_it(package: str) -> None:
    def waits(on: str, layout: str, **options: Any) -> float:
        ledger = plan_traced(f"{package}:wide", ["input=8x512"], on, layout=layout, **options)
        return sum(line.seconds or 0.0 for line in ledger.select(phase=Phase.COMMUNICATION))

    alone, inside = waits("h200", "dp=1"), waits("8xh200", "zero=0")
    assert alone == 0 and inside > 1e-3  # 1.2 GB of gradients, 0.9 TB/s at most
    assert waits("8xh200", "zero=3") > inside  # half as much again is sent
    # The last of four micro-batches alone reduces, where ZeRO 3 sends for each.
    assert waits("8xh200", "zero=0 accumulation=4") == pytest.approx(inside, rel=0.2)
    assert waits("8xh200", "zero=3 accumulation=4") > 3 * waits("8xh200", "zero=3")
    slow = {"network": "1x 100 Gb/s Ethernet"}
    assert waits("16xh200", "zero=3", **slow) > waits("16xh200", "zero=3 shard=8", **slow) > 3 * inside


@pytest.mark.parametrize(
    ("layout", "held", "sent"),
    [
        (Layout(dp=4), {"communication": 1200}, [("replicate", "all_reduce", 1, 1200)]),
        (Layout(dp=4, zero=1), {"optimizer": 600, "communication": 1200},
         [("shard", "all_gather", 2, 1200), ("shard", "reduce_scatter", 1, 1200)]),
        (Layout(dp=4, zero=2), {"weights": 308, "optimizer": 600, "gathered": 2000, "reducing": 800},
         [("shard", "all_gather", 2, 1200), ("shard", "reduce_scatter", 2, 1200)]),
        (Layout(dp=4, zero=3), {"weights": 308, "optimizer": 600, "gathered": 1600, "reducing": 800},
         [("shard", "all_gather", 4, 2400), ("shard", "reduce_scatter", 2, 1200)]),
        (Layout(dp=4, zero=3, shard=2), {"weights": 608, "optimizer": 1200, "gathered": 1600, "reducing": 800},
         [("shard", "all_gather", 4, 2400), ("shard", "reduce_scatter", 2, 1200), ("replicate", "all_reduce", 2, 600)]),
    ],
)  # fmt: skip
def test_zero_divides_what_lasts(layout: Layout, held: dict[str, int], sent: list[tuple[str, str, int, int]]) -> None:
    trace = ModuleTrace([], "two layers", 300, 300, 4, 1200, 1200, 8, 16, (800, 400))
    part = replicated(step_of_trace(trace), trace, layout)
    whole = {"weights": 1208, "optimizer": 2400, "batch": 16, "gradients": 0}
    assert {tensor.component: tensor.bytes for tensor in part.tensors[0]} == whole | held
    assert list(part.collectives[0]) == sent
    assert [op.elements for op in part.stages[0].update][:2] == [300 // layout.sharing] * 2


def test_the_fastest_zero_stage_that_fits_is_planned_and_a_number_of_steps_has_its_price(package: str) -> None:
    asked = Options(inputs=("input=8x512",), steps=1000, optimizer="sgd", prices=Prices(usd_per_hour=2.0))
    answer = plan_request(f"{package}:wide", on="8xh200", options=asked)
    stages = [plan_traced(f"{package}:wide", ["input=8x512"], "8xh200", layout=f"zero={z}", optimizer="sgd")
              for z in range(4)]  # fmt: skip
    totals, least = answer.ledger.totals, min(stage.totals["step_seconds"].value for stage in stages)
    step = totals["step_seconds"].value
    assert answer.fits and least <= step <= 1.01 * least
    assert totals["rent_usd"].value == pytest.approx(1000 * step * 8 / 3600 * 2.0)
    assert answer.more["budget"]["rent"]["usd_per_hour"] == 2.0 and totals["carbon_kg"].value > 0
    assert [one["name"] for one in answer.more["assumed"]] == ["layout"]
    assert stages[0].memory_bytes()["optimizer"] == 0


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"layout": "tp=2 dp=4"}, "replicated whole"), ({"layout": "dp=4"}, "dp = 4 is not the 8"),
        ({"layout": "shard=2"}, "needs zero"), ({"optimizer": "muon"}, "are planned"),
        ({"prices": Prices(grid="france")}, "add --steps"), ({"engine": "nemo"}, "--engine is for"),
        ({"tokens": "1B"}, "--tokens is for"),
    ],
)  # fmt: skip
def test_what_replicas_of_a_module_are_not_asked(package: str, options: dict[str, Any], says: str) -> None:
    with pytest.raises(UserError, match=says):
        plan_traced(f"{package}:wide", ["input=8x512"], "8xh200", **options)
