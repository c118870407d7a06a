"""Every rule fires on the fault planted for it, is named first, and stays silent on a healthy run."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from synthetic import make_config, make_profile, make_run

from ironlaw.explain.diagnose import RULES, Diagnosis, diagnose
from ironlaw.explain.evidence import RunEvidence
from ironlaw.explain.gap import subtract_ledgers
from ironlaw.explain.measures import LOOP_SECONDS, MEASURES
from ironlaw.explain.observed_remedies import PROPOSALS, ObservedPlans
from ironlaw.explain.rule import Axis, Tier
from ironlaw.ledger import Kind, Ledger, Phase
from ironlaw.plan.step import plan_run


def verdict(plan: Ledger, gains: dict[str, float] | None = None, **changes: Any) -> Diagnosis:
    run = make_run(plan, **changes)
    return diagnose(RunEvidence(plan, run, subtract_ledgers(plan, run), gains or {}))


def wall(**seconds: float) -> dict[str, Any]:
    return {"facts": {"wall_seconds": {"training": 60.0, "evaluation": 1.0, "checkpoint": 0.3} | seconds}}


ODD = {"module": "head", "shape": [50257, 768], "aligned": [50304, 768], "seconds": 2e-3, "aligned_seconds": 1e-3}

COUNTED = ("broadcasts", "float64_operations", "decompositions", "attention_masked", "attention_mask_rank", "denormals",
           "half_operations", "operation_slow", "outputs_unread", "passes_apart")  # fmt: skip

PLANTED: dict[str, dict[str, Any]] = {
    **{
        name: {
            "facts": {name: {"part": 0.9, "place": "a.py:4", "lines": [], "operation": "sort"}},
            "phases": {"forward": 0.1, "backward": 0.2},
        }
        for name in COUNTED
    },
    "input_bound": {"phases": {"data": 0.1}},
    "host_bound": {"phases": {"host": 0.1}},
    "module_again": {"phases": {"host": 0.1}, "facts": {"module_again": {"part": 0.9, "place": "a.py:2"}}},
    "machine_slow": {"facts": {"machine_speed": 0.8}},
    "programs_beside": {"facts": {"programs_beside": {"part": 0.5, "place": "python a.py"}, "other_load": 0.5}},
    "steps_grow": {"facts": {"steps_grow": {"part": 0.5, "place": "a.py:7", "lines": []}}},
    "irregular_steps": {"facts": {"slow_steps_fraction": 0.3}},
    "unattributed": {"unattributed": 0.12},
    "evaluation_frequent": wall(evaluation=15.0),
    "checkpoint_frequent": wall(checkpoint=8.0),
    "off_plan": {"kinds": {"matmul": 1.4}},
    "slower_throughout": {"kinds": dict.fromkeys(("matmul", "attention", "elementwise", "norm", "loss"), 1.6)},
    "precision": {"gains": {"precision": 0.4}},
    "oversubscribed": {"gains": {"threads": 0.3}, "facts": {"threads": 4, "cores": 2}},
    "threads_few": {"gains": {"threads": 0.3}, "facts": {"threads": 1, "cores": 2}},
    "memory_grows": {"facts": {"memory_grows": {"bytes_per_step": 2**20, "holder": "losses", "place": "a.py:7"}}},
    "gradients_uncleared": {"facts": {"gradients_uncleared": {"place": "a.py:4", "per_step": 1.0}}},
    "recompiles": {"facts": {"wall_seconds": {"training": 60.0}, "recompile_seconds": 20.0}},
    "mode_left_on": {
        "gains": {"mode": 0.3},
        "facts": {"left_on": [{"name": "Anomaly detection", "saved": 0.4, "place": "a.py:1"}]},
    },
    "float64": {"gains": {"float64": 0.4}, "facts": {"float64": {"saved": 0.5, "place": "a.py:2"}}},
    "half_slow": {"gains": {"half": 0.4}, "facts": {"half": {"saved": 0.5, "place": "a.py:2"}}},
    "profiler_left_on": {"facts": {"profiled": "a.py:3"}},
    "update_unfused": {"gains": {"fused_update": 0.2}},
    "gradients_idle": {"facts": {"gradients_idle": {"part": 0.9, "place": "a.py:5"}}, "phases": {"backward": 0.2}},
    "padding": {
        "facts": {"padding": {"part": 0.9, "columns": 0.5, "place": "a.py:2"}},
        "phases": {"forward": 0.1, "backward": 0.2},
    },
    "values_unread": {
        "facts": {"values_unread": {"part": 0.5, "place": "a.py:3", "lines": []}},
        "phases": {"forward": 0.1, "backward": 0.2},
    },
    "vocabulary_unused": {
        "facts": {"vocabulary_unused": {"part": 0.9, "optimizer": 0.9, "place": "a.py:4", "rows": 9000, "unused": 0.9}},
    },
    "inputs_differentiated": {"facts": {"inputs_differentiated": {"part": 0.9, "place": "a.py:4", "lines": []}}},
    "written_out": {
        "facts": {"written_out": {"part": 0.9, "place": "a.py:4", "lines": [], "function": "gelu", "operations": 7}},
        "phases": {"forward": 0.1, "backward": 0.2},
    },
    "weights_combined": {"facts": {"weights_combined": {"part": 0.9, "place": "a.py:4", "lines": []}}},
    "zeros_multiplied": {
        "facts": {"zeros_multiplied": {"part": 0.5, "place": "a.py:4", "lines": ["a.py:3"]}},
        "phases": {"forward": 0.1, "backward": 0.2},
    },
    "thread_busy": {
        "facts": {"busy_thread": {"part": 0.5, "place": "a.py:7"}, "paused_seconds": 0.1, "other_load": 0.0},
    },
    "copies": {"facts": {"copies": {"part": 0.9, "place": "a.py:3", "lines": ["a.py:7"]}}},
    "updates_again": {"facts": {"updates_again": {"place": "a.py:8", "per_step": 1.0}}},
    "optimizer_rebuilt": {"facts": {"optimizer_rebuilt": {"place": "a.py:4", "per_step": 1.0}}},
    "left_in_eval": {"facts": {"left_in_eval": {"place": "a.py:1", "per_step": 1.0}}},
    "graphs_again": {"facts": {"graphs_again": {"part": 0.5, "place": "a.py:5"}}, "phases": {"backward": 0.2}},
    "line_slow": {
        "facts": {
            "line_slow": {"place": "a.py:5", "lines": [], "forward": 0.9, "backward": 0.9},
            "device": "cpu",
        }
    },
    "rows_untouched": {
        "facts": {"rows_untouched": {"part": 0.0, "of_backward": 0.9, "place": "a.py:6"}},
        "phases": {"backward": 0.2},
    },
    "update_by_hand": {
        "facts": {"lines": {"optimizer": [["a.py:8", 0.9], ["a.py:9", 0.1]]}, "update_lines": ["a.py:9"]},
        "phases": {"optimizer": 0.1},
    },
    "attention_kernel": {"gains": {"native": 0.2}},
    "forwards_unread": {"facts": {"forwards_unread": {"part": 0.5, "place": "a.py:9"}}},
    "attention_unfused": {"gains": {"attention": 0.3}},
    "attention_unfused_trace": {"facts": {"unfused_attention": True}},
    "batch_small": {"gains": {"batch": 0.6}},
    "misaligned": {"gains": {"alignment": 0.2}, "facts": {"misaligned": [ODD]}},
    "sync_points": {"facts": {"sync_points": [{"place": "a.py:3", "call": "item", "per_step": 9, "seconds": 1.0}]}},
    "logging_frequent": {"facts": {"logging_fraction": 0.9}, "phases": {"host": 0.1}},
    "sync_in_accumulation": {"facts": {"gradient_syncs_per_step": 4.0}, "phases": {"communication": 0.1}},
    "communication_bound": {"phases": {"communication": 0.1}},
    "bubble": {"facts": {"bubble_fraction": 0.3}},
    "straggler": {"facts": {"rank_own_seconds": [0.05, 0.3]}},
    "launch_bound": {
        "facts": {"device": "cuda", "source": "trace", "precision": "bf16"},
        "phases": {"host": 0.3, "idle": 0.05},
    },
    "no_matrix_units": {"facts": {"device": "cuda", "precision": "fp32"}},
    "tile_quantisation": {"facts": {"product_shapes": [[130, 130, 64]], "compute_units": 132}},
    "fragmentation": {"facts": {"reserved_bytes": 1e12}},
    "throttled": {"facts": {"clock_hertz": 1.2e9, "clock_highest_hertz": 1.9e9}},
    "updates_skipped": {"facts": {"skipped_updates": 60}},
}


@pytest.mark.parametrize("rule", PLANTED)
def test_a_planted_fault_is_named_first(plan: Ledger, rule: str) -> None:
    diagnosis = verdict(plan, **PLANTED[rule])
    assert diagnosis.findings[0].rule == rule
    assert diagnosis.healthy is (diagnosis.findings[0].tier is Tier.OFFER) and not diagnosis.abstained
    assert diagnosis.sentence == diagnosis.findings[0].sentence and diagnosis.sentence.endswith(".")
    assert diagnosis.evidence and diagnosis.advice


SHAPES: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "overhead_bound": ({"small": 1e-3}, {"hidden": 64, "heads": 2}),
    "attention_slow": ({"attention": 1e-8}, {}),
    "model_narrow": ({"dilution": 1e-9}, {"hidden": 64, "heads": 2}),
}


@pytest.mark.parametrize("rule", SHAPES)
def test_a_fault_of_shape_is_found(rule: str) -> None:
    machine, model = SHAPES[rule]
    profile = make_profile(**machine)
    diagnosis = verdict(plan_run(make_config(model), profile))
    assert diagnosis.findings[0].rule == rule and diagnosis.healthy


def test_recomputation_that_memory_does_not_need_is_found(plan: Ledger) -> None:
    run = make_run(plan)
    products = run.select(phase=Phase.FORWARD, kind=Kind.MATMUL)
    again = [replace(x, operation=f"{x.operation}_recomputed", phase=Phase.BACKWARD) for x in products]
    run.lines = [*run.lines, *again]
    run.facts["memory_bytes"] = 64 * 2**30
    found = diagnose(RunEvidence(plan, run, subtract_ledgers(plan, run)))
    assert found.findings[0].rule == "recompute_needless"
    run.facts["memory_bytes"] = run.totals["resident_bytes"].value  # now it is needed
    assert "recompute_needless" not in {
        f.rule for f in diagnose(RunEvidence(plan, run, subtract_ledgers(plan, run))).findings
    }


def test_bursts_of_other_programs_come_after_what_the_code_does(plan: Ledger) -> None:
    both = {"phases": {"data": 0.1}, "facts": {"slow_steps_fraction": 0.9, "other_load": 0.5}}
    assert [f.rule for f in verdict(plan, **both).findings][:2] == ["input_bound", "irregular_steps"]


def test_sleeping_in_the_loop_is_its_own_doing_and_waiting_for_a_core_is_not(plan: Ledger) -> None:
    slept = verdict(plan, phases={"idle": 0.1}, facts={"delayed_gap_seconds": 0.01})
    assert slept.findings[0].rule == "host_bound"
    waited = verdict(plan, phases={"idle": 0.1}, facts={"delayed_gap_seconds": 0.1, "delayed_seconds": 0.1})
    assert "host_bound" not in {f.rule for f in waited.findings}


def test_a_notice_costs_nothing_and_is_named_before_a_ceiling(plan: Ledger) -> None:
    points = [{"place": "train.py:12", "call": "item", "per_step": 4, "seconds": 1e-9}]
    found = verdict(plan, facts={"sync_points": points})
    assert found.healthy and found.findings[0].rule == "sync_points" and "train.py:12" in found.evidence[0]
    many = {"sync_points": [points[0] | {"seconds": 3.0}], "profiled_step_seconds": 4.0}  # recorded, which is slower
    assert verdict(plan, facts=many).findings[0].share == 0.75
    assert verdict(plan, facts=many | {"rollouts": 1.0}).healthy  # an agent reads what it does
    many["sync_points"][0]["parts"] = {"host": 0.5}
    of_host = next(f for f in verdict(plan, phases={"host": 0.1}, facts=many).findings if f.rule == "sync_points")
    assert 0 < of_host.share < 0.1  # of the host's own share of the steps that were not recorded
    half = verdict(plan, facts={"unscaled": {"place": "train.py:9", "per_step": 1.0}}).findings[0]
    assert half.rule == "unscaled" and half.evidence[0] == "train.py:9"
    once = [points[0] | {"per_step": 1}]  # as every loop reads its loss
    assert verdict(plan, facts={"sync_points": once}).findings[0].rule == "compute_bound"


def test_a_slow_guest_on_which_nothing_else_ran_is_its_neighbours_doing(plan: Ledger) -> None:
    slow = {"machine_speed": 0.7, "virtual": True, "other_load": 0.01}
    found = verdict(plan, facts=slow)
    condition = next(f for f in found.findings if f.rule == "host_shared")
    assert found.healthy and found.findings[0].rule == "compute_bound" and "neighbours" in condition.evidence[1]
    for seen in ({"other_load": 0.4}, {"virtual": False}):  # something on this machine, or no neighbours to blame
        found = verdict(plan, facts=slow | seen)
        assert not found.healthy and found.findings[0].rule == "machine_slow"
    assert "40% of the cores" in verdict(plan, facts=slow | {"other_load": 0.4}).evidence[1]


def test_what_was_seen_in_the_run_comes_before_offers_and_those_before_a_plan_not_met(plan: Ledger) -> None:
    over = {"kinds": {"matmul": 1.4}}
    assert verdict(plan, **over).findings[0].rule == "off_plan"
    found = verdict(plan, **over, gains={"attention": 0.06, "precision": 0.3}).findings
    assert [f.rule for f in found][:3] == ["attention_unfused", "precision", "off_plan"]


def test_a_teacher_beside_the_model_is_no_python_of_the_loops(plan: Ledger) -> None:
    for part, found in ((0.95, False), (0.2, True)):
        beside = verdict(plan, phases={"host": 0.1}, facts={"module_fraction": part})
        assert ("host_bound" in {f.rule for f in beside.findings}) == found


def test_what_the_line_that_asks_for_a_batch_does_besides_is_input(plan: Ledger) -> None:
    lines = {"data": [["a.py:3", 1.0]], "host": [["a.py:3 (in b.py:9)", 0.9], ["a.py:7", 0.1]]}
    found = verdict(plan, phases={"data": 0.03, "host": 0.1}, facts={"lines": lines}).findings
    assert found[0].rule == "input_bound" and "host_bound" not in {f.rule for f in found}


def test_rows_that_a_small_batch_leaves_untouched_are_the_batchs_doing(plan: Ledger) -> None:
    rows = {"facts": {"rows_untouched": {"part": 0.9, "place": "a.py:6"}}, "phases": {"optimizer": 0.1}}
    share = next(f for f in verdict(plan, **rows).findings if f.rule == "rows_untouched").share
    for gain, first in ((share + 0.05, "rows_untouched"), (2.5 * share, "batch_small")):
        assert verdict(plan, **rows, gains={"batch": gain}).findings[0].rule == first


def test_a_slight_share_of_the_loop_is_named_behind_a_tiny_batch(plan: Ledger) -> None:
    step = make_run(plan).totals["step_seconds"].value
    for share, first in ((0.1, "batch_small"), (0.4, "host_bound")):
        assert verdict(plan, phases={"host": share * step}, gains={"batch": 0.7}).findings[0].rule == first


def test_a_slight_share_of_the_loop_is_named_behind_what_is_a_cause(plan: Ledger) -> None:
    slight = {"host": 0.09 * make_run(plan).totals["step_seconds"].value}
    checks = {"values_unread": {"part": 0.01, "place": "a.py:4"}}
    found = verdict(plan, phases=slight, facts=checks, gains={"precision": 0.3}).findings
    assert [f.rule for f in found][:3] == ["values_unread", "host_bound", "precision"]


def test_a_symptom_is_weighed_against_causes_in_its_own_phases(plan: Ledger) -> None:
    """The update may be slow: it is not why the loop's own lines are."""
    step = make_run(plan).totals["step_seconds"].value
    host = {"host": 0.25 * step}
    again = {"module_again": {"part": 0.6, "place": "a.py:2"}}
    assert verdict(plan, phases=host, gains={"fused_update": 0.18}).findings[0].rule == "host_bound"
    assert verdict(plan, phases=host, facts=again).findings[0].rule == "module_again"


