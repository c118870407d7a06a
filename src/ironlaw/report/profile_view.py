"""A measured machine on the terminal: what each kind of kernel attains here."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Protocol

from rich.console import Console
from rich.text import Text

from ironlaw import units
from ironlaw.report.tables import bar, heading, paragraph, show, table

# Tensors that a kernel reads and writes per element, each once: its least traffic.
TENSORS_MOVED = {
    "add": 3, "add_in_place": 3, "multiply": 3, "multiply_backward": 5, "cast": 1.5, "sum_rows": 1,
    "concatenate": 2, "rotary": 2, "embedding_forward": 2, "loss_forward": 2, "loss_backward": 2, "adamw": 7,
    "clip": 3, "gelu_forward": 2, "gelu_backward": 3, "gelu_tanh_forward": 2, "gelu_tanh_backward": 3,
    "silu_forward": 2, "silu_backward": 3, "layernorm_forward": 2, "layernorm_backward": 3,
    "rmsnorm_forward": 2, "rmsnorm_backward": 3,
}  # fmt: skip
ELEMENT_BYTES = {"fp32": 4, "bf16": 2, "fp16": 2}
MATMULS = {
    "matmul_bias": "forward",
    "matmul": "input gradient",
    "matmul_weight_gradient": "weight gradient",
}


class Fit(Protocol):
    @property
    def fixed_seconds(self) -> float: ...
    @property
    def peak_flops_per_second(self) -> float: ...
    @property
    def error(self) -> float: ...


class Curve(Protocol):
    @property
    def elements(self) -> Sequence[float]: ...
    @property
    def seconds(self) -> Sequence[float]: ...


Attention = Mapping[str, Mapping[str, Sequence[tuple[int, int, float]]]]


class Profile(Protocol):
    """What is shown of a machine profile."""

    device: str
    name: str
    created: str
    versions: dict[str, str]
    threads: int
    memory_bytes: int
    runtime_bytes: int
    copy_bytes_per_second: float
    small_operation_seconds: float
    storage_bytes_per_second: float | None
    tokenizer_tokens_per_second: float | None

    @property
    def matmul(self) -> Mapping[str, Mapping[str, Fit]]: ...
    @property
    def onednn(self) -> Mapping[str, Fit]: ...
    @property
    def curves(self) -> Mapping[str, Mapping[str, Curve]]: ...
    @property
    def attention(self) -> Attention: ...
    @property
    def blocked_attention(self) -> Attention: ...


def show_profile(console: Console, profile: Profile, slowdown: Mapping[str, float]) -> None:
    """This machine's ceilings, as `measure` found them. `slowdown`: kind of kernel -> typical time over the best."""
    paragraph(console, f"{profile.name} ({profile.device}, {profile.threads} threads)", style="bold")
    versions = ", ".join(f"{name} {version}" for name, version in profile.versions.items())
    paragraph(console, f"measured {profile.created[:16].replace('T', ' ')} with {versions}", style="dim")
    _singles(console, profile, slowdown)
    _matmul(console, profile)
    _attention(console, "Causal attention by the fused kernel, per unmasked score", profile.attention)
    if profile.blocked_attention:
        _attention(console, "The same in blocks of queries", profile.blocked_attention)
    _streaming(console, profile)


def _singles(console: Console, profile: Profile, slowdown: Mapping[str, float]) -> None:
    console.print()
    made = table("", "measured", "what it is", left=("what it is",))
    rows = (
        ("Memory", units.bytes_(profile.memory_bytes), "this process may use"),
        ("Bare process", units.bytes_(profile.runtime_bytes), "that takes a training step of almost nothing"),
        ("Copy", units.rate(profile.copy_bytes_per_second, "B"), "read plus written, 32 MiB"),
        ("Small operation", units.seconds(profile.small_operation_seconds), "dispatch from Python"),
        ("Storage read", _rate(profile.storage_bytes_per_second, "B"), "not in the page cache"),
        ("Tokenizer", _rate(profile.tokenizer_tokens_per_second, "token"), "all threads"),
        *(
            (f"Interference, {kind}", f"{ratio:.2f} x", "typical time over the best; neighbours, other programs")
            for kind, ratio in slowdown.items()
        ),
    )
    for name, value, meaning in rows:
        made.add_row(name, Text(value, style="bold"), Text(meaning, style="dim"))
    show(console, made)


def _rate(value: float | None, unit: str) -> str:
    return "not measured" if value is None else units.rate(value, unit)


def _matmul(console: Console, profile: Profile) -> None:
    heading(console, "Matrix products at their best")
    rows = {**profile.matmul, **({"fp32 by oneDNN": profile.onednn} if profile.onednn else {})}
    fits = [(kernel, precision, fit) for precision, row in rows.items() for kernel, fit in row.items()]
    best = max((fit.peak_flops_per_second for _, _, fit in fits), default=1.0)
    made = table("product", "precision", "large ones", "fixed cost", "fit error", " ", left=("precision", " "))
    for kernel, precision, fit in fits:
        made.add_row(
            MATMULS.get(kernel, kernel), precision, Text(units.rate(fit.peak_flops_per_second, "FLOP"), style="bold"),
            units.seconds(fit.fixed_seconds), units.percent(fit.error), bar(fit.peak_flops_per_second / best, width=8),
        )  # fmt: skip
    show(console, made)
    paragraph(console, "fit error: median difference between the fitted formula and its own points", 2, "dim")


def _attention(console: Console, title: str, measured: Attention) -> None:
    heading(console, title)
    made = table("tokens", "head size", *(f"{p} {d}" for p, row in measured.items() for d in row))
    table_of = [{(t, d): s for t, d, s in points} for row in measured.values() for points in row.values()]
    for tokens, size in sorted({key for column in table_of for key in column}):
        cells = (units.seconds(column.get((tokens, size))) for column in table_of)
        made.add_row(str(tokens), str(size), *cells)
    show(console, made)


def _streaming(console: Console, profile: Profile) -> None:
    heading(console, "Streaming kernels at their largest size, least traffic per second")
    made = table("kernel", *profile.curves)
    kernels = dict.fromkeys(kernel for row in profile.curves.values() for kernel in row)
    for kernel in kernels:
        cells = (_bandwidth(kernel, precision, row.get(kernel)) for precision, row in profile.curves.items())
        made.add_row(kernel.replace("_", " "), *cells)
    show(console, made)
    paragraph(console, "–: runs in fp32 only, or its traffic depends on the data", 2, "dim")


def _bandwidth(kernel: str, precision: str, curve: Curve | None) -> str:
    moved = TENSORS_MOVED.get(kernel)
    if curve is None or moved is None:
        return units.NOT_KNOWN
    total = moved * ELEMENT_BYTES.get(precision, 4) * curve.elements[-1]
    return units.rate(total / curve.seconds[-1], "B")
