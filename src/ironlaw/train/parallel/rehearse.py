"""Rehearses a layout before any hardware is rented: its ranks, meshes, schedule and collectives, at tiny shapes.

    stages = rehearse(model, layout)
    stages[0].found == stages[0].planned

One rank of every pipeline stage runs the trainer's own step three times, in a separate process and in a process group
of the layout's size that simulates the absent ranks (PyTorch's `fake` backend: nothing is sent, received values are
meaningless, and absent routers choose as those present). The calls of each rank are counted and compared with the plan
for the same shapes. This tests structure and traffic, but neither numbers nor time; the numbers of small layouts are
tested in `tests/train/parallel`.
"""

from __future__ import annotations

import math
import multiprocessing
import warnings
from contextlib import nullcontext
from dataclasses import dataclass, replace
from types import SimpleNamespace
from typing import Any

from ironlaw.config import LayoutConfig, RunConfig, build_config
from ironlaw.cores import usable_cores
from ironlaw.errors import UserError
from ironlaw.ledger import Decisions
from ironlaw.model.config import ModelConfig
from ironlaw.model.dimensions import MoEConfig
from ironlaw.plan.memory import Peak, peak_memory
from ironlaw.plan.recipe import batch_of, recipe_of, recipe_of_layout
from ironlaw.workload.collectives import Table, aliases_of, table_of
from ironlaw.workload.layout import Layout
from ironlaw.workload.program import step as planned_step
from ironlaw.workload.schedule import V_SHAPED
from ironlaw.workload.sharding import expert_dp, shards_hidden

STEPS = 3  # DDP rebuilds its buckets in the second
HEAD_SIZE = 4


@dataclass(frozen=True)
class RehearsedStage:
    """Rank `rank` of pipeline position `position`: the collectives of its last step and those of the plan, and its
    peak bytes of tensors, measured and planned.
    """

    position: int
    rank: int
    found: Table
    planned: Table
    held_bytes: int
    planned_bytes: float

    @property
    def agrees(self) -> bool:
        return {key: sent.bytes for key, sent in self.found.items()} == {
            key: sent.bytes for key, sent in self.planned.items()
        }


def tiny_config(model: ModelConfig, layout: Layout) -> RunConfig:
    """Return a config with the same kinds of parts, layers and divisions, each as small as the layout permits."""
    if layout.expert_tp != layout.tp:
        raise UserError(f"etp = {layout.etp}: this trainer splits an expert over all tp ranks: give a --layout without")
    if model.key_value_heads % layout.tp:
        raise UserError(f"tp = {layout.tp}: this trainer does not copy {model.key_value_heads} key/value heads")
    groups = min(2, model.heads // model.key_value_heads)
    heads = layout.tp * groups
    document = model.model_dump(mode="json", exclude_none=True) | {
        "name": "rehearsal", "hidden": math.lcm(heads * HEAD_SIZE, _expert_shards(model, layout)), "heads": heads,
        "kv_heads": layout.tp,
        "head_size": HEAD_SIZE, "ffn": 2 * layout.tp, "vocab": 8 * layout.tp,
        "context": 2 * layout.cp * layout.tp, "dropout": 0.0,
    }  # fmt: skip
    if model.moe is not None:
        document["moe"] = _few_experts(model.moe, layout)
    if model.latent is not None:  # its heads have sizes of their own, which are kept small
        del document["kv_heads"], document["head_size"]
        small = {"key_value_rank": 4, "plain_size": 4, "rotary_size": 2, "value_size": 4}
        document["latent"] = small | ({"query_rank": 4} if model.latent.query_rank else {})
    windows = ("sliding_window", "full_every", "full_offset", "full_first", "rope_theta_local")
    for key in (*windows, "rope_scaling", "rotary_size"):
        document.pop(key, None)
    # The fewest that fill the pipeline; V-shaped schedules need twice as many.
    micro_batches = 2 if layout.pp == 1 else layout.pp * (2 if layout.schedule in V_SHAPED else 1)
    wanted = {name: getattr(layout, name) for name in LayoutConfig.model_fields}
    return build_config(
        {
            "model": document,
            "train": {"global_batch": layout.dp * micro_batches, "micro_batch": 1, "precision": "fp32"},
            "layout": wanted,
            "checkpoint": {"every": 0},  # copies of checkpoints would count as held memory
        }
    )


def _expert_shards(model: ModelConfig, layout: Layout) -> int:
    """Return the number of ranks that shard the same experts by the hidden size, or 1."""
    if not layout.zero:
        return 1
    if layout.ep > 1:
        return expert_dp(layout.dp, layout.cp, layout.ep)
    return layout.sharing if shards_hidden(model, layout.ep, layout.sharing) else 1


def _few_experts(moe: MoEConfig, layout: Layout) -> dict[str, Any]:
    """Return a table with the fewest experts that the ep ranks can share and a token can choose from."""
    fewest = max(2, moe.experts_per_token)
    few = {"experts": math.ceil(fewest / layout.ep) * layout.ep, "expert_ffn": 2 * layout.tp, "groups": 1}
    if moe.shared_experts:
        few["shared_ffn"] = 2 * layout.tp
    return moe.model_dump(mode="json", exclude_none=True, exclude={"groups_per_token"}) | few


def rehearse(model: ModelConfig, layout: Layout) -> list[RehearsedStage]:
    """Rehearse one rank of every pipeline position, two at a time. UserError if the trainer cannot run the layout."""
    config = tiny_config(model, layout)
    from ironlaw.train.parallel.ranks import check

    check(config, layout.accelerators)
    per_position = layout.accelerators // layout.pp
    arguments = [(config.model_dump(mode="json", exclude_none=True), p, p * per_position) for p in range(layout.pp)]
    # Workers fork from a process that has only loaded PyTorch. Each runs a single rank, because groups are cached.
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["ironlaw.train.parallel.step", "torch.testing._internal.distributed.fake_pg"])
    workers = max(1, min(2, usable_cores()))
    with context.Pool(workers, maxtasksperchild=1) as pool:
        return pool.map(_rank, arguments, chunksize=1)


