"""`ironlaw calibrate`"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from ironlaw.report.console import answer, messages


def calibrate(
    runs: Annotated[Path, typer.Argument(metavar="RUNS.csv", help="16 to 32 runs with their step times.")],
    name: Annotated[str, typer.Option("--as", metavar="NAME", help="What to call the profile.")],
    start: Annotated[
        str | None, typer.Option("--from", metavar="ENGINE", help="Engine or profile to start from; the runs' own.")
    ] = None,
    json: Annotated[bool, typer.Option("--json", help="Print one JSON document.")] = False,
) -> None:
    from ironlaw.plan.engines.named import engine as engine_named
    from ironlaw.plan.engines.named import profile_path
    from ironlaw.plan.measured.calibrate import calibrate as fit
    from ironlaw.plan.measured.profiles import save_profile
    from ironlaw.plan.measured.read import read_runs
    from ironlaw.report.record_view import calibration_view

    profile_path(name)  # before anything is fitted
    engine = engine_named(start) if start else None
    read, rejected = read_runs(runs, engine)
    found = fit(read, name, engine)
    path = save_profile(name, found, str(runs))
    document = found.to_json() | {
        "profile": name,
        "path": str(path),
        "not_planned": [{"id": i, "group": group, "reason": reason} for i, group, reason in rejected],
    }
    answer(json, document, calibration_view)
    if not json:
        messages().print(f"Kept in {path}. Use it: ironlaw plan ... --profile {name}")
