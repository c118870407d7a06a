"""Describes the inputs of an observed module: facts that a plan and a diagnosis start from."""

from __future__ import annotations

import inspect
from typing import Any

import torch
from torch import Tensor, nn

from ironlaw.workload.module_source import Input
from ironlaw.workload.trace_kernels import tensors

_PRECISIONS = {torch.bfloat16: "bf16", torch.float16: "fp16", torch.float32: "fp32", torch.float64: "fp64"}


def padding(args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[float, float] | None:
    """Returns the part of a batch of token ids (B, T) that is padding, and the part of columns that hold nothing else.

    Padding is the value that most rows end with, or begin with, from its second in a row on.
    """
    ids = next((t for t in tensors((args, kwargs)) if t.dim() == 2 and t.dtype in (torch.int32, torch.int64)), None)
    if ids is None or len(ids) < 2 or ids.shape[1] < 8:
        return None
    found = []
    for rows in (ids, ids.flip(1)):
        value = rows[:, -1].mode().values
        run = (rows == value).flip(1).cumprod(1).sum(1)
        found.append((run * (run > 1), run.min()))
    run, columns = max(found, key=lambda one: int(one[0].sum()))
    if int(run.max()) == ids.shape[1]:  # rows of one value: made up
        return None
    return float(run.sum()) / ids.numel(), float(columns) / ids.shape[1]


def unwrapped(model: nn.Module) -> nn.Module:
    """Without the wrappers of data parallelism and of the compiler."""
    inner: Any = getattr(model, "_orig_mod", None)
    if inner is None and type(model).__name__ in ("DistributedDataParallel", "DataParallel"):
        inner = model.module
    return model if inner is None else unwrapped(inner)


def describe_inputs(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
    """Returns precision, batch and tokens of a pass; `signature`: the inputs as a trace takes them, if it can."""
    given, device = list(tensors((args, kwargs))), next((p.device.type for p in module.parameters()), "cpu")
    first = next(iter(given), None)
    integers = next((t for t in given if not t.is_floating_point() and t.dim() == 2), None)
    dtype = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else None
    weight = next((p.dtype for p in module.parameters()), torch.float32)
    return {
        "autocast": _PRECISIONS.get(dtype) if dtype else None,
        "precision": _PRECISIONS.get(dtype or weight, str(weight)),
        "batch": first.shape[0] if first is not None and first.dim() else None,
        "tokens_per_micro_batch": integers.numel() if integers is not None else None,
        "sequence": integers.shape[1] if integers is not None else None,
        "signature": _signature(module, args, kwargs),
    }


def _signature(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[Input] | None:
    """Returns None if an input is not a tensor: a trace could not tell what it does."""
    try:
        bound = inspect.signature(module.forward).bind(*args, **kwargs).arguments
    except (TypeError, ValueError):
        return None
    named: dict[str, Any] = {}
    for name, value in bound.items():
        if isinstance(value, dict) and name in ("kwargs", "kw"):
            named |= value
        else:
            named[name] = value
    inputs = []
    for name, value in named.items():
        if isinstance(value, Tensor):
            # A mask that hides anything is another path through most models than one that hides nothing.
            hides = ("ones" if bool(value.all()) else "zeros") if "mask" in name else ""
            inputs.append(Input(name, tuple(value.shape), str(value.dtype).removeprefix("torch."), hides))
        elif value is not None and not isinstance(value, bool | int | float | str):
            return None
    return inputs
