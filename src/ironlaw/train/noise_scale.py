"""The critical batch size from the gradient noise scale (arXiv 1812.06162, appendix A.1).

Below it, twice the batch needs about half the steps; above it, larger batches help little. It is estimated from the
squared gradient norms of one micro-batch (b sequences) and of the whole batch (B). In the mean |g_b|^2 = |G|^2 + S / b:

    |G|^2 = (B |g_B|^2 - b |g_b|^2) / (B - b),    S = (|g_b|^2 - |g_B|^2) / (1/b - 1/B),    noise scale = S / |G|^2.

Both are averaged over steps before the division, since single estimates are mostly noise.
"""

from __future__ import annotations

from typing import Any

from ironlaw.config import RunConfig
from ironlaw.errors import UserError
from ironlaw.workload.layout import Layout

DECAY = 0.9  # of the averages, per estimate


class NoiseScale:
    def __init__(self) -> None:
        self.signal = self.noise = 0.0

    def observe(self, small: float, small_square: float, large: float, large_square: float) -> None:
        """Add an estimate from two batch sizes in sequences and the squared norms of their mean gradients."""
        signal = (large * large_square - small * small_square) / (large - small)
        noise = (small_square - large_square) / (1 / small - 1 / large)
        self.signal = DECAY * self.signal + (1 - DECAY) * signal
        self.noise = DECAY * self.noise + (1 - DECAY) * noise

    @property
    def sequences(self) -> float | None:
        """The critical batch, or None while the estimates are too noisy."""
        if self.signal <= 0 or self.noise <= 0:
            return None
        return self.noise / self.signal

    def state_dict(self) -> dict[str, Any]:
        return {"signal": self.signal, "noise": self.noise}

    def load_state_dict(self, state_dict: dict[str, Any], /) -> None:
        self.signal, self.noise = float(state_dict["signal"]), float(state_dict["noise"])


def first_part(config: RunConfig, layout: Layout) -> int:
    """Return how many micro-batches of a replica form the small batch. Raises UserError if there are too few for two
    parts."""
    micro_batches = config.train.global_batch // layout.dp // layout.micro_batch
    if layout.pp == 1 and micro_batches > 1:
        return 1
    if layout.pp > 1 and micro_batches % (2 * layout.pp) == 0:
        return micro_batches // 2
    needed = "two" if layout.pp == 1 else f"a multiple of {2 * layout.pp}"
    raise UserError(
        f"train.noise_scale_every compares a part of a step with the whole, and needs {needed} micro-batches per "
        f"replica, not {micro_batches}: lower train.micro_batch, or leave it out"
    )
