"""Linear layers that round their operands in training.

Emulated low-precision products: operands are rounded as in a recipe, then multiplied in fp32, like matrix units that
accumulate in fp32.

    y  = Q(x) Q(w)^T             blocks along K, the inputs
    dx = Q(g) Q(w)               blocks along N, the outputs
    dw = Q(R g^T) Q(R x^T)^T     blocks along M, the tokens; R: a random rotation along M, or none

Shapes: x (M, K), w (N, K), g and y (M, N). Formats and sources are in `catalog/precision_recipes.toml`. The rotation is
a random Hadamard matrix: it spreads an outlier over its block before rounding, and cancels in the product (arXiv
2405.16406; for the weight gradient in NVFP4 training arXiv 2509.25149).

Compression-aware training: weights are rounded, pruned or both in every product, and kept in full for the update.

    y = x Q(W)^T,   dx = g Q(W),   dW = g^T x

The gradient ignores the rounding (the straight-through estimator, arXiv 1308.3432). It is 0 for pruned weights, which
were the smallest at the start of training and stay 0. `ironlaw compress --to` the same format by rtn afterwards gives
exactly the weights of the last products.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cache
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from ironlaw.catalog.formats import CompressionTarget, PrecisionRecipe, read_target
from ironlaw.errors import UserError
from ironlaw.model.linear import Linear, RoundedLinear, become
from ironlaw.numerics.pruning import pruning_mask
from ironlaw.numerics.quantized import rounded
from ironlaw.numerics.rounding import generator_of

ROTATION_SEED = 1  # one rotation for all products: only the rounding must be random each time


@cache
def rotation(size: int, seed: int, device: torch.device) -> Tensor:
    """Returns Sylvester's H / sqrt(size), where H_2n = [[H_n, H_n], [H_n, -H_n]], with a random sign per row, fp32
    (size, size). UserError unless a power of two."""
    if size < 1 or size & (size - 1):
        raise UserError(f"a Hadamard matrix of {size}: its size must be a power of two")
    matrix = torch.ones(1, 1, device=device)
    while len(matrix) < size:
        matrix = torch.cat((torch.cat((matrix, matrix), 1), torch.cat((matrix, -matrix), 1)))
    signs = torch.randint(0, 2, (size, 1), generator=generator_of(seed, device), device=device) * 2 - 1
    return signs * matrix / size**0.5


def rotate(x: Tensor, size: int = 16, seed: int = 0) -> Tensor:
    """Rotates each group of `size` numbers in the last dimension of `x`, which must be a multiple of `size`."""
    return (x.unflatten(-1, (-1, size)) @ rotation(size, seed, x.device).to(x.dtype)).flatten(-2)


@dataclass
class Moment:
    """The position of a micro-batch in the run. It seeds stochastic rounding, so that a resumed run rounds like an
    uninterrupted one."""

    seed: int = 0
    step: int = 0
    micro_batch: int = 0
    device: torch.device = field(default_factory=lambda: torch.device("cpu"))
    # Delayed scaling, by operand: the largest magnitude of each recent micro-batch, and the last value returned.
    history: dict[str, Tensor] = field(default_factory=dict)
    given: dict[str, tuple[int, int, Tensor]] = field(default_factory=dict)

    def largest(self, operand: str, matrix: Tensor, length: int, training: bool) -> Tensor:
        """Returns the largest magnitude in the previous `length` micro-batches, shape (1, 1); 0 if there are none. It
        is the same for every cast within a micro-batch."""
        known = self.given.get(operand)
        if known is not None and known[:2] == (self.step, self.micro_batch):
            return known[2]
        before = self.history.get(operand)
        found = torch.zeros(1, 1, device=matrix.device) if before is None else before.amax().view(1, 1)
        if training:
            now = matrix.detach().abs().amax().float().view(1)
            self.history[operand] = now if before is None else torch.cat((before, now))[-length:]
            self.given[operand] = self.step, self.micro_batch, found
        return found

    def state_dict(self) -> dict[str, Any]:
        return {"history": dict(self.history)}

    def load_state_dict(self, state_dict: dict[str, Any], /) -> None:
        self.history, self.given = dict(state_dict["history"]), {}

    def generator(self, layer: int) -> torch.Generator:
        key = ((self.seed * 1_000_003 + self.step) * 1_000_003 + self.micro_batch) * 1_000_003 + layer
        return generator_of(key % 2**63, self.device)


class LowPrecisionProduct(torch.autograd.Function):
    """A low-precision product that saves the unrounded x and weight: backward casts them again, as in torchao."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, layer: LowPrecisionLinear) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.layer, recipe, flat = layer, layer.recipe, x.flatten(0, -2).float()
        rows = rounded(flat, recipe.input, largest=layer.largest("x", flat))
        return (rows @ layer.narrow(weight).t()).to(x.dtype).unflatten(0, x.shape[:-1])

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        x, weight = ctx.saved_tensors
        layer: LowPrecisionLinear = ctx.layer
        recipe = layer.recipe
        g, of_x, of_weight = gradient.flatten(0, -2).float(), None, None
        generator = layer.moment.generator(layer.number) if recipe.stochastic else None
        of_gradient = layer.largest("g", g)
        if ctx.needs_input_grad[0]:
            matrix = layer.narrow(weight, of_outputs=not recipe.square_weights)
            of_x = _gradient(g, recipe, generator, of_gradient) @ matrix
            of_x = of_x.to(x.dtype).unflatten(0, x.shape[:-1])
        if ctx.needs_input_grad[1]:
            across = _along_tokens(g, recipe), _along_tokens(x.flatten(0, -2).float(), recipe)
            left = _gradient(across[0], recipe, generator, of_gradient)
            right = rounded(across[1], recipe.input, largest=layer.largest("x", x))
            of_weight = (left @ right.t()).to(weight.dtype)
        return of_x, of_weight, None


