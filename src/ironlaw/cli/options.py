"""Options and arguments that several verbs have."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

Config = Annotated[Path, typer.Argument(help="A config file, such as examples/gpt-tiny.toml.")]
Set = Annotated[list[str] | None, typer.Option("--set", metavar="KEY=VALUE", help="Override a key; repeatable.")]
Json = Annotated[bool, typer.Option("--json", help="Print one JSON document.")]
