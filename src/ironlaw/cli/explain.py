"""`ironlaw explain`"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from ironlaw.cli.console import messages, print_json, show


def explain(
    run: Annotated[
        Path,
        typer.Argument(help="A run directory, of `train` or `bench --out`, or a profiler trace (.json, .json.gz)."),
    ],
    other: Annotated[Path | None, typer.Argument(help="A second one: why is it faster or slower?")] = None,
    json: Annotated[bool, typer.Option("--json", help="Print one JSON document.")] = False,
) -> None:
    if other is not None:
        _compare(run, other, json)
        return
    from ironlaw.explain.serving import explain_serving, is_serving_run

    if is_serving_run(run):
        from ironlaw.report.serving_view import server_view

        document = explain_serving(run).to_json()
        if json:
            print_json(document)
        else:
            show(server_view(document))
        return
    from ironlaw.explain.runs import explain_path
    from ironlaw.report.page import write
    from ironlaw.report.run_view import FOOTER, page_name, run_view

    explanation = explain_path(run)
    document = explanation.to_json()
    page = run / "report.html" if run.is_dir() else run.with_name(run.name.partition(".")[0] + ".report.html")
    view = run_view(document, explanation.metrics, explanation.config_text)
    report = write(page, view, page_name(document), FOOTER)
    if json:
        print_json(document)
        return
    show(view)
    messages().print(f"The same with charts: {report}")


def _compare(before: Path, after: Path, json: bool) -> None:
    from ironlaw.explain.compare import compare
    from ironlaw.explain.grades import keep
    from ironlaw.explain.runs import explain_path
    from ironlaw.report.comparison_view import comparison_view

    comparison = compare(explain_path(before), explain_path(after))
    if comparison.grade is not None:
        keep(comparison.grade)
    document = comparison.to_json()
    if json:
        print_json(document)
    else:
        show(comparison_view(document))
