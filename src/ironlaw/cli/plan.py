"""`ironlaw plan` and `ironlaw rehearse`"""

from __future__ import annotations

from contextlib import nullcontext
from typing import TYPE_CHECKING, Annotated, Any

from typer import Argument, Exit, Option

from ironlaw import units
from ironlaw.cli.options import Json, Set
from ironlaw.errors import UserError
from ironlaw.report.console import answer, messages, print_json, progress, show

if TYPE_CHECKING:
    from ironlaw.report.document import Document


def plan(
    what: Annotated[
        str,
        Argument(
            metavar="CONFIG|MODEL", help="Config file, catalogued model, Hugging Face config, or PACKAGE.MODULE:CLASS."
        ),
    ],
    on: Annotated[
        str | None, Option(help="Hardware: this (unless given), 64xh100-sxm-80gb, 64xh100@p5-48xlarge.")
    ] = None,
    within: Annotated[
        str | None, Option(help="Time limit, such as 7d: find the cheapest hardware, or how many of --on NAME.")
    ] = None,
    max_rent: Annotated[
        float | None, Option(min=0.01, max=1e12, help="Rent of the run in US dollars, at most: find the fastest.")
    ] = None,
    set_: Set = None,
    tokens: Annotated[str | None, Option(help="Tokens to train on: 1T, 500B, 2e12.")] = None,
    steps: Annotated[int | None, Option(min=1, help="Optimizer steps, instead of --tokens.")] = None,
    seq: Annotated[int | None, Option(min=1, help="Tokens per sequence.")] = None,
    global_batch: Annotated[int | None, Option(min=1, help="Sequences per optimizer step.")] = None,
    precision: Annotated[
        str | None, Option(help="bf16, fp16, fp32, tf32, fp8, mxfp8 or nvfp4; on this machine fp32 or bf16.")
    ] = None,
    optimizer: Annotated[
        str | None,
        Option(
            help="adamw (unless given), adam, sgd, momentum, rmsprop, adafactor, adam8bit, galore, muon, paged_adamw "
            "or paged_adam8bit."
        ),
    ] = None,
    engine: Annotated[
        str | None,
        Option(
            "--engine", "--profile", help="Framework or server to plan for, or a profile made by `ironlaw calibrate`."
        ),
    ] = None,
    layout: Annotated[
        str | None, Option(help='Layout, such as "dp=8 zero=3 micro_batch=2"; the fastest unless given.')
    ] = None,
    network: Annotated[
        str | None,
        Option(help='Network of a node: "8x 200 Gb/s RoCE, 2:1" (oversubscribed); else the usual one.'),
    ] = None,
    per_node: Annotated[int | None, Option(min=1, help="Accelerators per node; as many as usual unless given.")] = None,
    ranks: Annotated[int | None, Option(min=2, help="Processes on this machine, as torchrun starts them.")] = None,
    emit: Annotated[
        str | None,
        Option(help="Print options of torchtitan, megatron, deepspeed, accelerate, or a server as vllm."),
    ] = None,
    price_per_hour: Annotated[
        float | None,
        Option(min=0.0001, max=1e6, help="Rent of an accelerator-hour in US dollars; else catalogued."),
    ] = None,
    grid: Annotated[str | None, Option(help="Power grid: world, france, us, ...")] = None,
    pue: Annotated[str | None, Option(help="Data centre overhead: average, hyperscale, home or 1.2.")] = None,
    input_: Annotated[
        list[str] | None,
        Option("--input", help="Input of a module: tokens=8x2048:int64, or PACKAGE.MODULE:FUNCTION."),
    ] = None,
    serve: Annotated[
        str | None,
        Option(metavar="REQUEST", help='Plan serving: "input=1024 output=256 rate=10/s ttft=0.5s tpot=40ms".'),
    ] = None,
    weights: Annotated[str | None, Option(help="With --serve: format of the weights, such as fp8 or q4_k_m.")] = None,
    kv: Annotated[str | None, Option(help="With --serve: format of cached keys and values: bf16, fp8 or int8.")] = None,
    real: Annotated[
        bool,
        Option("--real", help="Run one step of a module on real tensors, if its operations depend on values."),
    ] = False,
    why: Annotated[bool, Option("--why", help="Show how every number was obtained.")] = False,
    json: Json = False,
) -> None:
    from ironlaw.api import planned
    from ironlaw.plan.request_types import Limits, Options, Prices

    runnable, limits = None, Limits.of(within, max_rent)
    if ranks and serve is None:  # layouts that the trainer refuses are not planned
        from ironlaw.train.parallel.planning import can_run

        runnable = can_run
    options = Options(
        tokens, seq, global_batch, steps, precision, optimizer, engine, layout, emit,
        Prices(price_per_hour, grid, pue), limits, inputs=tuple(input_ or ()), real=real, network=network,
        per_node=per_node, ranks=ranks, weights=weights, kv=kv, runnable=runnable,
    )  # fmt: skip
    with progress("Planning") if limits and serve is None else nullcontext(lambda share, what: None) as report:
        answer = planned(what, on, set_ or [], serve, options, report)
    more = answer.more
    if json:
        print_json(answer.to_json())
    elif "emit" in more and (answer.fits or "served" in more):
        # Only the options go to stdout, so that they can be redirected to a file; notes go to stderr.
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
        raise Exit(1)


