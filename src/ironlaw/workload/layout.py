"""A layout: how one training job is spread over accelerators.

    layout = parse_layout("dp=8 zero=3 micro_batch=2 recompute=selective")
    layout.check(model, accelerators=8, sequence=8192, global_batch=64)

Keys: dp data parallel replicas; zero the state they shard (arXiv 1910.02054: 1 optimizer state, 2 also gradients, 3
also weights); tp tensor parallel (arXiv 1909.08053); sp sequence parallelism on the same ranks (arXiv 2205.05198); pp
pipeline stages with `virtual_stages` model chunks each (arXiv 2104.04473); cp context parallel, by method `cp_kind`
(`context_parallel.py`); ep expert parallel: ranks that divide the experts of each layer, each expert split over tp like
a dense network (arXiv 2006.16668, section 3.3), or over `etp` ranks with folded experts: placed over the dp x cp x tp
ranks independently of the dense layers, in ep groups of etp (arXiv 2504.14960). One copy is sharded over `shard`
replicas, and the other replicas repeat it: hybrid sharding (arXiv 2304.11277, section 3.2.2). `schedule` orders the
passes of a pipeline: 1f1b, gpipe (arXiv 1811.06965: all forward, then all backward), zb and zbv (ZB-H1 and ZB-V, arXiv
2401.10241: weight gradients fill the bubble; in a V every rank holds one chunk from each end), dualpipe (the V form of
arXiv 2412.19437: both ends at once).
"""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from typing import Any, Literal, get_args

from ironlaw.errors import UserError, parse_words
from ironlaw.model.config import ModelConfig
from ironlaw.workload.schedule import V_SHAPED, fewer_layers_at_ends, reason_unfilled
from ironlaw.workload.sections import NO_RECOMPUTATION, Recompute

OFFLOAD = ("none", "optimizer", "activations", "both")
CP_KINDS = ("ring", "all_gather", "all_to_all")
Schedule = Literal["1f1b", "gpipe", "zb", "zbv", "dualpipe"]
SCHEDULES = get_args(Schedule)
_WORDS = {"offload": OFFLOAD, "cp_kind": CP_KINDS, "schedule": SCHEDULES}
_SYNONYMS = {
    "p2p": "ring", "allgather": "all_gather", "all-gather": "all_gather", "zb-h1": "zb", "zbh1": "zb", "zb1p": "zb",
    "zb-v": "zbv", "dualpipev": "dualpipe", "afab": "gpipe",
} | dict.fromkeys(("a2a", "alltoall", "all-to-all", "ulysses"), "all_to_all")  # fmt: skip
"""Synonyms of these values."""
_FLAGS = {"1": True, "true": True, "yes": True, "on": True, "0": False, "false": False, "no": False, "off": False}


MAX_DEGREE = 2**20
"""Upper limit of every number in a layout, beyond any real cluster."""

SPLIT_BACKWARD = ("zb", *V_SHAPED)  # input and weight gradients are separate passes


def reason_indivisible(model: ModelConfig, tp: int, cp: int, ep: int) -> str | None:
    """Return why Ironlaw's trainer cannot divide a model's attention or experts over ranks, or None."""
    if tp > 1 and model.qk_norm_whole:
        return "this trainer does not divide a norm over all heads (qk_norm_whole): use tp = 1"
    if tp * ep > 1 and model.moe is not None and model.moe.bias:
        return "this trainer divides no experts that have biases: use tp = 1 and ep = 1"
    if tp * cp > 1 and (model.composes_scores or model.positions == "alibi"):
        return "this trainer divides no attention with attention_cap, attention_sinks or alibi: use tp = 1 and cp = 1"
    return None


