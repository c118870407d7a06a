"""Recipes of training in few bits (`precision_recipes.toml`): which formats the three products of a linear layer have.

precision_recipe("nvfp4").gradient.name      # "nvfp4"
precision_recipe("bf16")                     # None: products on the tensors as they are
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cache
from typing import Any

from ironlaw.catalog.figures import read_toml
from ironlaw.catalog.formats import NumberFormat, number_format


@dataclass(frozen=True)
class PrecisionRecipe:
    """How a step rounds; fields without a word here are explained in `precision_recipes.toml`."""

    name: str
    title: str
    source: str
    input: NumberFormat  # format of what is multiplied, as of the two that follow
    weight: NumberFormat
    gradient: NumberFormat
    square_weights: bool = False
    stochastic: bool = False
    rotation: int = 0  # numbers per random Hadamard rotation of the weight gradient's operands; 0: none
    headroom: float = 1.0  # factor of gradients before they are rounded, undone after
    history: int = 0  # micro-batches whose largest numbers give a tensor's scale; 0: those of the tensor itself
    keep_last: float = 0.0  # share of the last blocks that compute in `held_as`

    @property
    def weight_block(self) -> tuple[int, int] | None:
        """Rows and columns of a weight that share a scale."""
        block = self.weight.block_of(weight=True)
        if self.square_weights and block is not None:
            return (block[1], block[1])
        return block

    def blocks(self, layers: int) -> int:
        """How many of the first blocks compute so."""
        return layers - math.ceil(layers * self.keep_last)


@cache
def precision_recipes() -> dict[str, PrecisionRecipe]:
    return {name: _read(name, table) for name, table in read_toml("precision_recipes.toml").items()}


def precision_recipe(precision: str) -> PrecisionRecipe | None:
    """The recipe of a precision, None where its products are on the tensors as they are."""
    return precision_recipes().get(precision)


def _read(name: str, table: dict[str, Any]) -> PrecisionRecipe:
    formats = {key: number_format(table[key]) for key in ("input", "weight", "gradient")}
    return PrecisionRecipe(name=name, **{**table, **formats})
