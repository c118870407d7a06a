"""What a plan is about."""

from __future__ import annotations

from dataclasses import dataclass

from ironlaw.config import RunConfig
from ironlaw.model.config import ModelConfig


@dataclass(frozen=True)
class Subject:
    """The model, and the run around it where a config file gives one."""

    model: ModelConfig
    config: RunConfig | None = None
    left_out: tuple[str, ...] = ()  # of what was asked about, what the model here has not
