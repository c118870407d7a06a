"""A measured server is put beside its plan, and what binds it is named."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from ironlaw.errors import UserError
from ironlaw.explain.serving import explain_serving, find, is_serving_run
from ironlaw.ledger import Estimate, Ledger, Origin, Phase
from ironlaw.machine.profile import Profile
from ironlaw.model.config import ModelConfig
from ironlaw.plan.serving.here import MeasuredClock

MODEL = ModelConfig(layers=2, hidden=64, heads=4, vocab=256, context=256)


def measured(**facts: Any) -> Ledger:
    """Decoding most of the time, 8 of 32 at once, nobody waiting."""
    ledger = Ledger("run", facts={"kind": "serving", "model": MODEL.model_dump(mode="json", exclude_none=True)})
    ledger.facts |= {"batch": 32, "kv_tokens": 4096, "weights": "fp32"} | facts
    ledger.phase_seconds = {
        Phase.PREFILL: 1e-3, Phase.DECODE: 8e-3, Phase.SAMPLING: 3e-4, Phase.HOST: 3e-4, Phase.IDLE: 1e-3
    }  # fmt: skip
    for name, value in (("decode_batch", 8.0), ("waiting", 0.0), ("kv_usage", 0.2), ("step_seconds", 9.6e-3)):
        ledger.totals[name] = Estimate(value, Origin.MEASURED, "mean")
    return ledger


def set_total(ledger: Ledger, **values: float) -> Ledger:
    ledger.totals |= {name: Estimate(value, Origin.MEASURED, "mean") for name, value in values.items()}
    return ledger


def names(ledger: Ledger) -> list[str]:
    return [finding.name for finding in find(ledger)]


def test_each_cause_is_named_first_and_a_healthy_server_has_none() -> None:
    assert names(measured()) == ["healthy"]
    assert names(set_total(measured(), waiting=40.0, decode_batch=31.0))[0] == "queue"
    assert names(set_total(measured(), kv_usage=0.97))[0] == "kv"
    assert names(measured(preemptions=12))[0] == "kv"
    assert names(measured(steps={"decode_seconds_by_batch": {"8": 8e-3, "16": 9e-3}}))[0] == "bandwidth"
    assert names(measured(steps={"decode_seconds_by_batch": {"8": 8e-3, "16": 15e-3}})) == ["healthy"]
    assert names(measured(drafted=1000, accepted=100))[0] == "speculation"
    assert names(measured(drafted=1000, accepted=900)) == ["healthy"]
    for phase, cause in ((Phase.PREFILL, "prefill"), (Phase.HOST, "host"), (Phase.IDLE, "load")):
        ledger = measured()
        ledger.phase_seconds[phase] = 0.05
        assert names(ledger)[0] == cause


def test_a_gain_is_what_was_measured_and_says_so() -> None:
    (finding,) = find(measured(steps={"decode_seconds_by_batch": {"8": 8e-3, "16": 8e-3}}))
    assert finding.gain == pytest.approx(8e-3 / 9.6e-3 / 2)
    assert "measured" in finding.basis


def write(folder: Path, ledger: Ledger, steps: int = 4) -> Path:
    ledger.save(folder / "ledger.json")
    step = {"decode_tokens": 8, "prefill_tokens": 0, "kv_tokens": 800, "requests": 8, "seconds": 9.6e-3}
    (folder / "steps.jsonl").write_text("".join(json.dumps(step) + "\n" for _ in range(steps)))
    return folder


def test_the_plan_of_this_machine_stands_beside_it(tmp_path: Path, machine_profile: Profile) -> None:
    assert is_serving_run(write(tmp_path, measured(threads=machine_profile.threads)))
    document = explain_serving(tmp_path, machine_profile).to_json()
    planned = {row["phase"]: row["planned_seconds"] for row in document["phases"]}
    assert planned["decode"] > 0 and planned["prefill"] == 0
    assert planned["host"] is None and planned["sampling"] is None  # not known is not 0
    json.dumps(document)


def test_another_number_of_threads_is_planned_and_said(tmp_path: Path, machine_profile: Profile) -> None:
    other = explain_serving(write(tmp_path, measured(threads=machine_profile.threads + 1)), machine_profile)
    assert other.planned[Phase.DECODE] > 0 and "threads" in other.note


def test_passes_timed_at_the_start_set_the_level_and_curves_the_rest(machine_profile: Profile) -> None:
    passes = [
        {"phase": "decode", "requests": n, "tokens": n, "length": 64.0, "model_seconds": seconds,
         "sample_seconds": 1e-4, "host_seconds": 2e-4} for n, seconds in ((1, 1e-3), (4, 2e-3), (16, 5e-3))
    ] + [{"phase": "prefill", "requests": 4, "tokens": 128, "length": 0.0, "model_seconds": 0.05, "sample_seconds": 0.0,
          "host_seconds": 0.0}]  # fmt: skip
    clock = MeasuredClock(MODEL, machine_profile, "fp32", passes)
    assert clock.parts(4, 64.0, 0) == pytest.approx({"decode": 2e-3, "prompts": 0.0, "sample": 1e-4, "host": 2e-4})
    assert 2e-3 < clock.parts(8, 64.0, 0)["decode"] < 5e-3 < clock.parts(16, 640.0, 0)["decode"]
    assert clock.parts(0, 0.0, 128, prompts=4)["prompts"] == pytest.approx(0.05)
    mixed = clock.parts(4, 64.0, 124, prompts=4)  # a pass over as many tokens, of which decode alone has its part
    assert mixed["decode"] == pytest.approx(2e-3) and 0.04 < mixed["prompts"] + mixed["decode"] < 0.06
    long = MeasuredClock(
        MODEL, machine_profile, "fp32", [*passes, passes[1] | {"length": 320.0, "model_seconds": 3e-3}]
    )
    assert long.token_seconds == pytest.approx(1e-3 / (4 * 256))  # one pass behind 64 tokens, one behind 320
    assert long.parts(4, 192.0, 0)["decode"] == pytest.approx(2.5e-3, rel=0.05)


def test_clients_of_a_load_that_is_played_wait_for_the_api_their_prompts_and_their_tokens(
    tmp_path: Path, machine_profile: Profile
) -> None:
    prefill = {"phase": "prefill", "requests": 2, "tokens": 256, "length": 0.0, "model_seconds": 0.05}
    decode = {"phase": "decode", "requests": 2, "tokens": 2, "length": 128.0, "model_seconds": 2e-3}
    run = measured(
        passes=[one | {"sample_seconds": 0.0, "host_seconds": 0.0} for one in (prefill, decode)], speculation="none",
        request_seconds=3e-3, load={"concurrency": 2}, token_budget=512,
    )  # fmt: skip
    asked = {"at": 0.0, "prompt_tokens": 128, "output_tokens": 5, "error": None}
    (tmp_path / "requests.jsonl").write_text(2 * (json.dumps(asked) + "\n"))
    write(tmp_path, run)
    steps = tmp_path / "steps.jsonl"
    steps.write_text(steps.read_text().replace('"prefill_tokens": 0', '"prefill_tokens": 64'))  # nothing was shared
    planned = explain_serving(tmp_path, machine_profile).planned_totals
    assert planned["ttft_seconds"] == pytest.approx(2 * 3e-3 + 0.05)  # they come together, and are computed together
    assert planned["tpot_seconds"] == pytest.approx(2e-3, rel=0.02)
    assert planned["output_tokens_per_second"] == pytest.approx(10 / (2 * 3e-3 + 0.05 + 4 * 2e-3), rel=0.01)


def test_a_foreign_server_has_no_engine_steps(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="no engine steps"):
        explain_serving(write(tmp_path, measured(), steps=0))
