"""Finds lines of the user's code: the one that runs and for how long, the one that calls something, the one where
something grows."""

from __future__ import annotations

import ast
import gc
import inspect
import sys
import sysconfig
import time
import traceback
from bisect import bisect_right
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache, partial
from itertools import islice
from pathlib import Path
from types import CodeType, FrameType, ModuleType
from typing import Any, cast

import torch
from torch import Tensor, nn

from ironlaw.observe.partition import Interval

LIBRARIES = tuple(
    {str(Path(torch.__file__).parents[1]), str(Path(__file__).parents[1]), *map(str, (
        sysconfig.get_path("stdlib"), sysconfig.get_path("purelib"), sysconfig.get_path("platlib")))}
)  # fmt: skip
_GROWING_CALLS = ("append", "extend", "add", "appendleft", "insert")
_PADDING_WORDS = ("pad", "longest", "max_len", "maxlen")
MAX_NODES = 2000


@cache
def is_users(file: str) -> bool:
    return not file.startswith((*LIBRARIES, "<"))


def user_frames(frame: FrameType | None = None) -> Iterator[FrameType]:
    """Yields the frames that belong to no library, the innermost first; those of the caller without `frame`."""
    frame = frame if frame is not None else sys._getframe(1)
    while frame is not None:
        if is_users(frame.f_code.co_filename):
            yield frame
        frame = frame.f_back


def line_of(frame: FrameType | None) -> str:
    """Returns file:line, "?" for no frame."""
    return "?" if frame is None else f"{frame.f_code.co_filename}:{frame.f_lineno}"


def user_line(frame: FrameType | None = None, of: Collection[CodeType] = ()) -> str:
    """Returns the innermost line of the user's code, or with `of` the innermost one of these functions if any runs."""
    frames = list(user_frames(frame)) if of else list(islice(user_frames(frame), 1))
    return line_of(next((f for f in frames if f.f_code in of), frames[0] if frames else None))


@dataclass(slots=True)
class Place:
    """What is read of a frame: a frame itself would keep the tensors of a function that returns meanwhile."""

    f_code: CodeType
    f_lineno: int
    f_back: Place | None = None


@contextmanager
def stacks() -> Iterator[dict[int, FrameType]]:
    """Gives copies of the innermost frame of each thread, by its number, and of those that called it. CPython 3.11 may
    collect garbage within `f_back`, which may let another thread run, and reading a frame that ends meanwhile is a
    segmentation fault."""
    collecting = gc.isenabled()
    gc.disable()
    try:
        yield {thread: cast(FrameType, _copied(frame)) for thread, frame in sys._current_frames().items()}
    finally:
        if collecting:
            gc.enable()


def _copied(frame: FrameType) -> Place:
    innermost = last = Place(frame.f_code, frame.f_lineno)
    for caller, line in islice(traceback.walk_stack(frame), 1, None):
        last.f_back = Place(caller.f_code, line)
        last = last.f_back
    return innermost


def files_of(module: nn.Module) -> list[str]:
    """Returns the user's files: of the loop that is running, of the script and of the module."""
    files = [frame.f_code.co_filename for frame in user_frames()]
    files.append(getattr(sys.modules.get("__main__"), "__file__", None) or "")
    for child in module.modules():
        try:
            files.append(inspect.getsourcefile(type(child)) or "")
        except TypeError:
            continue
    return [file for file in dict.fromkeys(files) if file and is_users(file) and Path(file).is_file()]


@cache
def _parsed(file: str) -> ast.Module | None:
    try:
        return ast.parse(Path(file).read_text(encoding="utf-8"))
    except (OSError, SyntaxError, ValueError):
        return None


def _first_line(files: Sequence[str], matches: Callable[[ast.AST], bool]) -> str | None:
    """Returns the line of the first node of the code that matches."""
    for file in files:
        tree = _parsed(file)
        for node in ast.walk(tree) if tree is not None else ():
            if matches(node):
                return f"{file}:{getattr(node, 'lineno', 1)}"
    return None


def _last_name(node: ast.AST) -> str | None:
    match node:
        case ast.Name(id=name) | ast.Attribute(attr=name) | ast.keyword(arg=name) | ast.Constant(value=str(name)):
            return name
    return None


