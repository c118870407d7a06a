"""Optimizers: their config, the settings of each tensor, and the state, FLOPs and bytes of an update. No torch.

State and weights are fp32. Sizes are those of the implementations that `train/optimizer.py` builds: PyTorch's, those of
bitsandbytes for 8-bit Adam, Ironlaw's own for GaLore.
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
from ironlaw.model.dimensions import Dimensions
from ironlaw.model.parameters import Parameter, model_parameters
from ironlaw.schema import Section
from ironlaw.workload.operations import Operation

FP32 = 4
BF16 = 2
OptimizerName = Literal[
    "sgd", "momentum", "rmsprop", "adam", "adamw", "adafactor", "adam8bit", "galore", "muon", "paged_adamw",
    "paged_adam8bit",
]  # fmt: skip
MATRIX_OPTIMIZERS = ("galore", "muon")  # for the matrices of the blocks; AdamW updates the rest
ELEMENTWISE = ("sgd", "momentum", "rmsprop", "adam", "adamw")  # update a part of a tensor like the whole
# Those of Adam's moments: galore and muon for the tensors that are no matrices.
_ADAM = (
    "adam", "adamw", "adam8bit", "galore", "muon", "paged_adamw", "paged_adam8bit",
)  # fmt: skip
# Hyperparameter -> the optimizers that use it.
USED_BY: dict[str, tuple[str, ...]] = {
    "beta1": _ADAM,
    **dict.fromkeys(("beta2", "eps"), ("rmsprop", *_ADAM)),
    "momentum": ("momentum", "muon"),
    **dict.fromkeys(("rank", "projection_steps", "projection_scale"), ("galore",)),
}

# State that CUDA moves to the host page by page when the device is full (QLoRA, arXiv 2305.14314, section 3).
PAGED = dict.fromkeys(("paged_adamw", "paged_adam8bit"), "leaves for the host where the device is full")
QUANTIZED = ("adam8bit", "paged_adam8bit")
QUANTIZED_FROM_ELEMENTS = 4096  # bitsandbytes keeps the state of smaller tensors in fp32
QUANTIZED_BLOCK = 256  # elements that share one fp32 scale
QUANTIZED_MAPS_BYTES = 2 * 256 * FP32  # the values of 256 codes for both moments, shared by all tensors
# Time over fused AdamW's, measured on two CPU cores (57 against 3.6 ms for 2.1M parameters). On CUDA bytes decide.
QUANTIZED_CPU_FACTOR = 16
MUON_ITERATIONS = 5  # Newton-Schulz iterations, in bf16 (PyTorch's Muon)


class ParameterGroup(Section):
    """Tensors whose names match `pattern`, and their own settings."""

    pattern: str  # a shell pattern of names: `blocks.*.attention.*`
    lr_scale: float = Field(1.0, ge=0)  # factor on the learning rate; 0 freezes
    weight_decay: float | None = Field(None, ge=0)  # replaces the optimizer's


class OptimizerConfig(Section):
    """The update rule and its hyperparameters."""

    name: OptimizerName = "adamw"  # update rule
    lr: float = Field(1e-3, gt=0)  # peak learning rate. AdamW: 1e-3 for small models, 6e-4 for 100M, 3e-4 for 7B
    beta1: float = Field(0.9, ge=0, lt=1)  # decay of the first moment (the mean gradient)
    beta2: float = Field(0.95, ge=0, lt=1)  # 0.95, not 0.999: recovers faster from a bad batch (GPT-3, Llama)
    eps: float = Field(1e-8, gt=0)  # added to the square root of the second moment
    # sgd, momentum, rmsprop and adam add it to the gradient; in the others it is decoupled.
    weight_decay: float = Field(0.1, ge=0)
    momentum: float | None = Field(None, ge=0, lt=1)  # default: 0.9 for momentum, 0.95 for muon
    no_decay: tuple[str, ...] | None = None  # patterns of names without decay; default: norms, biases and embeddings
    groups: tuple[ParameterGroup, ...] = ()  # the first match applies
    # Factor on lr for adapters in no group: lr is meant for full matrices, and adapters need about ten times as much
    # ("LoRA Without Regret", Thinking Machines 2025; docs/finetune.md has Ironlaw's own measurement).
    adapter_lr_scale: float = Field(10.0, gt=0)
    rank: int = Field(128, gt=0)  # galore: rank of the projected gradient
    projection_steps: int = Field(200, gt=0)  # galore: steps until the projection is renewed
    projection_scale: float = Field(0.25, gt=0)  # galore: factor on the projected update (arXiv 2403.03507, alpha)

    @property
    def patterns(self) -> tuple[str, ...]:
        """All patterns of names."""
        return (*(self.no_decay or ()), *(group.pattern for group in self.groups))


@dataclass(frozen=True)
class Assignment:
    """The optimizer's settings for one tensor."""

    lr_scale: float
    weight_decay: float
    matrix: bool  # updated by the matrix optimizer instead of AdamW


