"""The arithmetic of a run: autocast, TF32, low-precision products by torchao or emulated, and loss scaling for fp16.

Weights, gradients, optimizer state and reductions are fp32 in all of them.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ironlaw.catalog.formats import PrecisionRecipe, number_format, precision_recipe
from ironlaw.config import ScalerConfig, TrainConfig
from ironlaw.errors import UserError, reported
from ironlaw.model.linear import Linear, RoundedLinear, become, capability
from ironlaw.numerics.products import ROTATION_SEED, Moment, emulate, make_aware, rotation
from ironlaw.workload.conventions import whole_tiles


def product_type(precision: str) -> torch.dtype | None:
    """Return the type to which autocast converts a product's operands, or None if autocast is off."""
    return {"bf16": torch.bfloat16, "fp16": torch.float16}.get(number_format(precision).held_as)


def autocast(device: torch.device, precision: str) -> Any:
    """Return a context in which matrix products run in `precision`."""
    dtype = product_type(precision)
    return nullcontext() if dtype is None else torch.autocast(device.type, dtype=dtype)


def prepare(blocks: nn.ModuleList, device: torch.device, precision: str, train: TrainConfig) -> Moment | None:
    """Prepare blocks for `precision`, once. Products of a recipe that the device does not support are emulated bit
    for bit; then the `Moment` that seeds their rounding is returned. UserError if hardware or torchao is missing."""
    if train.qat is not None:
        make_aware(blocks, train.qat)
    if device.type == "cuda":
        torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = precision == "tf32"
    rules, is_native = precision_recipe(precision), number_format(precision).is_native(capability(device))
    if rules is None:
        if not is_native:
            raise UserError(f'train.precision = "{precision}" needs a newer NVIDIA GPU: use train.precision = "bf16"')
        return None
    if is_native:
        _by_torchao(blocks, rules)
        return None
    moment = Moment(train.seed, device=device)
    emulate(blocks, rules, moment)
    return moment


def _by_torchao(blocks: nn.ModuleList, rules: PrecisionRecipe) -> None:
    """Run the linear layers of the recipe's blocks by torchao. The output layer is left out, as it costs accuracy."""
    layers = nn.ModuleList(list(blocks)[: rules.blocks(len(blocks))])
    with reported(f"train.precision = \"{rules.name}\" needs torchao: pip install 'ironlaw[quant]'", ImportError):
        if rules.name in PRODUCTS:
            use_product(layers, PRODUCTS[rules.name](), rules)
        else:
            from torchao.float8 import Float8LinearConfig, convert_to_float8_training

            config = Float8LinearConfig.from_recipe_name("rowwise" if rules.name == "fp8_rowwise" else "tensorwise")
            convert_to_float8_training(
                layers, module_filter_fn=lambda layer, _: has_whole_tiles(layer, rules), config=config
            )


Product = Callable[[Tensor, Tensor], Tensor]
"""x (M, K), weight (N, K), both of one type -> x weight^T (M, N). Differentiable."""


def mxfp8_product(kernels: str = "auto") -> Product:
    """Return torchao's MXFP8 product, with scales as in the OCP MX specification."""
    from torchao.prototype.moe_training.mxfp8_linear import _to_mxfp8_then_scaled_mm
    from torchao.prototype.mx_formats.config import ScaleCalculationMode
    from torchao.quantization.quantize_.common.kernel_preference import KernelPreference

    chosen, scale = KernelPreference(kernels), ScaleCalculationMode.FLOOR
    return partial(_to_mxfp8_then_scaled_mm, kernel_preference=chosen, scale_calculation_mode=scale)


def nvfp4_product() -> Product:
    """Return torchao's NVFP4 product: square weight blocks, stochastically rounded gradients, rotation along tokens."""
    from torchao.prototype.moe_training.nvfp4_training.nvfp4_linear import nvfp4_linear

    signs = rotation(16, ROTATION_SEED, torch.device("cpu"))[:, 0].sign()  # the same rotation as in the emulation
    return partial(nvfp4_linear, sign_vector=tuple(signs.int().tolist()))


