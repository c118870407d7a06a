"""What a CPU draws, as a wide interval per physical core.

Without a power meter the best one can say about "this CPU" is between which bounds processors of its
family lie. The bounds are TDP divided by cores over the models of the family as the vendor lists them;
a virtual machine sees some of the cores, so watts per core is the unit that carries over.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from functools import cache

from ironlaw.catalog.figures import read_toml


@dataclass(frozen=True, slots=True)
class PowerRange:
    """Thermal design power per physical core over a family of processors."""

    low: float  # watts per physical core: the family's lowest and highest TDP/cores
    high: float
    family: str  # what matched, as one writes it
    models: int  # how many listed models the range was taken over
    source: str  # key of `sources.toml`
    note: str = ""  # how the range was taken


def cpu_power(model_name: str) -> PowerRange | None:
    """The range for a CPU model name as the operating system prints it; `None` when it is not listed."""
    text = re.sub(r"\((?:r|tm|c)\)|[®™]", " ", model_name, flags=re.IGNORECASE)
    text = re.sub(r"\s+", " ", text).strip()
    return next((power for pattern, power in _families() if pattern.search(text)), None)


@cache
def _families() -> tuple[tuple[re.Pattern[str], PowerRange], ...]:
    listed = [dict(entry) for entry in read_toml("cpus.toml")["family"]]
    return tuple(
        (
            re.compile(entry.pop("match"), re.IGNORECASE),
            PowerRange(low=entry.pop("low_watts_per_core"), high=entry.pop("high_watts_per_core"), **entry),
        )
        for entry in listed
    )
