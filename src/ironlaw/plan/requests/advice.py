"""Advice on a cluster plan: the largest term of its step, the savings from compressed communication, how far more
accelerators pay, and changes that would make it fit."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from itertools import pairwise
from typing import Any

from ironlaw.catalog.accelerators import accelerator, accelerator_names
from ironlaw.catalog.nodes import Cluster, node
from ironlaw.errors import UserError
from ironlaw.ledger import Kind, Ledger, Line
from ironlaw.machine.efficiency.collectives import collective_seconds
from ironlaw.machine.efficiency.streaming import streaming_seconds
from ironlaw.model.parameters import model_parameters
from ironlaw.plan.cluster.estimate import ClusterRequest, plan_candidates, plan_cluster
from ironlaw.plan.cluster.search import RankedLayout, search
from ironlaw.workload.collectives import compressed_elements
from ironlaw.workload.layout import Layout
from ironlaw.workload.recompute import RECOMPUTED_SUFFIX

MAX_ACCELERATORS = 16_384
MIN_DOUBLING_GAIN = 0.5
"""Doubling the accelerators pays while it speeds up the step by at least this share; 1 means twice as fast."""

MIN_GAIN = 0.02
"""Least planned gain of a proposed change."""

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
"""Name of each mesh dimension's communication, and what reduces it."""

OPERATIONS = {
    "head": ("output layer and loss", "a fused loss, or a smaller vocabulary"),
    "loss": ("output layer and loss", "a fused loss, or a smaller vocabulary"),
    "host_offload": ("transfers to the host and its update", "more accelerators, so that less must be offloaded"),
    "dispatch": ("launch time of the host", "larger micro-batches, CUDA graphs or a compiler"),
    "step": ("host time of a step", "a larger batch, so that it comes less often"),
    "pipeline_bubble": ("pipeline bubble", "a larger batch: more micro-batches fill the pipeline"),
    "allocator_retries": ("allocator retries", "a layout with more memory to spare"),
}
"""The same by operation, for those that their kind does not determine."""

RECOMPUTATION = ("recomputation", "more memory per accelerator, so that activations can be kept")
PRODUCTS = ("matrix products of the blocks", "a faster accelerator, or narrower numbers where it has them")
KINDS = {
    Kind.MATMUL: PRODUCTS,
    Kind.ATTENTION: ("attention", "shorter sequences, or a sliding window"),
    Kind.OPTIMIZER: ("optimizer update", "a larger batch, so that it comes less often"),
}
ELEMENTWISE = ("norms, residuals and activations", "fused or compiled kernels")


def term(line: Line) -> tuple[str, str]:
    """Returns the name of the term that a line of a cluster ledger belongs to, and what reduces it."""
    if line.operation.endswith(RECOMPUTED_SUFFIX):
        return RECOMPUTATION
    if line.kind is Kind.COLLECTIVE:
        return COLLECTIVES[line.operation.split()[0]]
    if line.operation.endswith("_cast"):
        return PRODUCTS
    if line.kind in (Kind.ELEMENTWISE, Kind.NORM):  # before OPERATIONS: the experts also have a "dispatch"
        return ELEMENTWISE
    return OPERATIONS.get(line.operation) or KINDS.get(line.kind, ELEMENTWISE)


def terms(ledger: Ledger) -> dict[str, float]:
    """Returns the seconds of the step by term, largest first."""
    sums: dict[str, float] = {}
    for line in ledger.lines:
        if line.seconds:
            name = term(line)[0]
            sums[name] = sums.get(name, 0.0) + line.seconds
    return dict(sorted(sums.items(), key=lambda item: -item[1]))


def first_change(request: ClusterRequest, layout: Layout, ledger: Ledger) -> dict[str, Any]:
    """Returns the largest term of the step, what reduces it, and the planned gains of changes to the request."""
    largest, seconds = next(iter(terms(ledger).items()))
    remedy = next(remedy for name, remedy in map(term, ledger.lines) if name == largest)
    tried = sorted(_tried(request, layout, ledger), key=lambda change: -change["gain"])
    return {
        "term": largest,
        "seconds": seconds,
        "share": seconds / ledger.totals["step_seconds"].value,
        "remedy": remedy,
        "tried": [change for change in tried if change["gain"] >= MIN_GAIN],
    }


