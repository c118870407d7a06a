"""What a run observes has the plan's names, the plan's memory parts, and adds up to the clock's time."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from ironlaw.config import RunConfig, build_config
from ironlaw.ledger import UNNAMED, Kind, Ledger, Line, Phase
from ironlaw.machine.profile import Profile
from ironlaw.observe.clock import StepClock, StepTimes
from ironlaw.observe.energy import EnergyMeter
from ironlaw.observe.events import DEVICE, Event
from ironlaw.observe.gpu_monitor import find_gpu_monitor, processor_throttle_count
from ironlaw.observe.measured import _dispatch_by_the_clock, typical
from ironlaw.observe.profile import PHASE_SCOPE, STEP_SCOPE, _device_lines, _lines, _place
from ironlaw.observe.spans import BACKWARD_NODE, MODULE_SCOPE, nest
from ironlaw.plan.step import plan_run
from ironlaw.train.session import run_training
from ironlaw.workload.kinds import COMPILED

Config = Callable[..., RunConfig]
# Large enough that arithmetic counts, small enough for a second.
GPT: dict[str, Any] = {"layers": 2, "hidden": 96, "heads": 4, "context": 64}
LLAMA: dict[str, Any] = GPT | {
    "kv_heads": 2, "ffn": 160, "gated_ffn": True, "activation": "silu", "norm": "rmsnorm", "positions": "rope",
    "bias": False, "tied": False,
}  # fmt: skip
MOE = {"experts": 8, "experts_per_token": 2, "expert_ffn": 120, "shared_experts": 1, "shared_gate": True}
FAMILIES = {"gpt": GPT, "llama": LLAMA, "qwen": LLAMA | {"qk_norm": True}}
LATENT = {"query_rank": 96, "key_value_rank": 80, "plain_size": 24, "rotary_size": 8, "value_size": 20}
EXPERTS = {
    "latent": LLAMA | {"kv_heads": None, "latent": LATENT},
    "dense first, capped": LLAMA | {"moe": MOE | {"dense_layers": 1}, "attention_cap": 30.0},
    "gelu, dropout": GPT | {"bias": False, "moe": MOE, "dropout": 0.1},
    "llama native": LLAMA | {"context": 160},
}


@pytest.fixture(
    scope="module",
    params=[
        *((f, p) for f in FAMILIES for p in ("fp32", "bf16")),
        ("dense first, capped", "fp32"),
        ("gelu, dropout", "bf16"),
        ("latent", "fp32"),
        ("latent", "bf16"),
        ("llama native", "fp32"),
        ("llama native", "bf16"),
    ],
    ids=lambda param: "-".join(param),
)
def ledgers(
    request: pytest.FixtureRequest, tiny_tables: Callable[..., dict[str, Any]], machine_profile: Profile,
    shared_data: Path, tmp_path_factory: pytest.TempPathFactory,
) -> tuple[Ledger, Ledger]:  # fmt: skip
    """Plan and run of one family in one precision."""
    family, precision = request.param
    train = {"steps": 14, "profile_steps": 3, "precision": precision, "attention": "auto"}
    if family.endswith("native"):
        train["attention"] = "native"
    config = build_config(tiny_tables(shared_data, (FAMILIES | EXPERTS)[family], train=train))
    plans: list[Ledger] = []
    run = tmp_path_factory.mktemp("observed") / "run"
    outcome = run_training(config, run, machine_profile, planned=lambda plan, data: plans.append(plan))
    return plans[0], outcome.ledger


def keys(ledger: Ledger) -> dict[tuple[Phase, Kind, str], float]:
    return {(line.phase, line.kind, line.operation): line.seconds or 0.0 for line in ledger.lines}


def test_plan_and_run_have_the_same_keys_and_little_has_no_name(ledgers: tuple[Ledger, Ledger]) -> None:
    plan, run = (keys(ledger) for ledger in ledgers)
    assert set(plan) == set(run)
    # What is measured under no name of the plan: the scaling of the loss, some copies.
    unnamed = sum(seconds for (_, _, operation), seconds in run.items() if operation == UNNAMED)
    assert unnamed < 0.1 * sum(run.values())  # 1 to 2% on an idle machine


def test_lines_stay_within_their_phases(ledgers: tuple[Ledger, Ledger]) -> None:
    _, run = ledgers
    recorded = {phase: sum(line.seconds or 0 for line in run.select(phase=phase)) for phase in Phase}
    assert all(recorded[phase] > 0 for phase in (Phase.FORWARD, Phase.BACKWARD, Phase.OPTIMIZER))
    assert sum(recorded.values()) <= 1.1 * run.facts["profiled_step_seconds"]
    assert all((line.seconds or 0) >= 0 for line in run.lines)


def test_matrix_products_are_called_as_often_as_planned(ledgers: tuple[Ledger, Ledger]) -> None:
    plan, run = ledgers
    planned = {line.operation for line in plan.select(kind=Kind.MATMUL)}
    for name in {"qkv", "attention_out", "ffn_up", "ffn_down", "head", "router", "shared_ffn_up"} & planned:
        for phase in (Phase.FORWARD, Phase.BACKWARD):
            planned = next(plan.select(operation=name, phase=phase, kind=Kind.MATMUL)).count
            assert next(run.select(operation=name, phase=phase, kind=Kind.MATMUL)).count == planned, (name, phase)


def test_measured_memory_is_the_planned(ledgers: tuple[Ledger, Ledger]) -> None:
    plan, run = ledgers
    planned, measured = plan.memory_bytes(), run.memory_bytes()
    assert planned["weights"] == measured["weights"]
    assert planned["batch"] == measured["batch"]
    # AdamW keeps one step counter of 4 bytes per parameter tensor.
    assert measured["optimizer"] - planned["optimizer"] < 2000
    tolerance = 0.01 if plan.facts["precision"] == "fp32" else 0.03
    peak = measured["activations"] + measured["gradients"] + measured["temporaries"]
    expected = planned["activations"] + planned["gradients"] + planned["temporaries"]
    assert expected == pytest.approx(peak, rel=tolerance)
    for component in ("activations", "gradients", "temporaries"):
        assert abs(planned[component] - measured[component]) < 0.03 * peak, component
    assert plan.totals["peak_bytes"].value == pytest.approx(run.totals["peak_bytes"].value, rel=0.02)


def test_phases_and_the_rest_are_the_step(ledgers: tuple[Ledger, Ledger]) -> None:
    _, run = ledgers
    step, phases = run.totals["step_seconds"].value, sum(run.seconds_by_phase().values())
    assert -0.001 * step <= step - phases < 0.3 * step  # 3 to 5% on an idle machine


@pytest.mark.parametrize("micro_batch", [8, 2])
def test_accumulation_is_observed_as_planned(
    tiny_config: Config, user_cache: Path, machine_profile: Profile, tmp_path: Path, micro_batch: int
) -> None:
    config = tiny_config(GPT, train={"steps": 14, "profile_steps": 3, "micro_batch": micro_batch})
    plans: list[Ledger] = []
    run = run_training(config, tmp_path / "run", machine_profile, planned=lambda plan, data: plans.append(plan)).ledger
    assert plans[0].totals["peak_bytes"].value == pytest.approx(run.totals["peak_bytes"].value, rel=0.02)
    lines = list(run.select(phase=Phase.BACKWARD, operation="accumulate"))
    assert bool(lines) == (micro_batch == 2)


def test_a_run_that_was_not_recorded_claims_no_operations(
    tiny_config: Config, user_cache: Path, machine_profile: Profile, tmp_path: Path
) -> None:
    run = run_training(tiny_config(), tmp_path / "run", machine_profile).ledger
    assert run.lines == []
    assert "peak_bytes" not in run.totals
    by_name = {line.component: line.bytes for line in run.memory}
    assert by_name["activations"] is None and by_name["gradients"] is None
    assert by_name["weights"] is not None


# -- clock -------------------------------------------------------------------------------------------------------


def test_the_clock_adds_phases_and_keeps_what_is_left_over() -> None:
    clock = StepClock()
    work = torch.randn(200, 200)
    with clock.step() as times:
        for _ in range(3):
            with clock.phase(Phase.FORWARD):
                work @ work
        with clock.phase(Phase.BACKWARD):
            work @ work
    assert set(times.phase_seconds) == {Phase.FORWARD, Phase.BACKWARD}
    assert times.unattributed_seconds == pytest.approx(times.wall_seconds - sum(times.phase_seconds.values()))
    assert 0 <= times.unattributed_seconds < times.wall_seconds
    with clock.step() as again:
        pass
    assert again.phase_seconds == {} and times.phase_seconds


def test_a_phase_costs_next_to_nothing() -> None:
    """Two readings of the clock: a step of milliseconds must not notice five of them."""
    clock = StepClock()
    import timeit

    def once() -> None:
        with clock.phase(Phase.HOST):
            pass

    assert min(timeit.repeat(once, number=200, repeat=7)) / 200 < 20e-6


def test_typical_steps_leave_out_a_tenth_at_either_end() -> None:
    steps = [StepTimes(float(n)) for n in range(1, 21)]
    assert [step.wall_seconds for step in typical(steps)] == [float(n) for n in range(3, 19)]
    assert typical([]) == []
    assert [step.wall_seconds for step in typical(steps[:3])] == [1.0, 2.0, 3.0]


# -- energy ------------------------------------------------------------------------------------------------------


def rapl(folder: Path, packages: dict[str, int], limit: int = 1_000_000) -> None:
    for name, energy in packages.items():
        (folder / name).mkdir(parents=True, exist_ok=True)
        (folder / name / "max_energy_range_uj").write_text(f"{limit}\n")
        (folder / name / "energy_uj").write_text(f"{energy}\n")


def test_energy_sums_packages_and_survives_wrap_around(tmp_path: Path) -> None:
    rapl(tmp_path, {"intel-rapl:0": 900_000, "intel-rapl:1": 0, "intel-rapl:0:0": 5})
    meter = EnergyMeter(tmp_path)
    assert meter.joules() == 0
    rapl(tmp_path, {"intel-rapl:0": 100_000, "intel-rapl:1": 50_000, "intel-rapl:0:0": 999})
    assert meter.joules() == pytest.approx(0.25)  # 0.2 J past the wrap, 0.05 J of the other package


def test_no_counters_is_no_measurement(tmp_path: Path) -> None:
    assert EnergyMeter(tmp_path).joules() is None


class FakeNvml:
    """The calls of nvidia-ml-py that we make, on a board that draws 300 W of its 350 and is held down by it."""

    NVML_CLOCK_SM = 1

    class NVMLError(Exception):
        pass

    def __init__(self, works: bool = True) -> None:
        self.millijoules, self.works = 5_000_000, works

    def nvmlInit(self) -> None:
        if not self.works:
            raise self.NVMLError("no driver")

    def nvmlDeviceGetHandleByIndex(self, index: int) -> str:
        return f"board {index}"

    def nvmlDeviceGetTotalEnergyConsumption(self, handle: str) -> int:
        return self.millijoules

    def nvmlDeviceGetClockInfo(self, handle: str, clock: int) -> int:
        return 1410

    def nvmlDeviceGetMaxClockInfo(self, handle: str, clock: int) -> int:
        return 1980

    def nvmlDeviceGetCurrentClocksThrottleReasons(self, handle: str) -> int:
        return 0x4


def test_the_energy_of_a_board_is_added_to_the_processors(tmp_path: Path) -> None:
    nvml = FakeNvml()
    rapl(tmp_path, {"intel-rapl:0": 0})
    meter = EnergyMeter(tmp_path, accelerated=True, gpu=find_gpu_monitor(0, nvml))
    nvml.millijoules += 3_000
    rapl(tmp_path, {"intel-rapl:0": 500_000})
    assert meter.joules() == pytest.approx(3.5)
    assert meter.basis == "RAPL counters of the whole package and NVML counter of the board"


def test_the_processor_alone_does_not_pass_for_an_accelerated_run(tmp_path: Path) -> None:
    rapl(tmp_path, {"intel-rapl:0": 0})
    assert find_gpu_monitor(0, FakeNvml(works=False)) is None
    assert EnergyMeter(tmp_path, accelerated=True, gpu=None).joules() is None


def test_the_board_says_what_holds_its_clock_down() -> None:
    board = find_gpu_monitor(0, FakeNvml())
    assert board is not None and board.facts() == {}
    board.sample()
    assert board.facts() == {
        "clock_hertz": 1.41e9, "clock_highest_hertz": 1.98e9, "clock_held_down_by": {"power": 1.0},
    }  # fmt: skip


def test_cores_count_how_often_heat_slowed_them(tmp_path: Path) -> None:
    assert processor_throttle_count(tmp_path) is None
    for core, count in enumerate((3, 4)):
        (tmp_path / f"cpu{core}" / "thermal_throttle").mkdir(parents=True)
        (tmp_path / f"cpu{core}" / "thermal_throttle" / "core_throttle_count").write_text(f"{count}\n")
    assert processor_throttle_count(tmp_path) == 7


def test_kernels_of_a_device_count_where_they_were_launched() -> None:
    """A step of two products and an update; between their kernels the device waits for the host."""
    marks = [
        (STEP_SCOPE, 0, 100), (f"{PHASE_SCOPE}forward", 0, 40), (f"{MODULE_SCOPE}qkv", 1, 20),
        ("aten::linear", 2, 19), ("aten::mm", 3, 18), ("aten::_scaled_dot_product_flash_attention", 21, 30),
        (f"{PHASE_SCOPE}optimizer", 50, 90), ("aten::_fused_adamw_", 51, 80),
    ]  # fmt: skip
    events = [Event(name, start, end, link=number) for number, (name, start, end) in enumerate(marks, 1)]
    for kernel, start, end, link in (("gemm", 10, 200, 5), ("flash", 200, 260, 6), ("adam", 300, 350, 8)):
        events.append(Event(kernel, start, end, DEVICE, lane=7, link=link))
    spans = nest(events, _place, by_thread=False)
    found = {line.key: round((line.seconds or 0.0) * 1e9) for line in _device_lines(spans, events, steps=1)}
    assert found == {
        (Phase.FORWARD, Kind.HOST, "dispatch"): 10,
        (Phase.FORWARD, Kind.MATMUL, "qkv"): 190,
        (Phase.FORWARD, Kind.ATTENTION, "other"): 60,
        (Phase.OPTIMIZER, Kind.OPTIMIZER, "adamw"): 40 + 50,
    }


def test_compiled_blocks_have_the_keys_of_their_plan(tiny_config: Config, machine_profile: Profile) -> None:
    """Marks as PyTorch leaves them around what it compiled, on a CPU and, fused kernels apart, on CUDA."""
    marks = [
        (STEP_SCOPE, 0, 100, -1),
        (f"{PHASE_SCOPE}forward", 0, 50, -1), (f"{MODULE_SCOPE}Transformer", 1, 49, -1),
        ("Torch-Compiled Region: 0/0", 2, 40, -1), ("CompiledFunction", 3, 39, 7),
        ("## Call CompiledFxGraph abc ##", 4, 38, -1), ("triton_poi_fused_gelu_0", 5, 8, -1),
        ("aten::addmm", 9, 20, -1), ("aten::_scaled_dot_product_flash_attention_for_cpu", 21, 30, -1),
        (f"{PHASE_SCOPE}backward", 50, 90, -1),
        (f"{BACKWARD_NODE}CompiledFunctionBackward", 51, 80, 7), ("CompiledFunctionBackward", 52, 79, 7),
        ("## Call CompiledFxGraph def ##", 53, 78, -1), ("aten::mm", 54, 60, -1),
        ("aten::_scaled_dot_product_flash_attention_for_cpu_backward", 61, 70, -1),
    ]  # fmt: skip
    events = [Event(name, start, end, sequence=sequence) for name, start, end, sequence in marks]
    lines = _lines(nest(events, _place, by_thread=False), steps=1)
    plan = plan_run(tiny_config(train={"compile": "on"}), machine_profile)
    planned = {line.key for line in plan.lines if line.operation == COMPILED}
    assert {line.key for line in lines if line.kind is not Kind.HOST} == planned
    uncompiled = plan_run(tiny_config(train={"compile": "off"}), machine_profile)
    for kind, seconds in uncompiled.seconds_by_kind().items():
        if kind in (Kind.MATMUL, Kind.ATTENTION):
            assert plan.seconds_by_kind()[kind] == pytest.approx(seconds)


@pytest.mark.long  # the compiler takes half a minute the first time
@pytest.mark.parametrize("model", [LLAMA, LLAMA | {"moe": {"experts": 4, "experts_per_token": 2}}])
def test_a_recorded_step_of_compiled_blocks_has_the_keys_of_its_plan(
    model: dict[str, Any], tiny_config: Config, machine_profile: Profile, user_cache: Path, tmp_path: Path
) -> None:
    """And none of the recorded steps compiles again, as a hook within a block would have it."""
    config = tiny_config(model, train={"steps": 14, "profile_steps": 2, "compile": "on"})
    run = run_training(config, tmp_path / "run", machine_profile).ledger
    plan = Ledger.load(tmp_path / "run" / "plan.json")
    found, planned = ({line.key for line in ledger.lines if line.phase is not Phase.DATA} for ledger in (run, plan))
    assert found == planned and any(line.operation == COMPILED for line in run.lines)
    dispatch = sum(line.seconds or 0.0 for line in run.lines if line.operation == "dispatch")
    assert dispatch < 0.5 * run.totals["step_seconds"].value


def test_dispatch_on_a_device_is_what_its_kernels_leave_of_the_phase() -> None:
    lines = [
        Line(Phase.FORWARD, Kind.HOST, "dispatch", seconds=9.0), Line(Phase.FORWARD, Kind.MATMUL, "qkv", seconds=3.0),
        Line(Phase.BACKWARD, Kind.HOST, "dispatch", seconds=9.0), Line(Phase.BACKWARD, Kind.MATMUL, "qkv", seconds=3.0),
    ]  # fmt: skip
    found = _dispatch_by_the_clock(lines, {Phase.FORWARD: 4.0, Phase.BACKWARD: 2.0})
    assert [line.seconds for line in found] == [1.0, 3.0, 0.0, 3.0]
