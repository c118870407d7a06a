"""Bytes of tensors that ranks hold, counted by PyTorch's allocator, against the plan: every stage of a pipeline too."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

MODEL = {"hidden": 64, "vocab": 512, "context": 64}


def case(family: str = "gpt", model: Any = None, tables: Any = None, batch: int = 16, **layout: Any) -> Any:
    tables = dict(tables or {})
    train = {"micro_batch": 2, "global_batch": batch} | tables.pop("train", {})
    communication, optimizer = tables.pop("communication", {}), tables.pop("optimizer", {})
    return {
        "task": "memory", "family": family, "model": MODEL | (model or {}), "train": train, "layout": layout,
        "tables": tables, "communication": communication, "optimizer": optimizer,
    }  # fmt: skip


WIDE = {"hidden": 256, "heads": 8, "context": 32, "vocab": 300}  # where gathering and reducing a block is the peak
LONG = {"context": 128, "ffn": 512, "vocab": 300}  # where a block's backward pass is
FULL, BF16 = {"recompute": {"mode": "full"}}, {"train": {"precision": "bf16"}}

QUICK = [case("llama", batch=8, zero=3), case(batch=4, model={"layers": 2}, tp=2, sp=True), case(batch=8, pp=2)]
REPLICAS = [case(dp=2), case("llama", dp=2)]
FSDP = [
    case(zero=1), case("llama", zero=1), case(zero=2), case("llama", zero=2), case(zero=3), case("llama", zero=3),
    case(model=WIDE, zero=2), case(model=WIDE, zero=3), case("llama", model=LONG, zero=3), case("mixtral", zero=3),
]  # fmt: skip
TENSOR = [
    case(tp=2), case("llama", tp=2), case(tp=2, sp=True), case("llama", tp=2, sp=True), case("mixtral", tp=2),
    case("llama", model=LONG, tp=2, sp=True), case(cp=2), case("llama", cp=2), case(model=LONG, cp=2),
    case("llama", model=LONG, cp=2, zero=3), case("mixtral", batch=8, tp=2, sp=True),
    case("deepseek", tables=BF16, batch=8, tp=2, sp=True),
]  # fmt: skip
PIPELINE = [
    case(pp=2), case("llama", pp=2), case(pp=2, schedule="gpipe"), case(pp=2, virtual_stages=2),
    case(pp=2, schedule="zb"), case(pp=2, virtual_stages=2, schedule="zbv"),
    case(pp=2, virtual_stages=2, schedule="dualpipe"),
]  # fmt: skip
SETTINGS = [
    case(tables=FULL, zero=3), case("llama", tables=FULL, tp=2, sp=True), case(tables=BF16, zero=3),
    case("llama", tables=BF16 | FULL, zero=2), case("llama", tables=BF16, tp=2), case("llama", tables=BF16, cp=2),
    case("llama", tables={"recompute": {"mode": "selective", "keep": ["attention"]}}, pp=2),
    case(model={"dropout": 0.1}, zero=3), case(model={"dropout": 0.1}, tp=2, sp=True),
]  # fmt: skip
TABLE = {"vocab": 3000}  # where logits are the peak, unless they are made in chunks
CHUNKED = {"train": {"loss": "chunked"}}
NARROW, POWER = {"gradients": "bf16"}, {"gradients": "powersgd", "rank": 2, "start_step": 2}
SITES = {"local_steps": 1}  # every step is one at whose end sites meet
SAVERS = [
    case(tables={"communication": NARROW}), case("llama", tables={"communication": NARROW}, batch=4),
    case(tables={"communication": NARROW}, zero=3), case(tables={"communication": POWER}, model=TABLE),
    case("llama", tables={"communication": POWER}), case(tables={"communication": {"local_steps": 9}}),
    case("llama", tables={"communication": SITES}), case(tables={"communication": SITES | NARROW}, model=TABLE),
    case(tables={"optimizer": {"name": "adam8bit"}}, model=TABLE),
    case("llama", tables={"train": {"average_decay": 0.9}}, zero=3),
]  # fmt: skip
CHUNKS = [
    case(tables=CHUNKED, model=TABLE, dp=2), case(tables=CHUNKED, model=TABLE, zero=1),
    case("llama", tables=CHUNKED, model=TABLE, zero=2), case("llama", tables=CHUNKED, model=TABLE, zero=3),
    case(tables=CHUNKED, model=TABLE, zero=3), case("llama", tables=CHUNKED, model=TABLE, tp=2),
    case(tables=CHUNKED, model=TABLE, tp=2), case("llama", tables=CHUNKED, model=TABLE, tp=2, sp=True),
    case(tables=CHUNKED, model=TABLE, tp=2, sp=True), case(tables=CHUNKED, model=TABLE, cp=2),
    case("llama", tables={"train": {"loss": "chunked", "precision": "bf16"}}, model=TABLE, tp=2, sp=True),
    case("llama", tables=CHUNKED, model=TABLE, pp=2), case(tables=CHUNKED, model=TABLE, pp=2),
]  # fmt: skip
LATENT = [
    case("latent", zero=3), case("latent", tp=2), case("latent", tp=2, sp=True), case("latent", cp=2),
    case("latent", model=LONG, tp=2, sp=True), case("latent", tables=BF16, tp=2), case("latent", tables=FULL, tp=2),
    case("deepseek3", zero=3), case("latent", pp=2), case("latent", model=LONG, cp=2),
]  # fmt: skip
EXPERTS = [
    case("mixtral", ep=2),
    case("mixtral", ep=2, zero=3),
    case("deepseek", ep=2, zero=1),
    case("mixtral", zero=3, model={"moe": {"experts": 3, "experts_per_token": 2}}),
]
POST, SANDWICH = ({"norm_place": place, "context": 256, "vocab": 256, "layers": 4} for place in ("post", "sandwich"))
NORMS_AFTER = [
    case("llama", model=model, tables=tables, batch=4, tp=2, sp=sp)
    for model in (POST, SANDWICH)
    for tables, sp in ((BF16, True), ({}, True), (BF16, False), (BF16 | FULL, True))
] + [case("llama", model=POST, tables={"train": {"loss": "chunked", "precision": "bf16"}}, batch=4, tp=2, sp=True)]


@pytest.mark.parametrize(
    ("cases", "limit"),
    [
        pytest.param(QUICK, 0.015, id="quick"),  # 1.4% in PyTorch 2.11's pipeline, within 1% in 2.13
        pytest.param(REPLICAS, 0.01, id="replicas", marks=pytest.mark.long),
        pytest.param(FSDP, 0.01, id="fsdp", marks=pytest.mark.long),
        pytest.param(TENSOR, 0.01, id="tensor", marks=pytest.mark.long),
        pytest.param(PIPELINE, 0.03, id="pipeline", marks=pytest.mark.long),
        pytest.param(SETTINGS, 0.01, id="settings", marks=pytest.mark.long),
        pytest.param(SAVERS, 0.01, id="savers", marks=pytest.mark.long),
        pytest.param(CHUNKS, 0.05, id="chunks", marks=pytest.mark.long),
        pytest.param(LATENT, 0.03, id="latent", marks=pytest.mark.long),
        pytest.param(EXPERTS, 0.05, id="experts", marks=pytest.mark.long),
        pytest.param(NORMS_AFTER, 0.01, id="norms after", marks=pytest.mark.long),
    ],
)
def test_ranks_hold_what_is_planned(cases: list[Any], limit: float, on_ranks: Callable[..., Any]) -> None:
    for wanted, by_rank in zip(cases, on_ranks(2, cases, timeout_seconds=900), strict=True):
        for rank, run in enumerate(by_rank):
            where = (wanted["family"], wanted["layout"], rank, run)
            assert run["planned"] == pytest.approx(run["found"], rel=limit), where
            # What a run records of one step is the same as counting from the start.
            assert run["inside"] == pytest.approx(run["found"], rel=limit), where
