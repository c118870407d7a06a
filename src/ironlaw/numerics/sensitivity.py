"""Choice of each layer's format for a model within a byte budget, by the sensitivity of the loss.

Rounding W to Q changes the loss by about sum F (W - Q)^2 / 2, F the mean of its squared gradient (the diagonal of the
empirical Fisher information; arXiv 2306.07629). Every layer starts in the narrowest format; then the layer whose step
to a wider format reduces this sum most per byte takes that step, until no further step fits.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import torch
import torch.nn.functional as F
from torch import Tensor

from ironlaw.catalog.formats import NumberFormat, number_format
from ironlaw.errors import UserError
from ironlaw.model.transformer import Transformer
from ironlaw.numerics.quantized import quantize

WIDER = ("int8", "bf16")
SEQUENCES = 16  # number of sequences whose gradients are squared


def squared_gradients(model: Transformer, names: Iterable[str], batches: Iterable[Tensor]) -> dict[str, Tensor]:
    """Returns, for each named weight, the mean over sequences of the squared gradient of the loss, in its shape."""
    weights = {name: model.get_parameter(name) for name in names}
    found = {name: torch.zeros_like(weight) for name, weight in weights.items()}
    rows = [row for tokens in batches for row in tokens][:SEQUENCES]
    if not rows:
        raise UserError("there is nothing to measure gradients on: give --data")
    for row in rows:
        loss = F.cross_entropy(model(row[None, :-1])[0].float(), row[1:])
        for name, gradient in zip(weights, torch.autograd.grad(loss, list(weights.values())), strict=True):
            found[name] += gradient.square() / len(rows)
    return found


@torch.no_grad()
def layer_formats(
    weights: Mapping[str, Tensor], squares: Mapping[str, Tensor], narrow: NumberFormat, room: int
) -> dict[str, NumberFormat]:
    """Returns the format of each weight, `room` bytes in total at most. Raises UserError if `narrow` does not fit."""
    wider = (number_format(name) for name in WIDER)
    formats = [narrow, *(known for known in wider if known.bits > narrow.bits)]
    costs: dict[str, list[tuple[int, float]]] = {}  # by format: bytes, expected rise of the loss
    for name, weight in weights.items():
        held = [quantize(weight, format.name, block=format.weight_block) for format in formats]
        off = ((weight.float() - one.dequantize()).square() for one in held)
        costs[name] = [(one.bytes, float((squares[name] * o).sum()) / 2) for one, o in zip(held, off, strict=True)]
    chosen = dict.fromkeys(weights, 0)
    left = room - sum(cost[0][0] for cost in costs.values())
    if left < 0:
        raise UserError(
            f"the layers take {room - left:,} bytes in {narrow.name}, and {max(room, 0):,} are left for them: "
            "give --within more, or --to a narrower format"
        )
    while True:
        steps = [
            ((costs[name][now][1] - after[1]) / (after[0] - costs[name][now][0]), name, to)
            for name, now in chosen.items() for to, after in enumerate(costs[name][now + 1 :], now + 1)
            if after[0] - costs[name][now][0] <= left and after[1] < costs[name][now][1]
        ]  # fmt: skip
        if not steps:
            return {name: formats[number] for name, number in chosen.items()}
        _, name, to = max(steps)
        left -= costs[name][to][0] - costs[name][chosen[name]][0]
        chosen[name] = to