@pytest.mark.parametrize(("times", "counted"), [(1.0, 0.0), (1.5, 1.0), (3.0, 3.0)])
def test_the_loops_own_time_is_all_of_it_from_twice_what_any_loop_takes(
    plan: Ledger, times: float, counted: float
) -> None:
    run = make_run(plan, phases={"host": times * LOOP_SECONDS})
    share = MEASURES["host_bound"](RunEvidence(plan, run, subtract_ledgers(plan, run)))
    assert share == pytest.approx(counted * LOOP_SECONDS / run.totals["step_seconds"].value, rel=0.1)


def test_the_update_of_a_second_optimizer_is_not_by_hand(plan: Ledger) -> None:
    planted = PLANTED["update_by_hand"]
    both = verdict(plan, **planted | {"facts": planted["facts"] | {"update_lines": ["a.py:9", "a.py:8"]}})
    assert "update_by_hand" not in {f.rule for f in both.findings}


def test_communication_has_the_lines_that_ask_for_it(plan: Ledger) -> None:
    lines = {"lines": {"communication": [["train.py:30", 0.8], ["train.py:20", 0.05]]}}
    found = verdict(plan, phases={"communication": 0.1}, facts=lines).findings[0]
    assert found.rule == "communication_bound" and "train.py:30" in found.evidence[0] and len(found.evidence) == 2


