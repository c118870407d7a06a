"""The process group, the device mesh and what this rank is within the layout.

Ranks are placed tp, cp, dp, pp from the inside out, as the planner assumes: neighbours talk most.
"""

from __future__ import annotations

import datetime
import os
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from ironlaw.config import LayoutConfig, RunConfig
from ironlaw.errors import UserError
from ironlaw.plan.layout import Layout
from ironlaw.train.parallel import recorder
from ironlaw.train.parallel.meeting import Meeting, join

TIMEOUT_SECONDS = 360.0
"""Of PyTorch's own, should the watcher not have ended the job before."""


@dataclass(frozen=True)
class Ranks:
    """`mesh` has the dimensions pp, replicate, shard, tp; shard covers context parallel ranks too when state is sharded
    (`replicate` covers them when it is not). `context` is the mesh of this rank's sequence."""

    config: LayoutConfig
    rank: int
    size: int
    device: torch.device
    mesh: DeviceMesh
    context: DeviceMesh | None

    @property
    def dp(self) -> int:
        assert self.config.dp is not None
        return self.config.dp

    @property
    def first(self) -> bool:
        """Whether this rank writes files and speaks."""
        return self.rank == 0

    def index(self, dimension: str) -> int:
        """Coordinate along tp, cp, dp or pp."""
        c = self.config
        inner = {"tp": 1, "cp": c.tp, "dp": c.tp * c.cp, "pp": c.tp * c.cp * self.dp}[dimension]
        return self.rank // inner % getattr(c, dimension)

    def group(self, dimension: str) -> dist.ProcessGroup:
        return self.mesh.get_group(dimension)

    def size_of(self, dimension: str) -> int:
        names = self.mesh.mesh_dim_names
        assert names is not None
        return self.mesh.size(names.index(dimension))


def world_size() -> int:
    """Processes of this job, as torchrun says; 1 without it."""
    return int(os.environ.get("WORLD_SIZE", "1"))


def settled(config: LayoutConfig, size: int) -> LayoutConfig:
    """The layout with dp worked out for `size` ranks. UserError when it does not give that many."""
    others = config.tp * config.pp * config.cp
    if size % others or (config.dp or size // others) * others != size:
        dp = f"dp {config.dp} x " if config.dp else ""
        raise UserError(
            f"[layout] {dp}tp {config.tp} x pp {config.pp} x cp {config.cp} does not make {size} ranks: "
            f"start {(config.dp or 1) * others} (torchrun --nproc-per-node) or change the layout"
        )
    return config.model_copy(update={"dp": size // others})


def planned_layout(config: LayoutConfig, micro_batch: int) -> Layout:
    """The same in the planner's type."""
    return Layout(**config.model_dump() | {"dp": config.dp or 1}, micro_batch=micro_batch)


def check(config: RunConfig, size: int) -> LayoutConfig:
    """The settled layout of a run on `size` ranks. UserError for what cannot run, with what to write instead."""
    layout = settled(config.layout or LayoutConfig(), size)
    assert layout.dp is not None
    model, share = config.model, config.train.global_batch // layout.dp
    if config.train.global_batch % layout.dp:
        raise UserError(
            f"train.global_batch = {config.train.global_batch} sequences cannot be shared by dp = {layout.dp}: "
            f"use a multiple of {layout.dp}"
        )
    micro_batch = micro_batch_of(config, share)
    plan = planned_layout(layout, micro_batch)
    plan.check(model, sequence=config.sequence, global_batch=config.train.global_batch)
    if model.key_value_heads % layout.tp:
        raise UserError(f"layout.tp = {layout.tp}: this trainer does not copy {model.key_value_heads} key/value heads")
    if config.sequence % (2 * layout.cp) and layout.cp > 1:
        raise UserError(f"layout.cp = {layout.cp} needs sequences divisible by {2 * layout.cp}: two parts per rank")
    if layout.pp > 1 and share // micro_batch < layout.pp:
        raise UserError(
            f"{share // micro_batch} micro-batches do not fill {layout.pp} pipeline stages: lower train.micro_batch so "
            f"that each replica has at least {layout.pp}"
        )
    if size > 1 and (config.data.masks_documents or config.data.packing == "best_fit"):
        raise UserError(
            'this trainer does not mask documents or pad rows on several ranks yet: use data.packing = "concat"'
            " without a document mask"
        )
    if layout.ep > 1 or (model.moe is not None and size > 1):
        raise UserError("this trainer does not train a mixture of experts on several ranks yet: use one process")
    return layout


def micro_batch_of(config: RunConfig, share: int) -> int:
    """Sequences per forward pass of a replica that has `share` of them: train.micro_batch, or the largest divisor
    below it, so that a job that goes on with fewer ranks need not be configured anew."""
    return next(size for size in range(min(config.micro_batch, share), 0, -1) if share % size == 0)


def usable(config: RunConfig, size: int) -> int:
    """The most ranks, of `size`, that the layout and the batch can be divided among. UserError when there is none.

    For a restart on what is left of the ranks; dp must be free, because everything else is what the user wrote.
    """
    first: UserError | None = None
    for wanted in range(size, 0, -1):
        try:
            check(config, wanted)
        except UserError as problem:
            first = first or problem
            if config.layout is not None and config.layout.dp is not None:
                break
        else:
            return wanted
    assert first is not None
    raise first


def start(
    config: LayoutConfig, timeout_seconds: float = TIMEOUT_SECONDS, meeting: Meeting | None = None, size: int = 0
) -> Ranks:
    """Join the job that torchrun started (or the process group that is there) and lay out the mesh.

    `meeting`: the ranks have met already; the first `size` of them take part.
    """
    if not dist.is_initialized():
        cuda = torch.cuda.is_available()
        if cuda:
            torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", "0")))
        timeout = datetime.timedelta(seconds=timeout_seconds)
        recorder.switch_on()
        meeting = meeting or join(timeout_seconds)
        dist.init_process_group(
            "cpu:gloo,cuda:nccl" if cuda else "gloo", timeout=timeout, rank=meeting.rank,
            world_size=size or meeting.size, store=meeting.store,
        )  # fmt: skip
    backend = dist.get_backend()
    device = torch.device("cuda", torch.cuda.current_device()) if "nccl" in backend else torch.device("cpu")
    size = dist.get_world_size()
    config = settled(config, size)
    assert config.dp is not None
    sharded = config.zero > 0
    replicate = config.dp // (config.shard or config.dp) if sharded else config.dp * config.cp
    shard = (config.shard or config.dp) * config.cp if sharded else 1
    mesh = init_device_mesh(
        device.type, (config.pp, replicate, shard, config.tp), mesh_dim_names=("pp", "replicate", "shard", "tp")
    )
    context = None
    if config.cp > 1:
        shape = (config.pp * config.dp, config.cp, config.tp)
        context = init_device_mesh(device.type, shape, mesh_dim_names=("others", "cp", "tp"))["cp"]
    return Ranks(config, dist.get_rank(), size, device, mesh, context)
