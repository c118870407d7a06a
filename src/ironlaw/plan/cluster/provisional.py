"""Stand-in constants of an accelerator generation, for generations without fitted ones."""

from __future__ import annotations

from ironlaw.machine.efficiency import (
    AttentionConstants,
    CollectiveConstants,
    Efficiency,
    Evidence,
    MatmulConstants,
    NetworkConstants,
    StreamingConstants,
)

_ASSUMED = Evidence("assumed", 0, -0.4, 0.4, assumed=True, note="no measurements of this generation")


def provisional_efficiency(generation: str) -> Efficiency:
    """Plausible constants: 90% of peak in a tile, 85% of bandwidth."""
    matmul = MatmulConstants(0.92, 16.0, 150.0, 0.6, 0.85, 1.0, 3e-6, 0.0, throttle_seconds=0.0, evidence=_ASSUMED)
    attention = AttentionConstants(0.75, 16.0, 128.0, 0.3, 0.0, 4e-6, 0.0, 0.85, 0.86, _ASSUMED)
    streaming = StreamingConstants(
        {"copy": 0.88, "elementwise": 0.85, "norm": 0.7, "gated_activation": 0.8}, 2e6, 3e-6, _ASSUMED
    )
    collectives = CollectiveConstants(8e-6, 1.5e-6, 5e-6, 1e6, 0.78, 4.0, 0.0, 0.75, evidence=_ASSUMED)
    return Efficiency(
        generation,
        {"bf16": matmul, "fp8": matmul, "fp8_block": matmul},
        {"flash": attention},
        "flash",
        streaming,
        collectives,
    )


def provisional_network() -> NetworkConstants:
    return NetworkConstants(10e-6, 5e-6, 20e-6, 1e6, 0.85, _ASSUMED)
