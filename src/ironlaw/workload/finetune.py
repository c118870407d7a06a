"""Fine-tuning with adapters: their config, the matrices that get one, and the trained tensors. No torch.

An adapter adds (alpha / rank) B A to a frozen matrix (LoRA, arXiv 2106.09685). Adapters correspond to the matrices of
the model's Hugging Face family, so that `peft` can load them: query, key and value are one matrix here and often three
there, gate and up two here and sometimes one there.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Literal

from pydantic import Field

from ironlaw.errors import UserError, did_you_mean
from ironlaw.model.config import ModelConfig
from ironlaw.model.frozen import NF4_BITS, NF4_BLOCK, SCALES_BLOCK
from ironlaw.model.parameters import COLUMNS, ROWS, Parameter, model_parameters
from ironlaw.schema import Section
from ironlaw.workload.blocks import FP32, INDEX, BlockAdapters
from ironlaw.workload.layout import Layout
from ironlaw.workload.sharding import local_shape_of

if TYPE_CHECKING:
    from ironlaw.model.huggingface.spec import Names
    from ironlaw.model.huggingface.tensors import Entry

ALL = "all-linear"  # PEFT's name
BOTH = "embeddings"
WHOLE = Layout()


class FinetuneConfig(Section):
    """The trained part of an existing model: all of it, or adapters on its matrices."""

    # lora; qlora: the blocks' matrices are stored in nf4 (arXiv 2305.14314); dora: lora with a learned magnitude per
    # row (arXiv 2402.09353).
    method: Literal["none", "lora", "qlora", "dora"] = "none"
    rank: int = Field(16, gt=0, le=2**16)  # of an adapter's two matrices
    alpha: float = Field(32.0, gt=0)  # the adapter's output is scaled by alpha / rank
    dropout: float = Field(0.0, ge=0, lt=1)  # of the adapters' inputs
    # PEFT's names of the family's modules ("q_proj", "mlp.down_proj", "c_attn"); all-linear: every matrix of the
    # blocks.
    targets: tuple[str, ...] = Field((ALL,), min_length=1)
    # Modules trained in full besides the adapters, by PEFT's names: the embedding ("embed_tokens", "wte"), the output
    # layer ("lm_head"); both if they are tied. embeddings: both, under any family's names.
    modules_to_save: tuple[str, ...] = ()
    start_from: str | None = None  # a directory with PEFT's adapter files as initial values

    @property
    def adapts(self) -> bool:
        return self.method != "none"

    @property
    def scale(self) -> float:
        return self.alpha / self.rank


@dataclass(frozen=True)
class AdapterTarget:
    """A matrix of the Hugging Face model that gets an adapter, and its place in Ironlaw's model.

    Row i of rows `start` to `stop` of Ironlaw's `layer` is their row `order[i]`, or i if `order` is empty. Ironlaw's
    matrix is number `which` of `count` that form one of theirs. `transposed`: theirs has inputs first.
    """

    layer: str
    theirs: str
    start: int
    stop: int
    inputs: int
    order: tuple[int, ...] = ()
    which: int = 0
    count: int = 1
    transposed: bool = False

    @property
    def name(self) -> str:
        return self.theirs.rpartition(".")[2]

    def parameters(self, config: FinetuneConfig) -> Iterator[Parameter]:
        """Yield the adapter's parameters under the names of `model/adapters.py`."""
        prefix = f"{self.layer}.adapters.{self.name}"
        rows, narrows = self.stop - self.start, self.layer.endswith(NARROWING)
        divided = () if narrows else ROWS
        yield Parameter(
            f"{prefix}.a", (config.rank, self.inputs), divided=COLUMNS if narrows else (), partial=not narrows
        )
        yield Parameter(f"{prefix}.b", (rows, config.rank), divided=divided, partial=narrows)
        if config.method == "dora":
            yield Parameter(f"{prefix}.magnitude", (rows,), divided=divided, partial=narrows)


# Linear layers of a block -> the names of their products.
PRODUCTS = {
    "attention.qkv": "qkv", "attention.out": "attention_out",
    **{f"attention.{part}": part for part in ("query_down", "query_up", "latent_down", "latent_up")},
    **{f"ffn.{part}": f"ffn_{part}" for part in ("up", "gate", "down")},
}  # fmt: skip
IN_FULL = ("ffn.router.weight", "ffn.shared_gate.weight")  # no linear layers here: fp32, and without adapters
NARROWING = (
    "attention.out",
    "ffn.down",
    "ffn.shared.down",
)  # tensor parallel ranks divide their inputs, but other layers' outputs
ENDS = ("embedding.weight", "head.weight")


@dataclass(frozen=True)
class Adapters:
    """The trained tensors of a model whose other tensors are frozen."""

    config: FinetuneConfig
    targets: tuple[AdapterTarget, ...]
    saved: tuple[Entry, ...] = ()  # the ends that are trained in full

    def of_blocks(self, model: ModelConfig, recomputes_first: bool) -> tuple[BlockAdapters, ...]:
        # A recomputed block keeps its input, to recompute from.
        readers = [f"blocks.0.attention.{name}" for name in ("qkv", "query_down", "latent_down")]
        reads = any(target.layer in readers for target in self.targets)
        ends = frozenset(end for end in ("embedding", "head") if self.trains(f"{end}.weight", model))
        first = "embedding" not in ends
        plain, found = first and reads and not recomputes_first and model.norm_place == "pre", []
        for layer in range(model.layers):
            rows: dict[str, tuple[int, ...]] = {}
            for target in self.of_layer(layer):
                name = PRODUCTS[target.layer.removeprefix(f"blocks.{layer}.")]
                rows[name] = (*rows.get(name, ()), target.stop - target.start)
            method, rank = self.config.method, self.config.rank
            found.append(BlockAdapters(method, rank, tuple(rows.items()), first and layer == 0, plain, ends))
        return tuple(found)

    def trains(self, name: str, model: ModelConfig) -> bool:
        """Whether a tensor of the ends (embedding, output layer) is trained in full."""
        tied = "embedding.weight" if model.tied and name == "head.weight" else name
        return any(entry.ours == tied for entry in self.saved)

    def of_layer(self, layer: int) -> list[AdapterTarget]:
        return [target for target in self.targets if target.layer.startswith(f"blocks.{layer}.")]

    def trained(self, model: ModelConfig, layers: Iterable[int], layout: Layout = WHOLE) -> list[Parameter]:
        """Return the trained tensors of one tensor parallel rank, in module order."""
        ends = [p for p in model_parameters(model) if self.trains(p.name, model)]
        found = [p for p in ends if p.embedding]
        found += [p for layer in layers for target in self.of_layer(layer) for p in target.parameters(self.config)]
        found += [p for p in ends if not p.embedding]
        return [replace(p, shape=local_shape_of(p, layout)) for p in found]

    def messages_of_lengths(self, layers: Iterable[int]) -> list[int]:
        """Return the numbers of rows whose norms tensor parallel ranks sum in a forward pass (DoRA)."""
        if self.config.method != "dora":
            return []
        targets = (target for layer in layers for target in self.of_layer(layer))
        return [target.stop - target.start for target in targets if target.layer.endswith(NARROWING)]

    def frozen(self, parameters: Iterable[Parameter], product_bytes: int) -> Iterator[Parameter]:
        """Yield the frozen tensors as stored: fp32; matrices in `product_bytes` (DoRA: only experts'); QLoRA's block
        matrices in nf4, with the codes of their scales."""
        trained_names = {entry.ours for entry in self.saved}
        for parameter in parameters:
            matrix, experts = _is_matrix(parameter), len(parameter.shape) == 3
            if parameter.name in trained_names:
                continue
            if not (matrix or parameter.name in ENDS) or (self.config.method == "dora" and not experts):
                yield replace(parameter, trained=False)
            elif self.config.method != "qlora" or not matrix:
                yield replace(parameter, trained=False, width=product_bytes)
            else:
                rows, columns = _rows_and_columns(parameter)
                blocks, name = -(-columns // NF4_BLOCK), parameter.name.removesuffix("weight")
                codes = blocks * NF4_BLOCK * NF4_BITS // 8
                yield replace(parameter, name=f"{name}codes", shape=(rows, codes), trained=False, width=1)
                yield replace(parameter, name=f"{name}scale_codes", shape=(rows, blocks), trained=False, width=1)

    def held_as(self, precision: str) -> str:
        """The formats of matrices in blocks and at the ends, and of what is trained."""
        wide = "fp32" if self.config.method == "dora" else precision
        narrow = "nf4" if self.config.method == "qlora" else wide
        ends = "fp32" if self.saved else wide
        return "fp32 parameters" if narrow == ends == "fp32" else f"{narrow} blocks, {ends} ends, fp32 adapters"

    def scale_bytes(self, parameters: Iterable[Parameter], layout: Layout) -> int:
        """Return the bytes of the scales of scales and, if ranks divide the rows, of row indices; on every rank."""
        if self.config.method != "qlora":
            return 0
        total = 0
        for parameter in filter(_is_matrix, parameters):
            rows, columns = _rows_and_columns(parameter)
            scales = rows * -(-columns // NF4_BLOCK)
            total += -(-scales // SCALES_BLOCK) * FP32 + FP32
            total += local_shape_of(parameter, layout)[0] * INDEX if layout.tp > 1 else 0
        return total


def _is_matrix(parameter: Parameter) -> bool:
    """Whether it is a matrix of a block that is stored in few bits: of a linear layer, or of all experts."""
    stack = len(parameter.shape) == 3
    return (stack or parameter.is_block_matrix) and not parameter.name.endswith(IN_FULL)


def _rows_and_columns(matrix: Parameter) -> tuple[int, int]:
    """Return the sizes of a matrix; those of experts are one below the other."""
    *rows, columns = matrix.shape
    return math.prod(rows), columns


def linear_layers(model: ModelConfig, names: Names) -> list[AdapterTarget]:
    """Return every matrix of the blocks that can have an adapter; of a model with experts, those of attention alone.

    PEFT 0.21 on transformers 5 takes `gate_proj`, `up_proj` and `down_proj` of such a model for its routed experts',
    wherever they are.
    """
    from ironlaw.model.huggingface.tensors import entries

    matrices = {
        p.name: p.shape
        for p in model_parameters(model)
        if _is_matrix(p) and (model.moe is None or ".attention." in p.name)
    }
    found = []
    for entry in entries(model, names):
        if entry.ours not in matrices:
            continue
        shape = matrices[entry.ours]
        start = 0
        for theirs, rows in zip(entry.theirs, entry.sizes or (shape[0],), strict=True):
            order = tuple(row - start for row in entry.order[start : start + rows])
            found.append(
                AdapterTarget(
                    entry.ours.removesuffix(".weight"), theirs.removesuffix(".weight"), start, start + rows, shape[1],
                    () if order == tuple(range(rows)) else order, entry.which, entry.count, entry.transposed,
                )
            )  # fmt: skip
            start += rows
    return found


def targets_of(model: ModelConfig, names: Names, config: FinetuneConfig) -> list[AdapterTarget]:
    """Return the matrices named by `finetune.targets`; UserError for a name that the model does not have."""
    available = linear_layers(model, names)
    chosen = []
    for wanted in config.targets:
        found = available if wanted == ALL else [t for t in available if f".{t.theirs}".endswith(f".{wanted}")]
        if not found:
            known = (ALL, *{target.name for target in available})
            of = " of attention (a model with experts adapts these alone)" if model.moe is not None else ""
            raise UserError(
                f"finetune.targets has {wanted!r}, which no matrix{of} is called: {did_you_mean(wanted, known)}"
            )
        chosen += found
    return [target for target in available if target in chosen]


def adapters_of(model: ModelConfig, names: Names, config: FinetuneConfig) -> Adapters:
    """Return adapters and other trained tensors; UserError for an unknown name in `targets` or `modules_to_save`."""
    from ironlaw.model.huggingface.tensors import entries

    modules = {"embedding": names.embedding, "head": names.head}
    chosen: set[str] = set()
    for wanted in config.modules_to_save:
        found = [ours for ours, theirs in modules.items() if wanted == BOTH or f".{theirs}".endswith(f".{wanted}")]
        if not found:
            known = [theirs.rpartition(".")[2] for theirs in modules.values()]
            raise UserError(
                f"finetune.modules_to_save has {wanted!r}: {' and '.join(known)} ({BOTH}: both) can be trained whole, "
                "matrices of the blocks take adapters (finetune.targets)"
            )
        chosen |= set(modules if model.tied else found)
    saved = tuple(entry for entry in entries(model, names) if entry.ours.partition(".")[0] in chosen)
    return Adapters(config, tuple(targets_of(model, names, config)), saved)


def adapter_parameters(model: ModelConfig, names: Names, config: FinetuneConfig) -> list[Parameter]:
    """Return all trained tensors."""
    return adapters_of(model, names, config).trained(model, range(model.layers))
