"""The arithmetic of a run: autocast, TF32, few bits through torchao or emulated, and the loss scale that fp16 needs.

Weights, gradients, optimizer state and reductions are fp32 in every one of them.
"""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import torch
from torch import nn

from ironlaw.catalog.formats import number_format
from ironlaw.catalog.precision_recipes import precision_recipe
from ironlaw.config import ScalerConfig, TrainConfig
from ironlaw.errors import UserError
from ironlaw.model.moe import ExpertLinear
from ironlaw.numerics.aware import hold_as
from ironlaw.numerics.products import Moment, emulate

AUTOCAST = {"bf16": torch.bfloat16, "fp16": torch.float16}


def autocast(device: torch.device, precision: str) -> Any:
    """A context in which products run in `precision`."""
    dtype = AUTOCAST.get(number_format(precision).held_as)
    return nullcontext() if dtype is None else torch.autocast(device.type, dtype=dtype)


def in_hardware(precision: str, device: torch.device) -> bool:
    """Whether the device multiplies this format itself; formats of 16 bits and more run everywhere but for tf32."""
    needed = number_format(precision).capability
    return needed is None or (device.type == "cuda" and torch.cuda.get_device_capability(device) >= needed)


def prepare(
    model: nn.Module, blocks: nn.ModuleList, device: torch.device, precision: str, train: TrainConfig
) -> Moment | None:
    """What has to be set once. Of a recipe that the device does not multiply the products are emulated to the bit, and
    the `Moment` that its rounding is drawn from is returned. UserError where hardware or torchao is missing."""
    if train.qat is not None:
        hold_as(blocks, train.qat)
    if device.type == "cuda":
        torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = precision == "tf32"
    rules = precision_recipe(precision)
    if rules is None:
        if not in_hardware(precision, device):
            raise UserError(f'train.precision = "{precision}" needs a newer NVIDIA GPU: use train.precision = "bf16"')
        return None
    if in_hardware(precision, device) and rules.library:
        _quantize(blocks, precision)
        return None
    if any(isinstance(module, ExpertLinear) for module in blocks.modules()):
        raise UserError(f'train.precision = "{precision}" does not reach experts yet: use train.precision = "bf16"')
    moment = Moment(train.seed, device=device)
    emulate(blocks, rules, moment)
    return moment


def _quantize(blocks: nn.ModuleList, precision: str) -> None:
    """The linear layers of the blocks multiply in 8 bits; the output layer does not, which costs accuracy."""
    try:
        if precision == "mxfp8":
            from torchao.prototype.mx_formats.config import MXLinearConfig
            from torchao.quantization import quantize_

            quantize_(blocks, MXLinearConfig(), filter_fn=_divisible)
        else:
            from torchao.float8 import Float8LinearConfig, convert_to_float8_training

            config = Float8LinearConfig.from_recipe_name("rowwise" if precision == "fp8_rowwise" else "tensorwise")
            convert_to_float8_training(blocks, module_filter_fn=_divisible, config=config)
    except ImportError:
        raise UserError(f"train.precision = \"{precision}\" needs torchao: pip install 'ironlaw[quant]'") from None


def _divisible(module: nn.Module, name: str) -> bool:
    """The hardware multiplies in tiles of 16."""
    return isinstance(module, nn.Linear) and module.in_features % 16 == 0 and module.out_features % 16 == 0


class LossScale(torch.amp.GradScaler):
    """Dynamic loss scaling around one optimizer (arXiv 1710.03740); does nothing unless the precision is fp16."""

    def __init__(self, device: torch.device, precision: str, config: ScalerConfig) -> None:
        super().__init__(
            device.type, config.initial, config.growth, config.backoff, config.growth_steps,
            enabled=precision == "fp16",
        )  # fmt: skip
        self.skipped_steps = 0

    def step(self, optimizer: torch.optim.Optimizer) -> bool:
        """Update the weights, or not when a gradient overflowed; False then."""
        before = self.get_scale()
        super().step(optimizer)
        self.update()
        done = self.get_scale() >= before
        self.skipped_steps += not done
        return done

    def decided(self, overflowed: bool) -> None:
        """After a step that ranks have decided together to take or to skip: what `update` does with its own finding."""
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
        super().load_state_dict(state_dict["scaler"])
        self.skipped_steps = state_dict["skipped_steps"]
