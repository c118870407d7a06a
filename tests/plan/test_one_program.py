"""One description of a step: the plan of one layout, of thousands at once, and the Program of a run say the same."""

import random

import numpy as np
import pytest

from ironlaw.catalog.nodes import parse_cluster
from ironlaw.model.config import ModelConfig
from ironlaw.plan.cluster.candidates import candidates_of
from ironlaw.plan.cluster.estimate import plan_candidates, plan_cluster
from ironlaw.plan.cluster.layout_space import NO_SAVING, possible_layouts, saving, savings
from ironlaw.plan.cluster.request import ClusterStep
from ironlaw.plan.cluster.system import system_of
from ironlaw.plan.engines.named import engine
from ironlaw.workload.kinds import both_passes
from ironlaw.workload.layout import parse_layout
from ironlaw.workload.program import step
from ironlaw.workload.recipe import Batch, Recipe
from ironlaw.workload.recompute import RecomputeConfig, policies

SEQUENCE, BATCH = 1024, 64
MODELS = ("llama3-8b", "gpt2", "olmo-2-7b", "gemma-2-9b", "mixtral-8x7b", "deepseek-v2-lite", "qwen2-57b-a14b")
LAYOUTS = ("dp=1 micro_batch=2", "dp=4", "dp=4 zero=1", "dp=4 zero=3", "tp=4", "tp=4 sp=1", "cp=4", "dp=2 pp=2",
           "dp=4 zero=2 recompute=full", "dp=4 ep=4")  # fmt: skip
ONLY_PLANNED = {("host", "step"), ("other", "pipeline_bubble"), ("host", "dispatch")}
"""Waiting that no operation of a Program stands for."""


def program_of(model, layout):
    mode = RecomputeConfig(mode="full") if layout.recompute == "full" else RecomputeConfig()
    recipe = Recipe("bf16", cuda=True, gloo=False, recompute=policies(mode, model))
    return step(model, Batch(BATCH, SEQUENCE), layout, recipe)


def possible(name):
    model = ModelConfig.named(name)
    for text in LAYOUTS:
        layout = parse_layout(text)
        if layout.reason_invalid(model, sequence=SEQUENCE, global_batch=BATCH) is None:
            yield model, layout


@pytest.mark.parametrize("name", MODELS)
def test_a_cluster_plan_of_our_trainer_has_the_keys_of_its_run(name):
    for model, layout in possible(name):
        program = program_of(model, layout)
        keys = {
            (str(op.phase), str(op.kind), op.name)
            for stage in range(len(program.stages))
            for op, times in program.operations(stage)
            if times
        }
        keys |= {
            ("communication", "collective", f"{c.dimension} {c.kind}") for rank in program.collectives for c in rank
        }
        cluster = parse_cluster(f"{layout.accelerators}xh100-sxm-80gb")
        ledger = plan_cluster(
            ClusterStep(model, cluster, sequence=SEQUENCE, global_batch=BATCH, engine="ironlaw"), layout
        )
        planned = {
            (str(line.phase), str(line.kind), line.operation)
            for line in ledger.lines
            if (str(line.kind), line.operation) not in ONLY_PLANNED
        }
        assert planned == keys, f"{name} {layout}"
        assert sum(line.seconds for line in ledger.lines) == pytest.approx(ledger.totals["step_seconds"].value)
        assert sum(line.flops or 0 for line in ledger.lines) == ledger.totals["flops_per_step"].value


@pytest.mark.parametrize("name", MODELS)
def test_operations_of_many_candidates_are_those_of_the_exact_program(name):
    """Products, FLOPs, bytes moved and kept of every block: arrays in place of numbers, and the same functions."""
    ours = engine("ironlaw")
    for model, layout in possible(name):
        shape = candidates_of(model, [layout], sequence=SEQUENCE, global_batch=BATCH).shape(ours)
        layers = {layer.kind: layer for layer in program_of(model, layout).stages[0].layers if layer.recomputed == ()}
        for kind in layers.keys() - {"embedding", "head"}:
            exact = [op for op in (*layers[kind].forward, *layers[kind].backward) if op.repeat]
            many = [op for part in both_passes(shape, kind) for op in part]
            assert [op.name for op in exact] == [op.name for op in many]
            for one, op in zip(exact, many, strict=True):
                values = (*(one.matmul or ()), one.batch, one.flops or 0, one.bytes_moved, one.saved_bytes)
                arrays = (*(op.matmul or ()), op.batch, op.flops or 0, op.bytes_moved, op.saved_bytes)
                assert [float(np.reshape(a, -1)[0]) for a in arrays] == pytest.approx(values, rel=1e-9), op.name


@pytest.mark.parametrize("engine_name", ["ironlaw", "nemo", "torchtitan", "megatron-2021"])
@pytest.mark.parametrize("seed", [0, 1])
def test_one_plan_is_what_thousands_at_once_say_of_it(engine_name, seed):
    chance = random.Random(f"{engine_name} {seed}")
    model = ModelConfig.named(chance.choice(MODELS))
    cluster = parse_cluster(chance.choice(["16xh100-sxm-80gb", "8xa100-sxm-40gb", "64xb200-sxm", "16xmi300x"]))
    system = system_of(cluster, engine(engine_name), "bf16")
    table = possible_layouts(model, cluster.count, SEQUENCE, BATCH, {}, 8, True, ("all_gather", "ring", "all_to_all"))
    variants = [NO_SAVING, *savings(model, offload=False)]
    picked = [table[[chance.randrange(len(table))]] for _ in range(40)]
    rows = np.concatenate([saving(row, chance.choice(variants)) for row in picked])

    def planned(part):
        return plan_candidates(candidates_of(model, part, sequence=SEQUENCE, global_batch=BATCH), system)

    together = planned(rows)
    for i in range(0, len(rows), 4):
        alone = planned(rows[i : i + 1])
        assert together.step_seconds[i] == pytest.approx(alone.step_seconds[0], rel=1e-9)
        assert together.peak.total[i] == pytest.approx(alone.peak.total[0], rel=1e-9)
