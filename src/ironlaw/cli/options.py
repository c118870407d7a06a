"""Options and arguments that several verbs have."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

from typer import Argument, Option

Config = Annotated[Path, Argument(help="A config file, such as examples/gpt-tiny.toml.")]
Set = Annotated[list[str] | None, Option("--set", metavar="KEY=VALUE", help="Override a key; repeatable.")]
Json = Annotated[bool, Option("--json", help="Print one JSON document.")]
