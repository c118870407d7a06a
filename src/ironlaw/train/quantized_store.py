"""A checkpoint with quantized weights, written by `ironlaw compress` and read by everything that reads runs.

One safetensors file holds, for each quantized weight NAME, the tensors NAME.codes, NAME.scales, NAME.tensor_scale and
NAME.bitmap, as far as its format has them, and all other weights under their names. The file's metadata hold the
format, shape and block of each quantized weight (docs/formats.md).
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor, nn

from ironlaw.catalog.formats import number_format
from ironlaw.errors import UserError
from ironlaw.files import sha256
from ironlaw.numerics.compression import stored
from ironlaw.numerics.quantized import Quantized
from ironlaw.train.state import Stateful, load_unique_weights, unique_weights

FILE = "quantized.safetensors"
_PARTS = ("codes", "scales", "tensor_scale", "bitmap")


@dataclass
class QuantizedFiles:
    """A store (`checkpoint.Store`) that holds weights only, so that training cannot be resumed from it.

    held:  the compressed weights, by name; used only by `take` and `write`.
    wide:  data type of the other weights, as far as it holds their numbers.
    """

    held: Mapping[str, Quantized]
    wide: torch.dtype = torch.float32
    name: str = "quantized"

    def take(self, model: nn.Module, states: Mapping[str, Stateful]) -> dict[str, Tensor]:
        """Return the weights that are not quantized."""
        return {n: stored(t, self.wide) for n, t in unique_weights(model).items() if n not in self.held}

    def write(self, folder: Path, taken: dict[str, Tensor]) -> dict[str, str]:
        tensors, about = dict(taken), {}
        for name, weight in self.held.items():
            tensors |= {f"{name}.{part}": tensor.contiguous() for part, tensor in weight.tensors.items()}
            about[name] = {"format": weight.format.name, "shape": list(weight.shape), "block": weight.block}
        save_file(tensors, folder / FILE, metadata={"format": "pt", "quantized": json.dumps(about)})
        return {FILE: sha256(folder / FILE)}

    def read(self, folder: Path, model: nn.Module, states: Mapping[str, Stateful]) -> list[str]:
        if states:
            raise UserError(no_training(folder))
        weights = {
            name: weight if isinstance(weight, Tensor) else weight.dequantize() for name, weight in read_held(folder)
        }
        load_unique_weights(model, weights)
        return []


def no_training(folder: Path) -> str:
    return (
        f"{folder} holds compressed weights, which no training goes on from: resume the run that was compressed, or "
        "start a new one from them with train.start_from"
    )


def read_held(folder: Path) -> Iterator[tuple[str, Tensor | Quantized]]:
    """Yield the weights of a compressed checkpoint one by one, as plain or quantized tensors."""
    with safe_open(folder / FILE, framework="pt") as file:
        about: dict[str, dict[str, Any]] = json.loads(file.metadata()["quantized"])
        names = set(file.keys())
        parts = {f"{name}.{part}" for name in about for part in _PARTS}
        for name in sorted(names - parts):
            yield name, file.get_tensor(name)
        for name, fields in about.items():
            tensors = {part: file.get_tensor(f"{name}.{part}") for part in _PARTS if f"{name}.{part}" in names}
            block = tuple(fields["block"]) if fields["block"] else None
            yield name, Quantized(number_format(fields["format"]), torch.Size(fields["shape"]), block=block, **tensors)
