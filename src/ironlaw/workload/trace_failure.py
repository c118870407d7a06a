"""Why a module could not be traced: which line of whose code, and what to do about it."""

from __future__ import annotations

import site
import sysconfig
import traceback
from pathlib import Path

import torch
from torch._subclasses.fake_tensor import DataDependentOutputException, DynamicOutputShapeException

from ironlaw.errors import UserError
from ironlaw.workload.module_source import install_advice

CONSTRUCTION = "its construction"
_READS_VALUES = ("not supported for tensor subclasses", "data-dependent", "Cannot access data pointer")
_OWN = Path(__file__).parents[1]
_TORCH = Path(torch.__file__).parent
_LIBRARIES = [Path(p) for p in (*site.getsitepackages(), sysconfig.get_paths()["purelib"], site.getusersitepackages())]


class Untraceable(UserError):
    """A module that fails; `parameter_bytes` where it was built."""

    def __init__(self, reason: str, advice: str, parameter_bytes: int | None) -> None:
        super().__init__(f"{reason}: {advice}")
        self.reason, self.parameter_bytes = reason, parameter_bytes


def explained(
    error: BaseException, name: str, where: str, path: str, *, real: bool, parameter_bytes: int | None
) -> Untraceable:
    """What went wrong in one line, and what to do."""
    place = f"{where}, in {path}" if path else where
    line, own = _line(error)
    place += f" ({line})" if line else ""
    lines = str(error).strip().splitlines() or [type(error).__name__]
    message = " ".join(lines[: 2 if lines[0].endswith(":") else 1])
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
    if "uninitialized parameter" in message:
        advice = "give lazy layers their sizes, as nn.Linear for nn.LazyLinear"
    return Untraceable(reason, install_advice(error) or advice, parameter_bytes)


def _line(error: BaseException) -> tuple[str, bool]:
    """The innermost line outside of torch and of this package, and whether it is the user's own."""
    for frame in reversed(traceback.extract_tb(error.__traceback__)):
        file = Path(frame.filename)
        if not file.is_file() or _OWN in file.parents or _TORCH in file.parents:
            continue
        roots = [root for root in _LIBRARIES if root in file.parents]
        here = Path.cwd()
        shown = file.relative_to(roots[0]) if roots else file.relative_to(here) if here in file.parents else file
        return f"{shown}:{frame.lineno}", not roots
    return "", False
