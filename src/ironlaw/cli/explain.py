"""`ironlaw explain`"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from ironlaw.report.console import answer, messages


def explain(
    run: Annotated[
        Path,
        typer.Argument(help="A run directory, of `train` or `bench --out`, or a profiler trace (.json, .json.gz)."),
    ],
    other: Annotated[Path | None, typer.Argument(help="A second one: why is it faster or slower?")] = None,
    json: Annotated[bool, typer.Option("--json", help="Print one JSON document.")] = False,
) -> None:
    from ironlaw.api import explained
    from ironlaw.report.page import write
    from ironlaw.report.run_view import FOOTER, page_name

    document, view = explained(run, other)
    page = None
    if "time" in document:  # of one run
        page = run / "report.html" if run.is_dir() else run.with_name(run.name.partition(".")[0] + ".report.html")
        write(page, view, page_name(document), FOOTER)
    answer(json, document, lambda _: view)
    if page is not None and not json:
        messages().print(f"The same with charts: {page}")
