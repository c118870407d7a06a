"""How much slower than at its best a shared machine typically is, learned from every look at it.

A virtual machine shares its cores' execution units, caches and memory with neighbours that come and go within
seconds: matrix products of one minute can take 1.6 times those of the next. One measurement of 20 s catches too
few of those swings, so what each measurement and each run saw is kept, and a plan uses them all.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Sequence
from pathlib import Path

import numpy as np

from ironlaw.machine.host import cache_folder
from ironlaw.machine.profile import Profile

KINDS = ("compute", "memory")
ENTRIES_KEPT = 400


def history_path() -> Path:
    return cache_folder() / "machine" / "interference.jsonl"


def remember(profile: Profile, ratios: Iterable[dict[str, float]]) -> None:
    """Append what a measurement or a run saw of the machine of this profile."""
    path = history_path()
    path.parent.mkdir(parents=True, exist_ok=True)
    about = {"machine": profile.machine, "kernels": len(profile.best_seconds), "anchor": anchors(profile)}
    with path.open("a", encoding="utf-8") as file:
        for ratio in ratios:
            file.write(json.dumps(about | ratio) + "\n")


def rounds(profile: Profile) -> list[dict[str, float]]:
    """The measurement's own rounds, as `remember` takes them."""
    columns = [profile.interference[kind] for kind in KINDS]
    return [dict(zip(KINDS, values, strict=True)) for values in zip(*columns, strict=True)]


def typical(profile: Profile) -> dict[str, float]:
    """Kind of kernel -> time over best that is typical here: all that was seen lately, this profile included."""
    seen, now = rounds(profile), anchors(profile)
    try:
        for text in history_path().read_text(encoding="utf-8").splitlines()[-ENTRIES_KEPT:]:
            entry = json.loads(text)
            if (entry["machine"], entry["kernels"]) == (profile.machine, len(profile.best_seconds)):
                # Its ratios are to the best that was known then; today's may be better.
                seen.append({kind: entry[kind] * entry["anchor"][kind] / now[kind] for kind in KINDS})
    except (OSError, KeyError, json.JSONDecodeError):
        pass
    return middle(seen) or dict.fromkeys(KINDS, 1.0)


def middle(ratios: Sequence[dict[str, float]]) -> dict[str, float] | None:
    """Mean of the middle 80% per kind, as a run's typical step is; None of nothing."""
    if not ratios:
        return None
    result = {}
    for kind in KINDS:
        values = np.sort([ratio[kind] for ratio in ratios])
        cut = len(values) // 10
        result[kind] = float(values[cut : len(values) - cut].mean())
    return result


def anchors(profile: Profile) -> dict[str, float]:
    """Kind of kernel -> geometric mean of its kernels' best seconds: what ratios are relative to."""
    logs: dict[str, list[float]] = {kind: [] for kind in KINDS}
    for name, seconds in profile.best_seconds.items():
        logs["compute" if name.startswith(("matmul", "attention")) else "memory"].append(math.log(seconds))
    return {kind: math.exp(sum(values) / max(1, len(values))) for kind, values in logs.items()}
