"""Weights in the memory layout that is fastest for CPU products, for inference.

Products are Ironlaw's own if compiled (`kernels/product.c`), else oneDNN's, which otherwise reorders a weight matrix in
each call: packed once, products of a few rows were 1.2 to 30 times faster (AMD EPYC, two threads, fp32, 2 to 16 rows of
768 x 2304). On CUDA nothing is packed. Norms stay in fp32 on a CPU, as in training.

For steps of few tokens, in which the overhead of Python and PyTorch exceeds the computation, a whole block is one
compiled call. Blocks of unsupported forms use their modules.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ironlaw.kernels.library import address
from ironlaw.kernels.native import CBlock, CNorm, Native
from ironlaw.kernels.product import ACTIVATIONS, CLinear, Weight, multiplies
from ironlaw.model.cached import LayerCache
from ironlaw.model.feed_forward import FeedForward
from ironlaw.model.linear import Linear
from ironlaw.model.moe import ExpertLinear
from ironlaw.model.transformer import Attention, Transformer

_ROWS = 16  # rows for which oneDNN chooses the packed layout
# Activations that oneDNN can fuse into a product -> its names for them.
_FUSED = {
    "none": ("none", ""),
    "silu": ("swish", ""),
    "relu": ("relu", ""),
    "gelu": ("gelu", "none"),
    "gelu_tanh": ("gelu", "tanh"),
}


class ReadOnlyLinear(nn.Module):
    """A linear layer without gradients, whose weight a library stores in its own layout.

    bytes: size of the stored tensors.
    """

    bytes: int


class NativeLinear(ReadOnlyLinear):
    """A linear layer computed by Ironlaw's own products."""

    def __init__(self, held: Weight) -> None:
        super().__init__()
        self.held, self.bytes = held, held.bytes

    def forward(self, x: Tensor, activation: str = "none", times: Tensor | None = None) -> Tensor:
        """Return the output in the weight's dtype, or for quantised weights in that of x."""
        if self.held.dtype.is_floating_point:
            return self.held(x, self.held.dtype, activation, times)
        return self.held(x, torch.float32, activation, times).to(x.dtype)


class PackedLinear(ReadOnlyLinear):
    """A linear layer computed by oneDNN."""

    def __init__(self, linear: nn.Linear, dtype: torch.dtype) -> None:
        super().__init__()
        self.dtype = dtype
        self.product = torch.ops.mkldnn._linear_pointwise.default
        self.product_times = torch.ops.mkldnn._linear_pointwise.binary
        self.packed = torch.ops.mkldnn._reorder_linear_weight(linear.weight.detach().to(dtype), _ROWS)
        self.bytes = self.packed.nbytes
        self.bias = None if linear.bias is None else linear.bias.detach().to(dtype)

    def forward(self, x: Tensor, activation: str = "none", times: Tensor | None = None) -> Tensor:
        """`times`: a factor on the result, in place of an activation."""
        x = x if x.dtype is self.dtype else x.to(self.dtype)
        if times is not None:
            return self.product_times(x, times, self.packed, self.bias, "mul")
        name, algorithm = _FUSED[activation]
        return self.product(x, self.packed, self.bias, name, [], algorithm)


class PackedFeedForward(nn.Module):
    """A dense network with the activation and the product with its gate fused into the matrix products."""

    def __init__(self, dense: FeedForward, dtype: torch.dtype, compiled: bool) -> None:
        super().__init__()
        self.up = packed(dense.up, dtype, compiled)
        self.gate = None if dense.gate is None else packed(dense.gate, dtype, compiled)
        self.down = packed(dense.down, dtype, compiled)
        self.activation = dense.activation

    def forward(self, x: Tensor) -> Tensor:
        if self.gate is None:
            return self.down(self.up(x, self.activation))
        return self.down(self.up(x, times=self.gate(x, self.activation)))


def packed(linear: nn.Linear, dtype: torch.dtype, compiled: bool) -> NativeLinear | PackedLinear:
    if compiled and multiplies(dtype, linear.in_features):
        return NativeLinear(Weight(linear.weight.to(dtype), linear.bias))
    return PackedLinear(linear, dtype)


class PackedNorm(nn.Module):
    """RMSNorm or LayerNorm in one compiled operation, or in five. On a CPU PyTorch composes RMSNorm from ten, whose
    overhead dominates for few rows."""

    native: Native | None = None

    def __init__(self, norm: nn.RMSNorm | nn.LayerNorm) -> None:
        super().__init__()
        (self.size,), self.centers = norm.normalized_shape, isinstance(norm, nn.LayerNorm)
        held = norm.weight, norm.bias if isinstance(norm, nn.LayerNorm) else None
        self.weight, self.bias = (None if t is None else t.detach().float().contiguous() for t in held)
        eps = torch.finfo(torch.float32).eps if norm.eps is None else norm.eps
        self.register_buffer("eps", torch.tensor(eps))
        at = (address(tensor, torch.float32, self.size) for tensor in (self.weight, self.bias))
        self.struct = CNorm(*at, eps, self.centers)

    eps: Tensor

    def forward(self, x: Tensor) -> Tensor:
        x = x.float()
        if self.native is not None:
            return self.native.norm(self.struct, x.contiguous(), self.size)
        if self.centers:
            return F.layer_norm(x, (self.size,), self.weight, self.bias, self.struct.eps)
        length = torch.linalg.vector_norm(x, dim=-1, keepdim=True)
        x = x * torch.addcmul(self.eps, length, length, value=1 / self.size).rsqrt_()
        return x if self.weight is None else x.mul_(self.weight)


