"""`ironlaw catalog`"""

from __future__ import annotations

from typing import Annotated

import typer

from ironlaw.report.console import answer


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
