"""The operations of a decode step in C, compiled for one model's shapes when it is loaded, called through ctypes.

On a CPU a step of few tokens is some thousand small operations of PyTorch, each of which costs more than it computes,
and keys and values are copied out of their pages before they are read. Here a layer's attention is one call, without a
copy. Where there is no C compiler, `compiled` gives None, and PyTorch's operations do the same.
"""

from __future__ import annotations

import ctypes
import hashlib
import logging
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

log = logging.getLogger("ironlaw.kernels")
SOURCE = Path(__file__).with_name("decode.c")
# Of -ffast-math what needs no start-up code: that would change the arithmetic of the whole process.
_FLAGS = ("-O3", "-march=native", "-fPIC", "-fopenmp", "-fno-math-errno", "-fno-trapping-math", "-fno-signed-zeros",
          "-fassociative-math", "-freciprocal-math", "-fno-semantic-interposition")  # fmt: skip
FORMATS = {torch.float32: 0, torch.bfloat16: 1, torch.int8: 2, torch.float8_e4m3fn: 3}

_POINTER, _INT, _LONG, _FLOAT = ctypes.c_void_p, ctypes.c_int32, ctypes.c_long, ctypes.c_float


class Layer(ctypes.Structure):
    """One layer's pages and rules, as `decode.c` declares it."""

    _fields_ = (
        *((name, _POINTER) for name in ("keys", "values", "key_scales", "value_scales", "slopes", "sinks")),
        ("scale", _FLOAT), ("cap", _FLOAT), ("window", _INT),
    )  # fmt: skip


class Step(ctypes.Structure):
    _fields_ = (
        *((name, _POINTER) for name in ("table", "sequence", "positions")),
        *((name, _INT) for name in ("tokens", "width", "threads")),
    )


@dataclass(frozen=True)
class Shapes:
    """What the code is compiled for: query heads, key/value heads, elements of a key and a value, from which on a row
    of values follows another, tokens of a page."""

    heads: int
    shared: int
    key: int
    value: int
    value_stride: int
    page: int


class Native:
    """The compiled library. Tensors are the caller's, contiguous within a token."""

    def __init__(self, library: Any, shapes: Shapes, store: torch.dtype, activation: torch.dtype) -> None:
        self.shapes, self.store, self.activation = shapes, store, activation
        pointer, long = _POINTER, _LONG
        self._attend = _function(library.attend, pointer, pointer, pointer, long, pointer)
        self._turn = _function(library.turn, pointer, long, _INT, pointer, pointer, _INT, _INT)
        self._norm = _function(library.norm, pointer, pointer, pointer, long, long, _FLOAT)
        self.keeps = hasattr(library, "keep")  # 8-bit formats are scaled by PyTorch
        if self.keeps:
            self._keep = _function(library.keep, pointer, pointer, pointer, long, pointer, long)
        numbers = torch.arange(256, dtype=torch.uint8).view(torch.float8_e4m3fn).float()
        _function(library.prepare, pointer)(numbers.data_ptr())

    def keep(self, layer: Any, step: Any, key: Tensor, value: Tensor | None = None) -> None:
        """New keys (N, K, D) and values (N, K, W) to their pages."""
        stride = 0 if value is None else value.stride(0)
        self._keep(layer, step, key.data_ptr(), key.stride(0), address(value), stride)

    def attend(self, layer: Any, step: Any, query: Tensor) -> Tensor:
        """(N, A, W) of queries (N, A, D)."""
        out = query.new_empty(query.shape[0], self.shapes.heads, self.shapes.value)
        self._attend(layer, step, query.data_ptr(), query.stride(0), out.data_ptr())
        return out

    def turn(self, x: Tensor, cosines: Tensor, sines: Tensor, size: int | None) -> None:
        """`model.rotary.turn` of x (N, heads, D), in place."""
        (count, heads), size = x.shape[:2], size or self.shapes.key
        self._turn(x.data_ptr(), x.stride(0), heads, cosines.data_ptr(), sines.data_ptr(), count, size)

    def norm(self, x: Tensor, weight: Tensor | None, eps: float) -> Tensor:
        """RMSNorm in fp32 over the last dimension; `x` is contiguous."""
        out = torch.empty_like(x)
        size = x.shape[-1]
        self._norm(x.data_ptr(), address(weight), out.data_ptr(), x.numel() // size, size, eps)
        return out


def address(tensor: Tensor | None) -> int | None:
    return None if tensor is None else tensor.data_ptr()


def _function(function: Any, *arguments: Any) -> Any:
    function.argtypes, function.restype = arguments, None
    return function


def compiled(shapes: Shapes, store: torch.dtype, activation: torch.dtype, folder: Path) -> Native | None:
    """The library for these shapes, from `folder` or compiled into it; None where that cannot be."""
    if store not in FORMATS or activation not in FORMATS:
        return None
    numbers = {name.upper(): number for name, number in vars(shapes).items()}
    found = library(SOURCE, numbers | {"STORE": FORMATS[store], "ACTIVATION": FORMATS[activation]}, folder)
    return None if found is None else Native(found, shapes, store, activation)


def library(source: Path, defines: Mapping[str, int], folder: Path) -> Any:
    """A C file compiled for this processor, from `folder` or into it; None where that cannot be."""
    compiler = shutil.which(os.environ.get("CC", "cc"))
    if compiler is None or sys.platform != "linux":
        return None
    flags = [*_FLAGS, *(f"-D{name}={number}" for name, number in defines.items())]
    about = repr((source.read_text(), flags, _processor(), compiler))
    file = folder / f"{source.stem}-{hashlib.blake2b(about.encode(), digest_size=10).hexdigest()}.so"
    try:
        if not file.is_file():
            _build([compiler, *flags, "-c", str(source)], file)
        return ctypes.CDLL(str(file))
    except (OSError, subprocess.SubprocessError) as error:
        said = getattr(error, "stderr", None) or str(error)
        log.warning("%s is not compiled: %s", source.name, (said.strip().splitlines() or ["the compiler failed"])[0])
        return None


def _build(compile_source: list[str], file: Path) -> None:
    file.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=file.parent) as place:
        made, linked = f"{place}/made.o", f"{place}/linked.so"
        # Linked without OpenMP's library: PyTorch has loaded its own, and two of them would take turns at the cores.
        for words in ([*compile_source, "-o", made], [compile_source[0], "-shared", made, "-o", linked]):
            subprocess.run(words, check=True, capture_output=True, text=True, timeout=120)
        os.replace(linked, file)


def _processor() -> str:
    """What -march=native looks at."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return ""
    return "".join(sorted({line for line in lines if line.startswith(("model name", "flags", "Features"))}))
