"""What all tables of a config have in common: what is not known, not of its type or not finite is an error."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from functools import wraps
from typing import Annotated, Any, ParamSpec, TypeVar

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator, validate_call

from ironlaw.errors import LARGEST, LONGEST, UserError, as_given

Refusals = Iterator[tuple[object, str]]
"""What must not hold of a config, and where it does, what is wrong and what to write instead."""


P = ParamSpec("P")
R = TypeVar("R")
Text = Annotated[str, Field(min_length=1, max_length=LONGEST)]
Count = Annotated[int, Field(gt=0, le=LARGEST)]


class Section(BaseModel):
    """A table of a config. Types are strict: `true` is no number, 1 is no switch, "3" is text."""

    model_config = ConfigDict(
        extra="forbid", frozen=True, strict=True, allow_inf_nan=False, protected_namespaces=(),
        defer_build=True,  # at the first use: most tables are only ever read as parts of a whole config
    )  # fmt: skip

    @model_validator(mode="before")
    @classmethod
    def _as_written(cls, values: Any) -> Any:
        """What every type shares is looked at here, before any other."""
        if not isinstance(values, dict):
            return values
        return {key: _as_meant(key, value) for key, value in values.items()}


def section() -> Any:
    """A table that may be left out: it then has its defaults."""
    return Field(default_factory=dict, validate_default=True)


def _as_meant(key: str, value: Any) -> Any:
    """TOML and JSON have lists for tuples, and people write 1e6 for a whole number."""
    if isinstance(value, list):
        return tuple(_as_meant(key, item) for item in value)
    if isinstance(value, int) and abs(value) > LARGEST:
        raise ValueError(f"{key} is out of range: whole numbers go to {LARGEST:,}")
    if isinstance(value, float) and value.is_integer() and abs(value) <= LARGEST:
        return int(value)
    if isinstance(value, str):
        if not value.strip():
            raise ValueError(f"{key} is empty: give a value or leave it out")
        if len(value) > LONGEST or "\0" in value:
            raise ValueError(f"{key} is no text that can be used: {len(value):,} characters, at most {LONGEST:,}")
    return value


def refuse(refusals: Refusals) -> None:
    """ValueError of the first that holds."""
    for holds, message in refusals:
        if holds:
            raise ValueError(message)


def checked(function: Callable[P, R]) -> Callable[P, R]:
    """`function`, whose arguments must have the types that it is annotated with: else a UserError of one line."""
    strict = ConfigDict(strict=True, arbitrary_types_allowed=True, allow_inf_nan=False, defer_build=True)
    call, names = validate_call(config=strict)(function), list(inspect.signature(function).parameters)

    @wraps(function)
    def checked_call(*args: P.args, **kwargs: P.kwargs) -> R:
        try:
            return call(*args, **kwargs)
        except ValidationError as error:
            if error.title.rpartition(".")[2] != function.__name__:
                raise
            first, *others = error.errors()
            where = first["loc"][0]
            name = names[where] if isinstance(where, int) and where < len(names) else where
            wanted = [
                first["msg"],
                *(e["msg"].removeprefix("Input should be ") for e in others if e["loc"][0] == where),
            ]
            given = f"{name} = {as_given(first['input'])}"
            raise UserError(f"{function.__name__}: {given}: {' or '.join(dict.fromkeys(wanted))}") from None

    return checked_call
