"""Calibration: finds constants that made-up runs were made with, leaves alone what they say nothing of."""

from dataclasses import replace

import numpy as np
import pytest

from ironlaw.catalog.nodes import parse_cluster
from ironlaw.errors import UserError
from ironlaw.model.config import ModelConfig
from ironlaw.plan.cluster.candidates import TrainingJob
from ironlaw.plan.cluster.layout_space import lacking
from ironlaw.plan.engines.engine import MEANING
from ironlaw.plan.engines.named import engine, own_profiles, profile_path
from ironlaw.plan.measured.calibrate import CONSTANTS, calibrate, save_profile
from ironlaw.plan.measured.read import Run
from ironlaw.plan.measured.validate import evaluate
from ironlaw.workload.layout import Layout

TRUE = {"host_layer_seconds": 2.0e-3, "matmul_slowdown": 1.35, "network_slowdown": 2.0}
LAYOUTS = [
    (count, tp, micro, hidden)
    for count in (8, 32) for tp in (1, 2, 8) for micro in (1, 4) for hidden in (1024, 4096)
]  # fmt: skip


def made_up(constants: dict[str, float] = TRUE, noise: float = 0.02, count: int = 24) -> list[Run]:
    """Runs whose step times come from the generic engine with other constants, and some noise."""
    truth = replace(engine("generic"), **constants)
    runs = []
    for i, (accelerators, tp, micro, hidden) in enumerate(LAYOUTS[:count]):
        model = ModelConfig(layers=24, hidden=hidden, heads=hidden // 64, vocab=50304, context=2048)
        layout = Layout(dp=accelerators // tp, tp=tp, micro_batch=micro, recompute="full")
        job = TrainingJob(model, layout, 2048, 128)
        cluster = parse_cluster(f"{accelerators}xa100-sxm-80gb")
        runs.append(Run(f"r{i}", "g", truth, cluster, "bf16", job, 1.0, None, True, "time", ()))
    seconds = evaluate(runs).step_seconds
    wobble = np.exp(np.random.default_rng(0).normal(0, noise, len(runs)))
    generic = engine("generic")
    return [
        replace(run, engine=generic, step_seconds=float(s * w)) for run, s, w in zip(runs, seconds, wobble, strict=True)
    ]


def planned_error(runs: list[Run], planner) -> float:
    seconds = evaluate([replace(run, engine=planner) for run in runs]).step_seconds
    return float(np.mean(np.abs(seconds / np.array([run.step_seconds for run in runs]) - 1)))


def test_constants_that_the_runs_were_made_with_are_found():
    found = calibrate(made_up(), "mine")
    after = {c.name: c.after for c in found.constants}
    assert after["host_layer_seconds"] == pytest.approx(TRUE["host_layer_seconds"], rel=0.15)
    assert after["network_slowdown"] == pytest.approx(TRUE["network_slowdown"], rel=0.25)
    assert found.improved and found.error_in_sample < 0.04 < 0.15 < found.error_before
    assert found.error_in_sample <= found.error_left_out < 0.06
    assert planned_error(made_up(noise=0.0), found.engine) < 0.05


def test_what_runs_say_nothing_of_stays():
    one_node = [run for run in made_up() if run.cluster.count == 8]
    found = {c.name: c for c in calibrate(one_node, "mine").constants}
    for name in ("network_slowdown", "cp_hidden", "fsdp_hidden", "pp_hidden", "score_traffic"):
        assert found[name].after == pytest.approx(found[name].before, rel=0.02), name
        assert found[name].spread > 0.95


def test_runs_that_fit_already_change_little_and_never_worsen():
    exact = made_up({}, noise=0.03)
    found = calibrate(exact, "mine")
    assert planned_error(made_up({}, noise=0.0), found.engine) < 0.02
    assert found.error_left_out <= found.error_before * 1.25


def test_one_disturbed_run_does_not_decide():
    runs = made_up(noise=0.0)
    runs[3] = replace(runs[3], step_seconds=(runs[3].step_seconds or 0) * 8)
    found = calibrate(runs, "mine")
    others = [run for i, run in enumerate(runs) if i != 3]
    assert planned_error(others, found.engine) < 0.06


def test_constants_stay_within_what_hardware_allows():
    wild = [replace(run, step_seconds=(run.step_seconds or 0) / 20) for run in made_up()]
    found = calibrate(wild, "mine")
    for constant, moved in zip(CONSTANTS, found.constants, strict=True):
        assert min(constant.low, moved.before) * 0.999 <= moved.after <= max(constant.high, moved.before) * 1.001
        assert constant.name in MEANING and constant.low < constant.high


def test_too_few_runs_and_several_engines_are_user_errors():
    with pytest.raises(UserError, match="4 or more"):
        calibrate(made_up(count=3), "mine")
    runs = made_up()
    runs[0] = replace(runs[0], engine=engine("nanotron"))
    with pytest.raises(UserError, match="--from"):
        calibrate(runs, "mine")


def test_profiles_round_trip(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    found = calibrate(made_up(), "mine", engine("nemo"))
    path = save_profile("mine", found, "my_runs.csv")
    assert path == profile_path("mine") and list(own_profiles()) == ["mine"]
    read = engine("mine")
    assert read.name == "mine" and read.gradient_bytes == engine("nemo").gradient_bytes and read.default_sp
    for constant in CONSTANTS:
        assert getattr(read, constant.name) == pytest.approx(getattr(found.engine, constant.name), rel=1e-4)
    assert engine("nemo") is engine("nemo")
    for text, told in {
        'host_layer_seconds = "slow"': "must be float", "host_layer_seconds = -1.0": "must be float",
        "host_layer_seconds = nan": "must be float", "lacks = [3]": "must be tuple",
        "[by_generation]\nhopper = 3": "by_generation must be", "[by_generation.hopper]\nx = 1": "unknown key 'x'",
    }.items():  # fmt: skip
        path.write_text(text)
        with pytest.raises(UserError, match=told):
            engine("mine")
    path.write_text('lacks = ["tpp"]')
    with pytest.raises(UserError, match="did you mean"):
        lacking(engine("mine"), Layout())
    path.write_text("host_layer = 1\n")
    with pytest.raises(UserError, match="host_layer"):
        engine("mine")
    for wrong in ("../mine", "", "nemo"):
        with pytest.raises(UserError):
            profile_path(wrong)
    with pytest.raises(UserError, match="unknown engine 'mina'"):
        engine("mina")
