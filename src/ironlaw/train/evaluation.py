"""Validation: the loss over held-out text, in the units people compare."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, nn

from ironlaw.data.batch import IGNORED, Batch
from ironlaw.model.transformer import Transformer


def sum_of_losses(model: nn.Module, batch: Batch[Tensor], autocast: Callable[[], Any]) -> tuple[float, int]:
    """Over the targets of a batch that count, nats, and their number. The model is in evaluation mode."""
    counted = int((batch.targets != IGNORED).sum())
    if not counted:
        return 0.0, 0
    with autocast():
        return float(model(batch.inputs, batch.targets, documents=batch.documents)) * counted, counted


@torch.no_grad()
def evaluate(model: Transformer, batches: Iterable[Batch[Tensor]], autocast: Callable[[], Any]) -> float:
    """Mean loss over all targets that count, nats per token. The model is in training mode again afterwards."""
    model.eval()
    total, tokens = 0.0, 0
    for batch in batches:
        losses, counted = sum_of_losses(model, batch, autocast)
        total, tokens = total + losses, tokens + counted
    model.train()
    return total / tokens


def in_other_units(loss: float, bits_per_byte: float | None) -> dict[str, float]:
    """Perplexity, and bits per byte of text where the data says how many bytes its tokens stand for."""
    result = {"perplexity": math.exp(min(loss, 700.0))}
    return result if bits_per_byte is None else result | {"bits_per_byte": bits_per_byte}
