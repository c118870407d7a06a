"""The hardware for a training run within limits: the cheapest that meets a deadline, or the fastest for a rent.

    ironlaw plan llama3-8b --tokens 160B --within 7d                    # of all catalogued accelerators with a price
    ironlaw plan llama3-8b --tokens 160B --on h100-sxm-80gb --within 7d # how many of these
    ironlaw plan llama3-8b --tokens 160B --max-rent 20000

Numbers of accelerators are powers of two. Kinds that would cost too much at the most attainable speed are not planned,
nor, unless they are asked for, several nodes whose network nobody states.
"""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

from ironlaw.catalog.accelerators import accelerator, accelerator_names
from ironlaw.catalog.nodes import Cluster, Node, node
from ironlaw.errors import UserError
from ironlaw.plan.budget import hourly_rent
from ironlaw.plan.cluster.estimate import ClusterRequest
from ironlaw.plan.engines.named import engine as engine_named
from ironlaw.plan.request_types import Limits, Options, PlanOutcome, RequestedModel, Work, settle
from ironlaw.plan.requests.advice import MOST_ACCELERATORS, fastest
from ironlaw.plan.requests.cluster import plan_work, request_of, software_for
from ironlaw.plan.requests.hardware import asked_hardware
from ironlaw.workload.layout import Layout

ANY = "any"
"""Stands for the hardware of a request that leaves it open."""

MOST_ATTAINED = 0.8
"""Share of the peak that no run passes: it rules out hardware before any layout is planned. Published runs reach 0.6 in
training, and no plan of a large random sample 0.75 (tests/plan/test_sanity.py)."""

TOO_LITTLE = 1.1
"""Doubling the accelerators that shortens a step by less than this factor ends the search on their kind."""

SHOWN = 6  # kinds of hardware in the answer

Say = Callable[[float, str], None]


@dataclass(frozen=True)
class Offer:
    """A number of accelerators of one kind, and the fastest layout on them."""

    request: ClusterRequest
    layout: Layout
    step_seconds: float
    usd_per_hour: float  # of one accelerator

    @property
    def seconds(self) -> float:
        return self.step_seconds * self.request.steps

    @property
    def rent_usd(self) -> float:
        return self.seconds / 3600 * self.request.cluster.count * self.usd_per_hour

    def to_json(self) -> dict[str, Any]:
        cluster = self.request.cluster
        return {
            "accelerator": cluster.accelerator.name, "product": cluster.accelerator.product,
            "accelerators": cluster.count, "layout": str(self.layout), "engine": self.request.engine,
            "step_seconds": self.step_seconds, "total_seconds": self.seconds, "rent_usd": self.rent_usd,
            "usd_per_hour": self.usd_per_hour,
        }  # fmt: skip


def leaves_hardware_open(on: str, options: Options) -> bool:
    """Returns whether the kind or the number of accelerators is to be found."""
    counted = re.match(r"\s*[\d_,.]+\s*[x*]", on) is not None
    return on == ANY or (bool(options.limits) and options.layout is None and not counted)


def plan_within_limits(
    requested: RequestedModel, on: str, options: Options, say: Say = lambda share, what: None
) -> PlanOutcome:
    """Plans the run on the best hardware within the limits; the others that hold them stand beside. Raises UserError if
    none does."""
    limits, config = options.limits, requested.config
    if not limits:
        raise UserError("--on any looks for hardware within limits: add --within 7d or --max-rent 10000")
    if config is not None and config.finetune.adapts:
        raise UserError("adapters are planned on given hardware: add --on 8xh100-sxm-80gb")
    work = settle(requested.model, options, 1, config)
    ruled_out: Counter[str] = Counter()
    found = _offers(requested, _kinds(on, options), work, options, ruled_out, say)
    for number, offer in enumerate(found):
        answer = plan_work(requested, offer.request.cluster, None, work, options, [])
        if answer.fits or number == len(found) - 1:
            others = [other.to_json() for other in found if other is not offer][: SHOWN - 1]
            planned = replace(
                offer, layout=answer.layout or offer.layout,
                step_seconds=answer.ledger.totals["step_seconds"].value,
            )  # fmt: skip
            answer.more["hardware"] = {
                "rows": [planned.to_json(), *others], "ruled_out": dict(ruled_out.most_common()),
                "sought": "cheapest" if limits.seconds is not None else "fastest",
            }  # fmt: skip
            return answer
    walls = ", ".join(f"{count} {wall}" for wall, count in ruled_out.most_common())
    raise UserError(f"no hardware trains this within the limits ({walls}): raise --within or --max-rent")


