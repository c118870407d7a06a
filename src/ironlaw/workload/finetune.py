"""Fine-tuning with adapters: what a user may choose, which matrices get one, and what is trained. No torch.

An adapter adds (alpha / rank) B A to a matrix that stays as it is (LoRA, arXiv 2106.09685). Adapters lie on the
matrices of the model's Hugging Face family, so that `peft` loads them: query, key and value are one matrix here and
often three there, gate and up two here and sometimes one there.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

from pydantic import Field

from ironlaw.errors import UserError, did_you_mean
from ironlaw.model.config import ModelConfig
from ironlaw.model.huggingface.spec import Names
from ironlaw.model.huggingface.tensors import entries
from ironlaw.schema import Section
from ironlaw.workload.parameters import Parameter, model_parameters

ALL = "all-linear"  # PEFT's word


class FinetuneConfig(Section):
    """What is trained of a model that is there: all of it, or adapters beside its matrices."""

    # lora; qlora: the blocks' matrices are held in nf4 (arXiv 2305.14314); dora: and a length per row is learned
    # (arXiv 2402.09353).
    method: Literal["none", "lora", "qlora", "dora"] = "none"
    rank: int = Field(16, gt=0, le=2**16)
    alpha: float = Field(32.0, gt=0)  # the adapter counts alpha / rank times
    dropout: float = Field(0.0, ge=0, lt=1)  # of what goes into the adapters
    # Names of the family's modules, as PEFT has them ("q_proj", "mlp.down_proj", "c_attn"); all-linear: every matrix of
    # the blocks.
    targets: tuple[str, ...] = Field((ALL,), min_length=1)
    start_from: str | None = None  # a directory with PEFT's adapter files, to go on from

    @property
    def adapts(self) -> bool:
        return self.method != "none"

    @property
    def scale(self) -> float:
        return self.alpha / self.rank


@dataclass(frozen=True)
class Target:
    """A matrix of the Hugging Face model that gets an adapter, and where it is here.

    Rows `start` to `stop` of the matrix of our `layer` are row `order[i]` of theirs each, or the same where that is
    empty. `which` of `count` of ours share one of theirs. `transposed`: it has inputs first there.
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
        """As `model/adapters.py` names them."""
        prefix = f"{self.layer}.adapters.{self.name}"
        rows = self.stop - self.start
        yield Parameter(f"{prefix}.a", (config.rank, self.inputs))
        yield Parameter(f"{prefix}.b", (rows, config.rank))
        if config.method == "dora":
            yield Parameter(f"{prefix}.magnitude", (rows,))


def linear_layers(model: ModelConfig, names: Names) -> list[Target]:
    """Every matrix of the dense blocks that an adapter can lie on."""
    shapes = {parameter.name: parameter.shape for parameter in model_parameters(model)}
    found = []
    for entry in entries(model, names):
        shape = shapes[entry.ours]
        if not entry.ours.startswith("blocks.") or len(shape) != 2 or entry.each or entry.stack:
            continue
        start = 0
        for theirs, rows in zip(entry.theirs, entry.sizes or (shape[0],), strict=True):
            order = tuple(row - start for row in entry.order[start : start + rows])
            found.append(
                Target(
                    entry.ours.removesuffix(".weight"), theirs.removesuffix(".weight"), start, start + rows, shape[1],
                    () if order == tuple(range(rows)) else order, entry.which, entry.count, entry.transposed,
                )
            )  # fmt: skip
            start += rows
    return found


def targets_of(model: ModelConfig, names: Names, config: FinetuneConfig) -> list[Target]:
    """Those that `finetune.targets` names; UserError for a name that the model has not."""
    there = linear_layers(model, names)
    chosen = []
    for wanted in config.targets:
        found = there if wanted == ALL else [t for t in there if f".{t.theirs}".endswith(f".{wanted}")]
        if not found:
            known = (ALL, *{target.name for target in there})
            raise UserError(
                f"finetune.targets has {wanted!r}, which no matrix is called: {did_you_mean(wanted, known)}"
            )
        chosen += found
    return [target for target in there if target in chosen]


def adapter_parameters(model: ModelConfig, names: Names, config: FinetuneConfig) -> list[Parameter]:
    """Every tensor that is trained."""
    return [p for target in targets_of(model, names, config) for p in target.parameters(config)]
