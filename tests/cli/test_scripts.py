"""The flags and keys that scripts rely on."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from ironlaw import __version__
from ironlaw.config import load_config
from ironlaw.serve.engine import Engine

Here = Callable[..., tuple[int, str, str]]
FileOf = Callable[..., Path]


def document(output: str) -> dict[str, Any]:
    """The one JSON document on stdout."""

    def refuse(name: str) -> None:
        raise AssertionError(f"{name} is not JSON")

    parsed: dict[str, Any] = json.loads(output, parse_constant=refuse)
    return parsed


def test_plan_json(ironlaw_here: Here, tiny_file: FileOf) -> None:
    code, output, messages = ironlaw_here("plan", tiny_file(), "--json")
    assert (code, messages) == (0, "")
    plan = document(output)
    assert plan["fits"] is True
    for name in ("step_seconds", "peak_bytes", "parameters", "flops_per_step"):
        assert plan[name].keys() >= {"value", "interval", "origin", "basis"}
        assert plan[name]["value"] > 0
    for name in ("step_seconds", "peak_bytes"):
        low, high = plan[name]["interval"]
        assert low <= plan[name]["value"] <= high
    assert plan["parameters"]["interval"] is plan["flops_per_step"]["interval"] is None  # exact
    assert plan["parameters"]["value"] == load_config(tiny_file()).model.parameters
    assert plan["ledger"]["schema_version"] == 1
    lines = plan["ledger"]["lines"]
    assert sum(line["seconds"] for line in lines) == pytest.approx(plan["step_seconds"]["value"])
    assert sum(line["flops"] or 0 for line in lines) == plan["flops_per_step"]["value"]


def test_plan_sets_keys(ironlaw_here: Here, tiny_file: FileOf) -> None:
    def plan(*arguments: str) -> dict[str, Any]:
        return document(ironlaw_here("plan", tiny_file(), "--json", *arguments)[1])

    whole, half = plan(), plan("--set", "train.global_batch=4")
    assert half["flops_per_step"]["value"] * 2 == whole["flops_per_step"]["value"]
    deep = plan("--set", "model.layers=4", "--set", "train.global_batch=4")
    assert deep["parameters"]["value"] > whole["parameters"]["value"]


def test_a_plan_that_does_not_fit_answers_no(ironlaw_here: Here, tiny_file: FileOf) -> None:
    code, output, _ = ironlaw_here("plan", tiny_file(), "--json", "--set", "model.hidden=32768")
    assert code == 1
    assert document(output)["fits"] is False
    assert ironlaw_here("plan", tiny_file(), "--set", "model.hidden=32768")[0] == 1


def test_plan_why(ironlaw_here: Here, tiny_file: FileOf) -> None:
    code, output, _ = ironlaw_here("plan", tiny_file(), "--why")
    assert code == 0 and "calculated" in output and "measured" in output


def test_train_explain_and_generate_json(
    ironlaw_here: Here, tiny_file: FileOf, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = tiny_file(train={"steps": 20, "profile_steps": 2})
    code, output, messages = ironlaw_here("train", config, "--out", "run", "--json")
    assert code == 0, messages
    summary = document(output)
    assert summary["run"] == "run" and summary["steps"] == 20 and summary["interrupted"] is None
    assert {"step_seconds", "validation_loss", "unigram_loss", "peak_bytes"} <= summary["totals"].keys()
    assert "loss" in messages  # progress goes to stderr

    code, output, messages = ironlaw_here("explain", "run", "--json")
    assert code == 0, messages
    explained = document(output)
    assert isinstance(explained["bottleneck"], str) and explained["bottleneck"]
    assert -0.01 < explained["time"]["unattributed_fraction"] < 0.3
    for row in (explained["time"]["step"], explained["memory"]["peak"]):
        assert row.keys() >= {"planned", "measured", "error"}
        assert row["error"] == pytest.approx(row["planned"] / row["measured"] - 1)
    for row in explained["time"]["phases"] + explained["memory"]["components"]:
        assert row.keys() >= {"name", "planned", "measured", "error"}
    assert abs(explained["memory"]["peak"]["error"]) < 0.05
    assert (tmp_path / "run" / "report.html").stat().st_size > 1000

    arguments = ("generate", "run", "--prompt", "def ", "--tokens", "12", "--json")
    code, output, _ = ironlaw_here(*arguments)
    assert code == 0
    made = document(output)
    assert made["prompt"] == "def " and isinstance(made["text"], str) and 0 < made["tokens"] <= 12
    assert ironlaw_here(*arguments)[1] == output
    code, output, _ = ironlaw_here("generate", "run", "--prompt", "def ", "--tokens", "90")
    assert code == 0 and output.startswith("def ")

    step, steps = Engine.step, []  # text is written as it is made, and kept at Ctrl-C

    def interrupt(engine: Engine) -> int:
        steps.append(engine)
        if len(steps) > 70:
            raise KeyboardInterrupt
        return step(engine)

    monkeypatch.setattr(Engine, "step", interrupt)
    code, written, messages = ironlaw_here("generate", "run", "--prompt", "def ", "--tokens", "90")
    assert code == 130 and "70 tokens" in messages and "interrupted" in messages
    assert written.endswith("\n") and len(written) > 50 and output.startswith(written[:-1])


def test_train_and_explain_for_people(ironlaw_here: Here, tiny_file: FileOf) -> None:
    code, output, messages = ironlaw_here("train", tiny_file(train={"profile_steps": 2}), "--out", "run")
    assert code == 0
    assert "12 of 12 steps, done" in output and "ironlaw explain run" in output
    assert "validation loss" in output and "unigram loss" in output
    assert "Plan" in messages and "parameters" in messages
    code, output, messages = ironlaw_here("explain", "run")
    assert code == 0 and "report.html" in messages
    assert max(len(line) for line in output.splitlines()) <= 100


def test_resume_on_a_new_directory_starts_it(ironlaw_here: Here, tiny_file: FileOf, tmp_path: Path) -> None:
    code, _, messages = ironlaw_here("train", tiny_file(), "--out", "deep/er/run", "--resume")
    assert code == 0, messages
    assert (tmp_path / "deep" / "er" / "run" / "ledger.json").is_file()


def test_the_run_directory_has_a_name_of_its_own(ironlaw_here: Here, tiny_file: FileOf, tmp_path: Path) -> None:
    code, output, _ = ironlaw_here("train", tiny_file(train={"steps": 2}), "--json")
    run = Path(document(output)["run"])
    assert code == 0 and run.parts[0] == "runs" and run.name.startswith("tiny-gpt-")
    assert (tmp_path / run / "metrics.jsonl").is_file()


def test_a_users_own_text(ironlaw_here: Here, tiny_file: FileOf, tmp_path: Path) -> None:
    folder = tmp_path / "my texts"
    folder.mkdir()
    for number in range(3):
        (folder / f"{number}.md").write_text("Grüße aus dem Süden, und noch ein Satz.\n" * 400, encoding="utf-8")
    own = f"data.path={folder}"
    code, output, messages = ironlaw_here("train", tiny_file(), "--out", "run", "--set", own, "--json")
    assert code == 0, messages
    assert load_config(tmp_path / "run").data.path == str(folder)
    assert document(output)["totals"]["validation_loss"]["value"] > 0
    code, output, _ = ironlaw_here("generate", "run", "--prompt", "Grüße", "--tokens", "3")
    assert code == 0 and output.startswith("Grüße")


def test_the_saved_config_reproduces_the_run(
    ironlaw_here: Here, tiny_file: FileOf, tmp_path: Path, read_metrics: Callable[[Path], list[dict[str, Any]]]
) -> None:
    ironlaw_here("train", tiny_file(), "--out", "one", "--set", "optimizer.lr=1e-3", "--set", "train.seed=4")
    code, _, _ = ironlaw_here("train", "one/config.toml", "--out", "two")
    assert code == 0
    one, two = (read_metrics(tmp_path / name) for name in ("one", "two"))
    assert [entry["loss"] for entry in one] == [entry["loss"] for entry in two]


def test_mock_data_trains_but_generates_nothing(ironlaw_here: Here, tiny_file: FileOf) -> None:
    config = tiny_file(train={"steps": 3}, data={"mock": True})
    assert ironlaw_here("train", config, "--out", "run")[0] == 0
    code, _, messages = ironlaw_here("generate", "run")
    assert code == 2 and "no tokenizer" in messages


def test_version_and_help(ironlaw_process: Callable[..., subprocess.CompletedProcess[str]]) -> None:
    assert ironlaw_process("--version").stdout.strip() == __version__
    shown = ironlaw_process("--help")
    assert shown.returncode == 0
    for verb in ("measure", "plan", "train", "explain", "generate", "catalog"):
        assert verb in shown.stdout


@pytest.mark.parametrize("verb", ["measure", "plan", "train", "explain", "generate"])
def test_every_verb_has_help(ironlaw_here: Here, verb: str) -> None:
    code, output, _ = ironlaw_here(verb, "--help")
    assert code == 0 and "--json" in output
