"""`ironlaw formats`"""

from __future__ import annotations

from typing import Annotated

import typer

from ironlaw.cli.console import print_json, show


def formats(
    name: Annotated[str | None, typer.Argument(help="One format; all unless given.")] = None,
    json: Annotated[bool, typer.Option("--json", help="Print one JSON document.")] = False,
) -> None:
    from ironlaw.catalog.formats import format_entries
    from ironlaw.report.catalog_view import format_view, formats_view

    entries = format_entries(name)
    if json:
        print_json({"schema": 1, "formats": entries})
    elif name:
        show(format_view(entries[0]))
    else:
        show(formats_view(entries))
