"""The first weights of a run that does not start from random ones: a Hugging Face directory's, or another run's."""

from __future__ import annotations

from pathlib import Path

from torch import nn

from ironlaw.errors import UserError
from ironlaw.model.config import ModelConfig
from ironlaw.model.huggingface.weights import check_weights, load_weights
from ironlaw.train.checkpoint import check_model, newest_of
from ironlaw.train.restore import load
from ironlaw.train.run_directory import RunDirectory


def check_first_weights(source: str, config: ModelConfig) -> None:
    """UserError, before anything is written, when `source` does not hold the weights of this model."""
    folder = Path(source)
    if RunDirectory(folder).is_run:
        check_model(newest_of(folder), config)
    elif folder.is_dir():
        check_weights(folder, config)
    else:
        raise UserError(f"train.start_from = {source!r} is no directory: give a Hugging Face model's or a run's")


def load_first_weights(source: str, model: nn.Module, config: ModelConfig) -> None:
    """Weights only: the optimizer, the schedule and the step count start anew."""
    folder = Path(source)
    if RunDirectory(folder).is_run:
        load(newest_of(folder), model, config)
    else:
        load_weights(folder, model, config)
