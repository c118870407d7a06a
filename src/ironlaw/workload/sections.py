"""Config sections that change the work of a step, without torch: recomputation (also a key of layouts), the objective,
and gradient communication.

Recompute(mode="every", every=2) == Recompute.parse("every:2")
str(Recompute(mode="budget", budget="60GiB"))               # "budget:60GiB"
"""

from __future__ import annotations

import re
from functools import lru_cache
from typing import Any, Literal, Self, get_args

from pydantic import Field, model_validator

from ironlaw.errors import UserError, reported
from ironlaw.schema import Section
from ironlaw.units import parse_bytes

Keepable = Literal["qkv", "attention", "attention_out", "ffn_gate", "ffn_up"]
KEEPABLE: tuple[Keepable, ...] = get_args(Keepable)  # in the order of execution
WORDS = ("none", "selective", "full", "every:K", "budget:SIZE")


class Recompute(Section):
    """Recomputation in the backward pass: less memory, more time, and bit-identical losses."""

    # full: every block keeps only its input. every: only every k-th block does. selective: by operation, see `keep`.
    # budget: the choice for each block that minimises the time of a step that fits in `budget`.
    mode: Literal["none", "full", "every", "selective", "budget"] = "none"
    every: int = Field(2, gt=0)  # k of mode = "every"
    keep: tuple[Keepable, ...] = KEEPABLE  # results of experts are never kept
    budget: str | None = None  # peak of all tensors in a step, such as "20GiB"

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        if self.mode == "budget" and self.budget is None:
            raise ValueError('recompute.mode = "budget" needs recompute.budget, such as "20GiB"')
        if self.budget is not None:
            with reported("recompute.budget: {reason}", ValueError):
                parse_bytes(self.budget)
        return self

    @classmethod
    def parse(cls, word: str) -> Recompute:
        """Parse none, selective, full, every:K (also every-K, everyK) or budget:SIZE; the default unit is GiB."""
        return _parsed(word.lower())

    def __str__(self) -> str:
        return {"every": f"every:{self.every}", "budget": f"budget:{self.budget}"}.get(self.mode, self.mode)

    @property
    def stride(self) -> int:
        """One in `stride` blocks is recomputed in full."""
        return self.every if self.mode == "every" else 1

    @property
    def budget_bytes(self) -> int:
        """The budget in bytes, for mode = "budget"."""
        assert self.budget is not None
        return parse_bytes(self.budget)

    def section(self) -> dict[str, Any]:
        """Return the section as in a config file."""
        return {"mode": self.mode} | self.model_dump(mode="json", exclude_unset=True, exclude_none=True)


NO_RECOMPUTATION = Recompute()
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
    """Recompute one in `blocks` blocks in full."""
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


FROZEN = "frozen model"  # operation for a teacher's or a reference's forward pass, in plans and runs


class ObjectiveConfig(Section):
    """The loss. Those that need a second model run in one process."""

    # cross_entropy of the next token; distillation from a larger model (arXiv 1503.02531); dpo on pairs of answers,
    # with the initial model as reference (arXiv 2305.18290): with adapters, the base without them.
    kind: Literal["cross_entropy", "distillation", "dpo"] = "cross_entropy"
    teacher: str | None = None  # distillation: a run or a Hugging Face directory with the same tokenizer
    temperature: float = Field(2.0, gt=0)  # divides both models' logits
    weight: float = Field(0.5, ge=0, le=1)  # weight of the teacher's targets; the text's targets have the rest
    hidden: float = Field(0.0, ge=0)  # weight of 1 - cosine of the last hidden states (arXiv 1910.01108)
    beta: float = Field(0.1, gt=0)  # dpo: strength of the penalty for deviating from the reference

    @property
    def needs_logits(self) -> bool:
        """Whether all logits of a micro-batch must exist at once."""
        return self.kind != "cross_entropy"


class CommunicationConfig(Section):
    """Reduced communication among replicas over slow links (train/parallel/gradient_compression.py, diloco.py)."""

    # Format of communicated gradients. bf16 halves the bytes and also rounds sums; powersgd (arXiv 1905.13727) sends
    # two thin matrices for each matrix that this makes at least twofold smaller, and adds the error to the next step.
    gradients: Literal["fp32", "bf16", "powersgd"] = "fp32"
    rank: int = Field(4, gt=0)  # columns of powersgd's matrices
    start_step: int = Field(100, ge=2)  # first step with powersgd: early gradients have no low rank
    # Steps between averages of the weights (DiLoCo, arXiv 2311.08105: 500); 0: gradients are averaged every step.
    local_steps: int = Field(0, ge=0)
    sites: int | None = Field(None, gt=1)  # groups of neighbouring ranks with local steps; default: single replicas
    outer_lr: float = Field(0.7, gt=0)  # of the outer optimizer, Nesterov SGD from the old average to the new one
    outer_momentum: float = Field(0.9, ge=0, lt=1)  # of the outer optimizer