def _rank(arguments: tuple[dict[str, Any], int, int]) -> RehearsedStage:
    import torch
    import torch.distributed as dist
    from torch import Tensor
    from torch.testing._internal.distributed.fake_pg import FakeStore

    from ironlaw.data.batch import Batch
    from ironlaw.ledger import Decisions
    from ironlaw.observe.profile import Recorded, recording, silent_stderr
    from ironlaw.train.parallel.communication import counted
    from ironlaw.train.parallel.ranks import check, create_mesh
    from ironlaw.train.parallel.step import LayoutStep

    document, position, rank = arguments
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    config = build_config(document)
    assert config.layout is not None
    layout = check(config, config.layout.ranks)
    dist.init_process_group("fake", rank=rank, world_size=layout.accelerators, store=FakeStore())
    # Stages vote on whether to exchange shapes; the absent ones agree.
    dist.recv = lambda tensor, *rest, **named: tensor.fill_(1)
    gather: Any = dist.all_gather_into_tensor

    def all_gather(out: Tensor, mine: Tensor, *rest: Any, **named: Any) -> Any:
        work = gather(out, mine, *rest, **named)
        if out.dtype is torch.int64:  # chosen experts: absent ranks choose as this one
            out.view(-1, *mine.shape).copy_(mine)
        return work

    dist.all_gather_into_tensor = all_gather  # type: ignore[assignment]
    all_reduce: Any = dist.all_reduce

    def reduced(tensor: Tensor, *rest: Any, **named: Any) -> Any:
        work = all_reduce(tensor, *rest, **named)
        if work is None:
            return None
        done: torch.futures.Future[list[Tensor]] = torch.futures.Future()
        done.set_result([tensor])
        # The future of fake work has no value, but DDP's hook reads it.
        return SimpleNamespace(wait=work.wait, get_future=lambda: done)

    dist.all_reduce = reduced
    ranks = create_mesh(layout)
    dist.new_group = lambda **named: dist.group.WORLD  # only for checkpoints, which are not written
    step = LayoutStep(config, Decisions("fp32"), ranks)
    tokens = torch.zeros(step.share, config.sequence, dtype=torch.long)
    recorded = Recorded()
    for number in range(STEPS):
        last = number == STEPS - 1
        persistent = step.persistent_bytes()
        with silent_stderr(), recording() if last else nullcontext(recorded) as recorded, counted(ranks) as found:
            step.update(step.forward_backward(Batch(tokens, tokens), number), number)
    held = persistent + recorded.peak_bytes()
    program = planned_step(config.model, batch_of(config), layout, recipe_of(config, "fp32", gloo=False))
    aliases = aliases_of(config.model, layout, batch_of(config), program.recipe)
    planned = table_of(program.collectives[position], aliases)
    peak = peak_memory(program, position)
    return RehearsedStage(position, rank, found.table, planned, held, peak.total)


def at_scale(
    model: ModelConfig, layout: Layout, sequence: int, global_batch: int, decided: Decisions | None = None
) -> tuple[list[Table], list[Peak]]:  # fmt: skip
    """Return the traffic and the peak memory of this trainer for the whole model in bf16, per pipeline position.

    `decided`: decisions of the plan for this layout.
    """
    batch, recipe = recipe_of_layout(model, layout, sequence, global_batch, "bf16", "adamw")
    if decided is not None:
        recipe = replace(recipe, recompute=decided.recompute)
    program = planned_step(model, batch, layout, recipe)
    peaks = [peak_memory(program, position) for position in range(layout.pp)]
    return [table_of(sent) for sent in program.collectives], peaks


def as_json(table: Table) -> dict[str, dict[str, int]]:
    return {" ".join(key): {"count": sent.count, "bytes": sent.bytes} for key, sent in sorted(table.items())}
