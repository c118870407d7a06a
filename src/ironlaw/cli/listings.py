"""`ironlaw catalog`, `formats`, `runs`, `doctor` and `measure`: lists of what is known, trained and installed."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Annotated

from typer import Argument, Exit, Option

from ironlaw.cli.options import Json
from ironlaw.cores import usable_cores
from ironlaw.errors import UserError
from ironlaw.report.console import answer, messages, progress


def catalog(
    name: Annotated[str | None, Argument(help="Accelerator, node, model or power grid; all unless given.")] = None,
    json: Json = False,
) -> None:
    from ironlaw.catalog.entries import entry, entry_names
    from ironlaw.report.catalog_view import entry_view, names_view

    if name is None:
        answer(json, entry_names(), names_view)
    else:
        answer(json, entry(name), entry_view)


def formats(
    name: Annotated[str | None, Argument(help="One format; all unless given.")] = None,
    json: Json = False,
) -> None:
    from ironlaw.catalog.formats import format_entries
    from ironlaw.report.catalog_view import format_view, formats_view

    entries = format_entries(name)
    answer(
        json, {"schema": 1, "formats": entries}, lambda _: format_view(entries[0]) if name else formats_view(entries)
    )


def runs(
    folder: Annotated[Path, Argument(help="Folder of the runs.")] = Path("runs"),
    sort: Annotated[
        str, Option(help="Sort by date, step_seconds, tokens_per_second, mfu or validation_loss.")
    ] = "date",
    json: Json = False,
) -> None:
    from ironlaw.explain.runs import list_runs, losses
    from ironlaw.report.comparison_view import runs_view

    found = list_runs(folder, sort)
    document = {"schema_version": 1, "runs": found}
    answer(json, document, lambda _: runs_view(folder, found, lambda run: losses(Path(run))))


def doctor(json: Json = False) -> None:
    from ironlaw.machine.doctor import examine
    from ironlaw.report.catalog_view import checkup_view

    document = examine()
    answer(json, document, checkup_view)
    if not document["healthy"]:
        raise Exit(1)


def measure(
    threads: Annotated[int | None, Option(help="CPU threads; all cores unless given.", min=1)] = None,
    json: Json = False,
) -> None:
    from ironlaw.machine import interference
    from ironlaw.machine.keep import measure_and_keep
    from ironlaw.machine.profile import profile_path
    from ironlaw.report.profile_view import profile_view

    if threads is not None and threads > usable_cores():
        raise UserError(f"--threads {threads} is more than the {usable_cores()} cores that this process may use")
    started = time.perf_counter()
    profile = measure_and_keep(messages().print, progress, threads)
    answer(json, profile.to_json(), lambda _: profile_view(profile, interference.typical(profile)))
    if not json:
        messages().print(f"Measured in {time.perf_counter() - started:.0f} s, kept in {profile_path()}")
