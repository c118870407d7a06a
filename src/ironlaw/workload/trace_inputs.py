"""Inputs of a traced module: tensors for shapes, and arguments for names.

Inputs are tensors or are described by an `Input`. They may be nested in lists and dicts; a dotted name (`images.0`,
`targets.0.boxes`) is the path to one. Values of integers and masks decide what a module does, so a trace needs them:
they are given, or assumed from the name (`_assumed_values`).
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import _disable_current_modes

from ironlaw.errors import UserError, did_you_mean
from ironlaw.workload.module_source import Input

Inputs = Sequence[Any] | Mapping[str, Any]
Assumed = tuple[str, str, str, str]  # an assumption: name, value, reason, option that sets it
Place = Callable[[Tensor], Tensor]  # converts a tensor for the trace: fake, or with its values


def named_inputs(inputs: Inputs) -> dict[str, Any]:
    """Returns inputs by argument; unnamed ones are "#0", "#1", ... Dotted names become lists and dicts."""
    if isinstance(inputs, Mapping):
        flat = dict(inputs)
    else:
        flat = {value.name if isinstance(value, Input) else f"#{i}": value for i, value in enumerate(inputs)}
        if len(flat) != len(inputs):
            raise UserError("two inputs have the same name: name each argument of the module once")
    tree: dict[str, Any] = {}
    for name, value in flat.items():
        *outer, last = name.split(".")
        place = tree
        for part in outer:
            place = place.setdefault(part, {})
            if not isinstance(place, dict):
                raise UserError(f"input {name} is part of {part}, which is an input itself: give one of the two")
        place[last] = value
    return {name: _listed(value) for name, value in tree.items()}


def _listed(value: Any) -> Any:
    """Converts dicts with numeric keys to lists, recursively."""
    if not isinstance(value, dict):
        return value
    inner = {key: _listed(item) for key, item in value.items()}
    if inner and all(isinstance(key, str) and key.isdigit() for key in inner):
        return [inner[key] for key in sorted(inner, key=int)]
    return inner


_WITHIN = ("_orig_mod", "module", "base_model", "model")
"""Attributes that hold the module in wrappers with a generic signature: torch.compile, DataParallel, PEFT."""


def _signature(module: nn.Module) -> Mapping[str, inspect.Parameter]:
    signature = inspect.signature(module.forward).parameters
    if {p.kind for p in signature.values()} <= {inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD}:
        within = (getattr(module, name, None) for name in _WITHIN)
        return next((_signature(inner) for inner in within if isinstance(inner, nn.Module)), signature)
    return signature


def arguments(module: nn.Module, given: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Returns args and kwargs of forward: by name if it has all names, in order if it has none, else UserError."""
    signature = _signature(module)
    any_name = any(p.kind is inspect.Parameter.VAR_KEYWORD for p in signature.values())
    known = [name for name, p in signature.items() if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)]
    unnamed = [value for name, value in given.items() if name.startswith("#")]
    named = {name: value for name, value in given.items() if not name.startswith("#")}
    unknown = [name for name in named if name not in known]
    if any_name or not unknown:
        return tuple(unnamed), named
    if len(unknown) < len(named):
        raise UserError(
            f"{type(module).__name__}.forward has no argument '{unknown[0]}': {did_you_mean(unknown[0], known)}"
        )
    return tuple(given.values()), {}


def make_tensors(
    given: dict[str, Any], without_values: Callable[..., Tensor], place: Place, real: bool, vocabulary: int | None
) -> tuple[dict[str, Any], list[Assumed]]:
    """Returns the inputs with tensors in place of `Input`s, converted by `place`, and the assumptions on their values.

    `without_values` makes a tensor of a shape and type. With `real`, every tensor has values, and token ids are drawn
    from the `vocabulary` if given.
    """
    assumed: list[Assumed] = []

    def tensor(value: Any, name: str) -> Any:
        if isinstance(value, Input):
            name = name or value.name
            values = value.values or _assumed_values(name, value, vocabulary if real else None)
            if values is None and not real:
                return without_values(value.shape, getattr(torch, value.dtype))
            if values is not None and not value.values:
                size = described(value, name)[name]
                words = _WORDS.get(values, f"drawn below {values}")
                assumed.append((f"values of {name}", words, "nobody gave them", f"--input {name}={size}:VALUES"))
            with _disable_current_modes():
                return place(_make_tensor(value, values))
        if isinstance(value, Tensor):
            return place(value.detach())
        if type(value) is dict:
            return {key: tensor(item, str(key)) for key, item in value.items()}
        if type(value) in (list, tuple):
            return type(value)(tensor(item, name) for item in value)
        return value

    return {name: tensor(value, name.lstrip("#0123456789")) for name, value in given.items()}, assumed


def described(given: Any, path: str = "") -> dict[str, str]:
    """Returns the shape and type of each tensor by dotted name, as in "8x2048:int64"."""
    if isinstance(given, Tensor | Input):
        return {path: f"{'x'.join(map(str, given.shape)) or 'scalar'}:{str(given.dtype).removeprefix('torch.')}"}
    items = given.items() if isinstance(given, dict) else enumerate(given) if isinstance(given, list | tuple) else ()
    return {k: v for key, value in items for k, v in described(value, f"{path}.{key}".lstrip(".")).items()}


_WORDS = {"zeros": "zeros", "ones": "ones", "positions": "0, 1, 2, ...", "edges": "edges between two nodes"}


def _assumed_values(name: str, described: Input, vocabulary: int | None) -> str | None:
    """Returns the usual values of integers and masks of this name; None for other numbers."""
    name, whole = name.lower(), "float" not in described.dtype
    if "padding_mask" in name:  # as in torch.nn.Transformer: True masks a token out
        return "zeros"
    if "mask" in name or described.dtype == "bool" or (whole and "length" in name):
        return "ones"
    if not whole:
        return None
    if "position" in name or "offset" in name:
        return "positions"
    if "edge" in name and described.shape[:1] == (2,):
        return "edges"  # with zeros, a graph would have self-loops only
    if vocabulary and "type" not in name and any(part in name for part in ("ids", "token", "label", "target")):
        return str(vocabulary)
    return "zeros"


def _make_tensor(described: Input, values: str | None) -> Tensor:
    dtype, shape = getattr(torch, described.dtype), described.shape
    if values is None:
        return torch.randn(shape).to(dtype)
    if values in ("zeros", "ones"):
        return torch.full(shape, values == "ones", dtype=dtype)
    if values == "positions":
        return torch.arange(shape[-1] if shape else 1).expand(shape).to(dtype).clone()
    if values == "edges":
        return ((torch.arange(shape[-1]) + torch.arange(2)[:, None]) % 2).to(dtype)
    if "float" in described.dtype:
        return torch.rand(shape).mul(float(values)).to(dtype)
    return torch.randint(0, int(values), shape, generator=torch.Generator().manual_seed(0)).to(dtype)
