"""The arithmetic of a run: autocast, TF32, fp8 through torchao, and the loss scale that fp16 needs.

Weights, gradients, optimizer state and reductions are fp32 in every one of them.
"""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import torch
from torch import nn

from ironlaw.catalog.formats import number_format
from ironlaw.config import ScalerConfig
from ironlaw.errors import UserError

AUTOCAST = {"bf16": torch.bfloat16, "fp16": torch.float16}


def autocast(device: torch.device, precision: str) -> Any:
    """A context in which products run in `precision`."""
    dtype = AUTOCAST.get(number_format(precision).held_as)
    return nullcontext() if dtype is None else torch.autocast(device.type, dtype=dtype)


def prepare(model: nn.Module, blocks: nn.ModuleList, device: torch.device, precision: str) -> None:
    """What has to be set once. UserError where the device lacks the hardware or torchao is missing."""
    if device.type == "cuda":
        torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = precision == "tf32"
    needed = number_format(precision).capability
    if needed is None:
        return
    if device.type != "cuda" or torch.cuda.get_device_capability(device) < needed:
        raise UserError(
            f'train.precision = "{precision}" needs an NVIDIA GPU of compute capability {needed[0]}.{needed[1]} or '
            'later: use train.precision = "bf16"'
        )
    if precision in ("fp8", "mxfp8"):
        _quantize(blocks, precision)


def _quantize(blocks: nn.ModuleList, precision: str) -> None:
    """The linear layers of the blocks multiply in fp8; the output layer does not, which costs accuracy."""
    try:
        if precision == "fp8":
            from torchao.float8 import convert_to_float8_training

            convert_to_float8_training(blocks, module_filter_fn=_divisible)
        else:
            from torchao.prototype.mx_formats.config import MXLinearConfig
            from torchao.quantization import quantize_

            quantize_(blocks, MXLinearConfig(), filter_fn=_divisible)
    except ImportError:
        raise UserError(f"train.precision = \"{precision}\" needs torchao: pip install 'ironlaw[quant]'") from None


def _divisible(module: nn.Module, name: str) -> bool:
    """The hardware multiplies in tiles of 16."""
    return isinstance(module, nn.Linear) and module.in_features % 16 == 0 and module.out_features % 16 == 0


class LossScale:
    """Dynamic loss scaling around one optimizer (arXiv 1710.03740); does nothing unless the precision is fp16."""

    def __init__(self, device: torch.device, precision: str, config: ScalerConfig) -> None:
        self.skipped_steps = 0
        self.scaler = torch.amp.GradScaler(
            device.type, config.initial, config.growth, config.backoff, config.growth_steps,
            enabled=precision == "fp16",
        )  # fmt: skip

    @property
    def enabled(self) -> bool:
        return self.scaler.is_enabled()

    def scale(self, loss: torch.Tensor) -> torch.Tensor:
        return self.scaler.scale(loss) if self.enabled else loss

    def unscale(self, optimizer: torch.optim.Optimizer) -> None:
        """Before gradients are clipped."""
        if self.enabled:
            self.scaler.unscale_(optimizer)

    def step(self, optimizer: torch.optim.Optimizer) -> bool:
        """Update the weights, or not when a gradient overflowed; False then."""
        if not self.enabled:
            optimizer.step()
            return True
        before = self.scaler.get_scale()
        self.scaler.step(optimizer)
        self.scaler.update()
        done = self.scaler.get_scale() >= before
        self.skipped_steps += not done
        return done

    def decided(self, overflowed: bool) -> None:
        """After a step that ranks have decided together to take or to skip: what `update` does with its own finding."""
        state = self.scaler.state_dict()
        if overflowed:
            state |= {"scale": state["scale"] * state["backoff_factor"], "_growth_tracker": 0}
            self.skipped_steps += 1
        else:
            state["_growth_tracker"] += 1
            if state["_growth_tracker"] == state["growth_interval"]:
                state |= {"scale": state["scale"] * state["growth_factor"], "_growth_tracker": 0}
        self.scaler.load_state_dict(state)

    def state_dict(self) -> dict[str, Any]:
        return {"scaler": self.scaler.state_dict(), "skipped_steps": self.skipped_steps}

    def load_state_dict(self, state_dict: dict[str, Any], /) -> None:
        self.scaler.load_state_dict(state_dict["scaler"])
        self.skipped_steps = state_dict["skipped_steps"]
