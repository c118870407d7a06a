"""Plans a job on its own ranks, and chooses a layout if none is given."""

from __future__ import annotations

import time
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist

from ironlaw.catalog.nodes import Cluster, node
from ironlaw.config import LayoutConfig, RunConfig
from ironlaw.cores import torchrun_integer
from ironlaw.errors import UserError
from ironlaw.ledger import Ledger
from ironlaw.machine.links import Link, RankCosts, RankFabric, load_costs, save_costs
from ironlaw.machine.measure_links import measure_links
from ironlaw.machine.profile import Profile
from ironlaw.plan.cluster.estimate import ClusterPlan, ClusterRequest, plan_cluster
from ironlaw.plan.cluster.search import search
from ironlaw.plan.engines.named import engine
from ironlaw.plan.layouts import LayoutChoice, best_layout, chosen
from ironlaw.plan.measured.accelerator import accelerator_of
from ironlaw.plan.measured.network import resized
from ironlaw.plan.recipe import batch_of, not_trained_here, recipe_of
from ironlaw.plan.step import StepPlan, plan_run, plan_step
from ironlaw.plan.totals import total_time
from ironlaw.train.parallel.ranks import Ranks, check
from ironlaw.workload.layout import Layout
from ironlaw.workload.sections import Recompute

SMALL_BYTES, LARGE_BYTES = 64, 2**19
ROUNDS = 5


def link_costs(profile: Profile) -> RankCosts:
    """Return the costs of communication between two ranks of this machine, measured once per machine."""
    try:
        costs = load_costs()
        if costs.machine == profile.machine:
            return costs
    except UserError:
        pass
    costs = measure_links(profile)
    save_costs(costs)
    return costs


def local_ranks(size: int) -> int:
    return min(size, torchrun_integer("LOCAL_WORLD_SIZE", size))


def plan_job(config: RunConfig, profile: Profile, ranks: Ranks) -> Ledger:
    """Plan the job, on every rank, as two on different hosts may have to time messages. The plan is made on rank 0."""
    size, local = ranks.size, local_ranks(ranks.size)
    if ranks.device.type != "cpu":
        return ranks.on_rank_0(lambda: plan_on_accelerators(config, profile, size, local).ledger)
    between = _between(local) if local < size else None
    return ranks.on_rank_0(
        lambda: plan_config(config, profile, size, RankFabric(link_costs(profile), local, between)).ledger
    )


def plan_on_accelerators(config: RunConfig, profile: Profile, size: int, per_host: int | None = None) -> ClusterPlan:
    """Plan a job on `size` catalogued accelerators, by the planner of clusters with the conventions of this trainer.

    `per_host` accelerators share a node; by default, as many as in their usual node. Decisions beside the layout are
    those of one process. UserError if the catalogue lacks the accelerator or the layout cannot run.
    """
    of_one = plan_run(config.model_copy(update={"recompute": Recompute()}), profile)
    layout = replace(check(config, size), recompute=config.recompute, offload=config.train.offload)
    cluster, assumed = _accelerators(profile, size, per_host)
    decided = of_one.decided
    recipe = recipe_of(config, decided.precision, cuda=True, gloo=False)
    asked = _step(config, cluster, decided.precision)
    plan = plan_cluster(replace(asked, recipe=(batch_of(config), recipe)), layout)
    plan.ledger.decisions = replace(decided, recompute=plan.ledger.decided.recompute)
    plan.ledger.facts |= of_one.facts | {"ranks": size, "assumed_accelerator": assumed or None}
    totals = plan.ledger.totals
    totals["resident_bytes"] = totals["peak_bytes"]  # in device memory
    totals["total_seconds"] = total_time(plan.ledger, config, totals["step_seconds"])
    return plan


def _accelerators(profile: Profile, size: int, per_host: int | None) -> tuple[Cluster, str]:
    """Return the job's cluster from the catalogue, and the assumption made to find it."""
    acc, assumed = accelerator_of(profile.name)
    usual = node(acc.default_node)
    return Cluster(acc, size, usual if per_host is None else resized(usual, per_host)), assumed


def _step(config: RunConfig, cluster: Cluster, precision: str) -> ClusterRequest:
    ours = engine("ironlaw")
    if config.communication.gradients == "bf16":
        ours = replace(ours, gradient_communication_bytes=2.0)
    batch = config.train.global_batch
    return ClusterRequest(config.model, cluster, config.sequence, batch, precision, ours, config.optimizer.name)


def plan_config(config: RunConfig, profile: Profile, size: int, fabric: RankFabric) -> StepPlan:
    """Plan the layout of a config on `size` ranks. Raises UserError if it cannot run on them."""
    return plan_step(config, profile, check(config, size), fabric, size)


def _between(local: int) -> Link | None:
    """Time messages between the first ranks of the first two hosts, over the job's own group. None on all others."""
    me = dist.get_rank()
    if me not in (0, local):
        return None
    seconds: dict[int, float] = {}
    for size in (SMALL_BYTES, LARGE_BYTES):
        buffer = torch.zeros(size // 4)
        times = []
        for _ in range(ROUNDS):
            began = time.perf_counter()
            for sends in (me == 0, me != 0):
                dist.send(buffer, local - me) if sends else dist.recv(buffer, local - me)
            times.append((time.perf_counter() - began) / 2)
        seconds[size] = min(times[1:])
    rate = (LARGE_BYTES - SMALL_BYTES) / max(1e-9, seconds[LARGE_BYTES] - seconds[SMALL_BYTES])
    return Link(seconds[SMALL_BYTES], rate)


def choose_layout(config: RunConfig, profile: Profile, size: int) -> LayoutChoice[StepPlan] | LayoutChoice[ClusterPlan]:
    """Return the layout planned to be fastest among those that fit and that this trainer can run on `size` ranks."""
    local = local_ranks(size)
    if profile.device == "cpu":
        fabric = RankFabric(link_costs(profile), local)
        return best_layout(config, profile, size, fabric, lambda layout: can_run(config, layout))
    cluster, _ = _accelerators(profile, size, local)
    wanted: dict[str, Any] = {"recompute": config.recompute, "offload": config.train.offload}

    def excluded(layout: Layout) -> str | None:
        if layout.recompute.mode != "none" and config.recompute.mode == "none":
            return "recompute.mode is none in the config"
        return not_trained_here(layout, config.model, config.train.precision, config.optimizer.name)

    kept = config.model_copy(update={"recompute": Recompute()})  # a memory budget applies to a rank, not to one process
    asked = _step(config, cluster, plan_run(kept, profile).decided.precision)
    fastest = (replace(one.layout, **wanted) for one in search(replace(asked, excluded=excluded), keep=50).best)
    return chosen(
        (layout for layout in fastest if can_run(config, layout)),
        # The memory of our trainer is planned layout by layout.
        lambda layout: plan_on_accelerators(with_layout(config, layout), profile, size, local), size,
        fastest_first=True,
    )  # fmt: skip


def can_run(config: RunConfig, layout: Layout) -> bool:
    """Whether this trainer can run `config` in this layout."""
    try:
        check(with_layout(config, layout), layout.accelerators)
    except UserError:
        return False
    return True


def with_layout(config: RunConfig, layout: Layout) -> RunConfig:
    """Return the config that trains in this layout, with its micro-batch."""
    words = {name: getattr(layout, name) for name in LayoutConfig.model_fields if hasattr(layout, name)}
    train = config.train.model_copy(update={"micro_batch": layout.micro_batch})
    return config.model_copy(update={"layout": LayoutConfig(**words), "train": train})
