"""The operations of one training step of any torch module, found by running it on tensors without memory.

    trace_operations(build, [Input("tokens", (8, 2048), "int64")])

gives the same table as `training_operations` gives for our own decoder: forward and backward, kernel by kernel as
PyTorch executes them eagerly on a CPU, with matrix shapes, FLOPs, least traffic, and the memory that each call
allocates and frees. Nothing is computed and no weight exists, so that a model of any size is traced in the time that
its calls take to dispatch: about 0.2 ms each.

A trace follows shapes, not values. A module that looks at values (`if x.sum() > 0`, `x.nonzero()`, `.item()`) cannot
be traced, and says so.
"""

from __future__ import annotations

import inspect
import logging
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import DataDependentOutputException, DynamicOutputShapeException

from ironlaw.errors import UserError, did_you_mean
from ironlaw.ledger import Phase
from ironlaw.workload.module_source import Input
from ironlaw.workload.operations import Operation
from ironlaw.workload.trace_kernels import tensors
from ironlaw.workload.trace_recorder import FakeMode, Recorder, tracing
from ironlaw.workload.trace_table import TracedOperation, operations_of

Precision = Literal["as is", "bf16", "fp16"]
Loss = Callable[[Any], Tensor]

__all__ = ["Loss", "Precision", "Trace", "TracedOperation", "trace", "trace_operations"]


@dataclass(frozen=True)
class Trace:
    """One micro-batch of a module, and what exists before it starts (bytes and counts)."""

    operations: list[TracedOperation]
    name: str
    parameters: int  # elements that are trained or frozen, shared ones once
    trained_parameters: int
    trained_tensors: int
    parameter_bytes: int
    trained_bytes: int
    buffer_bytes: int
    input_bytes: int
    output_shapes: tuple[tuple[int, ...], ...]


# A module that does not fit its inputs is refused here in a line; PyTorch would log a stack before.
logging.getLogger("torch._subclasses.fake_tensor").setLevel(logging.CRITICAL)


def trace_operations(
    module_or_factory: nn.Module | Callable[[], nn.Module],
    inputs: Sequence[Input | Tensor] | Mapping[str, Input | Tensor],
    *,
    loss: Loss | None = None,
    training: bool = True,
    precision: Precision = "as is",
) -> list[Operation]:
    """Forward and (when `training`) backward of one micro-batch, in the order of execution, layers not folded.

    `inputs` go by name where the module's forward has arguments of these names, else in order. `loss` makes one
    number of the module's output; without it the output itself is the loss if it is one number, else the backward
    pass starts from a gradient for every floating-point output. `precision` runs it under autocast.
    """
    return list(trace(module_or_factory, inputs, loss=loss, training=training, precision=precision).operations)


def trace(
    module_or_factory: nn.Module | Callable[[], nn.Module],
    inputs: Sequence[Input | Tensor] | Mapping[str, Input | Tensor],
    *,
    loss: Loss | None = None,
    training: bool = True,
    precision: Precision = "as is",
) -> Trace:
    """`trace_operations` with what else a plan needs: the sizes of parameters, buffers and inputs."""
    mode, recorder = FakeMode(), Recorder()
    where = "its construction"
    try:
        with tracing(mode):
            module, parameters, buffers = _fake_module(module_or_factory, mode)
            state, given = parameters | buffers, _fake_inputs(inputs, mode)
            recorder.ignore([list(state.values()), list(given.values())])
            args, kwargs = _arguments(module, given)
            where = "its forward pass"
            before = module.training
            module.train(training)
            try:
                shapes = _run(module, state, args, kwargs, recorder, loss, training, precision)
            finally:
                module.train(before)
    except UserError:
        raise
    except Exception as error:
        raise _explained(error, module_or_factory, where, recorder) from error
    trained = {name: p for name, p in parameters.items() if p.requires_grad}
    return Trace(
        operations=operations_of(recorder),
        name=type(module).__name__,
        parameters=sum(p.numel() for p in _unique(parameters)),
        trained_parameters=sum(p.numel() for p in _unique(trained)),
        trained_tensors=len(_unique(trained)),
        parameter_bytes=_bytes(parameters),
        trained_bytes=_bytes(trained),
        buffer_bytes=_bytes(buffers),
        input_bytes=_bytes(given),
        output_shapes=shapes,
    )


def _unique(named: dict[str, Tensor]) -> list[Tensor]:
    """Shared tensors once."""
    return list({id(tensor): tensor for tensor in named.values()}.values())


def _bytes(named: dict[str, Tensor]) -> int:
    return sum(tensor.numel() * tensor.element_size() for tensor in _unique(named))


def _explained(error: Exception, source: object, where: str, recorder: Recorder) -> UserError:
    """What went wrong in one line, and what to do."""
    place = f"{where}, in {recorder.path}" if recorder.path else where
    if isinstance(error, (DataDependentOutputException, DynamicOutputShapeException)):
        return UserError(
            f"{_name(source)} looks at the values of a tensor ({error.func}) in {place}, which a trace has none of: "
            "make that decision from shapes or plain Python numbers"
        )
    lines = str(error).strip().splitlines() or [type(error).__name__]
    return UserError(
        f"{_name(source)} fails in {place}: {type(error).__name__}: {lines[0]}: "
        "check that it runs on real tensors with these shapes and dtypes"
    )


def _name(source: object) -> str:
    return type(source).__name__ if isinstance(source, nn.Module) else getattr(source, "__name__", str(source))


# -- setting up --------------------------------------------------------------------------------------------------


