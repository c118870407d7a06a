"""What the loader can supply against what the step demands, before the run: by stage, and never guessed.

A stage that nobody measured is None. Prepared data is read, packed and copied; a stream is tokenised as well, for which
the measured rate of this machine's cores stands in until a run has measured the stream itself.
"""

from __future__ import annotations

from typing import Any

from ironlaw.config import RunConfig
from ironlaw.data.supply import recall
from ironlaw.machine.profile import Profile

PREPARED, STREAMED = ("read", "pack", "copy"), ("read", "tokenise", "pack", "copy")


def data_supply(config: RunConfig, profile: Profile, tokens_per_second: float) -> dict[str, Any]:
    """The plan's line about data; rates in tokens per second. `tokens_per_second` is what the planned step consumes."""
    known = recall(config.data, config.sequence)
    stages: dict[str, float | None] = dict.fromkeys(STREAMED if config.data.streaming else PREPARED)
    basis = "not measured: no run has loaded this source in this way yet"
    supply = None
    if known is not None:
        stages |= known["stages"]
        supply, basis = known["tokens_per_second"], f"measured by the loader of the last such run, {known['measured']}"
    elif config.data.streaming and profile.tokenizer_tokens_per_second:
        stages["tokenise"] = profile.tokenizer_tokens_per_second
        basis = f"tokenising measured on {profile.created[:10]} with all threads and no step beside it; others not"
    measured = {stage: rate for stage, rate in stages.items() if rate is not None}
    limit = supply if supply is not None else min(measured.values(), default=None)
    return {
        "demand_tokens_per_second": tokens_per_second,
        "supply_tokens_per_second": supply,
        "stage_tokens_per_second": stages,
        "slowest_stage": min(measured, key=lambda stage: measured[stage]) if measured else None,
        "times_demand": None if limit is None else limit / tokens_per_second,
        "basis": basis,
    }
