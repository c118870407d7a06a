"""The words of a row of measured runs as people write them: numbers, flags, precisions, recomputation, networks.

Empty, `nan`, `none`, `null`, `n/a` and `-` all mean unknown. A word that has no meaning here is a UserError, which
rejects its row and no other.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping

from ironlaw.errors import UserError

Row = Mapping[str, str]

UNKNOWN = {"", "nan", "null", "n/a", "na", "-", "?", "unknown"}
MOST = {"layers": 10_000, "pp": 4_096, "virtual_stages": 1_000, "seq": 1_000_000_000}
MOST_OF_ANY = 10_000_000
"""Whole numbers above these are a slip of the keyboard, and would keep the planner busy for hours."""

TRUE = {"true", "1", "1.0", "yes", "y", "on", "t"}
FALSE = {"false", "0", "0.0", "no", "n", "off", "f", "none"}


def text(row: Row, name: str) -> str:
    """The cell without surrounding blanks; empty when it says nothing."""
    value = row.get(name) or ""
    value = value.strip()
    return "" if value.lower() in UNKNOWN else value


def needed(row: Row, name: str) -> str:
    """The cell's text. UserError where it says nothing."""
    if not text(row, name):
        raise UserError(f"{name} is not given")
    return text(row, name)


def number(row: Row, name: str, least: float = -math.inf) -> float | None:
    """A number, or None where the cell is empty."""
    cell = text(row, name)
    if not cell or (cell.lower() == "none"):
        return None
    try:
        value = float(cell.replace(",", "").replace("_", ""))
    except ValueError:
        raise UserError(f"{name} is not a number: '{cell}'") from None
    if not math.isfinite(value) or value < least:
        raise UserError(f"{name} must be finite and at least {least:g}, not {cell}")
    return value


def whole(row: Row, name: str, least: int = 1) -> int | None:
    """A whole number, also where it is written as 8.0."""
    value = number(row, name, least)
    if value is not None and value != round(value):
        raise UserError(f"{name} must be a whole number, not {value:g}")
    if value is not None and value > MOST.get(name, MOST_OF_ANY):
        raise UserError(f"{name} {value:g} is taken for a mistake: more than {MOST.get(name, MOST_OF_ANY):,}")
    return None if value is None else int(value)


def flag(row: Row, name: str) -> bool | None:
    cell = text(row, name).lower()
    if not cell:
        return None
    if cell in TRUE or cell in FALSE:
        return cell in TRUE
    raise UserError(f"{name} is true or false, not '{cell}'")


def zero_stage(row: Row) -> int | None:
    """0 to 3; `fsdp`, `full_shard` and `zero-3` are 3."""
    cell = text(row, "zero").lower()
    if any(word in cell for word in ("fsdp", "full_shard", "full shard")):
        return 3
    if cell in FALSE:
        return 0
    digits = re.fullmatch(r"(?:zero|stage)?[\s\-_]*([0-3])(?:\.0)?", cell)
    if cell and not digits:
        raise UserError(f"zero is 0, 1, 2 or 3, not '{cell}'")
    return int(digits[1]) if digits else None


def recompute(row: Row) -> str | None:
    """none, selective or full."""
    cell = text(row, "recompute").lower()
    if not cell:
        return None
    if cell in FALSE:
        return "none"
    if any(word in cell for word in ("selective", "partial", "sac", "op")):
        return "selective"
    if cell in TRUE or any(word in cell for word in ("full", "block", "layer", "uniform", "checkpoint")):
        return "full"
    raise UserError(f"recompute is none, selective or full, not '{cell}'")


def attention(row: Row) -> str | None:
    """flash or standard; any fused kernel counts as flash. A paper older than FlashAttention (2205.14135) had none."""
    cell = text(row, "attention").lower()
    if not cell:
        paper = re.search(r"arxiv\D{0,6}(\d{4}\.\d{4,5})", text(row, "source").lower())
        return "standard" if paper and paper[1] < "2205.14135" else None
    words = ("standard", "eager", "math", "naive", "unfused", "materiali", "vanilla")
    return "standard" if any(word in cell for word in words) else "flash"


def precision(row: Row) -> str | None:
    """Format of the matmuls: bf16, fp16, fp8, mxfp8, nvfp4, tf32, fp32."""
    cell = text(row, "precision").lower().replace("-", "").replace("_", "").replace(" ", "")
    if not cell:
        return None
    for word, meaning in (
        ("nvfp4", "nvfp4"), ("fp4", "nvfp4"), ("mxfp8", "mxfp8"), ("fp8", "fp8"), ("float8", "fp8"), ("e4m3", "fp8"),
        ("bf16", "bf16"), ("bfloat16", "bf16"), ("fp16", "fp16"), ("float16", "fp16"), ("half", "fp16"),
        ("tf32", "tf32"), ("fp32", "fp32"), ("float32", "fp32"), ("amp", "fp16"), ("mixed", "bf16"),
    ):  # fmt: skip
        if word in cell:
            return meaning
    raise UserError(f"precision '{cell}' is not known: bf16, fp16, fp8, mxfp8, nvfp4, tf32 or fp32")
