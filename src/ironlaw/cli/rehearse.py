"""`ironlaw rehearse`"""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any

import typer

from ironlaw import units
from ironlaw.errors import UserError
from ironlaw.report.console import answer, messages

if TYPE_CHECKING:
    from ironlaw.report.document import Document


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
        raise typer.Exit(1)


def _view(name: str, found: dict[str, Any]) -> Document:
    from ironlaw.report.document import Document

    def sent(table: dict[str, dict[str, int]]) -> str:
        return units.bytes_(sum(of["bytes"] for of in table.values()))

    made, traffic, memory = Document(), [], []
    made.heading(f"Rehearsal of {name}: {found['layout']}")
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
    made.table(["stage", "rank", "rehearsed", "planned", "<", "one step at scale"], traffic)
    made.table(["stage", "held here", "planned here", "", "at scale", "<of which"], memory)
    made.text("At scale: this trainer in bf16, weights and moments in fp32.")
    made.text(f"Planned peak of a rank by `ironlaw plan`: {units.bytes_(found['peak_bytes']['value'])}")
    return made
