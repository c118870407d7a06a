"""Operations of ATen calls: kind, kernel, matrix product, FLOPs and minimal memory traffic.

FLOPs come from torch's own formulas (`torch.utils.flop_counter`), with two differences, as in the analytic list: a
score under the mask of a call marked as causal costs nothing, and the backward pass of fused attention counts the four
products of the model, not the fifth with which the kernel saves memory.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor
from torch.utils.flop_counter import flop_registry

from ironlaw.ledger import Kind, Phase
from ironlaw.workload.blocks import attention_score_pairs
from ironlaw.workload.operations import Operation

# Overloads differ between releases (tested: 2.13), so calls are matched by name.
_ATTENTION = "_scaled_dot_product_flash_attention_for_cpu"
_KINDS = {
    Kind.NORM: ("native_layer_norm", "native_group_norm", "native_batch_norm", "_native_batch_norm_legit",
                "_batch_norm_with_update", "batch_norm_backward", "cudnn_batch_norm", "_fused_rms_norm",
                "_native_batch_norm_legit_functional"),
    Kind.EMBEDDING: ("embedding", "embedding_dense_backward", "_embedding_bag"),
    Kind.LOSS: ("_log_softmax", "_log_softmax_backward_data", "nll_loss_forward", "nll_loss2d_forward",
                "nll_loss_backward", "nll_loss2d_backward", "mse_loss", "l1_loss", "smooth_l1_loss", "huber_loss",
                "binary_cross_entropy", "binary_cross_entropy_with_logits", "kl_div"),
}  # fmt: skip
_KIND_OF = {name: kind for kind, names in _KINDS.items() for name in names}

# Curve of a measured machine (`machine/kernels.py`) for ATen names; other calls keep their own name.
_KERNELS = {
    "native_layer_norm": "layernorm_forward", "native_layer_norm_backward": "layernorm_backward",
    "embedding": "embedding_forward", "embedding_dense_backward": "embedding_backward",
    "_log_softmax": "loss_forward", "_log_softmax_backward_data": "loss_backward",
    "silu": "silu_forward", "silu_backward": "silu_backward",
    "add": "add", "sub": "add", "add_": "add_in_place", "sub_": "add_in_place", "mul": "multiply",
    "cat": "concatenate", "_to_copy": "cast", "bernoulli_": "noise",
}  # fmt: skip
NO_KERNEL = ("empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided",
             "_sparse_coo_tensor_with_dims_and_tensors")  # fmt: skip
_OVERWRITES = ("zero_", "fill_", "copy_", "bernoulli_", "normal_", "uniform_", "random_")
_PICKS = ("nll_loss_forward", "nll_loss2d_forward")  # read one number per row


GROUP = "module"
_DTYPES = {torch.bfloat16: "bf16", torch.float16: "fp16", torch.float64: "fp64"}


@dataclass(frozen=True)
class TracedOperation(Operation):
    """An operation with its element type."""

    dtype: str = "fp32"  # of the result: fp32, bf16, fp16, fp64
    cpu_scratch_bytes: int = 0  # allocated and freed by a CPU kernel within the call


def _call(kind: Kind, kernel: str, elements: int, moved: int, like: Tensor | None, **more: Any) -> TracedOperation:
    """Returns one kernel of the element type of `like`; name, memory and phase are set later."""
    dtype = "fp32" if like is None else _DTYPES.get(like.dtype, "fp32")
    return TracedOperation(
        "", kind, Phase.FORWARD, GROUP, kernel, elements=elements, bytes_moved=moved, dtype=dtype, **more
    )


def base_name(func: Any) -> str:
    """Returns the name without namespace and overload: "add" for `aten.add.Tensor`."""
    return str(func._overloadpacket.__name__)


def tensors(value: Any) -> Iterator[Tensor]:
    """Yields every tensor in nested lists, tuples and dicts."""
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, (list, tuple)):
        for item in value:
            yield from tensors(item)
    elif isinstance(value, dict):
        for item in value.values():
            yield from tensors(item)


def storages(tensor: Tensor) -> list[torch.UntypedStorage]:
    """Returns the storages of a tensor: one, or those of a sparse tensor's indices and values."""
    if tensor.layout is torch.strided:
        return [tensor.untyped_storage()]
    if tensor.layout is torch.sparse_coo:
        parts = [tensor._indices(), tensor._values()]
    elif tensor.layout is torch.sparse_csr:
        parts = [tensor.crow_indices(), tensor.col_indices(), tensor.values()]
    else:
        parts = []
    return [part.untyped_storage() for part in parts]


