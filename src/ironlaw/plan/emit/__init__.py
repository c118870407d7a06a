"""A layout as another trainer's own options. Options and refusals are tables: what is said under which condition."""


def given(*options: tuple[object, str]) -> list[str]:
    """The options whose condition holds."""
    return [text for wanted, text in options if wanted]


def first_reason(*reasons: tuple[object, str]) -> str | None:
    """The first reason whose condition holds, or None."""
    return next(iter(given(*reasons)), None)