def test_what_no_plan_was_fitted_to_and_what_agents_play_are_notices(plan: Ledger) -> None:
    over = verdict(plan, kinds={"matmul": 2.0}, facts={"source": "observe"})
    assert over.healthy and "off_plan" in {f.rule for f in over.findings}
    acts = wall(evaluation=15.0)["facts"] | {"rollouts": 1.0}
    played = verdict(plan, facts=acts)
    assert played.healthy and played.findings[0].rule == "evaluation_frequent"
    for facts, offered in ((acts, False), (acts | {"rollouts": 0.0}, True)):
        run = make_run(plan, facts=facts)
        evidence = ObservedPlans(plan, run, subtract_ledgers(plan, run))
        assert bool(PROPOSALS["evaluation"](evidence)) is offered


def test_waiting_for_a_slow_rank_is_not_communication(plan: Ledger) -> None:
    waits = {"phases": {"communication": 0.1}, "facts": {"rank_own_seconds": [0.2, 0.3], "rank": 0}}
    assert [f.rule for f in verdict(plan, **waits).findings if f.fault] == ["straggler"]
    alike = {"phases": {"communication": 0.1}, "facts": {"rank_own_seconds": [0.2, 0.201], "rank": 0}}
    assert [f.rule for f in verdict(plan, **alike).findings if f.fault] == ["communication_bound"]
    alike["facts"] |= {"rank_delayed_seconds": [0.0, 0.09]}  # which had to wait for a core
    assert verdict(plan, **alike).healthy


