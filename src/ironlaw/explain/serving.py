"""Compares a measured server with its plan: where the time of an engine step went, what binds, what to change.

The run is what `ironlaw bench --out` wrote: `ledger.json` and `steps.jsonl`. The plan has the phases that an engine of
ours has on this machine (`plan/serving/here.py`); what it does not know is absent, never 0.
"""

from __future__ import annotations

import bisect
import math
import statistics
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from ironlaw.errors import UserError
from ironlaw.files import read_json_lines
from ironlaw.ledger import Ledger, Phase
from ironlaw.machine.profile import Profile, load_profile
from ironlaw.model.config import ModelConfig
from ironlaw.plan.serving.here import MeasuredClock
from ironlaw.plan.serving.simulate import SimulatedRequest, replay

_PARTS = {"prompts": Phase.PREFILL, "decode": Phase.DECODE, "sample": Phase.SAMPLING, "host": Phase.HOST}
PHASES = (Phase.PREFILL, Phase.DECODE, Phase.SAMPLING, Phase.HOST, Phase.IDLE)

FULL = 0.9  # of the cache, above which requests wait for room
FLAT = 1.3  # twice the requests take less than this many times as long: weights are read anyway
HOST_SHARE, PROMPT_SHARE, IDLE_SHARE = 0.2, 0.35, 0.3
ACCEPTED = 0.4  # of drafted tokens, below which a draft costs more than it saves; assumed, it hangs on the draft's cost


@dataclass(frozen=True)
class ServingFinding:
    """share: of the time that the engine was busy. gain: of it, that the remedy would save. None: not known."""

    name: str
    says: str
    remedy: str
    share: float | None = None
    gain: float | None = None
    basis: str = ""


@dataclass(frozen=True)
class ServingExplanation:
    """`planned`: seconds of a mean engine step by phase, absent where the plan does not know; `note` says why.
    `planned_totals`: the same load played by the plan, under the run's names; empty where it cannot be."""

    run: Ledger
    planned: dict[Phase, float]
    planned_totals: dict[str, float]
    note: str
    findings: list[ServingFinding]

    def to_json(self) -> dict[str, Any]:
        measured = self.run.phase_seconds
        return {
            "schema_version": 1, "kind": "serving",
            "phases": [
                {"phase": str(p), "measured_seconds": measured.get(p), "planned_seconds": self.planned.get(p)}
                for p in PHASES
            ],
            "planned_totals": self.planned_totals, "unattributed": self.unattributed, "plan_note": self.note,
            "findings": [asdict(finding) for finding in self.findings], "binds": self.findings[0].name,
            "totals": {name: total.to_json() for name, total in self.run.totals.items()}, "facts": self.run.facts,
        }  # fmt: skip

    @property
    def unattributed(self) -> float | None:
        """Share of an engine step's wall time that no phase has."""
        mean = self.run.facts.get("steps", {}).get("mean_seconds")
        if "step_seconds" not in self.run.totals or mean is None:
            return None
        return abs(float(mean) - _busy(self.run)) / float(mean)


def is_serving_run(path: Path) -> bool:
    return (path / "ledger.json").is_file() and (path / "steps.jsonl").is_file()


def explain_serving(path: Path, profile: Profile | None = None) -> ServingExplanation:
    """Raises UserError if the run has no engine steps: `bench` reads them from Ironlaw's own server only."""
    run = Ledger.load(path / "ledger.json")
    steps = read_json_lines(path / "steps.jsonl")
    if not steps or not run.phase_seconds:
        raise UserError(f"{path} has no engine steps: bench reads them from a server that `ironlaw serve` started")
    requests = [one for one in read_json_lines(path / "requests.jsonl") if one["output_tokens"] and not one["error"]]
    return ServingExplanation(run, *_planned(run, steps, requests, profile), find(run))


