"""A real measurement of this machine, too short to be good: every figure there, finite and of the right sign."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from ironlaw.config import RunConfig, build_config
from ironlaw.machine import interference
from ironlaw.machine.profile import STEP_PHASES, Profile, load_profile, save_profile
from ironlaw.plan.step import choose_precision, plan_run


@pytest.fixture(scope="module")
def measured(tmp_path_factory: pytest.TempPathFactory) -> Profile:
    from ironlaw.machine import measure as module

    fractions: list[float] = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(tmp_path_factory.mktemp("cache")))
        # The largest sizes are half a minute of work; the others go through the same code.
        sizes = replace(module.CPU_SIZES, elements=(2**12, 2**16, 2**19), head_sizes=(32, 64), tokens=(64, 512))
        patch.setattr(module, "CPU_SIZES", sizes)
        profile = module.measure(budget_seconds=1, threads=1, progress=lambda done, _: fractions.append(done))
    assert fractions == sorted(fractions) and all(0 <= fraction <= 1 for fraction in fractions)
    return profile


def numbers(value: Any) -> list[float]:
    if isinstance(value, dict):
        return [n for inner in value.values() for n in numbers(inner)]
    if isinstance(value, list | tuple):
        return [n for inner in value for n in numbers(inner)]
    return [float(value)] if isinstance(value, int | float) else []


@pytest.mark.slow
def test_every_figure_is_finite_and_none_is_negative(measured: Profile, tmp_path: Path) -> None:
    path = save_profile(measured, tmp_path / "this.json")
    assert load_profile(path) == measured
    document = json.loads(json.dumps(measured.to_json(), allow_nan=False))
    signed = {"corrections", "tiny_block_seconds"}  # logarithms of ratios; a difference of two times

    def without(value: Any) -> Any:
        if isinstance(value, dict):
            return {key: without(inner) for key, inner in value.items() if key not in signed}
        return value

    assert all(math.isfinite(n) for n in numbers(document))
    assert all(n >= 0 for n in numbers(without(document)))
    for curves in measured.curves.values():
        for curve in curves.values():
            assert all(seconds > 0 for seconds in curve.seconds)
    for shares in measured.reference_step_shares.values():
        assert tuple(shares) == STEP_PHASES and sum(shares.values()) > 0.99


@pytest.mark.long
def test_more_work_takes_longer(measured: Profile) -> None:
    for kernel in ("add", "gelu_forward", "layernorm_backward", "adamw"):
        seconds = measured.curves["fp32"][kernel].seconds
        # Eight times the elements, so that no disturbance turns it round.
        assert seconds[-1] > 1.5 * seconds[1], kernel
    for fit in measured.matmul["fp32"].values():
        assert fit.at(1024, 1024, 1024) > 4 * fit.at(256, 256, 256)
        assert 1e8 < fit.peak_flops_per_second < 1e14
    assert measured.matmul_peak("fp32") > 1e8
    assert measured.copy_bytes_per_second > 1e8
    assert 1e-8 < measured.small_operation_seconds < 1e-3


@pytest.mark.long
def test_the_machine_is_at_best_as_fast_as_its_best(measured: Profile) -> None:
    assert all(ratio > 0.9 for kind in interference.KINDS for ratio in measured.interference[kind])
    assert all(0 <= share <= 1 for share in measured.interference.get(interference.OTHER_LOAD, []))
    typical = interference.typical(measured)
    assert typical.keys() == {"compute", "memory"} and all(value >= 0.95 for value in typical.values())
    assert measured.probe.keys() == {"compute", "memory"}


@pytest.mark.slow
@pytest.mark.parametrize("family", ["gpt", "llama", "qwen"])
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_every_kernel_of_a_plan_was_measured(
    measured: Profile, tiny_document: Callable[..., dict[str, Any]], user_cache: Path, family: str, precision: str
) -> None:
    llama = {
        "kv_heads": 1, "gated_ffn": True, "activation": "silu", "norm": "rmsnorm", "positions": "rope", "bias": False,
        "tied": False,
    }  # fmt: skip
    model = {"gpt": {}, "llama": llama, "qwen": llama | {"qk_norm": True}}[family]
    config: RunConfig = build_config(
        tiny_document(model, train={"precision": precision, "micro_batch": 2, "threads": 1})
    )
    ledger = plan_run(config, measured)
    assert ledger.totals["step_seconds"].value > 0
    assert all(line.seconds is not None and line.seconds >= 0 for line in ledger.lines)
    assert choose_precision(config.model_copy(update={"train": config.train.model_copy(update={"precision": "auto"})}),
                            measured).value in ("fp32", "bf16")  # fmt: skip


@pytest.mark.slow
def test_a_later_measurement_keeps_the_better_times(measured: Profile, tmp_path: Path) -> None:
    from ironlaw.machine.measure import Sampler

    sampler = Sampler(("curve", "fp32", "add", 4096), [lambda: None])
    sampler.seconds = [3.0, 2.0, 4.0]
    assert 2.0 <= sampler.best() < 3.0
    sampler.earlier = 1.0
    assert sampler.best() == 1.0 and sampler.ratios() == [3.0, 2.0, 4.0]
    sampler.earlier = 9.0
    assert sampler.best() < 3.0


@pytest.mark.slow
def test_noise_takes_longer_than_the_product_with_it(measured: Profile) -> None:
    """Drawn number by number: a dropout at the rate of a copy was planned forty times too fast."""
    assert measured.curve("noise", "fp32").at(2**19) > 2 * measured.curve("multiply", "fp32").at(2**19)


def test_large_products_of_a_slow_type_are_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    from ironlaw.machine import measure as module
    from ironlaw.machine.kernels import Pool

    def shapes() -> set[tuple[int, int, int]]:
        samplers = module._products(Pool(torch.device("cpu")), module.CPU_SIZES, torch.float32, "fp32")
        return {sampler.key[3] for sampler in samplers}

    assert (512, 512, 512) in shapes()
    monkeypatch.setattr(module, "timed", lambda call: 0.1)  # as without instructions for the type
    assert shapes() == {(16, 16, 16), (64, 64, 64), (256, 256, 256)}
