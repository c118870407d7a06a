"""A measured machine: curves between points, the law of matrix products, and the way to disk and back."""

from __future__ import annotations

import json
import math
import os
import time
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ironlaw.errors import UserError
from ironlaw.machine import host, interference
from ironlaw.machine.profile import (
    Curve,
    MatmulFit,
    Profile,
    earlier_profile,
    load_profile,
    profile_path,
    save_profile,
)

CURVE = Curve((1e3, 1e5, 1e7), (2e-6, 1e-5, 1e-3))
SHAPES = [(m, n, k) for m in (16, 128, 1024) for n in (64, 512, 4096) for k in (32, 256, 2048)]


# -- curves ------------------------------------------------------------------------------------------------------


def test_a_curve_goes_through_its_points() -> None:
    for elements, seconds in zip(CURVE.elements, CURVE.seconds, strict=True):
        assert CURVE.at(elements) == pytest.approx(seconds)


def test_between_points_a_curve_is_straight_in_logarithms() -> None:
    assert CURVE.at(1e6) == pytest.approx(1e-4)  # half way between 1e5 and 1e7: half way between 1e-5 and 1e-3
    assert CURVE.at(1e4) == pytest.approx(math.sqrt(2e-6 * 1e-5))


def test_outside_a_curve_has_a_floor_and_grows_in_proportion() -> None:
    assert CURVE.at(1) == CURVE.at(999) == 2e-6
    assert CURVE.at(3e7) == pytest.approx(3e-3)


@given(st.floats(1, 1e9), st.floats(1, 1e9))
def test_more_elements_never_take_less(one: float, other: float) -> None:
    low, high = sorted((one, other))
    assert CURVE.at(low) <= CURVE.at(high) * (1 + 1e-12)


# -- matrix products ---------------------------------------------------------------------------------------------


def law(m: float, n: float, k: float) -> float:
    return 3e-6 + 2 * m * n * k * (1e-11 + 4e-10 / m + 1e-10 / n + 2e-10 / k)


def test_a_law_is_recovered_from_its_own_figures() -> None:
    fit = MatmulFit.fit(SHAPES, [law(*shape) for shape in SHAPES])
    assert fit.fixed_seconds == pytest.approx(3e-6, rel=1e-4)
    assert fit.seconds_per_flop == pytest.approx(1e-11, rel=1e-4)
    assert (fit.per_m, fit.per_n, fit.per_k) == pytest.approx((4e-10, 1e-10, 2e-10), rel=1e-3)
    assert fit.error < 1e-6
    for shape in ((100, 300, 700), (8192, 8192, 8192), (1, 64, 64)):
        assert fit.at(*shape) == pytest.approx(law(*shape), rel=1e-4)


def test_what_a_law_misses_is_corrected_where_it_was_measured() -> None:
    """One shape takes twice as long as any law says: the fit knows it there, and not far away."""
    odd = (1024, 512, 256)
    seconds = [law(*shape) * (2 if shape == odd else 1) for shape in SHAPES]
    fit = MatmulFit.fit(SHAPES, seconds)
    assert fit.law(*odd) < 1.5 * law(*odd)
    assert fit.at(*odd) == pytest.approx(2 * law(*odd), rel=0.02)
    assert fit.at(1000, 500, 260) == pytest.approx(2 * law(1000, 500, 260), rel=0.15)
    far = (10**6, 10**6, 10**6)
    assert abs(math.log(fit.at(*far) / fit.law(*far))) < 0.1
    for shape, measured in zip(SHAPES, seconds, strict=True):
        assert fit.at(*shape) == pytest.approx(measured, rel=0.05)


def test_coefficients_are_never_negative() -> None:
    fit = MatmulFit.fit(SHAPES, [2e-11 * m * n * k * (1 + 0.3 * ((m + n) % 3)) + 1e-6 for m, n, k in SHAPES])
    assert min(fit.fixed_seconds, fit.seconds_per_flop, fit.per_m, fit.per_n, fit.per_k) >= 0


