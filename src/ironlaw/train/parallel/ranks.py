"""The process group, the device mesh and this rank's coordinates within the layout.

Ranks are ordered tp, cp, dp, pp from the inside out, as the planner assumes: neighbours communicate most.
"""

from __future__ import annotations

import datetime
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import lru_cache
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from ironlaw.config import LayoutConfig, RunConfig
from ironlaw.cores import torchrun_integer, usable_threads
from ironlaw.errors import UserError
from ironlaw.machine.profile import Profile
from ironlaw.plan.recipe import layout_of, micro_batch_of, not_trained_here
from ironlaw.schema import Refusals, refuse
from ironlaw.train.mesh import Mesh, Result
from ironlaw.train.noise_scale import first_part
from ironlaw.workload.layout import Layout
from ironlaw.workload.sharding import expert_dp


@dataclass(frozen=True, kw_only=True)
class Ranks(Mesh):
    """A mesh of many ranks. `mesh` has the dimensions pp, replicate, shard, tp; context-parallel ranks belong to shard
    if state is sharded, else to replicate. `context` is the mesh of ranks that share sequences. With several `sites`
    (equal groups of neighbouring ranks) `mesh` has `site` as first dimension. `experts` has pp, expert_replicate,
    expert_shard, ep, tp: dp and cp ranks by the experts they hold. `groups` are groups added by the model, by name.
    `writing`: a second group of all ranks, with which they `gather` in parallel with the training step."""

    mesh: DeviceMesh
    context: DeviceMesh | None = None
    experts: DeviceMesh | None = None
    groups: dict[str, dist.ProcessGroup] = field(default_factory=dict)
    writing: dist.ProcessGroup | None = None

    def index(self, dimension: str) -> int:
        """Return the coordinate along tp, cp, dp, pp or site; dp counts the replicas of all sites."""
        c, per_site, dp = self.layout, self.size // self.sites, self.layout.dp // self.sites
        site, rank = divmod(self.rank, per_site)
        if dimension == "site":
            return site
        inner = {"tp": 1, "cp": c.tp, "dp": c.tp * c.cp, "pp": c.tp * c.cp * dp}[dimension]
        here = rank // inner % (dp if dimension == "dp" else int(getattr(c, dimension)))
        return here + site * dp if dimension == "dp" else here

    def group(self, dimension: str) -> dist.ProcessGroup:
        return self.mesh.get_group(dimension)

    def size_of(self, dimension: str) -> int:
        return self.mesh[dimension].size()

    def process_groups(self) -> dict[str, dist.ProcessGroup]:
        """Return the groups that a step uses, by mesh dimension. The last, of all ranks, agrees on loss and norm."""
        names = ("replicate", "shard", "tp", "pp") + (("site",) if self.sites > 1 else ())
        groups = {name: self.group(name) for name in names} | self.groups
        if self.context is not None:
            groups["cp"] = self.context.get_group()
        assert dist.group.WORLD is not None
        return groups | {"world": dist.group.WORLD}

    # -- collectives -----------------------------------------------------------------------------------------

    def on_rank_0(self, function: Callable[[], Result]) -> Result:
        return on_rank_0(function)

    def gather(self, value: Any) -> list[Any]:
        values: list[Any] = [None] * self.size
        dist.all_gather_object(values, value, group=self.writing)
        return values

    def sum(self, values: list[float]) -> list[float]:
        total = torch.tensor(values, dtype=torch.float64, device=self.device)
        dist.all_reduce(total)
        return total.tolist()

    def barrier(self) -> None:
        dist.barrier()

    # -- resources -------------------------------------------------------------------------------------------

    def threads(self, profile: Profile) -> int:
        """Return the number of threads of a rank; ranks of one machine share its cores."""
        here = torchrun_integer("LOCAL_WORLD_SIZE")
        return min(usable_threads(), max(1, profile.threads // here))


def on_rank_0(function: Callable[[], Result]) -> Result:
    """Call `function` on rank 0. If it raises UserError, rank 0 does too, and the other ranks exit silently."""
    reply: list[Any] = [None, False]
    error: UserError | None = None
    if dist.get_rank() == 0:
        try:
            reply[0] = function()
        except UserError as problem:
            error, reply[1] = problem, True
    dist.broadcast_object_list(reply, group=_patient(dist.group.WORLD))
    if error is not None:
        raise error
    if reply[1]:
        raise SystemExit(2)
    return reply[0]


PATIENCE = datetime.timedelta(days=7)


@lru_cache(maxsize=1)
def _patient(world: dist.ProcessGroup) -> dist.ProcessGroup:
    """Return a group with a long timeout, since rank 0 may prepare data for hours. If it dies, all notice at once."""
    return dist.new_group(backend="gloo", timeout=PATIENCE)


def with_dp(config: LayoutConfig, size: int) -> LayoutConfig:
    """Return the layout with dp computed for `size` ranks. Raises UserError if it needs another number of ranks."""
    others = config.tp * config.pp * config.cp
    if size % others or (config.dp or size // others) * others != size:
        dp = f"dp {config.dp} x " if config.dp else ""
        wanted = config.dp * others if config.dp else f"a multiple of {others}"
        raise UserError(
            f"[layout] {dp}tp {config.tp} x pp {config.pp} x cp {config.cp} does not make {size} ranks: "
            f"start {wanted} (torchrun --nproc-per-node) or change the layout"
        )
    return config.model_copy(update={"dp": size // others})


def sites_of(config: RunConfig, layout: Layout) -> int:
    """Return the number of groups of ranks that average weights at intervals, not gradients; 1 without local steps."""
    communication = config.communication
    return (communication.sites or layout.dp) if communication.local_steps else 1


def check(config: RunConfig, size: int) -> Layout:
    """Return the settled layout of a run on `size` ranks. Raises UserError, with a correction, if it cannot run."""
    given = with_dp(config.layout or LayoutConfig(), size)
    config, layout = config.in_layout(given), layout_of(given, 1)
    refuse(_of_ranks(config, layout))
    layout = replace(layout, micro_batch=micro_batch_of(config, config.train.global_batch // layout.dp))
    if config.train.noise_scale_every and size > 1:
        first_part(config, layout)
    plan = replace(layout, recompute=config.recompute, offload=config.train.offload)
    plan.check(config.model, sequence=config.sequence, global_batch=config.train.global_batch)
    if reason := not_trained_here(plan, config.model, config.train.precision, config.optimizer.name):
        raise UserError(reason)
    return layout


def _of_ranks(config: RunConfig, layout: Layout) -> Refusals:
    """Yield what a settled layout, of as many ranks as there are, excludes."""
    communication, batch, dp = config.communication, config.train.global_batch, layout.dp
    sites = sites_of(config, layout)
    yield from (
        (batch % dp,
         f"train.global_batch = {batch} sequences cannot be shared by dp = {dp}: use a multiple of {dp}"),
        (communication.local_steps and (dp % sites or sites == 1),
         f"communication.local_steps needs at least two sites, and dp = {dp} replicas to be shared out equally among "
         f"{sites}: change communication.sites or layout.dp"),
        (layout.zero and layout.shard and dp // sites % layout.shard,
         f"layout.shard = {layout.shard} replicas do not lie within a site of {dp // sites}: use a divisor"),
        (communication.gradients == "powersgd" and (layout.zero or layout.tp * layout.pp > 1),
         'communication.gradients = "powersgd" needs whole gradients on every rank: use dp alone with layout.zero = 0, '
         'or "bf16"'),
        (config.finetune.method == "qlora" and layout.zero == 3 and torch.__version__ < "2.12",
         f"PyTorch {torch.__version__} divides no codes of 8 bits: use PyTorch 2.12, or layout.zero = 2 with "
         'finetune.method = "qlora"'),
        (layout.cp > 1 and config.sequence % (2 * layout.cp),
         f"layout.cp = {layout.cp} needs sequences divisible by {2 * layout.cp}: two parts per rank"),
    )  # fmt: skip
    share, moe, given = batch // dp, config.model.moe, config.micro_batch
    micro_batches = share // micro_batch_of(config, share)
    counted = moe and (moe.capacity_factor is not None or (moe.balance == "loss" and moe.balance_loss))
    named = f"a micro-batch of {given} sequences, of which experts' load is counted,"
    yield from (
        (layout.pp > 1 and micro_batches < layout.pp,
         f"{micro_batches} micro-batches do not fill {layout.pp} pipeline stages: lower train.micro_batch so that each "
         f"replica has at least {layout.pp}"),
        (counted and given > share and (given % share or batch % given),
         f"{named} is not a whole number of replicas of {share}: use train.micro_batch = {share}"),
        (counted and given < share and share % given,
         f"{named} does not divide the {share} of a replica: use train.micro_batch = {share}"),
        (moe and communication.local_steps,
         "communication.local_steps does not train a mixture of experts: use gradients of every step"),
    )  # fmt: skip


def replicas_per_micro_batch(config: RunConfig, dp: int) -> int:
    """Return how many replicas share a micro-batch of the config: more than one if each has fewer sequences."""
    return max(1, config.micro_batch // (config.train.global_batch // dp))


def usable(config: RunConfig, size: int) -> int:
    """Return the largest number of ranks up to `size` that layout and batch permit. UserError if there is none.

    Used to restart on the ranks that are left. dp must be free, because everything that the user wrote is kept.
    """
    free = config.layout is None or config.layout.dp is None
    for fewer in range(size, 0, -1) if free else ():
        with suppress(UserError):
            check(config, fewer)
            return fewer
    check(config, size)  # says what stands against all of them
    return size


def create_mesh(layout: Layout, sites: int = 1) -> Ranks:
    """Create the mesh of the process group's ranks."""
    backend = dist.get_backend()
    device = torch.device("cuda", torch.cuda.current_device()) if "nccl" in backend else torch.device("cpu")
    sharded, dp = layout.zero > 0, layout.dp // sites
    replicate = dp // (layout.shard or dp) if sharded else dp * layout.cp
    shard = (layout.shard or dp) * layout.cp if sharded else 1
    shape: tuple[int, ...] = (layout.pp, replicate, shard, layout.tp)
    names: tuple[str, ...] = ("pp", "replicate", "shard", "tp")
    if sites > 1:
        shape, names = (sites, *shape), ("site", *names)
    mesh = init_device_mesh(device.type, shape, mesh_dim_names=names)
    context = None
    if layout.cp > 1:
        shape = (layout.pp * layout.dp, layout.cp, layout.tp)
        context = init_device_mesh(device.type, shape, mesh_dim_names=("others", "cp", "tp"))["cp"]
    experts = None
    if layout.ep > 1:
        sharing = expert_dp(layout.dp, layout.cp, layout.ep)
        copies = (1, sharing) if sharded else (sharing, 1)
        of_experts = ("pp", "expert_replicate", "expert_shard", "ep", "tp")
        experts = init_device_mesh(device.type, (layout.pp, *copies, layout.ep, layout.tp), mesh_dim_names=of_experts)
    return Ranks(
        device=device, rank=dist.get_rank(), size=dist.get_world_size(), layout=layout, sites=sites, mesh=mesh,
        context=context, experts=experts,
    )  # fmt: skip
