"""Views of several runs: two side by side, a table of many, and the trials of tuning."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from ironlaw import units
from ironlaw.report import labels
from ironlaw.report.document import Cell, Document, Print, Row, quantity, strong

Found = Mapping[str, Any]
MAX_OPERATIONS, MAX_SETTINGS = 8, 20
TOTALS = ("step_seconds", "tokens_per_second", "mfu", "peak_bytes", "resident_bytes", "total_seconds", "train_loss",
          "validation_loss")  # fmt: skip
COLUMNS = {"step_seconds": "step", "tokens_per_second": "throughput", "mfu": "MFU", "validation_loss": "val. loss"}
_BLOCKS = "▁▂▃▄▅▆▇█"


def comparison_view(found: Found) -> Document:
    """Return what changed between two runs, and whether it is more than noise."""
    view, noise, grade = Document(), found["noise"], found.get("grade")
    view.note(f"A {found['before']}")
    view.note(f"B {found['after']}")
    view.text("")
    view.text(strong(found["sentence"]))
    if noise is not None:
        view.note(f"Noise: {units.percent(noise)}, from blocks of steps and the halves of each run.", indent=2)
    if grade is not None:
        promised, brought = units.signed_percent(grade["predicted"]), units.signed_percent(grade["measured"])
        view.text(f"B is A with the remedy {grade['remedy']}: it promised {promised} and brought {brought}.", indent=2)
    if found["settings"]:
        view.heading("What differs")
        settings = found["settings"][:MAX_SETTINGS]
        view.table(["", "A", "B"], [[s["name"], _setting(s["before"]), _setting(s["after"])] for s in settings])
    view.heading("Totals")
    rows: list[Row] = []
    for name in TOTALS:
        row, (label, show) = found["totals"].get(name), labels.TOTALS[name]
        if row is not None and row["before"] is not None and row["after"] is not None:
            ratio = row["after"] / row["before"] - 1 if row["before"] else None
            rows.append([label, quantity(row["before"], show), quantity(row["after"], show),
                         units.signed_percent(ratio)])  # fmt: skip
    view.table(["", "A", "B", "change"], rows)
    _differences(view, "Step time by phase", found["phases"], units.seconds)
    _differences(view, "Step time by kind of operation", found["kinds"], units.seconds)
    operations = [row | {"name": f"{row['name']} ({row['phase']})"} for row in found["operations"]]
    _differences(view, "Operations that changed the most", operations[:MAX_OPERATIONS], units.seconds)
    _differences(view, "Memory at the peak", found["memory"], units.bytes_)
    for side, sentence in zip("AB", found["bottlenecks"], strict=True):
        view.note(f"{side}: {sentence}")
    return view


def _differences(view: Document, title: str, found: Sequence[Found], show: Print) -> None:
    rows: list[Row] = []
    for row in found:
        if row["before"] is not None or row["after"] is not None:
            change = (row["after"] or 0.0) - (row["before"] or 0.0)
            rows.append([row["name"], *(quantity(row[side], show, "–") for side in ("before", "after")),
                         f"{'+' if change >= 0 else '−'}{show(abs(change))}"])  # fmt: skip
    if rows:
        view.heading(title)
        view.table(["", "A", "B", "difference"], rows)


def _setting(value: Any) -> str:
    return "–" if value is None else f"{value:.3g}" if isinstance(value, float) else str(value)


def runs_view(folder: Path, runs: Sequence[Found], losses: Callable[[str], Sequence[float]]) -> Document:
    """Return a table of the runs in `folder`, each with its losses as a sparkline."""
    view = Document()
    if not runs:
        view.text(f"{folder} holds no runs.")
        return view
    rows: list[Row] = []
    for run in runs:
        name = run["run"] if run["state"] == "done" else f"{run['run']} ({run['state']})"
        figures = [_figure(column, run.get(column)) for column in COLUMNS]
        rows.append([name, run.get("model") or "", str(run.get("steps") or ""), *figures,
                     sparkline(losses(run["run"]))])  # fmt: skip
    view.table(["run", "<model", "steps", *COLUMNS.values(), "<loss"], rows)
    return view


def _figure(name: str, value: float | None) -> Cell:
    return Cell("" if value is None else labels.TOTALS[name][1](value).removesuffix(" nats/token"), value=value)


def sparkline(values: Sequence[float]) -> str:
    """Return a curve as 12 block characters, means of neighbouring values; empty for fewer than two values."""
    if len(values) < 2:
        return ""
    size = max(1, len(values) // 12)
    means = [sum(values[i : i + size]) / len(values[i : i + size]) for i in range(0, len(values), size)][:12]
    low, high = min(means), max(means)
    span = (high - low) or 1.0
    return "".join(_BLOCKS[min(7, int(8 * (v - low) / span))] for v in means)


def tuned_view(found: Found, path: str) -> Document:
    """Return the trials of tuning and the settings that it kept."""
    view = Document()
    if found["trials"]:
        columns = ["remedy", "<change", "planned", "measured", "noise", "loss", "<"]
        view.table(columns, map(_trial, found["trials"]))
    kept, verdict = _settings(found["settings"]), "Nothing pays" if found["trials"] else "Nothing was tried"
    view.text(strong(f"{units.percent(found['gain'])} less time per token: {kept}." if kept else
                     f"{verdict}: kept as it is."))  # fmt: skip
    view.note(
        f"{found['runs']} short runs in {units.seconds(found['seconds'])}; {found['stopped']}. Gains are fractions of "
        f"the time per token, each against the unchanged config run before and after it. {path}"
    )
    return view


def _trial(trial: Found) -> Row:
    return [
        trial["remedy"], _settings(trial["settings"]),
        "" if trial["predicted_gain"] is None else units.signed_percent(trial["predicted_gain"]),
        units.signed_percent(trial["measured_gain"]), f"± {units.percent(trial['noise'])}",
        f"{trial['loss_change']:+.3f}", "kept" if trial["kept"] else trial["reason"],
    ]  # fmt: skip


def _settings(settings: Found) -> str:
    return ", ".join(f"{key} = {value}" for key, value in settings.items())