def assign(parameters: Sequence[Parameter], config: OptimizerConfig) -> list[Assignment]:
    """Return one assignment per tensor."""
    matrices = uses_matrix_update(parameters, config)
    return [_assignment(parameter, config, matrix) for parameter, matrix in zip(parameters, matrices, strict=True)]


def uses_matrix_update(parameters: Sequence[Parameter], config: OptimizerConfig) -> list[bool]:
    """Return for each tensor whether the matrix optimizer updates it."""
    if config.name not in MATRIX_OPTIMIZERS:
        return [False] * len(parameters)
    min_size = config.rank if config.name == "galore" else 0  # smaller matrices gain nothing from projection
    return [parameter.is_block_matrix and min(parameter.shape) > min_size for parameter in parameters]


def leaves_no_matrix(model: Dimensions, config: OptimizerConfig) -> bool:
    """Return whether the matrix optimizer would have nothing to update."""
    return config.name in MATRIX_OPTIMIZERS and not any(uses_matrix_update(model_parameters(model), config))


def _assignment(parameter: Parameter, config: OptimizerConfig, matrix: bool) -> Assignment:
    group = next((g for g in config.groups if fnmatchcase(parameter.name, g.pattern)), None)
    scale = group.lr_scale if group else config.adapter_lr_scale if ".adapters." in parameter.name else 1.0
    if group and group.weight_decay is not None:
        return Assignment(scale, group.weight_decay, matrix)
    if config.no_decay is None:
        exempt = parameter.is_small or parameter.embedding  # they set scales, not functions
    else:
        exempt = any(fnmatchcase(parameter.name, pattern) for pattern in config.no_decay)
    return Assignment(scale, 0.0 if exempt else config.weight_decay, matrix)


def check_patterns(names: Sequence[str], config: OptimizerConfig) -> None:
    """Raise UserError for a pattern that matches none of `names`: of all trained tensors, not of one stage."""
    for pattern in config.patterns:
        if not any(fnmatchcase(name, pattern) for name in names):
            near = difflib.get_close_matches(pattern, names, n=3, cutoff=0.0)
            raise UserError(
                f"the pattern {pattern!r} in [optimizer] matches no parameter: names are like {', '.join(near)}; "
                "* stands for anything"
            )


def state_bytes(parameters: Sequence[Parameter], config: OptimizerConfig) -> int:
    """Return the exact bytes of all state tensors after the first update."""
    matrices = uses_matrix_update(parameters, config)
    total = sum(tensor_state_bytes(p.shape, config, matrix=m) for p, m in zip(parameters, matrices, strict=True))
    quantized = config.name in QUANTIZED and any(p.elements >= QUANTIZED_FROM_ELEMENTS for p in parameters)
    return total + (QUANTIZED_MAPS_BYTES if quantized else 0)


def tensor_state_bytes(shape: tuple[int, ...], config: OptimizerConfig, *, matrix: bool = False) -> int:
    """Return the bytes of one tensor's state. `matrix`: the matrix optimizer (Muon, GaLore) updates it."""
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
    """Return an update's peak bytes of temporaries, in addition to weights, gradients and state.

    Fused updates have no temporaries. A loop over tensors has those of one tensor at a time; on CUDA PyTorch's
    `foreach` variants have those of all tensors at once.
    """
    if config.name in QUANTIZED:  # on a CPU both moments are unpacked and packed again
        return 0 if cuda else 5 * FP32 * max((p.elements for p in parameters), default=0)
    if config.name in _FUSED:
        return 0
    assigned = zip(parameters, assign(parameters, config), strict=True)
    sizes = [_temporary_bytes(parameter.shape, config, to) for parameter, to in assigned]
    return sum(sizes) if cuda and config.name in _CALLS else max(sizes, default=0)


def _temporary_bytes(shape: tuple[int, ...], config: OptimizerConfig, to: Assignment) -> int:
    """Return the bytes of temporaries in the update of one tensor."""
    size = math.prod(shape) * FP32
    match config.name:
        case "rmsprop":  # the root mean square; with decay also the decayed gradient
            return size * (2 if to.weight_decay else 1)
        case "adafactor":  # the update; for vectors also the squared gradient
            return size * (1 if len(shape) > 1 else 2)
        case "galore" if to.matrix:  # the full-size update, the projected update and its denominator
            return size + 2 * max(shape) * config.rank * FP32
        case "muon" if to.matrix:
            # The averaged gradient; in bf16 the iterate, the next one, the Gram matrix and the polynomial of that.
            return size + 2 * (math.prod(shape) + min(shape) ** 2) * BF16
        case _:
            return 0


