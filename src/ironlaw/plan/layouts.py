"""Choice of the fastest planned layout that fits and that the trainer supports; the answer to
`ironlaw plan CONFIG --ranks N`.

For CPU ranks, every layout that divides the job is planned: there are tens, not thousands. For accelerators, the search
in `plan/cluster` orders them, and they are planned in turn until one fits (`train/parallel/planning.py`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from itertools import product
from typing import TYPE_CHECKING, Any, Generic, TypeVar

from ironlaw import units
from ironlaw.config import LayoutConfig, RunConfig
from ironlaw.errors import UserError
from ironlaw.machine.links import RankFabric, load_costs
from ironlaw.machine.profile import Profile, load_profile
from ironlaw.plan.recipe import layout_of, micro_batch_of
from ironlaw.plan.request_types import Options, PlanOutcome
from ironlaw.plan.step import StepPlan, choose_precision, plan_step
from ironlaw.workload.layout import Layout, parse_layout
from ironlaw.workload.sizes import divisors

if TYPE_CHECKING:
    from ironlaw.plan.cluster.estimate import ClusterPlan


SIMPLER = 0.01
"""Of layouts within this fraction of the shortest step, the simplest is chosen: the plan's error is larger."""


Plan = TypeVar("Plan", bound="StepPlan | ClusterPlan")
"""A plan has the step time of the slowest rank and the peak bytes of the fullest rank."""


@dataclass(frozen=True)
class LayoutChoice(Generic[Plan]):
    """The plans that fit: the chosen one, then the others by step time."""

    plans: list[Plan]
    tried: int

    @property
    def best(self) -> Plan:
        return self.plans[0]

    @property
    def reason(self) -> str:
        """One line that explains the choice."""
        best = self.best
        seconds, held = units.seconds(best.step_seconds), units.bytes_(best.peak_bytes)
        words = f"{best.layout}: {seconds} per step planned, {held} per rank"
        if len(self.plans) < 2:
            return words
        other = next((p for p in self.plans[1:] if kinds(p.layout) != kinds(best.layout)), self.plans[1])
        following = f"next of another kind {other.layout}: {units.seconds(other.step_seconds)}"
        return f"{words}; best of {len(self.plans)} layouts that fit; {following}"


def kinds(layout: Layout) -> tuple[bool, ...]:
    return layout.dp > 1, layout.zero > 0, layout.tp > 1, layout.pp > 1, layout.cp > 1


def best_layout(
    config: RunConfig, profile: Profile, ranks: int, fabric: RankFabric, runnable: Callable[[Layout], bool]
) -> LayoutChoice[StepPlan]:
    """Plans all layouts of `ranks` ranks of this machine. Raises UserError if no layout can run or none fits."""
    precision = choose_precision(config, profile)
    asked: dict[str, int] = {"sequence": config.sequence, "global_batch": config.train.global_batch}
    possible = (
        layout for layout in candidates(config, ranks)
        if not layout.reason_invalid(config.model, **asked, accelerators=ranks) and runnable(layout)
    )  # fmt: skip
    return chosen(possible, lambda layout: plan_step(config, profile, layout, fabric, ranks, precision), ranks)


def chosen(
    layouts: Iterable[Layout], plan: Callable[[Layout], Plan], ranks: int, fastest_first: bool = False
) -> LayoutChoice[Plan]:
    """Plans `layouts` and chooses one that fits; `fastest_first`: the first that does. UserError if none fits."""
    found: list[Plan] = []
    for layout in layouts:
        found.append(plan(layout))
        if fastest_first and found[-1].fits:
            return LayoutChoice(found[-1:], len(found))
    if not found:
        raise UserError(
            f"no layout divides this model and batch over {ranks} ranks: use a train.global_batch that {ranks} divides"
        )
    fitting = sorted((plan for plan in found if plan.fits), key=lambda plan: plan.step_seconds)
    if not fitting:
        least = min(plan.peak_bytes for plan in found)
        raise UserError(
            f"no layout of {ranks} ranks fits this machine's memory: the smallest needs {units.bytes_(least)} a rank: "
            "lower train.micro_batch, recompute, or start fewer ranks per host"
        )
    close = [plan for plan in fitting if plan.step_seconds <= fitting[0].step_seconds * (1 + SIMPLER)]
    best = min(close, key=lambda plan: (sum(kinds(plan.layout)), plan.step_seconds))
    return LayoutChoice([best, *(plan for plan in fitting if plan is not best)], len(found))


