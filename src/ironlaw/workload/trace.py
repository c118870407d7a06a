"""Tracing of one training step of any torch module: its operations, found by running it on fake tensors.

    trace(build, [Input("tokens", (8, 2048), "int64")]).operations

returns the same table as `training_operations` for our own decoder: forward and backward, kernel by kernel as PyTorch
executes them eagerly on a CPU, with matrix shapes, FLOPs, minimal memory traffic, and the bytes that each call
allocates and frees. Nothing large is computed and no weight is allocated, so that tracing a model of any size takes
only the time to dispatch its calls: about 0.2 ms each.

Small tensors that follow from constants and inputs have values (`trace_values`). A module that reads other values, such
as a router of experts, runs once on real tensors: same recorder and table, at the cost of real memory and time.
"""

from __future__ import annotations

import dataclasses
import re
import site
import sysconfig
import traceback
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import nullcontext, suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import DataDependentOutputException, DynamicOutputShapeException, FakeTensor
from torch.nn.parameter import is_lazy
from torch.nn.utils.stateless import _reparametrize_module
from torch.utils._python_dispatch import _disable_current_modes

from ironlaw.errors import UserError
from ironlaw.ledger import Phase
from ironlaw.workload.module_source import install_advice
from ironlaw.workload.operations import line_name
from ironlaw.workload.trace_inputs import Assumed, Inputs, arguments, described, make_tensors, named_inputs
from ironlaw.workload.trace_layers import (
    EXTRAPOLATED,
    MAX_KERNELS,
    MIN_EXTRAPOLATED_TOKENS,
    NotExtrapolable,
    Stack,
    common_length,
    extrapolate,
    has_window_between,
    longest_stack,
    repeat_layers,
    run_one_of_each_kind,
    shortened,
)
from ironlaw.workload.trace_recorder import LongLoop, Recorder, build_operations
from ironlaw.workload.trace_store import ModuleTrace
from ironlaw.workload.trace_values import TraceMode, tracing

Precision = Literal["as is", "bf16", "fp16"]
Loss = Callable[[Any], Tensor]
Source = nn.Module | Callable[[], nn.Module]

REAL_UNASKED_BYTES = 2**30
"""Bytes of parameters up to which a module that a trace cannot follow is run on real tensors by default."""


def trace(
    source: Source,
    inputs: Inputs,
    *,
    loss: Loss | None = None,
    precision: Precision = "as is",
    real: bool | None = None,
    repeated: bool = False,
    cpu: bool = False,
) -> ModuleTrace:
    """Traces one micro-batch. Returns its operations and the sizes of parameters, buffers and inputs.

    `source` is a module, or a function that builds one. `inputs` are passed by name if forward has arguments of these
    names, else in order; they may be nested in lists and dicts. `loss` reduces the module's output to one number;
    without it, the output is the loss if it is one number, else the backward pass starts from a gradient for every
    floating-point output. `precision` other than "as is" uses autocast. `real` runs the step on real tensors; None does
    so only if the module reads values that a trace lacks and its parameters take at most a GiB. `repeated`: in a stack
    of layers, one of each kind runs, and its rows are repeated for the others. `cpu`: an LSTM is oneDNN's call, with
    what that keeps; else it is listed step by step. Raises UserError if the module fails.
    """
    run = partial(_traced, source, loss=loss, precision=precision, cpu=cpu)
    if repeated:
        try:
            return _repeated(run, inputs)
        except UserError:
            pass  # the layers are not a simple chain: run all of them
    if real:
        return run(inputs, real=True)[0]
    try:
        return run(inputs, real=False)[0]
    except Untraceable as failure:
        if real is False or failure.parameter_bytes is None or failure.parameter_bytes > REAL_UNASKED_BYTES:
            raise
        stepped: Assumed = ("a step on real tensors", "run", failure.reason, "")
    found, _ = run(inputs, real=True)
    return replace(found, assumptions=(*found.assumptions, stepped))


def _repeated(run: Callable[..., tuple[ModuleTrace, Stack | None]], inputs: Inputs) -> ModuleTrace:
    """Traces one layer of each kind; a long loop over tokens is extrapolated from shorter sequences."""
    once, sequence = partial(run, real=False, repeated=True), common_length(inputs)
    try:
        found, stack = once(inputs, tokens=sequence if sequence > MIN_EXTRAPOLATED_TOKENS else None)
    except LongLoop as loop:
        try:
            begin = build_operations(loop.recorder)
            found, stack = extrapolate(lambda length: once(shortened(inputs, length)), sequence, begin)
            known = described(named_inputs(inputs))
            found = replace(found, inputs=known, assumptions=(*found.assumptions, EXTRAPOLATED))
        except NotExtrapolable:
            found, stack = once(inputs)
    return replace(found, operations=repeat_layers(found.operations, stack)) if stack else found


