"""This machine's profile, loaded from disk or measured and stored."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

from ironlaw.data.tokenizer import rate as tokenizer_rate
from ironlaw.errors import UserError
from ironlaw.files import cache_problem
from ironlaw.machine import interference
from ironlaw.machine.links import save_costs
from ironlaw.machine.profile import Profile, earlier_profile, load_profile, profile_path, save_profile

Log = Callable[[str], Any]
ShowProgress = Callable[[str], AbstractContextManager[Any]]  # label -> context of a callback(fraction, text)


def _no_progress(label: str) -> AbstractContextManager[Any]:
    return nullcontext(lambda fraction, what="": None)


def this_machine(log: Log = lambda text: None, progress: ShowProgress = _no_progress) -> Profile:
    """Return this machine's profile; measure the machine first if there is none."""
    if not profile_path().is_file():
        log("This machine has not been measured yet: measuring first (`ironlaw measure`).")
        measure_and_keep(log, progress)
    return load_profile()


def measure_and_keep(log: Log, progress: ShowProgress, threads: int | None = None) -> Profile:
    """Measure this machine and store the profile. UserError if the cache folder cannot be written."""
    from ironlaw.machine.measure import measure as measure_machine
    from ironlaw.machine.measure_links import measure_links

    problem = cache_problem()
    if problem is not None:  # fail before half a minute of measuring
        raise UserError(problem)
    earlier = earlier_profile()
    with progress("Measuring this machine") as update:
        profile = measure_machine(threads=threads, tokenizer_rate=tokenizer_rate, earlier=earlier, progress=update)
        if profile.device == "cpu":
            update(0.99, "two ranks")
            save_costs(measure_links(profile))
    return save_unless_disturbed(profile, earlier, log)


def save_unless_disturbed(profile: Profile, earlier: Profile | None, log: Log = lambda text: None) -> Profile:
    """Store a profile and return it, unless it was disturbed and an undisturbed one of the same machine exists."""
    share = interference.disturbed(profile)
    calm = earlier if earlier is not None and interference.disturbed(earlier) is None else None
    if share is not None and calm is not None and calm.machine == profile.machine:
        log(
            f"Other programs used {share:.0%} of the cores meanwhile: the earlier measurement of "
            f"{calm.created[:16].replace('T', ' ')} is kept. Measure again when they are done."
        )  # fmt: skip
        return calm
    save_profile(profile)
    if share is not None:
        log(
            f"Other programs used {share:.0%} of the cores meanwhile: plans from this measurement have wide intervals. "
            "Measure again when they are done.",
        )  # fmt: skip
    return profile
