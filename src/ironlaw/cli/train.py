"""`ironlaw train`, `ironlaw distil` and `ironlaw launch`"""

from __future__ import annotations

import signal
from contextlib import nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from typer import Argument, Exit, Option

from ironlaw.cli.options import Config, Json, Set
from ironlaw.config import (
    LayoutConfig,
    RunConfig,
    build_config,
    find_tokenizer,
    format_overrides,
    load_config,
    read_model_config,
)
from ironlaw.cores import torchrun_integer, usable_threads
from ironlaw.errors import UserError, did_you_mean, printable
from ironlaw.files import as_name
from ironlaw.report.console import messages, output, print_json, progress

if TYPE_CHECKING:
    from ironlaw.train.result import Outcome

Out = Annotated[Path | None, Option(help="Run directory; runs/MODEL-DATE unless given.")]
Resume = Annotated[bool, Option("--resume", help="Continue the run in --out; start it if there is none.")]
Page = Annotated[bool, Option("--dashboard", help="Show the run on a page in the browser while it trains.")]
JsonAtEnd = Annotated[bool, Option("--json", help="Print one JSON document at the end.")]


def train(
    config: Config,
    set_: Set = None,
    layout: Annotated[
        str | None,
        Option(help='Layout of the ranks of torchrun, such as "dp=4 zero=2"; one process has dp=1.'),
    ] = None,
    out: Out = None,
    resume: Resume = False,
    dashboard: Page = False,
    json: JsonAtEnd = False,
) -> None:
    settings = load_config(config, set_ or [])
    ranks = torchrun_integer("WORLD_SIZE")
    if layout is not None:
        settings = _in_layout(settings, layout, ranks)
    if ranks > 1:
        _train_on_ranks(settings, out, resume, dashboard, json)
        return
    if resume and out is None:
        raise UserError("--resume needs --out DIR: which run should go on?")

    from ironlaw.machine.keep import this_machine
    from ironlaw.report.live import LiveRun
    from ironlaw.train.run_directory import find_run, new_run_directory
    from ironlaw.train.session import run_training

    say = messages()
    folder = out or new_run_directory(settings.model.name)
    find_run(folder, settings, resume)  # raises before any time is spent

    profile = this_machine(say.print, progress)
    threads = usable_threads()
    if threads < profile.threads:
        say.print(
            f"This machine was measured with {profile.threads} threads, this process may use {threads}: it trains with "
            f"{threads}, and the plan is for {profile.threads}"
        )

    live = LiveRun(say, folder, dashboard)
    with live:
        outcome = run_training(
            settings, folder, profile, resume=resume,
            data_progress=live.data_progress, planned=live.planned, watch=live.step, say=live.say,
        )  # fmt: skip
    _show(outcome, folder, json)


def distil(
    config: Annotated[Path, Argument(help="The student's config file.")],
    teacher: Annotated[Path, Option(help="The model to learn from: a run or a Hugging Face directory.")],
    set_: Set = None,
    out: Out = None,
    resume: Resume = False,
    dashboard: Page = False,
    json: JsonAtEnd = False,
) -> None:
    """Short for `train` with `objective.kind = "distillation"`, and with the teacher's tokenizer and vocabulary."""
    vocab, folder = read_model_config(teacher, f"--teacher {teacher}").vocab, teacher.absolute()
    settings = {"objective.kind": "distillation", "objective.teacher": str(folder), "model.vocab": vocab}
    settings |= {f"data.{key}": value for key, value in find_tokenizer(folder).items()}
    train(config, [*format_overrides(settings), *(set_ or [])], None, out, resume, dashboard, json)


def _show(outcome: Outcome, folder: Path, json: bool) -> None:
    from ironlaw.report.live import print_summary

    summary = {
        "run": str(folder),
        "steps": outcome.step,
        "interrupted": outcome.interrupted,
        "totals": {name: estimate.to_json() for name, estimate in outcome.ledger.totals.items()},
    }
    if json:
        print_json(summary)
    else:
        print_summary(folder, outcome.ledger, output())
    _leave(outcome)


def _leave(outcome: Outcome) -> None:
    """Exit with the code of a signal that ended the run, so that `ironlaw train ... && ironlaw explain ...` stops.

    torchrun restarts its job after any exit code but 0. If it may restart, all signals but Ctrl-C therefore give 0.
    """
    restarts = torchrun_integer("TORCHELASTIC_MAX_RESTARTS", 0) > 0
    if outcome.interrupted and (outcome.interrupted == "SIGINT" or not restarts):
        raise Exit(128 + signal.Signals[outcome.interrupted])


