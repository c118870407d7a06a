"""Optimizers: what a user may choose, which tensors get what, and the state, FLOPs and bytes of an update. No torch.

State and weights are fp32. The sizes are those of the implementations that `train/optimizer.py` builds: PyTorch's,
bitsandbytes' for 8-bit Adam, our own for GaLore.
"""

from __future__ import annotations

import difflib
import math
from collections.abc import Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Literal

from pydantic import Field

from ironlaw.errors import UserError
from ironlaw.ledger import Kind, Phase
from ironlaw.model.parameters import Parameter
from ironlaw.schema import Section
from ironlaw.workload.operations import Operation

FP32 = 4
BF16 = 2
OptimizerName = Literal[
    "sgd", "momentum", "rmsprop", "adam", "adamw", "adafactor", "adam8bit", "galore", "muon", "paged_adamw",
    "paged_adam8bit",
]  # fmt: skip
MATRIX_OPTIMIZERS = ("galore", "muon")  # for the matrices of the blocks; AdamW has the rest
ELEMENTWISE = ("sgd", "momentum", "rmsprop", "adam", "adamw")  # do the same on a part of a tensor

# State that CUDA moves to the host page by page where the device is full (QLoRA, arXiv 2305.14314, section 3).
PAGED = dict.fromkeys(("paged_adamw", "paged_adam8bit"), "leaves for the host where the device is full")
QUANTIZED = ("adam8bit", "paged_adam8bit")
QUANTIZED_FROM_ELEMENTS = 4096  # bitsandbytes keeps the state of smaller tensors in fp32
QUANTIZED_BLOCK = 256  # elements that share one fp32 scale
QUANTIZED_MAPS_BYTES = 2 * 256 * FP32  # value of each of 256 codes, for either moment; one pair for all tensors
# Its update on two CPU cores took 16 times fused AdamW's (57 against 3.6 ms for 2.1M parameters); on CUDA bytes rule.
QUANTIZED_CPU_FACTOR = 16
MUON_ITERATIONS = 5  # of Newton and Schulz, in bf16 (PyTorch's Muon)


class ParameterGroup(Section):
    """Tensors whose name matches `pattern` (as in a shell: `blocks.*.attention.*`) and what is different for them."""

    pattern: str  # names, as in a shell: `blocks.*.attention.*`
    lr_scale: float = Field(1.0, ge=0)  # times the learning rate; 0 freezes
    weight_decay: float | None = Field(None, ge=0)  # instead of the optimizer's


class OptimizerConfig(Section):
    """How gradients become a new model."""

    name: OptimizerName = "adamw"  # which update rule
    lr: float = Field(1e-3, gt=0)  # the schedule's peak. AdamW: small models take 1e-3, 100M 6e-4, 7B 3e-4
    beta1: float = Field(0.9, ge=0, lt=1)  # decay of the first moment (the mean gradient)
    beta2: float = Field(0.95, ge=0, lt=1)  # 0.95, not 0.999: recovers faster from a bad batch (GPT-3, Llama)
    eps: float = Field(1e-8, gt=0)  # added to the root of the second moment
    # sgd, momentum, rmsprop and adam add it to the gradient; the others decouple it.
    weight_decay: float = Field(0.1, ge=0)
    momentum: float | None = Field(None, ge=0, lt=1)  # momentum 0.9, muon 0.95 unless given
    no_decay: tuple[str, ...] | None = None  # patterns of names; norms, biases and embeddings unless given
    groups: tuple[ParameterGroup, ...] = ()  # the first that matches decides
    # Of adapters, which no group matches: lr is meant for a matrix itself, and what suits its adapter is about ten
    # times that ("LoRA Without Regret", Thinking Machines 2025; docs/finetune.md has our own).
    adapter_lr_scale: float = Field(10.0, gt=0)
    rank: int = Field(128, gt=0)  # galore: of the projected gradient
    projection_steps: int = Field(200, gt=0)  # galore: how long a projection is kept
    projection_scale: float = Field(0.25, gt=0)  # galore: of the projected update (arXiv 2403.03507, alpha)


@dataclass(frozen=True)
class Assignment:
    """What the optimizer does with one tensor."""

    lr_scale: float
    weight_decay: float
    matrix: bool  # by the matrix optimizer rather than by AdamW


def assign(parameters: Sequence[Parameter], config: OptimizerConfig) -> list[Assignment]:
    """One assignment per tensor. UserError for a pattern that matches none."""
    matrices = of_matrices(parameters, config)
    return [_assignment(parameter, config, matrix) for parameter, matrix in zip(parameters, matrices, strict=True)]


def of_matrices(parameters: Sequence[Parameter], config: OptimizerConfig) -> list[bool]:
    """Whether the matrix optimizer has each tensor. UserError for a pattern that matches none."""
    for pattern in (*(config.no_decay or ()), *(group.pattern for group in config.groups)):
        _check_pattern(pattern, parameters)
    if config.name not in MATRIX_OPTIMIZERS:
        return [False] * len(parameters)
    least = config.rank if config.name == "galore" else 0  # a projection that saves nothing is none
    return [parameter.is_block_matrix and min(parameter.shape) > least for parameter in parameters]