def line_calling(names: Sequence[str], files: Sequence[str]) -> str | None:
    """Returns where one of these is first used, as a name, a keyword or a text; imports do not count."""
    return _first_line(files, lambda node: _last_name(node) in names)


def clipping_line(files: Sequence[str]) -> str | None:
    """Returns where PyTorch clips all gradients of a model at once."""

    def clips(node: ast.AST) -> bool:
        match node:
            case ast.Call(func=function, args=[ast.Call(func=called), *_]):
                of_all = _last_name(called) == "parameters"
                return of_all and _last_name(function) in ("clip_grad_norm_", "clip_grad_value_")
        return False

    return _first_line(files, clips)


def padding_line(files: Sequence[str]) -> str | None:
    """Returns where rows are filled up, by what code calls it: a function before a keyword before a variable; else a
    list that is repeated."""

    def pads(node: ast.AST, kind: int) -> bool:
        match node:
            case ast.Call(func=ast.Name() | ast.Attribute() as named) if kind == 0:
                name = _last_name(named)
            case ast.keyword(arg=name, value=ast.Constant(value=str() | True)) if kind == 1:
                pass
            case ast.Name(id=name, ctx=ast.Load()) if kind == 2:
                pass
            case _:
                return False
        is_class = name is None or not (name.islower() or name.isupper())
        return not is_class and any(word in str(name).lower() for word in _PADDING_WORDS)

    def repeats(node: ast.AST) -> bool:
        match node:
            case ast.BinOp(op=ast.Mult(), left=ast.List(elts=[_])):
                return True
        return False

    found = (_first_line(files, partial(pads, kind=kind)) for kind in range(3))
    return next(filter(None, found), None) or _first_line(files, repeats)


def growing_line(name: str, files: Sequence[str]) -> str | None:
    """Returns where something is put into `name`, or added to it."""

    def grows(node: ast.AST) -> bool:
        match node:
            case ast.Call(func=ast.Attribute(attr=attr, value=into)):
                return attr in _GROWING_CALLS and name in _names(into)
            case ast.AugAssign(target=target):
                return name in _names(target)
            case ast.Assign(targets=targets, value=value):
                parts = [p for t in targets for p in (t.elts if isinstance(t, ast.Tuple | ast.List) else (t,))]
                into_it = any(isinstance(p, ast.Subscript) and name in _names(p.value) for p in parts)
                again = any(_last_name(n) == name for n in ast.walk(value))
                return into_it or (again and any(_last_name(p) == name for p in parts))
        return False

    return _first_line(files, grows)


def _names(node: ast.AST) -> tuple[str | None, ...]:
    """Returns `losses` of `losses`, and both names of `history["loss"]`."""
    if isinstance(node, ast.Subscript):
        return _last_name(node.slice), *_names(node.value)
    return (_last_name(node),)


