"""`ironlaw catalog`, `formats`, `runs` and `doctor`: what there is to plan for, what was trained, what is installed."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from ironlaw.report.console import answer, output, print_json, show


def catalog(
    name: Annotated[str | None, typer.Argument(help="Accelerator, node, model or grid; all unless given.")] = None,
    json: Annotated[bool, typer.Option("--json", help="Print one JSON document.")] = False,
) -> None:
    from ironlaw.catalog.entries import entry, entry_names
    from ironlaw.report.catalog_view import entry_view, names_view

    if name is None:
        answer(json, entry_names(), names_view)
    else:
        answer(json, entry(name), entry_view)


def formats(
    name: Annotated[str | None, typer.Argument(help="One format; all unless given.")] = None,
    json: Annotated[bool, typer.Option("--json", help="Print one JSON document.")] = False,
) -> None:
    from ironlaw.catalog.formats import format_entries
    from ironlaw.report.catalog_view import format_view, formats_view

    entries = format_entries(name)
    answer(
        json, {"schema": 1, "formats": entries}, lambda _: format_view(entries[0]) if name else formats_view(entries)
    )


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


def doctor(json: Annotated[bool, typer.Option("--json", help="Print one JSON document.")] = False) -> None:
    from ironlaw.machine.doctor import examine
    from ironlaw.report.catalog_view import checkup_view

    document = examine()
    answer(json, document, checkup_view)
    if not document["healthy"]:
        raise typer.Exit(1)
