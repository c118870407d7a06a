"""Where a training loop says by itself what it is doing: PyTorch's own hooks, and its entry points wrapped for a while.

Nothing of the user's code changes. What is wrapped is put back when the observation ends, also after an error.
"""

from __future__ import annotations

import functools
import sys
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook
from torch.utils.data import dataloader

from ironlaw.ledger import Phase
from ironlaw.observe.events import SyncPoints
from ironlaw.observe.partition import Partition
from ironlaw.observe.user_code import is_users, user_line

_COLLECTIVES = ("all_reduce", "all_gather", "all_gather_into_tensor", "reduce_scatter_tensor", "barrier", "broadcast")
# Each makes the host wait for the device, and ends the time in which it could run ahead.
_SYNCHRONISING = ("item", "tolist", "cpu", "numpy", "__float__", "__int__", "__bool__", "nonzero")


@dataclass
class Listener:
    """What the hooks tell the watch besides phases."""

    training: Callable[[nn.Module], bool]  # whether a pass of it with gradients is one that the loop learns from
    forward_begins: Callable[[nn.Module, tuple[Any, ...], dict[str, Any]], None]
    forward_ended: Callable[[Any], None]  # with what the model returned
    backward_begins: Callable[[Any], None]  # with what it begins at
    backward_ended: Callable[[tuple[Any, ...], dict[str, Any]], None]  # what `torch.autograd.backward` was given
    updates: Callable[[torch.optim.Optimizer, bool], None]  # whether it is an observed one
    stepped: Callable[[], None]  # the optimizer whose update ends a step has updated
    cleared: Callable[[tuple[Any, ...], dict[str, Any]], None]  # what `zero_grad` was given, once it is through
    skipped: Callable[[], None]  # loss scaling left an update out
    loader: Callable[[int], None]  # a DataLoader with so many workers was asked for a batch
    sees: Callable[[str], Any]  # a DataLoader makes an iterator; between steps an evaluation or a checkpoint begins


@contextmanager
def listening(
    model: nn.Module, optimizers: Sequence[torch.optim.Optimizer], partition: Partition, listener: Listener
) -> Iterator[None]:
    with ExitStack() as stack:
        _watch_model(stack, model, partition, listener)
        _watch_optimizers(stack, optimizers, partition, listener)
        _wrap(stack, torch.autograd, "backward", _backward(stack, model, partition, listener))
        asked = _loading(model, partition, listener, lambda batches: listener.loader(batches._num_workers))
        _wrap(stack, dataloader._BaseDataLoaderIter, "__next__", asked)
        # Workers start and samples are drawn when a loader is iterated over, before the first batch is asked for.
        begun = _loading(model, partition, listener, lambda _: listener.sees("loader begun"))
        _wrap(stack, dataloader.DataLoader, "__iter__", begun)
        _wrap(stack, torch, "save", _phased(partition, lambda: _begins(listener, Phase.CHECKPOINT)))
        _wrap(stack, torch.amp.GradScaler, "step", _scaled_step(listener))
        if torch.distributed.is_available():
            for name in _COLLECTIVES:
                _wrap(stack, torch.distributed, name, _phased(partition, lambda: Phase.COMMUNICATION))
        yield


