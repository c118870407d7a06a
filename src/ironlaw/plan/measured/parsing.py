"""Parse a table of measured runs as people write it: its rows and the words of their cells.

Empty, `nan`, `none`, `null`, `n/a` and `-` all mean unknown. An unknown word raises a UserError, which rejects its row
and no other.
"""

from __future__ import annotations

import csv
import io
import math
import re
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypeVar

from ironlaw import units
from ironlaw.errors import UserError
from ironlaw.files import read_bytes

Number = TypeVar("Number", int, float)
Row = Mapping[str, str]

UNKNOWN = {"", "nan", "null", "n/a", "na", "-", "?", "unknown"}
MAX_VALUES = {"layers": 10_000, "pp": 4_096, "virtual_stages": 1_000, "seq": 1_000_000_000}
MAX_WHOLE = 10_000_000
"""Largest accepted whole numbers. Larger ones are typing errors, and would keep the planner busy for hours."""

LEAST_BYTES = 1e6
"""Least accepted memory: a smaller number is one of gigabytes."""

TRUE = {"true", "1", "1.0", "yes", "y", "on", "t"}
FALSE = {"false", "0", "0.0", "no", "n", "off", "f", "none"}
_WITHOUT = re.compile(r"(?:no|not|without|w/o)\b[\s\w-]+")

RAN = re.compile(r"ok|succe|complet|ran|done|pass|finish")
CHECKS = {"time", "memory", "feasibility"}

PRECISIONS = {
    "nvfp4": "nvfp4", "(?<!mx)fp4": "nvfp4", "mxfp8": "mxfp8", "fp8": "fp8", "float8": "fp8", "e4m3": "fp8",
    "bf16": "bf16", "bfloat16": "bf16", "fp16": "fp16", "float16": "fp16", "half": "fp16",
    "tf32": "tf32", "fp32": "fp32", "float32": "fp32", "amp": "fp16", "mixed": "bf16",
}  # fmt: skip
"""Patterns of a word and the formats they mean; the first that is found counts."""

EXCESS = "more cells than columns"
"""Key of the cells of a row beyond the last column, where they are not empty."""


_NUMBER = re.compile(r"\s*[-+]?[\d.,]+(e[-+]?\d+)?\s*", re.IGNORECASE)


def read_table(path: Path) -> tuple[list[str], Iterator[dict[str, str]]]:
    """Returns the columns, in lower case, and the rows as column -> text. Raises UserError if the file is no table or
    has two columns of one name.

    Spreadsheets separate cells by semicolons where a comma separates decimals: there commas of numbers become points.
    """
    if not path.is_file():
        raise UserError(f"{path} is not a file: give a CSV of measured runs")
    content = read_bytes(path, "table of runs")
    if b"\0" in content[:4096]:
        raise UserError(f"{path} is not a CSV file: it holds binary data")
    stream = io.StringIO(content.decode("utf-8-sig", errors="replace"), newline="")
    first = stream.readline()
    stream.seek(0)
    separator = max(",;\t", key=first.count)
    # A cell may be as long as the file. The limit applies to the whole process, so it is only ever raised.
    csv.field_size_limit(max(csv.field_size_limit(), len(content) + 1))
    reader = csv.DictReader(stream, delimiter=separator, restkey=EXCESS)
    reader.fieldnames = names = [(name or "").strip().lower() for name in reader.fieldnames or []]
    twice = [name for name, times in Counter(names).items() if name and times > 1]
    if twice:
        raise UserError(f"{path} has {names.count(twice[0])} columns '{twice[0]}': keep one")
    rows = ({k: v if k != EXCESS else " ".join(v).strip() for k, v in row.items() if k and v} for row in reader)
    if separator == ";":
        rows = ({k: v.replace(",", ".") if _NUMBER.fullmatch(v) else v for k, v in row.items()} for row in rows)
    return names, rows


