"""What a rank holds of a model once a layout is put on it (`apply.py`)."""

from __future__ import annotations

from dataclasses import dataclass, field

from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from ironlaw.model.transformer import Transformer
from ironlaw.train.parallel import pipeline
from ironlaw.train.parallel.ranks import Ranks


@dataclass
class Applied:
    """What this rank holds: `parts` by stage number as they are called, `plain` the transformers within."""

    ranks: Ranks
    parts: dict[int, nn.Module]
    plain: dict[int, Transformer]
    partial: list[nn.Parameter] = field(default_factory=list)  # gradients to be added up over tp
    copied_head: nn.Parameter | None = None  # the last stage's copy of a tied embedding
    exchanged: list[nn.Parameter] = field(default_factory=list)  # expert parallel: gradients of ep ranks' tokens

    def __post_init__(self) -> None:
        self.model = pipeline.joined(self.plain)  # everything here under the names of the whole model

    @property
    def stages(self) -> int:
        return self.ranks.config.pp * self.ranks.config.virtual_stages

    def parameters(self) -> list[nn.Parameter]:
        return [parameter for part in self.plain.values() for parameter in part.parameters()]


def local_part(tensor: Tensor) -> Tensor:
    """Of a distributed tensor, what this rank has of it."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor
