"""Checks of one operation at a time: what it computes for nothing, and what another way to call it saves."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_map_only

from ironlaw.observe.trials import share_saved
from ironlaw.workload.trace_kernels import storages, tensors

MATRIX_PRODUCTS = ("mm", "addmm", "bmm", "baddbmm", "convolution", "mv")
PRODUCTS = ("mul", *MATRIX_PRODUCTS)
COPIES = ("clone", "_to_copy", "copy_")
SPREADING = ("repeat", "repeat_interleave", *COPIES)  # besides what works element by element
ROWS_BY_NUMBER = ("index", "gather", "scatter", "embedding")
# Parts of names. Decompositions take tens of times a product or a triangular solve.
MAIN_WORK = (*MATRIX_PRODUCTS, "attention", "rnn", "lstm", "gru", "fft")
DECOMPOSITIONS = ("svd", "eig", "qr", "inv", "matrix_exp", "householder")
HALF = (torch.bfloat16, torch.float16)
MIN_ELEMENTS, MAX_FILLED = 2**14, 0.05  # of an operand that is looked into, and the part of it that is not zero
MIN_WIDE, MIN_TIMES_WIDER = 2**18, 8  # elements of a result, and how many times those of all its operands
MAX_SAMPLES, MIN_DENORMAL = 4096, 0.01  # elements of a tensor that are looked at, and the part of them that slows it
MIN_TOKENS, SPECIAL_TOKENS = 256, 2  # of a batch that tells of its vocabulary; with numbers at its end
MIN_UNUSED = 0.5  # of a vocabulary; texts of any length have words of its second half
TRIES = 3  # of a call both ways on the spot: the median leaves one out that other programs interrupted
HIDDEN = -1e4  # added to a score that no token should see; half precision reaches -65,504


@dataclass(frozen=True)
class CountedCall:
    """An operation of a forward pass or a loss, with the line of the user's code that calls it."""

    line: str
    name: str
    is_pointwise: bool
    operands: list[Tensor]
    results: list[Tensor]
    mask: Any = None  # of attention

    @property
    def is_main_work(self) -> bool:
        """Whether it is what models are for: products, and rows taken by number, not by a mask of truth values."""
        by_number = self.name.lstrip("_").startswith(ROWS_BY_NUMBER) and all(
            t.dtype is not torch.bool for t in self.operands
        )
        return by_number or any(word in self.name for word in MAIN_WORK)

    @property
    def is_wide(self) -> bool:
        """Whether its result has many times the elements of all operands, each as it lies in memory."""
        if len(self.results) != 1 or not self.operands or self.results[0].numel() < MIN_WIDE:
            return False
        held = (sum(part.nbytes() for part in storages(t)) // t.element_size() for t in self.operands)
        in_memory = sum(min(t.numel(), elements) for t, elements in zip(self.operands, held, strict=True))
        return self.results[0].numel() >= MIN_TIMES_WIDER * in_memory


class OperationChecks:
    """Methods with the names of rules, in two lists.

    A `COUNTED` one returns the lines to blame for a call that counts in its rule, None if the call does not count. A
    `TRIED` one times a call both ways on the spot, and returns the share of its time that the other way saves.
    """

    COUNTED = ("zeros_multiplied", "broadcasts", "copies", "float64_operations", "decompositions", "attention_masked",
               "vocabulary_unused", "weights_combined")  # fmt: skip
    TRIED = ("denormals", "half_operations")

    def __init__(self, module: nn.Module) -> None:
        self.uses_autocast = False  # for the whole pass: then casts are wanted
        self.masked: CountedCall | None = None  # the latest attention with a causal mask
        self._types = {p.dtype for p in module.parameters()}
        self.vocabulary: tuple[int, float] = (0, 0.0)  # rows of the table of words, and the part that no batch uses
        self._empty_from: dict[int, str] = {}  # address of what holds nearly nothing -> line
        self._wide: dict[int, int] = {}  # address of what is wide -> elements
        self._of_weights = {p.data_ptr() for p in module.parameters()}  # addresses, also of what is made of them alone

    def count(self, call: CountedCall) -> dict[str, set[str]]:
        """Returns the rules in which a call counts, with the lines to blame."""
        blamed = {rule: getattr(self, rule)(call) for rule in self.COUNTED}
        return {rule: lines for rule, lines in blamed.items() if lines is not None}

    def zeros_multiplied(self, call: CountedCall) -> set[str] | None:
        """Products of which nearly all of an operand is zero, and what makes such operands: one-hot rows, dense
        adjacency."""
        empty = [t.data_ptr() for t in call.operands if is_nearly_empty(t)]
        made = {t.data_ptr(): call.line for t in call.results if is_nearly_empty(t)}
        blamed = {self._empty_from.get(address, call.line) for address in empty} if call.name in PRODUCTS else set()
        self._empty_from |= made
        return blamed | ({call.line} if blamed else set()) if empty or made else None

    def broadcasts(self, call: CountedCall) -> set[str] | None:
        """Results many times as wide as their operands, and what works on them. Products and attention that take a mask
        besides what they are there for do not count."""
        if (call.is_pointwise or call.name in SPREADING) and call.is_wide:
            self._wide[call.results[0].data_ptr()] = call.results[0].numel()
            return {call.line}
        takes_masks = call.name in MATRIX_PRODUCTS or "attention" in call.name
        wide = {t.numel() for t in call.operands if self._wide.get(t.data_ptr()) == t.numel() and not takes_masks}
        given = {t.data_ptr() for t in call.operands}
        for made in call.results:
            if made.data_ptr() not in given:  # something else may have been there
                self._wide[made.data_ptr()] = made.numel() if made.numel() in wide else 0
        return set() if wide else None

    def copies(self, call: CountedCall) -> set[str] | None:
        is_large = call.name in COPIES and call.results[0].numel() >= MIN_ELEMENTS
        return {call.line} if is_large and not self.uses_autocast else None

    def float64_operations(self, call: CountedCall) -> set[str] | None:
        """Of a model that is not in float64 itself."""
        is_large = any(t.dtype is torch.float64 and t.numel() >= MIN_ELEMENTS for t in call.results)
        return {call.line} if is_large and torch.float64 not in self._types else None

    def decompositions(self, call: CountedCall) -> set[str] | None:
        is_one = "linalg_" in call.name and any(word in call.name for word in DECOMPOSITIONS)
        return {call.line} if is_one else None

    def vocabulary_unused(self, call: CountedCall) -> set[str] | None:
        """What is as wide as a table of words, of which the batch uses only words with low numbers."""
        if call.name == "embedding" and (unused := unused_rows(*call.operands[:2])) > MIN_UNUSED:
            self.vocabulary = call.operands[0].shape[0], unused
        is_wide = any(t.dim() and t.shape[-1] == self.vocabulary[0] for t in (*call.results, *call.operands))
        return {call.line} if is_wide else None

    def weights_combined(self, call: CountedCall) -> set[str] | None:
        """What is computed of weights alone, whatever the batch: a penalty on them, or adapters put together with what
        they adapt. Casts do not count."""
        given = {t.data_ptr() for t in call.operands}
        is_of_weights = bool(given) and given <= self._of_weights
        made = {t.data_ptr() for t in call.results} - given  # no views
        self._of_weights = self._of_weights | made if is_of_weights else self._of_weights - made
        is_large = any(t.numel() >= MIN_ELEMENTS for t in (*call.operands, *call.results))
        return {call.line} if is_of_weights and made and is_large and call.name not in COPIES else None

    def attention_masked(self, call: CountedCall) -> set[str] | None:
        """Attention that is given a causal mask."""
        if call.mask is None or not is_causal(call.mask):
            return None
        self.masked = call
        return {call.line}

    def denormals(self, func: Any, args: Any, kwargs: Any, result: Any) -> float:
        """Denormal numbers count as zero. Operations that write in place or draw random numbers cannot be repeated, and
        views compute nothing."""
        is_alias = any(argument.alias_info is not None for argument in func._schema.arguments)
        if is_alias or torch.Tag.nondeterministic_seeded in func.tags:
            return 0.0
        if not any(map(has_denormals, tensors((args, result)))):
            return 0.0

        def run(flush: bool) -> None:
            torch.set_flush_denormal(flush)
            func(*args, **kwargs)

        are_kept = bool(torch.tensor([torch.finfo(torch.float32).smallest_normal]).div(2).any())
        threads = torch.get_num_threads()
        torch.set_num_threads(1)  # other threads' numbers are as when they began
        try:
            return share_saved(partial(run, False), partial(run, True), TRIES) if are_kept else 0.0
        finally:
            torch.set_flush_denormal(not are_kept)
            torch.set_num_threads(threads)

    def half_operations(self, func: Any, args: Any, kwargs: Any, result: Any) -> float:
        """A product in 16 bits is done in fp32, where the rest of the model is in fp32."""
        is_product = func.overloadpacket.__name__ in MATRIX_PRODUCTS
        if not is_product or self.uses_autocast or not self._types.isdisjoint(HALF):
            return 0.0
        if not any(t.dtype in HALF and t.numel() >= MIN_ELEMENTS for t in tensors(result)):
            return 0.0
        wide = tree_map_only(Tensor, lambda t: t.float() if t.dtype in HALF else t, (args, kwargs))
        return share_saved(partial(func, *args, **kwargs), partial(func, *wide[0], **wide[1]), TRIES)


def unused_rows(table: Tensor, ids: Tensor) -> float:
    """Returns the part of a table of words behind the highest number in a batch of ids (B, T). The highest two may be
    of special tokens; 0 if the batch is too small to tell, or of positions, and if other tensors are as wide."""
    if ids.dim() != 2 or ids.numel() < MIN_TOKENS or table.shape[0] == table.shape[1]:
        return 0.0
    if bool((ids.diff(dim=1) > 0).all()):
        return 0.0
    used = ids.unique()
    return 1 - (int(used[-1 - SPECIAL_TOKENS]) + 1) / table.shape[0] if len(used) > SPECIAL_TOKENS else 0.0


def is_nearly_empty(tensor: Tensor) -> bool:
    """Whether a large tensor holds next to nothing but zeros; no parameter that starts there."""
    if tensor.numel() < MIN_ELEMENTS or tensor.dtype is torch.bool or (tensor.is_leaf and tensor.requires_grad):
        return False
    return tensor.layout is torch.strided and int(torch.count_nonzero(tensor)) <= MAX_FILLED * tensor.numel()


def zero_part(tensor: Tensor) -> float:
    """Returns the part of the rows, or of the columns, of a large matrix that are zeros."""
    if tensor.numel() < MIN_ELEMENTS or tensor.dim() != 2:
        return 0.0
    zeros = tensor == 0
    return max(float(zeros.all(dim).float().mean()) for dim in (0, 1))


def has_denormals(tensor: Tensor) -> bool:
    """Whether a large tensor has denormal numbers, judged by a sample of its elements."""
    if tensor.numel() < MIN_ELEMENTS or tensor.dtype not in (torch.float32, torch.float64):
        return False
    if tensor.layout is not torch.strided or not tensor.is_contiguous():
        return False
    some = tensor.detach().view(-1)[:: max(1, tensor.numel() // MAX_SAMPLES)]
    minimum = torch.finfo(tensor.dtype).smallest_normal
    return int(((some != 0) & (some.abs() < minimum)).sum()) > MIN_DENORMAL * some.numel()


def is_causal(mask: Tensor) -> bool:
    """Whether a mask of attention hides from every token those after it, and nothing else."""
    visible, hidden = (mask, ~mask) if mask.dtype is torch.bool else (mask == 0, mask < HIDDEN)
    causal = torch.ones(mask.shape[-2:], dtype=torch.bool).tril()
    is_square = mask.shape[-2] == mask.shape[-1] > 1
    return is_square and bool((visible == causal).all() and (hidden != causal).all())


def share_saved_without(heads: Sequence[Tensor], mask: Tensor, **instead: Any) -> float:
    """Share of the attention's time, forward and backward, that other arguments in place of the mask save.

    `heads`: queries, keys and values (B, H, S, D).
    """
    leaves = q, k, v = [torch.randn_like(each).requires_grad_() for each in heads]

    def run(**arguments: Any) -> None:
        out = torch.nn.functional.scaled_dot_product_attention(q, k, v, **arguments)
        torch.autograd.grad(out.sum(), leaves)

    return share_saved(partial(run, attn_mask=mask.detach()), partial(run, **instead))


class OddMasks(TorchFunctionMode):
    """Finds attention that a mask of three dimensions keeps from its fused kernel: underneath it is several calls."""

    is_running = False
    found: tuple[Tensor, ...] = ()  # queries, keys, values and mask of the latest

    def __torch_function__(self, func: Callable[..., Any], types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is torch.nn.functional.scaled_dot_product_attention:
            self._look(*args, **kwargs)
        try:
            return func(*args, **kwargs)
        finally:
            self.is_running = False

    def _look(
        self, query: Any, key: Any, value: Any, attn_mask: Any = None, dropout_p: float = 0.0, *_: Any, **__: Any
    ) -> None:
        heads = (query, key, value)
        alike = all(isinstance(t, Tensor) and t.dim() == 4 and t.shape[1] == query.shape[1] for t in heads)
        is_odd = isinstance(attn_mask, Tensor) and attn_mask.dim() == 3 and not attn_mask.requires_grad
        if alike and is_odd and not dropout_p:
            self.is_running, self.found = True, (*heads, attn_mask)