def test_copies_to_the_device_are_input_too(plan: Ledger) -> None:
    found = verdict(plan, phases={"transfer": 0.1, "data": 0.001}).findings[0]
    assert found.rule == "input_bound" and "copied to the device" in found.sentence


def test_own_recomputation_is_found_by_its_own_name(plan: Ledger) -> None:
    run = make_run(plan)
    products = run.select(phase=Phase.FORWARD, kind=Kind.MATMUL)
    run.lines = [*run.lines, *(replace(x, operation=f"{x.operation} again", phase=Phase.BACKWARD) for x in products)]
    run.facts["memory_bytes"] = 64 * 2**30
    assert diagnose(RunEvidence(plan, run, subtract_ledgers(plan, run))).findings[0].rule == "recompute_needless"


def test_heat_that_slowed_a_processor_is_named(plan: Ledger) -> None:
    hot = {"processor_throttled": 12, "machine_speed": 0.75}
    assert "throttled" in {f.rule for f in verdict(plan, facts=hot).findings}
    assert "throttled" not in {f.rule for f in verdict(plan, facts=hot | {"processor_throttled": 0}).findings}


def test_every_rule_is_planted_or_a_ceiling() -> None:
    elsewhere = {"recompute_needless", "gradients_zeroed", "graphs_retained", "unscaled"}
    assert {rule.name for rule in RULES if rule.tier is not Tier.CEILING} == {*PLANTED, *SHAPES, *elsewhere}
    assert len({rule.name for rule in RULES}) == len(RULES)
    assert all(rule.source and rule.advice and 0 < rule.threshold < 1 for rule in RULES)