def _planned(
    run: Ledger, steps: Sequence[dict[str, Any]], requests: Sequence[dict[str, Any]], profile: Profile | None
) -> tuple[dict[Phase, float], dict[str, float], str]:
    """Returns seconds of a mean step by phase, the load's totals, and a note by the plan; only the reason in the note
    if the model or the machine cannot be planned."""
    try:
        profile, facts = profile or load_profile(), run.facts
        passes, weights = facts.get("passes") or (), str(facts.get("weights", "fp32"))
        clock = MeasuredClock(ModelConfig(**facts["model"]), profile, weights, passes)
        sums = dict.fromkeys(_PARTS.values(), 0.0)
        for step in steps:
            decoding, new = int(step["decode_tokens"]), int(step["prefill_tokens"])
            prompts = max(1, int(step["requests"]) - int(step.get("decode_requests", decoding)))
            parts = clock.parts(decoding, step["kv_tokens"] / max(1, decoding), new, prompts=prompts)
            for part, phase in _PARTS.items():
                sums[phase] += parts.get(part, math.nan)
        is_played = facts.get("request_seconds") and facts["speculation"] == "none"
        totals = _play_load(clock, facts, steps, requests) if is_played else {}
    except (UserError, KeyError, TypeError, ValueError) as error:
        return {}, {}, f"not planned: {error}"
    notes = []
    if facts.get("threads") not in (None, profile.threads) and not passes:
        ratio = f"the server had {facts['threads']}: it may be off by their ratio"
        notes.append(f"planned for {profile.threads} threads, {ratio}")
    if weights not in profile.matmul and not passes:
        notes.append(f"{weights} products were not measured: {clock.precision}'s, by the bytes read")
    return {p: s / len(steps) for p, s in sums.items() if not math.isnan(s)}, totals, "; ".join(notes)


def _play_load(
    clock: MeasuredClock, facts: dict[str, Any], steps: Sequence[dict[str, Any]], requests: Sequence[dict[str, Any]]
) -> dict[str, float]:
    """Returns what clients would measure if the same requests came to an engine that keeps the clock's time. Requests
    that come while the API takes in another one reach the engine with it: both work in one interpreter."""
    if not requests:
        return {}
    new = sum(step["prefill_tokens"] for step in steps) / sum(one["prompt_tokens"] for one in requests)
    arrivals, ready, at_once = list[SimulatedRequest](), 0.0, facts["load"]["concurrency"]
    requests = sorted(requests, key=lambda one: float(one["at"]))
    times = [float(one["at"]) for one in requests]
    while len(arrivals) < len(requests):
        ready = max(ready, times[len(arrivals)])
        group = requests[len(arrivals) : bisect.bisect_right(times, ready + facts["request_seconds"])]
        ready += facts["request_seconds"] * len(group)
        for one in group:
            known = round(one["prompt_tokens"] * max(0.0, 1.0 - new))  # shared with others, as a mean
            arrivals.append(SimulatedRequest(ready, one["prompt_tokens"], one["output_tokens"], cached=known))
    is_closed = at_once is not None and at_once < len(arrivals)
    replay(clock, arrivals, at_once if is_closed else None, facts["kv_tokens"], facts["batch"], facts["token_budget"])
    starts = [one.arrival if is_closed else asked["at"] for one, asked in zip(arrivals, requests, strict=True)]
    gaps = [(one.last - one.first) / (one.output - 1) for one in arrivals if one.output > 1]
    tokens, seconds = sum(one.output for one in arrivals), max(one.last for one in arrivals)
    return {
        "ttft_seconds": statistics.median(one.first - at for one, at in zip(arrivals, starts, strict=True)),
        "output_tokens_per_second": tokens / seconds,
    } | ({"tpot_seconds": statistics.median(gaps)} if gaps else {})


# -- what binds --------------------------------------------------------------------------------------------------------


def find(run: Ledger) -> list[ServingFinding]:
    """Returns findings, the one that costs most first; `healthy` if none reaches its threshold."""
    found = [finding for applies, finding in _candidates(run) if applies]
    found.sort(key=lambda finding: -(finding.share or 0.0))
    return found or [ServingFinding("healthy", "no cause reaches its threshold", "")]


