"""`ironlaw launch`"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from ironlaw.config import load_config
from ironlaw.errors import UserError, did_you_mean, printable
from ironlaw.files import as_name
from ironlaw.report.console import messages, print_json


def launch(
    config: Annotated[Path, typer.Argument(help="A config file, such as examples/gpt-tiny.toml.")],
    on: Annotated[str, typer.Option("--on", help="slurm, kubernetes or ssh.")],
    nodes: Annotated[int, typer.Option(min=1, max=10_000, help="Nodes of the job.")] = 1,
    min_nodes: Annotated[
        int | None, typer.Option(min=1, help="Go on with so many when nodes are lost; --nodes unless given.")
    ] = None,
    per_node: Annotated[int, typer.Option(min=1, max=1024, help="Accelerators per node, one rank each.")] = 8,
    set_: Annotated[list[str] | None, typer.Option("--set", metavar="KEY=VALUE", help="Override a config key.")] = None,
    out: Annotated[Path | None, typer.Option(help="Run directory on storage that all nodes see.")] = None,
    hosts: Annotated[str | None, typer.Option(help="For ssh: node0,node1,...")] = None,
    image: Annotated[str | None, typer.Option(help="For Kubernetes: an image with ironlaw in it.")] = None,
    claim: Annotated[str | None, typer.Option(help="For Kubernetes: the shared volume, mounted at /work.")] = None,
    time: Annotated[str | None, typer.Option(help="For Slurm: how long at most, such as 4:00:00 or 2-0.")] = None,
    partition: Annotated[str | None, typer.Option(help="For Slurm: where to queue.")] = None,
    account: Annotated[str | None, typer.Option(help="For Slurm: who pays.")] = None,
    submit: Annotated[bool, typer.Option("--submit", help="Hand it to the launcher at once.")] = False,
    force: Annotated[bool, typer.Option("--force", help="Replace a job file that was edited.")] = False,
    json: Annotated[bool, typer.Option("--json", help="Print one JSON document.")] = False,
) -> None:
    settings = load_config(config, set_ or [])
    from ironlaw.train.parallel import launch as jobs

    if min_nodes is not None and min_nodes > nodes:
        raise UserError(f"--min-nodes {min_nodes} is more than --nodes {nodes}: use --min-nodes {nodes} or fewer")
    if on not in jobs.KINDS:
        raise UserError(f"--on {on}: {did_you_mean(on, jobs.KINDS)}")
    if settings.layout is not None:
        from ironlaw.train.parallel.ranks import check

        check(settings, nodes * per_node)  # a layout that cannot run should not wait in a queue
    name = as_name(f"ironlaw-{settings.model.name.lower().replace('_', '-').replace('.', '-')}", 52)
    request = jobs.LaunchRequest(
        name, config, out or Path("runs") / name, nodes, per_node, tuple(set_ or ()),
        tuple(hosts.split(",")) if hosts else (), image, claim, min_nodes, time, partition, account,
    )  # fmt: skip
    path = Path(jobs.KINDS[on])
    text = jobs.keep(path, jobs.script(on, request), force)
    say = messages()
    if not json:
        print(printable(text), end="", flush=True)
        say.print(f"written to {path}; submit it with `{' '.join(jobs.SUBMIT[on])} {path}` or --submit")
    told = jobs.submit(on, path) if submit else None
    if json:
        print_json({"file": str(path), "text": text, "run": str(request.out), "submitted": told})
    elif told:
        say.print(told)
