"""Remedies for a user's own loop: changes of code, not of a config. Gains come from plans of the module, from what was
measured, or from a small experiment at the end of the run; `basis` says which. Their words are in
observed_remedies.toml.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

from ironlaw.explain.diagnose import Finding
from ironlaw.explain.evidence import RunEvidence
from ironlaw.explain.gap import reconcile
from ironlaw.explain.measures_of_code import PASSES, recomputed_share
from ironlaw.explain.measures_of_devices import useless_exchanges
from ironlaw.explain.remedy import CHECKPOINT_SHARE, EVALUATION_SHARE, Effect, Proposal, Remedy, RemedyKind
from ironlaw.explain.rule import Tier
from ironlaw.explain.waterfall import PRODUCTS
from ironlaw.files import read_toml
from ironlaw.ledger import Kind, Ledger, Line, Phase
from ironlaw.observe.observed_run import larger_by

TIMES_FEWER = 10  # times, evaluations and checkpoints
BOTH_WAYS, MEASURED = "timed both ways at the end of the run", "measured seconds of this run"


@dataclass(frozen=True)
class ObservedPlans(RunEvidence):
    """What a remedy may look at. `batches`: plans of a step on the same machine, as it is and with larger micro-batches
    for the same samples."""

    batches: tuple[Ledger, Ledger] | None = None

    @cached_property
    def timed(self) -> list[Line]:
        """The run's lines, so that each phase sums to its measured seconds."""
        return reconcile(self.run)[0].lines

    def saved_by_batch(self) -> float | None:
        """Seconds per step: its part of what is planned, which a fault beside it does not make larger; without a plan
        of what was timed at the end, and of updates that there are fewer of."""
        tried, times = self.fact("larger_batch"), larger_by(self.run.facts)
        if self.batches is None:
            fewer = 0.0 if self.fact("accumulation") == times else 1 - 1 / times
            passes, updates = self.phase(*PASSES), self.phase(Phase.OPTIMIZER)
            return None if tried is None else tried * passes + fewer * updates
        planned, otherwise = (plan.totals["step_seconds"].value for plan in self.batches)
        busy = self.phase(*PASSES, Phase.OPTIMIZER)
        without_delays = 1 - min(0.95, float(self.fact("delayed_seconds") or 0.0) / (self.step or 1.0))
        return (1 - otherwise / planned) * min(busy, planned / (self.fact("machine_speed") or without_delays))

    def phase(self, *phases: Phase) -> float:
        """Measured seconds of these phases."""
        return sum(row.measured or 0.0 for row in self.gap.phases if row.name in map(str, phases))


def _saved(now: ObservedPlans, how: str, saved: float, basis: str, bytes_saved: float = 0.0) -> list[Proposal]:
    """`saved`: seconds per step."""
    if not now.step:
        return []
    gain, total = saved / now.step, saved * (now.steps or 1)
    return [Proposal({}, gain, total, saved, bytes_saved, basis, how)]


DATA = {
    "workers": ("Use more DataLoader workers", "DataLoader(..., num_workers=4, persistent_workers=True)"),
    "tokenise": ("Tokenise once, before training", "write token ids to a file once, and memory-map it"),
    "rebuilt": ("Keep the DataLoader's iterator",
                "for batch in loader: over many batches, with persistent_workers=True where an epoch is short"),
    "read": ("Read ahead, or from faster storage",
             "DataLoader(..., num_workers=2, prefetch_factor=4), or a copy of the data on a local disk or in memory"),
}  # fmt: skip


def _data(now: ObservedPlans) -> list[Proposal]:
    title, how = DATA.get(str(now.fact("data_stage")), ("", "DataLoader(..., num_workers=2)"))
    return [replace(p, title=title) for p in _saved(now, how, now.phase(Phase.DATA), "measured wait for data")]


