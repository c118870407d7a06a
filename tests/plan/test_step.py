"""One job has one figure: a process is a layout of ones, and whoever asks for the plan of a layout gets the same."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from micro_batch import highest, in_order

from ironlaw.config import RunConfig, build_config
from ironlaw.ledger import UNNAMED, Decisions, Kind, Ledger, Line, Origin, Phase, merge_unnamed
from ironlaw.machine.links import KINDS, RankCosts, RankFabric
from ironlaw.machine.profile import Curve, Profile, load_profile
from ironlaw.machine.timing import MeasuredMachine
from ironlaw.plan import layouts as answers
from ironlaw.plan.memory import peak_memory
from ironlaw.plan.recipe import batch_of, recipe_of
from ironlaw.plan.request_types import Options
from ironlaw.plan.step import plan_run, plan_step
from ironlaw.workload.blocks import Shape
from ironlaw.workload.layout import Layout
from ironlaw.workload.operations import total_flops
from ironlaw.workload.program import layers_of_shape, step, training_operations

CURVE = Curve((256.0, 2.0**24), (1e-4, 1e-2))
COSTS = RankCosts("this", "today", 2, dict.fromkeys(KINDS, CURVE), {"compute": 1.9, "memory": 1.5}, 1e-4, 1e-4, 1e-4)
GPT: dict[str, Any] = {"name": "gpt", "layers": 4, "hidden": 64, "heads": 4, "vocab": 512, "context": 64}
EXPERTS = GPT | {"bias": False, "moe": {"experts": 4, "experts_per_token": 2, "balance_loss": 0.1}}


def config(model: dict[str, Any] = GPT, **tables: Any) -> RunConfig:
    train = {"global_batch": 16, "micro_batch": 2, "precision": "fp32"} | tables.pop("train", {})
    return build_config({"model": model, "train": train, **tables})


SETTINGS: list[dict[str, Any]] = [
    {}, {"train": {"precision": "bf16", "loss": "chunked"}}, {"recompute": {"mode": "full"}},
    {"data": {"mask_documents": True}, "train": {"average_decay": 0.99}}, {"optimizer": {"name": "muon"}},
]  # fmt: skip


@pytest.mark.parametrize("settings", SETTINGS, ids=str)
@pytest.mark.parametrize("model", [GPT, EXPERTS], ids=["dense", "experts"])
def test_a_process_is_a_layout_of_ones(
    model: dict[str, Any], settings: dict[str, Any], machine_profile: Profile
) -> None:
    wanted = config(model, **settings)
    alone = plan_run(wanted, machine_profile)
    one = plan_step(wanted, machine_profile, Layout(micro_batch=2), RankFabric(COSTS)).ledger
    assert one.lines == alone.lines and one.memory == alone.memory and one.totals == alone.totals
    assert one.decisions == alone.decisions


@pytest.mark.parametrize("model", [GPT, EXPERTS, GPT | {"dropout": 0.1}], ids=["dense", "experts", "dropout"])
def test_the_peak_of_two_micro_batches_is_that_of_their_operations_one_by_one(model: dict[str, Any]) -> None:
    """The walk adds up whole layers; operation by operation it comes to the same."""
    wanted = config(model, train={"precision": "bf16"}, recompute={"mode": "every"})
    program = step(wanted.model, batch_of(wanted), Layout(micro_batch=2), recipe_of(wanted, "bf16"))
    assert program.shape is not None
    once = list(in_order(layers_of_shape(program.shape)))
    gradients = sum(op.gradient_bytes for op in once)
    lasting = sum(tensor.bytes for tensor in program.tensors[0])
    assert peak_memory(program).total == lasting + max(highest(once).total, highest(once, gradients).total)


@pytest.mark.parametrize("layout", [{"zero": 3}, {"tp": 2, "sp": True}, {"pp": 2}, {"tp": 2, "pp": 2, "zero": 1}])
def test_plan_rehearsal_and_the_plan_of_a_run_say_the_same(
    layout: dict[str, Any], machine_profile: Profile, monkeypatch: pytest.MonkeyPatch
) -> None:
    from ironlaw.train.parallel.planning import plan_config

    wanted, fabric = config(layout=layout), RankFabric(COSTS)
    monkeypatch.setattr(answers, "load_profile", lambda: machine_profile)
    monkeypatch.setattr(answers, "load_costs", lambda: COSTS)
    asked = answers.result_on_ranks(wanted, Options(ranks=4)).ledger
    run = plan_config(wanted, machine_profile, 4, fabric)
    assert asked.to_json() == run.ledger.to_json()
    # A rehearsal builds the program of the same layout, and holds its collectives and its peak against the trainer's.
    rehearsed = step(wanted.model, batch_of(wanted), run.layout, recipe_of(wanted, "fp32"))
    assert [peak_memory(rehearsed, p).total for p in range(run.layout.pp)] == [s.memory.total for s in run.stages]
    assert rehearsed.collectives == run.program.collectives


@pytest.mark.parametrize("layout", ["zero", "tp", "cp", "pp"])
def test_every_rank_of_a_layout_has_the_keys_of_a_process_and_its_collectives(
    layout: str, machine_profile: Profile
) -> None:
    chosen = {
        "zero": Layout(dp=4, zero=3, micro_batch=2), "tp": Layout(dp=2, tp=2, sp=True, micro_batch=2),
        "cp": Layout(dp=2, cp=2, micro_batch=2), "pp": Layout(dp=2, pp=2, micro_batch=2),
    }[layout]  # fmt: skip
    plan = plan_step(config(), machine_profile, chosen, RankFabric(COSTS)).ledger
    alone = plan_run(config(), machine_profile)
    more = {line.key for line in plan.lines} - {line.key for line in alone.lines}
    assert {line.key for line in alone.lines} <= {line.key for line in plan.lines}
    assert {kind for _, kind, _ in more} == {Kind.COLLECTIVE}


def test_what_a_plan_has_no_name_for_is_one_line_of_its_phase() -> None:
    def line(phase: Phase, kind: Kind, name: str, seconds: float | None) -> Line:
        return Line(phase, kind, name, seconds=seconds, origin=Origin.MEASURED)

    planned = [Line(Phase.FORWARD, Kind.MATMUL, "qkv"), Line(Phase.FORWARD, Kind.OTHER, UNNAMED)]
    found = [
        line(Phase.FORWARD, Kind.MATMUL, "qkv", 1.0), line(Phase.FORWARD, Kind.ELEMENTWISE, "mystery", 0.25),
        line(Phase.FORWARD, Kind.NORM, "riddle", 0.5), line(Phase.DATA, Kind.DATA, "loader", 2.0),
    ]  # fmt: skip
    named = {line.key: line.seconds for line in merge_unnamed(found, planned)}
    assert named == {
        (Phase.FORWARD, Kind.MATMUL, "qkv"): 1.0, (Phase.FORWARD, Kind.OTHER, UNNAMED): 0.75,
        (Phase.DATA, Kind.DATA, "loader"): 2.0,
    }  # fmt: skip


def test_a_phase_takes_as_much_longer_than_its_kernels_as_in_the_whole_step(machine_profile: Profile) -> None:
    """As when forward passes wait for cold caches that kernels timed alone do not know."""
    config = build_config(
        {"model": {"name": "gpt2", "layers": 2}, "data": {"mock": True}, "train": {"precision": "fp32"}}
    )
    alone = MeasuredMachine(machine_profile, {"compute": 1.0, "memory": 1.0}).composition("fp32")
    assert set(alone.values()) == {1.0}
    shares = {Phase.FORWARD: 0.5, Phase.BACKWARD: 0.5, Phase.OPTIMIZER: 0.0}
    measured = replace(machine_profile, reference_step_seconds={"fp32": 1.0}, reference_step_shares={"fp32": shares})
    composed = MeasuredMachine(measured, {"compute": 1.0, "memory": 1.0}).composition("fp32")
    assert composed[Phase.FORWARD] > composed[Phase.BACKWARD] > composed[Phase.OPTIMIZER] == 1.0
    before, after = (plan_run(config, profile) for profile in (machine_profile, measured))
    for phase, factor in composed.items():
        kernels = [
            sum(line.seconds or 0.0 for line in ledger.lines if line.phase is phase and line.kind is not Kind.HOST)
            for ledger in (before, after)
        ]
        assert kernels[1] == pytest.approx(factor * kernels[0])


def test_decisions_survive_the_file(tmp_path: Any) -> None:
    decided = Decisions("bf16", 512, (None, frozenset({"qkv"})), 7)
    Ledger("plan", decisions=decided).save(tmp_path / "plan.json")
    assert Ledger.load(tmp_path / "plan.json").decisions == decided
    assert Ledger.from_json(Ledger("run").to_json()).decisions is None


def test_a_program_has_the_flops_of_its_operations() -> None:
    wanted = config()
    program = step(wanted.model, batch_of(wanted), Layout(micro_batch=2), recipe_of(wanted, "fp32"))
    assert program.flops() == 8 * total_flops(training_operations(Shape(wanted.model, 2, 64)))


@pytest.mark.parametrize(("model", "hidden"), [("llama3-8b", True), ("tiny", False)])
def test_an_accelerator_hides_the_dispatch_of_what_keeps_it_busy(model: str, hidden: bool) -> None:
    """By the profile that an H200 was measured with: large kernels are launched ahead, tiny ones are waited for."""
    results = Path(__file__).parents[2] / "benchmarks" / "results"
    profile = load_profile(results / "gpu-h200-profile.json")
    named: dict[str, Any] = {"name": model, "layers": 4}
    if model == "tiny":
        named |= {"hidden": 32, "heads": 2, "vocab": 300, "context": 16}
    config = build_config({"model": named, "data": {"mock": True}, "train": {"global_batch": 1, "precision": "bf16"}})
    ledger = plan_run(config, profile)
    waits = sum(line.seconds or 0.0 for line in ledger.lines if line.operation == "dispatch")
    assert (waits == 0) == hidden
    assert hidden or waits > 0.5 * ledger.totals["step_seconds"].value
    assert (0.4 < ledger.totals["mfu"].value < 0.8) == hidden
