"""The dense feed-forward network of a block: two matrices, or three with a gate (SwiGLU, arXiv 2002.05202)."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor, nn

from ironlaw.model.config import ModelConfig
from ironlaw.model.linear import Linear


def activate(x: Tensor, activation: str) -> Tensor:
    if activation == "silu":
        return F.silu(x)
    if activation == "relu":
        return F.relu(x)
    if activation == "relu2":
        x = F.relu(x)
        return x * x  # the backward pass of `square` would make two copies
    return F.gelu(x, approximate="tanh" if activation == "gelu_tanh" else "none")


class FeedForward(nn.Module):
    def __init__(self, config: ModelConfig, width: int | None = None) -> None:
        super().__init__()
        width = width or config.ffn_size
        self.activation = config.activation
        self.up = Linear(config.hidden, width, bias=config.has_ffn_bias)
        self.gate = Linear(config.hidden, width, bias=config.has_ffn_bias) if config.gated_ffn else None
        self.down = Linear(width, config.hidden, bias=config.has_ffn_bias)

    def forward(self, x: Tensor) -> Tensor:
        if self.gate is None:
            return self.down(activate(self.up(x), self.activation))
        return self.down(activate(self.gate(x), self.activation) * self.up(x))
