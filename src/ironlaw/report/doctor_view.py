"""What `ironlaw doctor` found."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from rich.console import Console
from rich.text import Text

from ironlaw import units
from ironlaw.report.tables import heading, paragraph, show, table


def show_checkup(console: Console, document: Mapping[str, Any]) -> None:
    """The document of `machine.doctor.examine`."""
    versions = [f"{name} {version}" for name, version in document["versions"].items() if version]
    paragraph(console, ", ".join(versions), style="bold")
    for device in document["devices"]:
        more = [f"{device['threads']} threads"] if "threads" in device else [f"capability {device['capability']}"]
        about = ", ".join([*more, units.bytes_(device["memory_bytes"])])
        paragraph(console, f"{device['device']}: {device['name']} ({about})")
    measured = document["measured"]
    if measured is not None:
        when = measured["created"][:16].replace("T", " ")
        paragraph(console, f"Measured {when}: {measured['name']} ({measured['device']})")
    heading(console, "Optional parts")
    made = table("extra", "here", "gives", left=("here", "gives"))
    for extra in document["extras"]:
        have = [f"{name} {version}" for name, version in extra["versions"].items() if version]
        install = f"pip install 'ironlaw[{extra['name']}]'"
        missing = f"missing: {', '.join(extra['missing'])}; {install}" if extra["missing"] else ""
        style = "yellow" if missing else "green"
        made.add_row(extra["name"], Text("\n".join(filter(None, [", ".join(have), missing])), style), extra["gives"])
    show(console, made)
    console.print()
    for problem in document["problems"]:
        paragraph(console, Text("Problem: ", style="bold red").append(problem, style="not bold default"))
    for advice in document["advice"]:
        paragraph(console, Text("Advice: ", style="bold yellow").append(advice, style="not bold default"))
    if not document["problems"]:
        paragraph(console, "Everything that Ironlaw needs is here.", style="green")
