"""What to do about a plan: what holds the winner back, when more accelerators stop paying, what would make it fit."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from ironlaw.catalog.accelerators import accelerator, accelerator_names
from ironlaw.catalog.nodes import Cluster, node
from ironlaw.errors import UserError
from ironlaw.ledger import Kind, Ledger, Line
from ironlaw.plan.cluster.estimate import plan_cluster
from ironlaw.plan.cluster.request import ClusterRequest
from ironlaw.plan.cluster.search import RankedLayout, search
from ironlaw.workload.layout import Layout
from ironlaw.workload.recompute import AGAIN

MOST_ACCELERATORS = 16_384
STOP_BELOW = 0.5
"""Doubling the accelerators pays while it speeds the step up by at least this share; 1 would be twice as fast."""

WORTH = 0.02
"""A change whose planned gain is smaller is not proposed."""

COLLECTIVES = {
    "tp": ("tensor parallel communication", "faster links, or a framework that overlaps it"),
    "ep": ("expert parallel communication", "faster links, a lower ep, or experts of one node only"),
    "cp": ("context parallel communication", "faster links, or shorter sequences"),
    "pp": ("pipeline messages", "a faster network"),
    "shard": ("communication of sharded state", "a larger batch, or a faster network"),
    "micro_batch": ("agreement of all ranks", "a larger batch, so that it comes less often"),
    "world": ("agreement of all ranks", "a larger batch, so that it comes less often"),
    "replicate": ("data parallel communication", "a larger batch, or a faster network"),
}
"""Mesh dimension -> what people call its communication, what makes it smaller."""

OPERATIONS = {
    "head": ("output layer and loss", "a fused loss, or a smaller vocabulary"),
    "loss": ("output layer and loss", "a fused loss, or a smaller vocabulary"),
    "host_offload": ("transfers to the host and its update", "more accelerators, so that less must be offloaded"),
    "dispatch": ("launch time of the host", "larger micro-batches, CUDA graphs or a compiler"),
    "step": ("host time of a step", "a larger batch, so that it comes less often"),
    "pipeline_bubble": ("pipeline bubble", "a larger batch: more micro-batches fill the pipeline"),
    "allocator_retries": ("allocator retries", "a layout with more memory to spare"),
}
"""The same by operation, where its kind does not say it."""

RECOMPUTATION = ("recomputation", "more memory per accelerator, so that activations can be kept")
PRODUCTS = ("matrix products of the blocks", "a faster accelerator, or narrower numbers where it has them")
KINDS = {
    Kind.MATMUL: PRODUCTS,
    Kind.ATTENTION: ("attention", "shorter sequences, or a sliding window"),
    Kind.OPTIMIZER: ("optimizer update", "a larger batch, so that it comes less often"),
}
ELEMENTWISE = ("norms, residuals and activations", "fused or compiled kernels")


def term(line: Line) -> tuple[str, str]:
    """What a line of a cluster ledger is called, and what makes it smaller."""
    if line.operation.endswith(AGAIN):
        return RECOMPUTATION
    if line.kind is Kind.COLLECTIVE:
        return COLLECTIVES[line.operation.split()[0]]
    if line.operation.endswith("_cast"):
        return PRODUCTS
    if line.kind in (Kind.ELEMENTWISE, Kind.NORM):  # experts' rows are dispatched, too
        return ELEMENTWISE
    return OPERATIONS.get(line.operation) or KINDS.get(line.kind, ELEMENTWISE)


def terms(ledger: Ledger) -> dict[str, float]:
    """Seconds of the step by term, largest first."""
    sums: dict[str, float] = {}
    for line in ledger.lines:
        if line.seconds:
            name = term(line)[0]
            sums[name] = sums.get(name, 0.0) + line.seconds
    return dict(sorted(sums.items(), key=lambda item: -item[1]))


def first_change(request: ClusterRequest, layout: Layout, ledger: Ledger) -> dict[str, Any]:
    """The largest term of the step, what makes it smaller, and what the planner finds when it changes a setting."""
    largest, seconds = next(iter(terms(ledger).items()))
    remedy = next(remedy for name, remedy in map(term, ledger.lines) if name == largest)
    tried = sorted(_tried(request, layout, ledger), key=lambda change: -change["gain"])
    return {
        "term": largest,
        "seconds": seconds,
        "share": seconds / ledger.totals["step_seconds"].value,
        "remedy": remedy,
        "tried": [change for change in tried if change["gain"] >= WORTH],
    }


def _tried(request: ClusterRequest, layout: Layout, ledger: Ledger) -> Iterator[dict[str, Any]]:
    """Settings changed one at a time with the layout kept; `gain` is in tokens per second."""
    doubled = 2 * request.global_batch
    changes = [(f"--global-batch {doubled}", replace(request, global_batch=doubled))]
    if request.precision in ("bf16", "fp16"):
        changes.append(("--precision fp8", replace(request, precision="fp8")))
    now = ledger.totals["tokens_per_second"].value
    for words, changed in changes:
        try:
            other = plan_cluster(changed, replace(layout, accumulation=None))
        except UserError:
            continue
        if other.fits:
            yield {"change": words, "gain": other.ledger.totals["tokens_per_second"].value / now - 1}
    for fewer in _rounder_counts(request.cluster) if request.layout is None else ():
        seconds = _best(request, fewer)
        if seconds is not None:
            words = f"--on {fewer}x{request.cluster.accelerator.name}, which divide better"
            yield {"change": words, "gain": ledger.totals["step_seconds"].value / seconds - 1}


def _rounder_counts(cluster: Cluster) -> list[int]:
    """Fewer accelerators than an odd lot: whole nodes, a power of two. None where there are such already."""
    count, node_size = cluster.count, cluster.node.accelerators
    rounder = {count - count % node_size, 2 ** (count.bit_length() - 1)}
    return sorted(n for n in rounder if 0 < n < count) if count % node_size or count & (count - 1) else []


def scaling(request: ClusterRequest, step_seconds: float) -> dict[str, Any]:
    """The same work on half, twice, four times ... the accelerators, until doubling stops paying."""
    count = request.cluster.count
    rows: list[dict[str, Any]] = [{"accelerators": count, "step_seconds": step_seconds, "gain": None}]
    half = _best(request, count // 2) if count % 2 == 0 else None
    if half is not None:
        rows[0]["gain"] = half / step_seconds - 1
        rows.insert(0, {"accelerators": count // 2, "step_seconds": half, "gain": None})
    stop, reason = None, "every doubling planned still pays"
    while (double := rows[-1]["accelerators"] * 2) <= MOST_ACCELERATORS:
        seconds = _best(request, double)
        if seconds is None:
            stop, reason = rows[-1]["accelerators"], f"no layout of {double:,} divides the batch"
            break
        gain = rows[-1]["step_seconds"] / seconds - 1
        rows.append({"accelerators": double, "step_seconds": seconds, "gain": gain})
        if gain < STOP_BELOW:
            stop, reason = rows[-2]["accelerators"], f"doubling to {double:,} is only {100 * gain:.0f}% faster"
            break
    return {"rows": rows, "pays_up_to": stop, "reason": reason}


def fastest(request: ClusterRequest) -> RankedLayout | None:
    """The layout of what was asked; None where none fits or can be formed."""
    try:
        found = search(request, keep=1, hybrid=False, fastest_alone=True)
    except UserError:
        return None
    return found.best[0] if found.best else None


def _best(request: ClusterRequest, count: int) -> float | None:
    """Step seconds of the best layout on that many accelerators."""
    found = fastest(replace(request, cluster=replace(request.cluster, count=count)))
    return found.step_seconds if found else None


def would_fit(request: ClusterRequest) -> list[str]:
    """The least change of hardware with which some layout fits: more of the same, or as many with more memory."""
    words = []
    count = request.cluster.count * 2
    while count <= MOST_ACCELERATORS:
        if _best(request, count) is not None:
            words.append(f"--on {count}x{request.cluster.accelerator.name}")
            break
        count *= 2
    bigger = _with_more_memory(request)
    if bigger is not None:
        words.append(f"--on {request.cluster.count}x{bigger}")
    return words


def _with_more_memory(request: ClusterRequest) -> str | None:
    own = request.cluster.accelerator
    assert own.memory_bytes is not None
    others = [accelerator(name) for name in accelerator_names()]
    larger = [
        (other.memory_bytes.value, other)
        for other in others
        if other.memory_bytes and other.memory_bytes.value > 1.1 * own.memory_bytes.value
        and other.vendor == own.vendor and not other.unified_memory
    ]  # fmt: skip
    for _, other in sorted(larger, key=lambda pair: (pair[0], pair[1].name)):
        swapped = Cluster(other, request.cluster.count, node(other.default_node))
        try:
            if search(replace(request, cluster=swapped), keep=1, fastest_alone=True).best:
                return other.name
        except UserError:
            continue
    return None
