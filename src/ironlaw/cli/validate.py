"""`ironlaw validate` and `ironlaw calibrate`: compare the planner with measured runs, and fit its constants to them."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

from typer import Argument, Option

from ironlaw.cli.options import Json
from ironlaw.errors import UserError
from ironlaw.report.console import answer, messages


def validate(
    runs: Annotated[Path, Argument(metavar="RUNS.csv", help="Measured runs, one per row.")],
    html: Annotated[Path | None, Option(help="Write the record, with scatter plots, to this HTML file.")] = None,
    profile: Annotated[
        str | None, Option(help="Engine or calibrated profile for every row, instead of that of its framework.")
    ] = None,
    json: Json = False,
) -> None:
    from ironlaw.plan.engines.named import engine as engine_named
    from ironlaw.plan.measured.inference import read_serving, serving_record, serving_rows
    from ironlaw.plan.measured.validate import validate as validate_runs
    from ironlaw.report.page import write
    from ironlaw.report.record_view import record_view, serving_record_view

    if (rows := serving_rows(runs)) is not None:
        if html is not None or profile:
            raise UserError("--html and --profile are of training runs: leave them out for a file of measured serving")
        document = {"runs": str(runs)} | serving_record(*read_serving(rows))
        return answer(json, document, serving_record_view)
    engine = engine_named(profile) if profile else None
    document = {"runs": str(runs), "profile": profile} | validate_runs(runs, engine).to_json()
    view = record_view(document)
    answer(json, document, lambda _: view)
    if html is not None:
        write(html, view)
        messages().print(f"The same with plots: {html}")


def calibrate(
    runs: Annotated[Path, Argument(metavar="RUNS.csv", help="16 to 32 runs with their step times.")],
    name: Annotated[str, Option("--as", metavar="NAME", help="Name of the profile.")],
    start: Annotated[
        str | None,
        Option("--from", metavar="ENGINE", help="Engine or profile to start from; that of the runs unless given."),
    ] = None,
    json: Json = False,
) -> None:
    from ironlaw.plan.engines.named import engine as engine_named
    from ironlaw.plan.engines.named import profile_path
    from ironlaw.plan.measured.calibrate import calibrate as fit
    from ironlaw.plan.measured.calibrate import save_profile
    from ironlaw.plan.measured.read import read_runs
    from ironlaw.report.record_view import calibration_view

    profile_path(name)  # raises before anything is fitted
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
        messages().print(f"Kept in {path}. Use it: ironlaw plan ... --engine {name}")
