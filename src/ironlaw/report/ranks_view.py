"""What ranks do, send and hold: planned, and beside it what a run measured."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from rich.console import Console

from ironlaw import units
from ironlaw.ledger import Ledger
from ironlaw.report import words
from ironlaw.report.tables import heading, paragraph, show, table


def show_ranks(console: Console, ledger: Ledger, more: Mapping[str, Any]) -> None:
    """The planned layout: why it, the others, and its stages."""
    stages: Sequence[Mapping[str, Any]] = ledger.facts.get("stages", ())
    if not stages:
        return
    heading(console, f"Layout of {ledger.facts['ranks']} ranks: {ledger.facts['layout']}")
    if more.get("reason"):
        paragraph(console, f"Chosen: {more['reason']}.", indent=2)
    if len(more.get("candidates", ())) > 1:
        made = table("layout", "step", "communication exposed", "held per rank")
        for one in more["candidates"]:
            made.add_row(
                one["layout"], units.seconds(one["step_seconds"]),
                units.seconds(one["exposed_communication_seconds"]), units.bytes_(one["peak_bytes"]),
            )  # fmt: skip
        show(console, made)
    heading(console, "Each rank of a stage, per step")
    made = table("stage", "ranks", "held", "highest at", "collective", "calls", "bytes", "takes", "exposed",
                 left=("highest at", "collective"))  # fmt: skip
    for stage in stages:
        first, last = stage["ranks"]
        head = (str(stage["position"]), f"{first}-{last}" if last > first else str(first),
                units.bytes_(stage["peak_bytes"]), stage["peak_at"])  # fmt: skip
        for talk in stage["communication"]:
            made.add_row(
                *head, f"{talk['dimension']} {talk['kind']}", units.count(talk["count"]), units.bytes_(talk["bytes"]),
                units.seconds(talk["seconds"]), units.seconds(talk["exposed_seconds"]),
            )  # fmt: skip
            head = ("", "", "", "")
    show(console, made)


def show_ranks_explained(console: Console, document: Mapping[str, Any] | None) -> None:
    """Communication by collective and dimension, memory by rank and the slowest rank of each phase."""
    if not document:
        return
    heading(console, f"Communication of {document['ranks']} ranks, of a mean rank and step")
    made = table("collective", "bytes planned", "bytes sent", "exposed planned", "exposed", "hidden", "calls")
    for row in document["communication"]:
        made.add_row(
            row["name"], _amount(row["planned_bytes"], units.bytes_, words.NOT_PLANNED),
            _amount(row["bytes"], units.bytes_), _amount(row["planned_exposed_seconds"], units.seconds,
            words.NOT_PLANNED), _amount(row["exposed_seconds"], units.seconds),
            _amount(row["hidden_seconds"], units.seconds), _amount(row["count"], lambda n: f"{n:,.0f}"),
        )  # fmt: skip
    show(console, made)
    paragraph(
        console,
        "Exposed: the rank only waited, for the transfer or for a rank that was not there yet. Hidden: under way while "
        "it computed. Waiting for a neighbour's message includes a pipeline's idle time.",
        indent=2, style="dim",
    )  # fmt: skip
    made = table("phase", "fastest rank", "took", "slowest rank", "took ")
    for row in document["spread"]:
        made.add_row(
            row["phase"], str(row["fastest_rank"]), units.seconds(row["fastest_seconds"]), str(row["slowest_rank"]),
            units.seconds(row["slowest_seconds"]),
        )  # fmt: skip
    show(console, made)
    if document["memory"]:
        made = table("stage", "held, planned", "held", "plan error")
        for row in document["memory"]:
            made.add_row(
                str(row["position"]), _amount(row["planned"], units.bytes_, words.NOT_PLANNED),
                _amount(row["measured"], units.bytes_), words.error(row["error"]),
            )  # fmt: skip
        show(console, made)


def _amount(value: float | None, print_: Any, absent: str = words.NOT_MEASURED) -> str:
    return absent if value is None else str(print_(value))
