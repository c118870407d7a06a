"""Small experiments after the loop has ended, if no curve says what a change is worth; some 0.2 s in all."""

from __future__ import annotations

import math
import statistics
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_map_only

from ironlaw.kernels.attention import causal_attention
from ironlaw.workload.trace_kernels import tensors

TURNS, MIN_TURNS, MAX_SECONDS = 7, 2, 1.0
ALIGNMENT = 64  # elements: tiles of matrix units, cache lines, and every vector width in use divide it
MIN_ROWS, MAX_ROWS, MIN_ODD, REPEATS = 256, 4096, 100, 5
THREAD_CALLS = 12
MAX_LAYERS = MAX_MISALIGNED = 4
KERNELS: dict[str, Callable[..., torch.Tensor]] = {
    "fused": torch.nn.functional.scaled_dot_product_attention,
    "native": lambda q, k, v, is_causal: causal_attention(q, k, v),
}
MASKS = ("add", "baddbmm", "masked_fill", "where")  # calls between a product of scores and their softmax
FUSED = (torch.optim.AdamW, torch.optim.Adam, torch.optim.SGD, torch.optim.Adagrad)  # have a fused kernel on a CPU
_DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}


@dataclass(frozen=True)
class ModuleCall:
    """A module with what it was called with: its passes can be run again, on copies of its weights."""

    module: nn.Module
    inputs: Any  # args and kwargs
    autocast: torch.dtype | None

    @classmethod
    def of(cls, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> ModuleCall:
        device = next((t.device.type for t in tensors((args, kwargs))), "cpu")
        cast = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else None
        return cls(module, tree_map_only(torch.Tensor, torch.Tensor.detach, (args, kwargs)), cast)

    def passes(self, dtype: torch.dtype | None = None, times: int = 1) -> Callable[[], None] | None:
        """Return a function that runs forward and backward, over `times` copies of the batch, and in another
        floating-point type if `dtype` is given. Return None if the module cannot be run so."""
        rows = next((t.shape[0] for t in tensors(self.inputs) if t.dim()), 0)

        def copied(tensor: torch.Tensor) -> torch.Tensor:
            floating = dtype is not None and tensor.is_floating_point()
            made = tensor.detach().to(dtype if floating else tensor.dtype, copy=True)
            return made.requires_grad_(tensor.requires_grad)

        def merged(tensor: torch.Tensor) -> torch.Tensor:
            return torch.cat([tensor] * times) if tensor.dim() and tensor.shape[0] == rows else tensor

        def both_ways() -> None:
            with torch.autocast("cpu", self.autocast) if self.autocast is not None else nullcontext():
                output = torch.func.functional_call(self.module, state, args, kwargs)
            roots = [t.float().sum() for t in tensors(output) if t.requires_grad]
            torch.autograd.grad(roots, weights, allow_unused=True)

        try:
            state = {n: copied(t) for n, t in (*self.module.named_parameters(), *self.module.named_buffers())}
            args, kwargs = tree_map_only(torch.Tensor, lambda t: copied(merged(t)), self.inputs)
            weights = [t for t in state.values() if t.requires_grad]
            both_ways()
        except Exception:  # of code that is not ours, and nothing rests on it
            return None
        return both_ways


def time_in_turn(works: Sequence[Callable[[], Any]], turns: int = REPEATS + 1) -> list[list[float]]:
    """Returns seconds of each way, tried one after the other, for so many turns or as many as there is time for."""
    seconds: list[list[float]] = [[] for _ in works]
    until = time.perf_counter() + MAX_SECONDS
    while len(seconds[0]) < turns and (len(seconds[0]) < MIN_TURNS or time.perf_counter() < until):
        for work, times in zip(works, seconds, strict=True):
            began = time.perf_counter()
            work()
            times.append(time.perf_counter() - began)
    return seconds


def median_seconds(works: Sequence[Callable[[], Any]]) -> list[float]:
    """Returns the median of all turns but the first of `time_in_turn`, for each way."""
    return [statistics.median(seconds[1:]) for seconds in time_in_turn(works)]


def share_saved(now: Callable[[], Any], then: Callable[[], Any], turns: int = TURNS) -> float:
    """Returns the share of the time that the second way saves."""
    shares = [1 - other / one for one, other in zip(*time_in_turn((now, then), turns), strict=True)]
    return max(0.0, statistics.median(shares))


def _rows_and_type(rows: int | None, precision: str | None) -> tuple[int, torch.dtype]:
    return min(max(rows or 0, MIN_ROWS), MAX_ROWS), _DTYPES.get(precision or "", torch.float32)


def thread_gain(
    module: nn.Module, threads: int, cores: int, rows: int | None, precision: str | None
) -> dict[str, float] | None:
    """Returns, by kind of work, the share of its time that as many threads as cores save; None if there are as many.

    Tried on the module's most frequent linear layer, and on a tensor of its output's size, both ways in turn.
    """
    if threads == cores:
        return None
    shapes = Counter(tuple(c.weight.shape) for c in module.modules() if isinstance(c, nn.Linear))
    outputs, inputs = shapes.most_common(1)[0][0] if shapes else (512, 512)
    rows, dtype = _rows_and_type(rows, precision)
    x, weight = torch.randn(rows, inputs, dtype=dtype), torch.randn(outputs, inputs, dtype=dtype)
    large = torch.randn(rows, outputs)
    kinds: dict[str, Callable[[], Any]] = {
        "matmul": lambda: torch.mm(torch.mm(x, weight.t()), weight),
        "elementwise": lambda: torch.nn.functional.gelu(large),
    }  # fmt: skip

    def run(number: int, work: Callable[[], Any]) -> None:
        torch.set_num_threads(number)
        for _ in range(THREAD_CALLS):  # of threads that take turns the best case is rare
            work()

    try:
        return {
            kind: share_saved(partial(run, threads, work), partial(run, cores, work)) for kind, work in kinds.items()
        }
    finally:
        torch.set_num_threads(threads)


def _operations(document: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """Operations of a stored trace."""
    return (dict(zip(document["columns"], row, strict=True)) for row in document["operations"])


def score_products(document: dict[str, Any]) -> list[list[int]]:
    """(batch, tokens, head size, whether they are masked) of every product that a softmax over a square of scores
    follows, in a stored trace."""
    found, product, masked = [], None, False
    for operation in _operations(document):
        function = operation["name"].rpartition(".")[2]
        if operation["matmul"]:
            product, masked = operation, False
        elif operation["phase"] == "forward" and function == "softmax" and product is not None:
            m, n, k = product["matmul"]
            if m == n:
                found.append([product["batch"], m, k, int(masked)])
        masked |= function in MASKS
    return found


def attention_seconds(products: list[list[int]], precision: str | None) -> dict[str, float] | None:
    """Returns the seconds of each kernel for these scores (batch of heads, tokens, head size, whether causal), forward
    and backward; None without any. As in the loop all forward passes run first, each with tensors of its own.
    """
    if not products:
        return None
    dtype, total = _rows_and_type(None, precision)[1], dict.fromkeys(KERNELS, 0.0)
    for (batch, tokens, size, causal), count in Counter(tuple(p) for p in products).items():
        layers = min(count, MAX_LAYERS)
        leaves = [[torch.randn(1, batch, tokens, size, dtype=dtype, requires_grad=True) for _ in range(3)]
                  for _ in range(layers)]  # fmt: skip
        gradient = torch.randn(1, batch, tokens, size, dtype=dtype)

        def both_ways(kernel: str, leaves: Any = leaves, gradient: Any = gradient, causal: bool = bool(causal)) -> None:
            outs = [KERNELS[kernel](q, k, v, is_causal=causal) for q, k, v in leaves]
            for out, three in zip(reversed(outs), reversed(leaves), strict=True):
                torch.autograd.grad(out, three, gradient)

        seconds = median_seconds([partial(both_ways, name) for name in KERNELS])
        for name, one in zip(KERNELS, seconds, strict=True):
            total[name] += count / layers * one
    return total


def fused_calls(document: dict[str, Any]) -> list[list[int]]:
    """As `score_products`, of every causal call of the fused kernel in a stored trace's forward."""
    found = []
    for operation in _operations(document):
        if operation["attention"] and operation["phase"] == "forward":
            batch, tokens, heads, _, size = operation["attention"]
            if operation["elements"] == batch * heads * tokens**2 // 2:
                found.append([batch * heads, tokens, size, 1])
    return found


def time_fused_update(optimizers: Sequence[torch.optim.Optimizer], most: int = 2**26) -> dict[str, Any] | None:
    """Returns seconds of an update now and with `fused=True`, on tensors of the parameters' sizes; None if it is fused,
    cannot be, or has more than `most` elements."""
    now = then = 0.0
    for optimizer in optimizers:
        groups = [g for g in optimizer.param_groups if not g.get("fused")]
        shapes = [p.shape for g in groups for p in g["params"] if p.device.type == "cpu" and p.dtype is torch.float32]
        is_complex = any(p.is_complex() for g in groups for p in g["params"])  # no fused kernel takes it
        if type(optimizer) not in FUSED or is_complex or not shapes or sum(math.prod(shape) for shape in shapes) > most:
            continue
        names = ("momentum", "foreach", "amsgrad", "weight_decay")
        options = {name: value for name, value in optimizer.defaults.items() if name in names}
        made = []
        for extra in (options, options | {"foreach": None, "fused": True}):
            parameters = [torch.zeros(shape, requires_grad=True) for shape in shapes]
            for parameter in parameters:
                parameter.grad = torch.zeros_like(parameter)
            kind: Any = type(optimizer)
            made.append(kind(parameters, lr=1e-9, **extra))
        unfused, fused = median_seconds([optimizer.step for optimizer in made])
        now, then = now + unfused, then + fused
    return {"seconds": now, "fused_seconds": then, "name": type(optimizers[-1]).__name__} if now else None


def misaligned_weights(module: nn.Module, rows: int | None, precision: str | None) -> list[dict[str, Any]]:
    """Returns linear layers with an odd size: seconds of their products, and of those with the next aligned size."""
    found: dict[tuple[int, int], dict[str, Any]] = {}
    rows, dtype = _rows_and_type(rows, precision)
    for name, child in module.named_modules():
        weight = child._parameters.get("weight") if isinstance(child, nn.Linear) else None  # none where it is quantised
        if weight is None or weight.device.type != "cpu" or len(found) == MAX_MISALIGNED:
            continue
        outputs, inputs = weight.shape
        is_odd = any(size % 8 and size >= MIN_ODD for size in (outputs, inputs))  # ten classes are ten classes
        if is_odd and outputs * inputs >= 1 << 16 and (outputs, inputs) not in found:
            aligned = [-(-size // ALIGNMENT) * ALIGNMENT for size in (outputs, inputs)]
            now, then = median_seconds([_product(rows, n, k, dtype) for n, k in ((outputs, inputs), aligned)])
            found[outputs, inputs] = {
                "module": name, "shape": [outputs, inputs], "aligned": aligned, "seconds": now, "aligned_seconds": then,
            }  # fmt: skip
    return list(found.values())


def odd_sizes(rows: int | None, head_size: int | None) -> dict[str, int]:
    """Returns sizes of products other than weights' that 8 does not divide: elements of 16 bits in 16 bytes."""
    sizes = {"tokens of a micro-batch": rows, "size of a head": head_size}
    return {name: size for name, size in sizes.items() if size and size % 8}


def head_size(module: nn.Module) -> int | None:
    """Returns the attribute that PyTorch's and transformers' attention modules call `head_dim`."""
    sizes = (getattr(child, "head_dim", None) for child in module.modules())
    return next((size for size in sizes if isinstance(size, int)), None)


def _product(rows: int, outputs: int, inputs: int, dtype: torch.dtype) -> Callable[[], None]:
    """Returns a function that runs the products of a linear layer, forward and backward."""
    x, weight = torch.randn(rows, inputs, dtype=dtype), torch.randn(outputs, inputs, dtype=dtype)
    gradient = torch.randn(rows, outputs, dtype=dtype)

    def both_ways() -> None:
        torch.mm(x, weight.t())
        torch.mm(gradient, weight)
        torch.mm(gradient.t(), x)

    return both_ways
