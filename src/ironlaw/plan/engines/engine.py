"""Engines: what a training framework of one generation adds to the arithmetic. One TOML file each.

Every constant has a unit and a physical meaning and is shared by all models, layouts and clusters that the engine
runs; none belongs to a row or a group of measurements. `docs/accuracy.md` lists them with how they were obtained.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from ironlaw.catalog.formats import number_format
from ironlaw.model.config import ModelConfig
from ironlaw.plan.engines.low_precision import casts_by, storage_by
from ironlaw.workload.conventions import Conventions, StorageFormat


@dataclass(frozen=True)
class Engine(Conventions):
    """Constants of one engine. Times in seconds, memory in bytes, the rest are ratios.

    Time. The processor that launches kernels works at its own pace: a stage of a micro-batch takes the longer of
    device time and host time, not their sum.
    """

    name: str
    source: str = ""
    frameworks: tuple[str, ...] = ()  # prefixes of framework names that mean this engine, lower case
    attention: str = ""  # "standard" or "flash" where the framework name alone means several engines
    lacks: tuple[str, ...] = ()  # what it cannot run: words of plan/cluster/abilities.py
    by_generation: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)  # where a generation differs

    autocast: bool = field(default=False, kw_only=True)
    fused: bool = field(default=True, kw_only=True)

    # host: seconds of the launching processor
    host_layer_seconds: float = 1.0e-3  # one layer forward; backward takes `host_backward_ratio` of it
    host_backward_ratio: float = 1.5
    host_collective_seconds: float = 30e-6  # one tensor parallel collective
    host_rank_seconds: float = 0.0  # more of it for each rank of the group, in pipelines across nodes
    host_microbatch_seconds: float = 2e-3  # loss, schedule, pipeline messages
    host_step_seconds: float = 10e-3  # optimizer launch, logging, data, synchronisation

    # device
    matmul_slowdown: float = 1.1  # matmul time in the run over that of the kernel alone
    attention_slowdown: float = 1.5
    attention_kernel: str = "native"  # "native": written for the generation; "flash2": FlashAttention-2 everywhere
    selective_matmul_share: float = 0.0  # of a block's matmuls that selective recomputation repeats
    selective_widens: bool = False  # of latent attention, it repeats what widens its vectors in place of attention
    selective_attention_share: float = 0.0  # of attention, where it repeats matmuls
    streaming_traffic: float = 1.5  # bytes moved by norms and residual additions over the least fused kernels would
    shard_traffic: float = 1.4  # the same for activations, rotations and layout copies, which tensor parallel divides
    score_traffic: float = 1.3  # the same for materialised attention scores
    loss_traffic: float = 1.5  # the same for the loss: unfused cross entropy passes over fp32 logits many times
    optimizer_traffic: float = 1.2

    # communication: fraction hidden behind compute
    tp_hidden: float = 0.2
    dp_hidden: float = 0.4
    fsdp_hidden: float = 0.9
    pp_hidden: float = 0.5
    cp_hidden: float = 0.5
    ep_hidden: float = 0.0  # of the rows' exchange inside an island: Megatron's option for it is off by default
    ep_hidden_across: float = 0.0  # the same of an exchange that leaves the island
    island_slowdown: float = 1.0  # collectives in a run over those of a benchmark, inside an island
    network_slowdown: float = 1.0  # the same across the network
    pressure_slowdown: float = 1.0  # of a step whose peak nearly fills the device: the allocator frees and retries

    # memory conventions
    gradient_bytes: float = 4.0  # per parameter: the buffer gradients accumulate in
    master_bytes: float = 4.0  # fp32 copy of the weights
    weight_bytes: float = 2.0
    moment_bytes: float = 8.0
    gradient_communication_bytes: float = 4.0  # per parameter in the reduction over data parallel ranks
    pipeline_keeps: bool = False  # in pipelines: weights gathered for a whole step, gradients reduced at its end
    fused_accumulation: bool = False  # a weight gradient is added to its buffer by the product that makes it
    half_gradient_bytes: float = 0.0  # per parameter: 16-bit gradients that stay beside the accumulation buffer
    entrance_bytes: float = 0.0  # per token and hidden element on the first stage, not divided by tp
    run_ahead_bytes: float = 0.0  # the same on the output layer's stage: what collectives still hold (words.py)
    reporting_stage: str = "highest"  # stage whose peak the engine logs: "highest", or "first" (rank 0)
    partition: str = "equal"  # layers per stage: "equal", or "cost" when the output layer counts as layers
    backward_ffn_tensors: float = 0.0  # of the feed-forward network's width, alive in its backward pass beside the kept
    activation_slack: float = 1.0  # activation bytes that the allocator needs over those of the tensors
    selective_kept_share: float = 0.0  # of a block's activations under selective recomputation; 0: all but attention
    logit_bytes: float = 10.0  # per logit at the peak: 16-bit logits, fp32 copy, its softmax and gradient
    context_bytes: float = 0.0
    default_precision: str = "bf16"
    default_zero: int = 0
    default_sp: bool = False
    default_recompute: str = "none"
    interleaves: bool = False  # pipelines whose bubble would be long, where a run does not say
    tp_overlap: float = 0.0  # of tensor parallel collectives, hidden by an option that runs do not tell; 0: none such
    recomputes_by_block: bool = False  # as few blocks as needed, where a run does not say and would not fit

    cp_kinds: tuple[str, ...] = ("ring",)  # ways of context parallel attention that it has, its default first
    default_etp: int = 0  # ranks that an expert is split over, where a run with ep does not say; 0: as many as tp
    default_imbalance: float = 0.0  # of the load of experts, where a run does not say; 0: that of training
    low_precision: str = ""  # library of 8- and 4-bit linear layers: "transformer-engine", "torchao"; "": not known
    narrow_parameters: bool = False  # weights of blocks stored as that library quantises them

    element_bytes: float = 2.0  # of activations and of gathered weights
    end_moment_bytes: float | None = None  # of embedding and output layer, where the optimizer treats them otherwise

    @property
    def gathered_bytes(self) -> float:
        """Per weight, as which it is kept where it is gathered."""
        return 4.0 if self.autocast else self.element_bytes

    @property
    def sent_weight_bytes(self) -> float:
        """Per weight that data parallel ranks gather."""
        return 4.0 if self.autocast else self.storage.gather_bytes

    @property
    def repeats_attention_alone(self) -> bool:
        """What selective recomputation repeats: as Megatron does, or all that is cheap and a share of the rest."""
        return self.fused and self.selective_matmul_share == 0

    def widens_again(self, model: ModelConfig) -> bool:
        """Whether selective recomputation repeats what makes latent attention's inputs wide, and not attention."""
        return self.selective_widens and model.latent is not None

    def computing_in(self, precision: str, generation: str = "") -> Engine:
        """The conventions of a run in this precision: in fp32 and tf32 nothing is kept twice, and all of it is wide."""
        if number_format(precision).narrow:
            held = storage_by(self.low_precision, precision, generation, self.narrow_parameters)
            return replace(self, storage=held, casts=casts_by(self.low_precision, precision, generation))
        if precision not in ("fp32", "tf32"):
            return self
        return replace(
            self, weight_bytes=4.0, master_bytes=0.0, gradient_bytes=4.0, half_gradient_bytes=0.0,
            gradient_communication_bytes=4.0, element_bytes=4.0,
            storage=StorageFormat(4.0, gather_bytes=4.0),
        )  # fmt: skip

    def on(self, generation: str) -> Engine:
        """The constants on one accelerator generation."""
        values: dict[str, Any] = dict(self.by_generation.get(generation, {}))
        return replace(self, **values)
