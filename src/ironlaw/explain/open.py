"""Whatever a user points at, explained: a run of `ironlaw train`, an observed loop, or a profiler's trace."""

from __future__ import annotations

from pathlib import Path

from ironlaw.errors import UserError
from ironlaw.explain.explanation import Explanation, explain_run
from ironlaw.explain.observed import explain_observed, is_observed


def explain_path(path: Path) -> Explanation:
    if path.is_file():
        from ironlaw.explain.foreign import explain_trace

        return explain_trace(path)
    if not path.exists():
        raise UserError(
            f"no run directory at {path}: give the one that `ironlaw train` printed, like runs/NAME, or a trace file"
        )
    return explain_observed(path) if is_observed(path) else explain_run(path)
