"""Tensors of a trace: most are fake; small ones whose values follow from known values are computed.

Modules read values: drop rates made by `linspace`, whether an attention mask hides anything, which edges of a graph are
self-loops. Such tensors are small and depend on constants and inputs, never on weights. So small tensors that depend
only on known values are computed; all others are fake: a shape, a type and a storage without memory. Under
`TraceMode(real=True)`, a module is built or run with all values, and its kernels are recorded in the same way.

Private parts of torch used here (tested: 2.13; 2.11 has the same names): `torch._subclasses.FakeTensorMode`.
"""

from __future__ import annotations

import logging
import math
import warnings
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial, reduce
from typing import Any

import psutil
import torch
from torch import Tensor, nn
from torch._prims_common import suggest_memory_format
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.utils._python_dispatch import _disable_current_modes

from ironlaw import units
from ironlaw.errors import UserError
from ironlaw.workload.trace_kernels import LSTM_LAYER, LstmLayer, base_name, grouped_shape, storages, tensors

KNOWN_BYTES = {True: 2**16, False: 2**24}  # True: floating-point tensors, such as weights; False: all others
"""Largest tensor whose values are computed. Masks, indices and positions of at most this size take milliseconds."""

MEMORY_SHARE = 0.8  # share of free memory that may be used: the rest is for the kernels' own needs
_CHECKED_FROM = 2**20  # bytes of a tensor from which free memory is checked
_SELECT = ("index", "index_put", "index_put_", "_unsafe_index", "_unsafe_index_put", "_index_put_impl_")
_NORMS = ("native_layer_norm", "native_group_norm", "batch_norm")
_READS_VALUES = (torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape)