def _assignment(parameter: Parameter, config: OptimizerConfig, matrix: bool) -> Assignment:
    groups = [g for g in config.groups if fnmatchcase(parameter.name, g.pattern)]
    group = groups[0] if groups else None
    if group is not None and group.weight_decay is not None:
        return Assignment(group.lr_scale, group.weight_decay, matrix)
    if config.no_decay is None:
        kept = parameter.is_small or parameter.embedding  # they set scales, not functions
    else:
        kept = any(fnmatchcase(parameter.name, pattern) for pattern in config.no_decay)
    scale = config.adapter_lr_scale if ".adapters." in parameter.name else 1.0
    return Assignment(group.lr_scale if group else scale, 0.0 if kept else config.weight_decay, matrix)


def _check_pattern(pattern: str, parameters: Sequence[Parameter]) -> None:
    names = [parameter.name for parameter in parameters]
    if not any(fnmatchcase(name, pattern) for name in names):
        near = difflib.get_close_matches(pattern, names, n=3, cutoff=0.0)
        raise UserError(
            f"the pattern {pattern!r} in [optimizer] matches no parameter: names are like {', '.join(near)}; "
            "* stands for anything"
        )


def state_bytes(parameters: Sequence[Parameter], config: OptimizerConfig) -> int:
    """Bytes of all state tensors after the first update, exactly."""
    total = 0
    quantized = False
    for parameter, matrix in zip(parameters, of_matrices(parameters, config), strict=True):
        total += tensor_state_bytes(parameter.shape, config, matrix=matrix)
        quantized |= config.name in QUANTIZED and parameter.elements >= QUANTIZED_FROM_ELEMENTS
    return total + (QUANTIZED_MAPS_BYTES if quantized else 0)


