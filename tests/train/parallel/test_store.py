"""Checkpoints written under one layout and read under any other, without loss."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

SIX: list[dict[str, Any]] = [
    {"dp": 4},
    {"tp": 2, "pp": 2},
    {"zero": 3},
    {"pp": 4},
    {"tp": 2, "zero": 1, "sp": True},
    {"cp": 2, "zero": 2},
    {"dp": 4},
]
EXPERTS: list[dict[str, Any]] = [
    {"ep": 4},
    {"zero": 3, "ep": 2},
    {"pp": 2, "tp": 2},
    {"dp": 4},
    {"tp": 2, "ep": 2, "zero": 1, "sp": True},
    {"pp": 2, "dp": 2},
    {"ep": 4},
]


@pytest.mark.long
@pytest.mark.parametrize("family", ["gpt", "llama", "deepseek"])
def test_six_layouts_hand_a_checkpoint_on_without_loss(family: str, on_ranks: Callable[..., Any]) -> None:
    case = {
        "task": "reshard",
        "family": family,
        "layouts": EXPERTS if family == "deepseek" else SIX,
    }
    case["model"] = {"dropout": 0.1}
    case["train"] = {"micro_batch": 1 if family != "llama" else 2, "average_decay": 0.9}
    (results,) = on_ranks(4, [case])
    assert results[0]["difference"] == 0.0
    losses = results[0]["losses"]
    assert all(abs(loss - losses[0]) < 1e-5 * losses[0] for loss in losses), losses


def test_a_checkpoint_goes_from_shards_to_stages(on_ranks: Callable[..., Any]) -> None:
    train = {"micro_batch": 2, "average_decay": 0.9}
    case = {"task": "reshard", "layouts": [{"zero": 3}, {"pp": 2}], "train": train}
    (results,) = on_ranks(2, [case])
    assert results[0]["difference"] == 0.0
    assert abs(results[0]["losses"][0] - results[0]["losses"][1]) < 1e-5 * results[0]["losses"][0]
    assert [result["last"] for result in results] == [4, 4]  # every rank knows what is intact when its disk fails


def test_no_rank_holds_the_whole_model_it_starts_from(on_ranks: Callable[..., Any]) -> None:
    wide = {"hidden": 64, "layers": 8, "ffn": 256, "heads": 4}
    cases = [
        {"task": "first_weights", "family": "llama", "model": wide, "train": {"micro_batch": 2}, "layout": layout}
        for layout in ({"zero": 3}, {"pp": 2}, {"tp": 2})
    ]
    for case, ranks in zip(cases, on_ranks(2, cases), strict=True):
        for found in ranks:
            assert found["different"] == 0.0, case["layout"]
            held = found["peak"] - found["file"]  # which is mapped, and read where it is needed
            assert held < found["parts"] + 2 * found["largest"] < 0.75 * found["whole"], (case, found)
