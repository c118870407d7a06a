"""Plan and run of a layout have the same keys, and little of what ranks do has no name."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from ironlaw.config import build_config
from ironlaw.ledger import UNNAMED, Ledger, Phase

LLAMA = {
    "heads": 4, "kv_heads": 2, "ffn": 48, "gated_ffn": True, "activation": "silu", "norm": "rmsnorm",
    "positions": "rope", "bias": False, "tied": False,
}  # fmt: skip
MOE = LLAMA | {"ffn": 24, "moe": {"experts": 4, "experts_per_token": 2, "balance_loss": 0.1}}
GPT = {"heads": 4}
TWO: list[tuple[dict[str, Any], dict[str, Any]]] = [(LLAMA, {"layout.zero": 3}), (GPT, {"layout.pp": 2})]
MORE_OF_TWO = [
    (GPT, {}), (GPT, {"layout.tp": 2, "layout.sp": "true"}), (LLAMA, {"layout.zero": 1}),
    (GPT, {"layout.cp": 2}), (MOE, {"layout.ep": 2}),
]  # fmt: skip
FOUR = [
    (GPT, {"layout.tp": 2, "layout.zero": 3}), (LLAMA, {"layout.pp": 2, "train.micro_batch": 1}),
    (GPT, {"layout.tp": 2, "layout.pp": 2}), (LLAMA, {"layout.cp": 2, "layout.zero": 1}),
]  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize(
    ("size", "cases"),
    [
        pytest.param(2, TWO, id="2"),
        pytest.param(2, MORE_OF_TWO, id="2-more", marks=pytest.mark.long),
        pytest.param(4, FOUR, id="4", marks=pytest.mark.long),
    ],
)
def test_a_run_has_the_keys_of_its_plan(
    size: int, cases: list[Any], tiny_document: Callable[..., dict[str, Any]], on_ranks: Callable[..., Any],
    tmp_path: Path, known_links: None,
) -> None:  # fmt: skip
    wanted = []
    for number, (model, settings) in enumerate(cases):
        document = tiny_document(
            model, layout={}, train={"steps": 14, "micro_batch": 2, "profile_steps": 3}, evaluation={"every": 0},
            checkpoint={"every": 0},
        )  # fmt: skip
        path = tmp_path / f"{number}.toml"
        path.write_text(build_config(document).to_toml(), encoding="utf-8")
        wanted.append({"task": "run", "config": str(path), "set": settings})
    for (_, settings), (first, *_) in zip(cases, on_ranks(size, wanted), strict=True):
        plan, run = (Ledger.load(Path(first["run"]) / name) for name in ("plan.json", "ledger.json"))
        assert {line.key for line in plan.lines} == {line.key for line in run.lines}, settings
        computed = [line for line in run.lines if line.phase in (Phase.FORWARD, Phase.BACKWARD)]
        unnamed = sum(line.seconds or 0.0 for line in computed if line.operation == UNNAMED)
        assert unnamed < 0.25 * sum(line.seconds or 0.0 for line in computed), settings  # 2 to 5% when idle
        waited = sum(line.seconds or 0.0 for line in run.select(phase=Phase.COMMUNICATION))
        assert waited == pytest.approx(run.phase_seconds[Phase.COMMUNICATION], rel=1e-6), settings
