"""Makes the measured ledger of serving from engine steps and answers, and writes its run directory.

Phases: a request waits (queue), its prompt is computed (prefill), then its answer token by token (decode). Every step
also samples tokens (sampling) and works on the host (host: scheduling, text, delivery, and the time between two steps
while some request runs). `phase_seconds` are those of a mean engine step, so that they add up to the wall time.
"""

from __future__ import annotations

import json
import platform
from collections.abc import Iterable, Sequence
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from ironlaw.files import write_text
from ironlaw.ledger import Estimate, Ledger, Line, MemoryLine, Origin, Phase
from ironlaw.package import __version__
from ironlaw.serve.trace import bucket

if TYPE_CHECKING:
    from ironlaw.serve.engine import Engine


COUNTERS = ("preemptions", "prefix_queried", "prefix_hits", "drafted", "accepted")  # among the facts, since the start


def facts(engine: Engine) -> dict[str, Any]:
    """Return the engine's settings and counters: all that a plan of the same serving needs."""
    import torch

    from ironlaw.machine.host import cpu_name

    served, config = engine.served, engine.config
    device = torch.cuda.get_device_name(served.device) if served.device.type == "cuda" else cpu_name()
    return {
        "kind": "serving", "engine": "ironlaw", "model": engine.model_config.model_dump(exclude_none=True, mode="json"),
        "name": served.name, "device": device, "weights": served.weights, "kv": served.kv,
        "threads": served.threads, "batch": config.batch, "token_budget": config.token_budget, "block": config.block,
        "blocks": engine.blocks.count, "kv_tokens": engine.blocks.tokens,
        "kv_bytes": engine.runner.kv_bytes, "weight_bytes": served.weight_bytes, "policy": config.policy,
        "speculation": config.speculation, "share_prefixes": config.share_prefixes, "context": engine.context,
        "preemptions": engine.scheduler.preemptions, "prefix_queried": engine.blocks.queried,
        "prefix_hits": engine.blocks.hits, "drafted": engine.drafted_tokens, "accepted": engine.accepted_tokens,
        "passes": engine.passes, "request_seconds": engine.request_seconds,
        "versions": {"ironlaw": __version__, "torch": torch.__version__, "python": platform.python_version()},
    }  # fmt: skip


def serving_ledger(
    steps: Sequence[dict[str, Any]], facts: dict[str, Any], requests: dict[str, Any], profile: Iterable[Line] = ()
) -> Ledger:
    """Return the ledger of a server's `steps` and of `requests` (`load.summary`). What was not measured is absent."""
    ledger = Ledger("run", facts=facts | {"kind": "serving", "requests": requests})
    measured = Origin.MEASURED
    for name in ("ttft_seconds", "tpot_seconds", "queue_seconds"):
        found = requests.get(name)
        if found is not None:
            ledger.totals[name] = Estimate(found["p50"], measured, "median of all requests", found["p10"], found["p90"])
    for name in ("output_tokens_per_second", "requests_per_second"):
        if requests.get(name) is not None:
            ledger.totals[name] = Estimate(requests[name], measured, "of the whole run")
    if facts.get("kv_tokens"):
        ledger.totals["kv_tokens"] = Estimate(facts["kv_tokens"], measured, "pages of the engine")
        ledger.memory = [
            MemoryLine("weights", facts["weight_bytes"], measured), MemoryLine("kv", facts["kv_bytes"], measured)
        ]  # fmt: skip
    if steps:
        _add_steps(ledger, steps)
    ledger.lines += profile
    return ledger


