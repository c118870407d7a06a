"""What autocast does where a tensor lives, for the modules that must follow it by hand."""

from __future__ import annotations

import torch
from torch import Tensor


def autocast_dtype(x: Tensor) -> torch.dtype | None:
    """What autocast casts to where `x` lives; None when it is off, and on devices it does not know (meta)."""
    device = x.device.type
    on = torch.amp.is_autocast_available(device) and torch.is_autocast_enabled(device)
    return torch.get_autocast_dtype(device) if on else None


def followed(x: Tensor) -> Tensor:
    """`x` in that type; itself where there is none."""
    dtype = autocast_dtype(x)
    return x if dtype is None else x.to(dtype)
