"""The hardware for a training run within limits: the cheapest that meets a deadline, or the fastest for a rent.

    ironlaw plan llama3-8b --tokens 160B --within 7d                    # of all catalogued accelerators with a price
    ironlaw plan llama3-8b --tokens 160B --on h100-sxm-80gb --within 7d # how many of these
    ironlaw plan llama3-8b --tokens 160B --max-rent 20000

Numbers of accelerators are powers of two. Kinds that would cost too much at the most attainable speed are not planned,
nor, unless they are asked for, several nodes whose network nobody states.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

from ironlaw.catalog.accelerators import accelerator, accelerator_names
from ironlaw.catalog.nodes import Cluster, node
from ironlaw.errors import UserError
from ironlaw.plan.budget import hourly_rent
from ironlaw.plan.request_types import ANY, Limits, Options, PlanOutcome, RequestedModel, settle
from ironlaw.plan.requests.advice import MAX_ACCELERATORS, fastest
from ironlaw.plan.requests.cluster import plan_work, request_of, software_for, tried_in_turn
from ironlaw.plan.requests.hardware import has_count, parse_hardware
from ironlaw.plan.requests.replicas import adapter_config, adapters_target, plan_adapters

MAX_UTILISATION = 0.8
"""Share of the peak that no run passes: it rules out hardware before any layout is planned. Published runs reach 0.6 in
training, and no plan of a large random sample 0.75 (tests/plan/test_sanity.py)."""

MIN_SPEEDUP = 1.1
"""Doubling the accelerators that shortens a step by less than this factor ends the search on their kind."""

SUPERLINEAR = 1.3
"""More accelerators shorten a step by at most this factor over their number, as nothing is recomputed any more."""

MAX_HYBRID_GAIN = 0.1
"""Share of a step that hybrid sharding may save: it is tried where that much decides on the limits."""

MAX_MISSES = 4  # doublings in a row for which nothing fits, or no layout can be formed

SHOWN = 6  # kinds of hardware in the answer

Report = Callable[[float, str], None]


@dataclass(frozen=True)
class Offer:
    """A number of accelerators of one kind, and the fastest layout on them."""

    cluster: Cluster
    layout: str
    engine: str
    step_seconds: float
    seconds: float  # of the run
    usd_per_hour: float  # of one accelerator

    @property
    def rent_usd(self) -> float:
        return self.seconds / 3600 * self.cluster.count * self.usd_per_hour

    def to_json(self) -> dict[str, Any]:
        device = self.cluster.accelerator
        return {
            "accelerator": device.name, "product": device.product, "accelerators": self.cluster.count,
            "layout": self.layout, "engine": self.engine, "step_seconds": self.step_seconds,
            "total_seconds": self.seconds, "rent_usd": self.rent_usd, "usd_per_hour": self.usd_per_hour,
        }  # fmt: skip


class _Decoder:
    """A whole decoder to train: every layout is a candidate."""

    flops_each = 6  # per parameter and token: forward pass, gradients of inputs and of weights
    least_bytes = 6.0  # per parameter: 16-bit weights and gradients, and a 16-bit state

    def __init__(self, requested: RequestedModel, options: Options) -> None:
        self.requested, self.options = requested, options
        self.work = settle(requested.model, options, 1, requested.config)
        self.tokens = self.work.steps * self.work.global_batch * self.work.sequence
        self.most = MAX_ACCELERATORS

    def flops_per_second(self, kind: Cluster) -> float:
        """Returns the peak that products run at. Raises UserError for hardware that cannot be planned."""
        request = request_of(self.requested, kind, self.work, self.options)
        return request.system.hardware.peak(request.precision)

    def offer(self, cluster: Cluster, usd_per_hour: float, hybrid: bool = False) -> Offer | None:
        """Returns the fastest layout, if one fits; not those that offload, as no measured run backs their time."""
        request = request_of(self.requested, cluster, self.work, self.options)
        for name in tried_in_turn(software_for(self.options, cluster.accelerator)):
            found = fastest(replace(request, engine=name), hybrid)
            if found is not None and found.layout.offload == "none":
                step = found.step_seconds
                return Offer(cluster, str(found.layout), name, step, step * self.work.steps, usd_per_hour)
        return None

    def plan(self, cluster: Cluster) -> PlanOutcome:
        return plan_work(self.requested, cluster, self.work, self.options)


class _Adapters:
    """A model to fine-tune with adapters: replicas that share a batch."""

    flops_each = 4  # weights have no gradients
    least_bytes = 0.0  # the base may be in any number of bits

    def __init__(self, requested: RequestedModel, options: Options) -> None:
        self.requested, self.options = requested, options
        config, _ = adapter_config(requested, options, 1)
        self.most = self.batch = config.train.global_batch
        self.tokens = config.train.steps * config.tokens_per_step

    def flops_per_second(self, kind: Cluster) -> float:
        return adapters_target(kind, self.options).system.peak_flops_per_second

    def offer(self, cluster: Cluster, usd_per_hour: float, hybrid: bool = False) -> Offer | None:
        if self.batch % cluster.count:
            return None
        answer = plan_adapters(self.requested, cluster, replace(self.options, limits=Limits()))
        totals, layout = answer.ledger.totals, answer.ledger.facts["layout"]
        step, whole = totals["step_seconds"].value, totals["total_seconds"].value
        return Offer(cluster, layout, "ironlaw", step, whole, usd_per_hour) if answer.fits else None

    def plan(self, cluster: Cluster) -> PlanOutcome:
        return plan_adapters(self.requested, cluster, self.options)


def leaves_hardware_open(on: str, options: Options) -> bool:
    """Returns whether the kind or the number of accelerators is to be found."""
    return on == ANY or (bool(options.limits) and options.layout is None and not has_count(on))


def plan_within_limits(
    requested: RequestedModel, on: str, options: Options, report: Report = lambda share, what: None
) -> PlanOutcome:
    """Plans the run on the best hardware within the limits; the others that hold them stand beside. Raises UserError if
    none does."""
    limits, config = options.limits, requested.config
    if not limits:
        raise UserError("--on any looks for hardware within limits: add --within 7d or --max-rent 10000")
    adapts = config is not None and config.finetune.adapts
    run = (_Adapters if adapts else _Decoder)(requested, options)
    ruled_out: Counter[str] = Counter()
    found = _offers(run, _kinds(on, options), ruled_out, report)
    if len(found) > 1:  # those shown as their own plans have them
        shown = [run.offer(offer.cluster, offer.usd_per_hour, hybrid=True) or offer for offer in found[:SHOWN]]
        found = sorted([*shown, *found[SHOWN:]], key=lambda offer: _objective(offer, limits))
    for number, offer in enumerate(found):
        answer = run.plan(offer.cluster)
        if answer.fits or number == len(found) - 1:
            others = [other.to_json() for other in found if other is not offer][: SHOWN - 1]
            totals = answer.ledger.totals
            planned = replace(
                offer, layout=str(answer.layout or offer.layout), step_seconds=totals["step_seconds"].value,
                seconds=totals["total_seconds"].value,
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
        return [parse_hardware(on, options)[0]]
    if options.network is not None or options.per_node is not None:
        raise UserError("--network and --per-node are of given hardware: add --on h100-sxm-80gb")
    every = map(accelerator, accelerator_names())
    return [Cluster(one, 1, node(one.default_node)) for one in every if one.memory_bytes and one.peak_flops_per_second]


def _offers(run: _Decoder | _Adapters, kinds: list[Cluster], ruled_out: Counter[str], report: Report) -> list[Offer]:
    """Returns the best offer of each kind within the limits, best first. Kinds that cost more at the most attainable
    speed than what was found are not planned."""
    limits, asked, refusal = run.options.limits, list[tuple[float, float, float, Cluster]](), None
    model = run.requested.model
    for kind in kinds:
        rent = hourly_rent(kind.accelerator, run.options.prices.usd_per_hour, kind.node.name)
        if rent is None:
            ruled_out["without a known price"] += 1
            continue
        try:
            rate = run.flops_per_second(kind) * MAX_UTILISATION
        except UserError as error:
            refusal = error
            ruled_out["refused"] += 1
            continue
        alone = run.flops_each * (model.active_parameters - model.embedding_parameters) * run.tokens / rate
        asked.append((alone * rent["usd_per_hour"] / 3600, alone, rent["usd_per_hour"], kind))
    if refusal and not asked:
        raise refusal
    asked.sort(key=lambda entry: entry[0])
    found: list[Offer] = []
    for number, (least_usd, alone, usd_per_hour, kind) in enumerate(asked):
        report(number / len(asked), kind.accelerator.name)
        beaten = limits.seconds is not None and len(found) >= SHOWN and least_usd > found[SHOWN - 1].rent_usd
        if beaten or (limits.rent_usd is not None and least_usd > limits.rent_usd):
            ruled_out["dearer at any speed"] += 1
            continue
        most, of = run.most, kind.node
        if len(kinds) > 1 and not of.network_bytes_per_second:  # those of one node
            most = min(most, max(of.accelerators, of.scale_up_accelerators))
        best = _best(_numbers(run, kind, alone, usd_per_hour, most), limits)
        if best is None:
            ruled_out["too slow, too dear or too small"] += 1
            continue
        found.append(best)
        found.sort(key=lambda offer: _objective(offer, limits))
    report(1.0, "")
    return found


def _objective(offer: Offer, limits: Limits) -> float:
    """Returns what is to be as little as possible: rent where there is a deadline, else time."""
    return offer.rent_usd if limits.seconds is not None else offer.seconds


def _best(offers: Iterator[Offer], limits: Limits) -> Offer | None:
    """Returns the best offer of one kind. Rent falls with the first doublings, while memory is short, then it rises."""
    best: Offer | None = None
    before = math.inf
    for offer in offers:
        rises, before = offer.rent_usd >= before, offer.rent_usd
        if limits.allow(offer.seconds, offer.rent_usd) and (
            best is None or _objective(offer, limits) < _objective(best, limits)
        ):
            best = offer
        elif rises and (best is not None or not limits.allow(0.0, offer.rent_usd)):
            break
    return best


def _numbers(run: _Decoder | _Adapters, kind: Cluster, alone: float, usd_per_hour: float, most: int) -> Iterator[Offer]:
    """Yields the fastest layout on 1, 2, 4, ... to `most` accelerators, while doubling pays, from the number that holds
    the weights and could meet the deadline at the most attainable speed (`alone`: seconds on one)."""
    memory, limits = kind.accelerator.memory_bytes, run.options.limits
    deadline = limits.seconds or math.inf
    assert memory is not None
    least = max(1.0, alone / deadline, run.requested.model.parameters * run.least_bytes / memory.value)
    count, before, without = 2 ** math.ceil(math.log2(least)), math.inf, 0
    while count <= most and without < MAX_MISSES:
        offer = run.offer(replace(kind, count=count), usd_per_hour)
        if offer is None:
            count, without = 2 * count, without + 1
            continue
        left = 1 - MAX_HYBRID_GAIN
        if not limits.allow(offer.seconds, offer.rent_usd) and limits.allow(
            left * offer.seconds, left * offer.rent_usd
        ):
            offer = run.offer(replace(kind, count=count), usd_per_hour, hybrid=True) or offer
        if before / offer.step_seconds < MIN_SPEEDUP:
            return
        yield offer
        late = max(1.0, offer.seconds / deadline / SUPERLINEAR)  # the smaller numbers would be late, too
        count, before, without = count * 2 ** max(1, math.ceil(math.log2(late))), offer.step_seconds / late, 0