def _traced(
    source: Source, inputs: Inputs, *, loss: Loss | None, precision: Precision,
    real: bool, cpu: bool, repeated: bool = False, tokens: int | None = None,
) -> tuple[ModuleTrace, Stack | None]:  # fmt: skip
    """Traces a step; `repeated`: only the first layer of each kind in a stack. LongLoop for a loop over `tokens`."""
    mode, recorder, stack = TraceMode(real), Recorder(), None
    where, parameters = CONSTRUCTION, None
    try:
        with tracing(mode, cpu):
            module, notes = _build(source, mode)
            if any(is_lazy(tensor) for tensor in (*module.parameters(), *module.buffers())):
                where = "its forward pass"
                module = _give_sizes(source, inputs, mode)
                notes = [("weights", "built in memory", "a forward pass gives lazy layers their sizes", "")]
            if tokens and not has_window_between(module, tokens):
                recorder.max_kernels = MAX_KERNELS
            parameters, buffers = _stand_ins(module, mode)
            state = parameters | buffers
            vocabulary = getattr(getattr(module, "config", None), "vocab_size", None)
            tree = named_inputs(inputs)
            given, assumed = make_tensors(tree, mode.without_values, lambda t: _place(t, mode), real, vocabulary)
            recorder.ignore([list(state.values()), list(_tensors(given))])
            args, kwargs = arguments(module, given)
            where = "its forward pass"
            before = module.training
            with suppress(NotImplementedError):  # modules from `torch.export` have no train mode
                module.train()
            stack = longest_stack(module) if repeated else None
            try:
                with run_one_of_each_kind(module, stack) if stack else nullcontext():
                    _run(module, state, args, kwargs, recorder, loss, precision)
            finally:
                with suppress(NotImplementedError):
                    module.train(before)
    except UserError:
        raise
    except (Exception, SystemExit) as error:
        size = None if parameters is None else _bytes(parameters.values())
        where = "its backward pass" if recorder.phase is Phase.BACKWARD else where
        raise describe_failure(error, _name(source), where, recorder.path, real=real, parameter_bytes=size) from error
    own = _unique(parameters.values())
    trained = _trained(parameters)
    for parameter in own:
        parameter.grad = None
    found = ModuleTrace(
        operations=build_operations(recorder),
        name=type(module).__name__,
        parameters=sum(p.numel() for p in own),
        trained_parameters=sum(p.numel() for p in trained),
        trained_tensors=len(trained),
        parameter_bytes=_bytes(own),
        trained_bytes=_bytes(trained),
        buffer_bytes=_bytes(buffers.values()),
        input_bytes=_bytes(_tensors(given)),
        unit_bytes=_units(parameters),
        inputs=described(given),
        assumptions=(*notes, *assumed),
        has_complex=any(p.is_complex() for p in trained),
    )
    return found, stack


def _unique(tensors: Iterable[Tensor]) -> list[Tensor]:
    """Returns the tensors, shared ones once."""
    return list({id(tensor): tensor for tensor in tensors}.values())


def _trained(parameters: Mapping[str, Tensor]) -> list[Tensor]:
    """Returns the parameters that an optimizer updates: those with a gradient, and those of other layers by the same
    name, which did not run in this step: repeated layers, layers dropped at random, experts without tokens."""
    reached = {line_name(name) for name, p in parameters.items() if p.grad is not None}
    return _unique(p for name, p in parameters.items() if p.requires_grad and line_name(name) in reached)


def _bytes(tensors: Iterable[Tensor]) -> int:
    return sum(tensor.numel() * tensor.element_size() for tensor in _unique(tensors))


def _units(parameters: Mapping[str, Tensor]) -> tuple[int, ...]:
    units: dict[str, int] = {}
    for name, tensor in {id(tensor): (name, tensor) for name, tensor in parameters.items()}.values():
        numbered = re.match(r".*?\.\d+(?=\.)", name)
        unit = numbered[0] if numbered else ""
        units[unit] = units.get(unit, 0) + tensor.numel() * tensor.element_size()
    return tuple(units.values())


def _name(source: object) -> str:
    return type(source).__name__ if isinstance(source, nn.Module) else getattr(source, "__name__", str(source))


