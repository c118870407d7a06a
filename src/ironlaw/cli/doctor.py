"""`ironlaw doctor`"""

from __future__ import annotations

from typing import Annotated

import typer

from ironlaw.report.console import answer


def doctor(json: Annotated[bool, typer.Option("--json", help="Print one JSON document.")] = False) -> None:
    from ironlaw.machine.doctor import examine
    from ironlaw.report.catalog_view import checkup_view

    document = examine()
    answer(json, document, checkup_view)
    if not document["healthy"]:
        raise typer.Exit(1)