def _busy(run: Ledger) -> float:
    return sum(seconds for phase, seconds in run.phase_seconds.items() if phase is not Phase.IDLE)


def _candidates(run: Ledger) -> Iterator[tuple[Any, ServingFinding]]:
    """Yields every cause, with whether it applies."""
    facts, busy = run.facts, _busy(run)
    totals = {name: total.value for name, total in run.totals.items()}
    shares = {phase: seconds / busy if busy else 0.0 for phase, seconds in run.phase_seconds.items()}
    decode, prompts = shares.get(Phase.DECODE, 0.0), shares.get(Phase.PREFILL, 0.0)

    waiting, batch, limit = totals.get("waiting", 0.0), totals.get("decode_batch", 0.0), facts.get("batch") or 0
    text = f"{waiting:.3g} requests wait on average while {batch:.3g} of {limit} places are taken"
    remedy = f"--set serve.batch={2 * limit}, or another copy of the server"
    share = waiting / (waiting + batch) if waiting else 0.0
    yield waiting >= 1 and limit and batch >= 0.8 * limit, ServingFinding("queue", text, remedy, share)

    usage, preempted = totals.get("kv_usage", 0.0), facts.get("preemptions") or 0
    text = f"the cache is {usage:.0%} full on average, {preempted} requests were sent back"
    remedy = "more pages, or a cache of fewer bits: --set serve.kv=fp8 or int8"
    yield usage >= FULL or preempted, ServingFinding("kv", text, remedy, usage)

    remedy = "a smaller serve.token_budget where answers must not stall, a larger one where throughput counts"
    queried = facts.get("prefix_queried") or 0
    if queried and (facts.get("prefix_hits") or 0) < 0.1 * queried:
        remedy += "; equal beginnings of prompts are computed once, and these prompts share next to nothing"
    text = f"prompts take {prompts:.0%} of the busy time and delay answers"
    yield prompts >= PROMPT_SHARE, ServingFinding("prefill", text, remedy, prompts)

    host = shares.get(Phase.HOST, 0.0) + shares.get(Phase.SAMPLING, 0.0)
    text = f"scheduling, sampling and text take {host:.0%} of the busy time"
    remedy = "greedy answers, fewer logprobs, more requests at once per step"
    basis = "assumed: half of it grows with steps, not with tokens"
    yield host >= HOST_SHARE, ServingFinding("host", text, remedy, host, host / 2, basis)

    # Twice the requests take hardly longer: what a step reads is the weights.
    seconds = {int(k): v for k, v in facts.get("steps", {}).get("decode_seconds_by_batch", {}).items()}
    pairs = ((b, seconds[2 * b] / seconds[b]) for b in sorted(seconds) if 2 * b in seconds and b >= batch / 2)
    size, ratio = next(pairs, (0, 2.0))
    text = f"{2 * size} requests at once take {ratio:.2f} times as long as {size}: weights are read"
    remedy = "more requests at once, fewer bits (serve.weights=int8 or int4), speculation"
    gain, basis = decode * (1 - ratio / 2), "measured: twice the batch, time per token"
    yield ratio <= FLAT and decode >= 0.3, ServingFinding("bandwidth", text, remedy, decode, gain, basis)

    drafted, accepted = facts.get("drafted") or 0, facts.get("accepted") or 0
    part = accepted / drafted if drafted else 1.0
    text = f"{part:.0%} of {drafted:,} drafted tokens were taken: speculation does not pay"
    yield part < ACCEPTED, ServingFinding("speculation", text, '--set serve.speculation="none"', decode)

    idle = run.phase_seconds.get(Phase.IDLE, 0.0)
    share = idle / (idle + busy) if idle else 0.0
    text = f"nobody asked for anything {share:.0%} of the time"
    yield share >= IDLE_SHARE, ServingFinding("load", text, "nothing: the server is not the limit")