def touched_bytes(*values: Any) -> int:
    """Returns the bytes touched when whole tensors are read: broadcast dimensions count once."""
    total = 0
    for tensor in tensors(values):
        if tensor.layout is torch.strided:
            read = math.prod(n for n, step in zip(tensor.shape, tensor.stride(), strict=True) if step)
            total += read * tensor.element_size()
        else:
            total += sum(storage.nbytes() for storage in storages(tensor))
    return total


def kernels_of(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], out: Any) -> list[TracedOperation]:
    """Returns the kernels of one ATen call; several for a convolution's backward pass."""
    name = base_name(func)
    if name.startswith(_ATTENTION):
        return [_attention(name, args, kwargs, out)]
    if name == "convolution":
        return [_convolution(args, out)]
    if name == "convolution_backward":
        return _convolution_backward(args)
    if name.startswith(LSTM_LAYER):
        return _lstm(args, backward=name.endswith("_backward"))
    dense = all(t.layout is torch.strided for t in tensors((args, out)))
    if dense and name in ("mm", "addmm", "bmm", "baddbmm"):
        return [_matmul(name, args, out)]
    if name == "_grouped_mm":
        return [_grouped(args, kwargs, out)]
    formula = flop_registry.get(func._overloadpacket) if dense else None  # torch's formulas are for dense tensors
    flops = int(formula(*args, **kwargs, out_val=out)) if formula else None
    kind = _KIND_OF.get(name) or _KIND_OF.get(name.removesuffix("_backward")) or Kind.ELEMENTWISE
    if formula is not None and flops:
        kind = Kind.ATTENTION if "attention" in name else Kind.MATMUL
    results = list(tensors(out))
    inputs = list(tensors((args, kwargs)))
    elements = max((t.numel() for t in results + inputs), default=0)
    if kind is Kind.EMBEDDING or name.startswith("index"):
        elements = max((t.numel() for t in results if name == "embedding"), default=inputs[0].numel() if inputs else 0)
    kernel, moved = _kernel(name, kwargs, out), _traffic(name, args, kwargs, out)
    return [_call(kind, kernel, elements, moved, results[0] if results else None, flops=flops)]


def _kernel(name: str, kwargs: dict[str, Any], out: Any) -> str:
    if name in ("gelu", "gelu_backward"):
        tanh = "_tanh" if kwargs.get("approximate") == "tanh" else ""
        return f"gelu{tanh}_{'backward' if name.endswith('backward') else 'forward'}"
    if name == "sum" and isinstance(out, Tensor) and out.numel() > 1:
        return "sum_rows"
    return _KERNELS.get(name, name.strip("_"))


def _traffic(name: str, args: tuple[Any, ...], kwargs: dict[str, Any], out: Any) -> int:
    """Returns the bytes of inputs, read once, and outputs, written once. A lookup reads only its rows."""
    written = touched_bytes(out)
    if name == "embedding":
        return 2 * written + touched_bytes(args[1:])
    if name in _PICKS:
        return 3 * touched_bytes(args[1])
    read = {id(t): t for t in tensors((args, kwargs))}  # an operand that occurs twice is read once
    if name in _OVERWRITES:
        read.pop(id(args[0]), None)
    return written + touched_bytes(read)


def _product(
    kernel: str, shape: tuple[int, int, int], batch: int, elements: int, moved: int, like: Tensor
) -> TracedOperation:
    """Returns `batch` products C[m, n] = A[m, k] B[k, n] of a shape (m, n, k)."""
    flops = 2 * math.prod(shape) * batch
    return _call(Kind.MATMUL, kernel, elements, moved, like, flops=flops, matmul=shape, batch=batch)


def _matmul(name: str, args: tuple[Any, ...], out: Tensor) -> TracedOperation:
    left, right = args[1:3] if name in ("addmm", "baddbmm") else args[:2]
    m, k = left.shape[-2:]
    n = right.shape[-1]
    # Only the gradient of a weight has a transposed left operand.
    transposed = left.dim() == 2 and left.stride(0) == 1 and left.stride(1) == left.shape[0] > 1
    kernel = "matmul_bias" if name == "addmm" else "matmul_weight_gradient" if transposed else "matmul"
    batch = out.numel() // max(1, m * n)
    return _product(kernel, (m, n, k), batch, out.numel(), touched_bytes(left, right, out), out)


