"""What a plan for a cluster counts of other families: FLOPs and parameters are those of the workload."""

from __future__ import annotations

import pytest

from ironlaw.catalog.models import model_names
from ironlaw.model.config import ModelConfig
from ironlaw.plan.cluster.candidates import candidates_of
from ironlaw.workload.blocks import Shape
from ironlaw.workload.layout import Layout
from ironlaw.workload.operations import total_flops
from ironlaw.workload.program import training_operations

NAMES = [name for name in model_names() if ModelConfig.named(name).switched]


@pytest.mark.parametrize("name", NAMES)
def test_flops_and_parameters_are_the_workloads(name: str) -> None:
    model = ModelConfig.named(name)
    sequence = 2 * model.sliding_window if model.sliding_window else 2048
    candidates = candidates_of(model, [Layout()], sequence=sequence, global_batch=1)
    assert candidates.model_flops()[0] == pytest.approx(
        total_flops(training_operations(Shape(model, 1, sequence))), rel=1e-12
    )
    blocks = sum(model.moe_block_parameters if model.moe else model.block_parameters for _ in range(model.layers))
    assert model.layers * candidates.block_parameters == pytest.approx(blocks, rel=1e-12)


def test_a_window_in_some_layers_saves_their_share() -> None:
    model = ModelConfig.named("gemma-3-27b", sliding_window=1024)
    every, none = (model.model_copy(update=u) for u in ({"full_every": None}, {"sliding_window": None}))
    attended = [
        float(candidates_of(m, [Layout()], sequence=8192, global_batch=1).forward_flops()[1][0])
        for m in (every, model, none)
    ]
    share = (62 - 10) / 62  # layers with a window
    assert attended[1] == pytest.approx(share * attended[0] + (1 - share) * attended[2])


def test_norms_after_branches_keep_more_and_branches_side_by_side_less() -> None:
    from ironlaw.plan.cluster.memory import layer_activation_bytes
    from ironlaw.plan.engines.named import engine

    llama = ModelConfig.named("llama3-8b")
    kept = [
        float(
            layer_activation_bytes(candidates_of(m, [Layout()], sequence=4096, global_batch=1), engine("generic"))[0][0]
        )
        for m in (
            llama.model_copy(update={"parallel_norms": 1}),
            llama,
            llama.model_copy(update={"norm_place": "sandwich"}),
        )
    ]
    assert kept == sorted(kept) and len(set(kept)) == 3
