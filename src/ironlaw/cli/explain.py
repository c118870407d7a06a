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
    from ironlaw.report.html import write_run
    from ironlaw.report.terminal import show_explanation
    from ironlaw.train.run_directory import RunDirectory

    document = explain_run(run).to_json()
    directory = RunDirectory(run)
    report = write_run(
        directory.report_file, document, directory.metrics(), directory.config_file.read_text(encoding="utf-8")
    )
    if json:
        print_json(document)
        return
    show_explanation(output(), document)
    messages().print(f"The same with charts: {report}")