def candidates(config: RunConfig, ranks: int) -> Iterator[Layout]:
    """Yields the layouts of `ranks`; each with several micro-batch sizes if the config leaves the size open."""
    batch = config.train.global_batch
    for tp, pp, cp in product(divisors(ranks), repeat=3):
        dp, rest = divmod(ranks, tp * pp * cp)
        if rest or batch % dp:
            continue
        ways = product(
            _micro_batches(config, batch // dp, pp), range(4 if dp * cp > 1 else 1), (False, True)[: min(tp, 2)],
            range(1, min(pp, 2) + 1),
        )  # fmt: skip
        for micro_batch, zero, sp, virtual in ways:
            yield Layout(dp=dp, zero=zero, tp=tp, sp=sp, pp=pp, virtual_stages=virtual, cp=cp, micro_batch=micro_batch)


def _micro_batches(config: RunConfig, share: int, pp: int) -> list[int]:
    if config.train.micro_batch is not None:
        return [min(config.train.micro_batch, share)]
    whole = max(1, share // pp)
    sizes = {share, *(size for size in (whole, whole // 2, whole // 4) if size)}
    return sorted(size for size in sizes if share % size == 0)


SHOWN = 8


def result_on_ranks(config: RunConfig, options: Options) -> PlanOutcome:
    """Plans the given or the best layout of `options.ranks` ranks. UserError if none divides or fits the job."""
    ranks = options.ranks or 1
    profile, fabric = load_profile(), RankFabric(load_costs())
    if options.layout or config.layout:
        layout = _given(config, options.layout, ranks)
        if options.runnable is not None and not options.runnable(config, layout):
            layout.check(
                config.model, sequence=config.sequence, global_batch=config.train.global_batch, accelerators=ranks
            )
            raise UserError(f"this trainer cannot run layout '{layout}' on {ranks} ranks: leave --layout out")
        plan = plan_step(config, profile, layout, fabric, ranks)
        return PlanOutcome(plan.ledger, plan.fits, {"layout": str(plan.layout), "candidates": [_candidate(plan)]})
    runnable = options.runnable

    def runs(layout: Layout) -> bool:
        return runnable is None or runnable(config, layout)

    choice = best_layout(config, profile, ranks, fabric, runs)
    more: dict[str, Any] = {
        "layout": str(choice.best.layout),
        "reason": choice.reason,
        "searched": choice.tried,
        "candidates": [_candidate(plan) for plan in choice.plans[:SHOWN]],
    }
    return PlanOutcome(choice.best.ledger, choice.best.fits, more)


def _given(config: RunConfig, text: str | None, ranks: int) -> Layout:
    """Returns the layout in `text`, else that of the config; replicas and micro-batch are derived if not given."""
    written = parse_layout(text) if text else layout_of(config.layout or LayoutConfig(), 1)
    others = written.tp * written.pp * written.cp
    dp_given = "dp=" in text if text else config.layout is not None and config.layout.dp is not None
    dp = written.dp if dp_given or ranks % others else ranks // others
    share = max(1, config.train.global_batch // dp)
    micro_batch = written.micro_batch if text and "micro_batch" in text else micro_batch_of(config, share, written.pp)
    return replace(written, dp=dp, micro_batch=micro_batch)


def _candidate(plan: StepPlan) -> dict[str, Any]:
    return {
        "layout": str(plan.layout), "step_seconds": plan.step_seconds, "peak_bytes": plan.peak_bytes,
        "exposed_communication_seconds": sum(t.exposed_seconds for s in plan.stages for t in s.communication)
        / len(plan.stages),
    }  # fmt: skip