def _fake_module(
    source: nn.Module | Callable[[], Any], mode: FakeMode
) -> tuple[nn.Module, dict[str, Tensor], dict[str, Tensor]]:
    """The module, and its parameters and buffers as fake tensors: its own, or stand-ins for real ones."""
    module = source if isinstance(source, nn.Module) else source()
    if not isinstance(module, nn.Module):
        raise UserError(f"{_name(source)} returned a {type(module).__name__}: return a torch.nn.Module")
    stand_ins: dict[int, Tensor] = {}  # shared tensors stay shared

    def fake(tensor: Tensor) -> Tensor:
        if id(tensor) not in stand_ins:
            stand_ins[id(tensor)] = _fake(tensor, mode)
        return stand_ins[id(tensor)]

    parameters = {name: fake(p) for name, p in module.named_parameters(remove_duplicate=False)}
    buffers = {name: fake(b) for name, b in module.named_buffers(remove_duplicate=False)}
    return module, parameters, buffers


def _fake(tensor: Tensor, mode: FakeMode) -> Tensor:
    if getattr(tensor, "fake_mode", None) is mode:
        return tensor
    if tensor.device.type not in ("cpu", "meta"):
        raise UserError(f"the module is on {tensor.device}: build it on the CPU or under torch.device('meta')")
    if tensor.device.type == "meta":
        fake = torch.empty(tensor.shape, dtype=tensor.dtype)
        return nn.Parameter(fake, tensor.requires_grad) if isinstance(tensor, nn.Parameter) else fake
    return mode.from_tensor(tensor)


def _fake_inputs(inputs: Sequence[Input | Tensor] | Mapping[str, Input | Tensor], mode: FakeMode) -> dict[str, Tensor]:
    if isinstance(inputs, Mapping):
        named = dict(inputs)
    else:
        named = {value.name if isinstance(value, Input) else f"#{i}": value for i, value in enumerate(inputs)}
    if len(named) != len(inputs):
        raise UserError("two inputs have the same name: name each argument of the module once")
    return {
        name: torch.empty(value.shape, dtype=getattr(torch, value.dtype)) if isinstance(value, Input)
        else _fake(value.detach(), mode)
        for name, value in named.items()
    }  # fmt: skip


def _arguments(module: nn.Module, given: dict[str, Tensor]) -> tuple[tuple[Tensor, ...], dict[str, Tensor]]:
    """By name where forward knows the names, in order where it knows none of them."""
    signature = inspect.signature(module.forward).parameters
    any_name = any(p.kind is inspect.Parameter.VAR_KEYWORD for p in signature.values())
    known = [name for name, p in signature.items() if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)]
    if any_name or (given and all(name in known for name in given)):
        return (), given
    strange = [name for name in given if name not in known]
    if len(strange) < len(given) and not strange[0].startswith("#"):
        raise UserError(
            f"{type(module).__name__}.forward has no argument '{strange[0]}': {did_you_mean(strange[0], known)}"
        )
    return tuple(given.values()), {}


def _run(
    module: nn.Module, state: dict[str, Tensor], args: tuple[Tensor, ...], kwargs: dict[str, Tensor],
    recorder: Recorder, loss: Loss | None, training: bool, precision: Precision,
) -> tuple[tuple[int, ...], ...]:  # fmt: skip
    """One micro-batch under the recorder; the shapes of what the module returned."""
    dtype = {"bf16": torch.bfloat16, "fp16": torch.float16}.get(precision)
    cast = torch.autocast("cpu", dtype=dtype) if dtype else nullcontext()

    def step() -> tuple[tuple[int, ...], ...]:
        with cast:
            outputs = module(*args, **kwargs)
            recorder.mark(_tensors(outputs), "output")
            with recorder.scope("loss"):
                ends = [loss(outputs)] if loss else _floating(outputs)
                recorder.mark(ends, "output")
        if training:
            recorder.phase = Phase.BACKWARD
            _backward(ends, recorder)
            recorder.mark([p.grad for p in state.values() if p.grad is not None], "gradient")
        return tuple(tuple(t.shape) for t in _tensors(outputs))

    # The backward pass is inside too: recomputation calls modules again, and they must still have their stand-ins.
    stand_ins = {f"module.{name}": tensor for name, tensor in state.items()}
    with recorder.watching(module), torch.set_grad_enabled(training), recorder:
        shapes: tuple[tuple[int, ...], ...] = torch.func.functional_call(
            _Step(module, step), stand_ins, (), tie_weights=False
        )
    for parameter in state.values():
        parameter.grad = None
    return shapes


class _Step(nn.Module):
    """A module whose forward pass is a whole step of another one."""

    def __init__(self, module: nn.Module, step: Callable[[], Any]) -> None:
        super().__init__()
        self.module, self._step = module, step

    def forward(self) -> Any:
        return self._step()


def _backward(ends: list[Tensor], recorder: Recorder) -> None:
    wanted = [end for end in ends if end.requires_grad]
    if not wanted:
        raise UserError("nothing in the output needs a gradient: unfreeze parameters or plan with training=False")
    if len(wanted) == 1 and wanted[0].numel() == 1:
        wanted[0].backward()
    else:
        torch.autograd.backward(wanted, [torch.ones_like(end) for end in wanted])


def _tensors(value: Any) -> list[Tensor]:
    if hasattr(value, "to_tuple"):  # the output classes of Hugging Face
        value = value.to_tuple()
    elif hasattr(value, "__dict__") and not isinstance(value, (Tensor, nn.Module)):
        value = list(vars(value).values())
    return list(tensors(value))


def _floating(outputs: Any) -> list[Tensor]:
    """What the backward pass starts from without a loss: the first output that is one number, else all of them."""
    found = [t for t in _tensors(outputs) if t.is_floating_point() and t.requires_grad]
    scalars = [t for t in found if t.numel() == 1]
    return scalars[:1] or found
