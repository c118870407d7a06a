"""The short version of `make soak`: a run killed at random moments, resumed, and compared to the bit."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).parents[2]

# In a process of its own: the soak forks, which a process with threads must not.
SCRIPT = """
import json, sys
from pathlib import Path
sys.path.insert(0, sys.argv[1])
import soak
from ironlaw.machine.profile import load_profile
folder = Path(sys.argv[2])
config = soak.soak_config(soak.write_corpus(folder / "corpus"), folder / "data")
print(json.dumps(soak.soak(config, load_profile(), folder, runs=int(sys.argv[3]), seed=int(sys.argv[4]))))
"""


@pytest.mark.slow
def test_runs_killed_at_random_and_resumed_are_the_run_that_nobody_killed(user_cache: Path, tmp_path: Path) -> None:
    if not hasattr(sys, "platform") or sys.platform == "win32":
        pytest.skip("needs fork")
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT, str(REPOSITORY / "benchmarks"), str(tmp_path), "1", "7"],
        capture_output=True, text=True, timeout=280, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    result = json.loads(done.stdout)
    assert result["wrong"] == []
    assert result["counts"]["identical to the uninterrupted run"] == 1
    assert result["counts"]["kills"] >= 1