def _straggler(now: ObservedPlans) -> list[Proposal]:
    ranks = sorted(now.fact("rank_removable_seconds") or [])
    if len(ranks) < 2:
        return []
    how = f"look at rank {now.fact('slowest_rank')}: its machine, its storage, its share of the batch"
    return _saved(now, how, ranks[-1] - ranks[(len(ranks) - 1) // 2], "measured on every rank")


def _threads(now: ObservedPlans) -> list[Proposal]:
    gains, ranks = now.fact("thread_gain"), len(now.fact("rank_own_seconds") or [0])
    threads, cores = now.fact("threads"), now.fact("cores")
    # Ranks share the cores; what was timed at the end of one had those of the others, too.
    if None in (gains, threads, cores) or threads < cores <= threads * ranks:
        return []
    saved = sum(
        (x.seconds or 0.0) * gains["matmul" if x.kind in PRODUCTS else "elementwise"]
        for x in now.timed
        if x.kind is not Kind.HOST
    )
    return _saved(now, f"torch.set_num_threads({cores})", saved, f"kernels {BOTH_WAYS}")


def _left_on(now: ObservedPlans) -> list[Proposal]:
    found = now.fact("left_on") or []
    if not found:
        return []
    worst = max(found, key=lambda mode: mode["saved"])
    how = worst["remedy"] + (f" ({worst['place']})" if worst["place"] else "")
    saved = _saved(now, how, worst["saved"] * now.phase(*PASSES), f"kernels {BOTH_WAYS}")
    return [replace(p, title=f"{worst['name']}: switch it back") for p in saved]


def _retype(fact: str, how: str) -> Callable[[ObservedPlans], list[Proposal]]:
    """Another number type, by the share of the passes that it saved."""

    def propose(now: ObservedPlans) -> list[Proposal]:
        found = now.fact(fact)
        if not found:
            return []
        text = how.format(device=now.fact("device"), place=found["place"] or "where it is built")
        return _saved(now, text, found["saved"] * now.phase(*PASSES), f"forward and backward pass {BOTH_WAYS}")

    return propose


def _batch(merged: bool) -> Callable[[ObservedPlans], list[Proposal]]:
    """`merged`: the micro-batches of a step become one; with one of them, steps become larger. The gain is for the same
    samples."""

    def propose(now: ObservedPlans) -> list[Proposal]:
        saved, accumulation = now.saved_by_batch(), int(now.fact("accumulation") or 1)
        if saved is None or (accumulation > 1) is not merged:
            return []
        how = f"a micro-batch of {larger_by(now.run.facts) * int(now.fact('batch') or 1)}"
        basis = "planned: the larger micro-batch on this machine's curves, for the same samples"
        basis = basis if now.batches else f"passes {BOTH_WAYS}, for the same samples"
        return _saved(now, how, saved, basis)

    return propose


def _attention(now: ObservedPlans) -> list[Proposal]:
    """Compares attention that writes its scores with the fused kernel of the same shape. Its time is all that the
    module does between its linear layers: products, masks, softmax, scales, casts."""
    names, timed = {line.operation for line in now.timed}, now.fact("attention_seconds")
    roots = {name.removesuffix(".softmax") for name in names if name.endswith(".softmax")}
    roots = {root for root in roots if f"{root}.bmm" in names}
    if not roots or timed is None:
        return []
    spent = sum(
        line.seconds or 0.0
        for line in now.timed
        if line.phase in PASSES
        and line.operation.rpartition(".")[0] in roots
        and line.operation.rpartition(".")[2] not in KEPT_OPERATIONS
    )
    products = now.fact("score_products") or []
    scores = sum(4.0 * batch * tokens**2 for batch, tokens, *_ in products)
    saved = spent - timed["fused"] * int(now.fact("accumulation") or 1)
    causal = ", is_causal=True" if any(masked for *_, masked in products) else ""
    how = f"torch.nn.functional.scaled_dot_product_attention(q, k, v{causal})"
    return _saved(now, how, saved, "measured, against the fused kernel timed at the end of the run", scores)


# What makes queries, keys and values, cuts them out of one product, and puts heads together again: the fused kernel
# needs it too.
KEPT_OPERATIONS = ("addmm", "cat", "chunk", "clone", "contiguous", "mm", "select", "split", "stack", "sum")


def _native(now: ObservedPlans) -> list[Proposal]:
    """PyTorch's fused attention against our own, both timed at the shapes of the run."""
    found = now.fact("fused_calls_seconds")
    if not found or now.fact("device") != "cpu":
        return []
    spent = sum(x.seconds or 0.0 for x in now.timed if x.kind is Kind.ATTENTION)
    how = (
        "from ironlaw.kernels.attention import causal_attention; causal_attention(q, k, v) in place of "
        "scaled_dot_product_attention(q, k, v, is_causal=True)"
    )
    return _saved(now, how, spent * (1 - found["native"] / found["fused"]), "both kernels timed at the end of the run")


def _fused_update(now: ObservedPlans) -> list[Proposal]:
    found = now.fact("fused_update")
    if not found:
        return []
    saved = now.phase(Phase.OPTIMIZER) * (1 - found["fused_seconds"] / found["seconds"])
    return _saved(now, f"{found['name']}(..., fused=True)", saved, "both ways timed at the end of the run")


def _alignment(now: ObservedPlans) -> list[Proposal]:
    saved, found = 0.0, now.fact("misaligned") or []
    for entry in found:
        own = (x for x in now.timed if x.operation == entry["module"] and x.kind is Kind.MATMUL)
        spent = sum(x.seconds or 0.0 for x in own)
        saved += spent * (1 - entry["aligned_seconds"] / entry["seconds"])
    shapes = ", ".join(f"{e['shape'][0]} to {e['aligned'][0]}" for e in found)
    return _saved(now, f"sizes: {shapes}", saved, "both products timed at the end of the run")


def _recompute(now: ObservedPlans) -> list[Proposal]:
    saved = (recomputed_share(now) or 0.0) * (now.step or 0.0)
    kept = now.plan.memory_bytes().get("activations") or 0.0
    how = "drop torch.utils.checkpoint, or gradient_checkpointing_disable()"
    return _saved(now, how, saved, "measured forward operations within the backward pass", -kept)


def _syncs(now: ObservedPlans) -> list[Proposal]:
    useless = useless_exchanges(now)
    if useless <= 1 / 3:
        return []
    saved = now.phase(Phase.COMMUNICATION) * useless
    how = "with model.no_sync(): around all micro-batches but the last"
    return _saved(now, how, saved, "measured waits for the exchange of gradients")


def _between(name: str, how: str, share: float) -> Callable[[ObservedPlans], list[Proposal]]:
    """What happens between steps, less often."""

    def propose(now: ObservedPlans) -> list[Proposal]:
        if name == "evaluation" and now.acts:
            return []
        wall = ((now.fact("wall_seconds") or {}).get(name) or 0.0) / (now.steps or 1)
        found = _saved(now, how, wall * (1 - 1 / TIMES_FEWER), MEASURED) if wall >= share * (now.step or 0.0) else []
        # No part of a step: its share is of what passes in all.
        return [replace(p, gain=(now.wall_share(name) or 0.0) * (1 - 1 / TIMES_FEWER)) for p in found]

    return propose


def remedies_of_faults(findings: Sequence[Finding], remedies: Sequence[Remedy], now: ObservedPlans) -> list[Remedy]:
    """Returns a remedy for each fault, in their order, then the others: the one that the rule names, or its advice."""
    left, found = {remedy.name: remedy for remedy in remedies}, []
    for finding in findings:
        cause = finding.cause
        if cause.remedy in left and finding.fault:
            found.append(left.pop(cause.remedy))
        elif finding.fault and finding.tier is Tier.FAULT and cause.saves and not cause.remedy:
            how = f"{cause.advice} ({finding.evidence[0]})" if finding.evidence else cause.advice
            what = cause.advice.partition(";")[0]
            own = {"title": what[0].upper() + what[1:], "name": cause.name, "precondition": finding.sentence}
            for saved in _saved(
                now, how, finding.share * (now.step or 0.0), "the measured cost of the cause, all of it"
            ):
                found.append(Remedy(**vars(saved) | own, effect=Effect.NONE, risk="it may be needed now and then"))
    return [*found, *left.values()]


FP32 = "model.float(), inputs in torch.float32, no autocast ({place})"
BF16 = 'with torch.autocast("{device}", dtype=torch.bfloat16): around the forward pass'
PROPOSALS: dict[str, Callable[[ObservedPlans], list[Proposal]]] = {
    "data": _data, "straggler": _straggler, "threads": _threads, "mode": _left_on, "float64": _retype("float64", FP32),
    "half": _retype("half", FP32), "precision": _retype("bf16", BF16), "batch": _batch(merged=True),
    "larger_steps": _batch(merged=False), "attention": _attention, "native": _native, "fused_update": _fused_update,
    "alignment": _alignment, "recompute": _recompute, "no_sync": _syncs,
    "evaluation": _between("evaluation", "evaluate every N steps", EVALUATION_SHARE),
    "checkpoint": _between("checkpoint", "save every N steps", CHECKPOINT_SHARE),
}  # fmt: skip


def _kind(key: str, effect: str, name: str = "", **entry: Any) -> RemedyKind:
    return RemedyKind(name or key, effect=Effect[effect.upper()], propose=PROPOSALS[key], **entry)


REMEDIES = tuple(
    _kind(key, **entry) for key, entry in read_toml(Path(__file__).with_name("observed_remedies.toml")).items()
)
