"""What to change in a loop that is the user's own: code, not config. Gains come from the plans of the module as it
could be run, from what was measured, or from a small experiment at the end of the run; `basis` says which.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass

from ironlaw.explain.gap import Gap, recomputed_seconds, reconcile
from ironlaw.explain.remedies import LEAST_GAIN, Effect, Remedy
from ironlaw.ledger import Kind, Ledger, Phase
from ironlaw.machine.profile import Profile

AS_IT_IS = "as it is"  # the variant that the others are compared with
FULL_MEMORY = 0.85
LEAST_PLANNED = 0.10
FEWER = 10  # times, evaluations and checkpoints


@dataclass(frozen=True)
class ObservedPlans:
    """What a remedy may look at. `variants`: name -> plan of one micro-batch step run that way, on the same machine."""

    plan: Ledger
    run: Ledger
    gap: Gap
    profile: Profile | None
    variants: Mapping[str, Ledger]

    @property
    def step(self) -> float:
        return self.gap.step.measured or 0.0

    @property
    def steps(self) -> int:
        return int(self.run.facts.get("steps_done") or 1)

    def ratio(self, variant: str) -> float | None:
        """Planned step of a variant over that of the run as it was."""
        one, other = self.variants.get(AS_IT_IS, self.plan), self.variants.get(variant)
        if other is None or "step_seconds" not in one.totals:
            return None
        return other.totals["step_seconds"].value / one.totals["step_seconds"].value

    def saved(self, variant: str) -> float | None:
        """Seconds per step: its part of what is planned, which a fault beside it does not make larger."""
        ratio = self.ratio(variant)
        if ratio is None:
            return None
        busy = sum(self.phase(p) for p in (Phase.FORWARD, Phase.BACKWARD, Phase.OPTIMIZER))
        planned = self.variants.get(AS_IT_IS, self.plan).totals["step_seconds"].value
        return (1 - ratio) * min(busy, planned / (self.run.facts.get("machine_speed") or 1.0))

    def phase(self, phase: Phase) -> float:
        return next((row.measured or 0.0 for row in self.gap.phases if row.name == str(phase)), 0.0)


def _remedy(
    now: ObservedPlans, name: str, title: str, effect: Effect, risk: str, when: str, how: str, saved: float, basis: str,
    bytes_saved: float = 0.0,
) -> Remedy | None:  # fmt: skip
    """`saved`: seconds per step. What only a plan says must be more than the plan's own error."""
    least = LEAST_PLANNED if basis.startswith("planned") else LEAST_GAIN
    if not now.step or saved / now.step < least:
        return None
    return Remedy(
        name, title, effect, risk, when, {}, saved / now.step, saved * now.steps, saved, bytes_saved, basis, how
    )


def _data(now: ObservedPlans) -> Remedy | None:
    stage = now.run.facts.get("data_stage")
    titles = {
        "workers": ("Use more DataLoader workers", "DataLoader(..., num_workers=4, persistent_workers=True)"),
        "tokenise": ("Tokenise once, before training", "write token ids to a file once, and memory-map it"),
        "rebuilt": ("Keep the DataLoader's iterator", "for batch in loader: over many batches, with "
                    "persistent_workers=True where an epoch is short"),
        "read": ("Read ahead, or from faster storage", "DataLoader(..., num_workers=2, prefetch_factor=4), or a copy "
                 "of the data on a local disk or in memory"),
    }  # fmt: skip
    title, how = titles.get(str(stage), ("Prepare batches while the step runs", "DataLoader(..., num_workers=2)"))
    return _remedy(
        now, "data", title, Effect.NONE, "none for the model; workers take memory and cores", "the step waits for data",
        how, now.phase(Phase.DATA), "measured wait for data",
    )  # fmt: skip


def _threads(now: ObservedPlans) -> Remedy | None:
    gains = now.run.facts.get("thread_gain")
    if gains is None:
        return None
    run, _ = reconcile(now.run)
    saved = sum(
        (x.seconds or 0.0) * gains["matmul" if x.kind in (Kind.MATMUL, Kind.ATTENTION) else "elementwise"]
        for x in run.lines
        if x.kind is not Kind.HOST
    )
    return _remedy(
        now, "threads", "As many threads as cores", Effect.NONE, "none", "threads are not as many as cores",
        f"torch.set_num_threads({now.run.facts.get('cores')})", saved,
        "kernels timed both ways at the end of the run",
    )  # fmt: skip


def _busy(now: ObservedPlans) -> float:
    return now.phase(Phase.FORWARD) + now.phase(Phase.BACKWARD)


def _left_on(now: ObservedPlans) -> Remedy | None:
    found = now.run.facts.get("left_on") or []
    if not found:
        return None
    worst = max(found, key=lambda mode: mode["saved"])
    where = f" ({worst['place']})" if worst["place"] else ""
    return _remedy(
        now, "mode", f"{worst['name']}: switch it back", Effect.NONE, "none for training", "a switch of PyTorch is on",
        f"{worst['remedy']}{where}", worst["saved"] * _busy(now), "kernels timed both ways at the end of the run",
    )  # fmt: skip


