"""One step seen operation by operation: what lines of the user's code compute that nothing comes of."""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Collection, Iterable
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode, _get_current_dispatch_mode_stack

from ironlaw.ledger import Phase
from ironlaw.observe.partition import Partition
from ironlaw.observe.trials import share_saved
from ironlaw.observe.user_code import user_line
from ironlaw.workload.trace_kernels import tensors

MATRIX_PRODUCTS = ("mm", "addmm", "bmm", "baddbmm", "convolution", "mv")
PRODUCTS = ("mul", *MATRIX_PRODUCTS)
SPREADING = ("repeat", "clone", "_to_copy", "copy_", "repeat_interleave")  # besides what works element by element
LEAST_ELEMENTS, FULL = 2**14, 0.05  # of an operand that is looked into, and the part of it that is not zero
LEAST_WIDE, TIMES_WIDER = 2**18, 8  # elements of a result, and how many times those of all its operands
HIDDEN = -1e4  # added to a score that no token should see; half precision reaches -65,504
MOST_OPERATIONS = 50_000  # a step of more is not looked at further: each costs some 50 us
ALL, ZEROS, WIDE, DOUBLE = "all", "zero_products", "broadcasts", "float64_operations"
MASKED, DECOMPOSED = "masked_attention", "decompositions"
COSTLY = ("svd", "eig", "qr", "inv", "matrix_exp", "householder")  # tens of times a product or a triangular solve
COUNTED = (ZEROS, WIDE, DOUBLE, MASKED, DECOMPOSED)


class CloseLook(TorchDispatchMode):
    """Seconds of forward passes and losses by line, with what of the backward pass belongs to them.

    A line is unread where it takes values that a gradient would come back through, and none does: checks and measures.
    Of some kinds of operations lines are marked: products of which nearly all of an operand is zero (one-hot rows,
    dense adjacency, gradients of outputs that no loss reads), results many times as wide as what they are made of,
    float64, causal masks, matrices that are decomposed. Backward operations are those of the forward operation with
    their sequence number.
    """

    def __init__(self, partition: Partition) -> None:
        super().__init__()
        self._partition = partition
        self._seconds: dict[str, dict[str, float]] = defaultdict(lambda: defaultdict(float))  # kind -> line -> seconds
        self._marked: dict[str, set[str]] = defaultdict(set)  # kind -> lines
        self._whole, self._operations = 0.0, 0
        self._learns: set[str] = set()  # lines that take values with a gradient
        self._read: set[str] = set()  # lines that a backward pass came back through
        self._made_by: dict[int, str] = {}  # address of what holds nearly nothing -> line
        self._wide: dict[int, int] = {}  # address of what is wide -> elements
        self._nodes: dict[int, tuple[str, list[str], float]] = {}  # sequence number -> line, kinds, seconds
        self._head: int | None = None  # the product that the backward pass came through first: of a model's outputs
        self._masked: tuple[torch.Size, torch.dtype, Tensor] | None = None  # queries and mask of a call
        self._newest = torch._C._autograd._get_sequence_nr()
        self._on, self._looks = False, True

    def begin(self) -> None:
        """Looks from here to `end`, unless the loop has a mode of its own on: modes must end in turn."""
        if not _get_current_dispatch_mode_stack():
            self._on = True
            self.__enter__()

    def end(self) -> None:
        """Under a mode that the loop has begun since it stays, and looks no more; a later call ends it."""
        self._looks = False
        if self._on and _get_current_dispatch_mode_stack()[-1] is self:
            self._on = False
            self.__exit__(None, None, None)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        began = time.thread_time()  # of one step other programs would have a large part
        result = func(*args, **(kwargs or {}))
        seconds = time.thread_time() - began
        self._operations += 1
        if self._looks and self._operations < MOST_OPERATIONS and self._in_passes():
            try:
                self._count(func, args, kwargs, result, seconds)
            except Exception:  # of a tensor unlike others: what observes ends no loop
                self._looks = False
                self._whole = 0.0
        return result

    def _in_passes(self) -> bool:
        running = self._partition.running
        of_loss = running is None and self._partition.intervals[-1].after is Phase.FORWARD
        return of_loss or running in (Phase.FORWARD, Phase.BACKWARD)

    def _count(self, func: Any, args: Any, kwargs: Any, result: Any, seconds: float) -> None:
        self._whole += seconds
        node = torch._C._current_autograd_node()
        if node is not None or self._partition.running is Phase.BACKWARD:
            number = node._sequence_nr() if node is not None else -1
            line, kinds, forward = self._nodes.get(number, ("", [], 0.0))
            self._read.add(line)
            if line and func.overloadpacket.__name__ in MATRIX_PRODUCTS:
                self._head = number if self._head is None else self._head
                if self._head == number and ZEROS not in kinds and any(map(nearly_empty, tensors(args))):
                    kinds = [*kinds, ZEROS]
                    self._nodes[number] = line, kinds, 0.0
                    self._marked[ZEROS].add(line)
                    self._seconds[ZEROS][line] += forward
        else:
            line, newest = user_line(), torch._C._autograd._get_sequence_nr()
            operands = list(tensors(args))
            if not torch.is_grad_enabled():
                return
            self._head = None
            kinds = [ALL, *self._kinds(func, operands, list(tensors(result)), line)]
            if (mask := (kwargs or {}).get("attn_mask")) is not None and hides_nothing_else(mask):
                self._masked = operands[0].shape, operands[0].dtype, mask
                self._marked[MASKED].add(line)
                kinds.append(MASKED)
            for number in range(self._newest, newest):
                self._nodes[number] = line, kinds[1:], seconds
            self._newest = newest
            if any(t.requires_grad and not t.is_leaf for t in operands):
                self._learns.add(line)
        for kind in kinds:
            self._seconds[kind][line] += seconds

    def _kinds(self, func: Any, operands: list[Tensor], made: list[Tensor], line: str) -> list[str]:
        """What this operation is counted as; lines are marked."""
        name, found = func.overloadpacket.__name__, []
        empty = [t for t in operands if nearly_empty(t)]
        made_empty = {t.data_ptr(): line for t in made if nearly_empty(t)}
        if empty and name in PRODUCTS:
            self._marked[ZEROS] |= {line, *(self._made_by.get(t.data_ptr(), line) for t in empty)}
        self._made_by |= made_empty
        if empty or made_empty:
            found.append(ZEROS)
        if (torch.Tag.pointwise in func.tags or name in SPREADING) and is_wide(operands, made):
            self._marked[WIDE].add(line)
            self._wide[made[0].data_ptr()] = made[0].numel()
            found.append(WIDE)
        elif any(self._wide.get(t.data_ptr()) == t.numel() for t in operands):
            self._wide |= {t.data_ptr(): t.numel() for t in made if t.numel() >= LEAST_WIDE}
            found.append(WIDE)
        if any(t.dtype is torch.float64 and t.numel() >= LEAST_ELEMENTS for t in made):
            self._marked[DOUBLE].add(line)
            found.append(DOUBLE)
        if "linalg_" in name and any(word in name for word in COSTLY):
            self._marked[DECOMPOSED].add(line)
            found.append(DECOMPOSED)
        return found

    def facts(self, calls: Collection[str]) -> dict[str, Any]:
        """`calls`: lines that call the model, whose passes are judged as a whole."""
        marked = {kind: self._part(self._seconds[kind], self._marked[kind]) for kind in COUNTED}
        if (masked := marked[MASKED]) is not None and self._masked is not None:
            masked["part"] *= mask_saves(*self._masked)
        return marked | {"unread_values": self._part(self._seconds[ALL], self._learns - self._read - set(calls))}

    def _part(self, seconds: dict[str, float], lines: Iterable[str]) -> dict[str, Any] | None:
        """Of the passes' operations."""
        found = sorted(((line, seconds[line]) for line in lines if line != "?"), key=lambda one: -one[1])
        if not found or not self._whole:
            return None
        part = sum(taken for _, taken in found) / self._whole
        return {"part": part, "place": found[0][0], "lines": [line for line, _ in found[1:3]]}


