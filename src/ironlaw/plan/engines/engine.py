"""Engines: the costs that a training framework of one generation adds to the arithmetic. One TOML file each.

Every constant has a unit and a physical meaning and is shared by all models, layouts and clusters that the engine
runs; none belongs to a row or a group of measurements. `docs/accuracy.md` lists how each was obtained.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from typing import Any

from ironlaw.catalog.formats import PrecisionRecipe, number_format, precision_recipe
from ironlaw.model.config import ModelConfig
from ironlaw.plan.engines.low_precision import casts_by, storage_by
from ironlaw.workload.conventions import Conventions, LinearStorage
from ironlaw.workload.sizes import Size


def constant(default: Any, unit: str, meaning: str) -> Any:
    """Returns a field with its unit and meaning, for data files, calibrated profiles and docs/accuracy.md."""
    return field(default=default, metadata={"unit": unit, "meaning": meaning})


@dataclass(frozen=True)
class TrainingEngine(Conventions):
    """Constants of one engine: times in seconds, memory in bytes, ratios.

    Host and device run asynchronously: a stage of a micro-batch takes the longer of device time and host time, not
    their sum.
    """

    name: str
    source: str = ""
    frameworks: tuple[str, ...] = ()  # lower-case prefixes of the framework names that mean this engine
    attention: str = constant("", "", "runs of this framework with the other kind are another engine")
    lacks: tuple[str, ...] = constant((), "", "what it cannot run")
    by_generation: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)  # overrides by accelerator generation

    autocast: bool = field(default=False, kw_only=True)
    fused: bool = field(default=True, kw_only=True)

    # host: seconds of the launching processor
    host_layer_seconds: float = constant(1.0e-3, "s", "launching processor, one block forward")
    host_backward_ratio: float = constant(1.5, "1", "launch time of backward over forward")
    host_collective_seconds: float = constant(30e-6, "s", "launching processor, one tensor parallel collective")
    host_rank_seconds: float = constant(0.0, "s", "more of it for each rank of the group, in pipelines across nodes")
    host_microbatch_seconds: float = constant(2e-3, "s", "launching processor, loss and schedule of a micro-batch")
    host_step_seconds: float = constant(10e-3, "s", "once per step: optimizer launches, clipping, logging, data")

    # device
    matmul_slowdown: float = constant(1.1, "1", "matmul time in the run over that of the kernel alone")
    attention_slowdown: float = constant(1.5, "1", "the same for attention; backward is not measured alone")
    attention_kernel: str = constant("native", "", "flash2: FlashAttention-2 everywhere; native: the generation's own")
    selective_matmul_share: float = constant(0.0, "1", "of a block's matmuls that selective recomputation repeats")
    selective_widens: bool = constant(False, "", "selective recomputation repeats what widens latent attention")
    selective_attention_share: float = constant(0.0, "1", "of attention, where it repeats matmuls")
    selective_experts: str = constant(
        "alike", "", "it has experts: alike, repeated, or repeated but for what is exchanged"
    )
    streaming_traffic: float = constant(1.5, "1", "bytes of norms and residual additions over those of fused kernels")
    shard_traffic: float = constant(1.4, "1", "the same for activations, rotations and layout copies, which tp divides")
    score_traffic: float = constant(1.3, "1", "the same for materialised attention scores")
    loss_traffic: float = constant(1.5, "1", "the same for the loss, which passes over fp32 logits several times")
    optimizer_traffic: float = constant(1.2, "1", "bytes of the update over 34 per parameter")

    # communication: fraction hidden behind compute
    tp_hidden: float = constant(0.2, "1", "of tensor parallel collectives that compute hides")
    dp_hidden: float = constant(0.4, "1", "of data parallel collectives that may run beside compute")
    fsdp_hidden: float = constant(0.9, "1", "of ZeRO-3 gathers and scatters that compute hides")
    gather_rank_seconds: float = constant(0.0, "s", "per rank of a gather or scatter of a block's shards (ZeRO-3)")
    pp_hidden: float = constant(0.5, "1", "of pipeline messages that compute hides")
    cp_hidden: float = constant(0.5, "1", "of key/value exchange that compute hides")
    ep_hidden: float = constant(0.0, "1", "of the exchange of rows between experts inside an island that compute hides")
    ep_hidden_across: float = constant(0.0, "1", "of such an exchange that leaves the island")
    island_slowdown: float = constant(1.0, "1", "collectives in a run over those of a benchmark, inside an island")
    network_slowdown: float = constant(1.0, "1", "the same across the network")
    pressure_slowdown: float = constant(1.0, "1", "step that fills over 90% of the device over one that does not")

    # memory conventions
    gradient_bytes: float = constant(4.0, "B/parameter", "buffer that gradients accumulate in")
    master_bytes: float = constant(4.0, "B/parameter", "fp32 copy of the weights")
    weight_bytes: float = constant(2.0, "B/parameter", "weights that compute reads, or fp32 ones gathered in 16 bits")
    moment_bytes: float = constant(8.0, "B/parameter", "both Adam moments")
    gradient_communication_bytes: float = constant(4.0, "B/parameter", "in the reduction over data parallel ranks")
    pipeline_keeps: bool = constant(False, "", "pipelines keep weights gathered and reduce gradients once a step")
    fused_accumulation: bool = constant(False, "", "the product of a weight gradient adds it to its buffer")
    half_gradient_bytes: float = constant(0.0, "B/parameter", "16-bit gradients that stay beside it")
    entrance_bytes: float = constant(0.0, "B/element", "first stage, per token and hidden element, not divided by tp")
    run_ahead_bytes: float = constant(0.0, "B/element", "output layer's stage: what queued collectives hold")
    reporting_stage: str = constant("highest", "", "stage whose peak its log gives: the first, or the highest")
    partition: str = constant("equal", "", "layers per stage: equal, or cost where the output layer counts as layers")
    backward_ffn_tensors: float = constant(0.0, "1", "of the ffn, in its backward pass beside those kept")
    activation_slack: float = constant(1.0, "1", "activation bytes that the allocator needs over those of the tensors")
    selective_kept_share: float = constant(0.0, "1", "of a block's activations that selective recomputation keeps")
    logit_bytes: float = constant(10.0, "B/logit", "at the loss: 16-bit logits, fp32 copy, softmax, gradients")
    context_bytes: float = constant(0.0, "B", "workspaces that the allocator sees")
    default_precision: str = constant("bf16", "", "assumed where a run does not say")
    default_attention: str = constant("flash", "", "flash or standard, assumed where a run does not say")
    default_zero: int = constant(0, "", "assumed where a run does not say")
    default_sp: bool = constant(False, "", "assumed where a run does not say")
    default_recompute: str = constant("none", "", "assumed where a run does not say")
    interleaves: bool = constant(False, "", "pipelines with a bubble over a tenth, where a run does not say")
    tp_overlap: float = constant(0.0, "1", "of them, hidden by an option that runs do not tell of (NeMo)")
    recomputes_selectively: bool = constant(False, "", "where a run does not say and would not fit without")
    recomputes_by_block: bool = constant(False, "", "no more blocks than must be, where a run does not say")

    cp_kinds: tuple[str, ...] = constant(("ring",), "", "ways of context parallel attention, its default first")
    default_etp: int = constant(0, "", "ranks that split an expert, where a run does not say; 0: tp")
    default_imbalance: float = constant(0.0, "1", "load of the busiest ep rank over the mean; 0: as in training")
    low_precision: str = constant("", "", "library of 8- and 4-bit linear layers; none: they keep what bf16 does")
    narrow_blocks: str = constant("", "", "blocks that compute in 8 and 4 bits, by its recipes; none: all, assumed")
    narrow_parameters: bool = constant(False, "", "weights of blocks stored so (fp8-param-gather)")

    element_bytes: float = 2.0  # of activations and of gathered weights
    end_moment_bytes: float | None = None  # of embedding and output layer, where the optimizer treats them differently

    @property
    def gathered_bytes(self) -> float:
        """Bytes per gathered weight."""
        return 4.0 if self.autocast else self.element_bytes

    @property
    def repeats_attention_alone(self) -> bool:
        """Whether selective recomputation repeats attention alone, as in Megatron; else cheap operations and others."""
        return self.fused and self.selective_matmul_share == 0

    @property
    def selective_shares(self) -> tuple[float, float]:
        """Shares of a block's matmuls and of its attention that selective recomputation repeats."""
        alone = self.repeats_attention_alone
        return (0.0, 1.0) if alone else (self.selective_matmul_share, self.selective_attention_share)

    def reduces_in_pieces(self, zero: Size, pp: Size) -> Size:
        """Returns whether gradients are reduced with every micro-batch, not once a step."""
        return (zero >= 2) & ((pp == 1) | (not self.pipeline_keeps))

    def repeats_up_projections(self, model: ModelConfig) -> bool:
        """Returns whether selective recomputation repeats latent attention's up-projections, not attention."""
        return self.selective_widens and model.latent is not None

    def computing_in(self, precision: str, generation: str = "") -> TrainingEngine:
        """Returns the conventions of a run in this precision: fp32 and tf32 keep one 4-byte copy of each tensor."""
        if number_format(precision).narrow:
            held = storage_by(self.low_precision, precision, generation, self.narrow_parameters)
            recipe = self.recipe(precision)
            if recipe is not None:  # our trainer's program keeps the same tensors as in 16 bits
                held = LinearStorage(description="planned with the memory of bf16, an upper bound")
            casts = casts_by(self.low_precision, precision, generation)
            return replace(self, storage=held, casts=casts, tile=recipe.tile if recipe else 1)
        if precision not in ("fp32", "tf32"):
            return self
        return replace(
            self, weight_bytes=4.0, master_bytes=0.0, gradient_bytes=4.0, half_gradient_bytes=0.0,
            gradient_communication_bytes=4.0, element_bytes=4.0,
            storage=LinearStorage(4.0, gather_bytes=4.0),
        )  # fmt: skip

    def recipe(self, precision: str) -> PrecisionRecipe | None:
        """Returns our own trainer's recipe: which linear layers use this precision, and how; None if all do."""
        return None if self.fused else precision_recipe(precision)

    def on(self, generation: str) -> TrainingEngine:
        """Returns the constants on one accelerator generation."""
        values: dict[str, Any] = dict(self.by_generation.get(generation, {}))
        return replace(self, **values)


MEANING = {f.name: (f.metadata["unit"], f.metadata["meaning"]) for f in fields(TrainingEngine) if f.metadata} | {
    "rows_sent": ("", "a token to its experts: once per choice, or once per rank (island) that holds some of them"),
    "keeps_expert_outputs": ("", "rows that experts give, for the gradient of the weights they are added with"),
    "unrotated_kept": ("1", "of queries and keys before their rotation, kept beside the rotated ones"),
    "activation_saves": ("1", "element-wise intermediates kept in the feed-forward network: 1 fused, 2 eager"),
    "gathered_inputs": ("1", "of norm outputs kept after gathering over tp"),
    "dropout_mask_bytes": ("B/element", "of what a branch adds to the stream, kept by its dropout"),
    "tile": ("", "what inputs and outputs of a layer are multiples of; others are not quantised"),
    "narrows_own_tokens": ("", "latent attention under sequence parallelism gathers narrow vectors, not the stream"),
}
"""Unit and meaning of every constant, including those of `Conventions`."""
