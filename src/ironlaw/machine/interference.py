"""The typical slowdown of a shared machine relative to its best times, learned from every observation.

A virtual machine shares its cores' execution units, caches and memory with neighbours that come and go within
seconds: matrix products of one minute can take 1.6 times those of the next. One measurement of 20 s contains too few
of these swings. So each run's observations are stored, one line per run, and a plan takes the median of the last runs.

Neighbours are invisible, but other programs on this machine are not. Observations while these use the cores are left
out: they help to explain their own run, but do not predict the next one.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping
from pathlib import Path
from statistics import fmean, median

from ironlaw.files import append_json_line, cache_folder, read_json_lines
from ironlaw.ledger import Kind
from ironlaw.machine.profile import Profile

KINDS = ("compute", "memory")
OTHER_LOAD = "others"  # share of the cores that other programs used during an observation
MAX_OTHER_LOAD = 0.10  # above this share kernels on all cores wait for other programs
RUNS_COUNTED = 12
FORGOTTEN_AFTER_SECONDS = 30 * 86400.0
# Weight of an observation right before a run against the typical slowdown: the later one is more relevant. Over all
# moments of five first runs, 0.6 s with this weight left a mean error of 4.4%, the typical slowdown alone 7.6%.
PROBE_WEIGHT = 2 / 3


def history_path() -> Path:
    return cache_folder() / "machine" / "interference.jsonl"


def append_observations(profile: Profile, observations: Iterable[Mapping[str, float]]) -> None:
    """Append one run's observations of the profile's machine, unless other programs disturbed all of them."""
    mean = trimmed_mean(undisturbed(observations))
    if mean is None:
        return
    identity = {"machine": profile.machine, "kernels": len(profile.best_seconds), "probe": profile.probe}
    append_json_line(history_path(), identity | {"at": time.time()} | mean)


def undisturbed(observations: Iterable[Mapping[str, float]]) -> list[Mapping[str, float]]:
    """Return the observations without load from other programs, or all if the system does not report load."""
    return [observation for observation in observations if (observation.get(OTHER_LOAD) or 0.0) <= MAX_OTHER_LOAD]


def rounds(profile: Profile) -> list[dict[str, float]]:
    """Return the measurement's own rounds as observations, the input of `append_observations`."""
    columns = [profile.interference[kind] for kind in KINDS]
    other_load = profile.interference.get(OTHER_LOAD) or [0.0] * len(columns[0])
    return [dict(zip((*KINDS, OTHER_LOAD), values, strict=True)) for values in zip(*columns, other_load, strict=True)]


def disturbed(profile: Profile) -> float | None:
    """Return the share of the cores used by other programs during the measurement if kernels had to wait for them, so
    that its best times may be too slow; None if they did not, or if the system does not report load."""
    share = other_load(rounds(profile))
    return share if share is not None and share > MAX_OTHER_LOAD else None


def typical(profile: Profile, now: float | None = None) -> dict[str, float]:
    """Return the typical time over best time by kind of kernel: the median of this measurement and the last runs."""
    own = trimmed_mean(undisturbed(rounds(profile)))
    slowdowns = [own] if own is not None else []
    now = time.time() if now is None else now
    for entry in reversed(read_json_lines(history_path())):
        if len(slowdowns) > RUNS_COUNTED:
            break
        try:
            same = (entry["machine"], entry["kernels"]) == (profile.machine, len(profile.best_seconds))
            if same and now - entry["at"] <= FORGOTTEN_AFTER_SECONDS:
                # The entry's ratios refer to the best times known then; the present ones may be better.
                slowdowns.append({kind: entry[kind] * entry["probe"][kind] / profile.probe[kind] for kind in KINDS})
        except (KeyError, TypeError, ValueError):  # cut off, or from an earlier version
            continue
    return {kind: median(s[kind] for s in slowdowns) if slowdowns else 1.0 for kind in KINDS}


def expected(profile: Profile, now: Mapping[str, float] | None = None) -> dict[str, float]:
    """Return the expected slowdown of a run that starts now: `typical` weighted with `now`, from `Probe.slowdown`."""
    usual = typical(profile)
    return {k: v ** (1 - PROBE_WEIGHT) * now[k] ** PROBE_WEIGHT for k, v in usual.items()} if now else usual


def slowed(seconds: Mapping[Kind, float], slowdown: Mapping[str, float], planned: Mapping[str, float]) -> float:
    """Return the sum of seconds by kind, planned with the slowdowns `planned`, with those of `slowdown` instead."""
    factors = {kind: slowdown[kind] / planned[kind] for kind in KINDS}
    return sum(
        s * factors["compute" if kind in (Kind.MATMUL, Kind.ATTENTION) else "memory"] for kind, s in seconds.items()
    )


def trimmed_mean(observations: Iterable[Mapping[str, float]]) -> dict[str, float] | None:
    """Return the mean of the middle 80% by kind, like a run's typical step; None without observations."""
    rows = list(observations)
    if not rows:
        return None
    result = {}
    for kind in KINDS:
        values = sorted(observation[kind] for observation in rows)
        cut = len(values) // 10
        result[kind] = fmean(values[cut : len(values) - cut])
    return result


def other_load(observations: Iterable[Mapping[str, float]]) -> float | None:
    """Return the mean share of the cores used by other programs; None if the system does not report it."""
    shares = [observation[OTHER_LOAD] for observation in observations if observation.get(OTHER_LOAD) is not None]
    return fmean(shares) if shares else None