@pytest.mark.parametrize("speed", [0.95, 1.0, 1.04, None])
def test_a_healthy_run_is_called_healthy(plan: Ledger, speed: float | None) -> None:
    diagnosis = verdict(plan, facts={"machine_speed": speed}, kinds={"norm": 1.2})
    assert diagnosis.healthy and diagnosis.axis is Axis.ALGORITHM
    assert [f.rule for f in diagnosis.findings] == ["compute_bound"]


def test_streaming_binds_when_it_takes_the_most(plan: Ledger) -> None:
    profile = make_profile()
    for curves in profile.curves.values():
        for name, curve in curves.items():
            curves[name] = type(curve)(curve.elements, tuple(90 * s for s in curve.seconds))
    diagnosis = verdict(plan_run(make_config(), profile))
    assert diagnosis.findings[0].rule == "memory_bound" and "Memory traffic" in diagnosis.sentence


def test_what_the_code_does_is_named_before_a_slow_machine(plan: Ledger) -> None:
    slow = {"machine_speed": 0.4, "virtual": False}
    found = verdict(plan, gains={"precision": 0.2}, facts=slow)
    assert [f.rule for f in found.findings][:2] == ["precision", "machine_slow"]
    assert verdict(plan, facts=slow | {"slow_steps_fraction": 0.3}).findings[0].rule == "machine_slow"


