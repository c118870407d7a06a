"""The one error type that reaches a user."""

from __future__ import annotations

import difflib
from collections.abc import Iterable


class UserError(ValueError):
    """Wrong input. The message is one line: what is wrong, and what to write instead. Exit code 2."""


def did_you_mean(name: str, known: Iterable[str], limit: int = 3, prefix: str = "") -> str:
    """The tail of an error message: the nearest known names, or all of them when nothing is near.

    `prefix` is put before each: compared with it, every key of a section would look near.
    """
    choices = sorted(set(known))
    near = difflib.get_close_matches(name, choices, n=limit, cutoff=0.5)
    if near:
        return "did you mean " + " or ".join(prefix + choice for choice in near) + "?"
    shown = ", ".join(prefix + choice for choice in choices[:12])
    return f"known: {shown}" + (f" and {len(choices) - 12} more" if len(choices) > 12 else "")
