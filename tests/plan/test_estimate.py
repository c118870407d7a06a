"""The plan of a run on a machine: it adds up, follows the machine, and its interval follows the record."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from ironlaw.config import RunConfig
from ironlaw.errors import UserError
from ironlaw.ledger import Kind, Ledger, Phase
from ironlaw.machine.profile import MatmulFit, Profile
from ironlaw.machine.timing import MeasuredMachine
from ironlaw.plan import totals as record
from ironlaw.plan.step import choose_precision, plan_run
from ironlaw.plan.totals import LIBRARY_BYTES, PROFILED_ALLOCATION, TRAINER_ALLOCATION, fits
from ironlaw.workload.operations import Operation

Config = Callable[..., RunConfig]


@pytest.fixture
def plan(tiny_config: Config, machine_profile: Profile, user_cache: Path) -> Callable[..., Ledger]:
    return lambda *args, **sections: plan_run(tiny_config(*args, **sections), machine_profile)


def test_totals_are_the_sums_of_the_table(plan: Callable[..., Ledger]) -> None:
    ledger = plan()
    assert ledger.totals["step_seconds"].value == pytest.approx(sum(line.seconds or 0 for line in ledger.lines))
    assert ledger.totals["peak_bytes"].value == sum(ledger.memory_bytes().values())
    assert ledger.totals["flops_per_step"].value == ledger.flops()
    assert sum(ledger.seconds_by_phase().values()) == pytest.approx(ledger.totals["step_seconds"].value)
    assert set(ledger.seconds_by_phase()) == {Phase.FORWARD, Phase.BACKWARD, Phase.OPTIMIZER}
    keys = [(line.phase, line.kind, line.operation) for line in ledger.lines]
    assert len(keys) == len(set(keys))


def test_accumulation_does_the_same_work_in_less_memory(plan: Callable[..., Ledger]) -> None:
    whole, parts = plan(), plan(train={"micro_batch": 2})
    assert parts.totals["flops_per_step"].value == whole.totals["flops_per_step"].value
    assert parts.memory_bytes()["activations"] < whole.memory_bytes()["activations"] / 2
    one, four = (next(ledger.select(operation="qkv", phase=Phase.FORWARD)).count for ledger in (whole, parts))
    assert one is not None and four == 4 * one


def test_a_slower_machine_takes_longer(tiny_config: Config, machine_profile: Profile, user_cache: Path) -> None:
    config = tiny_config()
    plain = plan_run(config, machine_profile).totals["step_seconds"].value
    disturbed = replace(machine_profile, interference={"compute": [2.0], "memory": [2.0]})
    undisturbed = replace(machine_profile, interference={"compute": [1.0], "memory": [1.0]})
    slow, fast = (plan_run(config, profile).totals["step_seconds"].value for profile in (disturbed, undisturbed))
    assert slow == pytest.approx(2 * fast, rel=0.01)
    assert fast < plain < slow


def test_precision_is_chosen_by_time_and_only_for_a_clear_gain(
    tiny_config: Config, machine_profile: Profile, user_cache: Path
) -> None:
    config = tiny_config({"hidden": 512}, train={"precision": "auto", "global_batch": 64})
    assert choose_precision(config, machine_profile).value == "fp32"  # no gain

    def faster(fit: MatmulFit) -> MatmulFit:
        names = ("fixed_seconds", "seconds_per_flop", "per_m", "per_n", "per_k")
        return replace(fit, **{name: getattr(fit, name) / 20 for name in names})

    bf16 = {kernel: faster(fit) for kernel, fit in machine_profile.matmul["bf16"].items()}
    fast = replace(machine_profile, matmul=machine_profile.matmul | {"bf16": bf16})
    choice = choose_precision(config, fast)
    assert choice.value == "bf16" and "fp32" in choice.reason
    wanted = tiny_config(train={"precision": "bf16"})
    assert choose_precision(wanted, machine_profile).reason == "train.precision in the config"


def test_fits_compares_the_process_with_the_memory(
    tiny_config: Config, machine_profile: Profile, user_cache: Path
) -> None:
    for steps, held in ((0, TRAINER_ALLOCATION), (5, PROFILED_ALLOCATION)):
        ledger = plan_run(tiny_config(train={"profile_steps": steps}), machine_profile)
        needed, tensors = (ledger.totals[name].value for name in ("resident_bytes", "peak_bytes"))
        assert needed == held[1] * tensors + machine_profile.runtime_bytes + LIBRARY_BYTES
    needed = plan_run(tiny_config(), machine_profile).totals["resident_bytes"].value
    for memory, answer in ((needed + 1, True), (needed - 1, False)):
        assert fits(plan_run(tiny_config(), replace(machine_profile, memory_bytes=int(memory)))) is answer


def test_other_threads_than_measured_are_refused(
    tiny_config: Config, machine_profile: Profile, user_cache: Path
) -> None:
    with pytest.raises(UserError, match="ironlaw measure --threads 3"):
        plan_run(tiny_config(train={"threads": 3}), machine_profile)


def test_the_interval_is_learned_from_ones_own_runs(plan: Callable[..., Ledger]) -> None:
    before = plan().totals["step_seconds"]
    assert (before.low, before.high) == pytest.approx(
        (record.DEFAULT_LOW * before.value, record.DEFAULT_HIGH * before.value)
    )
    for number in range(11):
        record.remember("2026", planned_seconds=1.0, measured_seconds=1.0 + number / 100, run=f"run{number}")
    after = plan().totals["step_seconds"]
    assert after.value == before.value
    assert (after.low, after.high) == pytest.approx((after.value, 1.09 * after.value))
    assert "11 past runs" in after.basis


def test_a_few_runs_are_not_enough_and_torn_lines_are_none(user_cache: Path, machine_profile: Profile) -> None:
    record.remember("2026", 1.0, 5.0, "run")
    with record.record_path().open("a", encoding="utf-8") as file:
        file.write('{"planned_step_seconds": 0, "measured_step_seconds": 1}\n{"plan\n\n')
    assert record.past_ratios() == [5.0]
    assert record.time_interval(machine_profile)[:2] == (record.DEFAULT_LOW, record.DEFAULT_HIGH)


def test_energy_is_a_range_of_a_known_processor_and_absent_for_another(
    tiny_config: Config, machine_profile: Profile, user_cache: Path
) -> None:
    energy = plan_run(tiny_config(), machine_profile).totals["energy_joules"]
    assert energy.low is not None and energy.high is not None and energy.low < energy.value < energy.high
    unknown = replace(machine_profile, name="Abacus 3000")
    assert "energy_joules" not in plan_run(tiny_config(), unknown).totals


def test_products_of_experts_by_onednn_are_copied_into_place(machine_profile: Profile) -> None:
    """oneDNN cannot write into a slice: each expert's product is a tensor of its own first."""
    profile = replace(machine_profile, onednn=machine_profile.matmul["fp32"])
    experts = Operation("expert_up", Kind.MATMUL, Phase.FORWARD, "moe_block", "matmul", matmul=(64, 256, 128), batch=8)
    seconds = {
        (known, op.group): MeasuredMachine(measured, dict.fromkeys(("compute", "memory"), 1.0), whole_steps=False)
        .time(op)
        .seconds
        for known, measured in (("onednn", profile), ("other", replace(profile, onednn={})))
        for op in (experts, replace(experts, group="block"))
    }
    copied = seconds["onednn", "moe_block"] - seconds["onednn", "block"]
    assert copied == pytest.approx(profile.curve("concatenate", "fp32").at(8 * 64 * 256)) and copied > 0
    assert seconds["other", "moe_block"] == seconds["other", "block"] == seconds["onednn", "block"]


