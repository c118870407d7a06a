"""`ironlaw runs`"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from ironlaw.report.console import output, print_json, show


def runs(
    folder: Annotated[Path, typer.Argument(help="Where the runs are.")] = Path("runs"),
    sort: Annotated[str, typer.Option(help="date, step_seconds, tokens_per_second, mfu, validation_loss.")] = "date",
    json: Annotated[bool, typer.Option("--json", help="Print one JSON document.")] = False,
) -> None:
    from ironlaw.explain.runs import list_runs, losses
    from ironlaw.report.comparison_view import runs_view

    found = list_runs(folder, sort)
    if json:
        print_json({"schema_version": 1, "runs": found})
        return
    if not found:
        output().print(f"{folder} holds no runs.")
        return
    show(runs_view(found, {run["run"]: losses(Path(run["run"]))[1] for run in found}))
