"""Which entry of the catalogue a device is, by the name that its driver gives it."""

from __future__ import annotations

from ironlaw.catalog import accelerator_names
from ironlaw.errors import UserError


def catalogued(name: str) -> str:
    """The catalogue's name of a device as its driver calls it: "NVIDIA H100 80GB HBM3" holds "h100"."""
    words = set(name.lower().replace("-", " ").split())
    words |= set() if words & {"pcie", "nvl"} else {"sxm"}
    known = [entry for entry in accelerator_names() if entry.split("-")[0] in words]
    if not known:
        raise UserError(f"the catalogue has no {name}, so there is nothing to plan with")
    return max(known, key=lambda entry: len(words & set(entry.split("-"))))
