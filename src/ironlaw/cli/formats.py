"""`ironlaw formats`"""

from __future__ import annotations

from typing import Annotated

import typer

from ironlaw.cli.console import output, print_json


def formats(
    name: Annotated[str | None, typer.Argument(help="One format; all unless given.")] = None,
    json: Annotated[bool, typer.Option("--json", help="Print one JSON document.")] = False,
) -> None:
    from ironlaw.catalog.formats import format_entries
    from ironlaw.report.formats_view import show_format, show_formats

    entries = format_entries(name)
    if json:
        print_json({"schema": 1, "formats": entries})
    elif name:
        show_format(output(), entries[0])
    else:
        show_formats(output(), entries)
