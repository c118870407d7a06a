"""What a compression saved and what it cost, on the terminal."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from rich.console import Console

from ironlaw import units
from ironlaw.report.tables import paragraph, show, table


def show_compression(console: Console, source: str, out: str, found: Mapping[str, Any]) -> None:
    rows = table("", "weights", "loss, nats per token", "tokens per second here")
    for name, when in ((source, "before"), (out, "after")):
        rows.add_row(
            name, units.bytes_(found[f"bytes_{when}"]), f"{found[f'loss_{when}']:.4f}",
            f"{found[f'tokens_per_second_{when}']:.1f}",
        )  # fmt: skip
    rows.add_row(
        "change", f"{found['bytes_before'] / found['bytes_after']:.2f} times smaller",
        f"{found['loss_after'] - found['loss_before']:+.4f}",
        f"{found['tokens_per_second_after'] / found['tokens_per_second_before']:.2f} times",
    )  # fmt: skip
    show(console, rows)
    share = found["compressed_weights"] / found["weights"]
    paragraph(
        console,
        f"{found['to']} by {found['method']}: {share:.0%} of the weights, the others in {found['precision_before']}. "
        f"Loss of {found['held_out_tokens']:,} held-out tokens, in fp32 arithmetic. {_decoding(found)}",
        indent=2, style="dim",
    )  # fmt: skip


def _decoding(found: Mapping[str, Any]) -> str:
    if not found["kernels"]:
        return "No kernel here multiplies this format: weights are dequantised when they are read, the file is smaller."
    kernels = ", ".join(f"{name} ({count} layers)" for name, count in found["kernels"].items())
    return f"Decoded by {kernels}, whose loss is {found['loss_served'] - found['loss_before']:+.4f}."
