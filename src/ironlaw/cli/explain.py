"""`ironlaw explain`"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ironlaw.cli.console import answer, messages

if TYPE_CHECKING:
    from ironlaw.report.document import Document


def explain(
    run: Annotated[
        Path,
        typer.Argument(help="A run directory, of `train` or `bench --out`, or a profiler trace (.json, .json.gz)."),
    ],
    other: Annotated[Path | None, typer.Argument(help="A second one: why is it faster or slower?")] = None,
    json: Annotated[bool, typer.Option("--json", help="Print one JSON document.")] = False,
) -> None:
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


def explained(run: Path, other: Path | None = None) -> tuple[dict[str, Any], Document]:
    """The document of a run, a trace or a served load, or of why `other` is faster or slower; and how it is shown."""
    from ironlaw.explain.runs import explain_path
    from ironlaw.explain.serving import explain_serving, is_serving_run

    if other is not None:
        from ironlaw.explain.compare import compare
        from ironlaw.explain.grades import keep
        from ironlaw.report.comparison_view import comparison_view

        comparison = compare(explain_path(run), explain_path(other))
        if comparison.grade is not None:
            keep(comparison.grade)
        document = comparison.to_json()
        return document, comparison_view(document)
    if is_serving_run(run):
        from ironlaw.report.serving_view import server_view

        document = explain_serving(run).to_json()
        return document, server_view(document)
    from ironlaw.report.run_view import run_view

    explanation = explain_path(run)
    document = explanation.to_json()
    return document, run_view(document, explanation.metrics, explanation.config_text)
