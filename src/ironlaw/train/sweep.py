"""`ironlaw compress --sweep`: measures every format and method within a time budget, and finds the Pareto frontier.

found = sweep_formats(Path("runs/demo"), engine_decoder, budget_seconds=600)
found["points"][0]["loss"], found["points"][0]["frontier"], found["left_out"]
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from ironlaw.catalog.formats import METHODS, Method, number_format, read_target, weight_formats
from ironlaw.errors import UserError
from ironlaw.machine.profile import earlier_profile
from ironlaw.numerics.compression import check_method
from ironlaw.numerics.quantized_linear import KERNEL_FORMATS
from ironlaw.train.compression import MakeDecoder, measure_compression, open_source

Candidate = tuple[str, Method, bool]  # format as for `--to`, method, whether embedding and output layer are included


def candidates() -> list[Candidate]:
    """Return the candidates, with fast kernels and fast methods first. Formats with equal stored weights, which differ
    only in how training finds scales, are represented by the first one of the table."""
    fast = list(KERNEL_FORMATS)
    apart = {number_format(name).of_weights: name for name in reversed(weight_formats())}.values()
    formats = [*fast, *(name for name in apart if name not in fast)]
    plain: list[Candidate] = [(name, "rtn", False) for name in formats]
    whole: list[Candidate] = [(name, "rtn", True) for name in fast]
    narrow = [name for name in formats if number_format(name).bits < 8]  # at 8 bits there is hardly a loss to reduce
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
    say: Callable[[str], None] = lambda message: None,
) -> dict[str, Any]:  # fmt: skip
    """Return JSON with a list of `points`, the original model first: `to`, `method`, `whole`, `bytes`, `loss` (nats per
    held-out token, with the decoding kernels), `tokens_per_second` (the original's median times the speedup measured in
    turns with it), `bytes_read` per token, `kernels`, `frontier`.

    A candidate starts only if the longest run of its method so far fits in the remaining time; `left_out` lists the
    others. An interruption ends the sweep; `interrupted` is then true. Raises UserError as `compress_run` does.
    """
    began = time.monotonic()
    source = open_source(path, data, say, lambda model: None)
    before = decoder(source.copy(), {})
    points: list[dict[str, Any]] = []
    left_out: list[str] = []
    longest: dict[Method, float] = {}
    interrupted = False
    for to, method, whole in candidates():
        target, started = read_target(to), time.monotonic()
        try:
            check_method(source.model, target, method)
        except UserError:  # the format or model does not support the method
            continue
        if points and started - began + longest.get(method, max(longest.values())) > budget_seconds:
            left_out.append(_name(to, method, whole))
            continue
        say(f"{len(points) + 1}: {_name(to, method, whole)}")
        try:
            result = measure_compression(source, target, before, decoder, method, whole=whole)[0]
        except KeyboardInterrupt:
            if not points:
                raise
            interrupted = True
            break
        points.append({
            "name": _name(to, method, whole), "to": to, "method": method, "whole": whole, "bytes": result.bytes_after,
            "loss": result.loss_after if result.loss_served is None else result.loss_served,
            "tokens_per_second": result.tokens_per_second_after, "bytes_read": result.bytes_read,
            "tokens_per_second_before": result.tokens_per_second_before, "kernels": result.kernels,
        })  # fmt: skip
        longest[method] = max(longest.get(method, 0.0), time.monotonic() - started)
    usual = statistics.median(p["tokens_per_second_before"] for p in points)
    for point in points:  # speeds were measured in turns, so that other load on the machine cancels in the ratio
        point["tokens_per_second"] *= usual / point["tokens_per_second_before"]
    points.insert(0, {
        "name": f"as it is ({result.precision_before})", "to": None, "method": None, "whole": True, "kernels": {},
        "bytes": source.bytes, "loss": source.loss, "bytes_read": before.bytes_read,
        "tokens_per_second": usual,
    })  # fmt: skip
    profile = earlier_profile()
    for point in points:
        point["frontier"] = not any(_dominates(other, point) for other in points)
    return {
        "schema": 1, "source": str(path), "held_out_tokens": result.held_out_tokens, "points": points,
        "left_out": left_out, "seconds": time.monotonic() - began,
        "read_bytes_per_second": None if profile is None else profile.copy_bytes_per_second,
    } | ({"interrupted": True} if interrupted else {})  # fmt: skip


def _name(to: str, method: str, whole: bool) -> str:
    return f"{to} {method}" + (", all layers" if whole else "")


def _dominates(one: dict[str, Any], other: dict[str, Any]) -> bool:
    """Whether `one` is nowhere worse and somewhere better. Speed counts only if either is decoded by a kernel."""
    gains = [other["bytes"] - one["bytes"], other["loss"] - one["loss"]]
    if one["kernels"] or other["kernels"]:
        gains.append(one["tokens_per_second"] - other["tokens_per_second"])
    return min(gains) >= 0 and max(gains) > 0