def _kinds(on: str, options: Options) -> list[Cluster]:
    """Returns one accelerator of each kind to be tried, in the node asked for."""
    if on != ANY:
        return [asked_hardware(on, options)[0]]
    if options.network is not None or options.per_node is not None:
        raise UserError("--network and --per-node are of given hardware: add --on h100-sxm-80gb")
    every = map(accelerator, accelerator_names())
    return [Cluster(one, 1, node(one.default_node)) for one in every if one.memory_bytes and one.peak_flops_per_second]


def _offers(
    requested: RequestedModel, kinds: list[Cluster], work: Work, options: Options, ruled_out: Counter[str], say: Say
) -> list[Offer]:
    """Returns the best offer of each kind within the limits, best first. Kinds that cost more at the most attainable
    speed than what was found are not planned."""
    limits, asked = options.limits, list[tuple[float, float, ClusterRequest]]()
    for kind in kinds:
        rent = hourly_rent(kind, options.prices)
        if rent is None:
            ruled_out["without a known price"] += 1
            continue
        try:
            request = request_of(requested, kind, None, work, options, [])
            rate = request.system.hardware.peak(request.precision) * MOST_ATTAINED
        except UserError:
            if len(kinds) == 1:
                raise
            ruled_out["without figures in the catalogue"] += 1
            continue
        tokens = work.steps * work.global_batch * work.sequence
        alone = 6 * (requested.model.active_parameters - requested.model.embedding_parameters) * tokens / rate
        asked.append((alone * rent["usd_per_hour"] / 3600, alone, request))
    asked.sort(key=lambda entry: entry[0])
    found: list[Offer] = []
    for number, (least_usd, alone, request) in enumerate(asked):
        say(number / len(asked), request.cluster.accelerator.name)
        rent = hourly_rent(request.cluster, options.prices)
        assert rent is not None
        beaten = limits.seconds is not None and len(found) >= SHOWN and least_usd > found[SHOWN - 1].rent_usd
        if beaten or (limits.rent_usd is not None and least_usd > limits.rent_usd):
            ruled_out["dearer at any speed"] += 1
            continue
        most = MOST_ACCELERATORS if len(kinds) == 1 else _joined(request.cluster.node)
        best = _best(_numbers(request, options, alone, rent["usd_per_hour"], most), limits)
        if best is None:
            ruled_out["too slow, too dear or too small"] += 1
            continue
        found.append(best)
        found.sort(key=lambda offer: _worth(offer, limits))
    say(1.0, "")
    return found


def _worth(offer: Offer, limits: Limits) -> float:
    """Returns what is to be as little as possible: rent where there is a deadline, else time."""
    return offer.rent_usd if limits.seconds is not None else offer.seconds


def _best(offers: Iterator[Offer], limits: Limits) -> Offer | None:
    """Returns the best offer of one kind. Rent falls with the first doublings, while memory is short, then it rises."""
    best: Offer | None = None
    before = math.inf
    for offer in offers:
        rises, before = offer.rent_usd >= before, offer.rent_usd
        if limits.allow(offer.seconds, offer.rent_usd) and (
            best is None or _worth(offer, limits) < _worth(best, limits)
        ):
            best = offer
        elif rises and (best is not None or not limits.allow(0.0, offer.rent_usd)):
            break
    return best


def _joined(of: Node) -> int:
    """Returns how many accelerators a search may join: those of one node where its network is not known."""
    return MOST_ACCELERATORS if of.network_bytes_per_second else max(of.accelerators, of.scale_up_accelerators)


def _numbers(
    request: ClusterRequest, options: Options, alone: float, usd_per_hour: float, most: int
) -> Iterator[Offer]:
    """Yields the fastest layout on 1, 2, 4, ... to `most` accelerators, from the number that could meet the deadline at
    the most attainable speed (`alone`: seconds on one), while doubling pays."""
    software = software_for(options.engine, None, request.cluster.accelerator)
    count, before = 1, None
    while options.limits.seconds is not None and alone / count > options.limits.seconds:
        count *= 2
    while count <= most:
        for one in software:
            engine = engine_named(one.value)
            there = replace(request, engine=engine.name, cluster=replace(request.cluster, count=count))
            if layout := fastest(there):
                offer = Offer(there, layout.layout, layout.step_seconds, usd_per_hour)
                if before is not None and before / offer.step_seconds < TOO_LITTLE:
                    return
                before = offer.step_seconds
                yield offer
                break
        count *= 2
