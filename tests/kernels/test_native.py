"""Compiled attention over pages is PyTorch's, for every format of the cache and every rule of scores."""

from __future__ import annotations

import math
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from ironlaw.kernels.library import FORMATS
from ironlaw.kernels.native import CNorm, Shapes, compiled
from ironlaw.model.cached import DecodeTokens, Group, LayerCache, Pages, StepTokens
from ironlaw.model.config import ModelConfig

pytestmark = pytest.mark.skipif(shutil.which("cc") is None, reason="there is no C compiler")

PAGE, SIZE, LENGTHS = 4, 8, (1, 7, 30, 12)
RULES: dict[str, dict[str, Any]] = {
    "plain": {}, "window": {"sliding_window": 5}, "cap": {"attention_cap": 2.0}, "alibi": {"positions": "alibi"},
    "sinks": {"attention_sinks": True}, "scale": {"attention_scale": 0.7},
    "single": {"kv_heads": 4},
}  # fmt: skip


@pytest.mark.parametrize("store", FORMATS, ids=str)
@pytest.mark.parametrize("rule", RULES)
def test_attention_in_pages_is_attention_to_what_was_gathered(
    rule: str, store: torch.dtype, tmp_path_factory: pytest.TempPathFactory
) -> None:
    fields = {"layers": 1, "hidden": 4 * SIZE, "heads": 4, "kv_heads": 2, "vocab": 10, "context": 64} | RULES[rule]
    config = ModelConfig(**fields)
    shared = config.key_value_heads
    folder = tmp_path_factory.getbasetemp() / "compiled"
    native = compiled(Shapes(4, shared, SIZE, SIZE, SIZE, PAGE), store, torch.float32, folder)
    assert native is not None
    torch.manual_seed(3)
    sinks = torch.randn(4) if config.attention_sinks else None
    pages = Pages(40, PAGE, shared, (SIZE, SIZE), store, torch.device("cpu"))
    cache = LayerCache(config, pages, "sliding_window" in fields, native, sinks)
    table = torch.randperm(39)[: 8 * len(LENGTHS)].view(len(LENGTHS), 8) + 1
    every = torch.cat([torch.arange(n) for n in LENGTHS])
    whose = torch.cat([torch.full((n,), i) for i, n in enumerate(LENGTHS)])
    kept = [torch.randn(len(every), shared, SIZE) for _ in range(2)]
    pages.write(pages.rows(table[whose, every // PAGE], every % PAGE), *kept)
    last = torch.tensor([n - 1 for n in LENGTHS])
    query = torch.randn(len(LENGTHS), 4, SIZE)
    numbers = torch.arange(len(LENGTHS), dtype=torch.int32)
    cache.step_tokens = StepTokens(None, DecodeTokens(len(LENGTHS), table.int(), numbers, last.int()))
    found = cache.attend_decode(query)
    group = Group(slice(0, len(LENGTHS)), len(LENGTHS), 1, last[:, None], pages.blocks(table))
    wanted = cache.mix(group, query, *pages.read(group.blocks, len(LENGTHS), torch.float32), sinks)
    torch.testing.assert_close(found, wanted, rtol=2e-5, atol=2e-6)


def test_turning_keeping_and_norms_are_pytorchs(tmp_path: Path) -> None:
    from ironlaw.model.rotary import fused_tables, rotate_fused

    native = compiled(Shapes(4, 2, SIZE, SIZE, SIZE, PAGE), torch.bfloat16, torch.float32, tmp_path)
    assert native is not None and native.keeps
    angles = torch.rand(3, 3) * math.pi
    tables = fused_tables(angles.cos(), angles.sin(), SIZE, torch.float32)  # six of eight elements turn
    heads = torch.randn(3, 8, SIZE)
    wanted = rotate_fused(heads[:, :6], *tables, 6)
    native.rotate(heads[:, :6], *tables, 6)
    torch.testing.assert_close(heads[:, :6], wanted)
    pages = [Pages(5, PAGE, 2, (SIZE, SIZE), torch.bfloat16, torch.device("cpu")) for _ in range(2)]
    table, at = torch.tensor([[1, 2], [3, 4]]), torch.tensor([3, 4, 7])
    cache = LayerCache(
        ModelConfig(layers=1, hidden=32, heads=4, kv_heads=2, vocab=9, context=9), pages[0], False, native
    )
    cache.step_tokens = StepTokens(None, DecodeTokens(3, table.int(), torch.tensor([0, 1, 1]).int(), at.int()))
    cache.keep(heads[:, :2], heads[:, 6:])
    pages[1].write(pages[1].rows(torch.tensor([1, 4, 4]), at % PAGE), heads[:, :2], heads[:, 6:])
    assert all(torch.equal(a, b) for a, b in zip(pages[0].parts, pages[1].parts, strict=True))
    x, weight, bias = torch.randn(5, 17), torch.rand(17), torch.rand(17)
    rms, layer = (CNorm(weight.data_ptr(), b, 1e-6, b is not None) for b in (None, bias.data_ptr()))
    torch.testing.assert_close(native.norm(rms, x, 17), F.rms_norm(x, (17,), weight, 1e-6))
    torch.testing.assert_close(native.norm(layer, x, 17), F.layer_norm(x, (17,), weight, bias, 1e-6))


def test_without_a_compiler_there_is_none(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CC", "/bin/false")
    assert compiled(Shapes(4, 2, SIZE, SIZE, SIZE, PAGE), torch.float32, torch.float32, tmp_path) is None
    assert not list(tmp_path.iterdir())
