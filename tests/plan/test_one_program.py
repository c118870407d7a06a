"""One description of a step: the plan of one layout, of thousands at once, and the Program of a run say the same."""

import random
from contextlib import suppress
from dataclasses import replace

import numpy as np
import pytest
from pydantic import ValidationError

from ironlaw.catalog.nodes import parse_cluster
from ironlaw.errors import UserError
from ironlaw.model.config import ModelConfig
from ironlaw.plan.cluster.candidates import candidates_of
from ironlaw.plan.cluster.estimate import ClusterRequest, plan_candidates, plan_cluster
from ironlaw.plan.cluster.layout_space import NO_SAVING, lacking, possible_layouts, saving, savings
from ironlaw.plan.cluster.layout_table import layout_of
from ironlaw.plan.cluster.search import search
from ironlaw.plan.cluster.system import system_of
from ironlaw.plan.engines.named import engine
from ironlaw.plan.memory import _RankWalk, highest_peak, peak_memory
from ironlaw.plan.recipe import not_trained_here, recipe_of_layout
from ironlaw.workload.kinds import both_passes
from ironlaw.workload.layout import parse_layout
from ironlaw.workload.program import step
from ironlaw.workload.recipe import Recipe, StepBatch
from ironlaw.workload.recompute import policies

SEQUENCE, BATCH = 1024, 64
MODELS = ("llama3-8b", "gpt2", "olmo-2-7b", "gemma-2-9b", "mixtral-8x7b", "deepseek-v2-lite", "qwen2-57b-a14b")
LAYOUTS = ("dp=1 micro_batch=2", "dp=4", "dp=4 zero=1", "dp=4 zero=3", "tp=4", "tp=4 sp=1", "cp=4", "dp=2 pp=2",
           "dp=4 zero=2 recompute=full", "dp=4 ep=4")  # fmt: skip
ONLY_PLANNED = {("host", "step"), ("other", "pipeline_bubble"), ("host", "dispatch")}
"""Waiting that no operation of a Program stands for."""


def program_of(model, layout):
    recipe = Recipe("bf16", cuda=True, gloo=False, recompute=policies(layout.recompute, model))
    return step(model, StepBatch(BATCH, SEQUENCE), layout, recipe)


def possible(name):
    model = ModelConfig.named(name)
    for text in LAYOUTS:
        layout = parse_layout(text)
        if layout.reason_invalid(model, sequence=SEQUENCE, global_batch=BATCH) or not_trained_here(layout, model):
            continue
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
            ClusterRequest(model, cluster, sequence=SEQUENCE, global_batch=BATCH, engine="ironlaw"), layout
        ).ledger
        planned = {
            (str(line.phase), str(line.kind), line.operation)
            for line in ledger.lines
            if (str(line.kind), line.operation) not in ONLY_PLANNED
        }
        assert planned == keys, f"{name} {layout}"
        assert sum(line.seconds for line in ledger.lines) == pytest.approx(ledger.totals["step_seconds"].value)
        assert sum(line.flops or 0 for line in ledger.lines) == ledger.totals["flops_per_step"].value


