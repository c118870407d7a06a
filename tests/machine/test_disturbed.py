"""A measurement beside other programs: it does not replace a better one, and what is planned from it says so."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from ironlaw.cli.measure import kept
from ironlaw.config import RunConfig
from ironlaw.machine.profile import Profile, load_profile
from ironlaw.plan.step import plan_run


def busy(profile: Profile, share: float = 0.5) -> Profile:
    rounds = len(profile.interference["compute"])
    return replace(
        profile, created="2026-03-01T00:00:00", interference=profile.interference | {"others": [share] * rounds}
    )


def test_a_disturbed_measurement_does_not_replace_a_better_one(user_cache: Path, machine_profile: Profile) -> None:
    assert kept(busy(machine_profile), machine_profile) is machine_profile
    assert load_profile().created == machine_profile.created
    other = replace(machine_profile, threads=machine_profile.threads + 1)
    for earlier in (None, busy(machine_profile), other):  # nothing better of this machine is there
        kept(busy(machine_profile), earlier)
        assert load_profile().created == "2026-03-01T00:00:00"


def test_plans_from_a_disturbed_measurement_have_wide_intervals_and_say_why(
    user_cache: Path, machine_profile: Profile, tiny_config: Callable[..., RunConfig]
) -> None:
    calm, wide = (
        plan_run(tiny_config(), p).totals["step_seconds"] for p in (busy(machine_profile, 0.02), busy(machine_profile))
    )
    assert calm.low is not None and wide.low is not None
    assert wide.low < calm.low / 3 and "50% of the cores" in wide.basis and "cores" not in calm.basis