def update_operations(
    parameters: Sequence[Parameter], config: OptimizerConfig, *, accumulation: int = 1, cuda: bool = False
) -> list[Operation]:
    """Return the operations of an optimizer step: clipping by global norm, the update, and gradient accumulation."""
    elements = sum(parameter.elements for parameter in parameters)
    matrices = [p for p, matrix in zip(parameters, uses_matrix_update(parameters, config), strict=True) if matrix]
    rest = elements - sum(parameter.elements for parameter in matrices)
    if config.name in MATRIX_OPTIMIZERS:
        updates = [streamed(config.name, "adamw", rest, 7)] if rest else []
        for shape in sorted({parameter.shape for parameter in matrices}):
            count = sum(parameter.shape == shape for parameter in matrices)
            updates += muon_update(shape, count) if config.name == "muon" else _galore(shape, count, config)
    else:
        updates = elementwise_update(config.name, elements, cuda)
    return _whole_update(config.name, updates, elements, len(parameters), accumulation)


def adamw_operations(elements: int, tensors: int, *, accumulation: int = 1) -> list[Operation]:
    """Return the operations of a step of fused AdamW (arXiv 1711.05101) on `tensors` tensors with `elements` in all."""
    updates = elementwise_update("adamw", elements, cuda=False)
    return _whole_update("adamw", updates, elements, tensors, accumulation)


def _whole_update(
    name: str, updates: list[Operation], elements: int, tensors: int, accumulation: int
) -> list[Operation]:
    """Return updates with the clipping before, and the cost of both per tensor, independent of its size."""
    clip = streamed("clip", "clip", elements, 3)  # the norm reads every gradient; the scaling reads and writes it
    return [clip, *updates, streamed(name, "update_tensors", tensors, 0), *accumulate(elements, accumulation)]


def accumulate(elements: int, accumulation: int) -> list[Operation]:
    """Return the gradient accumulation: each micro-batch from the second on adds its gradients to the existing ones."""
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
# Unfused updates: elementwise calls, each of which reads or writes about three tensors.
_CALLS = {"rmsprop": 6, "adafactor": 8}


def elementwise_update(name: OptimizerName, elements: int, cuda: bool) -> list[Operation]:
    if name in _CALLS:
        return [streamed(name, "add_in_place", elements, 3, repeat=_CALLS[name])]
    if name in QUANTIZED:
        # Weight and gradient in fp32, both moments in one byte each, read and written: 16 bytes per parameter.
        return [streamed(name, "adamw", elements, 4, repeat=1 if cuda else QUANTIZED_CPU_FACTOR)]
    # Timed as an AdamW that moves the same number of bytes.
    return [streamed(name, "adamw", elements * _FUSED[name] // _FUSED["adamw"], _FUSED["adamw"])]


def _product(name: str, repeat: int, m: int, n: int, k: int, precision: str | None = None) -> Operation:
    return Operation(
        name, Kind.OPTIMIZER, Phase.OPTIMIZER, "optimizer", "matmul", repeat, matmul=(m, n, k), flops=2 * m * n * k,
        bytes_moved=(BF16 if precision else FP32) * (m * k + k * n + m * n), precision=precision,
    )  # fmt: skip


def muon_update(shape: tuple[int, ...], count: int) -> list[Operation]:
    """Muon's update: momentum, then five quintic Newton-Schulz iterations in bf16: X X^T, its square, times X."""
    small, large = sorted(shape)
    calls = count * MUON_ITERATIONS
    return [
        streamed("muon", "add_in_place", small * large, 3, repeat=5 * count),
        _product("muon", calls, small, small, large, "bf16"),
        _product("muon", calls, small, small, small, "bf16"),
        _product("muon", calls, small, large, small, "bf16"),
    ]


def _galore(shape: tuple[int, ...], count: int, config: OptimizerConfig) -> list[Operation]:
    """GaLore's update: project the gradient, Adam on the projection, project back. The occasional SVD is left out."""
    small, large = sorted(shape)
    return [
        _product("galore", count, large, config.rank, small),
        streamed("galore", "add_in_place", large * config.rank, 3, repeat=6 * count),
        _product("galore", count, large, small, config.rank),
        streamed("galore", "add_in_place", small * large, 3, repeat=2 * count),
    ]
