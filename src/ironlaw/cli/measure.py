"""`ironlaw measure`"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Annotated

import typer

from ironlaw.cli.console import messages, output, print_json, progress

if TYPE_CHECKING:
    from ironlaw.machine.profile import Profile


def measure(
    threads: Annotated[int | None, typer.Option(help="CPU threads; all cores unless given.", min=1)] = None,
    json: Annotated[bool, typer.Option("--json", help="Print one JSON document.")] = False,
) -> None:
    from ironlaw.machine import interference
    from ironlaw.machine.profile import profile_path
    from ironlaw.report.terminal import show_profile

    started = time.perf_counter()
    profile = measure_and_keep(threads)
    if json:
        print_json(profile.to_json())
        return
    show_profile(output(), profile, interference.typical(profile))
    messages().print(f"Measured in {time.perf_counter() - started:.0f} s, kept in {profile_path()}")


def measure_and_keep(threads: int | None = None) -> Profile:
    """Measure with a progress bar, and keep the profile. `train` does it too."""
    from ironlaw.data.tokenizer import rate as tokenizer_rate
    from ironlaw.machine.links import save_costs
    from ironlaw.machine.measure import measure as measure_machine
    from ironlaw.machine.measure_links import measure_links
    from ironlaw.machine.profile import earlier_profile, save_profile

    with progress("Measuring this machine") as update:
        profile = measure_machine(
            threads=threads,
            tokenizer_rate=tokenizer_rate,
            earlier=earlier_profile(),
            progress=lambda what, fraction: update(fraction, what),
        )
        if profile.device == "cpu":
            update(0.99, "two ranks")
            save_costs(measure_links(profile))
    save_profile(profile)
    return profile
