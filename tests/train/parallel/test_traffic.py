"""Collectives counted in a run equal the planned ones, by mesh dimension and kind."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest


def case(
    family: str = "gpt", micro_batch: int | None = None, model: dict[str, Any] | None = None, **layout: Any
) -> Any:
    train = {} if micro_batch is None else {"micro_batch": micro_batch}
    return {"task": "traffic", "family": family, "model": model or {}, "train": train, "layout": layout}


TWO = [
    case(dp=2, micro_batch=2),
    case(dp=2, micro_batch=2, model={"hidden": 256}),  # DDP in two buckets
    case(zero=1, micro_batch=2),
    case("llama", zero=2, micro_batch=2),
    case("llama", zero=3, micro_batch=2, model={"ffn": 49}),
    case(zero=3),
    case(tp=2, micro_batch=4),
    case("llama", tp=2, sp=True, micro_batch=4, model={"qk_norm": True}),
    case(tp=2, sp=True),
    case("llama", cp=2, micro_batch=4),
    case("llama", pp=2, micro_batch=2),
    case(pp=2, schedule="gpipe", micro_batch=2),
    case(pp=2, virtual_stages=2, micro_batch=2),
    case("llama", pp=2, virtual_stages=2, schedule="zbv", micro_batch=2),
    case("mixtral", dp=2),
    case("deepseek", zero=3, micro_batch=2),
    case("switch", cp=2, micro_batch=2),
    case("deepseek", tp=2, sp=True, micro_batch=2),
    case("mixtral", ep=2, micro_batch=2),
    case("deepseek", zero=1, ep=2, micro_batch=2),
    case("switch", ep=2, micro_batch=2),
]
FOUR = [
    case("llama", zero=3, shard=2, micro_batch=1),
    case(tp=2, zero=3, sp=True, micro_batch=2),
    case("llama", tp=2, zero=1, sp=True, micro_batch=2),
    case("llama", tp=2, micro_batch=2),
    case(pp=2, zero=1, micro_batch=2),
    case(tp=2, pp=2, sp=True, micro_batch=2),
    case("llama", cp=2, zero=3),
    case("llama", tp=2, cp=2),
    case(pp=2, micro_batch=2),
    case("mixtral", zero=3, ep=2, micro_batch=2),
    case("switch", ep=2, micro_batch=2),
    case("switch", tp=2, sp=True, ep=2, micro_batch=2),
    case("switch", pp=2, ep=2, micro_batch=1),
]


@pytest.mark.parametrize(
    ("size", "cases"),
    [
        pytest.param(2, [TWO[1], *TWO[3:10:2], TWO[-3]], id="2-quick"),
        pytest.param(2, TWO, id="2", marks=pytest.mark.long),
        pytest.param(4, FOUR, id="4", marks=pytest.mark.long),
    ],
)
def test_counted_bytes_are_the_planned(size: int, cases: list[Any], on_ranks: Callable[..., Any]) -> None:
    for wanted, ranks in zip(cases, on_ranks(size, cases), strict=True):
        # How many rows a rank's experts get is the routers' choice; what all get together is not.
        exchanged = [
            sum(size for rank in ranks for name, (_, size) in rank[which].items() if name.endswith("all_to_all"))
            for which in ("found", "planned")
        ]
        assert exchanged[0] == exchanged[1], (wanted["family"], wanted["layout"])
        for rank, result in enumerate(ranks):
            where = (wanted["family"], wanted["layout"], rank)
            found, planned = result["found"], result["planned"]
            for name in planned:
                if name.endswith("all_to_all") and wanted["family"] != "switch":
                    found[name][1] = planned[name][1]
            assert {name: size for name, (_, size) in found.items()} == {
                name: size for name, (_, size) in planned.items()
            }, where
            for name, (count, _) in planned.items():
                assert count in (0, found[name][0]), (where, name)