def _float64(now: ObservedPlans) -> Remedy | None:
    found = now.run.facts.get("float64")
    if not found:
        return None
    return _remedy(
        now, "float64", "Train in fp32", Effect.ROUNDING, "rounding differs: compare the loss of the first steps",
        "weights are float64", f"model.float(), and inputs in torch.float32 ({found['place'] or 'where it is built'})",
        found["saved"] * _busy(now), "both types timed at the end of the run",
    )  # fmt: skip


def _fused_update(now: ObservedPlans) -> Remedy | None:
    found = now.run.facts.get("fused_update")
    if not found:
        return None
    return _remedy(
        now, "fused_update", "Fuse the update", Effect.ROUNDING, "rounding differs in the last bits",
        "the optimizer updates tensor by tensor, or in several passes", f"{found['name']}(..., fused=True)",
        now.phase(Phase.OPTIMIZER) * (1 - found["fused_seconds"] / found["seconds"]),
        "both ways timed at the end of the run",
    )  # fmt: skip


def _native(now: ObservedPlans) -> Remedy | None:
    """PyTorch's fused attention against our own, both timed at the shapes of the run."""
    found = now.run.facts.get("fused_calls_seconds")
    if not found or now.run.facts.get("device") != "cpu":
        return None
    spent = sum(x.seconds or 0.0 for x in reconcile(now.run)[0].lines if x.kind is Kind.ATTENTION)
    return _remedy(
        now, "native", "Ironlaw's attention kernel", Effect.ROUNDING, "sums are taken in another order",
        "PyTorch's fused attention is slow on this processor at these shapes",
        "from ironlaw.kernels.attention import causal_attention; causal_attention(q, k, v) in place of "
        "scaled_dot_product_attention(q, k, v, is_causal=True)",
        spent * (1 - found["native"] / found["fused"]), "both kernels timed at the end of the run",
    )  # fmt: skip


def _precision(now: ObservedPlans) -> Remedy | None:
    saved = now.saved("bf16")
    if saved is None:
        return None
    return _remedy(
        now, "precision", "Train in bf16", Effect.ROUNDING, "rounding differs: compare the loss of the first steps",
        "the run is in fp32, and this machine multiplies bf16 faster",
        f'with torch.autocast("{now.run.facts.get("device")}", dtype=torch.bfloat16): around the forward pass',
        saved, "planned: both precisions on this machine's curves",
    )  # fmt: skip


def _batch(now: ObservedPlans) -> Remedy | None:
    """Merge the micro-batches of a step, or with one of them take larger steps: the gain is for the same samples."""
    saved = now.saved("larger_batch")
    if saved is None:
        return None
    accumulation = int(now.run.facts.get("accumulation") or 1)
    merged = accumulation > 1
    return _remedy(
        now, "batch", "Larger micro-batches" if merged else "Larger batches, fewer steps",
        Effect.NONE if merged else Effect.TRAINING,
        "takes more memory" if merged else "fewer updates for the same samples: retune the learning rate",
        "one forward pass is too little work for what calling it costs",
        f"a micro-batch of {(accumulation if merged else 8) * int(now.run.facts.get('batch') or 1)}",
        saved,
        "planned: the larger micro-batch on this machine's curves, for the same samples",
    )  # fmt: skip


def _attention(now: ObservedPlans) -> Remedy | None:
    """Scores that are written out: their products, softmax and masks against the fused kernel of the same shape."""
    found = unfused_attention(now)
    if found is None:
        return None
    spent, fused, pairs_bytes = found
    return _remedy(
        now, "attention", "Fuse attention", Effect.ROUNDING, "rounding differs in the last bits",
        "attention writes its scores to memory", "torch.nn.functional.scaled_dot_product_attention(q, k, v, "
        "is_causal=True)", spent - fused, "measured, against the fused kernel timed at the end of the run", pairs_bytes,
    )  # fmt: skip


def unfused_attention(now: ObservedPlans) -> tuple[float, float, float] | None:
    """(seconds spent, seconds the fused kernel takes, bytes of scores) per step; None without a softmax of scores."""
    run, _ = reconcile(now.run)
    roots = {line.operation.rpartition(".")[0] for line in run.lines if line.operation.endswith(".softmax")}
    roots = {root for root in roots if any(_under(line.operation, root, "bmm") for line in run.lines)}
    timed = now.run.facts.get("attention_seconds")  # at the end of the run: the machine as it was then
    if not roots or (now.profile is None and timed is None):
        return None
    spent = sum(  # everything that the module does itself, between its linear layers: products, masks, scales, casts
        line.seconds or 0.0
        for line in run.lines
        if line.phase in (Phase.FORWARD, Phase.BACKWARD)
        and line.operation.rpartition(".")[0] in roots
        and line.operation.rpartition(".")[2] not in STAYS
    )
    products = [op for op in now.run.facts.get("score_products", []) if op]
    if not products:
        return None
    fused = scores = 0.0
    for batch, tokens, size in products:
        pairs = batch * tokens * tokens / 2
        scores += 4 * batch * tokens * tokens
        if timed is not None or now.profile is None:
            continue
        for direction in ("forward", "backward"):
            precision = "bf16" if now.run.facts.get("precision") == "bf16" else "fp32"
            fused += pairs * now.profile.attention_seconds_per_pair(precision, direction, tokens, size)
    again = int(now.run.facts.get("accumulation") or 1)
    return spent, (fused if timed is None else timed["fused"]) * again, scores