def grouped_shape(left: Tensor, right: Tensor, offs: Tensor | None = None, *_: Any, **__: Any) -> tuple[int, ...]:
    """Returns the shape of a grouped product, whose groups divide the rows, the columns or the summed dimension."""
    if left.dim() == right.dim() == 2:
        assert offs is not None
        return offs.shape[0], left.shape[0], right.shape[1]
    if left.dim() == 2 or right.dim() == 2:
        return left.shape[-2], right.shape[-1]
    return left.shape[0], left.shape[1], right.shape[2]


def _grouped(args: tuple[Any, ...], kwargs: dict[str, Any], out: Tensor) -> TracedOperation:
    """Returns the products of experts, each with the mean load. torch's counter has no formula for them."""
    left, right = args[:2]
    offs: Any = args[2] if len(args) > 2 else kwargs.get("offs")
    groups = next((t.shape[0] for t in (right, left) if t.dim() == 3), None) or offs.shape[0]
    m, n, k = left.shape[-2], right.shape[-1], left.shape[-1]
    flops = 2 * m * n * k * (groups if left.dim() == right.dim() == 3 else 1)
    kernel = "matmul"
    if left.dim() == right.dim() == 2:  # gradient of the weights: the summed rows are divided among groups
        kernel, k = "matmul_weight_gradient", k // groups
    elif left.dim() == 2:
        m = m // groups
    elif right.dim() == 2:
        n = n // groups
    shape = (max(1, m), max(1, n), max(1, k))
    product = _product(kernel, shape, groups, out.numel(), touched_bytes(left, right, out), out)
    return replace(product, flops=flops)


def _positions(images: Tensor) -> int:
    """Returns the pixels of a batch of images (N, C, ...), each with all channels."""
    return images.numel() // images.shape[1]


def _convolution(args: tuple[Any, ...], out: Tensor) -> TracedOperation:
    """Returns the implicit matrix product: positions x output channels x (input channels x kernel), per group."""
    x, weight = args[:2]
    transposed, groups = bool(args[6]), args[8]
    outer, inner = weight.shape[0] // groups, math.prod(weight.shape[1:])
    # A transposed weight is (in, out / groups, kernel): a product of each input position and kernel element.
    shape = (_positions(x), inner, outer) if transposed else (_positions(out), outer, inner)
    return _product("convolution", shape, groups, out.numel(), touched_bytes(x, weight, out), out)


def _convolution_backward(args: tuple[Any, ...]) -> list[TracedOperation]:
    """Returns the gradients of the input and of the weight as one product each, and the sum for the bias."""
    dy, x, weight = args[:3]
    transposed, groups, mask = bool(args[7]), args[9], args[10]
    positions = _positions(x if transposed else dy)  # the product has the positions of the smaller image
    outer, inner = weight.shape[0] // groups, math.prod(weight.shape[1:])
    of_input = (positions, outer, inner) if transposed else (positions, inner, outer)
    moved = touched_bytes(dy, x, weight)
    calls = [
        _product("convolution_input_gradient", of_input, groups, x.numel(), moved, dy),
        _product("convolution_weight_gradient", (outer, inner, positions), groups, weight.numel(), moved, dy),
        _call(Kind.ELEMENTWISE, "sum_rows", dy.numel(), touched_bytes(dy), dy),
    ]
    return [call for call, wanted in zip(calls, mask, strict=True) if wanted]


