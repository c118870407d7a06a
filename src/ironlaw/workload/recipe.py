"""A step's input, and the trainer's choices for it: arithmetic, kernels, recomputation, gradient communication."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal

from ironlaw.model.config import ModelConfig
from ironlaw.model.parameters import Parameter
from ironlaw.workload.blocks import FP32, Policy, Precision
from ironlaw.workload.finetune import Adapters
from ironlaw.workload.layout import Layout
from ironlaw.workload.optimizers import BF16, OptimizerConfig
from ironlaw.workload.sections import CommunicationConfig
from ironlaw.workload.sharding import stage_parameters

Offload = Literal["none", "activations", "optimizer", "both"]


@dataclass(frozen=True)
class StepBatch:
    """The batch of one optimizer step: `sequences` over all replicas, of `tokens` each."""

    sequences: int
    tokens: int
    documents: bool = False  # attention does not cross document boundaries
    padded: bool = False  # rows are padded and differ in their number of targets
    counted: int = 1  # sequences over which expert loads are counted

    @property
    def unequal(self) -> bool:
        """Whether rows differ in their number of targets, so that ranks must exchange these numbers."""
        return self.documents or self.padded


@dataclass(frozen=True)
class Recipe:
    """Choices of Ironlaw's trainer. Weights, gradients and optimizer state are fp32 under any precision."""

    precision: Precision = "fp32"  # of the matrix products
    cuda: bool = False  # CUDA kernels, with fused norms and attention, instead of CPU kernels
    onednn: bool = False  # oneDNN computes fp32 products
    gloo: bool = True  # all-gather and reduce-scatter copy their buffers
    recompute: tuple[Policy, ...] = ()  # one per layer; empty: nothing is recomputed
    loss_chunk: int = 0  # tokens whose logits exist at a time; 0: all of a micro-batch
    optimizer: OptimizerConfig = field(default_factory=OptimizerConfig)
    communication: CommunicationConfig = field(default_factory=CommunicationConfig)
    offload: Offload = "none"
    average: bool = False  # an exponential average of the weights is kept
    checkpoints: bool = False  # written in the background from a copy of the state
    adapters: Adapters | None = None  # the trained tensors; None: the whole model
    native: bool = False  # Ironlaw's own CPU kernel computes causal attention instead of PyTorch's fused one
    compiled: bool = False  # blocks are compiled: their kernels have the names of `kinds.compiled_key`

    @property
    def product_bytes(self) -> int:
        """Bytes of a number in a matrix product."""
        return FP32 if self.precision == "fp32" else BF16

    def parameters(self, model: ModelConfig, layout: Layout, stage: int, layers: Sequence[int]) -> list[Parameter]:
        """Return a stage's tensors under FSDP or DDP, as held by a tensor parallel rank: trained ones, and under ZeRO 3
        also the frozen ones of a model with adapters."""
        if self.adapters is None:
            return stage_parameters(model, layout, stage)
        trained = self.adapters.trained(model, layers, layout)
        return trained + (self.frozen(model, layout, stage) if layout.zero == 3 else [])

    def frozen(self, model: ModelConfig, layout: Layout, stage: int) -> list[Parameter]:
        """Return a stage's frozen tensors as a tensor parallel rank stores them."""
        if self.adapters is None:
            return []
        return list(self.adapters.frozen(stage_parameters(model, layout, stage, fused=True), self.product_bytes))

    @property
    def offloads_activations(self) -> bool:
        return self.offload in ("activations", "both")

    @property
    def offloads_optimizer(self) -> bool:
        return self.offload in ("optimizer", "both")