def tensor_state_bytes(shape: tuple[int, ...], config: OptimizerConfig, *, matrix: bool = False) -> int:
    """State of one tensor. `matrix`: it belongs to the matrix optimizer (Muon, GaLore)."""
    elements, step = math.prod(shape), FP32  # PyTorch counts steps in fp32
    match config.name:
        case "sgd":
            return 0
        case "momentum":
            return elements * FP32
        case "rmsprop":
            return elements * FP32 + step
        case "adafactor":
            if len(shape) < 2:
                return elements * FP32 + step
            # Mean squares by row and by column of the last two dimensions (arXiv 1804.04235).
            return (elements // shape[-1] + elements // shape[-2]) * FP32 + step
        case "adam8bit" | "paged_adam8bit" if elements >= QUANTIZED_FROM_ELEMENTS:
            return 2 * (elements + -(-elements // QUANTIZED_BLOCK) * FP32)
        case "adam8bit" | "paged_adam8bit" | "paged_adamw":  # bitsandbytes counts steps in Python
            return 2 * elements * FP32
        case "muon" if matrix:
            return elements * FP32
        case "galore" if matrix:
            # The projection, and two moments of the projected gradient (arXiv 2403.03507).
            return (min(shape) + 2 * max(shape)) * config.rank * FP32 + step
        case _:
            return 2 * elements * FP32 + step


def update_temporary_bytes(parameters: Sequence[Parameter], config: OptimizerConfig, *, cuda: bool = False) -> int:
    """The most an update holds at one time beyond weights, gradients and state.

    Fused updates hold nothing. A loop over tensors holds for one tensor at a time; on CUDA PyTorch's `foreach`
    variants work on all tensors at once, and hold for all.
    """
    if config.name in QUANTIZED:  # on a CPU both moments are unpacked, and packed again
        return 0 if cuda else 5 * FP32 * max((p.elements for p in parameters), default=0)
    if config.name not in (*MATRIX_OPTIMIZERS, *_CALLS):
        return 0
    assigned = list(zip(parameters, assign(parameters, config), strict=True))
    if config.name == "galore":
        return max((_galore_temporaries(p.shape, config.rank) for p, to in assigned if to.matrix), default=0)
    if config.name == "muon":
        return max((_muon_temporaries(p.shape) for p, to in assigned if to.matrix), default=0)
    held = [_loop_temporaries(p, to, config.name) for p, to in assigned]
    return sum(held) if cuda else max(held)


def _loop_temporaries(parameter: Parameter, to: Assignment, name: OptimizerName) -> int:
    size = parameter.elements * FP32
    if name == "rmsprop":  # the root of the mean square; with decay also the decayed gradient
        return size * (2 if to.weight_decay else 1)
    return size * (1 if len(parameter.shape) > 1 else 2)  # adafactor: the update; of a vector also the squared gradient


def _galore_temporaries(shape: tuple[int, ...], rank: int) -> int:
    """The update in full size beside the projected one and its denominator."""
    return (shape[0] * shape[1] + 2 * max(shape) * rank) * FP32


def _muon_temporaries(shape: tuple[int, ...]) -> int:
    """The averaged gradient; in bf16 the iterate, its successor, its Gram matrix and the polynomial of that."""
    size, gram = shape[0] * shape[1], min(shape) ** 2
    return size * FP32 + 2 * (size + gram) * BF16


def update_operations(
    parameters: Sequence[Parameter], config: OptimizerConfig, *, accumulation: int = 1, cuda: bool = False
) -> list[Operation]:
    """Gradient clipping by global norm, the update, and what accumulation adds; once per optimizer step."""
    elements = sum(parameter.elements for parameter in parameters)
    matrices = [p for p, matrix in zip(parameters, of_matrices(parameters, config), strict=True) if matrix]
    rest = elements - sum(parameter.elements for parameter in matrices)
    # The norm reads every gradient, the scaling reads and writes it.
    operations = [streamed("clip", "clip", elements, 3)]
    if config.name in MATRIX_OPTIMIZERS:
        if rest:
            operations.append(streamed(config.name, "adamw", rest, 7))
        for shape in sorted({parameter.shape for parameter in matrices}):
            count = sum(parameter.shape == shape for parameter in matrices)
            operations += muon_update(shape, count) if config.name == "muon" else _galore(shape, count, config)
    else:
        operations += elementwise_update(config.name, elements, cuda)
    # On top, what clipping and updating cost per tensor however small it is.
    operations.append(streamed(config.name, "update_tensors", len(parameters), 0))
    return operations + accumulate(elements, accumulation)


def adamw_operations(elements: int, tensors: int, *, accumulation: int = 1) -> list[Operation]:
    """The same for AdamW (arXiv 1711.05101), fused, of any `elements` parameters in `tensors` tensors."""
    operations = [streamed("clip", "clip", elements, 3), *elementwise_update("adamw", elements, cuda=False)]
    operations.append(streamed("adamw", "update_tensors", tensors, 0))
    return operations + accumulate(elements, accumulation)


def accumulate(elements: int, accumulation: int) -> list[Operation]:
    """From the second micro-batch on, every gradient is added to the one already there."""
    if accumulation < 2:
        return []
    return [
        Operation(
            "accumulate", Kind.ELEMENTWISE, Phase.BACKWARD, "optimizer", "add_in_place", accumulation - 1,
            elements=elements, bytes_moved=3 * elements * FP32,
        )
    ]  # fmt: skip


def streamed(name: str, kernel: str, elements: int, tensors: float, repeat: int = 1) -> Operation:
    return Operation(
        name, Kind.OPTIMIZER, Phase.OPTIMIZER, "optimizer", kernel, repeat, elements=elements,
        bytes_moved=round(tensors * elements * FP32),
    )  # fmt: skip


# Fused updates: fp32 tensors read and written per parameter (weight twice, gradient once, every state twice).
_FUSED = {"sgd": 3, "momentum": 5, "adam": 7, "adamw": 7, "paged_adamw": 7}
# Loops of elementwise calls, each of which reads and writes about three tensors.
_CALLS = {"rmsprop": 6, "adafactor": 8}


def elementwise_update(name: OptimizerName, elements: int, cuda: bool) -> list[Operation]:
    if name in _CALLS:
        return [streamed(name, "add_in_place", elements, 3, repeat=_CALLS[name])]
    if name in QUANTIZED:
        # Weight and gradient in fp32, both moments in a byte, each read and written: 16 bytes per parameter.
        return [streamed(name, "adamw", elements, 4, repeat=1 if cuda else QUANTIZED_CPU_FACTOR)]
    # The time of an AdamW that moves as many bytes.
    return [streamed(name, "adamw", elements * _FUSED[name] // _FUSED["adamw"], _FUSED["adamw"])]


def _product(name: str, repeat: int, m: int, n: int, k: int, precision: str | None = None) -> Operation:
    return Operation(
        name, Kind.OPTIMIZER, Phase.OPTIMIZER, "optimizer", "matmul", repeat, matmul=(m, n, k), flops=2 * m * n * k,
        bytes_moved=(BF16 if precision else FP32) * (m * k + k * n + m * n), precision=precision,
    )  # fmt: skip


def muon_update(shape: tuple[int, ...], count: int) -> list[Operation]:
    """Momentum, then five quintic Newton-Schulz iterations: X X^T, its square, and the product with X, in bf16."""
    small, large = sorted(shape)
    calls = count * MUON_ITERATIONS
    return [
        streamed("muon", "add_in_place", small * large, 3, repeat=5 * count),
        _product("muon", calls, small, small, large, "bf16"),
        _product("muon", calls, small, small, small, "bf16"),
        _product("muon", calls, small, large, small, "bf16"),
    ]


def _galore(shape: tuple[int, ...], count: int, config: OptimizerConfig) -> list[Operation]:
    """Project the gradient, Adam on the projection, project back. The decomposition every so many steps is left out."""
    small, large = sorted(shape)
    return [
        _product("galore", count, large, config.rank, small),
        streamed("galore", "add_in_place", large * config.rank, 3, repeat=6 * count),
        _product("galore", count, large, small, config.rank),
        streamed("galore", "add_in_place", small * large, 3, repeat=2 * count),
    ]
