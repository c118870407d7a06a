"""Many (model, batch, layout) combinations as columns of arrays: what search and validation evaluate at once.

A job is one way to run one training step. Every column has one entry per job; lengths are in elements. What all jobs
of a call share (accelerator, fabric, engine, precision) is in a `Setting`, not here.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any

import numpy as np
import numpy.typing as npt

from ironlaw.model.config import ModelConfig
from ironlaw.plan.layout import Layout

Array = npt.NDArray[np.float64]
RECOMPUTE = {"none": 0, "selective": 1, "full": 2}


@dataclass(frozen=True)
class Jobs:
    """One entry per job in every field. Booleans are 0 or 1, `recompute` is 0 none, 1 selective, 2 full."""

    # model
    layers: Array
    hidden: Array
    heads: Array
    kv_heads: Array
    head_size: Array
    ffn: Array
    gated: Array
    vocab: Array
    tied: Array
    biased: Array  # linear layers and norms have biases, positions are learned: the GPT-2 family
    # batch
    sequence: Array  # tokens
    global_batch: Array  # sequences per step
    micro_batch: Array  # sequences
    # layout
    dp: Array
    zero: Array
    tp: Array
    sp: Array
    pp: Array
    virtual: Array
    cp: Array
    recompute: Array
    flash: Array

    def __len__(self) -> int:
        return int(self.layers.size)

    def take(self, index: Any) -> Jobs:
        return Jobs(**{f.name: getattr(self, f.name)[index] for f in fields(self)})

    @property
    def accumulation(self) -> Array:
        """Micro-batches per model replica and step."""
        return self.global_batch / (self.dp * self.micro_batch)

    @property
    def accelerators(self) -> Array:
        return self.dp * self.tp * self.pp * self.cp

    @property
    def tokens(self) -> Array:
        """Tokens of one micro-batch that a rank works on: the sequence is split over context parallel ranks."""
        return self.micro_batch * self.sequence / self.cp

    @property
    def query_size(self) -> Array:
        return self.heads * self.head_size

    @property
    def key_value_size(self) -> Array:
        return self.kv_heads * self.head_size

    @property
    def stream_shards(self) -> Array:
        """Ranks that share the residual stream: the tensor parallel ones when sequence parallelism is on."""
        return np.where(self.sp > 0, self.tp, 1.0)

    @property
    def block_parameters(self) -> Array:
        """Parameters of one transformer block, all ranks together."""
        qkv = self.query_size + 2 * self.key_value_size
        matrices = np.where(self.gated > 0, 3.0, 2.0)
        weights = self.hidden * qkv + self.query_size * self.hidden + matrices * self.hidden * self.ffn
        biases = qkv + 2 * self.hidden + (matrices - 1) * self.ffn
        return weights + biases * self.biased + 2 * self.hidden * (1 + self.biased)

    @property
    def embedding_parameters(self) -> Array:
        return self.hidden * (self.vocab + self.biased * self.sequence)

    @property
    def parameters(self) -> Array:
        final_norm = self.hidden * (1 + self.biased)
        head = np.where(self.tied > 0, 0.0, self.hidden * self.vocab)
        return self.layers * self.block_parameters + self.embedding_parameters + final_norm + head

    def model_flops(self) -> Array:
        """Matrix FLOPs of one step, forward and backward; masked scores of causal attention are not counted."""
        qkv = self.query_size + 2 * self.key_value_size
        matrices = np.where(self.gated > 0, 3.0, 2.0)
        linear = self.hidden * (qkv + self.query_size + matrices * self.ffn)
        per_token = 2 * (self.layers * linear + self.hidden * self.vocab)
        attention = 2 * self.layers * self.sequence * self.query_size
        return 3 * (per_token + attention) * self.global_batch * self.sequence

    def hardware_flops(self) -> Array:
        """The same with recomputation and, for standard attention, the masked half that is computed anyway.

        With full recomputation this is equation 3 of arXiv 2104.04473.
        """
        qkv = self.query_size + 2 * self.key_value_size
        matrices = np.where(self.gated > 0, 3.0, 2.0)
        linear = 2 * self.hidden * (qkv + self.query_size + matrices * self.ffn)
        attention = np.where(self.flash > 0, 2.0, 4.0) * self.sequence * self.query_size
        full = self.recompute == 2
        linear_passes = np.where(full, 4.0, 3.0)
        attention_passes = np.where(self.recompute > 0, 4.0, 3.0)
        blocks = self.layers * (linear * linear_passes + attention * attention_passes)
        return (blocks + 3 * 2 * self.hidden * self.vocab) * self.global_batch * self.sequence


def jobs_of_columns(rows: Sequence[Mapping[str, float]]) -> Jobs:
    """Jobs from one mapping of column to number each."""
    return Jobs(**{f.name: np.array([row[f.name] for row in rows], dtype=float) for f in fields(Jobs)})


def jobs_of(model: ModelConfig, layouts: list[Layout], *, sequence: int, global_batch: int, flash: bool = True) -> Jobs:
    """The jobs of one model under several layouts."""
    count = len(layouts)

    def same(value: float) -> Array:
        return np.full(count, float(value))

    def each(name: str) -> Array:
        return np.array([float(getattr(layout, name)) for layout in layouts])

    return Jobs(
        layers=same(model.layers), hidden=same(model.hidden), heads=same(model.heads),
        kv_heads=same(model.key_value_heads), head_size=same(model.size_of_head), ffn=same(model.ffn_size),
        gated=same(model.gated_ffn), vocab=same(model.vocab), tied=same(model.tied), biased=same(model.bias),
        sequence=same(sequence), global_batch=same(global_batch), micro_batch=each("micro_batch"),
        dp=each("dp"), zero=each("zero"), tp=each("tp"), sp=each("sp"), pp=each("pp"),
        virtual=each("virtual_stages"), cp=each("cp"),
        recompute=np.array([float(RECOMPUTE[layout.recompute]) for layout in layouts]), flash=same(flash),
    )  # fmt: skip