# -- setting up --------------------------------------------------------------------------------------------------


def _build(source: Source, mode: TraceMode) -> tuple[nn.Module, list[Assumed]]:
    """Returns the module, and an assumption if it was built on real tensors because its construction reads values."""
    notes: list[Assumed] = []
    module: Any = source
    if not isinstance(source, nn.Module):
        try:
            module = source()
        except UserError:
            raise
        except Exception as error:
            if mode.real:
                raise
            with mode.real_tensors():
                module = source()
            reason = f"construction without values fails: {type(error).__name__}"
            notes = [("weights", "built in memory", reason, "")]
    if not isinstance(module, nn.Module):
        raise UserError(f"{_name(source)} returned a {type(module).__name__}: return a torch.nn.Module")
    for path, child in module.named_modules():
        if isinstance(child, torch.jit.ScriptModule):
            where = f"{path} of {_name(source)}" if path else _name(source)
            raise UserError(f"{where} is TorchScript, whose calls are not seen: return the module it was made of")
    return module, notes


def _give_sizes(source: Source, inputs: Inputs, mode: TraceMode) -> nn.Module:
    """Returns the module with values, after a forward pass, in which its lazy layers get their sizes for good."""
    with mode.real_tensors(), torch.no_grad():
        module = source if isinstance(source, nn.Module) else source()
        given, _ = make_tensors(named_inputs(inputs), mode.without_values, lambda t: t, True, None)
        args, kwargs = arguments(module, given)
        module(*args, **kwargs)
    return module


