"""Gradients in bf16, by PowerSGD, and sites that average their weights: they train, send what is planned, go on."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import ironlaw
from ironlaw.config import build_config
from ironlaw.errors import UserError
from ironlaw.train.parallel.ranks import check


def case(task: str, communication: dict[str, Any], family: str = "gpt", **more: Any) -> dict[str, Any]:
    layout = {key: more.pop(key) for key in ("dp", "zero", "shard", "tp", "pp", "cp") if key in more}
    train = {"micro_batch": more.pop("micro_batch", 2)} | more.pop("train", {})
    return {"task": task, "family": family, "layout": layout, "communication": communication, "train": train} | more


def on_two_ranks(folder: Path, *arguments: str | Path) -> subprocess.CompletedProcess[str]:
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "-m", "ironlaw"]
    environment = os.environ | {"PYTHONPATH": str(Path(ironlaw.__file__).parents[1]), "OMP_NUM_THREADS": "1"}
    return subprocess.run(
        [*launcher, *map(str, arguments)], cwd=folder, env=environment, capture_output=True, text=True, timeout=250,
        check=False,
    )  # fmt: skip


def metrics(run: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (run / "metrics.jsonl").read_text(encoding="utf-8").splitlines()]


BF16 = {"gradients": "bf16"}
POWER = {"gradients": "powersgd", "rank": 2, "start_step": 2}
SITES = {"local_steps": 3}
WIDE = {"hidden": 64, "vocab": 2400}  # more than the megabyte of DDP's first bucket
PLAIN_OUTER = {"local_steps": 1, "outer_lr": 1.0, "outer_momentum": 0.0}

TRAFFIC = [
    case("traffic", BF16),
    case("traffic", BF16, "llama", zero=3),
    case("traffic", POWER, model=WIDE),
    case("traffic", {"local_steps": 4}),
]
TRAFFIC_OF_FOUR = [
    case("traffic", BF16, "llama", zero=2, shard=2),
    case("traffic", BF16, pp=2, zero=1),
    case("traffic", BF16, "llama", tp=2),
    case("traffic", POWER, cp=2),
    case("traffic", {"local_steps": 4, "sites": 2, "gradients": "bf16"}, "llama", zero=3),
    case("traffic", {"local_steps": 4}, pp=2),
]
RESUME = [
    case("resume", POWER, model=WIDE | {"dropout": 0.1}),
    case("resume", SITES, model={"dropout": 0.1}),
    case("resume", {}),
]
RESUME_OF_FOUR = [
    case("resume", POWER, model=WIDE),
    case("resume", SITES | {"sites": 2}, zero=3),
    case("resume", SITES, "llama", pp=2, model={"tied": True}),
    case("resume", SITES | {"sites": 2}, saved=6),
    case("resume", BF16, zero=1),
]
FOUR_MEETINGS = {"steps": 20}
LEARNS = [
    case("learns", BF16, zero=3),
    case("learns", {"local_steps": 5}, train=FOUR_MEETINGS, tables={"data": {"mask_documents": True}}),
]
MORE_LEARNS = [
    *LEARNS, case("learns", {"local_steps": 5}, train=FOUR_MEETINGS), case("learns", BF16, train={"steps": 20}),
    case("learns", POWER, model=WIDE, train={"steps": 20}),
]  # fmt: skip


@pytest.mark.parametrize(
    ("size", "cases"),
    [pytest.param(2, TRAFFIC, id="2"), pytest.param(4, TRAFFIC_OF_FOUR, id="4", marks=pytest.mark.long)],
)
def test_counted_bytes_are_the_planned(size: int, cases: list[Any], on_ranks: Callable[..., Any]) -> None:
    for wanted, ranks in zip(cases, on_ranks(size, cases), strict=True):
        for rank, result in enumerate(ranks):
            found = {name: size for name, (_, size) in result["found"].items()}
            assert found == {name: size for name, (_, size) in result["planned"].items()}, (wanted, rank)


@pytest.mark.parametrize(
    ("size", "cases"),
    [pytest.param(2, RESUME, id="2"), pytest.param(4, RESUME_OF_FOUR, id="4", marks=pytest.mark.long)],
)
def test_a_resumed_run_goes_on_to_the_bit(size: int, cases: list[Any], on_ranks: Callable[..., Any]) -> None:
    for wanted, ranks in zip(cases, on_ranks(size, cases), strict=True):
        for rank, result in enumerate(ranks):
            assert result["resumed"] == result["straight"], (wanted, rank)


@pytest.mark.parametrize(
    ("size", "cases"),
    [
        pytest.param(2, LEARNS, id="2"),
        pytest.param(2, MORE_LEARNS[2:], id="2-more", marks=pytest.mark.long),
        pytest.param(4, MORE_LEARNS, id="4", marks=pytest.mark.long),
    ],
)
def test_savers_train(size: int, cases: list[Any], on_ranks: Callable[..., Any]) -> None:
    """Not far from the losses with whole gradients, and one model on all ranks at the end."""
    for wanted, ranks in zip(cases, on_ranks(size, cases), strict=True):
        for found in ranks:
            assert found["expected"] < found["first"] - 0.1, (wanted, found)
            # Sites see a part of the batch each and meet four times in all: they are behind, at first.
            near = 0.7 if "local_steps" in wanted["communication"] else 0.1
            assert abs(found["last"] - found["expected"]) < near * (found["first"] - found["expected"]), (wanted, found)
            assert found["apart"] == 0.0, (wanted, found)


@pytest.mark.parametrize("size", [2, pytest.param(4, marks=pytest.mark.long)])
def test_meeting_every_step_with_a_plain_outer_step_averages_weights(size: int, on_ranks: Callable[..., Any]) -> None:
    (ranks,) = on_ranks(size, [case("averaged", PLAIN_OUTER)])
    for found in ranks:
        assert found["loss"] < 1e-6 and found["weights"] < 1e-5, found


@pytest.mark.long
@pytest.mark.parametrize(
    "communication",
    [
        {"gradients": "powersgd", "rank": 2, "start_step": 3},
        {"local_steps": 3},
        {"gradients": "bf16"},
    ],
    ids=["powersgd", "local", "bf16"],
)
def test_a_run_from_the_command_line_goes_on_to_the_bit(
    communication: dict[str, Any], tiny_file: Callable[..., Path], tmp_path: Path, user_cache: Path
) -> None:
    """Stopped within a round of local steps; losses, and validation losses on the common weights."""
    config = tiny_file(
        {"layers": 2, "heads": 4, "dropout": 0.1}, layout={}, train={"micro_batch": 2}, communication=communication,
        schedule={"warmup_steps": 4},
    )  # fmt: skip
    for out, steps in (("straight", 12), ("stopped", 8), ("stopped", 12)):
        more = ("--resume", "--set", f"train.steps={steps}") if out == "stopped" else ()
        if steps == 8:  # as a signal would leave it: a run's last step is a meeting
            more = (*more, "--set", "checkpoint.every=7")
        done = on_two_ranks(tmp_path, "train", config, "--out", out, *more)
        assert done.returncode == 0, done.stderr[-3000:]
        if steps == 8:
            shutil.rmtree(tmp_path / "stopped" / "checkpoints" / "step-00000008")
    straight, stopped = (metrics(tmp_path / out) for out in ("straight", "stopped"))
    assert len(straight) == 12
    assert [m["loss"] for m in straight] == [m["loss"] for m in stopped]
    assert straight[-1]["validation_loss"] == stopped[-1]["validation_loss"]


@pytest.mark.parametrize(
    ("document", "size", "words"),
    [
        ({"communication": {"sites": 2}}, 4, "communication.local_steps"),
        ({"communication": {"local_steps": 5, "gradients": "powersgd"}}, 4, "does not go with"),
        ({"communication": {"local_steps": 5, "sites": 3}}, 4, "dp = 4 replicas to be shared out equally among 3"),
        ({"communication": {"local_steps": 5}, "layout": {"tp": 2}}, 2, "at least two sites"),
        ({"communication": {"gradients": "powersgd"}, "layout": {"zero": 1}}, 2, "needs whole gradients"),
        ({"communication": {"local_steps": 5, "sites": 2}, "layout": {"zero": 3, "shard": 4}}, 4, "within a site of 2"),
    ],
)
def test_what_cannot_be_saved_is_refused(document: dict[str, Any], size: int, words: str) -> None:
    gpt = {"name": "gpt", "layers": 2, "hidden": 32, "heads": 4, "vocab": 300, "context": 16}
    with pytest.raises(UserError, match=words):
        check(build_config({"model": gpt, "train": {"global_batch": 8}} | document), size)
