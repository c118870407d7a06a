"""C code compiled on demand, stored in the user's cache directory, and called through ctypes."""

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
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ironlaw.files import cache_folder

log = logging.getLogger("ironlaw.kernels")
_HERE = Path(__file__).parent
# The parts of -ffast-math without start-up code, which would change the arithmetic of the whole process.
_FLAGS = ("-O3", "-march=native", "-fPIC", "-fopenmp", "-fno-math-errno", "-fno-trapping-math", "-fno-signed-zeros",
          "-fassociative-math", "-freciprocal-math", "-fno-semantic-interposition",
          "-fno-tree-pre")  # fmt: skip
# Without -fno-tree-pre, GCC makes the bound of `exponential` a branch, and does not vectorise loops that contain it.
INT4 = torch.uint8  # denotes 4-bit codes, two to a byte, for which PyTorch has no dtype
FORMATS = {torch.float32: 0, torch.bfloat16: 1, torch.int8: 2, torch.float8_e4m3fn: 3, INT4: 4}  # numbers used in C
POINTER, INT, LONG, FLOAT = ctypes.c_void_p, ctypes.c_int32, ctypes.c_long, ctypes.c_float


def address(tensor: Tensor | None, dtype: torch.dtype, *shape: int) -> int | None:
    """Return the address of a contiguous CPU tensor. ValueError for another dtype or shape, as C would overrun it."""
    if tensor is None:
        return None
    if tensor.dtype is not dtype or tensor.shape != shape or not (tensor.is_cpu and tensor.is_contiguous()):
        raise _wrong(tensor, dtype, shape)
    return tensor.data_ptr()


def rows(tensor: Tensor, dtype: torch.dtype, *shape: int) -> tuple[int, int]:
    """Return the address and row stride of a tensor (N, heads, size), contiguous within rows. ValueError otherwise."""
    row, head, element = tensor.stride()
    together = element == 1 and (head == shape[2] or shape[1] == 1)
    if tensor.dtype is not dtype or tensor.shape != shape or not (tensor.is_cpu and together):
        raise _wrong(tensor, dtype, shape)
    return tensor.data_ptr(), row


def _wrong(tensor: Tensor, dtype: torch.dtype, shape: tuple[int, ...]) -> ValueError:
    found = f"{tensor.dtype} {tuple(tensor.shape)} of strides {tensor.stride()} on {tensor.device}"
    return ValueError(f"compiled code takes {dtype} {shape}, contiguous, on the CPU, and was called with {found}")


def function(found: Any, *arguments: Any, memory_for: str = "") -> Any:
    """Declare a C function's arguments. `memory_for`: its result 1 raises MemoryError with this message."""

    def check(result: int, *_: Any) -> None:
        if result:
            raise MemoryError(memory_for)

    found.argtypes, found.restype = arguments, INT if memory_for else None
    if memory_for:
        found.errcheck = check
    return found


def library(source: str, defines: Mapping[str, int] | None = None, folder: Path | None = None) -> Any:
    """Load a C source of this directory as a library, compiled into `folder` if needed; None if that is impossible."""
    compiler = shutil.which(os.environ.get("CC", "cc"))
    if compiler is None or sys.platform != "linux":
        return None
    folder = folder or cache_folder() / "kernels"
    options = [f"-D{name}={number}" for name, number in (defines or {}).items()]
    texts = [file.read_text() for file in sorted(_HERE.glob("*.[ch]"))]
    identity = repr((source, texts, _FLAGS, options, _processor(), compiler))
    file = folder / f"{Path(source).stem}-{hashlib.blake2b(identity.encode(), digest_size=10).hexdigest()}.so"
    try:
        if not file.is_file():
            _build([compiler, *_FLAGS, *options, "-c", str(_HERE / source)], file)
        return ctypes.CDLL(str(file))
    except (OSError, subprocess.SubprocessError) as error:
        message = getattr(error, "stderr", None) or str(error)
        log.warning("%s is not compiled: %s", source, (message.strip().splitlines() or ["the compiler failed"])[0])
        return None


def _build(compiles: list[str], file: Path) -> None:
    file.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=file.parent) as scratch:
        object_file, linked = f"{scratch}/made.o", f"{scratch}/made.so"
        # Linked without OpenMP's library: PyTorch has loaded its own, and two of them would compete for the cores.
        for command in ([*compiles, "-o", object_file], [compiles[0], "-shared", object_file, "-o", linked]):
            subprocess.run(command, check=True, capture_output=True, text=True, timeout=600)
        os.replace(linked, file)


def _processor() -> str:
    """Return the properties of the processor that -march=native depends on."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return ""
    return "".join(sorted({line for line in lines if line.startswith(("model name", "flags", "Features"))}))