def rehearse(
    what: Annotated[str, Argument(help="A config file or a catalogued model.")],
    on: Annotated[str, Option("--on", help="A catalogued cluster, such as 64xh100-sxm-80gb.")],
    layout: Annotated[
        str | None, Option(help='Layout to rehearse, such as "dp=8 tp=8"; the best planned one unless given.')
    ] = None,
    json: Json = False,
) -> None:
    from ironlaw.plan.request import plan_request, resolve
    from ironlaw.plan.request_types import Options
    from ironlaw.workload.layout import Layout

    # The search is limited to layouts that this trainer runs; it refuses other given layouts itself.
    options = Options(layout=layout, engine="ironlaw", emit=None if layout else "ironlaw", precision="bf16")
    model = resolve(what).model
    plan = plan_request(what, on=on, options=options)
    if "layout" not in plan.more:
        raise UserError(f"no layout of {what} fits on {on}: `ironlaw plan` shows what does not")
    chosen = Layout(**{key: value for key, value in plan.more["layout"].items() if key != "text"})
    from ironlaw.train.parallel.rehearse import as_json, at_scale
    from ironlaw.train.parallel.rehearse import rehearse as run

    messages().print(f"{chosen}: {chosen.accelerators} ranks, one of each pipeline stage runs")
    stages = run(model, chosen)
    work = plan.more["work"]
    real, peaks = at_scale(model, chosen, work["sequence"], work["global_batch"], plan.ledger.decisions)
    agrees = all(stage.agrees for stage in stages)
    document = {
        "layout": str(chosen), "ranks": chosen.accelerators, "agrees": agrees,
        "peak_bytes": plan.ledger.totals["peak_bytes"].to_json(),
        "stages": [
            {
                "position": stage.position, "rank": stage.rank, "agrees": stage.agrees,
                "rehearsed": as_json(stage.found), "planned": as_json(stage.planned),
                "at_scale": as_json(table), "held_bytes": stage.held_bytes,
                "planned_held_bytes": stage.planned_bytes, "at_scale_held_bytes": peak.total,
                "at_scale_memory": peak.components,
            }
            for stage, table, peak in zip(stages, real, peaks, strict=True)
        ],
    }  # fmt: skip
    answer(json, document, lambda found: _view(model.name, found))
    if not agrees:
        raise Exit(1)


def _view(name: str, found: dict[str, Any]) -> Document:
    from ironlaw.report.document import Document

    def sent(table: dict[str, dict[str, int]]) -> str:
        return units.bytes_(sum(of["bytes"] for of in table.values()))

    view, traffic, memory = Document(), [], []
    view.heading(f"Rehearsal of {name}: {found['layout']}")
    for stage in found["stages"]:
        position, full = str(stage["position"]), stage["at_scale"].items()
        traffic.append([
            position, str(stage["rank"]), sent(stage["rehearsed"]), sent(stage["planned"]),
            "equal" if stage["agrees"] else "DIFFERENT",
            "  ".join(f"{key} {units.bytes_(of['bytes'])}" for key, of in full),
        ])  # fmt: skip
        held, planned = stage["held_bytes"], stage["planned_held_bytes"]
        largest = sorted(stage["at_scale_memory"].items(), key=lambda item: -item[1])[:3]
        memory.append([
            position, units.bytes_(held), units.bytes_(planned), f"{planned / held - 1:+.1%}",
            units.bytes_(stage["at_scale_held_bytes"]),
            ", ".join(f"{part} {units.bytes_(size)}" for part, size in largest),
        ])  # fmt: skip
    view.table(["stage", "rank", "rehearsed", "planned", "<", "<one step at scale"], traffic)
    view.table(["stage", "held here", "planned here", "", "at scale", "<of which"], memory)
    view.text("At scale: this trainer in bf16, weights and moments in fp32.")
    view.text(f"Planned peak of a rank by `ironlaw plan`: {units.bytes_(found['peak_bytes']['value'])}")
    return view