@dataclass
class Cells:
    """The cells of one row, and notes of the values assumed for empty ones."""

    row: Row
    assumed: list[str] = field(default_factory=list)

    def text(self, name: str) -> str:
        """Returns the cell without surrounding blanks; empty if it means unknown."""
        value = (self.row.get(name) or "").strip()
        return "" if value.lower() in UNKNOWN else value

    def lower(self, name: str) -> str:
        return self.text(name).lower()

    def needed_text(self, name: str) -> str:
        """Returns the cell's text. Raises UserError if it is unknown."""
        if not self.text(name):
            raise UserError(f"{name} is not given")
        return self.text(name)

    def number(self, name: str, least: float = -math.inf) -> float | None:
        """Returns a number, or None if the cell is empty."""
        cell = self.text(name)
        if not cell or cell.lower() == "none":
            return None
        try:
            value = units.parse_number(cell)
        except ValueError:
            advice = ": write a point before decimals, and a comma only between thousands" * ("," in cell)
            raise UserError(f"{name} is not a number: '{cell}'{advice}") from None
        if not math.isfinite(value) or value < least:
            raise UserError(f"{name} must be finite and at least {least:g}, not {cell}")
        return value

    def measured(self, name: str) -> float | None:
        """Returns a measurement, or None if there is none; zero counts as none."""
        return self.number(name, 0) or None

    def measured_bytes(self, name: str) -> float | None:
        """Returns a measurement of memory, in bytes or with a unit such as GiB, or None if there is none."""
        cell = self.text(name)
        try:
            value: float | None = units.parse_bytes(cell)
        except ValueError:
            value = self.measured(name)
        if value and value < LEAST_BYTES:
            raise UserError(f"{name} is in bytes, and {cell} are too few: write a unit, as in {cell}GiB")
        return value or None

    def whole(self, name: str, least: int = 1) -> int | None:
        """Returns a whole number, which may be written as 8.0, or None if the cell is empty."""
        value = self.number(name, least)
        if value is not None and value != round(value):
            raise UserError(f"{name} must be a whole number, not {value:g}")
        if value is not None and value > MAX_VALUES.get(name, MAX_WHOLE):
            raise UserError(f"{name} {value:g} is taken for a mistake: more than {MAX_VALUES.get(name, MAX_WHOLE):,}")
        return None if value is None else int(value)

    def needed(self, name: str) -> int:
        value = self.whole(name)
        if value is None:
            raise UserError(f"{name} is not given")
        return value

    def given(self, name: str, default: int, why: str = "assumed") -> int:
        value = self.whole(name)
        return self.assume(name, default, why) if value is None else value

    def assume(self, name: str, value: Number, why: str) -> Number:
        self.assumed.append(f"{name} = {value:g} ({why})")
        return value

    def flag(self, name: str) -> bool | None:
        cell = self.lower(name)
        if not cell:
            return None
        if cell in TRUE or cell in FALSE:
            return cell in TRUE
        raise UserError(f"{name} is true or false, not '{cell}'")

    def group(self) -> str:
        return self.text("group") or "(no group)"

    def zero_stage(self) -> int | None:
        """Returns the ZeRO stage, 0 to 3, or None; `fsdp`, `full_shard`, `hsdp` and `zero-3` are 3."""
        cell = re.sub(r"[\s\-_]+", " ", self.lower("zero"))
        if cell in FALSE | {"ddp", "no shard"} or _WITHOUT.fullmatch(cell):
            return 0
        if "shard grad op" in cell or "hybrid shard zero2" in cell:
            return 2
        if any(word in cell for word in ("fsdp", "hsdp", "full shard", "hybrid shard")):
            return 3
        digits = re.fullmatch(r"(?:zero)? ?(?:stage)? ?([0-3])(?:\.0)?", cell)
        if cell and not digits:
            raise UserError(f"zero is 0, 1, 2 or 3, not '{cell}'")
        return int(digits[1]) if digits else None

    def is_hybrid(self) -> bool:
        """Returns whether the state is sharded within each node and repeated in the others."""
        return any(word in self.lower("zero") for word in ("hsdp", "hybrid"))

    def recompute(self) -> str | None:
        """Returns none, selective, full or every:K, or None if the cell is empty."""
        cell = self.lower("recompute")
        if not cell:
            return None
        if stride := re.search(r"every\D{0,3}(\d+)", cell):
            return f"every:{stride[1]}"
        if cell in FALSE or _WITHOUT.fullmatch(cell):
            return "none"
        if re.search(r"selective|partial|\bsac\b|\bop\b", cell):
            return "selective"
        if cell in TRUE or any(word in cell for word in ("full", "block", "layer", "uniform", "checkpoint")):
            return "full"
        raise UserError(f"recompute is none, selective or full, not '{cell}'")

    def attention(self) -> str | None:
        """Returns flash or standard, or None; any fused kernel counts as flash. For an empty cell, a source older than
        FlashAttention (2205.14135) means standard."""
        cell = self.lower("attention")
        if cell in ("", "none"):
            paper = re.search(r"arxiv\D{0,6}(\d{4}\.\d{4,5})", self.lower("source"))
            return "standard" if paper and paper[1] < "2205.14135" else None
        words = r"standard|eager|math|naive|unfused|materiali|vanilla|non[\s-]"
        return "standard" if cell in FALSE or _WITHOUT.fullmatch(cell) or re.search(words, cell) else "flash"

    def precision(self) -> str | None:
        """Returns the number format of the matmuls, or None: bf16, fp16, fp8, mxfp8, nvfp4, tf32, fp32."""
        cell = re.sub(r"[-_ ]", "", self.lower("precision"))
        if not cell:
            return None
        for word, meaning in PRECISIONS.items():
            if re.search(word, cell) and not _WITHOUT.fullmatch(self.lower("precision")):
                return meaning
        raise UserError(f"precision '{cell}' is not known: bf16, fp16, fp8, mxfp8, nvfp4, tf32 or fp32")

    def ran(self) -> bool:
        """Returns whether the run succeeded; an empty status means that it did."""
        cell = self.lower("status")
        return not cell or cell in TRUE or bool(RAN.match(cell))

    def checks(self) -> str:
        """Returns what the row's measurements are good for: words of `CHECKS`."""
        cell = self.lower("checks") or "memory+time"
        if unknown := set(re.findall(r"\w+", cell)) - CHECKS:
            raise UserError(f"checks is time, memory, memory+time or feasibility, not '{min(unknown)}'")
        return cell
