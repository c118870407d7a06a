"""Many layouts in one launch: starting ranks costs seconds."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import ironlaw

JOB = Path(__file__).with_name("job.py")
SOURCE = Path(ironlaw.__file__).parents[1]


@pytest.fixture(scope="session")
def on_ranks(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., list[list[Any]]]:
    """`on_ranks(size, cases)`: per case, every rank's result."""

    def run(size: int, cases: list[dict[str, Any]], timeout_seconds: float = 280) -> list[list[Any]]:
        folder = tmp_path_factory.mktemp("ranks")
        environment = os.environ | {"PYTHONPATH": str(SOURCE), "OMP_NUM_THREADS": "1"}
        done = subprocess.run(
            [sys.executable, "-W", "ignore", str(JOB), str(size), str(folder)], input=json.dumps(cases),
            env=environment, capture_output=True, text=True, timeout=timeout_seconds, check=False,
        )  # fmt: skip
        assert done.returncode == 0, done.stderr[-4000:]
        results: list[list[Any]] = json.loads(done.stdout)
        return results

    return run