def is_wide(operands: list[Tensor], made: list[Tensor]) -> bool:
    """Whether the result has many times the elements of all operands, each as it lies in memory."""
    if len(made) != 1 or not operands or made[0].numel() < LEAST_WIDE:
        return False
    held = sum(min(t.numel(), t.untyped_storage().nbytes() // t.element_size()) for t in operands)
    return made[0].numel() >= TIMES_WIDER * held


def hides_nothing_else(mask: Tensor) -> bool:
    """Whether a mask of attention hides from every token those after it, and nothing else."""
    visible, hidden = (mask, ~mask) if mask.dtype is torch.bool else (mask == 0, mask < HIDDEN)
    causal = torch.ones(mask.shape[-2:], dtype=torch.bool).tril()
    square = mask.shape[-2] == mask.shape[-1] > 1
    return square and bool((visible == causal).all() and (hidden != causal).all())


def mask_saves(shape: torch.Size, dtype: torch.dtype, mask: Tensor) -> float:
    """Share of the attention's time, forward and backward, that is_causal=True saves over a causal mask."""
    leaves = q, k, v = [torch.randn(shape, dtype=dtype, requires_grad=True) for _ in range(3)]

    def both_ways(**how: Any) -> None:
        torch.autograd.grad(torch.nn.functional.scaled_dot_product_attention(q, k, v, **how).sum(), leaves)

    return share_saved(partial(both_ways, attn_mask=mask.detach()), partial(both_ways, is_causal=True))


def nearly_empty(tensor: Tensor) -> bool:
    """Of zeros, and no parameter that starts there."""
    if tensor.numel() < LEAST_ELEMENTS or tensor.dtype is torch.bool or (tensor.is_leaf and tensor.requires_grad):
        return False
    if tensor.layout is not torch.strided:
        return False
    return int(torch.count_nonzero(tensor)) <= FULL * tensor.numel()
