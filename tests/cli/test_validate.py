"""`ironlaw validate` and `ironlaw calibrate` from the command line: exit codes, one JSON document, files."""

import csv
import json
import subprocess
import sys
from pathlib import Path

import pytest

ROW = {
    "group": "mine", "framework": "Megatron-DeepSpeed", "layers": "24", "hidden": "1024", "heads": "16",
    "ffn": "4096", "gated_ffn": "False", "vocab": "50257", "tied": "True", "seq": "1024", "global_batch": "64",
    "micro_batch": "4", "accelerator": "a100-sxm-80gb", "accelerators": "8", "per_node": "8", "tp": "1", "pp": "1",
    "recompute": "full", "attention": "standard", "precision": "fp16", "step_seconds": "0.5", "peak_bytes": "9e9",
}  # fmt: skip
ROWS = [
    {}, {"tp": "2", "step_seconds": "0.6"}, {"tp": "8", "step_seconds": "1.4"}, {"pp": "2", "step_seconds": "0.62"},
    {"micro_batch": "1", "step_seconds": "0.8"}, {"status": "fail"}, {"accelerator": "abacus"},
    {"group": "theirs", "framework": "homemade"},
]  # fmt: skip


@pytest.fixture
def runs(tmp_path) -> Path:
    path = tmp_path / "runs.csv"
    with path.open("w", newline="", encoding="utf-8") as stream:
        writer = csv.DictWriter(stream, ["id", *ROW, "status"])
        writer.writeheader()
        writer.writerows({"id": f"r{i}"} | ROW | cells for i, cells in enumerate(ROWS))
    return path


@pytest.fixture
def ironlaw(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))

    def call(*arguments: object) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-m", "ironlaw", *map(str, arguments)]
        return subprocess.run(command, capture_output=True, text=True, check=False)

    return call


def test_the_document_has_the_agreed_shape(ironlaw, runs):
    done = ironlaw("validate", runs, "--json")
    assert done.returncode == 0, done.stderr
    document = json.loads(done.stdout)
    for entry in [*document["groups"].values(), document["overall"]]:
        for key in ("time", "memory"):
            assert set(entry[key]) >= {"n", "median", "mean", "p90", "bias"}
            assert (entry[key]["median"] is None) == (entry[key]["n"] == 0)
        assert isinstance(entry["regret"], dict) and entry["n"] >= 1
    assert document["groups"]["mine"]["time"]["n"] == 5 and document["groups"]["mine"]["regret"]["n"] == 1
    assert document["groups"]["theirs"]["regret"]["mean"] is None
    assert document["overall"]["n"] == len(ROWS) and document["overall"]["not_planned"] == 1
    assert [row["id"] for row in document["rows"]] == ["r0", "r1", "r2", "r3", "r4", "r5", "r7"]
    for row in document["rows"]:
        low, high = row["step_interval"]
        assert 0 < low < row["predicted_step_seconds"] < high and row["predicted_peak_bytes"] > 0


def test_the_terminal_says_what_is_known_and_what_is_missing(ironlaw, runs, tmp_path):
    page = tmp_path / "record.html"
    done = ironlaw("validate", runs, "--html", page)
    assert done.returncode == 0, done.stderr
    words = " ".join(done.stdout.split())
    for text in ("8 runs, 7 planned", "baseline", "The 1 failed runs", "abacus", "generic engine's"):
        assert text in words, text
    assert page.read_text(encoding="utf-8").startswith("<!doctype html>")


@pytest.mark.parametrize(
    ("content", "said"),
    [("", "no header line"), ("id,hidden,seq\n", "no column 'layers'"), (None, "not a file")],
)
def test_what_is_no_such_table_is_one_line_and_code_2(ironlaw, tmp_path, content, said):
    path = tmp_path / "other.csv"
    if content is not None:
        path.write_text(content)
    done = ironlaw("validate", path)
    assert done.returncode == 2 and said in done.stderr and len(done.stderr.strip().splitlines()) == 1
    assert done.stdout == ""


def test_a_table_without_rows_is_empty_not_wrong(ironlaw, tmp_path):
    path = tmp_path / "none.csv"
    path.write_text("layers,hidden,seq,accelerator,accelerators\n")
    done = ironlaw("validate", path, "--json")
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["overall"]["n"] == 0
    assert ironlaw("validate", path).returncode == 0


def test_calibrate_then_validate_with_the_profile(ironlaw, runs):
    done = ironlaw("calibrate", runs, "--as", "mine", "--from", "generic", "--json")
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert found["runs"] == 6 and set(found["errors"]) == {"before", "in_sample", "left_out"}
    assert Path(found["path"]).is_file()
    errors = {}
    for name in ("generic", "mine"):
        document = json.loads(ironlaw("validate", runs, "--profile", name, "--json").stdout)
        assert {row["engine"] for row in document["rows"]} == {name}
        errors[name] = document["overall"]["time"]["mean"]
    assert errors["mine"] < errors["generic"]
    shown = ironlaw("calibrate", runs, "--as", "again", "--from", "generic")
    assert shown.returncode == 0 and "launching processor" in shown.stdout and "without itself" in shown.stdout


def test_wrong_names_are_code_2(ironlaw, runs):
    assert ironlaw("validate", runs, "--profile", "nobody").returncode == 2
    assert ironlaw("calibrate", runs, "--as", "nanotron").returncode == 2
    done = ironlaw("calibrate", runs, "--as", "mine")
    assert done.returncode == 2 and "several engines" in done.stderr
