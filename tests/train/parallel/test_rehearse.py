"""Layouts rehearsed on ranks that are not there: every stage calls what the plan says."""

from __future__ import annotations

import pytest

from ironlaw.errors import UserError
from ironlaw.model.config import ModelConfig
from ironlaw.plan.layout import parse_layout
from ironlaw.train.parallel.rehearse import rehearse, tiny


@pytest.mark.long
@pytest.mark.parametrize(
    ("model", "layout"),
    [
        ("gpt2", "dp=4 tp=2 pp=2 zero=1 sp=1"),
        ("llama3-8b", "dp=64 zero=3 tp=2 sp=1"),
        ("llama3-405b", "dp=8 tp=8 pp=16 zero=1 sp=1"),
    ],
)
def test_every_stage_calls_what_is_planned(model: str, layout: str) -> None:
    chosen = parse_layout(layout)
    stages = rehearse(ModelConfig.named(model), chosen)
    assert [stage.position for stage in stages] == list(range(chosen.pp))
    for stage in stages:
        assert stage.agrees, (stage.position, stage.found, stage.planned)
        assert stage.found
        # Tables of no more than kilobytes: what PyTorch keeps beside them shows.
        assert stage.planned_bytes == pytest.approx(stage.held_bytes, rel=0.05), stage.position


def test_tiny_shapes_keep_what_a_layout_divides() -> None:
    config = tiny(ModelConfig.named("llama3-70b"), parse_layout("dp=2 tp=8 pp=4 cp=2 sp=1"))
    assert (config.model.layers, config.model.kv_heads, config.model.heads) == (80, 8, 16)
    assert config.sequence % (2 * 2 * 8) == 0 and config.model.parameters < 3e6
    with pytest.raises(UserError, match="does not copy 8 key/value heads"):
        tiny(ModelConfig.named("llama3-70b"), parse_layout("tp=16"))
