"""`ironlaw measure`"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Annotated

import typer

from ironlaw.cli.console import messages, print_json, progress, show
from ironlaw.cores import usable_cores
from ironlaw.errors import UserError

if TYPE_CHECKING:
    from ironlaw.machine.profile import Profile


def measure(
    threads: Annotated[int | None, typer.Option(help="CPU threads; all cores unless given.", min=1)] = None,
    json: Annotated[bool, typer.Option("--json", help="Print one JSON document.")] = False,
) -> None:
    from ironlaw.machine import interference
    from ironlaw.machine.profile import profile_path
    from ironlaw.report.profile_view import profile_view

    if threads is not None and threads > usable_cores():
        raise UserError(f"--threads {threads} is more than the {usable_cores()} cores that this process may use")
    started = time.perf_counter()
    profile = measure_and_keep(threads)
    if json:
        print_json(profile.to_json())
        return
    show(profile_view(profile, interference.typical(profile)))
    messages().print(f"Measured in {time.perf_counter() - started:.0f} s, kept in {profile_path()}")


def this_machine() -> Profile:
    """Its profile; a machine that nobody measured is measured first."""
    from ironlaw.machine.profile import load_profile, profile_path

    if not profile_path().is_file():
        messages().print("This machine has not been measured yet: measuring first (`ironlaw measure`).")
        measure_and_keep()
    return load_profile()


def measure_and_keep(threads: int | None = None) -> Profile:
    """Measure with a progress bar, and keep the profile."""
    from ironlaw.data.tokenizer import rate as tokenizer_rate
    from ironlaw.files import cache_problem
    from ironlaw.machine.links import save_costs
    from ironlaw.machine.measure import measure as measure_machine
    from ironlaw.machine.measure_links import measure_links
    from ironlaw.machine.profile import earlier_profile

    problem = cache_problem()
    if problem is not None:  # known before half a minute of measuring
        raise UserError(problem)
    earlier = earlier_profile()
    with progress("Measuring this machine") as update:
        profile = measure_machine(
            threads=threads,
            tokenizer_rate=tokenizer_rate,
            earlier=earlier,
            progress=lambda what, fraction: update(fraction, what),
        )
        if profile.device == "cpu":
            update(0.99, "two ranks")
            save_costs(measure_links(profile))
    return kept(profile, earlier)


def kept(profile: Profile, earlier: Profile | None) -> Profile:
    """Store it, unless other programs disturbed it and an undisturbed one of the same machine is there."""
    from ironlaw.machine import interference
    from ironlaw.machine.profile import save_profile

    share = interference.disturbed(profile)
    calm = earlier if earlier is not None and interference.disturbed(earlier) is None else None
    if share is not None and calm is not None and calm.machine == profile.machine:
        messages().print(
            f"Other programs used {share:.0%} of the cores meanwhile: the earlier measurement of "
            f"{calm.created[:16].replace('T', ' ')} is kept. Measure again when they are done."
        )  # fmt: skip
        return calm
    save_profile(profile)
    if share is not None:
        messages().print(
            f"Other programs used {share:.0%} of the cores meanwhile: plans from this measurement have wide intervals. "
            "Measure again when they are done.",
        )  # fmt: skip
    return profile
