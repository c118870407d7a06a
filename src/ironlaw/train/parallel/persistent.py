"""Bytes of tensors a rank holds between steps beside weights and optimizer state: buckets, what plug-ins
keep, message buffers."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from torch import Tensor
from torch.nn.parallel import DistributedDataParallel

from ironlaw.observe.measured import tree_bytes
from ironlaw.train.parallel.applied import Applied
from ironlaw.train.parallel.plugin import StepPlugin


def beside_weights(applied: Applied, schedule: Any, plugins: Sequence[StepPlugin]) -> int:
    """Before a step, when there are no gradients."""
    total = tree_bytes([plugin.held() for plugin in plugins])
    for part in applied.parts.values():
        if isinstance(part, DistributedDataParallel):  # gradients are views of the buckets, which stay
            total += sum(p.numel() * p.element_size() for p in part.parameters() if p.requires_grad)
    buffers = {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in _messages(schedule)}
    return total + sum(buffers.values())


def _messages(schedule: Any) -> Iterator[Tensor]:
    """What stages receive into, a buffer for each micro-batch. From a stage on the same rank nothing is received: its
    tensors themselves are there, those of the last step until new ones take their place.
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
