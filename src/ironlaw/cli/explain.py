"""`ironlaw explain`"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from ironlaw.cli.console import messages, output, print_json


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
        from ironlaw.report.serving_explanation_view import show_serving_explanation

        document = explain_serving(run).to_json()
        if json:
            print_json(document)
        else:
            show_serving_explanation(output(), document)
        return
    from ironlaw.explain.open import explain_path
    from ironlaw.report.html import write_run
    from ironlaw.report.terminal import show_explanation

    explanation = explain_path(run)
    document = explanation.to_json()
    page = run / "report.html" if run.is_dir() else run.with_name(run.name.partition(".")[0] + ".report.html")
    report = write_run(page, document, explanation.metrics, explanation.config_text)
    if json:
        print_json(document)
        return
    show_explanation(output(), document)
    messages().print(f"The same with charts: {report}")


def _compare(before: Path, after: Path, json: bool) -> None:
    from ironlaw.explain.compare import compare
    from ironlaw.explain.grades import keep
    from ironlaw.explain.open import explain_path
    from ironlaw.report.comparison_view import show_comparison

    comparison = compare(explain_path(before), explain_path(after))
    if comparison.grade is not None:
        keep(comparison.grade)
    document = comparison.to_json()
    if json:
        print_json(document)
    else:
        show_comparison(output(), document)
