"""A measurement beside other programs: it does not replace a better one, and what is planned from it says so."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from ironlaw.config import RunConfig
from ironlaw.machine import interference
from ironlaw.machine.host import OtherLoad
from ironlaw.machine.keep import save_unless_disturbed
from ironlaw.machine.measure import Probe
from ironlaw.machine.profile import Profile, load_profile
from ironlaw.plan.step import plan_run


def busy(profile: Profile, share: float = 0.5) -> Profile:
    rounds = len(profile.interference["compute"])
    return replace(
        profile, created="2026-03-01T00:00:00", interference=profile.interference | {"others": [share] * rounds}
    )


def test_a_disturbed_measurement_does_not_replace_a_better_one(user_cache: Path, machine_profile: Profile) -> None:
    assert save_unless_disturbed(busy(machine_profile), machine_profile) is machine_profile
    assert load_profile().created == machine_profile.created
    other = replace(machine_profile, threads=machine_profile.threads + 1)
    for earlier in (None, busy(machine_profile), other):  # nothing better of this machine is there
        save_unless_disturbed(busy(machine_profile), earlier)
        assert load_profile().created == "2026-03-01T00:00:00"


def test_a_run_is_planned_at_the_speed_seen_right_before_it(
    user_cache: Path, machine_profile: Profile, tiny_config: Callable[..., RunConfig], monkeypatch: pytest.MonkeyPatch
) -> None:
    usual = interference.typical(machine_profile)
    slower = {kind: 1.5 * value for kind, value in usual.items()}
    calm, now = plan_run(tiny_config(), machine_profile), plan_run(tiny_config(), machine_profile, slower)
    before, after = calm.totals["step_seconds"], now.totals["step_seconds"]
    assert 1.15 < after.value / before.value <= 1.5**interference.PROBE_WEIGHT * 1.001
    assert after.low is not None and after.high is not None and before.low is not None and before.high is not None
    assert after.low <= before.low * 1.001 and after.high >= before.high * 1.14  # it passes, or it stays so
    assert "0.67 of its usual speed" in after.basis and now.facts["pace"] == pytest.approx(1.5)
    assert now.decided == calm.decided
    apart = plan_run(tiny_config(), machine_profile, usual | {"memory": 2 * usual["memory"]})  # cores that moved apart
    assert 1.05 < apart.facts["pace"] < 2
    probe = Probe(machine_profile.fp32_products)
    monkeypatch.setattr(OtherLoad, "share", lambda self: 0.05)
    assert probe.slowdown(machine_profile, 0.01)
    monkeypatch.setattr(OtherLoad, "share", lambda self: 0.5)
    assert probe.slowdown(machine_profile, 0.01) is None  # other programs come and go


def test_plans_from_a_disturbed_measurement_have_wide_intervals_and_say_why(
    user_cache: Path, machine_profile: Profile, tiny_config: Callable[..., RunConfig]
) -> None:
    calm, wide = (
        plan_run(tiny_config(), p).totals["step_seconds"] for p in (busy(machine_profile, 0.02), busy(machine_profile))
    )
    assert calm.low is not None and wide.low is not None
    assert wide.low < calm.low / 3 and "50% of the cores" in wide.basis and "cores" not in calm.basis


def test_a_probe_in_a_loop_of_another_default_type_leaves_its_random_numbers(machine_profile: Profile) -> None:
    before = torch.get_rng_state()
    torch.set_default_dtype(torch.float64)
    try:
        assert min(Probe(machine_profile.fp32_products).seconds(1).values()) > 0
    finally:
        torch.set_default_dtype(torch.float32)
    assert torch.equal(torch.get_rng_state(), before)
