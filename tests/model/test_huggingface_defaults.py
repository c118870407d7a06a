"""A `config.json` that leaves a key out is the model that `transformers` builds of it, or refused: never another."""

from __future__ import annotations

import importlib.util
import json
import os
import sys
from pathlib import Path
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).parent))  # for `huggingface_cases`
from huggingface_cases import OWN_NAMES, SMALL, TINY

from ironlaw.errors import UserError
from ironlaw.model.config import ModelConfig
from ironlaw.model.huggingface.configs import from_fields
from ironlaw.model.huggingface.families import FAMILIES
from ironlaw.model.huggingface.spec import differences

os.environ.setdefault("HF_HUB_OFFLINE", "1")  # read when transformers is imported: nothing here needs the network
pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("transformers") is None, reason="transformers is not installed"
)


def filled_in(kind: str, fields: dict[str, Any]) -> dict[str, Any] | None:
    """With all that `transformers` makes of the fields; None where it refuses them itself."""
    from transformers import AutoConfig

    try:
        whole = AutoConfig.for_model(kind, **json.loads(json.dumps(fields)))
        return dict(json.loads(whole.to_json_string(use_diff=False)))
    except Exception:  # of any kind
        return None


def read(fields: dict[str, Any]) -> ModelConfig | str:
    try:
        return from_fields(fields)
    except UserError as error:
        assert "\n" not in str(error)
        return str(error)


def cases(name: str) -> dict[str, dict[str, Any]]:
    """The small config, the same spelt out by `transformers`, and both without each of their keys."""
    kind = name.split()[0]
    short = TINY[name] if kind in OWN_NAMES else SMALL | TINY[name]
    whole = filled_in(kind, short)
    if whole is None:
        pytest.skip(f"this version of transformers has no {kind}")
    found = {"as given": short, "in full": whole}
    for given, fields in (("short", short), ("full", whole)):
        found |= {f"{given} without {key}": {k: v for k, v in fields.items() if k != key} for key in fields}
    del found["full without model_type"]
    return found


@pytest.mark.parametrize("name", TINY)
def test_a_key_that_is_left_out_is_what_transformers_takes(name: str) -> None:
    kind = name.split()[0]
    wrong = []
    for case, fields in cases(name).items():
        whole = filled_in(kind, {key: value for key, value in fields.items() if key != "model_type"})
        if whole is None:
            continue
        ours, theirs = read(fields | {"model_type": kind}), read(whole)
        if isinstance(ours, ModelConfig) and isinstance(theirs, ModelConfig) and differences(ours, theirs):
            wrong.append((case, differences(ours, theirs)))
        if isinstance(ours, ModelConfig) and isinstance(theirs, str) and "not supported" in theirs:
            wrong.append((case, [theirs]))
    assert not wrong


def test_every_family_that_is_written_is_tried() -> None:
    """But for those that `test_huggingface_weights` builds."""
    tried = {name.split()[0] for name in TINY} | {"llama", "qwen2_moe", "deepseek_v2"}
    assert tried == {kind for kind, family in FAMILIES.items() if family.architecture}
