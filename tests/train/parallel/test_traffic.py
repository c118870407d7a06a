"""Collectives counted in a run equal the planned ones, by mesh dimension and kind."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest


def case(
    family: str = "gpt", micro_batch: int | None = None, model: dict[str, Any] | None = None,
    train: dict[str, Any] | None = None, tables: dict[str, Any] | None = None, **layout: Any,
) -> Any:  # fmt: skip
    train = (train or {}) | ({} if micro_batch is None else {"micro_batch": micro_batch})
    return {
        "task": "traffic", "family": family, "model": model or {}, "train": train, "layout": layout,
        "tables": tables or {},
    }  # fmt: skip


# Settings that change what is sent.
FULL, EVERY = {"recompute": {"mode": "full"}}, {"recompute": {"mode": "every", "every": 2}}
SELECTIVE = {"recompute": {"mode": "selective"}}
DOCUMENTS = {"data": {"mask_documents": True}}
CHUNKED, BF16 = {"loss": "chunked"}, {"precision": "bf16"}
DROPOUT = {"dropout": 0.1}
UNBALANCED = {"moe": {"experts": 4, "experts_per_token": 2, "balance_loss": 0.0}}  # which counts by micro-batch


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
    case("mixtral", zero=3, micro_batch=2, model={"moe": {"experts": 3, "experts_per_token": 2}}),
    case("switch", cp=2, micro_batch=2),
    case("deepseek", tp=2, sp=True, micro_batch=2),
    case("latent", tp=2, sp=True, micro_batch=2),
    case("deepseek3", tp=2, micro_batch=2),
    case("latent", cp=2, micro_batch=2),
    case("deepseek3", zero=3, micro_batch=2),
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
SETTINGS_OF_TWO = [
    case(tables=FULL, tp=2, micro_batch=2),
    case("llama", tables=SELECTIVE | DOCUMENTS, train=CHUNKED, tp=2, sp=True, micro_batch=2),
    case(model=DROPOUT, tables=EVERY, train=BF16, tp=2, sp=True, micro_batch=2),
    case("deepseek", tables=FULL, train=BF16, tp=2, sp=True, micro_batch=2),
    case("mixtral", tables=SELECTIVE, tp=2, micro_batch=2),
    case(tables=SELECTIVE, train=BF16, cp=2, micro_batch=2),
    case("switch", tables=FULL, cp=2, micro_batch=2),
    case("mixtral", tables=EVERY | DOCUMENTS, train=BF16, ep=2, micro_batch=2),
    case("switch", tables=FULL, ep=2, micro_batch=2),
    case("switch", tables=FULL, dp=2, micro_batch=8),
    case("llama", tables=FULL | DOCUMENTS, train=CHUNKED, zero=3, micro_batch=2),
    case("llama", train=CHUNKED, zero=1, micro_batch=2),
    case(train=BF16, dp=2, micro_batch=2),
    case(tables=DOCUMENTS, cp=2, micro_batch=2),
    case(train=CHUNKED, pp=2, micro_batch=2),
    case("mixtral", model=UNBALANCED, ep=2, zero=1, micro_batch=2),
    case("mixtral", tables=FULL | DOCUMENTS, train=BF16, pp=2, micro_batch=2),
    case(train=CHUNKED | BF16, pp=2, virtual_stages=2, schedule="zbv", micro_batch=2),
    case(train={"average_decay": 0.8}, zero=3, micro_batch=2),
]
SETTINGS_OF_FOUR = [
    case("llama", tables=FULL, tp=2, zero=3, sp=True, micro_batch=2),
    case(tables=SELECTIVE, model=DROPOUT, train=BF16, tp=2, cp=2, sp=True, micro_batch=2),
    case("llama", tables=EVERY | DOCUMENTS, train=CHUNKED | BF16, tp=2, pp=2, sp=True, micro_batch=1),
    case(tables=FULL | DOCUMENTS, cp=2, zero=3, micro_batch=1),
    case("llama", train=CHUNKED, zero=3, shard=2, micro_batch=1),
    case(tables=FULL, pp=2, zero=3, micro_batch=1),
    case("llama", train=CHUNKED, pp=2, zero=3, micro_batch=1),
    case(pp=2, zero=3, virtual_stages=2, micro_batch=1),
    case("llama", pp=2, zero=2, virtual_stages=2, schedule="zbv", micro_batch=1),
    case("mixtral", tables=FULL | DOCUMENTS, train=BF16, zero=3, ep=2, micro_batch=2),
    case("deepseek", tables=SELECTIVE, zero=3, ep=2, micro_batch=2),
    case("deepseek", tables=FULL, train=BF16, cp=2, zero=3, ep=2, micro_batch=2),
    case("switch", tables=EVERY, train=BF16, tp=2, sp=True, ep=2, micro_batch=2),
    case("deepseek", tables=FULL, pp=2, ep=2, micro_batch=1),
    case("mixtral", model=UNBALANCED, tp=2, sp=True, ep=2, micro_batch=1),
]


@pytest.mark.parametrize(
    ("size", "cases"),
    [
        pytest.param(2, [TWO[1], *TWO[3:10:2], TWO[-3], SETTINGS_OF_TWO[1], SETTINGS_OF_TWO[7]], id="2-quick"),
        pytest.param(2, SETTINGS_OF_TWO, id="2-settings", marks=pytest.mark.long),
        pytest.param(4, SETTINGS_OF_FOUR, id="4-settings", marks=pytest.mark.long),
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
