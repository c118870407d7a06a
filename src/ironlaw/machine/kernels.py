"""Builders of the kernels of a training step, to time each of them at any size.

Names are those of `Operation.kernel` in the workload. A builder returns one call on inputs of `elements` elements.
The timer alternates between several such calls, so that caches hold as little as in a real step.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from ironlaw.kernels.attention import causal_attention
from ironlaw.ledger import Phase
from ironlaw.machine.profile import STEP_PHASES, TINY, reference_step
from ironlaw.model.config import ModelConfig
from ironlaw.model.linear import onednn_product, onednn_weight_gradient, use_onednn
from ironlaw.model.rotary import rotary_tables, rotate
from ironlaw.model.transformer import Transformer

Call = Callable[[], object]
WIDTH = 512  # row length of row-wise kernels
VOCABULARY = 4096


class Pool:
    """Random numbers generated once and handed out as consecutive tensors, from the start again at the end."""

    def __init__(self, device: torch.device, elements: int = 24 * 2**20) -> None:
        self.device = device
        # An explicit dtype and generator: the pool may be created in a user's loop, whose own must not change.
        numbers = torch.Generator(device).manual_seed(0)
        self._values = {torch.float32: torch.randn(elements, device=device, dtype=torch.float32, generator=numbers)}
        self._offset = 0

    def take(self, *shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
        if dtype not in self._values:
            self._values[dtype] = self._values[torch.float32].to(dtype)
        values = self._values[dtype]
        count = math.prod(shape)
        if self._offset + count > values.numel():
            self._offset = 0
        start = self._offset
        self._offset += count
        # `.data` has its own version counter, so that in-place kernels do not invalidate the graphs of others.
        return values[start : start + count].view(shape).data

    def parameter(self, *shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
        """Return a leaf tensor that requires a gradient."""
        return self.take(*shape, dtype=dtype).requires_grad_()


def _rows(elements: int, width: int = WIDTH) -> int:
    return max(1, elements // width)


def _backward(output: Tensor, inputs: tuple[Tensor, ...]) -> Call:
    """Return a repeatable backward pass of a computed output."""
    gradient = torch.ones_like(output)
    return lambda: torch.autograd.grad(output, inputs, gradient, retain_graph=True)


# Kernels that autocast runs in reduced precision between matrix products; norms, loss and update stay in fp32.
REDUCED = ("sum_rows", "concatenate", "rotary", "multiply", "add_in_place", "gelu", "silu")


def _kernel(
    function: Callable[..., Any], inputs: Callable[[int], tuple[Tensor, ...]], backward: bool = False
) -> Callable[[int], Call]:
    def build(elements: int) -> Call:
        given = inputs(elements)
        if not backward:
            return lambda: function(*given)
        return _backward(function(*given), tuple(tensor for tensor in given if tensor.requires_grad))

    return build


@dataclass(frozen=True)
class _Inputs:
    """Factories of kernel inputs with a given number of elements."""

    pool: Pool
    dtype: torch.dtype

    def flat(self, elements: int, grad: bool = False) -> Tensor:
        shape = (_rows(elements), WIDTH)
        return self.pool.parameter(*shape, dtype=self.dtype) if grad else self.pool.take(*shape, dtype=self.dtype)

    def several(self, count: int, grad: bool = False) -> Callable[[int], tuple[Tensor, ...]]:
        return lambda elements: tuple(self.flat(elements, grad) for _ in range(count))

    def norm_inputs(self, elements: int) -> tuple[Tensor, ...]:
        ones = (torch.full((WIDTH,), value, device=self.pool.device, requires_grad=True) for value in (1.0, 0.0))
        return self.flat(elements, grad=True), *ones

    def rotary_inputs(self, elements: int) -> tuple[Tensor, ...]:
        config = ModelConfig(layers=1, hidden=WIDTH, heads=8, vocab=2, context=256, positions="rope")
        tokens = min(256, _rows(elements))
        x = self.pool.take(max(1, _rows(elements) // tokens), tokens, 8, WIDTH // 8, dtype=self.dtype)
        return x, *(table[:tokens].to(self.pool.device) for table in rotary_tables(config))

    def labels(self, rows: int) -> Tensor:
        return torch.randint(0, VOCABULARY, (rows,), device=self.pool.device)

    def embedding_inputs(self, elements: int) -> tuple[Tensor, ...]:
        return self.labels(_rows(elements)), self.pool.parameter(VOCABULARY, WIDTH)

    def loss_inputs(self, elements: int) -> tuple[Tensor, ...]:
        rows = _rows(elements, VOCABULARY)
        return self.pool.parameter(rows, VOCABULARY), self.labels(rows)

    def with_gradient(self, elements: int) -> Tensor:
        weight = self.flat(elements, grad=True)
        weight.grad = self.flat(elements)
        return weight


ACTIVATIONS: dict[str, Callable[..., Tensor]] = {
    "gelu": F.gelu, "gelu_tanh": partial(F.gelu, approximate="tanh"), "silu": F.silu,
}  # fmt: skip


def elementwise_builders(pool: Pool, dtype: torch.dtype = torch.float32) -> dict[str, Callable[[int], Call]]:
    """Return builders by kernel name: all in fp32, and in other precisions the `REDUCED` ones."""
    of = _Inputs(pool, dtype)
    # The limit is never reached: scaling by 1 costs as much as any scaling and does not change the numbers.
    clip = partial(torch.nn.utils.clip_grad_norm_, max_norm=1e9)
    builders: dict[str, Callable[[int], Call]] = {
        "add": _kernel(torch.add, of.several(2)),
        "add_in_place": _kernel(lambda x, y: x.add_(y, alpha=1e-9), of.several(2)),
        "multiply": _kernel(torch.mul, of.several(2)),
        "multiply_backward": _kernel(torch.mul, of.several(2, grad=True), backward=True),
        "cast": _kernel(lambda x: x.to(torch.bfloat16), of.several(1)),
        "noise": _kernel(lambda x: torch.empty_like(x).bernoulli_(0.9), of.several(1)),
        "sum_rows": _kernel(lambda x: x.sum(dim=0), of.several(1)),
        "concatenate": _kernel(lambda *parts: torch.cat(parts, dim=-1), lambda elements: of.several(3)(elements // 3)),
        "rotary": _kernel(rotate, of.rotary_inputs),
        "adamw": lambda elements: torch.optim.AdamW([of.with_gradient(elements)], fused=True).step,
        "clip": _kernel(clip, lambda elements: (of.with_gradient(elements),)),
    }
    both: dict[str, tuple[Callable[..., Tensor], Callable[[int], tuple[Tensor, ...]]]] = {
        "embedding": (F.embedding, of.embedding_inputs),
        "loss": (F.cross_entropy, of.loss_inputs),
        "layernorm": (lambda x, weight, bias: F.layer_norm(x, (WIDTH,), weight, bias), of.norm_inputs),
        "rmsnorm": (lambda x, weight: F.rms_norm(x, (WIDTH,), weight), lambda elements: of.norm_inputs(elements)[:2]),
    }
    for name, (function, given) in both.items():
        builders |= {f"{name}_{way}": _kernel(function, given, way == "backward") for way in ("forward", "backward")}
    for name, activation in ACTIVATIONS.items():
        builders[f"{name}_forward"] = _kernel(activation, of.several(1))
        builders[f"{name}_backward"] = _kernel(activation, of.several(1, grad=True), backward=True)
    if dtype == torch.float32:
        return builders
    return {name: builder for name, builder in builders.items() if name.startswith(REDUCED)}


def shared_builder(pool: Pool) -> Call:
    """Small kernels, most of which read what another core has just written: each core takes its part of a range, and
    the parts of a half are not those of the whole.

    The cores of a virtual machine come to lie under one last-level cache or under two, for seconds or minutes at a
    time. Apart, they pass data on in 2.3 times the time, while a kernel alone, whose cores read their own data, takes
    as long and a stream through memory half as long, with two caches. This mix takes 1.5 times as long, as all that
    was not a product in a step of a 4 x 256 GPT did (two cores of an EPYC of Zen 4).
    """
    data, half, own = pool.take(2**20), 2**19, pool.take(2**17)

    def call() -> None:
        for _ in range(8):  # together longer than a turn of another program on one of the cores
            for part in (data, data[half:], data[:half]):
                part.mul_(-1.0)
            F.gelu(own, approximate="tanh")

    return call


def update_builder(pool: Pool, tensors: int) -> Call:
    """Clipping and updating many tiny tensors: the cost per tensor, which matters for small models."""
    weights = [pool.parameter(64) for _ in range(tensors)]
    for weight in weights:
        weight.grad = pool.take(64)
    optimizer = torch.optim.AdamW(weights, fused=True)

    def update() -> None:
        torch.nn.utils.clip_grad_norm_(weights, 1e9)
        optimizer.step()

    return update


def engine_builder() -> Call:
    """A backward pass with almost no work: the cost of the autograd engine."""
    x = torch.zeros(1, requires_grad=True)
    return _backward(x * 2.0, (x,))


def tiny_builder(device: torch.device, layers: int, backward: bool, onednn: bool) -> Call:
    """Forward, or forward and backward pass of TINY with `layers` layers; differences give the cost of one layer.

    On CUDA under autocast, as most runs there: its casts cost the host as much as other operations.
    """
    model = Transformer(TINY.model_copy(update={"layers": layers})).to(device)
    use_onednn(model, onednn)
    tokens = torch.zeros(1, TINY.context, dtype=torch.long, device=device)

    def call() -> None:
        with torch.autocast(device.type, dtype=torch.bfloat16, enabled=device.type == "cuda"):
            loss = model(tokens, tokens)
        if backward:
            loss.backward()
            model.zero_grad(set_to_none=True)

    return call


def step_builders(device: torch.device, dtype: torch.dtype, onednn: bool) -> dict[Phase, Call]:
    """A training step of the device's reference model, as in the trainer: up to and with each of its phases."""
    config, sequences = reference_step(device.type)
    model = Transformer(config).to(device)
    use_onednn(model, onednn)
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    tokens = torch.randint(0, config.vocab, (sequences, config.context), device=device)

    def step(last: Phase) -> None:
        with torch.autocast(device.type, dtype=torch.bfloat16, enabled=dtype == torch.bfloat16):
            loss = model(tokens, tokens)
        if last is Phase.FORWARD:
            return
        loss.backward()
        if last is Phase.OPTIMIZER:
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
        optimizer.zero_grad(set_to_none=True)

    return {phase: partial(step, phase) for phase in STEP_PHASES}


