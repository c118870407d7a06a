"""What a release had, the next one has: verbs, options and config keys (docs/reference/json.md, Stability)."""

from __future__ import annotations

import typing
from collections.abc import Iterator
from pathlib import Path
from typing import Any

RELEASED = Path(__file__).with_name("released.txt")  # of 0.1.0; a release writes it anew


def options(verb: str, function: Any) -> Iterator[str]:
    for name, hint in typing.get_type_hints(function, include_extras=True).items():
        if name != "return" and type(hint.__metadata__[0]).__name__ == "OptionInfo":
            info = hint.__metadata__[0]
            words = [word for word in (info.default, *(info.param_decls or ())) if isinstance(word, str)]
            yield from (f"{verb} {word}" for word in words or ["--" + name.strip("_").replace("_", "-")])


def keys(section: str, model: Any) -> Iterator[str]:
    from pydantic import BaseModel

    for name, field in model.model_fields.items():
        yield f"{section}{name}"
        for kind in (field.annotation, *getattr(field.annotation, "__args__", ())):
            if isinstance(kind, type) and issubclass(kind, BaseModel):
                yield from keys(f"{section}{name}.", kind)


def public() -> Iterator[str]:
    from ironlaw.cli.main import VERBS, module_of
    from ironlaw.config import RunConfig

    for verb in VERBS:
        function = getattr(module_of(verb), verb)
        commands = getattr(function, "registered_commands", None)
        yield verb
        if commands is None:
            yield from options(verb, function)
        for command in commands or ():
            name = f"{verb} {command.name or command.callback.__name__}"
            yield name
            yield from options(name, command.callback)
    yield from keys("", RunConfig)


def test_nothing_that_was_released_is_gone() -> None:
    gone = set(RELEASED.read_text("utf-8").splitlines()) - set(public())
    assert not gone, f"keep the old name beside the new one, with a warning, for a minor version: {sorted(gone)}"
