"""`ironlaw plan`"""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from ironlaw.errors import UserError
from ironlaw.report.console import messages, print_json, show

if TYPE_CHECKING:
    from ironlaw.plan.request_types import PlanOutcome


def plan(
    what: Annotated[
        str, typer.Argument(metavar="CONFIG|MODEL", help="A config file, a catalogued model, a Hugging Face config.")
    ],
    on: Annotated[
        str | None, typer.Option(help="this (unless given), h100-sxm-80gb, 64xh100-sxm-80gb, 64xh100@p5-48xlarge.")
    ] = None,
    set_: Annotated[list[str] | None, typer.Option("--set", metavar="KEY=VALUE", help="Override a config key.")] = None,
    tokens: Annotated[str | None, typer.Option(help="To train on in all: 1T, 500B, 2e12.")] = None,
    steps: Annotated[int | None, typer.Option(min=1, help="Optimizer steps, instead of --tokens.")] = None,
    seq: Annotated[int | None, typer.Option(min=1, help="Tokens per sequence.")] = None,
    global_batch: Annotated[int | None, typer.Option(min=1, help="Sequences per optimizer step.")] = None,
    precision: Annotated[
        str | None, typer.Option(help="bf16, fp16, fp32, tf32, fp8, mxfp8, nvfp4; here fp32, bf16.")
    ] = None,
    optimizer: Annotated[
        str | None,
        typer.Option(help="adamw, sgd, momentum, rmsprop, adafactor, adam8bit, galore, muon, paged_adamw."),
    ] = None,
    engine: Annotated[
        str | None,
        typer.Option("--engine", "--profile", help="Whose constants: a framework's, or a name given to calibrate."),
    ] = None,
    layout: Annotated[str | None, typer.Option(help='Planned as given, such as "dp=8 zero=3 micro_batch=2".')] = None,
    network: Annotated[
        str | None, typer.Option(help='Of each node, if not the usual one: "8x 200 Gb/s RoCE, 2:1" oversubscribed.')
    ] = None,
    per_node: Annotated[int | None, typer.Option(min=1, help="Accelerators of a node, if not as usual.")] = None,
    ranks: Annotated[
        int | None, typer.Option(min=2, help="On this machine: so many processes, as torchrun starts them.")
    ] = None,
    emit: Annotated[
        str | None, typer.Option(help="Print options for torchtitan, megatron, deepspeed, accelerate or ironlaw.")
    ] = None,
    price_per_hour: Annotated[
        float | None, typer.Option(min=0.0001, max=1e6, help="US dollars per accelerator-hour.")
    ] = None,
    grid: Annotated[str | None, typer.Option(help="Power grid: world, france, us, ...")] = None,
    pue: Annotated[str | None, typer.Option(help="Data centre overhead: average, hyperscale, home or 1.2.")] = None,
    input_: Annotated[
        list[str] | None,
        typer.Option("--input", help="Of a traced module: tokens=8x2048:int64, or PACKAGE.MODULE:FUNCTION."),
    ] = None,
    serve: Annotated[
        str | None,
        typer.Option(metavar="REQUEST", help='Plan serving: "input=1024 output=256 rate=10/s ttft=0.5s tpot=40ms".'),
    ] = None,
    weights: Annotated[str | None, typer.Option(help="Of --serve: format of the weights, such as fp8, q4_k_m.")] = None,
    kv: Annotated[str | None, typer.Option(help="Of --serve: format of the cache, bf16, fp8 or int8.")] = None,
    real: Annotated[bool, typer.Option("--real", help="A traced module runs one step on real tensors.")] = False,
    why: Annotated[bool, typer.Option("--why", help="Show how every number was obtained.")] = False,
    json: Annotated[bool, typer.Option("--json", help="Print one JSON document.")] = False,
) -> None:
    from ironlaw.plan.request import plan_request, resolve
    from ironlaw.plan.request_types import Options, Prices

    runnable = None
    if ranks and serve is None:  # what the trainer would refuse is not planned
        from ironlaw.train.parallel.planning import runs

        runnable = runs
    options = Options(
        tokens, seq, global_batch, steps, precision, optimizer, engine, layout, emit,
        Prices(price_per_hour, grid, pue), inputs=tuple(input_ or ()), real=real, network=network, per_node=per_node,
        ranks=ranks, weights=weights, kv=kv, runnable=runnable,
    )  # fmt: skip
    if serve is None:
        _show(plan_request(what, on=on or "this", overrides=set_ or [], options=options), why, json)
        return
    if on == "this":
        raise UserError("--serve on this machine is measured, not planned: ironlaw serve RUN, then ironlaw bench URL")
    from ironlaw.plan.serving.answer import answer_serving

    _show(answer_serving(resolve(what, set_ or []).model, on, serve, options), why, json)


def _show(answer: PlanOutcome, why: bool, json: bool) -> None:
    more = answer.more
    if json:
        print_json(answer.to_json())
    elif "emit" in more and (answer.fits or "served" in more):
        # Options alone on stdout, so that they can be sent to a file; what belongs to them on stderr.
        if "cluster" in more:
            text = f"{more['layout']['text']} on {more['cluster']['text']}, engine {more['engine']['name']}"
            messages().print(text)
        for note in more["emit"]["notes"]:
            messages().print(note)
        print(more["emit"]["text"], end="")
    else:
        from ironlaw.report.cluster_view import plan_views

        show(*plan_views(answer, why))
    if not answer.fits:
        raise typer.Exit(1)
