"""A layout as another trainer's own options. Options and refusals are tables of (condition, text)."""


def given(*options: tuple[object, str]) -> list[str]:
    """Returns the options whose condition holds."""
    return [text for wanted, text in options if wanted]


def first_reason(*reasons: tuple[object, str]) -> str | None:
    """Returns the first reason whose condition holds, or None."""
    return next(iter(given(*reasons)), None)
