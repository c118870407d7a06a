"""`ironlaw train`"""

from __future__ import annotations

import os
from contextlib import nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from ironlaw.cli.console import messages, output, print_json
from ironlaw.config import RunConfig, load_config
from ironlaw.errors import UserError

if TYPE_CHECKING:
    from ironlaw.machine.profile import Profile
    from ironlaw.report.live import LiveRun
    from ironlaw.train.loop import Outcome


def train(
    config: Annotated[Path, typer.Argument(help="A config file, such as examples/gpt-tiny.toml.")],
    set_: Annotated[list[str] | None, typer.Option("--set", metavar="KEY=VALUE", help="Override a config key.")] = None,
    layout: Annotated[str | None, typer.Option(help='"dp=1 micro_batch=4"; one process holds dp=1.')] = None,
    out: Annotated[Path | None, typer.Option(help="Run directory; runs/MODEL-DATE unless given.")] = None,
    resume: Annotated[bool, typer.Option("--resume", help="Continue the run in --out, or start it.")] = False,
    dashboard: Annotated[bool, typer.Option("--dashboard", help="A page in the browser while it trains.")] = False,
    json: Annotated[bool, typer.Option("--json", help="Print one JSON document at the end.")] = False,
) -> None:
    settings = load_config(config, [*(set_ or []), *_from_layout(layout)])
    if int(os.environ.get("WORLD_SIZE", "1")) > 1:
        _train_on_ranks(settings, out, resume, dashboard, json)
        return
    if resume and out is None:
        raise UserError("--resume needs --out DIR: which run should go on?")

    from ironlaw.cli.measure import measure_and_keep
    from ironlaw.machine.profile import load_profile, profile_path
    from ironlaw.report.dashboard import Dashboard
    from ironlaw.report.live import LiveRun
    from ironlaw.train.run_directory import default_name, find_run
    from ironlaw.train.session import run_training

    say = messages()
    folder = out or default_name(settings.model.name)
    find_run(folder, settings, resume)  # before a minute is spent on anything else

    if not profile_path().is_file():
        say.print("This machine has not been measured yet: measuring first (`ironlaw measure`).")
        measure_and_keep()
    profile = load_profile()

    live = LiveRun(say, folder, Dashboard(folder) if dashboard else None)
    with live:
        outcome = run_training(
            settings, folder, profile, resume=resume,
            data_progress=live.data_progress, planned=live.planned, watch=live.step, say=live.say,
        )  # fmt: skip
    _show(outcome, folder, live, json)


def _show(outcome: Outcome, folder: Path, live: LiveRun, json: bool) -> None:
    summary = {
        "run": str(folder),
        "steps": outcome.step,
        "interrupted": outcome.interrupted,
        "totals": {name: estimate.to_json() for name, estimate in outcome.ledger.totals.items()},
    }
    if json:
        print_json(summary)
    else:
        live.summary(outcome.ledger, output())
    if outcome.interrupted == "SIGINT":
        raise typer.Exit(130)


def _train_on_ranks(settings: RunConfig, out: Path | None, resume: bool, dashboard: bool, json: bool) -> None:
    """One rank of a job that torchrun started. A restarted job goes on where it was."""
    if out is None and (resume or int(os.environ.get("TORCHELASTIC_MAX_RESTARTS", "0")) > 0):
        raise UserError("give --out DIR: a job that is restarted or resumed must find its run")

    from ironlaw.cli.measure import measure_and_keep
    from ironlaw.machine import host
    from ironlaw.machine.profile import load_profile, profile_path
    from ironlaw.report.dashboard import Dashboard
    from ironlaw.report.live import LiveRun
    from ironlaw.train.parallel.job import job
    from ironlaw.train.parallel.planning import choose_layout, with_layout
    from ironlaw.train.run_directory import default_name

    say = messages()

    def profile_here() -> Profile:
        if not profile_path().is_file():
            measure_and_keep()
        return load_profile()

    def choose(config: RunConfig, ranks: int) -> RunConfig:
        choice = choose_layout(config, profile_here(), ranks)
        say.print(f"Layout     {choice.reason}", markup=False)
        return with_layout(config, choice.best.layout)

    with job(settings, host.memory_bytes(), resume, choose) as here:
        folder = here.first_does(lambda: out or default_name(settings.model.name))
        profile = here.first_does(profile_here)
        live = LiveRun(say, folder, Dashboard(folder) if dashboard and here.ranks.first else None)
        with live if here.ranks.first else nullcontext():
            if here.ranks.first:
                live.say(here.title)
            outcome = here.train(
                folder, profile, resume=resume or here.meeting.restarted,
                data_progress=live.data_progress, planned=live.planned, watch=live.step, say=live.say,
            )  # fmt: skip
    if here.ranks.first:
        _show(outcome, folder, live, json)
    elif outcome.interrupted == "SIGINT":
        raise typer.Exit(130)


def _from_layout(layout: str | None) -> list[str]:
    """A layout on one device is a micro-batch; everything else needs more devices."""
    if layout is None:
        return []
    from ironlaw.workload.layout import parse_layout

    parsed = parse_layout(layout)
    if parsed.accelerators != 1:
        raise UserError(f"--layout {layout!r} needs {parsed.accelerators} devices, this process has one: use dp=1")
    return [f"train.micro_batch={parsed.micro_batch}"] if "micro_batch" in layout else []
