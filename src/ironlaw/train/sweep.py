"""`ironlaw compress --sweep`: every format and method within a time, and which of them nothing else beats.

found = sweep_formats(Path("runs/demo"), engine_decoder, budget_seconds=600)
found["points"][0]["loss"], found["points"][0]["frontier"], found["left_out"]
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

from ironlaw.catalog.formats import METHODS, Method, number_format, read_target, weight_formats
from ironlaw.errors import UserError
from ironlaw.machine.profile import load_profile
from ironlaw.numerics.compression import check_method
from ironlaw.numerics.quantized_linear import KERNELS
from ironlaw.train.compression import MakeDecoder, compressed, open_source

Candidate = tuple[str, Method, bool]  # what `--to` takes, the method, embedding and output layer too


def candidates() -> list[Candidate]:
    """Formats with a kernel first; of one format rounding to nearest first, then what takes longer. Of formats that
    hold the same weights, which differ in how a step finds its scales, the first one of the table."""
    fast = list(dict.fromkeys(kernel.format for kernel in KERNELS))
    apart = {number_format(name).of_weights: name for name in reversed(weight_formats())}.values()
    formats = [*fast, *(name for name in apart if name not in fast)]
    plain: list[Candidate] = [(name, "rtn", False) for name in formats]
    whole: list[Candidate] = [(name, "rtn", True) for name in fast]
    narrow = [name for name in formats if number_format(name).bits < 8]  # of 8 bits nothing is left to win back
    measured: list[Candidate] = [(name, method, False) for method in METHODS[1:] for name in narrow]
    return [
        *plain,
        *whole,
        *measured,
        ("int8", "smoothquant", False),
        ("int4,2:4", "gptq", False),
        ("2:4", "gptq", False),
    ]


def sweep_formats(
    path: Path, decoder: MakeDecoder, budget_seconds: float, *, data: str | None = None,
    say: Callable[[str], None] | None = None,
) -> dict[str, Any]:  # fmt: skip
    """Points as JSON, the model as it is first: `to`, `method`, `whole`, `bytes`, `loss` (nats per held-out token, by
    the kernels that decode), `tokens_per_second` (the model's median, times what each was faster in turns with it),
    `bytes_read` per token, `kernels`, `frontier`.

    A candidate begins only where the longest of its method so far still fits; `left_out` names the others. UserError as
    `compress_run` has them.
    """
    say = say or (lambda message: None)
    began = time.monotonic()
    source = open_source(path, data, say, lambda model: None)
    before = decoder(source.copy(), {})
    points: list[dict[str, Any]] = []
    left_out: list[str] = []
    longest: dict[Method, float] = {}
    for to, method, whole in candidates():
        target, started = read_target(to), time.monotonic()
        try:
            check_method(source.model, target, method)
        except UserError:  # a method that this format or model does not take is no candidate
            continue
        if points and started - began + longest.get(method, max(longest.values())) > budget_seconds:
            left_out.append(_name(to, method, whole))
            continue
        say(f"{len(points) + 1}: {_name(to, method, whole)}")
        result = compressed(source, target, before, decoder, method, whole=whole)[0]
        found = asdict(result)
        points.append({
            "name": _name(to, method, whole), "to": to, "method": method, "whole": whole, "bytes": found["bytes_after"],
            "loss": found["loss_after"] if result.loss_served is None else result.loss_served,
            "tokens_per_second": found["tokens_per_second_after"], "bytes_read": result.bytes_read,
            "tokens_per_second_before": found["tokens_per_second_before"], "kernels": result.kernels,
        })  # fmt: skip
        longest[method] = max(longest.get(method, 0.0), time.monotonic() - started)
    usual = statistics.median(p["tokens_per_second_before"] for p in points)
    for point in points:  # both took turns: what else ran on the machine meanwhile is in both
        point["tokens_per_second"] *= usual / point["tokens_per_second_before"]
    points.insert(0, {
        "name": f"as it is ({result.precision_before})", "to": None, "method": None, "whole": True, "kernels": {},
        "bytes": source.bytes, "loss": source.loss, "bytes_read": before.bytes_read,
        "tokens_per_second": usual,
    })  # fmt: skip
    for point in points:
        point["frontier"] = not any(_beats(other, point) for other in points)
    return {
        "schema": 1, "source": str(path), "held_out_tokens": result.held_out_tokens, "points": points,
        "left_out": left_out, "seconds": time.monotonic() - began,
        "read_bytes_per_second": _read_rate(),
    }  # fmt: skip


def _name(to: str, method: str, whole: bool) -> str:
    return f"{to} {method}" + (", all layers" if whole else "")


def _beats(one: dict[str, Any], other: dict[str, Any]) -> bool:
    """Nowhere worse and somewhere better. Of what no kernel multiplies speed is the model's, and says nothing."""
    gains = [other["bytes"] - one["bytes"], other["loss"] - one["loss"]]
    if one["kernels"] or other["kernels"]:
        gains.append(one["tokens_per_second"] - other["tokens_per_second"])
    return min(gains) >= 0 and max(gains) > 0


def _read_rate() -> float | None:
    """Bytes per second that this machine copies at, of `ironlaw measure`; None where nobody measured it."""
    try:
        return load_profile().copy_bytes_per_second
    except UserError:
        return None