def test_the_plan_of_emulated_products_says_that_their_rounding_is_not_planned(plan: Callable[..., Ledger]) -> None:
    wide, narrow = (plan(train={"precision": precision}) for precision in ("bf16", "mxfp4"))
    assert "emulated" in narrow.facts["precision_reason"] and "emulated" not in wide.facts["precision_reason"]
    seconds, planned = narrow.totals["step_seconds"], wide.totals["step_seconds"]
    assert seconds.high is not None and planned.high is not None
    assert seconds.high / seconds.value > 5 * planned.high / planned.value
    assert seconds.low == planned.low and "emulated" in seconds.basis


@pytest.mark.parametrize(
    ("gpu", "capability", "emulated"),
    [
        ("NVIDIA A100-SXM4-80GB", (8, 0), {"fp8", "fp8_rowwise", "mxfp8", "nvfp4", "mxfp4"}),
        ("NVIDIA H100 80GB HBM3", (9, 0), {"mxfp8", "nvfp4", "mxfp4"}),
        ("NVIDIA B200", (10, 0), {"mxfp4"}),
    ],
)
def test_a_measured_gpu_emulates_what_its_units_do_not_multiply(
    gpu: str,
    capability: tuple[int, int],
    emulated: set[str],
    tiny_config: Callable[..., RunConfig],
    machine_profile: Profile,
) -> None:
    profile = replace(machine_profile, device="cuda", name=gpu, capability=capability)
    for precision in ("fp8", "fp8_rowwise", "mxfp8", "nvfp4", "mxfp4"):
        reason = plan_run(tiny_config(train={"precision": precision}), profile).facts["precision_reason"]
        assert ("emulated" in reason) == (precision in emulated), precision
