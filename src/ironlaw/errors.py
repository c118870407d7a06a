"""The one error type that reaches a user, and what makes a user's own words fit to show."""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable, Mapping, Sequence

LARGEST = 2**53
"""Of whole numbers: beyond it neighbours are one number in floating point."""

LONGEST = 4096  # characters, as the longest path


class UserError(ValueError):
    """Wrong input. The message is one line: what is wrong, and what to write instead. Exit code 2."""


class InvalidConfig(UserError):
    """A `config.json` of a known architecture with values that none has: building it all the same would be a guess."""


class JobFailed(Exception):
    """What was started here has failed, and has said why itself. Exit code 1."""


# Terminals obey control characters, and characters of direction make a text read as another.
_OBEYED = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u200e\u200f\u2028-\u202e\u2066-\u2069\ud800-\udfff]")


def printable(text: str) -> str:
    """`text` for a terminal: what a terminal would obey is spelt out. Lines and tabs stay."""
    return _OBEYED.sub(lambda found: ascii(found[0])[1:-1], text)


def shortened(text: str, at_most: int = 60) -> str:
    """The beginning of a text for a message of one line."""
    return text if len(text) <= at_most else text[: at_most - 1] + "…"


def as_given(value: object) -> str:
    """What somebody gave, for a message of one line."""
    return shortened(" ".join(repr(value).split()))


def refuse_options(given: Mapping[str, object], subjects: Mapping[str, Sequence[str]], *here: str) -> None:
    """UserError for an option that is given where none of its subjects is. `subjects`: of an option, what it is for."""
    for option, known in subjects.items():
        if given.get(option) and not set(known).intersection(here):
            raise UserError(f"--{option.replace('_', '-')} is for {'; '.join(known)}: leave it out")


def words_of(text: str, where: str, known: Iterable[str], example: str) -> dict[str, str]:
    """Words `key=value` of a text, with blanks or commas between them. UserError for one that is none, whose key is not
    known, or that comes twice."""
    found: dict[str, str] = {}
    for word in text.replace(",", " ").split():
        key, equals, value = word.partition("=")
        if not equals or not value:
            raise UserError(f"{where}: {as_given(word)} is no word key=value: write for example {example}")
        if key not in known:
            raise UserError(f"{where}: unknown key {as_given(key)}: {did_you_mean(key, known)}")
        if key in found:
            raise UserError(f"{where}: '{key}' is given twice")
        found[key] = value
    return found


def did_you_mean(name: str, known: Iterable[str], limit: int = 3, prefix: str = "") -> str:
    """The tail of an error message: the nearest known names, or all of them when nothing is near.

    `prefix` is put before each: compared with it, every key of a section would look near.
    """
    choices = sorted(set(known))
    begun = [choice for choice in choices if name and choice.lower().startswith(name.lower())]
    near = begun[:limit] or difflib.get_close_matches(name, choices, n=limit, cutoff=0.5)
    if near:
        return "did you mean " + " or ".join(prefix + choice for choice in near) + "?"
    shown = ", ".join(prefix + choice for choice in choices[:12])
    return f"known: {shown or 'none'}" + (f" and {len(choices) - 12} more" if len(choices) > 12 else "")
