"""`ironlaw plan`"""

from __future__ import annotations

from typing import Annotated

import typer

from ironlaw.cli.console import output, print_json
from ironlaw.ledger import Ledger


def plan(
    what: Annotated[str, typer.Argument(metavar="CONFIG|MODEL", help="A config file, or a catalogued model.")],
    on: Annotated[str, typer.Option(help="this, h100-sxm-80gb, 64xh100-sxm-80gb, ...")] = "this",
    set_: Annotated[list[str] | None, typer.Option("--set", metavar="KEY=VALUE", help="Override a config key.")] = None,
    layout: Annotated[str | None, typer.Option(help='Such as "dp=8 zero=3 micro_batch=2".')] = None,
    why: Annotated[bool, typer.Option("--why", help="Show how every number was obtained.")] = False,
    json: Annotated[bool, typer.Option("--json", help="Print one JSON document.")] = False,
) -> None:
    from ironlaw.plan.request import plan_request
    from ironlaw.report.terminal import show_plan, show_why

    answer = plan_request(what, on=on, overrides=set_ or [], layout=layout)
    if json:
        print_json(plan_document(answer.ledger, answer.fits))
    else:
        console = output()
        show_plan(console, answer.ledger, answer.fits)
        if why:
            show_why(console, answer.ledger)
    if not answer.fits:
        raise typer.Exit(1)


def plan_document(ledger: Ledger, fits: bool) -> dict[str, object]:
    """`fits` and the totals at the top, each {value, interval, origin, basis}; the whole ledger below."""
    return {"fits": fits} | {name: e.to_json() for name, e in ledger.totals.items()} | {"ledger": ledger.to_json()}