def fp8_block_product() -> Product:
    """Return torchao's fp8 product in blocks of 128: by cuBLAS on Hopper, which alone it supports, else by Triton."""
    from torchao.prototype.blockwise_fp8_training.linear import fp8_blockwise_mm

    def product(x: Tensor, weight: Tensor) -> Tensor:
        return cast(Tensor, fp8_blockwise_mm.apply(x, weight, 128, x.dtype, capability(x.device) != (9, 0)))

    return product


PRODUCTS: dict[str, Callable[[], Product]] = {
    "mxfp8": mxfp8_product, "nvfp4": nvfp4_product, "fp8_block": fp8_block_product,
}  # fmt: skip


class LibraryLinear(RoundedLinear):
    """A `Linear` that calls a library's product. The library's own layers would add wrappers or buffers to weights."""

    multiply: Product
    tile: int

    def product(self, x: Tensor) -> Tensor:
        rows = x.flatten(0, -2)
        missing = -len(rows) % self.tile  # padding rows of zeros do not affect gradients
        found = self.multiply(F.pad(rows, (0, 0, 0, missing)) if missing else rows, self.weight.to(rows.dtype))
        return found[: len(rows)].unflatten(0, x.shape[:-1])


def use_product(blocks: nn.Module, product: Product, rules: PrecisionRecipe) -> None:
    """Make layers whose sizes are multiples of the tile use `product`; other layers keep PyTorch's."""
    for module in blocks.modules():
        if isinstance(module, Linear) and has_whole_tiles(module, rules):
            layer = become(module, LibraryLinear)
            layer.multiply, layer.tile = product, rules.tile


def has_whole_tiles(module: nn.Module, rules: PrecisionRecipe) -> bool:
    return isinstance(module, nn.Linear) and whole_tiles(rules.tile, module.in_features, module.out_features)


class LossScale(torch.amp.GradScaler):
    """Dynamic loss scaling around one optimizer (arXiv 1710.03740); does nothing unless the precision is fp16."""

    def __init__(self, device: torch.device, precision: str, config: ScalerConfig) -> None:
        super().__init__(
            device.type, config.initial, config.growth, config.backoff, config.growth_steps,
            enabled=precision == "fp16",
        )  # fmt: skip
        self.skipped_steps = 0

    def step(self, optimizer: torch.optim.Optimizer) -> bool:
        """Update the weights unless a gradient overflowed. Returns whether they were updated."""
        before = self.get_scale()
        super().step(optimizer)
        self.update()
        done = self.get_scale() >= before
        self.skipped_steps += not done
        return done

    def update_from_ranks(self, overflowed: bool) -> None:
        """Update the scale after ranks have jointly decided to take or skip a step, in place of `update`."""
        state = super().state_dict()
        if overflowed:
            state |= {"scale": state["scale"] * state["backoff_factor"], "_growth_tracker": 0}
            self.skipped_steps += 1
        else:
            state["_growth_tracker"] += 1
            if state["_growth_tracker"] == state["growth_interval"]:
                state |= {"scale": state["scale"] * state["growth_factor"], "_growth_tracker": 0}
        super().load_state_dict(state)

    def state_dict(self) -> dict[str, Any]:
        return {"scaler": super().state_dict(), "skipped_steps": self.skipped_steps}

    def load_state_dict(self, state_dict: dict[str, Any], /) -> None:
        """Load the scale. Factors and steps are those of the config, which may have changed."""
        own, saved = super().state_dict(), state_dict["scaler"]
        steps = min(saved["_growth_tracker"], own["growth_interval"] - 1)  # only equality lets the scale grow
        super().load_state_dict(own | {"scale": saved["scale"], "_growth_tracker": steps})
        self.skipped_steps = state_dict["skipped_steps"]