def _add_steps(ledger: Ledger, steps: Sequence[dict[str, Any]]) -> None:
    measured, count = Origin.MEASURED, len(steps)
    sums = dict.fromkeys((Phase.PREFILL, Phase.DECODE, Phase.SAMPLING, Phase.HOST), 0.0)
    by_batch = decode_seconds(steps)
    # The server's warm-up provides times of batches for which a run has no decode-only step.
    started = decode_seconds([p | {"decode_tokens": p["tokens"]} for p in ledger.facts.get("passes") or ()])
    alone = started | by_batch
    for step, gap in zip(steps, gaps(steps), strict=True):
        model = step["model_seconds"]
        decode = model if step["phase"] == "decode" else 0.0
        if step["phase"] == "mixed":  # decode counts with its time alone; the rest is due to prompts, which delay it
            share = step["decode_tokens"] / (step["decode_tokens"] + step["prefill_tokens"])
            decode = min(model, alone.get(bucket(step["decode_tokens"]), model * share))
        sums[Phase.DECODE] += decode
        sums[Phase.PREFILL] += model - decode
        sums[Phase.SAMPLING] += step["sample_seconds"]
        sums[Phase.HOST] += step["schedule_seconds"] + step["output_seconds"] + gap
    seconds = np.array([step["seconds"] for step in steps])
    busy = float(seconds.sum()) + sum(gaps(steps))
    sums[Phase.IDLE] = max(0.0, _end(steps[-1]) - _begin(steps[0]) - busy)  # no requests
    ledger.phase_seconds = {phase: total / count for phase, total in sums.items()}
    low, middle, high = (float(q) for q in np.percentile(seconds, [10, 50, 90]))
    ledger.totals["step_seconds"] = Estimate(middle, measured, f"median of {count} engine steps", low, high)
    # Runs of older versions lack the requests: without speculation they are as many as tokens.
    decoding = [step.get("decode_requests", step["decode_tokens"]) for step in steps if step["decode_tokens"]]
    for name, values, basis in (
        ("decode_batch", decoding, "mean of the steps that decode"),
        ("kv_usage", [step["kv_usage"] for step in steps], "mean over steps, of all pages"),
        ("waiting", [step["waiting"] for step in steps], "mean over steps"),
    ):
        if values:
            ledger.totals[name] = Estimate(float(np.mean(values)), measured, basis)
    ledger.facts["steps"] = {
        "count": count, "mean_seconds": busy / count,
        "prefill_tokens": sum(s["prefill_tokens"] for s in steps),
        "decode_tokens": sum(s["decode_tokens"] for s in steps), "accepted": sum(s["accepted"] for s in steps),
        "produced": sum(s["produced"] for s in steps), "mixed": sum(s["phase"] == "mixed" for s in steps),
        "decode_seconds_by_batch": {str(batch): value for batch, value in sorted(by_batch.items())},
    }  # fmt: skip


def gaps(steps: Sequence[dict[str, Any]]) -> list[float]:
    """Return the seconds before each step while some request ran or waited: the engine's thread delivers outputs, and
    waits for the interpreter. 0 if there was no request."""
    found = [0.0] * min(1, len(steps))
    for before, step in pairwise(steps):
        held = step["decode_tokens"] or before["waiting"] or not before["produced"]
        found.append(max(0.0, _begin(step) - _end(before)) if held else 0.0)
    return found


def _begin(step: dict[str, Any]) -> float:
    return float(step["start"] - step["schedule_seconds"])


def _end(step: dict[str, Any]) -> float:
    return _begin(step) + float(step["seconds"])


def decode_seconds(steps: Sequence[dict[str, Any]]) -> dict[int, float]:
    """Return the model's median seconds in decode-only steps, by batch size rounded up to a power of two."""
    found: dict[int, list[float]] = {}
    for step in steps:
        if step["phase"] == "decode":
            found.setdefault(bucket(step["decode_tokens"]), []).append(step["model_seconds"])
    return {bucket: float(np.median(values)) for bucket, values in found.items()}


def write_run(
    folder: Path, ledger: Ledger, requests: Sequence[dict[str, Any]], steps: Sequence[dict[str, Any]]
) -> None:
    """Write `ledger.json`, and beside it `requests.jsonl` and `steps.jsonl`, one line each."""
    folder.mkdir(parents=True, exist_ok=True)
    for name, rows in (("requests.jsonl", requests), ("steps.jsonl", steps)):
        write_text(folder / name, "".join(json.dumps(row) + "\n" for row in rows))
    ledger.save(folder / "ledger.json")
