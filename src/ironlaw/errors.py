"""The error types shown to users, and helpers that put a user's input safely into a message."""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager

MAX_INTEGER = 2**53
"""Largest integer accepted: above it, neighbouring integers have the same float64."""

MAX_FLOAT = 3.4e38
"""Largest number accepted in a config: models are computed in fp32, in which a larger one is infinite."""

MAX_TEXT = 4096  # characters, the limit of a path on Linux


class UserError(ValueError):
    """Wrong input. The one-line message states what is wrong and what to write instead. Exit code 2."""


class InvalidConfig(UserError):
    """A `config.json` of a known architecture with values that no such model has: building it would be a guess."""


class JobFailed(Exception):
    """A child process or job failed after printing its own reason. Exit code 1."""


# Terminals act on control characters, and bidirectional control characters change the order in which text is read.
_OBEYED = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u200e\u200f\u2028-\u202e\u2066-\u2069\ud800-\udfff]")


def printable(text: str) -> str:
    """Return `text` with control characters escaped, for a terminal. Newlines and tabs stay."""
    return _OBEYED.sub(lambda found: ascii(found[0])[1:-1], text)


def first_line(error: Exception) -> str:
    """Return the first line of an error's message; its type if there is none."""
    return (str(error).strip().splitlines() or [type(error).__name__])[0]


@contextmanager
def reported(line: str, *kinds: type[Exception]) -> Iterator[None]:
    """Turn errors of these `kinds` into a UserError of one line, in which `{reason}` is what the error says."""
    try:
        yield
    except UserError:
        raise
    except kinds as error:
        reason = shortened(" ".join(str(getattr(error, "strerror", None) or error).split()), 200)
        raise UserError(line.replace("{reason}", reason or type(error).__name__)) from None


def shortened(text: str, at_most: int = 60) -> str:
    """Return the first `at_most` characters of `text`, with an ellipsis where it is longer."""
    return text if len(text) <= at_most else text[: at_most - 1] + "…"


def shortened_repr(value: object) -> str:
    """Return the repr of a user's value, shortened for a one-line message."""
    return shortened(" ".join(repr(value).split()))


def refuse_options(given: Mapping[str, object], subjects: Mapping[str, Sequence[str]], *here: str) -> None:
    """Raise UserError for an option given where none of its `subjects`, the things it applies to, is in `here`."""
    for option, known in subjects.items():
        if given.get(option) and not set(known).intersection(here):
            raise UserError(f"--{option.replace('_', '-')} is for {'; '.join(known)}: leave it out")


def parse_words(text: str, where: str, known: Iterable[str], example: str) -> dict[str, str]:
    """Parse `key=value` words separated by blanks or commas. UserError for a malformed word, an unknown key or a
    repeated key."""
    found: dict[str, str] = {}
    for word in text.replace(",", " ").split():
        key, equals, value = word.partition("=")
        if not equals or not value:
            raise UserError(f"{where}: {shortened_repr(word)} is no word key=value: write for example {example}")
        if key not in known:
            raise UserError(f"{where}: unknown key {shortened_repr(key)}: {did_you_mean(key, known)}")
        if key in found:
            raise UserError(f"{where}: '{key}' is given twice")
        found[key] = value
    return found


def did_you_mean(name: str, known: Iterable[str], prefix: str = "") -> str:
    """Return the tail of an error message: the three known names nearest to `name`, or the first 12 when none is near.

    `prefix` is put before each name after the comparison: included in it, every key of a section would look near.
    """
    choices = sorted(set(known))
    begun = [choice for choice in choices if name and choice.lower().startswith(name.lower())]
    near = begun[:3] or difflib.get_close_matches(name, choices, n=3, cutoff=0.5)
    if near:
        return "did you mean " + " or ".join(prefix + choice for choice in near) + "?"
    shown = ", ".join(prefix + choice for choice in choices[:12])
    return f"known: {shown or 'none'}" + (f" and {len(choices) - 12} more" if len(choices) > 12 else "")
