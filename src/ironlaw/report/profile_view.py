"""View of a measured machine: the rates that each kind of kernel attains."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from ironlaw import units
from ironlaw.catalog.formats import number_format
from ironlaw.report.document import BAR, Bar, Document, Row, dim, quantity, strong

Attention = Mapping[str, Mapping[str, Sequence[tuple[int, int, float]]]]

# Tensors that a kernel reads and writes, per element, each counted once: its minimum traffic.
TENSORS_MOVED = {
    "add": 3, "add_in_place": 3, "multiply": 3, "multiply_backward": 5, "cast": 1.5, "sum_rows": 1,
    "concatenate": 2, "rotary": 2, "embedding_forward": 2, "loss_forward": 2, "loss_backward": 2, "adamw": 7,
    "clip": 3, "gelu_forward": 2, "gelu_backward": 3, "gelu_tanh_forward": 2, "gelu_tanh_backward": 3,
    "silu_forward": 2, "silu_backward": 3, "layernorm_forward": 2, "layernorm_backward": 3,
    "rmsnorm_forward": 2, "rmsnorm_backward": 3,
}  # fmt: skip
MATMULS = {
    "matmul_bias": "forward",
    "matmul": "input gradient",
    "matmul_weight_gradient": "weight gradient",
}


def profile_view(profile: Any, slowdown: Mapping[str, float]) -> Document:
    """Return the ceilings of a machine profile. `slowdown`: kind of kernel -> typical time over the best."""
    view = Document()
    versions = ", ".join(f"{name} {version}" for name, version in profile.versions.items())
    measured = f"measured {profile.created[:16].replace('T', ' ')} with {versions}"
    view.title(f"{profile.name} ({profile.device}, {profile.threads} threads)", below=measured)
    _singles(view, profile, slowdown)
    _matmul(view, profile)
    _attention(view, "Causal attention by PyTorch's fused kernel, per unmasked score", profile.attention)
    if profile.native_attention:
        _attention(view, "The same by Ironlaw's own kernel", profile.native_attention)
    _streaming(view, profile)
    return view


def _singles(view: Document, profile: Any, slowdown: Mapping[str, float]) -> None:
    bare, small = "that takes a training step of almost nothing", "dispatch from Python"
    if profile.device != "cpu":
        bare, small = (
            "what a device holds beside tensors",
            "the device's own time; dispatch of a block is measured apart",
        )
    rows = (
        ("Memory", profile.memory_bytes, units.bytes_, "this process may use"),
        ("Bare process", profile.runtime_bytes, units.bytes_, bare),
        ("Copy", profile.copy_bytes_per_second, _bytes_rate, "read plus written"),
        ("Small operation", profile.small_operation_seconds, units.seconds, small),
        ("Storage read", profile.storage_bytes_per_second, _bytes_rate, "not in the page cache"),
        ("Tokenizer", profile.tokenizer_tokens_per_second, units.token_rate, "all threads"),
        *((f"Interference, {kind}", ratio, "{:.2f} x".format, "typical time over the best; neighbours, other programs")
          for kind, ratio in slowdown.items()),
    )  # fmt: skip
    view.table(
        ["", "measured", "<what it is"],
        [[name, quantity(value, show, role="strong"), dim(meaning)] for name, value, show, meaning in rows],
    )


def _bytes_rate(value: float | None) -> str:
    return units.rate(value, "B")


def _matmul(view: Document, profile: Any) -> None:
    view.heading("Matrix products at their best")
    products = {**profile.matmul, **({"fp32 by oneDNN": profile.onednn} if profile.onednn else {})}
    fits = [(kernel, precision, fit) for precision, row in products.items() for kernel, fit in row.items()]
    best = max((fit.peak_flops_per_second for _, _, fit in fits), default=1.0)
    rows: list[Row] = []
    for kernel, precision, fit in fits:
        peak = strong(units.rate(fit.peak_flops_per_second, "FLOP"))
        rows.append([MATMULS.get(kernel, kernel), precision, peak, units.seconds(fit.fixed_seconds),
                     units.percent(fit.error), Bar(fit.peak_flops_per_second / best, width=8)])  # fmt: skip
    view.table(
        ["product", "<precision", "large ones", "fixed cost", "fit error", BAR], rows,
        caption="fit error: median difference between the fitted formula and its own points",
    )  # fmt: skip


def _attention(view: Document, title: str, measured: Attention) -> None:
    view.heading(title)
    columns = {f"{p} {d}": {(t, s): seconds for t, s, seconds in points}
               for p, row in measured.items() for d, points in row.items()}  # fmt: skip
    sizes = sorted({key for column in columns.values() for key in column})
    rows = [[str(tokens), str(size), *(units.seconds(column.get((tokens, size))) for column in columns.values())]
            for tokens, size in sizes]  # fmt: skip
    view.table(["tokens", "head size", *columns], rows)


def _streaming(view: Document, profile: Any) -> None:
    view.heading("Streaming kernels at their largest size, least traffic per second")
    kernels = dict.fromkeys(kernel for row in profile.curves.values() for kernel in row)
    rows = [
        [kernel.replace("_", " "), *(_bandwidth(kernel, p, row.get(kernel)) for p, row in profile.curves.items())]
        for kernel in kernels
    ]
    caption = "–: runs in fp32 only, or its traffic depends on the data"
    view.table(["kernel", *profile.curves], rows, caption=caption)


def _bandwidth(kernel: str, precision: str, curve: Any) -> str:
    moved = TENSORS_MOVED.get(kernel)
    if curve is None or moved is None:
        return units.NOT_KNOWN
    total = moved * number_format(precision).bytes_per_element() * curve.elements[-1]
    return units.rate(total / curve.seconds[-1], "B")
