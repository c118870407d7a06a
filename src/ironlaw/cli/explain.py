"""`ironlaw explain`"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from ironlaw.cli.console import messages, output, print_json


def explain(
    run: Annotated[Path, typer.Argument(help="A run directory.")],
    json: Annotated[bool, typer.Option("--json", help="Print one JSON document.")] = False,
) -> None:
    from ironlaw.explain.explanation import explain_run
    from ironlaw.report.html import write_report
    from ironlaw.report.terminal import show_explanation

    explanation = explain_run(run).to_json()
    report = write_report(run, explanation)
    if json:
        print_json(explanation)
        return
    show_explanation(explanation, output())
    messages().print(f"The same with charts: {report}")
