"""What is exported in few bits is what `transformers` computes with the library that reads it."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

import pytest
import torch

from ironlaw.catalog.formats import read_target
from ironlaw.errors import UserError
from ironlaw.model.config import ModelConfig
from ironlaw.model.huggingface.verify import verify
from ironlaw.model.huggingface.weights import write_tensors
from ironlaw.model.transformer import Transformer
from ironlaw.numerics.compression import compress
from ironlaw.numerics.stored import COMPUTES, LIBRARY, STORED, check_stored, stored_tensors

from ..conftest import TINY_GPT, TINY_LLAMA

WIDE = {"hidden": 128, "ffn": 64, "vocab": 320}  # a network narrower than the stream
ODD = {"hidden": 72, "heads": 6, "ffn": 100, "vocab": 301}  # rows in no blocks, but in whole words of 8-bit codes


def compressed(to: str, **fields: Any) -> tuple[Transformer, Any]:
    torch.manual_seed(0)
    model = Transformer(ModelConfig(**fields)).eval()
    return model, compress(model, read_target(to))


@pytest.mark.parametrize("kind", [TINY_LLAMA, TINY_GPT | {"positions": "rope"}], ids=["llama", "neox"])
@pytest.mark.parametrize(
    ("to", "sizes"), [*((to, WIDE) for to in (*STORED, "int4,2:4")), ("int8", ODD), ("fp8", ODD | {"ffn": 99})]
)
def test_transformers_computes_the_same(to: str, sizes: dict[str, Any], kind: dict[str, Any], tmp_path: Path) -> None:
    name = to.split(",")[0]
    if importlib.util.find_spec(LIBRARY[name]) is None:
        pytest.skip(f"{LIBRARY[name]} is not installed")
    model, held = compressed(to, **kind | sizes)
    check_stored(model.config, held, name)
    tensors, about = stored_tensors(model.config, model.state_dict(), held, name)
    write_tensors(tmp_path, model.config, tensors, torch.float32, quantization_config=about)
    found = verify(tmp_path, model, torch.float32, LIBRARY[name], COMPUTES.get(name, torch.float32))
    assert found.largest_difference is not None and not found.differs, found


def test_what_cannot_be_held_so_is_refused() -> None:
    model, held = compressed("int4", **TINY_LLAMA)
    moe = TINY_LLAMA | {"moe": {"experts": 4, "experts_per_token": 2}}
    (mixtral, of_nf4), (granite, of_int4) = compressed("nf4", **moe), compressed("int4", **moe, logit_scale=0.5)
    for name, weights, config, told in (
        ("int8", held, model.config, "holds int4"), ("int4", {}, model.config, "no compressed weights"),
        ("int4", held, ModelConfig(**TINY_GPT | {"positions": "learned"}), "GPT-2"),
        ("nf4", of_nf4, mixtral.config, "one stack"), ("int4", of_int4, granite.config, "one stack"),
        ("int4", held, model.config, "no multiple of 32"),
    ):  # fmt: skip
        with pytest.raises(UserError, match=told):
            check_stored(config, weights, name)
