"""Settings that change how a step is computed train on ranks as in one process: documents and padded rows,
recomputation, the chunked loss, fp16 and bf16, compiled blocks, averaged weights, the gradient noise scale."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from ironlaw.config import LayoutConfig, build_config
from ironlaw.errors import UserError
from ironlaw.train.noise_scale import first_part
from ironlaw.train.parallel.job import _chosen
from ironlaw.train.parallel.ranks import check


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
FP16 = {"precision": "fp16", "steps": 20}
TOO_LARGE = {"scaler": {"initial": 2.0**20}}  # the first steps overflow, on all ranks alike
# A product that is divided is rounded in other places.
HALF = {"loss": 1e-3, "norm": 0.1, "weights": 0.03}
FINER = {"loss": 1e-4, "norm": 0.01, "weights": 0.03}  # fp16 has eight times as many numbers as bf16
COMPILED = {"compile": "on"}
AVERAGED = {"average_decay": 0.8}

QUICK = [
    case("llama", tables={"optimizer": {"name": "momentum", "lr": 0.1}}, zero=3),
    case(model=D, tables=DOCUMENTS | FULL, zero=3),
    case("llama", train=CHUNKED, tables=DOCUMENTS, pp=2),
    case("llama", model={"layers": 2}, train=CHUNKED | AVERAGED, tables=DOCUMENTS | SELECTIVE, tp=2, sp=True),
    case(train=FP16, tables=TOO_LARGE, limits=FINER, dp=2),
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
    case("mixtral", tables=SELECTIVE, ep=2),
    case("deepseek", tables=EVERY, zero=3, ep=2),
    case("deepseek", tables=SELECTIVE, zero=3),
    case("mixtral", tables=FULL, tp=2, sp=True),
    case("switch", train={"micro_batch": 8}, tables=FULL, dp=2),
    case("mixtral", train={"micro_batch": 4}, tables=FULL, cp=2),
    case("deepseek", tables=FULL, pp=2),
    case("mixtral", tables=FULL, pp=2, virtual_stages=2),
    case("llama", train=CHUNKED, pp=2, virtual_stages=2, schedule="zbv"),
    case(train={"micro_batch": 4}, tables=FULL, cp=2),
    case(train=CHUNKED, dp=2),
    case("llama", train=CHUNKED, zero=3),
    case(train=CHUNKED, zero=2),
    case(model=D, train=CHUNKED, tp=2),
    case("llama", model={"vocab": 301}, train=CHUNKED, tp=2, sp=True),
    case("mixtral", train=CHUNKED, tp=2),
    case(train=AVERAGED, dp=2),
    case("llama", train=AVERAGED, zero=3),
    case("mixtral", train=AVERAGED, zero=1, ep=2),
    case(train=AVERAGED, pp=2, virtual_stages=2),
    case(train=AVERAGED, pp=2, schedule="gpipe"),
    case("llama", train=FP16, tables=TOO_LARGE, limits=FINER, zero=3),
    case("llama", train=FP16, tables=TOO_LARGE, limits=FINER, pp=2),
    case(train=FP16, tables=TOO_LARGE, limits=FINER, tp=2),
    case("llama", train=FP16, tables=TOO_LARGE, limits=FINER, cp=2),
    case("llama", train=FP16, limits=FINER, zero=3),
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
            assert found["skipped"] == found["skipped_alone"], (where, found)


def noise(family: str = "gpt", micro_batch: int = 2, model: dict[str, Any] | None = None, **layout: Any) -> Any:
    train = {"micro_batch": micro_batch, "noise_scale_every": 2}
    return case(family, model=model, train=train, **layout) | {"task": "noise"}


NO_BALANCE = {"moe": {"experts": 4, "experts_per_token": 2, "balance_loss": 0.0}}  # which counts by micro-batch
NOISE = [noise("llama", zero=3), noise(micro_batch=1, pp=2)]
MORE_NOISE = [
    noise(dp=2), noise(zero=1), noise(tp=2, sp=True), noise(cp=2), noise("mixtral", model=NO_BALANCE, ep=2, zero=1),
    noise("llama", micro_batch=1, pp=2, virtual_stages=2, schedule="zbv"),
]  # fmt: skip


@pytest.mark.parametrize(
    "cases", [pytest.param(NOISE, id="quick"), pytest.param(MORE_NOISE, id="long", marks=pytest.mark.long)]
)
def test_the_first_sequences_of_a_step_are_looked_at_by_themselves(cases: list[Any], on_ranks: Any) -> None:
    """Squared norms of their gradient: as of the same rows in one process, while the step stays what it is."""
    for wanted, ranks in zip(cases, on_ranks(2, cases), strict=True):
        for found in ranks:
            assert len(found) == 2, wanted
            for seen, expected in found:
                assert seen == pytest.approx(expected, rel=1e-4), (wanted["layout"], found)


@pytest.mark.parametrize(
    ("layout", "train", "words"),
    [
        ({"dp": 2}, {"micro_batch": 4}, "needs two micro-batches per replica, not 1"),
        ({"pp": 2}, {"micro_batch": 4}, "needs a multiple of 4 micro-batches per replica, not 2"),
    ],
)
def test_a_step_of_too_few_micro_batches_says_nothing_of_the_noise(layout: Any, train: Any, words: str) -> None:
    config = build_config(
        {
            "model": {"layers": 2, "hidden": 32, "heads": 4, "vocab": 300, "context": 16}, "layout": layout,
            "train": {"global_batch": 8, "noise_scale_every": 2} | train,
        }
    )  # fmt: skip
    with pytest.raises(UserError, match=words):
        first_part(config, check(config, 2))


@pytest.mark.parametrize(
    ("tables", "words"),
    [
        ({"train": {"qat": "int4"}}, "trains in one process: start it without torchrun"),
        ({"train": {"start_from": "there"}, "objective": {"kind": "dpo"}, "data": {"format": "pairs"}}, "one process"),
        ({"train": {"start_from": "there"}, "finetune": {"method": "lora", "dropout": 0.1}}, "finetune.dropout = 0"),
    ],
)
@pytest.mark.parametrize("layout", [None, {"zero": 1}])
def test_replicas_that_only_torchrun_tells_of_are_ranks_too(tables: Any, words: str, layout: Any) -> None:
    model = {"layers": 2, "hidden": 32, "heads": 4, "vocab": 300, "context": 16}
    config = build_config({"model": model} | ({"layout": layout} if layout else {}) | tables)
    with pytest.raises(UserError, match=words):
        check(config, 2)


@pytest.mark.parametrize(("layout", "ranks"), [({"dp": 4, "ep": 2, "tp": 2}, 8), ({"ep": 2, "pp": 2}, 4), ({}, 1)])
def test_ranks_that_share_experts_are_among_the_replicas(layout: Any, ranks: int) -> None:
    """A process of its own is told to start so many."""
    assert LayoutConfig(**layout).ranks == ranks


def test_where_no_layout_runs_the_reason_that_is_none_of_a_layout_comes_first() -> None:
    model = {"layers": 2, "hidden": 32, "heads": 4, "vocab": 300, "context": 16}

    def choose(config: Any, ranks: int) -> Any:
        raise UserError("no layout divides this")

    for train, words in (({"precision": "mxfp4"}, "one device only"), ({}, "no layout divides this")):
        config = build_config({"model": model, "train": train})
        with pytest.raises(UserError, match=words):
            _chosen(choose, config, config, 2)


@pytest.mark.parametrize("mode", ["selective", "full"])
def test_split_backward_passes_do_not_recompute(mode: str) -> None:
    """Nor do they give weights back in between: gradients were lost, and losses 3.5% off, before that was refused."""
    document = {
        "model": {"layers": 4, "hidden": 32, "heads": 4, "vocab": 300, "context": 16},
        "layout": {"pp": 2, "virtual_stages": 2, "schedule": "zb"}, "recompute": {"mode": mode},
        "train": {"global_batch": 8, "micro_batch": 2},
    }  # fmt: skip
    with pytest.raises(UserError, match="neither ZeRO 3 nor recomputation: use schedule=1f1b"):
        check(build_config(document), 2)
    document["layout"] |= {"zero": 3}  # type: ignore[operator]
    with pytest.raises(UserError, match="use schedule=1f1b"):
        check(build_config(document), 2)