def test_the_peak_rate_is_that_of_the_best_measured_shape() -> None:
    fit = MatmulFit.fit(SHAPES, [law(*shape) for shape in SHAPES])
    assert fit.peak_flops_per_second == pytest.approx(max(2 * m * n * k / law(m, n, k) for m, n, k in SHAPES), rel=1e-3)


# -- attention ---------------------------------------------------------------------------------------------------


def test_attention_takes_the_nearest_head_size_and_interpolates_lengths(machine_profile: Profile) -> None:
    points = [(64, 32, 1e-10), (1024, 32, 3e-10), (64, 128, 8e-10), (1024, 128, 9e-10)]
    profile = replace(machine_profile, attention={"fp32": {"forward": points, "backward": points}})

    def pair(sequence: int, head_size: int) -> float:
        return profile.attention_seconds_per_pair("fp32", "forward", sequence, head_size)

    assert pair(64, 32) == pytest.approx(1e-10)
    assert pair(256, 32) == pytest.approx(2e-10)  # half way in logarithms
    assert pair(256, 16) == pytest.approx(1e-10)  # half the head size, half the work
    assert pair(1024, 128) == pytest.approx(9e-10)
    assert pair(9999, 32) == pytest.approx(3e-10)


# -- on disk -----------------------------------------------------------------------------------------------------


def test_json_round_trip(machine_profile: Profile, user_cache: Path) -> None:
    path = save_profile(machine_profile)
    assert path == profile_path() and user_cache in path.parents
    assert load_profile() == machine_profile == earlier_profile()
    assert [p.name for p in path.parent.iterdir()] == [path.name]


@pytest.mark.parametrize(
    "text", ["", "{", "[]", "3", "{}", '{"schema_version": 0}', '{"schema_version": 1, "device": "cpu"}']
)
def test_what_is_no_profile_asks_for_a_measurement(user_cache: Path, text: str) -> None:
    profile_path().write_text(text, encoding="utf-8")
    with pytest.raises(UserError, match="run `ironlaw measure` again"):
        load_profile()
    assert earlier_profile() is None


# -- interference ------------------------------------------------------------------------------------------------


def test_without_a_history_the_rounds_of_the_measurement_count(user_cache: Path, machine_profile: Profile) -> None:
    typical = interference.typical(machine_profile)
    assert typical == pytest.approx({"compute": 1.1, "memory": 1.05})


def test_the_middle_of_the_last_runs_counts(user_cache: Path, machine_profile: Profile) -> None:
    for slower in (2.0, 3.0):  # with the measurement's own 1.1, three looks
        interference.append_observations(machine_profile, [{"compute": slower, "memory": slower}] * 50)
    assert interference.typical(machine_profile) == pytest.approx({"compute": 2.0, "memory": 2.0})


def test_one_bad_run_does_not_change_the_plans_after_it(user_cache: Path, machine_profile: Profile) -> None:
    for slower in (1.1, 1.1, 9.0):
        interference.append_observations(machine_profile, [{"compute": slower, "memory": 1.05}] * 200)
    assert interference.typical(machine_profile)["compute"] == pytest.approx(1.1)


def test_what_is_older_than_the_last_runs_is_forgotten(user_cache: Path, machine_profile: Profile) -> None:
    for slower in (5.0,) * 40 + (1.2,) * interference.RUNS_COUNTED:
        interference.append_observations(machine_profile, [{"compute": slower, "memory": slower}])
    assert interference.typical(machine_profile)["compute"] == pytest.approx(1.2)
    later = time.time() + 2 * interference.FORGOTTEN_AFTER_SECONDS
    assert interference.typical(machine_profile, now=later) == pytest.approx({"compute": 1.1, "memory": 1.05})


