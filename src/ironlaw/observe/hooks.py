"""PyTorch's own hooks, and its entry points wrapped for a while, through which a training loop shows what it does.

Nothing of the user's code changes. All hooks and wrappers are removed when the observation ends, also after an error.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook
from torch.utils.data import dataloader

from ironlaw.ledger import Phase
from ironlaw.observe.events import wrap
from ironlaw.observe.habits import Habits
from ironlaw.observe.partition import Partition

_COLLECTIVES = ("all_reduce", "all_gather", "all_gather_into_tensor", "reduce_scatter_tensor", "barrier", "broadcast")


@contextmanager
def listening(
    model: nn.Module, optimizers: Sequence[torch.optim.Optimizer], partition: Partition, habits: Habits
) -> Iterator[None]:
    """Report phases to `partition` and everything else to `habits` while the block runs."""

    @contextmanager
    def saving(*_: Any, **__: Any) -> Iterator[None]:
        habits.record("checkpoint_frequent")
        with partition.within(Phase.CHECKPOINT):
            yield

    @contextmanager
    def loading(loader: Any) -> Iterator[None]:
        """Time a DataLoader that starts its workers and draws samples, or its iterator that gives a batch."""
        is_training = habits.is_training(model)
        if is_training and isinstance(loader, dataloader.DataLoader):
            habits.record("loader started")
        elif is_training:
            habits.data_workers = loader._num_workers
        with partition.within(Phase.DATA if is_training else Phase.EVALUATION):
            yield

    with ExitStack() as stack:
        _watch_model(stack, model, partition, habits)
        _watch_optimizers(stack, optimizers, partition, habits)
        _watch_backward(stack, model, partition, habits)
        wrap(stack, dataloader._BaseDataLoaderIter, "__next__", loading)
        wrap(stack, dataloader.DataLoader, "__iter__", loading)
        wrap(stack, torch, "save", saving)
        if torch.distributed.is_available():
            for name in _COLLECTIVES:
                wrap(stack, torch.distributed, name, lambda *_, **__: partition.within(Phase.COMMUNICATION))
        yield


def _watch_model(stack: ExitStack, model: nn.Module, partition: Partition, habits: Habits) -> None:
    """The outermost call is the pass: some loops call the model's parts, as those of a GAN or of Lightning do."""
    depth = 0

    def begin(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        nonlocal depth
        depth += 1
        if depth > 1 or partition.running is Phase.BACKWARD:  # within a pass, or run again for its backward pass
            return
        is_training = torch.is_grad_enabled() and habits.is_training(module)
        if is_training and _is_transformed():
            habits.forwards += 1
        elif is_training:
            habits.forward_begins(module, args, kwargs)
        else:
            if module.training:
                habits.record("rollout")
            habits.record("evaluation_frequent")
        partition.begin(Phase.FORWARD if is_training else Phase.EVALUATION)

    def end(module: nn.Module, args: Any, output: Any) -> None:
        nonlocal depth
        depth -= 1
        if depth or partition.running is Phase.BACKWARD:
            return
        if partition.running is Phase.FORWARD and not _is_transformed():
            habits.forward_ended(output)
        acts = partition.running is Phase.EVALUATION and module.training  # and what it acts on is the loop's own
        partition.end(bridged=not acts)

    for module in (model, *_parts(model)):
        if (compiled := module._compiled_call_impl) is not None:
            module._compiled_call_impl = _between_hooks(module, compiled, begin, end)
            stack.callback(setattr, module, "_compiled_call_impl", compiled)
        else:
            stack.callback(module.register_forward_pre_hook(begin, with_kwargs=True, prepend=True).remove)
            stack.callback(module.register_forward_hook(end, always_call=True).remove)


def _is_transformed() -> bool:
    """Whether `torch.func` runs what is called: its tensors have no storage, and stand for others."""
    return torch._C._functorch.peek_interpreter_stack() is not None


def _between_hooks(
    module: nn.Module, compiled: Any, begin: Callable[..., None], end: Callable[..., None]
) -> Callable[..., Any]:
    """The compiled call of a module between two hooks: registered ones would be compiled with it."""

    def call(*args: Any, **kwargs: Any) -> Any:
        output = None
        begin(module, args, kwargs)
        try:
            output = compiled(*args, **kwargs)
        finally:
            end(module, args, output)
        return output

    return call


def _parts(model: nn.Module) -> Iterator[nn.Module]:
    """Children that a loop may call by themselves; those of a container, theirs."""
    for child in model.children():
        if "forward" in vars(type(child)) or type(child).forward is not nn.Module.forward:
            yield child
        else:
            yield from _parts(child)


def _watch_optimizers(
    stack: ExitStack, optimizers: Sequence[torch.optim.Optimizer], partition: Partition, habits: Habits
) -> None:
    """Those observed, and whatever else is made to update their parameters. The last one's update ends the step."""
    known = {id(o): o for o in optimizers}
    owners = {id(p): o for o in optimizers for group in o.param_groups for p in group["params"]}

    def find_observed(optimizer: torch.optim.Optimizer) -> torch.optim.Optimizer | None:
        """The observed optimizer that this one is, or stands for."""
        first = next((p for group in optimizer.param_groups for p in group["params"]), None)
        return known.get(id(optimizer)) or owners.get(id(first))

    def begin(optimizer: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, dict[str, Any]] | None:
        is_observed = find_observed(optimizer) is not None
        habits.update_begins(optimizer, is_observed)
        if not is_observed:
            return None
        partition.begin(Phase.OPTIMIZER)
        closure = kwargs.get("closure", args[1] if len(args) > 1 else None)  # the first is the optimizer
        if closure is None:
            return None

        def of_the_loop(*given: Any) -> Any:  # passes in it are observed by themselves
            with partition.within(None):
                return closure(*given)

        if "closure" in kwargs:
            return args, kwargs | {"closure": of_the_loop}
        return (args[0], of_the_loop, *args[2:]), kwargs

    def end(optimizer: Any, *_: Any) -> None:
        observed = find_observed(optimizer)
        if observed is not None:
            partition.end()
            if observed is optimizers[-1]:
                habits.updated()

    @contextmanager
    def clearing(optimizer: Any, set_to_none: Any = True, *_: Any, **__: Any) -> Iterator[None]:
        is_observed = find_observed(optimizer) is not None
        with partition.within(Phase.OPTIMIZER) if is_observed else nullcontext():
            yield
        if is_observed:
            habits.gradients_cleared(set_to_none)

    @contextmanager
    def constructing(optimizer: Any, *_: Any, **__: Any) -> Iterator[None]:
        yield
        if find_observed(optimizer) is not None:
            habits.record("optimizer_rebuilt")

    @contextmanager
    def scaling(_: Any, optimizer: torch.optim.Optimizer, *args: Any, **kwargs: Any) -> Iterator[None]:
        """A gradient scaler calls the optimizer only when all gradients are finite."""
        calls: list[None] = []
        handle = optimizer.register_step_pre_hook(lambda *_: calls.append(None))
        try:
            yield
        finally:
            handle.remove()
            if not calls:
                habits.skipped_updates += 1
                habits.updated()

    stack.callback(register_optimizer_step_pre_hook(begin).remove)
    stack.callback(register_optimizer_step_post_hook(end).remove)
    for kind in {torch.optim.Optimizer, *(k for o in optimizers for k in type(o).__mro__ if "zero_grad" in vars(k))}:
        wrap(stack, kind, "zero_grad", clearing)
    wrap(stack, torch.optim.Optimizer, "__init__", constructing)
    wrap(stack, torch.amp.GradScaler, "step", scaling)


def _watch_backward(stack: ExitStack, model: Any, partition: Partition, habits: Habits) -> None:
    """Passes of `torch.autograd.backward`.

    DistributedDataParallel exchanges gradients behind the backward pass, and ends it by waiting for what is left. From
    the last gradient that is computed to the end of `backward` nothing hides the exchange. Which parameter is the last
    to get its gradient is learned in the first backward pass; afterwards only that one has a hook.
    """
    last: Any = None
    learning = ExitStack()
    stack.callback(learning.close)

    def remember(parameter: Tensor) -> None:
        nonlocal last
        last = parameter

    def wait(parameter: Tensor) -> None:
        if model.require_backward_grad_sync and partition.running is Phase.BACKWARD:
            partition.begin(Phase.COMMUNICATION)

    is_distributed = hasattr(model, "require_backward_grad_sync")
    for parameter in model.parameters() if is_distributed else ():
        if parameter.requires_grad:
            learning.callback(parameter.register_post_accumulate_grad_hook(remember).remove)

    @contextmanager
    def backward(
        tensors: Any, grad_tensors: Any = None, retain_graph: Any = None, create_graph: Any = False, *_: Any, **__: Any
    ) -> Iterator[None]:
        nonlocal last
        if partition.running is Phase.BACKWARD:  # of a reentrant checkpoint, within the loop's own
            yield
            return
        habits.backward_begins(tensors)
        partition.begin(Phase.BACKWARD)
        try:
            yield
        finally:
            if partition.running is Phase.COMMUNICATION:
                partition.end()
            partition.end()
            if last is not None:
                learning.close()
                stack.callback(last.register_post_accumulate_grad_hook(wait).remove)
                last = None
            habits.gradient_syncs += bool(is_distributed and model.require_backward_grad_sync)
            habits.backward_ended(keeps_graph=bool(retain_graph or create_graph))

    def asking(*_: Any, **__: Any) -> AbstractContextManager[None]:
        """Gradients that the loop itself asks for, as those of an inner loop or a penalty, are part of its loss."""
        is_loop = partition.running is None
        return partition.within(Phase.FORWARD, like=Phase.BACKWARD) if is_loop else nullcontext()

    wrap(stack, torch.autograd, "backward", backward)
    wrap(stack, torch.autograd, "grad", asking)