def _watch_model(stack: ExitStack, model: nn.Module, partition: Partition, listener: Listener) -> None:
    """The outermost call is the pass: some loops call the model's parts, as those of a GAN or of Lightning do."""
    depth = 0

    def begins(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        nonlocal depth
        depth += 1
        if depth > 1 or partition.running is Phase.BACKWARD:  # within a pass, or run again for its backward pass
            return
        training = torch.is_grad_enabled() and listener.training(module)
        if training:
            listener.forward_begins(module, args, kwargs)
        elif module.training:
            listener.sees("rollout")
        partition.begin(Phase.FORWARD if training else _begins(listener, Phase.EVALUATION))

    def ends(module: nn.Module, args: Any, output: Any) -> None:
        nonlocal depth
        depth -= 1
        if depth or partition.running is Phase.BACKWARD:
            return
        if partition.running is Phase.FORWARD:
            listener.forward_ended(output)
        acts = partition.running is Phase.EVALUATION and module.training  # and what it acts on is the loop's own
        partition.end(bridged=not acts)

    for module in (model, *_parts(model)):
        if (call := module._compiled_call_impl) is not None:
            module._compiled_call_impl = _around(module, call, begins, ends)
            stack.callback(setattr, module, "_compiled_call_impl", call)
            continue
        stack.callback(module.register_forward_pre_hook(begins, with_kwargs=True, prepend=True).remove)
        stack.callback(module.register_forward_hook(ends, always_call=True).remove)


def _around(module: nn.Module, call: Any, begins: Callable[..., None], ends: Callable[..., None]) -> Callable[..., Any]:
    """The compiled call of a module between two hooks: registered ones would be compiled with it."""

    def called(*args: Any, **kwargs: Any) -> Any:
        output = None
        begins(module, args, kwargs)
        try:
            output = call(*args, **kwargs)
        finally:
            ends(module, args, output)
        return output

    return called


def _parts(model: nn.Module) -> Iterator[nn.Module]:
    """Children that a loop may call by themselves; those of a container, theirs."""
    for child in model.children():
        if "forward" in vars(type(child)) or type(child).forward is not nn.Module.forward:
            yield child
        else:
            yield from _parts(child)


def _watch_optimizers(
    stack: ExitStack, optimizers: Sequence[torch.optim.Optimizer], partition: Partition, listener: Listener
) -> None:
    """Those observed, and whatever else is made to update their parameters. The last one's update ends the step."""
    known = {id(o): o for o in optimizers}
    owners = {id(p): o for o in optimizers for group in o.param_groups for p in group["params"]}

    def role(optimizer: torch.optim.Optimizer) -> torch.optim.Optimizer | None:
        """The observed one that it is, or that it stands for."""
        first = next((p for group in optimizer.param_groups for p in group["params"]), None)
        return known.get(id(optimizer)) or owners.get(id(first))

    def begins(optimizer: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, dict[str, Any]] | None:
        observed = role(optimizer) is not None
        listener.updates(optimizer, observed)
        if not observed:
            return None
        partition.begin(Phase.OPTIMIZER)
        closure = kwargs.get("closure", args[1] if len(args) > 1 else None)  # the first is the optimizer
        if closure is None:
            return None
        within = _phased(partition, lambda: Phase.HOST)(closure)  # passes in it are seen by themselves
        return (args, kwargs | {"closure": within}) if "closure" in kwargs else ((args[0], within, *args[2:]), kwargs)

    def ends(optimizer: Any, *_: Any) -> None:
        done = role(optimizer)
        if done is not None:
            partition.end()
            if done is optimizers[-1]:
                listener.stepped()

    def clearing(original: Any) -> Any:
        timed = _phased(partition, lambda: Phase.OPTIMIZER)(original)

        @functools.wraps(original)
        def zero_grad(optimizer: Any, *args: Any, **kwargs: Any) -> None:
            if role(optimizer) is None:
                return original(optimizer, *args, **kwargs)
            timed(optimizer, *args, **kwargs)
            listener.cleared(args, kwargs)

        return zero_grad

    def making(original: Any) -> Any:
        @functools.wraps(original)
        def made(optimizer: Any, *args: Any, **kwargs: Any) -> None:
            original(optimizer, *args, **kwargs)
            if role(optimizer) is not None:
                listener.sees("optimizer_rebuilt")

        return made

    stack.callback(register_optimizer_step_pre_hook(begins).remove)
    stack.callback(register_optimizer_step_post_hook(ends).remove)
    for kind in {torch.optim.Optimizer, *(k for o in optimizers for k in type(o).__mro__ if "zero_grad" in vars(k))}:
        _wrap(stack, kind, "zero_grad", clearing)
    _wrap(stack, torch.optim.Optimizer, "__init__", making)


def _wrap(stack: ExitStack, owner: Any, name: str, around: Callable[[Any], Any]) -> None:
    original = getattr(owner, name)
    own = name in vars(owner)
    setattr(owner, name, around(original))
    stack.callback(lambda: setattr(owner, name, original) if own else delattr(owner, name))


def _phased(partition: Partition, phase: Callable[[], Phase]) -> Callable[[Any], Any]:
    def around(original: Any) -> Any:
        @functools.wraps(original)
        def call(*args: Any, **kwargs: Any) -> Any:
            partition.begin(phase())
            try:
                return original(*args, **kwargs)
            finally:
                partition.end()

        return call

    return around


def _backward(stack: ExitStack, model: nn.Module, partition: Partition, listener: Listener) -> Callable[[Any], Any]:
    exchange = _Exchange(stack, model, partition) if hasattr(model, "require_backward_grad_sync") else None

    def around(original: Any) -> Any:
        @functools.wraps(original)
        def call(*args: Any, **kwargs: Any) -> Any:
            listener.backward_begins(args[0] if args else kwargs.get("tensors"))
            partition.begin(Phase.BACKWARD)
            try:
                return original(*args, **kwargs)
            finally:
                if partition.running is Phase.COMMUNICATION:
                    partition.end()
                partition.end()
                if exchange is not None:
                    exchange.settle()
                listener.backward_ended(args, kwargs)

        return call

    return around


class _Exchange:
    """DistributedDataParallel exchanges gradients behind the backward pass, and ends it by waiting for what is left.

    From the last gradient that is computed to the end of `backward` nothing hides the exchange. Which parameter is the
    last to get its gradient is learned in the first backward pass; afterwards only that one has a hook.
    """

    def __init__(self, stack: ExitStack, model: nn.Module, partition: Partition) -> None:
        self._stack, self._model, self._partition = stack, model, partition
        self._last: nn.Parameter | None = None
        self._learning = [
            p.register_post_accumulate_grad_hook(self._seen) for p in model.parameters() if p.requires_grad
        ]
        stack.callback(self._unhook)

    def _seen(self, parameter: Tensor) -> None:
        self._last = parameter  # type: ignore[assignment]

    def settle(self) -> None:
        if self._learning and self._last is not None:
            self._unhook()
            self._stack.callback(self._last.register_post_accumulate_grad_hook(self._waits).remove)

    def _waits(self, parameter: Tensor) -> None:
        exchanges = getattr(self._model, "require_backward_grad_sync", False)
        if exchanges and self._partition.running is Phase.BACKWARD:
            self._partition.begin(Phase.COMMUNICATION)

    def _unhook(self) -> None:
        for handle in self._learning:
            handle.remove()
        self._learning.clear()


def _loading(
    model: nn.Module, partition: Partition, listener: Listener, told: Callable[[Any], None]
) -> Callable[[Any], Any]:
    """A DataLoader's own time. In training `told` is given the loader, or what iterates over it, first."""

    def around(original: Any) -> Any:
        timed = _phased(partition, lambda: Phase.DATA if listener.training(model) else Phase.EVALUATION)(original)

        @functools.wraps(original)
        def call(self: Any) -> Any:
            if listener.training(model):
                told(self)
            return timed(self)

        return call

    return around


def _begins(listener: Listener, phase: Phase) -> Phase:
    listener.sees(f"{phase}_frequent")
    return phase


def _scaled_step(listener: Listener) -> Callable[[Any], Any]:
    """The scaler calls the optimizer only when all gradients are finite."""

    def around(original: Any) -> Any:
        @functools.wraps(original)
        def step(self: Any, optimizer: torch.optim.Optimizer, *args: Any, **kwargs: Any) -> Any:
            called = []
            handle = optimizer.register_step_pre_hook(lambda *_: called.append(True))
            try:
                return original(self, optimizer, *args, **kwargs)
            finally:
                handle.remove()
                if not called:
                    listener.skipped()

        return step

    return around


# A dataset's tensors are the host's, and so are an optimizer's counters.
_ON_THE_HOST = (Phase.DATA, Phase.OPTIMIZER)


@contextmanager
def sync_points(partition: Partition) -> Iterator[SyncPoints]:
    """Every `.item()`, `float(tensor)`, `.cpu()` and the like while active, by the line of the user's code it is in;
    what a library asks for by itself is its own."""
    found: SyncPoints = defaultdict(list)
    inside = False

    def around(name: str, original: Any) -> Any:
        @functools.wraps(original)
        def call(self: Tensor, *args: Any, **kwargs: Any) -> Any:
            nonlocal inside
            called = sys._getframe(1).f_code.co_filename
            if inside or partition.running in _ON_THE_HOST or not is_users(called):
                return original(self, *args, **kwargs)
            inside, began = True, time.perf_counter()
            try:
                return original(self, *args, **kwargs)
            finally:
                inside = False
                found[user_line(), name].append(time.perf_counter() - began)

        return call

    with ExitStack() as stack:
        for name in _SYNCHRONISING:
            _wrap(stack, Tensor, name, functools.partial(around, name))
        yield found
