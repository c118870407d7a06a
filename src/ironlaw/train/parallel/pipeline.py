"""Pipeline parallelism (arXiv 1811.06965, 2104.04473; zero-bubble 2401.10241) on `torch.distributed.pipelining`."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ContextDecorator
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.pipelining import PipelineStage, schedules

from ironlaw.config import RunConfig
from ironlaw.ledger import Phase
from ironlaw.model.linear import Linear
from ironlaw.model.transformer import Transformer
from ironlaw.train.parallel.ranks import Ranks
from ironlaw.workload.schedule import CLASSES, layers_of


def cut_stage(model: Transformer, stages: int, virtual: int, stage: int) -> Transformer:
    """Return one stage of `model`. Its parts keep their names, under which checkpoints hold them."""
    part = _empty(model)
    part.partition, part.dropout_seed, part.loss_chunk = model.partition, model.dropout_seed, model.loss_chunk
    for name in ("embedding", "positions", "embedding_norm"):
        setattr(part, name, getattr(model, name) if stage == 0 else None)
    part.blocks = nn.ModuleList()
    for layer in layers_of(len(model.blocks), stages, virtual)[stage]:
        part.blocks.add_module(str(layer), model.blocks[layer])
    for name in ("final_norm", "head"):
        setattr(part, name, getattr(model, name) if stage == stages - 1 else None)
    if stage == stages - 1 and stages > 1 and model.config.tied:
        # A copy, kept equal by summing the gradients of both stages (`step.py`).
        weight = model.head.weight
        part.head = Linear(weight.shape[1], weight.shape[0], bias=False, device="meta")
        part.head.weight = nn.Parameter(weight.detach().clone(), requires_grad=weight.requires_grad)
        part.head.bias = model.head.bias
    for name, buffer in model.named_buffers(recurse=False):
        part.register_buffer(name, buffer, persistent=False)
    return part


def _empty(model: Transformer) -> Transformer:
    """Return a model of the same config without any parts."""
    part = Transformer.__new__(Transformer)
    nn.Module.__init__(part)
    part.config = model.config
    return part


def join_stages(parts: dict[int, Transformer]) -> Transformer:
    """Return one module with all stages of this rank, under their own names, for the optimizer and checkpoints."""
    if len(parts) == 1:
        return next(iter(parts.values()))
    model = _empty(next(iter(parts.values())))
    for name in ("embedding", "positions", "embedding_norm", "final_norm", "head"):
        setattr(model, name, next((found for p in parts.values() if (found := getattr(p, name)) is not None), None))
    model.blocks = nn.ModuleList()  # after the embedding, as modules are in order of their assignment
    for part in parts.values():
        for name, block in part.blocks.named_children():
            model.blocks.add_module(name, block)
    return model


def build_schedule(
    parts: dict[int, nn.Module], ranks: Ranks, config: RunConfig, micro_batches: int,
    phase: Callable[[Phase], ContextDecorator],
) -> Any:  # fmt: skip
    """Return the schedule over this rank's `parts` (stage number to module). Shapes are given, so none are exchanged.

    `phase` is the context of every pass.
    """
    layout, device = ranks.layout, ranks.device
    stages = layout.pp * layout.virtual_stages
    here = config.sequence // layout.cp
    tokens = torch.zeros(layout.micro_batch, here, dtype=torch.long, device=device)
    stream_shape = layout.micro_batch, here // (layout.tp if layout.sp else 1), config.model.hidden
    stream = torch.zeros(stream_shape, device=device, requires_grad=True)
    loss = torch.zeros(1, device=device, requires_grad=True)
    built = [
        PipelineStage(
            part, number, stages, device, group=ranks.group("pp"),
            input_args=tokens if number == 0 else stream, output_args=loss if number == stages - 1 else stream,
        )
        for number, part in parts.items()
    ]  # fmt: skip
    for stage in built:
        for name, which in PASSES.items():
            setattr(stage, name, phase(which)(getattr(stage, name)))
    single = layout.schedule in ("gpipe", "1f1b") and layout.virtual_stages == 1
    kind = getattr(schedules, "Schedule1F1B" if single and layout.schedule == "1f1b" else CLASSES[layout.schedule])
    # The last stage computes the loss, from the same targets, divided by the number of micro-batches as without a
    # pipeline: gradients need no scaling.
    last = lambda output, target: output.sum()  # noqa: E731
    return kind(built[0] if single else built, micro_batches, loss_fn=last, scale_grads=False)


PASSES = {
    "forward_one_chunk": Phase.FORWARD,
    "backward_one_chunk": Phase.BACKWARD,
    "backward_weight_one_chunk": Phase.BACKWARD,
}


def adapt_to_schedule(part: Transformer, autocast: Callable[[], Any]) -> None:
    """Adapt a stage to a schedule's calls: the last one receives targets, and returns the loss with a dimension."""
    plain = part.forward

    def forward(x: Tensor, targets: Tensor | None = None, **named: Any) -> Tensor:
        with autocast():
            out: Tensor = plain(x, targets, **named)
        if out.dim() == 0:
            out = (out.full_tensor() if hasattr(out, "full_tensor") else out).reshape(1) * part.loss_factor
        return out

    part.forward = forward  # type: ignore[method-assign, assignment]


def message_buffers(schedule: Any) -> Iterator[Tensor]:
    """Yield the buffers into which stages receive, one per micro-batch. Nothing is received from a stage on the same
    rank: its tensors are used directly, those of the last step until new ones replace them.
    """
    if schedule is None:
        return
    stages = getattr(schedule, "_stages", None) or [schedule._stage]
    here = {stage.stage_index for stage in stages}
    for stage in stages:
        others = ((stage.args_recv_info, stage.stage_index - 1), (stage.grad_recv_info, stage.stage_index + 1))
        for infos in (infos for infos, other in others if other not in here):
            for info in infos.values():
                for one in info:
                    buffer = getattr(one, "buffer", None)
                    if isinstance(buffer, Tensor) and buffer.device.type != "meta":
                        yield buffer