# What cuts queries, keys and values out of one product, and puts heads together again: the fused kernel needs it too.
STAYS = ("cat", "clone", "contiguous", "split", "chunk", "stack")


def _under(operation: str, root: str, *names: str) -> bool:
    path, _, last = operation.rpartition(".")
    return path == root and last in names


def _alignment(now: ObservedPlans) -> Remedy | None:
    saved, found = 0.0, now.run.facts.get("misaligned") or []
    run, _ = reconcile(now.run)
    for entry in found:
        line = entry["module"]
        spent = sum(x.seconds or 0.0 for x in run.lines if x.operation == line and x.kind is Kind.MATMUL)
        saved += spent * (1 - entry["aligned_seconds"] / entry["seconds"])
    shapes = ", ".join(f"{e['shape'][0]} to {e['aligned'][0]}" for e in found)
    return _remedy(
        now, "alignment", "Pad odd sizes to a multiple of 64", Effect.MODEL, "unused rows of the vocabulary, or a "
        "slightly larger model", "a large matrix has a size that tiles do not divide", f"sizes: {shapes}", saved,
        "both products timed at the end of the run",
    )  # fmt: skip


def _recompute(now: ObservedPlans) -> Remedy | None:
    needed = now.run.totals.get("resident_bytes")
    have, kept = now.run.facts.get("memory_bytes"), now.plan.memory_bytes().get("activations") or 0.0
    if needed is None or not have or needed.value + kept > FULL_MEMORY * have:
        return None
    return _remedy(
        now, "recompute", "Keep activations instead of recomputing them", Effect.NONE, "takes more memory",
        "memory has room for the activations", "drop torch.utils.checkpoint, or gradient_checkpointing_disable()",
        recomputed_seconds(now.run), "measured forward operations within the backward pass", -kept,
    )  # fmt: skip


def _between(name: str, title: str, risk: str, how: str) -> Callable[[ObservedPlans], Remedy | None]:
    def propose(now: ObservedPlans) -> Remedy | None:
        wall = (now.run.facts.get("wall_seconds") or {}).get(name) or 0.0
        saved = wall * (1 - 1 / FEWER) / now.steps
        if not now.step or wall / now.steps < 0.05 * now.step:
            return None
        return _remedy(
            now, name, title, Effect.NONE, risk, f"it takes over 5% of the training time ({name})", how, saved,
            "measured seconds of this run",
        )  # fmt: skip

    return propose


def _syncs(now: ObservedPlans) -> Remedy | None:
    extra = (now.run.facts.get("gradient_syncs_per_step") or 0.0) - 1
    waiting = now.phase(Phase.COMMUNICATION)
    if extra <= 0.5:
        return None
    return _remedy(
        now, "no_sync", "Synchronise gradients once per step", Effect.NONE, "none", "gradients accumulate",
        "with model.no_sync(): around all micro-batches but the last", waiting * extra / (extra + 1),
        "measured waits for the exchange of gradients",
    )  # fmt: skip


def _straggler(now: ObservedPlans) -> Remedy | None:
    ranks = sorted(now.run.facts.get("rank_removable_seconds") or [])
    if len(ranks) < 2:
        return None
    return _remedy(
        now, "straggler", "Find out what slows one rank", Effect.NONE, "none", "one rank works longer than the others",
        f"look at rank {now.run.facts.get('slowest_rank')}: its machine, its storage, its share of the batch",
        ranks[-1] - ranks[(len(ranks) - 1) // 2], "measured on every rank",
    )  # fmt: skip


REMEDIES: tuple[Callable[[ObservedPlans], Remedy | None], ...] = (
    _data, _straggler, _threads, _left_on, _float64, _precision, _batch, _attention, _native, _fused_update,
    _alignment, _recompute, _syncs,
    _between("evaluation", "Evaluate a tenth as often", "the curve has fewer points", "evaluate every N steps"),
    _between("checkpoint", "Save a tenth as often", "an interruption loses more steps", "save every N steps"),
)  # fmt: skip


def find_observed_remedies(
    now: ObservedPlans, kinds: Iterable[Callable[[ObservedPlans], Remedy | None]] = REMEDIES
) -> list[Remedy]:
    """What pays, ranked: what leaves the training as it is before what changes it, each by gain."""
    found = [remedy for kind in kinds if (remedy := kind(now)) is not None]
    return sorted(found, key=lambda r: (r.effect >= Effect.TRAINING, -r.gain))