@dataclass(frozen=True)
class Layout:
    """Degrees of parallelism and related choices. The product dp tp pp cp is the number of accelerators."""

    dp: int = 1
    zero: int = 0
    shard: int | None = None  # replicas over which ZeRO shards one copy; all when absent
    tp: int = 1
    sp: bool = False
    pp: int = 1
    virtual_stages: int = 1
    schedule: str = "1f1b"
    cp: int = 1
    cp_kind: str | None = None  # exchange of keys: ring, all_gather, all_to_all; the engine's default when absent
    ep: int = 1
    etp: int | None = None  # ranks over which an expert is split; tp when absent
    micro_batch: int = 1  # sequences per forward pass of a replica
    accumulation: int | None = None  # micro-batches per replica and step; follows from the global batch when absent
    recompute: Recompute = NO_RECOMPUTATION  # none, selective, full, every:K (each k-th block in full), budget:SIZE
    offload: str = "none"  # to host memory: the optimizer's state and update, saved activations, or both

    def __post_init__(self) -> None:
        if isinstance(self.recompute, str):  # as in JSON and on the command line
            object.__setattr__(self, "recompute", Recompute.parse(self.recompute))

    @property
    def expert_tp(self) -> int:
        """Ranks over which an expert is split."""
        return self.tp if self.etp is None else self.etp

    @property
    def sharing(self) -> int:
        """Ranks that share one copy of the state sharded by ZeRO; 1 without ZeRO."""
        return (self.shard or self.dp) * self.cp if self.zero else 1

    @property
    def accelerators(self) -> int:
        return self.dp * self.tp * self.pp * self.cp

    def global_batch(self) -> int | None:
        """Return the sequences per step, or None without `accumulation`."""
        return None if self.accumulation is None else self.dp * self.micro_batch * self.accumulation

    def filled(self, global_batch: int) -> Layout:
        """Return the layout with `accumulation` set by the global batch (sequences)."""
        return replace(self, accumulation=global_batch // (self.dp * self.micro_batch))

    def __str__(self) -> str:
        shown = {k: v for k, v in vars(self).items() if v != getattr(Layout, k) or k == "dp"}
        return " ".join(f"{k}={int(v) if isinstance(v, bool) else v}" for k, v in shown.items())

    def to_json(self) -> dict[str, Any]:
        """Return a dictionary for which `Layout(**layout.to_json())` equals this layout."""
        return vars(self) | {"recompute": str(self.recompute)}

    def reason_invalid(
        self, model: ModelConfig, *, sequence: int, global_batch: int, accelerators: int | None = None
    ) -> str | None:
        """Return why no engine can run this layout, in one sentence, or None."""
        if accelerators is not None and self.accelerators != accelerators:
            product = f"dp {self.dp} x tp {self.tp} x pp {self.pp} x cp {self.cp} = {self.accelerators}"
            return f"{product} accelerators, the cluster has {accelerators}"
        if model.heads % self.tp:
            return f"{model.heads} heads are not divisible by tp = {self.tp}"
        if model.key_value_heads % self.tp and self.tp % model.key_value_heads:
            return f"{model.key_value_heads} key/value heads cannot be split or copied over tp = {self.tp}"
        if model.ffn_size % self.tp:
            return f"the feed-forward width {model.ffn_size} is not divisible by tp = {self.tp}"
        if self.sp and self.tp == 1:
            return "sequence parallelism needs tp > 1"
        if sequence % (self.cp * (self.tp if self.sp else 1)):
            return f"{sequence} tokens are not divisible by cp = {self.cp}" + (f" x tp = {self.tp}" if self.sp else "")
        return (
            self.reason_context(model, sequence)
            or self._reason_experts(model)
            or self._reason_pipeline(model.layers)
            or self.reason_sharding()
            or self._reason_batch(global_batch)
        )

    def reason_context(self, model: ModelConfig, sequence: int) -> str | None:
        """Return why context parallel ranks cannot exchange keys by the method `cp_kind`, or None."""
        kind, ranks = self.cp_kind, self.cp * self.tp
        if kind is not None and self.cp == 1:
            return f"cp_kind={kind} needs cp > 1"
        if kind == "all_to_all" and (model.heads % ranks or model.key_value_heads % ranks):
            heads = f"{model.heads} heads, {model.key_value_heads} of keys and values,"
            return f"{heads} are not divisible by cp x tp = {ranks}, which cp_kind=all_to_all needs"
        windowed = model.sliding_window is not None and model.sliding_window < sequence
        if kind == "ring" and windowed:
            return "cp_kind=ring has no sliding window: use cp_kind=all_gather or all_to_all"
        return None

    def _reason_pipeline(self, layers: int) -> str | None:
        if self.pp == 1 and (self.virtual_stages > 1 or self.schedule != "1f1b"):
            return f"{'virtual_stages' if self.virtual_stages > 1 else f'schedule={self.schedule}'} needs pp > 1"
        if self.schedule in V_SHAPED and self.virtual_stages != 2:
            return f"schedule={self.schedule} holds two chunks per rank: use virtual_stages=2"
        if self.schedule == "gpipe" and self.virtual_stages > 1:
            return "schedule=gpipe has one chunk per rank: use virtual_stages=1"
        if self.virtual_stages == 1 and self.pp > layers:
            return f"{layers} layers are fewer than pp {self.pp}"
        chunks = self.pp * self.virtual_stages
        if self.virtual_stages > 1 and chunks > layers and fewer_layers_at_ends(layers, chunks) is None:
            return f"{layers} layers are fewer than pp {self.pp} x virtual_stages {self.virtual_stages}"
        return None

    def _reason_experts(self, model: ModelConfig) -> str | None:
        if model.moe is None:
            dense = "expert parallelism needs a mixture of experts, and this model is dense"
            return dense if self.ep > 1 or self.etp is not None else None
        split, folded = self.expert_tp, self.expert_tp != self.tp
        if model.expert_ffn_size % split:
            word = "etp" if self.etp is not None else "tp"
            return f"the width of an expert, {model.expert_ffn_size}, is not divisible by {word} = {split}"
        if model.shared_ffn_size % self.tp:
            return f"the width of the shared experts, {model.shared_ffn_size}, is not divisible by tp = {self.tp}"
        if model.moe.experts % self.ep:
            return f"{model.moe.experts} experts are not divisible by ep = {self.ep}"
        if self.tp % split:
            return f"etp = {split} does not divide tp = {self.tp}"
        if folded and not self.sp:
            return f"etp = {split} under tp = {self.tp} needs tokens divided over tp: use sp=1"
        group = self.dp if self.shard is None else self.shard  # every copy of the state has all experts
        if group * self.cp * self.tp // split % self.ep:
            word = "dp" if self.shard is None else "shard"
            taken = f"{word} {group} x cp {self.cp}" + (f" x tp {self.tp} / etp {split}" if folded else "")
            return f"ep = {self.ep} ranks cannot be taken from {taken}"
        return None

    def reason_sharding(self) -> str | None:
        """Return why ZeRO cannot shard over `shard` replicas, or None."""
        if self.shard is not None and self.zero == 0:
            return "shard says how far ZeRO shards: it needs zero=1, 2 or 3"
        if self.shard is not None and self.dp % self.shard:
            return f"dp {self.dp} replicas cannot be grouped by shard = {self.shard}"
        return None

    def _reason_batch(self, global_batch: int) -> str | None:
        per_round = self.dp * self.micro_batch
        if global_batch % per_round:
            return f"global batch {global_batch} is not divisible by dp {self.dp} x micro_batch {self.micro_batch}"
        if self.accumulation is not None and per_round * self.accumulation != global_batch:
            batch = self.global_batch()
            return f"dp x micro_batch x accumulation is {batch} sequences, the global batch is {global_batch}"
        return reason_unfilled(self.schedule, self.pp, self.virtual_stages, global_batch // per_round)

    def check(self, model: ModelConfig, *, sequence: int, global_batch: int, accelerators: int | None = None) -> None:
        """Raise UserError if the layout cannot run."""
        reason = self.reason_invalid(model, sequence=sequence, global_batch=global_batch, accelerators=accelerators)
        if reason:
            raise UserError(f"layout '{self}' cannot run: {reason}")


def parse_layout(text: str) -> Layout:
    """Parse `key=value` pairs separated by spaces or commas. Unknown keys and invalid values raise UserError."""
    words = parse_words(text, "layout", [f.name for f in fields(Layout)], "dp=8 micro_batch=2")
    values = {key: _value(key, value) for key, value in words.items()}
    if values.get("schedule") in V_SHAPED:
        values.setdefault("virtual_stages", 2)
    if not 0 <= values.get("zero", 0) <= 3:
        raise UserError(f"layout: zero is 0, 1, 2 or 3, not {values['zero']}")
    return Layout(**values)


def _value(key: str, text: str) -> Any:
    if key == "recompute":
        return text.lower()
    if key == "schedule" and text.lower() == "interleaved":
        raise UserError("layout: write an interleaved schedule as virtual_stages=2 or more, with schedule=1f1b or zb")
    if key in _WORDS:
        chosen = _SYNONYMS.get(text.lower(), text.lower())
        if chosen not in _WORDS[key]:
            raise UserError(f"layout: {key} is {', '.join(_WORDS[key])}, not '{text.lower()}'")
        return chosen
    if key == "sp":
        if text.lower() not in _FLAGS:
            raise UserError(f"layout: sp is 0 or 1, not '{text}'")
        return _FLAGS[text.lower()]
    try:
        number = int(text)
    except ValueError:
        raise UserError(f"layout: {key} must be a whole number, not '{text}'") from None
    if number > MAX_DEGREE:
        raise UserError(f"layout: {key} is at most {MAX_DEGREE:,}")
    if number < (0 if key == "zero" else 1):
        raise UserError(f"layout: {key} must be at least {0 if key == 'zero' else 1}, not {number}")
    return number
