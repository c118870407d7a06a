"""The state of autocast on a tensor's device, for modules that must apply it explicitly."""

from __future__ import annotations

import torch
from torch import Tensor


def autocast_dtype(x: Tensor) -> torch.dtype | None:
    """Return autocast's dtype on the device of `x`; None if it is off or unsupported on the device (meta)."""
    device = x.device.type
    on = torch.amp.is_autocast_available(device) and torch.is_autocast_enabled(device)
    return torch.get_autocast_dtype(device) if on else None


def cast_like_autocast(x: Tensor) -> Tensor:
    """Cast `x` to `autocast_dtype(x)`, if any."""
    dtype = autocast_dtype(x)
    return x if dtype is None else x.to(dtype)