def matmul_builders(pool: Pool, dtype: torch.dtype, onednn: bool = False) -> dict[str, Callable[[int, int, int], Call]]:
    """The matrix products of a linear layer in training: with bias, forward or input gradient, weight gradient.

    `onednn`: use oneDNN for fp32 products, as `model/linear.py` does where that is faster.
    """

    def random(*shape: int) -> Tensor:
        return pool.take(*shape, dtype=dtype)

    def forward(m: int, n: int, k: int) -> Call:
        x, weight, bias = random(m, k), random(n, k), random(n)
        return partial(onednn_product if onednn else F.linear, x, weight, bias)

    def plain(m: int, n: int, k: int) -> Call:
        x, weight = random(m, k), random(k, n)
        return partial(onednn_product, x, weight.t()) if onednn else partial(torch.mm, x, weight)

    def weight_gradient(m: int, n: int, k: int) -> Call:
        gradient, x = random(k, m), random(k, n)
        return partial(onednn_weight_gradient, gradient, x) if onednn else lambda: gradient.t() @ x

    return {"matmul_bias": forward, "matmul": plain, "matmul_weight_gradient": weight_gradient}


def attention_builder(
    pool: Pool, dtype: torch.dtype, sequences: int, tokens: int, heads: int, head_size: int, backward: bool,
    native: bool = False,
) -> Call:  # fmt: skip
    """Causal attention on tensors in the model's memory layout: (B, S, A, D), transposed."""
    query, key, value = (
        pool.parameter(sequences, tokens, heads, head_size, dtype=dtype).transpose(1, 2) for _ in range(3)
    )
    attend = causal_attention if native else partial(F.scaled_dot_product_attention, is_causal=True)
    if not backward:
        return lambda: attend(query, key, value)
    return _backward(attend(query, key, value), (query, key, value))