def test_what_other_programs_disturbed_is_not_remembered(user_cache: Path, machine_profile: Profile) -> None:
    quiet, loud = {"compute": 1.2, "memory": 1.2, "others": 0.02}, {"compute": 4.0, "memory": 4.0, "others": 0.6}
    interference.append_observations(machine_profile, [loud] * 20)
    assert not interference.history_path().exists()
    interference.append_observations(machine_profile, [quiet] + [loud] * 20)
    assert json.loads(interference.history_path().read_text(encoding="utf-8"))["compute"] == 1.2
    assert interference.other_load([quiet, loud]) == pytest.approx(0.31)
    assert interference.other_load([{"compute": 1.0}]) is None


def test_rounds_of_a_measurement_beside_other_programs_do_not_count(machine_profile: Profile, user_cache: Path) -> None:
    disturbed = machine_profile.interference | {"others": [0.0, 0.5, 0.5]}
    typical = interference.typical(replace(machine_profile, interference=disturbed))
    assert typical == {"compute": 1.0, "memory": 1.0}  # of the first round, the only quiet one
    all_of_them = machine_profile.interference | {"others": [0.5, 0.5, 0.5]}
    assert interference.typical(replace(machine_profile, interference=all_of_them)) == {"compute": 1.0, "memory": 1.0}


def test_another_machine_does_not_count(user_cache: Path, machine_profile: Profile) -> None:
    interference.append_observations(replace(machine_profile, threads=64), [{"compute": 9.0, "memory": 9.0}] * 50)
    assert interference.typical(machine_profile)["compute"] == pytest.approx(1.1)


def test_what_was_seen_is_relative_to_the_best_of_then(user_cache: Path, machine_profile: Profile) -> None:
    """Twice the best of then is four times a best that has since halved."""
    interference.append_observations(machine_profile, [{"compute": 2.0, "memory": 2.0}] * 100)
    best = machine_profile.probe | {"compute": machine_profile.probe["compute"] / 2}
    faster = replace(machine_profile, probe=best, interference={"compute": [], "memory": []})
    assert interference.typical(faster) == pytest.approx({"compute": 4.0, "memory": 2.0})


def test_a_torn_history_is_no_error(user_cache: Path, machine_profile: Profile) -> None:
    interference.append_observations(machine_profile, [{"compute": 2.0, "memory": 2.0}])
    with interference.history_path().open("a", encoding="utf-8") as file:
        file.write('{"machine": "hal')
    assert interference.typical(machine_profile)["compute"] > 1.1  # the whole line before it still counts


# -- other programs ----------------------------------------------------------------------------------------------


def test_the_load_of_others_is_what_the_cores_did_less_what_we_did(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    stat, clock = tmp_path / "stat", {"process": 0.0, "wall": 0.0}
    cores = sorted(os.sched_getaffinity(0))
    ticks = os.sysconf("SC_CLK_TCK")

    def write(busy_seconds: float) -> None:
        rows = [f"cpu{core} {round(busy_seconds * ticks)} 0 0 77 5 0 0 99" for core in cores]
        stat.write_text("\n".join(["cpu 9 9 9 9 9 9 9 9", *rows, "cpu9999 1 1 1 1 1 1 1 1"]), encoding="ascii")

    monkeypatch.setattr(host.time, "process_time", lambda: clock["process"])
    monkeypatch.setattr(host.time, "perf_counter", lambda: clock["wall"])
    write(0.0)
    seen = host.OtherLoad(stat)
    write(3.0)  # each core computed 3 of 4 s, and we one second of that on each
    clock |= {"process": 1.0 * len(cores), "wall": 4.0}
    assert seen.share() == pytest.approx(0.5)
    clock["wall"] = 4.1
    assert seen.share() == pytest.approx(0.5)  # asked again at once
    clock["wall"] = 6.0
    assert seen.share() == 0.0
    stat.unlink()
    clock["wall"] = 8.0
    assert seen.share() is None


def test_the_middle_leaves_out_rare_extremes() -> None:
    rounds = [{"compute": 1.0, "memory": 1.0}] * 19 + [{"compute": 100.0, "memory": 1.0}]
    middle = interference.trimmed_mean(rounds)
    assert middle is not None and middle["compute"] == 1.0
    assert interference.trimmed_mean([]) is None
