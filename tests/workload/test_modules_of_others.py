"""Modules that nobody here wrote, as the published table has them; a few in every run, all with `-m long`."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from types import ModuleType

import pytest

PROGRAM = Path(__file__).parents[2] / "benchmarks" / "modules.py"


@pytest.fixture(scope="module")
def modules() -> ModuleType:
    spec = importlib.util.spec_from_file_location("modules_of_others", PROGRAM)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize("name", ["DLRM", "nn.LSTM", "bert", "qwen3_moe, bf16"])
def test_flops_and_saved_bytes_are_pytorchs(modules: ModuleType, name: str) -> None:
    found = list(modules.cases({name}))
    if not found:
        pytest.skip("its library is not installed")
    row = modules.row(found[0], check=True)
    assert row.answer == "traced" and row.check() == "equal", row.cells()


@pytest.mark.long
def test_at_least_95_of_100_are_answered(modules: ModuleType) -> None:
    rows = [modules.row(case, check=False) for case in modules.cases()]
    unanswered = [row.cells()[:3] for row in rows if row.traced is None]
    assert len(unanswered) <= 0.05 * len(rows), unanswered
