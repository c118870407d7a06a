"""`make gpu` goes its whole path without a GPU, and marks what ran."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
import time
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def gpu() -> ModuleType:
    spec = importlib.util.spec_from_file_location("gpu", ROOT / "benchmarks" / "gpu.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["gpu"] = module  # dataclasses look there
    spec.loader.exec_module(module)
    return module


@pytest.mark.slow
def test_a_dry_run_has_every_part(gpu: ModuleType, user_cache: Path, tmp_path: Path) -> None:
    ran = subprocess.run([sys.executable, ROOT / "benchmarks" / "gpu.py", "--dry", "--out", tmp_path], text=True)
    assert ran.returncode == 0
    page = (tmp_path / "gpu-dry.md").read_text("utf-8")
    for part in gpu.PARTS.values():
        assert part.title in page
    assert "failed" not in page and "cut off" not in page and page.count("| eager |") == 3


def test_what_was_there_before_a_cut_stays(gpu: ModuleType, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    child = tmp_path / "child.py"
    child.write_text('import time\nprint(\'{"part": "measure", "GiB": 1}\', flush=True)\ntime.sleep(600)\n')
    monkeypatch.setattr(gpu, "__file__", str(child))
    rows = gpu.rows_from(["measure"], False, 90.0)
    assert next(rows) == {"part": "measure", "GiB": 1}
    clock = SimpleNamespace(monotonic=lambda: time.monotonic() + 90)  # the time is over, however long the child took
    monkeypatch.setattr(gpu, "time", clock)
    assert list(rows) == [{"part": "measure", "note": "cut off after 90 s"}]


def test_the_status_says_what_ran(gpu: ModuleType) -> None:
    table = "| `a.py` | loss | step: `test_one[on]`, `test_two` | never |\n| `b.py` | loss | none yet | never |\n"
    tests = [{"test": "test_one[on]", "result": "passed"}, {"test": "test_two[x]", "result": "passed"}]
    assert "| 2026-01-02, X: passed |\n| `b.py` | loss | none yet | never |" in gpu.marked(
        table, tests, "2026-01-02, X"
    )
    tests[1]["result"] = "failed"
    assert "failed: `test_two[x]` |" in gpu.marked(table, tests, "2026-01-02, X")
    assert gpu.marked(table, [tests[0] | {"result": "skipped"}], "2026-01-02, X") == table


def test_the_status_names_tests_that_there_are(gpu: ModuleType) -> None:
    """What is marked by name must have that name."""
    import re

    there = "".join(path.read_text("utf-8") for path in (ROOT / "tests" / "gpu").glob("test_*.py"))
    for line in gpu.STATUS.read_text("utf-8").splitlines():
        if line.startswith("| `") and len(line.split(" | ")) == 4:
            for name in re.findall(r"`(test_\w+)", line.split(" | ")[2]):
                assert f"def {name}(" in there, name


@pytest.mark.parametrize(
    ("reported", "gigabytes", "name"),
    [
        ("NVIDIA H200", 150, "h200"), ("NVIDIA H100 80GB HBM3", 85, "h100-sxm-80gb"), ("NVIDIA L4", 24, "l4"),
        ("NVIDIA A100-SXM4-40GB", 42, "a100-sxm-40gb"), ("NVIDIA GeForce RTX 4090", 25, "rtx-4090"),
        ("Unheard Of 1", 9, None),
    ],
)  # fmt: skip
def test_a_gpu_is_found_in_the_catalogue(
    reported: str, gigabytes: int, name: str | None, gpu: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    from types import SimpleNamespace

    import torch

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    there = SimpleNamespace(name=reported, total_memory=gigabytes * 1e9)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda number: there)
    assert gpu.catalogued() == name


def test_the_catalogues_plan_is_asked(gpu: ModuleType) -> None:
    from ironlaw.config import build_config

    document = {"model": {"name": "gpt2"}, "train": {"global_batch": 16, "precision": "bf16"}, "data": {"mock": True}}
    found = gpu.by_catalogue(build_config(document), "h200", 0.05, 16 * 2**30)
    assert found.keys() == {"catalogue, step", "catalogue, peak"}
    assert all(-60 < float(error.rstrip("%")) < 150 for error in found.values())