def _lstm(args: tuple[Any, ...], backward: bool) -> list[TracedOperation]:
    """Returns a layer's product with its whole input, and for each step the product with its state and the cell; or
    the gradients of all these. Products of the steps are a batch, though each waits for the one before."""
    x, layer = args[0], LstmLayer.of(*args[:2])
    rows, gates, inputs, hidden = layer.tokens * layer.batch, 4 * layer.hidden, layer.inputs, layer.hidden

    def product(kernel: str, m: int, n: int, k: int, batch: int = 1) -> TracedOperation:
        moved = (m * k + k * n + m * n) * batch * x.itemsize
        return _product(kernel, (m, n, k), batch, m * n * batch, moved, x)

    def each(kernel: str, touched: int) -> TracedOperation:
        return _call(Kind.ELEMENTWISE, kernel, rows * gates, touched * rows * hidden * x.itemsize, x)

    if not backward:  # a cell reads and writes four gates and its state, and writes its output
        of_state = product("matmul", layer.batch, gates, hidden, batch=layer.tokens)
        return [product("matmul_bias", rows, gates, inputs), of_state, each("lstm_cell", touched=11)]
    of_state = product("matmul", layer.batch, hidden, gates, batch=layer.tokens)
    of_weights = [product("matmul_weight_gradient", gates, columns, rows) for columns in (inputs, hidden)]
    of_input = product("matmul", rows, inputs, gates)
    return [each("lstm_cell_backward", touched=14), of_state, of_input, *of_weights, each("sum_rows", touched=4)]