def _tried(request: ClusterRequest, layout: Layout, ledger: Ledger) -> Iterator[dict[str, Any]]:
    """Yields changes of one setting with the layout kept, and smaller clusters; `gain` is the relative speed-up."""
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
    for fewer in _round_counts(request.cluster) if request.layout is None else ():
        seconds = _best(request, fewer)
        if seconds is not None:
            words = f"--on {fewer}x{request.cluster.accelerator.name}, which divide better"
            yield {"change": words, "gain": ledger.totals["step_seconds"].value / seconds - 1}


def _round_counts(cluster: Cluster) -> list[int]:
    """Returns smaller counts that divide better: whole nodes and a power of two; empty if the count is both."""
    count, node_size = cluster.count, cluster.node.accelerators
    rounder = {count - count % node_size, 2 ** (count.bit_length() - 1)}
    return sorted(n for n in rounder if 0 < n < count) if count % node_size or count & (count - 1) else []


def scaling(request: ClusterRequest, step_seconds: float) -> dict[str, Any]:
    """Plans the same work on half, twice, four times ... the accelerators, until doubling stops paying."""
    count = request.cluster.count
    rows: list[dict[str, Any]] = [{"accelerators": count, "step_seconds": step_seconds, "gain": None}]
    half = _best(request, count // 2) if count % 2 == 0 else None
    if half is not None:
        rows[0]["gain"] = half / step_seconds - 1
        rows.insert(0, {"accelerators": count // 2, "step_seconds": half, "gain": None})
    stop, reason = None, "every doubling planned still pays"
    while (double := rows[-1]["accelerators"] * 2) <= MAX_ACCELERATORS:
        seconds = _best(request, double)
        if seconds is None:
            stop, reason = rows[-1]["accelerators"], f"no layout of {double:,} divides the batch"
            break
        gain = rows[-1]["step_seconds"] / seconds - 1
        rows.append({"accelerators": double, "step_seconds": seconds, "gain": gain})
        if gain < MIN_DOUBLING_GAIN:
            break
    for fewer, more in pairwise(rows):
        if (gain := more["gain"]) < MIN_DOUBLING_GAIN:
            change = f"{-gain:.0%} slower" if gain <= -0.005 else f"only {gain:.0%} faster"
            stop, reason = fewer["accelerators"], f"doubling to {more['accelerators']:,} is {change}"
            break
    return {"rows": rows, "pays_up_to": stop, "reason": reason}


def fastest(request: ClusterRequest, hybrid: bool = False) -> RankedLayout | None:
    """Returns the fastest layout for the request, of hybrid sharding too if asked for; None if none fits."""
    try:
        found = search(request, keep=1, hybrid=hybrid)
    except UserError:
        return None
    return found.best[0] if found.best else None


def _best(request: ClusterRequest, count: int) -> float | None:
    """Returns the step seconds of the best layout on `count` accelerators."""
    found = fastest(replace(request, cluster=replace(request.cluster, count=count)))
    return found.step_seconds if found else None


def would_fit(request: ClusterRequest) -> list[str]:
    """Returns the smallest hardware changes for which a layout fits: more accelerators, or ones with more memory."""
    words = []
    count = request.cluster.count * 2
    while count <= MAX_ACCELERATORS:
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
        if fastest(replace(request, cluster=swapped)):
            return other.name
    return None


# -- compressed communication ---------------------------------------------------------------------------------------


MIN_EXPOSED_SHARE = 0.02
"""Share of the step below which exposed data parallel communication does not justify a setting."""

RANK = 4
LOCAL_STEPS = 500  # arXiv 2311.08105
CAST_BYTES = 2 * (4 + 2)
COMPRESSION_PASSES = 11  # over fp32 elements
OUTER_PASSES = 5
KERNELS_PER_COLUMN = 6
LAUNCH_SECONDS = 5e-6
"""Time of one small kernel on an accelerator. Assumed: kernels of this size take as long as their launch."""


BF16 = 'communication.gradients = "bf16"'
POWERSGD = f'communication.gradients = "powersgd", rank = {RANK}'
SITES = f"communication.local_steps = {LOCAL_STEPS}"


def cluster_savings(request: ClusterRequest, layout: Layout) -> list[dict[str, Any]]:
    """Returns the savings of compressed communication for a planned layout; empty if its gradients are not exposed.

    Seconds are those of a step; `exposed_seconds`: the wait for gradients without the setting; `sent_share`: bytes of
    gradients (or weights) per step over fp32 gradients at every step.

    The saving is the exposed time that disappears when the same layout is planned with fewer gradient bytes. The cost
    is the work that the setting adds to every step, none of it hidden:

        bf16        gradients are read in fp32 and written in bf16, and back: 12 bytes of memory traffic per parameter
        powersgd    PyTorch's hook passes over a compressed gradient 11 times in fp32 (add the last error, copy, three
                    products, subtract) and orthogonalises its thin matrices, 6 small kernels per column, two matrices
                    for each gradient
        sites       an all-reduce of the weights in fp32 and the five passes of the outer step, every `local_steps`
                    steps; here each replica is a site

    Savings are exact for the plan's own time model; the effect on the loss is not planned. PowerSGD needs tuning of
    rank and start (arXiv 1905.13727). DiLoCo matched the loss of ordinary training with 500 local steps in the runs of
    its paper (arXiv 2311.08105, section 4), not in general.
    """
    where = request.system
    candidates = request.candidates([layout])
    parameters = model_parameters(request.model)
    replicas = layout.dp > 1
    sites = replicas and layout.zero == 0  # state sharded over replicas cannot belong to one site

    def step(gradient_bytes: float) -> tuple[float, float]:
        engine = replace(where.engine, gradient_communication_bytes=gradient_bytes)
        times = plan_candidates(candidates, replace(where, engine=engine)).times
        exposed = times.reduce_exposed + times.gather_exposed + (times.fsdp_exposed if layout.zero >= 2 else 0.0)
        return float(times.step_seconds[0]), float(exposed[0])

    now = where.engine.gradient_communication_bytes
    seconds, exposed = step(now)
    if exposed < MIN_EXPOSED_SHARE * seconds:
        return []
    held = request.model.parameters / (layout.tp * layout.pp)

    def passing(size: float) -> float:
        return float(streaming_seconds(size, where.hardware))

    found: list[tuple[str, float, float, float]] = []
    if replicas and now > 2:
        found.append((BF16, 2 / now, seconds - step(2.0)[0], passing(CAST_BYTES * held)))
    if sites and layout.tp * layout.pp == 1:
        sent = sum(compressed_elements(p.shape, RANK) for p in parameters)
        share = sent / sum(p.elements for p in parameters)
        matrices = [p for p in parameters if compressed_elements(p.shape, RANK) < p.elements]  # others are sent whole
        work = passing(COMPRESSION_PASSES * 4 * sum(p.elements for p in matrices))
        work += len(matrices) * 2 * RANK * KERNELS_PER_COLUMN * LAUNCH_SECONDS
        found.append((POWERSGD, share * 4 / now, seconds - step(4 * share)[0], work))
    if sites:
        island = max(1, where.fabric.island_ranks // layout.tp)
        meeting = float(collective_seconds("all_reduce", 4 * held, layout.dp * layout.cp, island, fabric=where.fabric))
        meeting += passing(OUTER_PASSES * 4 * held)
        found.append((SITES, 4 / now / LOCAL_STEPS, exposed, meeting / LOCAL_STEPS))
    return [
        {
            "setting": setting, "sent_share": share, "exposed_seconds": exposed, "saves_seconds": saves,
            "costs_seconds": costs, "pays": saves > costs,
        }
        for setting, share, saves, costs in found
    ]  # fmt: skip
