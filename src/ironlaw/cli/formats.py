"""`ironlaw formats`"""

from __future__ import annotations

from typing import Annotated

import typer

from ironlaw.report.console import answer


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