def test_the_slower_machine_is_not_blamed_on_the_plan(plan: Ledger) -> None:
    slow = dict.fromkeys(("matmul", "attention", "norm", "elementwise", "embedding", "loss", "optimizer"), 1.25)
    rules = {f.rule for f in verdict(plan, kinds=slow, facts={"machine_speed": 0.8}).findings}
    assert "machine_slow" in rules and "off_plan" not in rules


@pytest.mark.parametrize(
    ("changes", "why"),
    [({"unattributed": 0.5}, "50% of the step has no name"), ({"facts": {"steps": 4}}, "4 steps")],
)
def test_it_abstains_on_too_little(plan: Ledger, changes: dict[str, Any], why: str) -> None:
    diagnosis = verdict(plan, **changes)
    assert diagnosis.abstained and diagnosis.axis is Axis.UNKNOWN and diagnosis.confidence == "none"
    assert why in diagnosis.sentence


def test_it_abstains_when_nothing_was_timed(plan: Ledger) -> None:
    run = Ledger("run")
    diagnosis = diagnose(RunEvidence(plan, run, subtract_ledgers(plan, run)))
    assert diagnosis.abstained and "not timed" in diagnosis.sentence
    assert len(diagnosis.not_tested) == len(RULES)


def test_rules_without_evidence_are_listed(plan: Ledger) -> None:
    diagnosis = verdict(plan, facts={"machine_speed": None, "wall_seconds": {"training": 60.0}})
    assert {"machine_slow", "evaluation_frequent", "checkpoint_frequent", "precision"} <= set(diagnosis.not_tested)


def test_confidence_falls_near_the_threshold(plan: Ledger) -> None:
    step = make_run(plan).totals["step_seconds"].value
    sure, unsure = (verdict(plan, phases={"data": share * step}) for share in (0.4, 0.125))
    assert sure.findings[0].rule == unsure.findings[0].rule == "input_bound"
    assert (sure.confidence, unsure.confidence) == ("high", "medium")


def test_an_agent_that_acts_has_python_of_its_own_for_every_pass(plan: Ledger) -> None:
    def rules(passes: float) -> list[str]:
        diagnosis = verdict(plan, phases={"host": 0.1}, facts={"evaluations_per_step": passes})
        return [finding.rule for finding in diagnosis.findings]

    assert "host_bound" in rules(10.0) and "host_bound" not in rules(1000.0)