def pack(model: Transformer, weights: str, compiled: bool = True) -> int:
    """Replace the linear layers of a model in place by packed ones, and return the bytes that the model then holds.

    weights: fp32 or bf16. compiled: use Ironlaw's own products if available.

    Layers that are already packed or quantised do not change.
    """
    dtype = torch.float32 if weights == "fp32" else torch.bfloat16
    on_cpu = next(model.parameters()).device.type == "cpu"
    packs = on_cpu and multiplies_all(model, dtype, compiled)
    for parent in list(model.modules()):
        if packs and _fuses(parent):
            continue  # replaced as a whole
        for name, child in list(parent.named_children()):
            if isinstance(child, nn.RMSNorm | nn.LayerNorm):
                if on_cpu:
                    setattr(parent, name, PackedNorm(child))
                elif weights == "bf16":  # CUDA has a kernel for the norm of a stream in its own type only
                    child.to(dtype)
            if packs and _fuses(child):
                assert isinstance(child, FeedForward)
                setattr(parent, name, PackedFeedForward(child, dtype, compiled))
            if packs and isinstance(child, Linear) and name != "latent_up":  # `latent_up` is read in parts
                setattr(parent, name, packed(child, dtype, compiled))
    for module in model.modules():
        if isinstance(module, nn.Linear | ExpertLinear | nn.Embedding) and weights == "bf16":
            module.to(dtype)
    return sum(
        m.bytes if isinstance(m, ReadOnlyLinear) else sum(t.nbytes for t in (*m.parameters(False), *m.buffers(False)))
        for m in model.modules()
    )


def multiplies_all(model: nn.Module, dtype: torch.dtype, compiled: bool) -> bool:
    """Whether our products or oneDNN's multiply all linear layers in `dtype` on this processor.

    PyTorch's own products multiply bf16 on every processor, many times slower than fp32 where these do not.
    """
    if not torch.backends.mkldnn.is_available():
        return False
    if dtype is torch.float32 or torch.ops.mkldnn._is_mkldnn_bf16_supported():
        return True
    layers = (module for module in model.modules() if isinstance(module, Linear))
    return compiled and all(multiplies(dtype, layer.in_features) for layer in layers)


def _fuses(module: nn.Module) -> bool:
    """Whether a dense network can be fused as a whole: none of its layers is quantised."""
    is_known = isinstance(module, FeedForward) and module.activation in _FUSED
    return is_known and all(isinstance(layer, Linear) for layer in module.children())


class CompiledBlock:
    """A replacement of a block's module, for caches whose tokens are all in `decode`."""

    def __init__(self, block: Any, native: Native, cache: LayerCache) -> None:
        layers = (block.attention.qkv, block.attention.out, block.ffn.gate, block.ffn.up, block.ffn.down)
        weights: list[Weight | None] = [getattr(layer, "held", None) for layer in layers]
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


# Switches of a model that `decode.c` computes, or that have no effect within a block.
_COMPILED_SWITCHES = {
    "parallel_norms", "norm_bias", "norm_weight", "out_bias", "ffn_bias", "rotary_size", "full_every", "full_offset",
    "full_first", "rope_theta_local", "rope_short", "rope_long", "unrotated_every", "attention_cap", "attention_sinks",
    "residual_scale", "attention_scale", "embedding_norm", "embedding_scale", "head_bias", "logit_cap", "logit_scale",
}  # fmt: skip


def _is_known(block: Any, native: Native) -> bool:
    attention, ffn = block.attention, block.ffn
    if type(attention) is not Attention or not isinstance(ffn, FeedForward | PackedFeedForward):
        return False
    if attention.config.qk_norm or not _COMPILED_SWITCHES.issuperset(attention.config.switched):
        return False
    layers = (attention.qkv, attention.out, ffn.up, ffn.down, ffn.gate)
    weights: list[Weight | None] = [getattr(layer, "held", None) for layer in layers if layer is not None]
    # 8-bit formats need fp32 activations; with bf16 activations all weights are bf16.
    fits = all(w is not None and (w.dtype is torch.bfloat16) == (native.activation is torch.bfloat16) for w in weights)
    return fits and all(isinstance(norm, PackedNorm) for norm in _norms(block)) and ffn.activation in ACTIVATIONS


def _norms(block: Any) -> tuple[nn.Module, nn.Module]:
    return block.attention_norm, block.attention_norm if block.parallel == 1 else block.ffn_norm
