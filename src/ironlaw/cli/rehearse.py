"""`ironlaw rehearse`"""

from __future__ import annotations

from typing import Annotated

import typer

from ironlaw import units
from ironlaw.errors import UserError
from ironlaw.report.console import messages, print_json, show


def rehearse(
    what: Annotated[str, typer.Argument(help="A config file or a catalogued model.")],
    on: Annotated[str, typer.Option("--on", help="A catalogued cluster, such as 64xh100-sxm-80gb.")],
    layout: Annotated[str | None, typer.Option(help='Such as "dp=8 tp=8"; else the best planned one.')] = None,
    json: Annotated[bool, typer.Option("--json", help="Print one JSON document.")] = False,
) -> None:
    from ironlaw.plan.request import plan_request, resolve
    from ironlaw.plan.request_types import Options
    from ironlaw.workload.layout import Layout

    # What is searched is what this trainer runs; a layout that is given, it refuses in its own words.
    options = Options(layout=layout, engine="ironlaw", emit=None if layout else "ironlaw", precision="bf16")
    model = resolve(what).model
    answer = plan_request(what, on=on, options=options)
    if "layout" not in answer.more:
        raise UserError(f"no layout of {what} fits on {on}: `ironlaw plan` shows what does not")
    chosen = Layout(**{key: value for key, value in answer.more["layout"].items() if key != "text"})
    from ironlaw.train.parallel.rehearse import as_json, at_scale, total_bytes
    from ironlaw.train.parallel.rehearse import rehearse as run

    messages().print(f"{chosen}: {chosen.accelerators} ranks, one of each pipeline stage runs")
    stages = run(model, chosen)
    work = answer.more["work"]
    real, peaks = at_scale(model, chosen, work["sequence"], work["global_batch"], answer.ledger.decisions)
    agrees = all(stage.agrees for stage in stages)
    if json:
        print_json(
            {
                "layout": str(chosen), "ranks": chosen.accelerators, "agrees": agrees,
                "peak_bytes": answer.ledger.totals["peak_bytes"].to_json(),
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
            }
        )  # fmt: skip
    else:
        from ironlaw.report.document import Document

        made = Document()
        made.heading(f"Rehearsal of {model.name}: {chosen}")
        made.table(
            ["stage", "rank", "rehearsed", "planned", "<", "one step at scale"],
            [[str(stage.position), str(stage.rank), units.bytes_(total_bytes(stage.found)),
              units.bytes_(total_bytes(stage.planned)), "equal" if stage.agrees else "DIFFERENT",
              "  ".join(f"{' '.join(key)} {units.bytes_(sent.bytes)}" for key, sent in full.items())]
             for stage, full in zip(stages, real, strict=True)],
        )  # fmt: skip
        rows = []
        for stage, full_peak in zip(stages, peaks, strict=True):
            largest = sorted(full_peak.components.items(), key=lambda item: -item[1])[:3]
            rows.append([
                str(stage.position), units.bytes_(stage.held_bytes), units.bytes_(stage.planned_bytes),
                f"{stage.planned_bytes / stage.held_bytes - 1:+.1%}", units.bytes_(full_peak.total),
                ", ".join(f"{name} {units.bytes_(size)}" for name, size in largest),
            ])  # fmt: skip
        made.table(["stage", "held here", "planned here", "", "at scale", "<of which"], rows)
        made.text("At scale: this trainer in bf16, weights and moments in fp32.")
        peak = answer.ledger.totals["peak_bytes"].value
        made.text(f"Planned peak of a rank by `ironlaw plan`: {units.bytes_(peak)}")
        show(made)
    if not agrees:
        raise typer.Exit(1)
