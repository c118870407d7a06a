"""`ironlaw doctor`"""

from __future__ import annotations

from typing import Annotated

import typer

from ironlaw.cli.console import output, print_json


def doctor(json: Annotated[bool, typer.Option("--json", help="Print one JSON document.")] = False) -> None:
    from ironlaw.machine.doctor import examine
    from ironlaw.report.doctor_view import show_checkup

    document = examine()
    if json:
        print_json(document)
    else:
        show_checkup(output(), document)
    if not document["healthy"]:
        raise typer.Exit(1)
