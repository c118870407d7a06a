"""MFU under the conventions in use: the same run reads differently under each, so each says what it counts.

Ironlaw's own (`mfu`): exact matrix FLOPs of the model, the masked half of causal attention not counted, over the dense
peak of the precision in use. The others are for comparing with figures printed elsewhere.
"""

from __future__ import annotations

from ironlaw.ledger import Estimate, Origin
from ironlaw.model.config import ModelConfig
from ironlaw.plan.cluster.candidates import Candidates


def other_conventions(
    model: ModelConfig, candidates: Candidates, step: Estimate, peak_flops_per_second: float
) -> dict[str, Estimate]:
    """`mfu_palm`, `mfu_6nd` and `hfu` of the first job; `peak_flops_per_second` is that of all accelerators."""
    tokens = float(candidates.sequence[0] * candidates.global_batch[0])
    attention = 6 * model.layers * (model.query_size + model.mixed_size) * float(candidates.sequence[0])
    n = model.active_parameters  # all of them in a dense model
    which = "all parameters" if model.moe is None else f"the {n:,} parameters that a token meets"
    counted = {
        "mfu_palm": (
            (6 * n + attention) * tokens,
            f"6 N + 12 L H Q S per token, {which}, masked attention counted (PaLM, arXiv 2204.02311, app. B)",
        ),
        "mfu_6nd": (6 * n * tokens, f"6 N per token, {which}, no attention"),
        "hfu": (float(candidates.hardware_flops()[0]), "matrix FLOPs with what is recomputed"),
    }
    return {name: _share(flops, basis, step, peak_flops_per_second) for name, (flops, basis) in counted.items()}


def _share(flops: float, basis: str, step: Estimate, peak: float) -> Estimate:
    assert step.low is not None and step.high is not None
    at = [flops / peak / seconds for seconds in (step.value, step.high, step.low)]
    return Estimate(at[0], Origin.CALCULATED, f"{basis}; over dense peak and step time", at[1], at[2])
