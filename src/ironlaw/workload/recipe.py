"""How a trainer computes a step, and what it is given: arithmetic, kernels, what is kept, how gradients travel."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from ironlaw.workload.blocks import Policy, Precision
from ironlaw.workload.finetune import Adapters
from ironlaw.workload.optimizers import OptimizerConfig
from ironlaw.workload.sections import CommunicationConfig

Offload = Literal["none", "activations", "optimizer", "both"]


@dataclass(frozen=True)
class StepBatch:
    """What one optimizer step reads: `sequences` of all replicas, `tokens` each."""

    sequences: int
    tokens: int
    documents: bool = False  # attention stays inside documents
    padded: bool = False  # rows are padded: they have different numbers of targets
    counted: int = 1  # sequences over which the load of experts is counted

    @property
    def unequal(self) -> bool:
        """Whether rows have different numbers of targets, so that ranks must tell each other theirs."""
        return self.documents or self.padded


@dataclass(frozen=True)
class Recipe:
    """Our trainer's choices. Weights, gradients and the optimizer's state are fp32 whatever the precision."""

    precision: Precision = "fp32"  # of the matrix products
    cuda: bool = False  # kernels of CUDA: fused norms and attention; else those of a CPU
    onednn: bool = False  # fp32 products by oneDNN
    gloo: bool = True  # collectives copy what they gather, and what they reduce and scatter
    recompute: tuple[Policy, ...] = ()  # one per layer; empty: nothing is recomputed
    loss_chunk: int = 0  # tokens whose logits exist at a time; 0: all of a micro-batch
    optimizer: OptimizerConfig = field(default_factory=OptimizerConfig)
    communication: CommunicationConfig = field(default_factory=CommunicationConfig)
    offload: Offload = "none"
    average: bool = False  # an exponential average of the weights is kept
    checkpoints: bool = False  # written beside the steps, from a copy of the state
    adapters: Adapters | None = None  # all that is trained; the whole model without
    native: bool = False  # causal attention by our own kernel of a CPU in place of PyTorch's fused one

    @property
    def offloads_activations(self) -> bool:
        return self.offload in ("activations", "both")

    @property
    def offloads_optimizer(self) -> bool:
        return self.offload in ("optimizer", "both")
