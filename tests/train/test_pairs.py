"""Settings that go together: trained, gone on with to the bit after a stop, exported. A sample in which many meet."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from ironlaw.config import RunConfig, build_config
from ironlaw.train.result import Outcome

from ..conftest import TINY_LLAMA

ADAPTERS: dict[str, Any] = {"rank": 4, "modules_to_save": ["embeddings"]}
FROZEN = {"pattern": "embedding.*", "lr_scale": 0.0}
CASES: dict[str, dict[str, dict[str, Any]]] = {
    "mxfp4": {"train": {"precision": "mxfp4", "loss": "chunked", "micro_batch": 3}, "optimizer": {"name": "momentum"},
              "recompute": {"mode": "full"}},
    "fp8_delayed": {"train": {"precision": "fp8_delayed", "average_decay": 0.9, "micro_batch": 2},
                    "optimizer": {"name": "adafactor"}, "recompute": {"mode": "selective"}},
    "nvfp4": {"model": {"dropout": 0.1}, "train": {"precision": "nvfp4", "noise_scale_every": 1, "micro_batch": 4},
              "optimizer": {"groups": [FROZEN]}, "data": {"packing": "best_fit"}},
    "fp8_block": {"train": {"precision": "fp8_block"}, "optimizer": {"name": "galore", "rank": 8},
                  "objective": {"kind": "distillation", "teacher": "base", "hidden": 0.5}},
    "qat": {"train": {"precision": "fp16", "qat": "nvfp4,pruned=50%", "loss": "chunked"},
            "optimizer": {"name": "rmsprop"}, "data": {"packing": "best_fit"}, "recompute": {"mode": "selective"}},
    "qlora": {"train": {"precision": "bf16", "loss": "chunked", "average_decay": 0.9, "start_from": "base"},
              "finetune": {"method": "qlora", "dropout": 0.1} | ADAPTERS, "recompute": {"mode": "every", "every": 2}},
    "dora": {"train": {"precision": "fp16", "micro_batch": 2, "start_from": "base"},
             "finetune": {"method": "dora", "rank": 4}, "optimizer": {"name": "adafactor"},
             "objective": {"kind": "distillation", "teacher": "base"}},
}  # fmt: skip


@pytest.mark.parametrize("name", CASES)
def test_what_goes_together_trains_resumes_and_is_exported(
    name: str, tiny_document: Callable[..., dict[str, Any]], train: Callable[..., Outcome], train_until: Any,
    losses: Any, ironlaw_here: Callable[..., Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    monkeypatch.chdir(tmp_path)

    def config(about: dict[str, dict[str, Any]], **named: Any) -> RunConfig:
        document = tiny_document(TINY_LLAMA | about.get("model", {}))
        for section, table in (about | {"checkpoint": {"every": 2}}).items():
            document[section] = document.get(section, {}) | table
        document["train"] |= named
        return build_config(document)

    if "base" in str(CASES[name]):
        train(config({}, steps=2), Path("base"))
    wanted = config(CASES[name], steps=3)
    train(wanted, Path("whole"))
    train_until(2, wanted, Path("cut"))
    train(wanted, Path("cut"), resume=True)
    assert losses(Path("cut")) == losses(Path("whole"))
    code, _, err = ironlaw_here("export", "whole")
    assert code == 0, err