def _gradient(
    matrix: Tensor, recipe: PrecisionRecipe, generator: torch.Generator | None, largest: Tensor | None
) -> Tensor:
    return rounded(matrix, recipe.gradient, generator=generator, headroom=recipe.headroom, largest=largest)


def _along_tokens(matrix: Tensor, recipe: PrecisionRecipe) -> Tensor:
    """Transposes (M, N) to (N, M), rotated along M if the recipe says so; M is padded with zeros, which add nothing."""
    across = matrix.t().contiguous()
    if not recipe.rotation:
        return across
    return rotate(F.pad(across, (0, -across.shape[1] % recipe.rotation)), recipe.rotation, ROTATION_SEED)


class LowPrecisionLinear(RoundedLinear):
    """`Linear` with low-precision products."""

    function = LowPrecisionProduct
    recipe: PrecisionRecipe
    moment: Moment
    number = 0  # index of this layer in the model

    def narrow(self, weight: Tensor, of_outputs: bool = False) -> Tensor:
        """Returns the weight (N, K), rounded in blocks along the inputs, or along the outputs."""
        matrix = weight.float().t() if of_outputs else weight.float()
        recipe, largest = self.recipe, self.largest("w", weight)
        matrix = rounded(matrix, recipe.weight, block=recipe.weight_block, largest=largest)
        return matrix.t() if of_outputs else matrix

    def largest(self, operand: str, matrix: Tensor) -> Tensor | None:
        """Returns the magnitude that sets the operand's scale under delayed scaling; None: its own largest one."""
        length = self.recipe.history
        return self.moment.largest(f"{self.number}.{operand}", matrix, length, self.training) if length else None


def emulate(blocks: nn.ModuleList, recipe: PrecisionRecipe, moment: Moment) -> int:
    """Emulate low-precision products in the linear layers of the recipe's blocks, in place. Returns the number of
    these layers. Weights and their names do not change."""
    there = nn.ModuleList(list(blocks)[: recipe.blocks(len(blocks))]).modules()
    layers = [become(module, LowPrecisionLinear) for module in there if isinstance(module, Linear)]
    for number, layer in enumerate(layers):
        layer.recipe, layer.moment, layer.number = recipe, moment, number
    return len(layers)


class AwareProduct(torch.autograd.Function):
    """A product with the narrowed weight. It saves x and the full weight, which backward rounds again."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, layer: AwareLinear) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.layer = layer
        return F.linear(x, layer.narrow(weight).to(x.dtype))

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        (x, weight), layer, of_x, of_weight = ctx.saved_tensors, ctx.layer, None, None
        if ctx.needs_input_grad[0]:
            of_x = gradient @ layer.narrow(weight).to(gradient.dtype)
        if ctx.needs_input_grad[1]:
            of_weight = (gradient.flatten(0, -2).t() @ x.flatten(0, -2)).to(weight.dtype)
            of_weight = of_weight if layer.kept is None else of_weight * layer.kept
        return of_x, of_weight, None


class AwareLinear(RoundedLinear):
    function = AwareProduct
    target: CompressionTarget
    kept: Tensor | None = None  # mask of the unpruned weights, determined in the first forward pass

    def narrow(self, weight: Tensor) -> Tensor:
        format = self.target.format
        return rounded(weight.detach().float(), format, block=format.weight_block)

    def forward(self, x: Tensor) -> Tensor:
        if self.target.pruning is not None and self.kept is None:
            self.kept = pruning_mask(self.weight, self.target.pruning)
            with torch.no_grad():
                self.weight.mul_(self.kept)
        return super().forward(x)


def make_aware(blocks: nn.Module, text: str) -> None:
    """Make the linear layers of `blocks` multiply with weights in the form of `--to text`."""
    target = read_target(text)
    for module in blocks.modules():
        if isinstance(module, Linear):
            become(module, AwareLinear).target = target
