"""`ironlaw tune`"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Annotated

import typer

from ironlaw.cli.console import messages, print_json, show
from ironlaw.config import load_config
from ironlaw.errors import UserError, shortened
from ironlaw.files import write_json, write_text

LONGEST_SECONDS = 366 * 86400.0


def tune(
    config: Annotated[Path, typer.Argument(help="A config file, such as examples/gpt-tiny.toml.")],
    budget: Annotated[str, typer.Option(help="Time to spend: 90s, 15min, 1h.")] = "15min",
    set_: Annotated[list[str] | None, typer.Option("--set", metavar="KEY=VALUE", help="Override a config key.")] = None,
    exact: Annotated[bool, typer.Option("--exact", help="Only what leaves the arithmetic as it is.")] = False,
    out: Annotated[Path, typer.Option(help="Folder for the trials, tuned.toml and evidence.json.")] = Path("runs/tune"),
    json: Annotated[bool, typer.Option("--json", help="Print one JSON document.")] = False,
) -> None:
    settings, seconds = load_config(config, set_ or []), seconds_of(budget)
    if out.exists() and any(out.iterdir()):
        raise UserError(f"{out} exists: give another --out")

    from ironlaw.explain.tune import INTERRUPTED, Tuned
    from ironlaw.explain.tune import tune as find
    from ironlaw.machine.profile import load_profile
    from ironlaw.report.comparison_view import tuned_view

    def keep(result: Tuned) -> None:
        write_text(out / "tuned.toml", result.config.to_toml())
        write_json(out / "evidence.json", result.to_json())

    say = messages()
    result = find(
        settings, load_profile(), budget_seconds=seconds, folder=out, exact=exact, keep=keep,
        say=lambda message: say.print(message, highlight=False),
    )  # fmt: skip
    keep(result)
    if json:
        print_json(result.to_json())
    else:
        show(tuned_view(result.to_json(), str(out / "tuned.toml")))
    if result.stopped == INTERRUPTED:
        raise KeyboardInterrupt(result.signal)


def seconds_of(text: str) -> float:
    """A time to spend: `90s`, `15min`, `1h`."""
    found = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*(s|sec|min|m|h)?\s*", text)
    seconds = float(found[1]) * {"s": 1, "sec": 1, None: 1, "min": 60, "m": 60, "h": 3600}[found[2]] if found else 0.0
    if not 0 < seconds <= LONGEST_SECONDS:
        raise UserError(f"--budget {shortened(text)!r} is no time to spend: write for example 90s, 15min or 1h")
    return seconds
