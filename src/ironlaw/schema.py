"""The base of all config tables: unknown keys, wrong types and non-finite numbers are errors."""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Iterable
from functools import wraps
from typing import Annotated, Any, ParamSpec, TypeVar

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator, validate_call

from ironlaw.errors import MAX_FLOAT, MAX_INTEGER, MAX_TEXT, UserError, shortened_repr

Refusals = Iterable[tuple[object, str]]
"""Pairs of a condition that makes a config invalid, and the error message for it."""


P = ParamSpec("P")
R = TypeVar("R")
Text = Annotated[str, Field(min_length=1, max_length=MAX_TEXT)]
Count = Annotated[int, Field(gt=0, le=MAX_INTEGER)]


class Section(BaseModel):
    """A table of a config. Types are strict: `true` is not a number, 1 is not a boolean, "3" is text."""

    model_config = ConfigDict(
        extra="forbid", frozen=True, strict=True, allow_inf_nan=False, protected_namespaces=(),
        defer_build=True,  # until the first use: most tables are only parsed as parts of a whole config
    )  # fmt: skip

    @model_validator(mode="before")
    @classmethod
    def _as_written(cls, values: Any) -> Any:
        """Apply the checks common to all types before pydantic's own."""
        if not isinstance(values, dict):
            return values
        return {key: _as_meant(key, value) for key, value in values.items()}


def section() -> Any:
    """Return a field for a table that may be left out and then has its defaults."""
    return Field(default_factory=dict, validate_default=True)


def _as_meant(key: str, value: Any) -> Any:
    """Convert lists to tuples, which TOML and JSON lack, and whole floats such as 1e6 to integers."""
    if isinstance(value, list):
        return tuple(_as_meant(key, item) for item in value)
    if isinstance(value, int) and abs(value) > MAX_INTEGER:
        raise ValueError(f"{key} is out of range: whole numbers go to {MAX_INTEGER:,}")
    if isinstance(value, float) and MAX_FLOAT < abs(value) < math.inf:
        raise ValueError(f"{key} is out of range: numbers go to {MAX_FLOAT:g}, the largest in fp32")
    if isinstance(value, float) and value.is_integer() and abs(value) <= MAX_INTEGER:
        return int(value)
    if isinstance(value, str):
        if not value.strip():
            raise ValueError(f"{key} is empty: give a value or leave it out")
        if len(value) > MAX_TEXT or "\0" in value:
            raise ValueError(f"{key} is no text that can be used: {len(value):,} characters, at most {MAX_TEXT:,}")
    return value


def refuse(refusals: Refusals) -> None:
    """Raise UserError with the message of the first condition that holds."""
    for holds, message in refusals:
        if holds:
            raise UserError(message)


def checked(function: Callable[P, R]) -> Callable[P, R]:
    """Wrap `function` to check its arguments against its annotations; a mismatch is a one-line UserError."""
    strict = ConfigDict(strict=True, arbitrary_types_allowed=True, allow_inf_nan=False, defer_build=True)
    call, names = validate_call(config=strict)(function), list(inspect.signature(function).parameters)

    @wraps(function)
    def checked_call(*args: P.args, **kwargs: P.kwargs) -> R:
        try:
            return call(*args, **kwargs)
        except ValidationError as error:
            if error.title.rpartition(".")[2] != function.__name__:
                raise
            first, where = error.errors()[0], error.errors()[0]["loc"][0]
            name = names[where] if isinstance(where, int) and where < len(names) else where
            wanted = (e["msg"].removeprefix("Input should be ") for e in error.errors() if e["loc"][0] == where)
            given = "" if first["type"].startswith("missing") else f" = {shortened_repr(first['input'])}"
            raise UserError(f"{function.__name__}: {name}{given}: {' or '.join(dict.fromkeys(wanted))}") from None

    return checked_call
