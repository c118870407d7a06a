"""What the forward pass does not keep for the backward pass: a section of a config, a word of a layout.

Recompute(mode="every", every=2) == Recompute.parse("every:2")
str(Recompute(mode="budget", budget="60GiB"))               # "budget:60GiB"
"""

from __future__ import annotations

import re
from functools import lru_cache
from typing import Any, Literal, Self, get_args

from pydantic import Field, model_validator

from ironlaw.errors import UserError
from ironlaw.schema import Section
from ironlaw.units import parse_bytes

Keepable = Literal["qkv", "attention", "attention_out", "ffn_gate", "ffn_up"]
KEEPABLE: tuple[Keepable, ...] = get_args(Keepable)  # in the order of execution
WORDS = ("none", "selective", "full", "every:K", "budget:SIZE")


class Recompute(Section):
    """What the forward pass does not keep for the backward pass. Memory for time; the loss changes by no bit."""

    # full: every block keeps only its input. every: only every k-th block does. selective: by operation, see `keep`.
    # budget: for each block the choice with which the whole step fits in `budget` and takes least time.
    mode: Literal["none", "full", "every", "selective", "budget"] = "none"
    every: int = Field(2, gt=0)  # k of mode = "every"
    keep: tuple[Keepable, ...] = KEEPABLE  # what experts compute is never kept
    budget: str | None = None  # of all tensors at the highest moment of a step, such as "20GiB"

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        if self.mode == "budget" and self.budget is None:
            raise ValueError('recompute.mode = "budget" needs recompute.budget, such as "20GiB"')
        if self.budget is not None:
            parse_bytes(self.budget)
        return self

    @classmethod
    def parse(cls, word: str) -> Recompute:
        """none, selective, full, every:K (also every-K, everyK) or budget:SIZE, in GiB where no unit is said."""
        return _parsed(word.lower())

    def __str__(self) -> str:
        return {"every": f"every:{self.every}", "budget": f"budget:{self.budget}"}.get(self.mode, self.mode)

    @property
    def stride(self) -> int:
        """Of how many blocks one is recomputed, where it is in full."""
        return self.every if self.mode == "every" else 1

    @property
    def budget_bytes(self) -> int:
        """Of mode = "budget"."""
        assert self.budget is not None
        return parse_bytes(self.budget)

    def section(self) -> dict[str, Any]:
        """As a config file says it."""
        return {"mode": self.mode} | self.model_dump(mode="json", exclude_unset=True, exclude_none=True)


KEPT = Recompute()
"""Nothing is recomputed."""


@lru_cache(maxsize=4096)
def _parsed(word: str) -> Recompute:
    if word in ("none", "selective", "full"):
        return Recompute.model_validate({"mode": word})
    if match := re.fullmatch(r"every[:\-]?(\d+)", word):
        return every(int(match[1]))
    if word.startswith("budget:"):
        return _budget(word.removeprefix("budget:"))
    raise UserError(f"layout: recompute is {', '.join(WORDS)}, not '{word}'")


def every(blocks: int) -> Recompute:
    """One block in so many is recomputed in full."""
    if not 1 <= blocks <= 2**20:
        raise UserError(f"layout: recompute=every:K counts blocks: K is at least 1 and at most {2**20:,}")
    return Recompute(mode="full") if blocks == 1 else Recompute(mode="every", every=blocks)


def _budget(text: str) -> Recompute:
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*(gib|gb|mib|mb)?", text)
    size = match[1] + (match[2] or "gib").upper().replace("I", "i") if match else ""
    try:
        if parse_bytes(size):
            return Recompute(mode="budget", budget=size)
    except ValueError:
        pass
    raise UserError(f"layout: recompute=budget:{text} is not a size: write for example recompute=budget:60GiB")
