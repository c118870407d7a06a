"""A run directory in, a document for scripts out; what is missing is told in one line."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from synthetic import make_config, make_profile, make_run, write_run

from ironlaw.config import RunConfig
from ironlaw.errors import UserError
from ironlaw.explain import explain_run
from ironlaw.ledger import Ledger
from ironlaw.machine.profile import Profile


def explained(folder: Path, config: RunConfig, plan: Ledger, run: Ledger, profile: Profile) -> dict[str, Any]:
    document = explain_run(write_run(folder, config, plan, run), profile).to_json()
    return json.loads(json.dumps(document, allow_nan=False))


def test_keys_that_scripts_rely_on(tmp_path: Path, config: RunConfig, plan: Ledger, profile: Profile) -> None:
    document = explained(tmp_path / "r", config, plan, make_run(plan), profile)
    assert isinstance(document["bottleneck"], str) and document["bottleneck"].count(". ") == 0
    assert document["time"]["unattributed_fraction"] == pytest.approx(0.01)
    for row in (document["time"]["step"], document["memory"]["peak"]):
        assert {"planned", "measured", "error"} <= set(row)
    for rows in (*(document["time"][k] for k in ("phases", "kinds", "operations")), document["memory"]["components"]):
        assert rows and all({"name", "planned", "measured", "error"} <= set(row) for row in rows)
    assert document["accuracy_met"]["all"] is True
    assert {"axis", "sentence", "evidence", "confidence"} <= set(document["diagnosis"])
    assert document["losses"]["below_unigram"] == pytest.approx(6.43 - 5.21)


@pytest.mark.parametrize(
    ("changes", "check"),
    [
        ({"kinds": {"matmul": 1.4}}, "step_time"),
        ({"memory": {"activations": 1.3}}, "peak_memory"),
        ({"unattributed": 0.08}, "unattributed"),
    ],
)
def test_a_figure_that_falls_short_is_told(
    tmp_path: Path, config: RunConfig, plan: Ledger, profile: Profile, changes: dict[str, Any], check: str
) -> None:
    document = explained(tmp_path / "r", config, plan, make_run(plan, **changes), profile)
    assert document["accuracy_met"][check]["met"] is False and document["accuracy_met"]["all"] is False
    assert any("misses its limit" in note for note in document["notes"])


def test_what_was_not_measured_is_null(tmp_path: Path, config: RunConfig, plan: Ledger, profile: Profile) -> None:
    run = make_run(plan)
    run.lines, run.memory, run.phase_seconds = [], [], {}
    for name in ("peak_bytes", "validation_loss"):
        del run.totals[name]
    document = explained(tmp_path / "r", config, plan, run, profile)
    assert document["memory"]["peak"]["measured"] is None and document["memory"]["peak"]["error"] is None
    assert document["accuracy_met"]["peak_memory"]["met"] is None and document["accuracy_met"]["all"] is None
    assert document["time"]["unattributed_fraction"] is None
    assert document["losses"]["below_unigram"] is None
    assert document["diagnosis"]["abstained"] and "not timed" in document["bottleneck"]


def test_an_empty_ledger_is_explained_as_far_as_it_goes(
    tmp_path: Path, config: RunConfig, plan: Ledger, profile: Profile
) -> None:
    folder = write_run(tmp_path / "r", config, plan, None)
    Ledger("run").save(folder / "ledger.json")
    assert explain_run(folder, profile).to_json()["time"]["step"]["measured"] is None


def test_profiler_scaling_is_said(tmp_path: Path, config: RunConfig, plan: Ledger, profile: Profile) -> None:
    notes = explained(tmp_path / "r", config, plan, make_run(plan, profiler=1.25), profile)["notes"]
    assert any("forward × 0.80" in note for note in notes)


def test_remedies_need_the_run_s_machine(tmp_path: Path, config: RunConfig, plan: Ledger) -> None:
    other = make_profile()
    other.name = "another"
    document = explained(tmp_path / "r", config, plan, make_run(plan), other)
    assert document["remedies"] == [] and "AMD EPYC" in document["remedies_note"]
    assert "precision" in document["diagnosis"]["not_tested"]


def test_no_profile_is_no_failure(
    tmp_path: Path, config: RunConfig, plan: Ledger, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    document = explain_run(write_run(tmp_path / "r", config, plan, make_run(plan))).to_json()
    assert document["remedies"] == [] and "ironlaw measure" in document["remedies_note"]


def test_nothing_pays_is_said(tmp_path: Path, config: RunConfig, plan: Ledger, profile: Profile) -> None:
    assert "Nothing pays" in explained(tmp_path / "r", config, plan, make_run(plan), profile)["remedies_note"]


def test_a_half_written_last_step_is_passed_over(
    tmp_path: Path, config: RunConfig, plan: Ledger, profile: Profile
) -> None:
    folder = write_run(tmp_path / "r", config, plan, make_run(plan))
    with (folder / "metrics.jsonl").open("a", encoding="utf-8") as file:
        file.write('{"step": 201, "lo')
    assert len(explain_run(folder, profile).metrics) == 200


def spoil(name: str, text: str | None) -> Any:
    def apply(folder: Path) -> None:
        if text is None:
            (folder / name).unlink()
        else:
            (folder / name).write_text(text, encoding="utf-8")

    return apply


@pytest.mark.parametrize(
    ("damage", "says"),
    [
        (spoil("ledger.json", None), "--resume"),
        (spoil("plan.json", None), "no plan.json"),
        (spoil("config.toml", None), "config.toml"),
        (spoil("ledger.json", "{"), "ledger.json"),
        (spoil("ledger.json", "[]"), "ledger.json"),
        (spoil("plan.json", '{"schema_version": 99}'), "schema version"),
        (spoil("config.toml", "model ="), "TOML"),
    ],
)
def test_damage_is_one_line(
    tmp_path: Path, config: RunConfig, plan: Ledger, profile: Profile, damage: Any, says: str
) -> None:
    folder = write_run(tmp_path / "r", config, plan, make_run(plan))
    damage(folder)
    with pytest.raises(UserError, match=says) as caught:
        explain_run(folder, profile)
    assert "\n" not in str(caught.value)


def test_a_thread_count_that_was_not_measured_is_told(tmp_path: Path, plan: Ledger, profile: Profile) -> None:
    document = explained(tmp_path / "r", make_config(threads=3), plan, make_run(plan), profile)
    assert document["remedies"] == [] and "train.threads" in document["remedies_note"]


def test_no_such_run(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="no run directory"):
        explain_run(tmp_path / "absent")


def test_neither_room_imports_torch() -> None:
    program = (
        "import sys, ironlaw.explain, ironlaw.report.run_view, ironlaw.report.page; assert 'torch' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", program], check=True)