def _attention(name: str, args: tuple[Any, ...], kwargs: dict[str, Any], out: Any) -> TracedOperation:
    """Returns fused attention with (sequences, tokens, heads, kv_heads, head_size); elements: unmasked scores."""
    backward = name.endswith("_backward")
    query, key, value = args[1:4] if backward else args[:3]
    causal = args[7] if backward else (args[4] if len(args) > 4 else kwargs.get("is_causal", False))
    batch, heads, tokens, size = query.shape
    keys = key.shape[2]
    pairs = attention_score_pairs(tokens, keys) if causal else 2 * tokens * keys  # twice the unmasked scores
    products = 2 if backward else 1  # for each of QK^T and PV
    flops = products * batch * heads * pairs * (size + value.shape[-1])
    inputs, outputs = touched_bytes(query, key, value), touched_bytes(args[4] if backward else out[0])
    moved = 2 * inputs + 2 * outputs if backward else inputs + outputs
    kernel, shape = f"attention_{'backward' if backward else 'forward'}", (batch, tokens, heads, key.shape[1], size)
    return _call(Kind.ATTENTION, kernel, batch * heads * pairs // 2, moved, query, flops=flops, attention=shape)


# -- scratch memory of kernels -----------------------------------------------------------------------------------------

_PROMOTES = ("add", "sub", "mul", "div", "pow", "maximum", "minimum", "eq", "ne", "lt", "le", "gt", "ge")
_IN_ROWS = ("native_layer_norm", "_softmax", "_log_softmax")  # copy what does not lie in rows
BLOCK, MIN_BLOCKED_CHANNELS = (16, 16) if torch.backends.cpu.get_cpu_capability().startswith("AVX512") else (8, 4)
"""Channels in a block of oneDNN's image layout on this processor, as many as a register holds fp32 numbers, and the
fewest channels of an input image that oneDNN copies into this layout (measured with AVX-512 and AVX2)."""


def scratch_bytes(func: Any, args: tuple[Any, ...], out: Any) -> int:
    """Returns the bytes that a CPU kernel allocates besides its results (measured with torch 2.13's profiler):
    operands cast to their common type or laid in rows, images in oneDNN's layout, or image patches as columns."""
    name = base_name(func)
    if name.startswith("convolution"):
        return _image_scratch(args, out)
    if name == "native_batch_norm_backward":  # makes the gradient of a contiguous input twice
        return args[1].nbytes if out[0] is not None and all(map(_is_dense, args[:2])) else 0
    if name in ("_fft_c2c", "_fft_r2c", "_fft_c2r"):
        return _fourier_copies(name, *args[:2]) * args[0].nbytes
    if name == "native_group_norm_backward":  # two sums of each channel
        return 2 * args[1].shape[0] * args[1].shape[1] * args[1].itemsize
    if name == "linalg_matrix_exp":  # a scaled copy, five powers of it and five sums of these, of the largest degree
        return (10 if args[0].dim() > 2 else 12) * out.nbytes
    if name.startswith(LSTM_LAYER):
        layer = LstmLayer.of(*args[:2])
        return layer.backward_scratch if name.endswith("_backward") else layer.forward_scratch(torch.is_grad_enabled())
    operands = [arg for arg in args[:2] if isinstance(arg, Tensor) and arg.dim() and arg.layout is torch.strided]
    if name.startswith(_IN_ROWS):
        return sum(t.nbytes for t in operands if not t.is_contiguous())
    if name.rstrip("_") in _PROMOTES and len(operands) == 2:
        shared = torch.result_type(*operands)
    elif name == "sum":
        shared = out.dtype
    else:
        return 0
    return sum(t.numel() * shared.itemsize for t in operands if t.dtype != shared)


def _fourier_copies(name: str, x: Tensor, dims: list[int]) -> int:
    """Returns how often MKL copies what it transforms, to lay the other dimensions in one; twice if the result is real
    and several dimensions are transformed, which it does one after the other."""
    if name == "_fft_c2r" and len(dims) > 1:
        return 2
    others = sorted((d for d in range(x.dim()) if d not in dims and x.shape[d] > 1), key=x.stride, reverse=True)
    return int(any(x.stride(a) != x.stride(b) * x.shape[b] for a, b in pairwise(others)))


def _is_dense(tensor: Tensor) -> bool:
    """Returns whether a tensor is contiguous in PyTorch's order or with the channels last."""
    orders = (torch.contiguous_format, torch.channels_last, torch.channels_last_3d)
    return any(tensor.is_contiguous(memory_format=order) for order in orders)


def _image_scratch(args: tuple[Any, ...], out: Any) -> int:
    """Scratch bytes for `args` of a convolution (x, weight, bias, stride, ...) or its gradients (dy, x, weight, ...).

    oneDNN copies input images into its layout, unless they have few channels, and results out of it.
    """
    backward = isinstance(out, tuple)
    x, weight, y = (args[1], args[2], args[0]) if backward else (args[0], args[1], out)
    stride, *others = args[4:10] if backward else args[3:9]  # padding, dilation, transposed, output padding, groups
    transposed = others[2]
    with torch.backends.mkldnn.flags(enabled=torch.backends.mkldnn.is_available()):  # a trace disables oneDNN
        library = torch._C._select_conv_backend(x, weight, None, stride, *others, [y.shape[1]]).name
    if library not in ("Mkldnn", "???"):  # oneDNN's transposed convolutions have no name
        window = math.prod(weight.shape[2:])
        columns = _positions(x if transposed else y) * weight.shape[1] * window * x.itemsize  # for one group
        return columns if library.startswith("Slow") and window > 1 else 0
    block = 1 if max(stride) > 1 and (backward or transposed) else BLOCK  # strided gradients use no blocks
    channels_last = _channels_last(x)  # images of this layout are not copied
    blocks_x, blocks_y = (0 if channels_last else _in_blocks(image, block) for image in (x, y))
    read_x, read_y = (
        size if image.shape[1] >= MIN_BLOCKED_CHANNELS else 0 for image, size in ((x, blocks_x), (y, blocks_y))
    )
    if not backward:
        return max(read_x + weight.nbytes + blocks_y - y.nbytes, blocks_y + (y.nbytes if transposed else 0))
    # Copies in the layout of x.
    copies = (y.nbytes if _channels_last(y) != channels_last else 0) + (weight.nbytes if channels_last else 0)
    of_input = 0 if out[0] is None else blocks_y + blocks_x - x.nbytes
    if out[0] is not None and max(stride) > 1 and x.dim() == 4 and others[4] == 1 and not (transposed or channels_last):
        of_input = 2 * x.nbytes - sum(t.nbytes for t in tensors(out[1:]))  # two copies, before other gradients exist
    groups = others[4]
    of_weight = _wide_scratch(x, weight, y, groups) if weight.shape[-1] > MAX_DIRECT_WIDTH else read_x + read_y
    results = weight.nbytes + (_weight_in_blocks(weight, groups) if channels_last else 0)
    return copies + max(of_input, 0 if out[1] is None else max(of_weight, results))


MAX_DIRECT_WIDTH, MAX_SINGLE_WIDTH = 14, 3
"""The widest kernel of oneDNN's own weight gradients: of wider ones they are products of images' columns. And the
widest for which it takes a channel by itself where images are in channels-last layout."""


def _weight_in_blocks(weight: Tensor, groups: int) -> int:
    """Returns the bytes of a weight with the input and output channels of each group padded to blocks."""
    outputs, inputs = len(weight) // groups, weight.shape[1]
    if outputs == inputs == 1 and weight.shape[-1] <= MAX_SINGLE_WIDTH:
        return weight.nbytes
    blocks = math.ceil(outputs / BLOCK) * math.ceil(inputs / BLOCK)
    return weight.nbytes // (outputs * inputs) * BLOCK**2 * blocks


def _wide_scratch(x: Tensor, weight: Tensor, y: Tensor, groups: int) -> int:
    """Returns the scratch bytes of a wide weight gradient (`src/cpu/gemm_convolution_utils` of oneDNN 3.12): sums of
    each thread, for which it takes four times their bytes, and columns, of fewer positions at once where all of them
    take more than it allows itself."""
    positions, limit = math.prod(y.shape[2:]), 15 * (x.nbytes + weight.nbytes + y.nbytes)
    threads = torch.get_num_threads() if (len(x) > 1 or groups > 2) else 1
    threads = threads if positions / threads < 256 else 1
    column = weight[0].nbytes
    if threads * column * positions > (left := limit - 4 * threads * weight.nbytes):
        positions = max(16, int(0.05 * (left // (threads * column))))
    return threads * (4 * weight.nbytes + column * positions)


def _channels_last(image: Tensor) -> bool:
    return image.dim() == 4 and image.stride(1) == 1 and image.shape[1] > 1


def _in_blocks(image: Tensor, block: int) -> int:
    """Returns the bytes of images with channels padded to blocks."""
    return image.nbytes // image.shape[1] * block * math.ceil(image.shape[1] / block)


LSTM_LAYER = "mkldnn_rnn_layer"
"""Call of a CPU for one layer and direction of an LSTM."""


@dataclass(frozen=True)
class LstmLayer:
    """Bytes of oneDNN's kernel for one layer and direction of an LSTM (`src/cpu/rnn/rnn_utils` of oneDNN 3.12).

    It keeps gates, states and room for all their gradients from forward to backward, and copies weights. Rows of its
    matrices end on 64 bytes, and on 64 more if they have a multiple of 256 numbers; each part begins at a page.
    """

    tokens: int
    batch: int
    inputs: int
    hidden: int
    itemsize: int

    @classmethod
    def of(cls, x: Tensor, weight: Tensor) -> LstmLayer:
        """Return the sizes of a layer with the input (T, B, I) and the weight (4 H, I)."""
        tokens, batch, inputs = x.shape
        return cls(tokens, batch, inputs, weight.shape[0] // 4, x.itemsize)

    def _padded(self, row: int, itemsize: int) -> int:
        """Returns the bytes of a row."""
        numbers = 64 // itemsize * math.ceil(row / (64 // itemsize))
        return itemsize * numbers + 64 * (numbers % 256 == 0)

    @property
    def workspace(self) -> int:
        return self._states + sum(map(_pages, (
            self.tokens * self.batch * self._padded(4 * self.hidden, self.itemsize),
            self.tokens * self.batch * self._padded(self.hidden, self.itemsize),
            *[self._rows * self._padded(max(self.inputs, self.hidden), 4)] * 2, self._rows * self.hidden * 4,
        )))  # fmt: skip

    @property
    def _rows(self) -> int:
        """Rows of states: of the layer and of what it reads, after each step and before the first."""
        return 2 * (self.tokens + 1) * self.batch

    @property
    def _states(self) -> int:
        wide = self._padded(max(self.inputs, self.hidden), self.itemsize)
        return _pages(self._rows * wide) + _pages(self._rows * self.hidden * self.itemsize)

    def forward_scratch(self, training: bool) -> int:
        """Return the bytes allocated besides the results. `training`: a workspace is kept."""
        weights = (self.inputs + self.hidden) * self._padded(4 * self.hidden, self.itemsize)
        merged = self.tokens if training and self.batch < 128 else 1  # steps whose products of the input are one
        return weights + self._gates(merged) + (0 if training else self._states)

    @property
    def backward_scratch(self) -> int:
        copied = [c for c in (self.inputs, self.hidden) if self._padded(c, self.itemsize) != c * self.itemsize]
        weights = 4 * self.hidden * sum(self._padded(columns, self.itemsize) for columns in copied)
        return weights + (self.inputs + self.hidden) * self._padded(4 * self.hidden, 4) + self._gates(self.tokens)

    def _gates(self, steps: int) -> int:
        outputs = _pages(self.batch * self._padded(self.hidden, 4))
        return _pages(steps * self.batch * self._padded(4 * self.hidden, 4)) + 2 * outputs


def _pages(size: int) -> int:
    return 4096 * math.ceil(size / 4096)
