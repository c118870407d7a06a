"""How much slower than at its best a shared machine typically is, learned from every look at it.

A virtual machine shares its cores' execution units, caches and memory with neighbours that come and go within
seconds: matrix products of one minute can take 1.6 times those of the next. One measurement of 20 s catches too
few of those swings, so what each run saw is kept, one line per run, and a plan takes the middle of the last ones.

Neighbours cannot be seen; other programs on this machine can. What was looked at while they used the cores is left
out: it says how slow the machine was then, which the run's explanation tells, and nothing of the next run.
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterable, Mapping
from pathlib import Path

import numpy as np

from ironlaw.files import append_json_line, cache_folder, read_json_lines
from ironlaw.machine.profile import Profile

KINDS = ("compute", "memory")
OTHERS = "others"  # share of the cores that other programs used meanwhile
MOST_OTHERS = 0.10  # from here on kernels on all cores have to wait for them
RUNS_COUNTED = 12
FORGOTTEN_AFTER_SECONDS = 30 * 86400.0
# What a look right before a run counts beside what is typical: both are moments, and the later one is nearer. Over all
# moments of five first runs, 0.6 s so weighed left a mean error of 4.4%, what is typical alone 7.6%.
NOW_COUNTS = 2 / 3


def history_path() -> Path:
    return cache_folder() / "machine" / "interference.jsonl"


def remember(profile: Profile, looks: Iterable[Mapping[str, float]]) -> None:
    """Append what one run saw of the machine of this profile; nothing when other programs disturbed all of it."""
    seen = middle(undisturbed(looks))
    if seen is None:
        return
    about = {"machine": profile.machine, "kernels": len(profile.best_seconds), "anchor": anchors(profile)}
    append_json_line(history_path(), about | {"at": time.time()} | seen)


def undisturbed(looks: Iterable[Mapping[str, float]]) -> list[Mapping[str, float]]:
    """Those during which no other program used the cores. Where the system does not tell, all of them."""
    return [look for look in looks if (look.get(OTHERS) or 0.0) <= MOST_OTHERS]


def rounds(profile: Profile) -> list[dict[str, float]]:
    """The measurement's own rounds, as `remember` takes them."""
    columns = [profile.interference[kind] for kind in KINDS]
    others = profile.interference.get(OTHERS) or [0.0] * len(columns[0])
    return [dict(zip((*KINDS, OTHERS), values, strict=True)) for values in zip(*columns, others, strict=True)]


def disturbed(profile: Profile) -> float | None:
    """Share of the cores that other programs used while the machine was measured, where kernels had to wait for them;
    None where none did or the system does not tell. Best times of such a measurement may be no best times."""
    share = others(rounds(profile))
    return share if share is not None and share > MOST_OTHERS else None


def typical(profile: Profile, now: float | None = None) -> dict[str, float]:
    """Kind of kernel -> time over best that is typical here: the middle of this measurement and of the last runs."""
    own, anchor = middle(undisturbed(rounds(profile))), anchors(profile)
    seen = [own] if own is not None else []
    now = time.time() if now is None else now
    for entry in reversed(read_json_lines(history_path())):
        if len(seen) > RUNS_COUNTED:
            break
        try:
            same = (entry["machine"], entry["kernels"]) == (profile.machine, len(profile.best_seconds))
            if same and now - entry["at"] <= FORGOTTEN_AFTER_SECONDS:
                # Its ratios are to the best that was known then; today's may be better.
                seen.append({kind: entry[kind] * entry["anchor"][kind] / anchor[kind] for kind in KINDS})
        except (KeyError, TypeError, ValueError):  # torn, or of an earlier version
            continue
    return {kind: _median([s[kind] for s in seen]) if seen else 1.0 for kind in KINDS}


def _median(values: list[float]) -> float:
    """As `np.median` but without `numpy.ma`, which takes a twentieth of the time of a plan to import."""
    values = sorted(values)
    return (values[(len(values) - 1) // 2] + values[len(values) // 2]) / 2


def expected(profile: Profile, now: Mapping[str, float] | None = None) -> dict[str, float]:
    """As `typical`, for a run that begins at once; `now`: what `Probe.now` saw of the machine."""
    usual = typical(profile)
    return {k: v ** (1 - NOW_COUNTS) * now[k] ** NOW_COUNTS for k, v in usual.items()} if now else usual


def middle(looks: Iterable[Mapping[str, float]]) -> dict[str, float] | None:
    """Mean of the middle 80% per kind, as a run's typical step is; None of nothing."""
    known = list(looks)
    if not known:
        return None
    result = {}
    for kind in KINDS:
        values = np.sort([look[kind] for look in known])
        cut = len(values) // 10
        result[kind] = float(values[cut : len(values) - cut].mean())
    return result


def others(looks: Iterable[Mapping[str, float]]) -> float | None:
    """Mean share of the cores that other programs used; None where the system does not tell."""
    known = [look[OTHERS] for look in looks if look.get(OTHERS) is not None]
    return float(np.mean(known)) if known else None


def anchors(profile: Profile) -> dict[str, float]:
    """Kind of kernel -> geometric mean of its kernels' best seconds: what ratios are relative to."""
    logs: dict[str, list[float]] = {kind: [] for kind in KINDS}
    for name, seconds in profile.best_seconds.items():
        logs["compute" if name.startswith(("matmul", "attention", "native")) else "memory"].append(math.log(seconds))
    return {kind: math.exp(sum(values) / max(1, len(values))) for kind, values in logs.items()}
