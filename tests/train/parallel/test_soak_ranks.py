"""`make soak-ranks` as a test: ranks killed at random moments, and the run as if nobody had. One killed rank is in
`test_job.py`."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).parents[3]
SCRIPT = """
import json, sys
from pathlib import Path
sys.path.insert(0, sys.argv[1])
import soak_ranks
print(json.dumps(soak_ranks.soak_ranks(Path(sys.argv[2]), *map(int, sys.argv[3:]))))
"""


def soaked(folder: Path, kills: int, steps: int, ranks: int, timeout_seconds: float) -> None:
    arguments = [str(REPOSITORY / "benchmarks"), str(folder), str(kills), "3", str(steps), str(ranks)]
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT, *arguments], capture_output=True, text=True, timeout=timeout_seconds, check=False
    )
    assert done.returncode == 0, done.stderr
    result = json.loads(done.stdout)
    assert result["wrong"] == []
    assert (result["counts"]["kills"], result["steps"]) == (kills, steps)


@pytest.mark.long
@pytest.mark.timeout(3600)
def test_thirty_killed_ranks_change_nothing(user_cache: Path, tmp_path: Path) -> None:
    soaked(tmp_path, kills=30, steps=240, ranks=4, timeout_seconds=3500)
