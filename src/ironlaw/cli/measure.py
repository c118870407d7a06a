"""`ironlaw measure`"""

from __future__ import annotations

import time
from typing import Annotated

import typer

from ironlaw.cores import usable_cores
from ironlaw.errors import UserError
from ironlaw.report.console import messages, print_json, progress, show


def measure(
    threads: Annotated[int | None, typer.Option(help="CPU threads; all cores unless given.", min=1)] = None,
    json: Annotated[bool, typer.Option("--json", help="Print one JSON document.")] = False,
) -> None:
    from ironlaw.machine import interference
    from ironlaw.machine.keep import measure_and_keep
    from ironlaw.machine.profile import profile_path
    from ironlaw.report.profile_view import profile_view

    if threads is not None and threads > usable_cores():
        raise UserError(f"--threads {threads} is more than the {usable_cores()} cores that this process may use")
    started = time.perf_counter()
    profile = measure_and_keep(messages().print, progress, threads)
    if json:
        print_json(profile.to_json())
        return
    show(profile_view(profile, interference.typical(profile)))
    messages().print(f"Measured in {time.perf_counter() - started:.0f} s, kept in {profile_path()}")