def some_model(chance):
    """Any decoder whose parts go together."""
    while True:
        heads, size = chance.choice([4, 8, 12, 16]), chance.choice([16, 64, 128])
        document = {
            "layers": chance.choice([2, 4, 6, 8]), "hidden": chance.choice([heads * size, 512, 768]), "heads": heads,
            "head_size": size, "kv_heads": chance.choice([heads, heads // 2, 2]), "vocab": chance.choice([1000, 32000]),
            "context": 4096, "ffn": chance.choice([512, 1024, 1408]), "norm": chance.choice(["layernorm", "rmsnorm"]),
            "norm_place": chance.choice(["pre", "pre", "post"]), "qk_norm": chance.random() < 0.3,
            "positions": chance.choice(["learned", "rope", "none"]), "bias": chance.random() < 0.3,
            "gated_ffn": chance.random() < 0.5, "activation": chance.choice(["gelu", "silu", "relu2"]),
            "tied": chance.random() < 0.5, "dropout": chance.choice([0, 0, 0, 0.1]),
        }  # fmt: skip
        if chance.random() < 0.4:
            document["moe"] = {
                "experts": chance.choice([4, 8, 16]), "experts_per_token": chance.choice([1, 2, 3]),
                "expert_ffn": chance.choice([256, 512]), "shared_experts": chance.choice([0, 1]),
                "dense_layers": chance.choice([0, 1]), "score": chance.choice(["softmax", "sigmoid"]),
            }  # fmt: skip
        if chance.random() < 0.25:
            document |= {"kv_heads": None, "head_size": None, "positions": "rope", "bias": False, "qk_norm": False}
            document["latent"] = {
                "key_value_rank": 64, "query_rank": chance.choice([None, 96]), "plain_size": 32, "rotary_size": 16,
                "value_size": chance.choice([32, 48]),
            }  # fmt: skip
        if chance.random() < 0.25:
            document |= {"sliding_window": 256, "full_every": chance.choice([None, 2])}
        with suppress(ValidationError):
            return ModelConfig(**document)


def some_layouts(chance, model, count, number):
    table = possible_layouts(model, count, SEQUENCE, BATCH, {}, 8, True, ("all_gather", "ring", "all_to_all"))
    variants = [NO_SAVING, *savings(model, offload=False)]
    return [saving(table[[chance.randrange(len(table))]], chance.choice(variants)) for _ in range(number)]


QUANTITIES = ("batch", "flops", "elements", "bytes_moved", "saved_bytes", "temporary_bytes", "frees_saved_bytes",
              "frees_temporary_bytes", "gradient_bytes")  # fmt: skip


def test_operations_of_arrays_are_those_of_numbers():
    """Of any model in any layout that our trainer runs: every operation that the Program has, in every quantity."""
    chance, ours, compared = random.Random(0), engine("ironlaw"), 0
    while compared < 25:
        model = ModelConfig.named(MODELS[compared]) if compared < len(MODELS) else some_model(chance)
        layout = layout_of(some_layouts(chance, model, chance.choice([2, 4, 8, 16]), 1)[0][0])
        if not_trained_here(layout, model) or lacking(ours, layout):
            continue
        compared += 1
        shape = candidates_of(model, [layout], sequence=SEQUENCE, global_batch=BATCH).shape(ours)
        batch, recipe = recipe_of_layout(model, layout, SEQUENCE, BATCH, "bf16", "adamw")
        program = step(model, batch, layout, replace(recipe, loss_chunk=0))
        layers = {layer.kind: layer for stage in program.stages for layer in stage.layers if not layer.recomputed}
        for kind, layer in layers.items():
            exact = [op for op in (*layer.forward, *layer.backward) if op.repeat]
            many = [op for part in both_passes(shape, kind) for op in part if np.any(op.repeat)]
            assert [op.name for op in exact] == [op.name for op in many]
            for one, op in zip(exact, many, strict=True):
                values = [(*(o.matmul or ()), *(getattr(o, name) or 0 for name in QUANTITIES)) for o in (one, op)]
                arrays = [float(np.reshape(value, -1)[0]) for value in values[1]]
                assert arrays == pytest.approx(values[0], rel=1e-9), (op.name, layout, model)


@pytest.mark.parametrize("engine_name", ["ironlaw", "nemo", "torchtitan", "megatron-2021"])
@pytest.mark.parametrize("seed", [0, 1])
def test_one_plan_is_what_thousands_at_once_say_of_it(engine_name, seed):
    chance = random.Random(f"{engine_name} {seed}")
    model = chance.choice([ModelConfig.named(chance.choice(MODELS)), some_model(chance)])
    cluster = parse_cluster(chance.choice(["16xh100-sxm-80gb", "8xa100-sxm-40gb", "64xb200-sxm", "16xmi300x"]))
    system = system_of(cluster, engine(engine_name), "bf16")
    rows = np.concatenate(some_layouts(chance, model, cluster.count, 40))

    def planned(part):
        return plan_candidates(candidates_of(model, part, sequence=SEQUENCE, global_batch=BATCH), system)

    together = planned(rows)
    for i in range(0, len(rows), 4):
        alone = planned(rows[i : i + 1])
        assert together.step_seconds[i] == pytest.approx(alone.step_seconds[0], rel=1e-9)
        assert together.peak.total[i] == pytest.approx(alone.peak.total[0], rel=1e-9)


def test_what_our_trainer_cannot_run_is_not_planned_for_it():
    """Neither searched, recomputing or not, nor where it is asked for."""
    asked = ClusterRequest(ModelConfig.named("gpt2"), parse_cluster("4xh100-sxm-80gb"), 1024, 16, engine="ironlaw")
    found = search(asked, keep=10_000)
    assert found.best and not [one for one in found.best if not_trained_here(one.layout, asked.model)]
    assert any("ZeRO 3 nor recomputation" in reason for reason in found.ruled_out)
    whole = search(replace(asked, optimizer="muon"), keep=10_000)
    assert whole.best and not [one for one in whole.best if one.layout.zero or one.layout.tp * one.layout.pp > 1]
    with pytest.raises(UserError, match=r"dp alone with layout\.zero = 0"):
        plan_cluster(replace(asked, optimizer="adafactor"), parse_layout("dp=4 zero=1"))
    with pytest.raises(UserError, match="use schedule=1f1b"):
        plan_cluster(asked, parse_layout("dp=2 pp=2 zero=3 schedule=zb"))


def walked_at(asked, layout, position):
    batch, recipe = asked.run(layout)
    return peak_memory(step(asked.model, batch, layout, recipe, position), position).total


@pytest.mark.parametrize("seed", [0, 1])
def test_no_walk_falls_below_its_closed_form(seed):
    """By which a search rules layouts out unwalked."""
    chance, ours, walked = random.Random(seed), engine("ironlaw"), 0
    while walked < 25:
        model = chance.choice([ModelConfig.named(chance.choice(MODELS)), some_model(chance)])
        count = chance.choice([2, 4, 8, 16, 64])
        asked = ClusterRequest(model, parse_cluster(f"{count}xh100-sxm-80gb"), SEQUENCE, BATCH, engine="ironlaw")
        layout = layout_of(some_layouts(chance, model, count, 1)[0][0])
        if not_trained_here(layout, model) or lacking(ours, layout):
            continue
        walked += 1
        batch, recipe = asked.run(layout)
        _, highest, _ = highest_peak(model, batch, layout, recipe)
        least = plan_candidates(asked.candidates([layout]), asked.system).peak.total[0]
        assert 0.05 * highest.total < least <= highest.total, f"{layout} {model}"


SMALL_SEARCHES = (
    ("gpt2", "2xt4", 1024, 256),
    ("llama3-1b", "2xa100-sxm-40gb", 4096, 8),
    ("deepseek-v2-lite", "4xb200-sxm", 4096, 64),
    ("llama3-8b", "4xh100-sxm-80gb", 4096, 16),
)


@pytest.mark.parametrize(("name", "on", "sequence", "batch"), SMALL_SEARCHES)
def test_what_a_search_finds_is_what_walking_every_layout_finds(name, on, sequence, batch):
    """The first of its ranking: every layout that is planned to be faster is walked, and does not fit. What it says of
    a layout, the plan of that layout says."""
    asked = ClusterRequest(ModelConfig.named(name), parse_cluster(on), sequence, batch, engine="ironlaw")
    found = search(asked, keep=3)
    for one in [*found.best, *([found.safest] if found.safest else [])]:
        plan = plan_cluster(asked, one.layout)
        assert plan.fits
        assert (one.step_seconds, one.peak_bytes) == pytest.approx((plan.step_seconds, plan.peak_bytes), rel=1e-9)
    cluster, model = asked.cluster, asked.model
    table = possible_layouts(model, cluster.count, sequence, batch, {}, 8, True, asked.system.engine.cp_kinds)
    rows = np.concatenate([saving(table, columns) for columns in (NO_SAVING, *savings(model, offload=False))])
    outcome = plan_candidates(asked.candidates(rows), asked.system)
    faster = rows[outcome.step_seconds < found.best[0].step_seconds * (1 - 1e-9)]
    assert len(faster) and outcome.fits.any()
    for row in faster:
        layout = layout_of(row)
        if not not_trained_here(layout, model):
            assert walked_at(asked, layout, 0) > outcome.limit_bytes or not plan_cluster(asked, layout).fits


@pytest.mark.parametrize("name", ["llama3-1b", "mixtral-8x7b", "deepseek-v2-lite", "olmo-2-7b", "gemma-2-9b"])
@pytest.mark.parametrize(("precision", "chunk"), [("bf16", 0), ("fp32", 0), ("bf16", 512)])
@pytest.mark.parametrize(
    "text", ["dp=2 tp=2 sp=1 micro_batch=2", "dp=2 tp=2 micro_batch=2", "dp=4 zero=3 micro_batch=2"]
)
def test_a_micro_batch_leaves_gradients_alone(name, precision, chunk, text):
    """What else it leaves would be there again with each one: 512 MiB of Mixtral under sequence parallelism."""
    model, layout = ModelConfig.named(name), parse_layout(text)
    batch, recipe = recipe_of_layout(model, layout, 2048, 16, precision, "adamw")
    recipe = replace(recipe, loss_chunk=chunk if model.logits_are_a_product else 0)
    program = step(model, batch, layout, recipe, position=0)
    rank = _RankWalk(program, 0)
    rank._forward(rank.first)
    before = dict(rank.walk.now)
    rank._backward(rank.first)
    rank._forward(rank.first)
    left = {name: size - before[name] for name, size in rank.walk.now.items() if size != before[name]}
    parts = [left.get(name, 0) for name in ("activations", "temporaries")]
    assert not (sum(parts) if model.moe else any(parts)), left
