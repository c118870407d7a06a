"""Layouts rehearsed on ranks that are not there: every stage calls what the plan says."""

from __future__ import annotations

import pytest

from ironlaw.errors import UserError
from ironlaw.model.config import ModelConfig
from ironlaw.train.parallel.rehearse import rehearse, tiny_config
from ironlaw.workload.layout import parse_layout

long = pytest.mark.long


@pytest.mark.parametrize(
    ("model", "layout", "capacity"),
    [
        ("gpt2", "dp=4 tp=2 pp=2 zero=1 sp=1", None),
        ("gpt2", "dp=2", None),  # DDP's own reduction
        pytest.param("llama3-8b", "dp=64 zero=3 tp=2 sp=1", None, marks=long),
        pytest.param("llama3-405b", "dp=8 tp=8 pp=16 zero=1 sp=1", None, marks=long),
        pytest.param("mixtral-8x7b", "dp=32 tp=2 sp=1 zero=3 ep=8", None, marks=long),
        pytest.param("mixtral-8x7b", "dp=16 pp=4 ep=8", 1.25, marks=long),
        pytest.param("mixtral-8x7b", "dp=64 zero=3", None, marks=long),  # fewer experts than ranks
        pytest.param("deepseek-moe-16b", "dp=32 cp=2 zero=1 ep=16", None, marks=long),
    ],
)
def test_every_stage_calls_what_is_planned(model: str, layout: str, capacity: float | None) -> None:
    chosen, config = parse_layout(layout), ModelConfig.named(model)
    if capacity is not None:
        assert config.moe is not None
        config = config.model_copy(update={"moe": config.moe.model_copy(update={"capacity_factor": capacity})})
    stages = rehearse(config, chosen)
    assert [stage.position for stage in stages] == list(range(chosen.pp))
    for stage in stages:
        assert stage.agrees, (stage.position, stage.found, stage.planned)
        assert stage.found
        # Tables of no more than kilobytes: what PyTorch keeps beside them shows.
        if config.moe is None:  # experts' tensors of a few hundred bytes each are lost among what routing keeps
            assert stage.planned_bytes == pytest.approx(stage.held_bytes, rel=0.05), stage.position


def test_tiny_shapes_keep_what_a_layout_divides() -> None:
    config = tiny_config(ModelConfig.named("llama3-70b"), parse_layout("dp=2 tp=8 pp=4 cp=2 sp=1"))
    assert (config.model.layers, config.model.kv_heads, config.model.heads) == (80, 8, 16)
    assert config.sequence % (2 * 2 * 8) == 0 and config.model.parameters < 3e6
    with pytest.raises(UserError, match="does not copy 8 key/value heads"):
        tiny_config(ModelConfig.named("llama3-70b"), parse_layout("tp=16"))
