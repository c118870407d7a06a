"""A job on several accelerators is planned by the planner that has the record, with our own conventions."""

from dataclasses import replace

import pytest
import tomli_w

from ironlaw.config import build_config
from ironlaw.errors import UserError
from ironlaw.plan.request import plan_request
from ironlaw.plan.request_types import Options
from ironlaw.train.parallel.planning import choose_layout, plan_on_accelerators, with_layout
from ironlaw.train.parallel.rehearse import at_scale
from ironlaw.workload.layout import parse_layout
from ironlaw.workload.program import step
from ironlaw.workload.recipe import Recipe, StepBatch
from ironlaw.workload.sections import Recompute

MODEL = {"layers": 4, "hidden": 512, "heads": 8, "vocab": 8192, "context": 1024}


def config_of(experts=None, **layout):
    train = {"steps": 10, "global_batch": 32, "micro_batch": 2, "precision": "bf16", "sequence": 1024}
    data = {"mock": True}
    return build_config({"model": MODEL | (experts or {}), "train": train, "data": data, "layout": layout})


@pytest.fixture
def accelerators(machine_profile):
    bf16 = {"bf16": machine_profile.matmul["fp32"]} | machine_profile.matmul
    return replace(machine_profile, device="cuda", name="NVIDIA H100 80GB HBM3", matmul=bf16, memory_bytes=80 * 2**30)


def test_its_collectives_are_those_of_the_program(accelerators, user_cache):
    config = config_of(pp=2, zero=1)
    ledger = plan_on_accelerators(config, accelerators, 8, 8).ledger
    layout = parse_layout("dp=4 pp=2 zero=1 micro_batch=2")
    program = step(config.model, StepBatch(32, 1024), layout, Recipe("bf16", cuda=True, gloo=False))
    sent = {f"{c.dimension} {c.kind}" for rank in program.collectives for c in rank}
    assert {line.operation for line in ledger.select(phase="communication")} == sent


def test_gradients_sent_in_16_bits_are_half_as_many(accelerators, user_cache):
    config = config_of(zero=0)
    narrow = config.model_copy(update={"communication": config.communication.model_copy(update={"gradients": "bf16"})})
    seconds = [
        sum(
            line.seconds
            for line in plan_on_accelerators(c, accelerators, 8, 8).ledger.select(operation="replicate all_reduce")
        )
        for c in (config, narrow)
    ]
    assert seconds[1] < 0.8 * seconds[0]


def test_an_accelerator_that_nobody_catalogued_is_said_to_be_unknown(accelerators, user_cache):
    with pytest.raises(UserError, match="unknown accelerator"):
        plan_on_accelerators(config_of(), replace(accelerators, name="Acme Turbo"), 8, 8)


@pytest.mark.parametrize(
    "text",
    ["dp=4", "dp=4 zero=3", "dp=2 tp=2 sp=1", "pp=4", "dp=2 pp=2 zero=1", "dp=2 cp=2 zero=2", "dp=4 ep=4"],
)
def test_a_job_has_one_figure_wherever_it_is_planned(accelerators, user_cache, tmp_path, text):
    """`plan CONFIG --on`, the rehearsal at scale and the plan of the run itself: the same memory and time."""
    layout = parse_layout(f"{text} micro_batch=2")
    experts = {"moe": {"experts": 8, "experts_per_token": 2}, "gated_ffn": True, "activation": "silu", "bias": False}
    config = with_layout(config_of(experts if layout.ep > 1 else {}), layout)
    path = tmp_path / "config.toml"
    path.write_text(tomli_w.dumps(config.model_dump(mode="json", exclude_none=True, exclude={"layout"})))
    asked = Options(engine="ironlaw", layout=str(layout))
    planned = plan_request(str(path), on="4xh100-sxm-80gb", options=asked).ledger
    run = plan_on_accelerators(config, accelerators, 4, 4).ledger
    _, peaks = at_scale(config.model, layout, 1024, 32)
    for name in ("step_seconds", "peak_bytes"):
        assert planned.totals[name].value == run.totals[name].value, name
    assert planned.totals["peak_bytes"].value == max(peak.total for peak in peaks)
    assert {line.component for line in planned.memory} == {line.component for line in run.memory}
    assert run.decided.precision == "bf16" and run.facts["ranks"] == 4  # what the trainer follows


@pytest.mark.parametrize("text", ["dp=4 zero=3", "dp=2 pp=2"])
def test_a_budget_on_accelerators_is_one_step_of_memory_and_time(accelerators, user_cache, tmp_path, text):
    """The memory is within the budget, the time is that of what each layer recomputes, and the trainer is told just
    that. One process alone would need more than the budget: it is one rank's."""
    layout = parse_layout(f"{text} micro_batch=2")
    config = with_layout(config_of(), layout)
    kept = plan_on_accelerators(config, accelerators, 4, 4)
    least = plan_on_accelerators(config.model_copy(update={"recompute": Recompute(mode="full")}), accelerators, 4, 4)
    budget = (kept.peak_bytes + least.peak_bytes) / 2
    within = config.model_copy(update={"recompute": Recompute(mode="budget", budget=str(int(budget)))})
    run = plan_on_accelerators(within, accelerators, 4, 4)
    policies = run.ledger.decided.recompute
    assert run.peak_bytes <= budget and sum(policy is not None for policy in policies) > 0
    assert kept.step_seconds < run.step_seconds < least.step_seconds
    again = {line.operation.removesuffix(" again") for line in run.ledger.lines if line.operation.endswith(" again")}
    program = step(config.model, StepBatch(32, 1024), layout, Recipe("bf16", True, gloo=False, recompute=policies))
    ran = {op.name.removesuffix(" again") for stage in (0, len(program.stages) - 1)
           for op, times in program.operations(stage) if times and op.name.endswith(" again")}  # fmt: skip
    assert again == ran
    path = tmp_path / "config.toml"
    path.write_text(tomli_w.dumps(within.model_dump(mode="json", exclude_none=True, exclude={"layout"})))
    asked = Options(engine="ironlaw", layout=f"{layout} recompute=budget:{budget / 1e6:.6f}MB")
    planned = plan_request(str(path), on="4xh100-sxm-80gb", options=asked).ledger
    assert planned.decided.recompute == policies
    assert planned.totals["peak_bytes"].value == run.peak_bytes
    assert planned.totals["step_seconds"].value == run.step_seconds


def test_the_layout_of_accelerators_is_searched_with_their_planner(accelerators, user_cache, monkeypatch):
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "8")
    choice = choose_layout(config_of(), accelerators, 8)
    planned = plan_on_accelerators(with_layout(config_of(), choice.best.layout), accelerators, 8, 8)
    assert planned.fits and str(choice.best.layout) in choice.reason
    for text in ("dp=8 micro_batch=2", "tp=8 micro_batch=4", "dp=2 pp=4 micro_batch=2"):
        other = plan_on_accelerators(with_layout(config_of(), parse_layout(text)), accelerators, 8, 8)
        assert planned.step_seconds <= other.step_seconds
