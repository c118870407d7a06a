"""What sending less would be worth: gradients in bf16, PowerSGD, sites that average weights now and then.

    for saver in cluster_savings(request, layout):
        saver.setting, saver.saves_seconds, saver.costs_seconds, saver.pays

Saved is what a step no longer waits for: the plan of the same layout with fewer bytes of gradients. A cost is work that
the setting adds to every step, none of which is hidden:

    bf16        gradients are read in fp32 and written in bf16, and back: 12 bytes of memory traffic per parameter
    powersgd    PyTorch's hook passes over a compressed gradient 11 times in fp32 (add what was left out, copy, three
                products, subtract) and makes its thin matrices orthogonal, 6 small kernels per column, two matrices
                for each gradient
    sites       an all-reduce of the weights in fp32, and the outer step's five passes, every `local_steps` steps: here
                with every replica a site of its own

Savings are exact for the plan's own model of time; what they cost in loss is not planned. PowerSGD needs tuning of rank
and start (arXiv 1905.13727), and DiLoCo's loss was that of ordinary training after 500 local steps in its paper's runs
(arXiv 2311.08105, section 4), not in general.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from ironlaw.machine.efficiency.collectives import collective_seconds
from ironlaw.machine.efficiency.streaming import streaming_seconds
from ironlaw.model.parameters import Parameter, model_parameters
from ironlaw.plan.cluster.estimate import plan_candidates
from ironlaw.plan.cluster.request import ClusterRequest
from ironlaw.workload.collectives import compressed_elements
from ironlaw.workload.layout import Layout

MATERIAL = 0.02
"""Of the step, below which exposed data parallel communication is not worth a setting."""

RANK = 4
LOCAL_STEPS = 500  # arXiv 2311.08105
CAST_BYTES = 2 * (4 + 2)
COMPRESSION_PASSES = 11  # over fp32 elements
OUTER_PASSES = 5
KERNELS_PER_COLUMN = 6
LAUNCH_SECONDS = 5e-6
"""Of one small kernel on an accelerator, assumed: kernels of this size take as long as their launch."""


@dataclass(frozen=True)
class CommunicationSaving:
    """One setting. Seconds are per step; `exposed_seconds`: what a step waits for gradients without it."""

    setting: str
    sent_share: float  # bytes of gradients (or weights) per step, over fp32 gradients at every step
    exposed_seconds: float
    saves_seconds: float
    costs_seconds: float

    @property
    def pays(self) -> bool:
        return self.saves_seconds > self.costs_seconds

    def to_json(self) -> dict[str, Any]:
        return vars(self) | {"pays": self.pays}


def compressed_share(parameters: Sequence[Parameter], rank: int = RANK) -> float:
    """Bytes that PowerSGD sends over those of the gradients."""
    whole = sum(p.elements for p in parameters)
    return sum(compressed_elements(p.shape, rank) for p in parameters) / whole


BF16 = 'communication.gradients = "bf16"'
POWERSGD = f'communication.gradients = "powersgd", rank = {RANK}'
SITES = f"communication.local_steps = {LOCAL_STEPS}"


def cluster_savings(request: ClusterRequest, layout: Layout) -> list[CommunicationSaving]:
    """For a planned layout; empty where its gradients are not waited for."""
    where = request.system
    candidates = request.candidates([layout])
    parameters = model_parameters(request.model)
    replicas = layout.dp > 1
    sites = replicas and layout.zero == 0  # state that all replicas share cannot be a site's own

    def step(gradient_bytes: float) -> tuple[float, float]:
        engine = replace(where.engine, gradient_communication_bytes=gradient_bytes)
        times = plan_candidates(candidates, replace(where, engine=engine)).times
        exposed = times.reduce_exposed + times.gather_exposed + (times.fsdp_exposed if layout.zero >= 2 else 0.0)
        return float(times.step_seconds[0]), float(exposed[0])

    now = where.engine.gradient_communication_bytes
    seconds, exposed = step(now)
    if exposed < MATERIAL * seconds:
        return []
    held = request.model.parameters / (layout.tp * layout.pp)

    def passing(size: float) -> float:
        return float(streaming_seconds(size, where.hardware))

    found = []
    if replicas and now > 2:
        found.append(CommunicationSaving(BF16, 2 / now, exposed, seconds - step(2.0)[0], passing(CAST_BYTES * held)))
    if sites and layout.tp * layout.pp == 1:
        share = compressed_share(parameters)
        matrices = [p for p in parameters if compressed_elements(p.shape, RANK) < p.elements]  # the others travel whole
        work = passing(COMPRESSION_PASSES * 4 * sum(p.elements for p in matrices))
        work += len(matrices) * 2 * RANK * KERNELS_PER_COLUMN * LAUNCH_SECONDS
        found.append(CommunicationSaving(POWERSGD, share * 4 / now, exposed, seconds - step(4 * share)[0], work))
    if sites:
        island = max(1, where.fabric.island_ranks // layout.tp)
        meeting = float(collective_seconds("all_reduce", 4 * held, layout.dp * layout.cp, island, fabric=where.fabric))
        meeting += passing(OUTER_PASSES * 4 * held)
        found.append(CommunicationSaving(SITES, 4 / now / LOCAL_STEPS, exposed, exposed, meeting / LOCAL_STEPS))
    return found