def _stand_ins(module: nn.Module, mode: TraceMode) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Returns parameters and buffers for the step: fake ones, or with `real` the module's own values, such that its
    gradients and statistics do not change. Shared tensors stay shared."""
    parameters = dict(module.named_parameters(remove_duplicate=False))
    buffers = dict(module.named_buffers(remove_duplicate=False))
    made = {id(tensor): _place(tensor, mode) for tensor in _unique((*parameters.values(), *buffers.values()))}
    return {k: made[id(p)] for k, p in parameters.items()}, {k: made[id(b)] for k, b in buffers.items()}


def _place(tensor: Tensor, mode: TraceMode) -> Tensor:
    """Returns a tensor for the step: known values are copied, so that the original does not change."""
    weight = isinstance(tensor, nn.Parameter)
    if tensor.device.type not in ("cpu", "meta"):
        raise UserError(f"the module is on {tensor.device}: build it on the CPU or under torch.device('meta')")
    if tensor.device.type == "meta":
        if mode.real:
            raise UserError("the module was built under torch.device('meta') and has no values: build it on the CPU")
        fake = mode.without_values(tensor.shape, tensor.dtype)
        return nn.Parameter(fake, tensor.requires_grad) if weight else fake
    if isinstance(tensor, FakeTensor):
        return tensor
    if weight and not mode.real:
        fake = mode.from_tensor(tensor)
        fake.grad = None  # drop a gradient of an earlier step, to which this step would add its own
        return fake
    if weight:
        return nn.Parameter(tensor.detach(), tensor.requires_grad)
    if mode.real or mode.keeps_values(tensor):
        with _disable_current_modes():
            return tensor.clone()
    return mode.from_tensor(tensor)


def _run(
    module: nn.Module, state: dict[str, Tensor], args: tuple[Any, ...], kwargs: dict[str, Any],
    recorder: Recorder, loss: Loss | None, precision: Precision,
) -> None:  # fmt: skip
    """Runs one micro-batch under the recorder."""
    dtype = {"bf16": torch.bfloat16, "fp16": torch.float16}.get(precision)
    # The backward pass is inside too: recomputation calls modules again, which then still need their stand-ins.
    stand_ins = _reparametrize_module(module, dict(state))
    with recorder.watching(module), torch.enable_grad(), recorder, stand_ins:
        with recorder.keeping():
            with torch.autocast("cpu", dtype=dtype) if dtype else nullcontext():
                outputs = module(*args, **kwargs)
            outputs = list(outputs) if isinstance(outputs, Iterator) else outputs
            recorder.mark(_tensors(outputs), "output")
            with recorder.scope("loss"):
                ends = [loss(outputs)] if loss else _floating(outputs)
                if not ends and not _tensors(outputs):
                    kind = type(outputs).__name__
                    raise UserError(f"forward returned a {kind} without tensors: return what is learned")
                if not any(end.requires_grad for end in ends):
                    raise UserError("nothing in the output needs a gradient: unfreeze parameters")
                recorder.mark(ends, "output")
        recorder.phase = Phase.BACKWARD
        torch.autograd.backward(ends, [torch.ones_like(end) for end in ends])
        recorder.mark([p.grad for p in state.values() if p.grad is not None], "gradient")


def _tensors(value: Any, depth: int = 4) -> list[Tensor]:
    """Returns the tensors in nested lists, dicts, output classes of libraries and other objects."""
    if isinstance(value, Tensor):
        return [value]
    if depth == 0 or isinstance(value, nn.Module | type):
        return []
    if hasattr(value, "to_tuple"):  # the output classes of Hugging Face
        value = value.to_tuple()
    elif isinstance(value, Mapping):
        value = list(value.values())
    elif dataclasses.is_dataclass(value):  # may have slots instead of __dict__
        value = [getattr(value, field.name, None) for field in dataclasses.fields(value)]
    elif not isinstance(value, list | tuple):
        value = list(getattr(value, "__dict__", {}).values())
    return [tensor for item in value for tensor in _tensors(item, depth - 1)]


def _floating(outputs: Any) -> list[Tensor]:
    """Returns the outputs that backward starts from without a loss: the first with one number, else all of them."""
    found = [t for t in _tensors(outputs) if t.requires_grad]  # of real or complex numbers
    scalars = [t for t in found if t.numel() == 1]
    return scalars[:1] or found


CONSTRUCTION = "its construction"
_READS_VALUES = ("not supported for tensor subclasses", "data-dependent", "Cannot access data pointer")
_OWN = Path(__file__).parents[1]
_TORCH = Path(torch.__file__).parent
_LIBRARIES = [Path(p) for p in (*site.getsitepackages(), sysconfig.get_paths()["purelib"], site.getusersitepackages())]


class Untraceable(UserError):
    """A failure of a module in a trace; `parameter_bytes` is None if the module was not built."""

    def __init__(self, reason: str, advice: str, parameter_bytes: int | None) -> None:
        super().__init__(f"{reason}: {advice}")
        self.reason, self.parameter_bytes = reason, parameter_bytes


def describe_failure(
    error: BaseException, name: str, where: str, path: str, *, real: bool, parameter_bytes: int | None
) -> Untraceable:
    """Returns an error that describes the failure in one line, with advice."""
    place = f"{where}, in {path}" if path else where
    line, own = _line(error)
    place += f" ({line})" if line else ""
    lines = str(error).strip().splitlines() or [type(error).__name__]
    end = next((i for i, line in enumerate(lines) if not line.endswith(":")), len(lines))
    message = " ".join(lines[: end + 1])
    known = isinstance(error, DataDependentOutputException | DynamicOutputShapeException)
    if known or (not real and any(words in str(error) for words in _READS_VALUES)):
        reason = f"{name} looks at the values of a tensor ({getattr(error, 'func', message)}) in {place}"
        advice = "run one step on real tensors with --real, which takes its memory and time"
        if own:
            advice = f"make that decision from shapes or plain Python numbers, or {advice}"
        return Untraceable(reason, advice, parameter_bytes)
    reason = f"{name} fails in {place}: {type(error).__name__}: {message}"
    advice = "check the names, shapes, dtypes and values of its inputs"
    if where == CONSTRUCTION:
        advice = "check that it can be built by calling it in Python"
    if "FlexAttention" in message:  # it trains on accelerators only, and a trace is of a CPU
        advice = "put scaled_dot_product_attention in its place for the plan: its products are those of all scores"
    if operator := re.search(r"HigherOrderOperator (\w+)", message):
        reason = f"{name} calls torch's operator {operator[1]} in {place}, and what it calls is not seen"
        advice = "put an if, a loop or a call of Python in its place for the plan"
    return Untraceable(reason, install_advice(error) or advice, parameter_bytes)


def _line(error: BaseException) -> tuple[str, bool]:
    """Returns the innermost line outside torch and this package, and whether it is in the user's own code."""
    for frame in reversed(traceback.extract_tb(error.__traceback__)):
        file = Path(frame.filename)
        if not file.is_file() or _OWN in file.parents or _TORCH in file.parents:
            continue
        roots = [root for root in _LIBRARIES if root in file.parents]
        here = Path.cwd()
        shown = file.relative_to(roots[0]) if roots else file.relative_to(here) if here in file.parents else file
        return f"{shown}:{frame.lineno}", not roots
    return "", False
