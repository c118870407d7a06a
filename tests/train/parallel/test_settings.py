"""Settings that change how a step is computed train on ranks as in one process: documents and padded rows,
recomputation, the chunked loss, fp16 and bf16, compiled blocks."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest


def case(
    family: str = "gpt", model: dict[str, Any] | None = None, train: dict[str, Any] | None = None,
    tables: dict[str, Any] | None = None, limits: dict[str, float] | None = None, **layout: Any,
) -> Any:  # fmt: skip
    return {
        "task": "equivalence", "family": family, "model": model or {}, "train": {"micro_batch": 2} | (train or {}),
        "tables": tables or {}, "layout": layout, "limits": limits or {},
    }  # fmt: skip


D = {"dropout": 0.1}
DOCUMENTS = {"data": {"mask_documents": True}}
FULL = {"recompute": {"mode": "full"}}
EVERY = {"recompute": {"mode": "every", "every": 2}}
SELECTIVE = {"recompute": {"mode": "selective"}}
CHUNKED = {"loss": "chunked"}
FP16 = {"precision": "fp16"}
TOO_LARGE = {"scaler": {"initial": 2.0**20}}  # the first steps overflow, on all ranks alike
# A product that is divided is rounded in other places.
HALF = {"loss": 1e-3, "norm": 0.1, "weights": 0.03}
# A product on the edge may overflow here and not there: what is held is that all ranks skip the same steps.
SKIPPED = {"loss": 0.05, "weights": 0.1}
COMPILED = {"compile": "on"}

QUICK = [
    case(model=D, tables=DOCUMENTS | FULL, zero=3),
    case("llama", train=CHUNKED, tables=DOCUMENTS, pp=2),
    case("llama", tables=DOCUMENTS | SELECTIVE, tp=2, sp=True),
    case(train=FP16, tables=TOO_LARGE, limits=SKIPPED, dp=2),
]
LONG = [
    case(model=D, tables=DOCUMENTS, dp=2),
    case(tables=DOCUMENTS, cp=2),
    case(model=D, tables=DOCUMENTS, pp=2),
    case("mixtral", tables=DOCUMENTS, pp=2, schedule="gpipe"),
    case("mixtral", tables=DOCUMENTS, ep=2),
    case("deepseek", tables=DOCUMENTS, zero=3),
    case(tables=EVERY, pp=2),
    case("mixtral", model=D, tables=FULL, ep=2),
    case(train={"micro_batch": 4}, tables=FULL, cp=2),
    case(train=CHUNKED, dp=2),
    case("llama", train=CHUNKED, zero=3),
    case(train=CHUNKED, zero=2),
    case("llama", train=FP16, tables=TOO_LARGE, limits=SKIPPED, zero=3),
    case("llama", train=FP16, tables=TOO_LARGE, limits=SKIPPED, pp=2),
    case("llama", train=FP16, limits=HALF, zero=3),
    case("llama", train={"precision": "bf16"}, limits=HALF, tp=2),
    case("llama", train=COMPILED, zero=3),
]


@pytest.mark.parametrize(
    "cases", [pytest.param(QUICK, id="quick"), pytest.param(LONG, id="long", marks=pytest.mark.long)]
)
def test_settings_train_like_one_process(cases: list[Any], on_ranks: Callable[..., Any]) -> None:
    for wanted, ranks in zip(cases, on_ranks(2, cases), strict=True):
        where = f"{wanted['family']} {wanted['layout']} {wanted['train']} {wanted['tables']}"
        limits = wanted["limits"] or {"loss": 1e-5, "weights": 1e-4, "norm": 1e-3}
        for found in ranks:
            assert all(found[key] < limit for key, limit in limits.items()), (where, found)
            assert found["learned"] > 0.1, (where, found)
            assert (found["skipped"] > 0) == ("scaler" in wanted["tables"]), (where, found)
        assert len({found["skipped"] for found in ranks}) == 1, where  # all ranks skip the same steps
