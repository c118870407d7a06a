"""Which kernel computes attention in a step. PyTorch is asked, by the function that its own dispatch asks."""

from __future__ import annotations

from typing import Any

import torch
from torch.nn.attention import SDPBackend

from ironlaw.config import RunConfig
from ironlaw.kernels.attention import available
from ironlaw.model.masks import BlockMask
from ironlaw.model.transformer import Attention, Transformer
from ironlaw.train.precision import AUTOCAST, autocast

NAMES = {
    SDPBackend.MATH: "math", SDPBackend.FLASH_ATTENTION: "flash", SDPBackend.CUDNN_ATTENTION: "cuDNN",
    SDPBackend.EFFICIENT_ATTENTION: "memory-efficient", SDPBackend.OVERRIDEABLE: "the device's own",
}  # fmt: skip


def attention_kernel(model: Transformer, config: RunConfig, device: torch.device, precision: str) -> str:
    """`SDPA: flash`, `SDPA: math`, `FlexAttention` and so on, of training steps of this run on this device.

    Asked with one sequence of the run's shapes, precision, mask and dropout: the choice does not hang on the batch.
    """
    sequence = config.sequence
    if model.config.dropout and config.layout is not None:
        return "scores in memory: with a [layout] dropout is drawn by sample, which no fused kernel does"
    if model.config.composes_scores and device.type != "cuda":
        return "scores in memory: caps and sinks change them, which no fused kernel does on this device"
    dtype = AUTOCAST.get(precision, torch.float32)
    documents = torch.zeros(1, sequence, dtype=torch.int32, device=device) if config.data.masks_documents else None
    with torch.no_grad(), autocast(device, precision):
        mask = model.attention_mask(sequence, device, documents, None)
    if isinstance(mask, BlockMask):
        return "FlexAttention"
    ours = any(isinstance(module, Attention) and module.native for module in model.modules())
    if mask is None and ours and available(dtype):
        return "Ironlaw's own, for CPUs"

    def like(heads: int, size: int = model.config.size_of_head) -> torch.Tensor:
        shape = (1, sequence, heads, size)  # laid out as the projection leaves it
        return torch.empty(shape, dtype=dtype, device=device, requires_grad=True).transpose(1, 2)

    query, key = like(model.config.heads), like(model.config.key_value_heads)
    padded = device.type == "cpu" and not model.config.dropout  # values as wide as keys (model/latent.py)
    value = like(model.config.key_value_heads, model.config.size_of_head if padded else model.config.size_of_value)
    asked: dict[str, Any] = {"is_causal": mask is None, "enable_gqa": key.shape[1] != query.shape[1]}
    chosen = torch._fused_sdp_choice(query, key, value, mask, model.config.dropout, **asked)
    return f"SDPA: {NAMES.get(SDPBackend(chosen), 'none')}"
