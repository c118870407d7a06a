"""Blocks of a decoder as one compiled call each, for steps of few tokens, in which the overhead of Python and PyTorch
exceeds the computation. Blocks of unsupported forms use their modules."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from ironlaw.kernels.library import address
from ironlaw.kernels.native import CBlock, Native
from ironlaw.kernels.product import ACTIVATIONS, CLinear, Weight
from ironlaw.model.cached import LayerCache
from ironlaw.model.feed_forward import FeedForward
from ironlaw.model.packed import PackedFeedForward, PackedNorm
from ironlaw.model.transformer import Attention, Transformer


class CompiledBlock:
    """A replacement of a block's module, for caches whose tokens are all in `decode`."""

    def __init__(self, block: Any, native: Native, cache: LayerCache) -> None:
        weights = [_weight(m) for m in (block.attention.qkv, block.attention.out, block.ffn.gate, block.ffn.up,
                                        block.ffn.down)]  # fmt: skip
        norms, config, shapes = _norms(block), cache.config, native.shapes
        hidden = config.hidden
        self.kept = weights, norms, cache  # keeps alive the targets of the struct's pointers
        qkv, out, gate, _, down = structs = [CLinear() if w is None else w.struct for w in weights]
        found = [(each.inputs, each.outputs) for each in structs]
        wide, ffn = (shapes.heads + 2 * shapes.shared) * shapes.key, (hidden, down.inputs)
        if found != [(hidden, wide), (shapes.heads * shapes.value, hidden), ffn if gate.weight else (0, 0), ffn,
                     (down.inputs, hidden)]:  # fmt: skip
            raise ValueError(f"products of {found} are not those of a block of {hidden} with {shapes}")
        self.struct = CBlock(
            ctypes.addressof(cache.layer), *structs, *(norm.struct for norm in norms), block.residual_scale, hidden,
            ACTIVATIONS[block.ffn.activation], bool(block.parallel),
        )  # fmt: skip
        self.turned = min(config.size_of_rotary, shapes.key)
        longest = max(hidden, out.inputs, down.inputs)
        self.scratch = hidden + qkv.outputs + out.inputs + 2 * down.inputs + longest + 1  # floats per token
        self.native = native
        self.call: Any = native.block

    def __call__(self, x: Tensor, rotary: tuple[Tensor, Tensor] | None, cache: LayerCache) -> Tensor:
        """Return the block's output for x (1, N, H), which may be overwritten."""
        decode = cache.step_tokens.decode
        assert decode is not None
        x = x.float().contiguous()
        at = address(x, torch.float32, 1, decode.count, self.struct.hidden)
        if decode.scratch is None or len(decode.scratch) < decode.count * self.scratch:
            decode.scratch = torch.empty(decode.count * self.scratch)
        tables = (None, None) if rotary is None else self.native.tables(decode.count, *rotary)
        self.call(self.struct, decode.step, at, *tables, self.turned, decode.scratch.data_ptr())
        return x


def compiled_blocks(
    model: Transformer, native: Native | None, caches: Sequence[LayerCache]
) -> list[CompiledBlock] | None:
    """Return the compiled blocks, or None unless `decode.c` supports the form of every block."""
    if native is None or native.block is None or not all(_is_known(block, native) for block in model.blocks):
        return None
    return [CompiledBlock(block, native, cache) for block, cache in zip(model.blocks, caches, strict=True)]


def _is_known(block: Any, native: Native) -> bool:
    attention, ffn = block.attention, block.ffn
    if type(attention) is not Attention or not isinstance(ffn, FeedForward | PackedFeedForward):
        return False
    if attention.config.qk_norm or attention.config.qkv_clip or block.attention_after:
        return False
    weights = [_weight(m) for m in (attention.qkv, attention.out, ffn.up, ffn.down)]
    weights += [] if ffn.gate is None else [_weight(ffn.gate)]
    # 8-bit formats need fp32 activations; with bf16 activations all weights are bf16.
    fits = all(w is not None and (w.dtype is torch.bfloat16) == (native.activation is torch.bfloat16) for w in weights)
    return fits and all(isinstance(norm, PackedNorm) for norm in _norms(block)) and ffn.activation in ACTIVATIONS


def _norms(block: Any) -> tuple[nn.Module, nn.Module]:
    return block.attention_norm, block.attention_norm if block.parallel == 1 else block.ffn_norm


def _weight(module: nn.Module | None) -> Weight | None:
    return getattr(module, "held", None)
