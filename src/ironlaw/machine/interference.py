"""The typical slowdown of a shared machine relative to its best times, learned from every observation.

A virtual machine shares its cores' execution units, caches and memory with neighbours that come and go within
seconds: matrix products of one minute can take 1.6 times those of the next. One measurement of 20 s contains too few
of these swings. So each run's observations are stored, one line per run, and a plan takes the median of the last runs.

Neighbours are invisible, but other programs on this machine are not. Observations while these use the cores are left
out: they help to explain their own run, but do not predict the next one.
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterable, Mapping
from pathlib import Path
from statistics import fmean, median

from ironlaw.files import append_json_line, cache_folder, read_json_lines
from ironlaw.machine.profile import Profile

KINDS = ("compute", "memory")
OTHERS = "others"  # share of the cores that other programs used during an observation
MOST_OTHERS = 0.10  # above this share kernels on all cores wait for other programs
RUNS_COUNTED = 12
FORGOTTEN_AFTER_SECONDS = 30 * 86400.0
# Weight of an observation right before a run against the typical slowdown: the later one is more relevant. Over all
# moments of five first runs, 0.6 s with this weight left a mean error of 4.4%, the typical slowdown alone 7.6%.
NOW_COUNTS = 2 / 3


def history_path() -> Path:
    return cache_folder() / "machine" / "interference.jsonl"


def remember(profile: Profile, looks: Iterable[Mapping[str, float]]) -> None:
    """Append one run's observations of the profile's machine, unless other programs disturbed all of them."""
    seen = middle(undisturbed(looks))
    if seen is None:
        return
    about = {"machine": profile.machine, "kernels": len(profile.best_seconds), "anchor": anchors(profile)}
    append_json_line(history_path(), about | {"at": time.time()} | seen)


def undisturbed(looks: Iterable[Mapping[str, float]]) -> list[Mapping[str, float]]:
    """Return the observations without load from other programs, or all if the system does not report load."""
    return [look for look in looks if (look.get(OTHERS) or 0.0) <= MOST_OTHERS]


def rounds(profile: Profile) -> list[dict[str, float]]:
    """Return the measurement's own rounds as observations, the input of `remember`."""
    columns = [profile.interference[kind] for kind in KINDS]
    others = profile.interference.get(OTHERS) or [0.0] * len(columns[0])
    return [dict(zip((*KINDS, OTHERS), values, strict=True)) for values in zip(*columns, others, strict=True)]


def disturbed(profile: Profile) -> float | None:
    """Return the share of the cores used by other programs during the measurement if kernels had to wait for them, so
    that its best times may be too slow; None if they did not, or if the system does not report load."""
    share = others(rounds(profile))
    return share if share is not None and share > MOST_OTHERS else None


def typical(profile: Profile, now: float | None = None) -> dict[str, float]:
    """Return the typical time over best time by kind of kernel: the median of this measurement and the last runs."""
    own, anchor = middle(undisturbed(rounds(profile))), anchors(profile)
    seen = [own] if own is not None else []
    now = time.time() if now is None else now
    for entry in reversed(read_json_lines(history_path())):
        if len(seen) > RUNS_COUNTED:
            break
        try:
            same = (entry["machine"], entry["kernels"]) == (profile.machine, len(profile.best_seconds))
            if same and now - entry["at"] <= FORGOTTEN_AFTER_SECONDS:
                # The entry's ratios refer to the best times known then; the present ones may be better.
                seen.append({kind: entry[kind] * entry["anchor"][kind] / anchor[kind] for kind in KINDS})
        except (KeyError, TypeError, ValueError):  # cut off, or from an earlier version
            continue
    return {kind: median(s[kind] for s in seen) if seen else 1.0 for kind in KINDS}


def expected(profile: Profile, now: Mapping[str, float] | None = None) -> dict[str, float]:
    """Return the expected slowdown of a run that starts now: `typical` weighted with `now`, a result of `Probe.now`."""
    usual = typical(profile)
    return {k: v ** (1 - NOW_COUNTS) * now[k] ** NOW_COUNTS for k, v in usual.items()} if now else usual


def middle(looks: Iterable[Mapping[str, float]]) -> dict[str, float] | None:
    """Return the mean of the middle 80% by kind, like a run's typical step; None without observations."""
    known = list(looks)
    if not known:
        return None
    result = {}
    for kind in KINDS:
        values = sorted(look[kind] for look in known)
        cut = len(values) // 10
        result[kind] = fmean(values[cut : len(values) - cut])
    return result


def others(looks: Iterable[Mapping[str, float]]) -> float | None:
    """Return the mean share of the cores used by other programs; None if the system does not report it."""
    known = [look[OTHERS] for look in looks if look.get(OTHERS) is not None]
    return fmean(known) if known else None


def anchors(profile: Profile) -> dict[str, float]:
    """Return the reference of ratios: the geometric mean of the kernels' best seconds, by kind of kernel."""
    logs: dict[str, list[float]] = {kind: [] for kind in KINDS}
    for name, seconds in profile.best_seconds.items():
        logs["compute" if name.startswith(("matmul", "attention", "native")) else "memory"].append(math.log(seconds))
    return {kind: math.exp(sum(values) / max(1, len(values))) for kind, values in logs.items()}