class TraceMode(FakeTensorMode):
    """A mode with fake tensors on the CPU, except for known values; with `real`, nothing is fake."""

    def __init__(self, real: bool = False) -> None:
        super().__init__(allow_non_fake_inputs=True)
        self.real = real
        self._runs_fake = False
        self._overwritten: dict[int, Any] = {}  # storages that a fake tensor was written into

    def __deepcopy__(self, memo: object) -> TraceMode:
        """A fake tensor refers to its mode, which must be the same after layers are copied (nn.Transformer)."""
        return self

    @contextmanager
    def real_tensors(self) -> Iterator[None]:
        """Context in which nothing is fake."""
        before, self.real = self.real, True
        try:
            yield
        finally:
            self.real = before

    def has_values(self, tensor: Tensor) -> bool:
        """Returns whether a tensor has valid values."""
        return not _is_fake(tensor) and all(part._cdata not in self._overwritten for part in storages(tensor))

    def keeps_values(self, tensor: Tensor) -> bool:
        """Returns whether a tensor's values are kept; those of large floating-point tensors are not."""
        return self.has_values(tensor) and (not tensor.is_floating_point() or self._small(tensor))

    def without_values(self, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        """Returns a tensor without values."""
        empty = torch.ops.aten.empty.memory_format
        with _disable_current_modes():
            made: Tensor = self._run_fake(empty, (), (list(shape),), {"dtype": dtype, "device": torch.device("cpu")})
        return made

    def _sparse_rows(self, gradient: Tensor, touched: int, rows: int) -> Tensor:
        """Returns the sparse gradient of a table of which a batch reads `touched` rows."""
        width = gradient.shape[-1]
        places = self.without_values((1, touched), torch.int64)
        values = self.without_values((touched, width), gradient.dtype)
        with self:
            return torch.ops.aten._sparse_coo_tensor_with_dims_and_tensors(
                1, 1, (rows, width), places, values, dtype=values.dtype, layout=torch.sparse_coo, device="cpu"
            )

    def _lstm(self, func: Any, types: Any, args: Any, kwargs: Any) -> tuple[Tensor, ...]:
        """Return the results of one layer of an LSTM with the workspace, of which torch's own rule knows nothing."""
        if base_name(func).endswith("_backward"):  # a rule that torch 2.11 lacks
            x, *weights, hidden, cell = (args[n] for n in (0, 1, 2, 5, 6))
            biases = [(args[1].shape[0],)] * 2
            shapes = [x.shape, *[w.shape for w in weights], *biases, hidden.shape, cell.shape]
            return tuple(self.without_values(shape, torch.float32) for shape in shapes)
        results = self._run_fake(func, types, args, kwargs)[:3]
        kept = LstmLayer.of(*args[:2]).workspace if torch.is_grad_enabled() else 0
        return *results, self.without_values((kept,), torch.uint8)

    def _norm(self, name: str, args: tuple[Any, ...], out: tuple[Any, ...]) -> tuple[Any, ...]:
        """Return a norm's results as its CPU kernel makes them, where PyTorch's rule for fakes differs.

        Of narrow numbers with wide weights, statistics are wide and the gradient of the input is narrow. Images of a
        batch norm keep the input's memory order only if it is one of PyTorch's own, unlike a transposed sequence's. An
        input's gradient that nobody needs is not made.
        """
        backward = name.endswith("_backward")
        given = args[1 if backward else 0]
        order = suggest_memory_format(given) if "batch" in name else torch.preserve_format
        wide = reduce(torch.promote_types, (tensor.dtype for tensor in tensors(args)))
        first, *others = out
        with self:
            if backward and not args[-1][0]:
                first = None
            elif first is not None:
                first = torch.empty_like(first, dtype=given.dtype, memory_format=order)
            return first, *(t.to(wide) if t is not None and t.dtype == given.dtype else t for t in others)

    def _cut(self, tensor: Tensor, numbers: int) -> Tensor:
        """Return the tensor in a storage of so many numbers, of which its kernel cuts it."""
        return self.without_values((numbers,), tensor.dtype)[: tensor.numel()].view(tensor.shape)

    def forget_values(self, value: Any) -> None:
        for tensor in tensors(value):
            for storage in [] if isinstance(tensor, FakeTensor) else storages(tensor):
                # Forget only until it is freed, as the address may be reused; a strong reference would count as saved.
                known_again = partial(self._overwritten.pop, storage._cdata)
                self._overwritten[storage._cdata] = weakref.ref(storage, known_again)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if self._runs_fake:
            return super().__torch_dispatch__(func, types, args, kwargs)
        given = list(tensors((args, kwargs)))
        if func.is_view and not any(map(_is_fake, given)):  # in the same storage, whether its values are known or not
            return func(*args, **kwargs)
        if all(self.has_values(t) for t in given) and (self.real or _is_small_call(func, args, kwargs, given)):
            if self.real:
                _check_memory(func, args, kwargs, given)
            return func(*args, **kwargs)
        if func is torch.ops.aten._grouped_mm.default:  # torch's own rule is for the CUDA kernel: bf16 only
            return self.without_values(grouped_shape(*args, **kwargs), kwargs.get("out_dtype") or args[0].dtype)
        if func is torch.ops.aten._embedding_bag_backward.default and args[9]:  # torch's own rule returns no rows
            return self._sparse_rows(args[0], args[1].numel(), args[6])
        if func is torch.ops.aten.clone.default and args[0].layout is torch.sparse_coo:
            with self:
                rows = args[0]._values().shape[0]
            return self._sparse_rows(args[0], rows, args[0].shape[0])
        if base_name(func).startswith(LSTM_LAYER):
            return self._lstm(func, types, args, kwargs)
        if func._opname in _SELECT and not self.real:
            args = self._with_positions(args)
        out = self._run_fake(func, types, args, kwargs)
        if any(kind in func._opname for kind in _NORMS):
            out = self._norm(func._opname, args, out)
        if func._opname == "_embedding_bag" and out[1].numel():
            out = (out[0], self._cut(out[1], len(out[1]) + 1), *out[2:])
        if func._opname == "col2im":  # a copy of the columns, of which the image takes the first part
            out = self._cut(out, max(args[0].numel(), out.numel()))
        if not given:
            return func(*args, **kwargs) if self._small(out) else out
        written = [t for t in _written(func, args, kwargs) if not isinstance(t, FakeTensor)]
        if written:
            self.forget_values(written)
            return written[0] if len(written) == 1 and isinstance(out, Tensor) else out
        if all(self.has_values(t) for t in given) and self._small(out):
            return func(*args, **kwargs)
        return out

    def _run_fake(self, func: Any, types: Any, args: Any, kwargs: Any) -> Any:
        """Run the call on fake tensors, with all calls that it is composed of."""
        self._runs_fake = True
        try:
            return super().__torch_dispatch__(func, types, args, kwargs)
        finally:
            self._runs_fake = False

    def _with_positions(self, args: tuple[Any, ...]) -> tuple[Any, ...]:
        """Replace known boolean masks among the indices by the positions that they select, whose number is known."""
        places: list[Any] = []
        for index in args[1]:
            known = index is not None and index.dtype is torch.bool and self.has_values(index)
            places += index.nonzero().unbind(1) if known else [index]
        return (args[0], places, *args[2:])

    def _small(self, out: Any) -> bool:
        """Returns whether a fake result is small enough to be computed with values."""
        made = list(tensors(out))
        return bool(made) and all(
            t.device.type == "cpu"
            and t.numel() * t.element_size() <= KNOWN_BYTES[t.is_floating_point() or t.is_complex()]
            for t in made
        )


def _is_fake(tensor: Tensor) -> bool:
    return isinstance(tensor, FakeTensor) or tensor.device.type == "meta"


def _is_small_call(func: Any, args: Any, kwargs: Any, given: list[Tensor]) -> bool:
    """Returns whether no result can be large, so that the call needs no trial on fake tensors."""
    if not given:
        return False
    if func.namespace == "prim" or any(tag in func.tags for tag in _READS_VALUES):
        return True
    if _written(func, args, kwargs):
        return True
    # Without explicit sizes, no result is larger than the outer product of the inputs.
    has_sizes = any(isinstance(value, (list, tuple)) and any(type(v) is int for v in value) for value in args)
    return not has_sizes and math.prod(max(1, t.numel()) for t in given) * 8 <= KNOWN_BYTES[True]


def _written(func: Any, args: Any, kwargs: Any) -> list[Tensor]:
    """Returns the tensors that a call writes into."""
    if not func._schema.is_mutable:
        return []
    found = []
    for i, argument in enumerate(func._schema.arguments):
        if argument.alias_info is not None and argument.alias_info.is_write:
            found += list(tensors(args[i] if i < len(args) else kwargs.get(argument.name)))
    return found


def _check_memory(func: Any, args: Any, kwargs: Any, given: list[Tensor]) -> None:
    """Raises UserError before the machine swaps or the process is killed."""
    arguments = [a for a, of in zip(args, func._schema.arguments, strict=False) if of.name != "stride"]
    sizes = [math.prod(a) for a in arguments if isinstance(a, (list, tuple)) and a and all(type(v) is int for v in a)]
    largest = max([t.numel() for t in given] + sizes, default=0) * 4
    if largest < _CHECKED_FROM or func.is_view:
        return
    free = psutil.virtual_memory().available
    if largest > MEMORY_SHARE * free or free < 2**28:
        raise UserError(
            f"running it on real tensors needs more memory than the {units.bytes_(free)} that are free: "
            "give a smaller module, such as one with fewer layers, or smaller inputs"
        )


@contextmanager
def tracing(mode: TraceMode, cpu: bool) -> Iterator[None]:
    """Context for construction and steps under `mode`; for a `cpu` with oneDNN, whose LSTM is one call.

    It suppresses torch's warnings about copies of tensors without data and about oneDNN's switch. Random numbers are
    the same each time, and the caller's generator does not advance.
    """
    log = logging.getLogger("torch._subclasses.fake_tensor")  # logs errors that are also raised
    level = log.level
    log.setLevel(logging.CRITICAL)
    try:
        with warnings.catch_warnings(), torch.random.fork_rng(devices=[]):
            warnings.simplefilter("ignore")
            torch.manual_seed(0)
            onednn = torch.backends.mkldnn.flags(enabled=cpu and torch.backends.mkldnn.is_available())
            with onednn, _fake_construction(mode), mode:
                yield
    finally:
        log.setLevel(level)


@contextmanager
def _fake_construction(mode: TraceMode) -> Iterator[None]:
    """Patches functions of torch that read or replace tensors in place: casts, and initialisation by rejection."""
    cast, draw = nn.Module._apply, getattr(nn.init, "_no_grad_trunc_normal_")  # noqa: B009 - private

    def drawn(tensor: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        """Draw only with known values: without them, rejected samples cannot be found and drawn again."""
        return draw(tensor, *args, **kwargs) if mode.has_values(tensor) else tensor

    nn.Module._apply = _applied(mode, cast)  # type: ignore[method-assign]
    nn.init._no_grad_trunc_normal_ = drawn
    try:
        yield
    finally:
        nn.Module._apply = cast  # type: ignore[method-assign]
        nn.init._no_grad_trunc_normal_ = draw


def _applied(mode: TraceMode, original: Callable[..., nn.Module]) -> Callable[..., nn.Module]:
    """Returns a `Module._apply` that sets new parameters, where torch swaps them in place, which fake tensors refuse.

    Shared parameters stay shared.
    """
    new_parameters: dict[int, tuple[Tensor, Tensor]] = {}  # (old, new) by id, until the outermost call returns
    depth = 0

    def apply(module: nn.Module, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> nn.Module:
        nonlocal depth
        lazy = any(isinstance(p, nn.parameter.UninitializedParameter) for p in module._parameters.values())
        if mode.real or lazy:
            return original(module, fn, recurse)
        depth += 1
        try:
            if recurse:
                for child in module.children():
                    child._apply(fn)
            for key, parameter in module._parameters.items():
                if parameter is not None:
                    module._parameters[key] = convert(parameter, fn)  # type: ignore[assignment]
            for key, buffer in module._buffers.items():
                if buffer is not None:
                    module._buffers[key] = fn(buffer)
        finally:
            depth -= 1
            if not depth:
                new_parameters.clear()
        return module

    def convert(parameter: Tensor, fn: Callable[[Tensor], Tensor]) -> Tensor:
        if id(parameter) not in new_parameters:
            with torch.no_grad():
                value = fn(parameter)
            new = value if value is parameter else nn.Parameter(value, parameter.requires_grad)
            new_parameters[id(parameter)] = parameter, new
            new_parameters[id(new)] = new, new
        return new_parameters[id(parameter)][1]

    return apply
