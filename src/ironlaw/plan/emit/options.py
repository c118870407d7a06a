"""Options and refusals as tables: what is said under which condition."""

from __future__ import annotations


def given(*options: tuple[object, str]) -> list[str]:
    """The options whose condition holds."""
    return [text for wanted, text in options if wanted]


def first_reason(*reasons: tuple[object, str]) -> str | None:
    """The first reason whose condition holds, or None."""
    return next(iter(given(*reasons)), None)