def _train_on_ranks(settings: RunConfig, out: Path | None, resume: bool, dashboard: bool, json: bool) -> None:
    """Train on one rank of a job that torchrun started. A restarted job resumes its run."""
    if out is None and (resume or torchrun_integer("TORCHELASTIC_MAX_RESTARTS", 0) > 0):
        raise UserError("give --out DIR: a job that is restarted or resumed must find its run")

    from ironlaw.machine import host
    from ironlaw.machine.keep import this_machine
    from ironlaw.report.live import LiveRun
    from ironlaw.train.parallel.job import job
    from ironlaw.train.parallel.planning import choose_layout, with_layout
    from ironlaw.train.run_directory import new_run_directory

    say = messages()

    def choose(config: RunConfig, ranks: int) -> RunConfig:
        choice = choose_layout(config, this_machine(say.print, progress), ranks)
        say.print(f"Layout     {choice.reason}")
        return with_layout(config, choice.best.layout)

    with job(settings, host.memory_bytes(), resume, choose) as here:
        folder = here.ranks.on_rank_0(lambda: out or new_run_directory(settings.model.name))
        profile = here.ranks.on_rank_0(lambda: this_machine(say.print, progress))
        live = LiveRun(say, folder, dashboard and here.ranks.is_rank_0)
        with live if here.ranks.is_rank_0 else nullcontext():
            if here.ranks.is_rank_0:
                live.say(here.title)
            outcome = here.train(
                folder, profile, resume=resume or here.restarted,
                data_progress=live.data_progress, planned=live.planned, watch=live.step, say=live.say,
            )  # fmt: skip
    if here.ranks.is_rank_0:
        _show(outcome, folder, json)
    _leave(outcome)


def _in_layout(config: RunConfig, text: str, ranks: int) -> RunConfig:
    """Return the config with the layout of the flag in place of its own; keys that the flag omits are unchanged."""
    from ironlaw.workload.layout import parse_layout

    parsed = parse_layout(text)
    given = {word.partition("=")[0] for word in text.replace(",", " ").split()}
    if ranks == 1 and parsed.accelerators != 1:
        raise UserError(
            f"--layout {text!r} needs {parsed.accelerators} devices, this process has one: use dp=1, or start it as "
            f"torchrun --nproc-per-node {parsed.accelerators} -m ironlaw train ..."
        )
    if ranks == 1:
        parsed.check(config.model, sequence=config.sequence, global_batch=config.train.global_batch)
    for word in given & {"cp_kind", "etp", "accumulation"}:
        raise UserError(f"--layout {text!r}: {word} is for plans, this trainer has its own: leave it out")
    document = config.model_dump(exclude_none=True)
    if (ranks > 1 or config.layout is not None) and given & LayoutConfig.model_fields.keys():
        words = {word: getattr(parsed, word) for word in LayoutConfig.model_fields if word != "dp" or word in given}
        document["layout"] = {word: value for word, value in words.items() if value is not None}
    document["train"] |= {word: getattr(parsed, word) for word in ("micro_batch", "offload") if word in given}
    document |= {"recompute": parsed.recompute.section()} if "recompute" in given else {}
    return build_config(document, where="--layout")


def launch(
    config: Config,
    on: Annotated[str, Option("--on", help="Launcher: slurm, kubernetes or ssh.")],
    nodes: Annotated[int, Option(min=1, max=10_000, help="Number of nodes.")] = 1,
    min_nodes: Annotated[
        int | None, Option(min=1, help="Continue with this many when nodes are lost; --nodes unless given.")
    ] = None,
    per_node: Annotated[int, Option(min=1, max=1024, help="Accelerators per node; each runs one rank.")] = 8,
    set_: Set = None,
    out: Annotated[Path | None, Option(help="Run directory, on storage that all nodes share.")] = None,
    hosts: Annotated[str | None, Option(help="With ssh: the hosts, as node0,node1,...")] = None,
    image: Annotated[
        str | None, Option(help="With Kubernetes: a container image in which ironlaw is installed.")
    ] = None,
    claim: Annotated[
        str | None, Option(help="With Kubernetes: the claim of a shared volume, mounted at /work.")
    ] = None,
    time: Annotated[str | None, Option(help="With Slurm: time limit, such as 4:00:00 or 2-0.")] = None,
    partition: Annotated[str | None, Option(help="With Slurm: partition.")] = None,
    account: Annotated[str | None, Option(help="With Slurm: account that is charged.")] = None,
    submit: Annotated[bool, Option("--submit", help="Submit the job at once.")] = False,
    force: Annotated[bool, Option("--force", help="Overwrite a job file that was edited.")] = False,
    json: Json = False,
) -> None:
    settings = load_config(config, set_ or [])
    from ironlaw.train.parallel import launch as jobs

    if min_nodes is not None and min_nodes > nodes:
        raise UserError(f"--min-nodes {min_nodes} is more than --nodes {nodes}: use --min-nodes {nodes} or fewer")
    if on not in jobs.KINDS:
        raise UserError(f"--on {on}: {did_you_mean(on, jobs.KINDS)}")
    if settings.layout is not None:
        from ironlaw.train.parallel.ranks import check

        check(settings, nodes * per_node)  # refuses an impossible layout before it waits in a queue
    name = as_name(f"ironlaw-{settings.model.name.lower().replace('_', '-').replace('.', '-')}", 52)
    request = jobs.LaunchRequest(
        name, config, out or Path("runs") / name, nodes, per_node, tuple(set_ or ()),
        tuple(hosts.split(",")) if hosts else (), image, claim, min_nodes, time, partition, account,
    )  # fmt: skip
    path = Path(jobs.KINDS[on])
    text = jobs.keep(path, jobs.script(on, request), force)
    say = messages()
    for line in settings.unused_keys():
        say.print(line)
    if not json:
        print(printable(text), end="", flush=True)
        say.print(f"written to {path}; submit it with `{' '.join(jobs.SUBMIT[on])} {path}` or --submit")
    answer = jobs.submit(on, path) if submit else None
    if json:
        print_json({"file": str(path), "text": text, "run": str(request.out), "submitted": answer})
    elif answer:
        say.print(answer)