def find_holder(steps: int, graphs: Sequence[int] = ()) -> tuple[str, float] | None:
    """Returns the name under which the user's code holds something of every step, and its bytes.

    That is a container of tensors or of arrays, or a value whose graph reaches back through the steps; where graphs are
    held the bytes are infinite. `graphs`: of each step, the place of its forward pass in the order in which autograd's
    nodes were made.
    """
    minimum = max(2, steps // 2)
    containers = [c for c in gc.get_objects() if type(c) in (list, dict, set, tuple) and _is_full(c, minimum)]
    held = {id(c): _held_bytes(c, graphs) for c in containers}
    before = graphs[-minimum] if len(graphs) >= minimum else None
    found: list[tuple[float, str]] = []
    for name, value in _named_values():
        if id(value) in held:
            found.append((held[id(value)], name))
        elif before is not None and isinstance(value, Tensor) and _has_nodes_before(value, before):
            found.append((float("inf"), name))
    for container in containers if not found else ():
        names = (k for r in gc.get_referrers(container) if type(r) is dict for k, v in r.items() if v is container)
        found += [(held[id(container)], name) for name in names if isinstance(name, str)]
    weight, name = max(found, default=(0.0, ""))
    return (name, weight) if found else None


def _named_values() -> Iterator[tuple[str, Any]]:
    """Yields variables of the functions that run, and attributes of those that are objects of the user's classes."""
    for frame in user_frames():
        for name, value in {**frame.f_globals, **frame.f_locals}.items():
            yield name, value
            file = getattr(sys.modules.get(type(value).__module__), "__file__", None) or "<"
            if is_users(file) and not isinstance(value, nn.Module | ModuleType | type):
                yield from getattr(value, "__dict__", {}).items()


def _values(container: Any) -> list[Any]:
    return list(container.values() if type(container) is dict else container)


def _is_full(container: Any, minimum: int) -> bool:
    """Whether it has so many entries, and tensors or arrays in the last ones."""
    if len(container) < minimum or (type(container) is dict and "__builtins__" in container):  # a module's names
        return False
    return all(_bytes(value) for value in _values(container)[-3:])


def _bytes(value: Any, depth: int = 2) -> int:
    """Of the tensors and arrays in a value."""
    if isinstance(value, Tensor) and not isinstance(value, nn.Parameter):
        return value.numel() * value.element_size() + (value.grad_fn is not None)
    if isinstance(value, list | tuple | dict) and depth:
        return sum(_bytes(v, depth - 1) for v in (value.values() if isinstance(value, dict) else value))
    return int(getattr(value, "nbytes", 0)) if type(value).__module__ == "numpy" else 0


def _held_bytes(container: Any, graphs: Sequence[int]) -> float:
    """A graph that is kept weighs more than the tensor it hangs on; those of the last step alone are not kept."""
    values = _values(container)
    nodes = [v.grad_fn._sequence_nr() for v in values if isinstance(v, Tensor) and v.grad_fn is not None]
    if nodes and (len(graphs) < 2 or min(nodes) < graphs[-2]):
        return float("inf")
    return sum(_bytes(v) for v in values[-3:]) * len(values) / 3


def _has_nodes_before(value: Tensor, number: int) -> bool:
    """Whether its graph goes back to nodes that were made before the one with this number."""
    node: Any = value.grad_fn
    for _ in range(MAX_NODES):
        if node is None or node._sequence_nr() < number:
            break
        before = [n for n, _ in node.next_functions if n is not None and n._sequence_nr() < node._sequence_nr()]
        node = min(before, key=lambda n: n._sequence_nr(), default=None)
    return node is not None and node._sequence_nr() < number


class LineTrace:
    """Calls `report` with each line that begins in the user's functions: in those that are on the stack when it begins,
    and with `everywhere` in those that are called later, too. It does nothing if another trace function is set."""

    def __init__(self, report: Callable[[str], None], everywhere: bool = False) -> None:
        self.functions: set[CodeType] = set()
        self._report, self._everywhere = report, everywhere

    def begin(self) -> None:
        if sys.gettrace() is None:
            for frame in user_frames():
                self.functions.add(frame.f_code)
                frame.f_trace = self._line
            sys.settrace(self._called)

    def end(self) -> None:
        if sys.gettrace() == self._called:
            sys.settrace(None)
            for frame in user_frames():
                frame.f_trace = None

    def _called(self, frame: FrameType, event: str, _: Any) -> Any:
        wanted = frame.f_code in self.functions or (self._everywhere and is_users(frame.f_code.co_filename))
        return self._line(frame, event, None) if wanted else None

    def _line(self, frame: FrameType, event: str, _: Any) -> Any:
        self._report(user_line(frame.f_back) if event == "return" else line_of(frame))
        return self._line


class LoopLines(LineTrace):
    """Records the moments when lines of the loop and of its callers begin. A sampler cannot run while a line holds the
    interpreter's lock, and then finds the next line."""

    def __init__(self) -> None:
        self._marks: list[tuple[float, str]] = []
        super().__init__(lambda line: self._marks.append((time.perf_counter(), line)))

    def within(self, intervals: Iterable[Interval]) -> Counter[str]:
        """Return the microseconds of these intervals by line."""
        found: Counter[str] = Counter()
        begins = [at for at, _ in self._marks]
        for interval in intervals:
            at, end = interval.begin.seconds, interval.end.seconds
            index = bisect_right(begins, at)
            while at < end:
                until = min([end, *begins[index : index + 1]])
                found[self._marks[index - 1][1] if index else "?"] += round(1e6 * (until - at))
                at, index = until, index + 1
        return found
