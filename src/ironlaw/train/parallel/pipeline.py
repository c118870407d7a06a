"""A pipeline of stages (arXiv 1811.06965, 2104.04473; zero-bubble 2401.10241) on `torch.distributed.pipelining`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.pipelining import PipelineStage
from torch.distributed.pipelining.schedules import (
    Schedule1F1B,
    ScheduleDualPipeV,
    ScheduleGPipe,
    ScheduleInterleaved1F1B,
    ScheduleInterleavedZeroBubble,
    ScheduleZBVZeroBubble,
)

from ironlaw.model.transformer import Transformer
from ironlaw.train.parallel.ranks import Ranks

SCHEDULES: dict[str, Any] = {
    "gpipe": ScheduleGPipe,
    "1f1b": Schedule1F1B,
    "interleaved": ScheduleInterleaved1F1B,
    "zero-bubble": ScheduleInterleavedZeroBubble,
    "zbv": ScheduleZBVZeroBubble,
    "dualpipev": ScheduleDualPipeV,
}
FOLDED = ("zbv", "dualpipev")
"""Schedules whose second chunks run back: the first rank has the first stage and the last."""


def stages_of(schedule: str, pp: int, virtual: int, rank: int) -> list[int]:
    """Stages of a pipeline rank, in order."""
    if schedule in FOLDED:
        return [rank, 2 * pp - 1 - rank]
    return [rank + pp * chunk for chunk in range(virtual)]


def rank_of_last(schedule: str, pp: int) -> int:
    return 0 if schedule in FOLDED else pp - 1


def layers_of(layers: int, stages: int, stage: int) -> range:
    """Equal parts, the first ones larger: what the planner assumes of `partition = "equal"`."""
    whole, rest = divmod(layers, stages)
    first = stage * whole + min(stage, rest)
    return range(first, first + whole + (stage < rest))


def cut(model: Transformer, stages: int, stage: int) -> Transformer:
    """The part of `model` that is one stage; parts keep their names, so that a checkpoint knows them."""
    part = Transformer.__new__(Transformer)
    nn.Module.__init__(part)
    part.config, part.place, part.dropout_seed = model.config, model.place, model.dropout_seed
    first, last = stage == 0, stage == stages - 1
    part.embedding = model.embedding if first else None
    part.positions = model.positions if first else None
    part.blocks = nn.ModuleList()
    for layer in layers_of(len(model.blocks), stages, stage):
        part.blocks.add_module(str(layer), model.blocks[layer])
    part.final_norm = model.final_norm if last else None
    part.head = model.head if last else None
    if last and stages > 1 and model.config.tied:
        # A copy, kept equal: both stages add up their gradients (`step.py`).
        part.head = nn.Linear(model.head.in_features, model.head.out_features, bias=False, device="meta")
        part.head.weight = nn.Parameter(model.head.weight.detach().clone())
    for name, buffer in model.named_buffers(recurse=False):
        part.register_buffer(name, buffer, persistent=False)
    return part


def build_schedule(
    parts: dict[int, nn.Module],
    ranks: Ranks,
    micro_batches: int,
    micro_batch: int,
    sequence: int,
    hidden: int,
    autocast: Callable[[], Any],
) -> Any:
    """The schedule over this rank's `parts` (stage number to module). Shapes are given, so none need be exchanged."""
    config = ranks.config
    stages = config.pp * config.virtual_stages
    here = sequence // config.cp
    tokens = torch.zeros(micro_batch, here, dtype=torch.long, device=ranks.device)
    stream_rows = here // (config.tp if config.sequence_parallel else 1)
    stream = torch.zeros(micro_batch, stream_rows, hidden, device=ranks.device, requires_grad=True)
    loss = torch.zeros(1, device=ranks.device, requires_grad=True)
    built = []
    for number, part in parts.items():
        built.append(
            PipelineStage(
                _under(part, autocast), number, stages, ranks.device,
                input_args=tokens if number == 0 else stream,
                output_args=loss if number == stages - 1 else stream,
                group=ranks.group("pp"),
            )
        )  # fmt: skip
    kind = SCHEDULES[config.schedule]
    single = config.schedule in ("gpipe", "1f1b")
    return kind(built[0] if single else built, micro_batches, loss_fn=_own_loss)


def _own_loss(output: Tensor, target: Tensor) -> Tensor:
    """The last stage has computed its loss itself, from the same targets."""
    return output.sum()


def _under(part: nn.Module, autocast: Callable[[], Any]) -> nn.Module:
    """The stage as the schedule calls it: targets reach the last one, and the loss leaves it with a dimension."""
    plain = part.forward

    def forward(x: Tensor, targets: Tensor | None = None, samples: Tensor | None = None) -> Tensor:
        with autocast():
            out: Tensor = plain(x, targets, samples)
        if out.dim() == 0:
            out = (out.full_tensor() if hasattr(out, "full_tensor") else out).reshape(1)
        return out

    part.forward = forward
    return part
