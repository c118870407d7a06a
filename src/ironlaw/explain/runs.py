"""Explains any run on disk, and lists the runs of a folder with the figures to compare them by."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from ironlaw.errors import UserError
from ironlaw.files import read_json_lines
from ironlaw.ledger import Ledger

if TYPE_CHECKING:
    from ironlaw.explain.explanation import Explanation

SORTS = ("date", "step_seconds", "tokens_per_second", "mfu", "validation_loss", "peak_bytes")


def explain_path(path: Path) -> Explanation:
    """A run of `ironlaw train`, an observed loop, or a profiler's trace."""
    from ironlaw.explain.explanation import explain_run
    from ironlaw.explain.observed import explain_observed, explain_trace, is_observed

    if path.is_file():
        return explain_trace(path)
    if not path.exists():
        raise UserError(
            f"no run directory at {path}: give the one that `ironlaw train` printed, like runs/NAME, or a trace file"
        )
    return explain_observed(path) if is_observed(path) else explain_run(path)


def list_runs(folder: Path, sort: str = "date") -> list[dict[str, Any]]:
    """One entry per run directory below `folder`; a run without a ledger is listed as not finished."""
    if not folder.is_dir():
        raise UserError(f"no folder {folder}: runs are kept in `runs` unless --out says otherwise")
    if sort not in SORTS:
        raise UserError(f"--sort {sort}: choose one of {', '.join(SORTS)}")
    entries = [_entry(path) for path in sorted(_run_folders(folder))]
    down = sort in ("tokens_per_second", "mfu", "date")
    known = [e for e in entries if e.get(sort) is not None]
    return sorted(known, key=lambda e: e[sort], reverse=down) + [e for e in entries if e.get(sort) is None]


def _run_folders(folder: Path) -> set[Path]:
    names = ("*/ledger.json", "*/config.toml", "*/*/ledger.json", "*/*/config.toml")
    found = {path.parent for name in names for path in folder.glob(name)}
    if (folder / "ledger.json").is_file():
        found.add(folder)
    return found


def _entry(path: Path) -> dict[str, Any]:
    entry: dict[str, Any] = {"run": str(path), "state": "not finished"}
    try:
        ledger = Ledger.load(path / "ledger.json")
    except OSError:
        return entry
    except UserError as error:
        return entry | {"state": f"unreadable: {error}"}
    facts, totals = ledger.facts, ledger.totals
    model = facts.get("model") or {}
    entry |= {
        "state": f"interrupted ({facts['interrupted']})" if facts.get("interrupted") else "done",
        "model": model.get("name"), "date": facts.get("finished"), "steps": facts.get("steps_done"),
        "precision": facts.get("precision"), "machine": facts.get("machine"),
        "source": facts.get("source", "train"),
    }  # fmt: skip
    for name in ("step_seconds", "tokens_per_second", "mfu", "peak_bytes", "validation_loss", "train_loss"):
        entry[name] = totals[name].value if name in totals else None
    return entry


def losses(path: Path) -> list[float]:
    """Returns the training loss of each step of a run, for a plot."""
    entries = (entry for entry in read_json_lines(path / "metrics.jsonl") if isinstance(entry.get("step"), int))
    return [entry["loss"] for entry in entries if isinstance(entry.get("loss"), float)]
