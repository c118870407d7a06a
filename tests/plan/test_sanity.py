"""What no plan may say, over thousands of layouts of many models on many clusters: parts that do not add up, faster
hardware that is slower, recomputation that pays, more of a peak than anybody reached."""

import random
from dataclasses import replace

import numpy as np
import pytest

from ironlaw.catalog.accelerators import accelerator, accelerator_names
from ironlaw.catalog.models import model_names
from ironlaw.catalog.nodes import node, parse_cluster
from ironlaw.errors import UserError
from ironlaw.machine.efficiency.collectives import collective_seconds
from ironlaw.model.config import ModelConfig
from ironlaw.plan.cluster.candidates import candidates_of
from ironlaw.plan.cluster.estimate import ClusterRequest, plan_candidates
from ironlaw.plan.cluster.layout_space import lacked, possible_layouts, saving, savings
from ironlaw.plan.cluster.search import hiding, search
from ironlaw.plan.cluster.system import fabric_of, system_of
from ironlaw.plan.engines.named import engine, engines
from ironlaw.plan.requests.hardware import assumed_links
from ironlaw.workload.layout import parse_layout

CASES = [
    ("llama3-8b", "64xh100-sxm-80gb", "nemo", "bf16", 8192, 256),
    ("llama3-8b", "8xb200-sxm", "nemo", "nvfp4", 8192, 64),
    ("llama3-70b", "256xh100-sxm-80gb", "megatron-core", "fp8", 32768, 256),
    ("gpt2-xl", "8xa100-sxm-40gb", "generic", "bf16", 1024, 256),
    ("gpt3-175b", "1024xa100-sxm-80gb", "megatron-deepspeed", "fp16", 2048, 1024),
    ("mixtral-8x7b", "256xl40s", "nanotron", "fp16", 4096, 1024),
    ("mixtral-8x22b", "128xh100-sxm-80gb", "nemo", "fp8", 4096, 256),
    ("qwen3-30b-a3b", "16xmi300x", "torchtitan-2025", "bf16", 4096, 256),
    ("mistral-7b", "16xh200", "composer-fsdp", "bf16", 32768, 64),
    ("gpt2", "1xh100-sxm-80gb", "torchtitan", "bf16", 1024, 64),
]
PARTS = ("weights", "gradients", "master", "moments", "activations", "logits", "temporaries", "context")
TERMS = (
    "forward", "backward", "host_excess", "bubble", "tp_exposed", "cp_exposed", "pp_exposed", "ep_exposed",
    "fsdp_exposed", "reduce_exposed", "gather_exposed", "optimizer", "offload_exposed", "host_step",
    "small_collectives", "head_matmul", "loss", "embedding",
)  # fmt: skip


@pytest.mark.parametrize("case", CASES, ids=lambda case: f"{case[0]} on {case[1]}, {case[2]} {case[3]}")
def test_no_plan_is_absurd(case):
    name, on, software, precision, sequence, batch = case
    model, cluster = ModelConfig.named(name).model_copy(update={"context": max(sequence, 1024)}), parse_cluster(on)
    where = system_of(cluster, engine(software), precision)
    table = possible_layouts(model, cluster.count, sequence, batch, {}, cp_kinds=where.engine.cp_kinds)
    table = table[random.Random(0).sample(range(len(table)), min(600, len(table)))]

    def planned(table, where):
        candidates = candidates_of(model, table, sequence=sequence, global_batch=batch)
        return candidates, plan_candidates(candidates, where)

    candidates, plans = planned(table, where)
    seconds = plans.times.step_seconds
    np.testing.assert_allclose(sum(getattr(plans.times, term) for term in TERMS), seconds, rtol=1e-9)
    np.testing.assert_allclose(sum(getattr(plans.peak, part) for part in PARTS), plans.peak.total, rtol=1e-9)
    assert all((getattr(plans.times, term) >= -1e-9 * seconds).all() for term in TERMS)
    assert all((getattr(plans.peak, part) >= 0).all() for part in PARTS)
    used = candidates.model_flops() / seconds / cluster.count / where.hardware.peak(precision)
    assert (used > 0).all() and used.max() < 0.72

    hardware, fabric = where.hardware, where.fabric
    peaks = {word: 2 * value for word, value in hardware.peak_flops_per_second.items()}
    better = [
        replace(where, hardware=replace(hardware, memory_bytes_per_second=2 * hardware.memory_bytes_per_second)),
        replace(where, hardware=replace(hardware, peak_flops_per_second=peaks)),
        replace(where, fabric=replace(fabric, network_bytes_per_second=2 * fabric.network_bytes_per_second)),
        replace(where, fabric=replace(fabric, island_bytes_per_second=2 * fabric.island_bytes_per_second)),
    ]
    for faster in better:  # shorter compute hides less, which a zero-bubble pipeline of sharded weights pays twice
        assert (planned(table, faster)[1].times.step_seconds <= seconds * 1.02).all()
    for variant in savings(model, offload=False):
        assert (planned(saving(table, variant), where)[1].times.step_seconds >= seconds * (1 - hiding(table))).all()


@pytest.mark.parametrize("name", ["llama3-8b", "mixtral-8x7b"])
def test_more_memory_never_makes_the_best_layout_worse(name):
    cluster = parse_cluster("16xh100-sxm-80gb")
    seconds = []
    for size in (60, 80, 120, 190):
        memory = replace(cluster.accelerator.memory_bytes, value=size * 2.0**30)
        larger = replace(cluster, accelerator=replace(cluster.accelerator, memory_bytes=memory))
        found = search(
            ClusterRequest(ModelConfig.named(name), larger, sequence=4096, global_batch=64), keep=1, hybrid=False
        )
        seconds.append(found.best[0].step_seconds if found.best else np.inf)
    assert seconds == sorted(seconds, reverse=True) and seconds[0] > seconds[-1]


SUCCESSORS = (
    ("v100-sxm-32gb@dgx-1-v100", "a100-sxm-80gb"), ("a100-sxm-40gb", "a100-sxm-80gb"),
    ("a100-sxm-80gb", "h100-sxm-80gb"), ("h100-sxm-80gb", "h200"),
    ("h200", "b200-sxm"), ("b200-sxm", "b300"), ("b200-sxm", "gb200"), ("b300", "gb300"),
    ("gb200", "gb300"), ("a100-pcie-80gb", "h100-pcie-80gb"), ("l4", "l40s"), ("mi300x", "mi325x"),
    ("mi325x", "mi355x"), ("tpu-v5e", "tpu-v6e"), ("gaudi2", "gaudi3"),
)  # fmt: skip
"""An accelerator and one that its maker sells as faster in every way, in nodes of one size or a larger one."""


@pytest.mark.parametrize(("older", "newer"), SUCCESSORS, ids=lambda name: name)
def test_a_successor_is_never_slower_under_the_same_software_nor_fewer_bits_on_it(older, newer):
    jobs = (("llama3-8b", 8, 64, 40), ("llama3-70b", 64, 128, 30), ("llama3-405b", 128, 128, 30))
    for name, count, batch, layouts in jobs:
        model = ModelConfig.named(name)
        table = possible_layouts(model, count, 8192, batch, {})
        table = table[random.Random(0).sample(range(len(table)), layouts)]
        candidates = candidates_of(model, table, sequence=8192, global_batch=batch)
        clusters = [parse_cluster(f"{count}x{accelerator}") for accelerator in (older, newer)]
        peaks = [cluster.accelerator.peak_flops_per_second for cluster in clusters]
        formats = [
            name
            for name, peak in (("bf16", "fp16"), ("bf16", "bf16"), ("fp8", "fp8"), ("mxfp8", "fp8"), ("nvfp4", "fp4"))
            if all(peak in of for of in peaks)
        ]
        for software in ("nemo", "torchtitan", "generic"):
            seconds = {}
            for precision in dict.fromkeys(formats):
                before, after = (
                    plan_candidates(candidates, system_of(cluster, engine(software), precision)).times.step_seconds
                    for cluster in clusters
                )
                assert (after <= 1.005 * before).all(), (name, software, precision)
                seconds[precision] = after
            # 2%: casts, where collectives leave products nothing to gain. Gaudi 3's 8 bits are as fast as 16.
            for wide, narrow, rates in (("bf16", "fp8", ("bf16", "fp8")), ("mxfp8", "nvfp4", ("fp8", "fp4"))):
                if narrow in seconds and peaks[1][rates[1]].value > peaks[1][rates[0]].value:
                    assert (seconds[narrow] <= 1.02 * seconds[wide]).all(), (name, software, narrow)


FORMATS = {"bf16": "bf16", "fp16": "fp16", "fp8": "fp8", "mxfp8": "fp8", "nvfp4": "fp4"}
"""A precision, and the peak without which an accelerator does not compute in it."""


def drawn(draw: random.Random):
    """A model on a cluster under some software, 40 of its layouts, and what plans them; None where it cannot be."""
    name, on, software = (draw.choice(list(of)) for of in (model_names(), accelerator_names(), engines()))
    count, sequence = draw.choice((2, 4, 8, 32, 128, 1024)), draw.choice((512, 2048, 8192, 32768))
    model = ModelConfig.named(name).model_copy(update={"context": max(sequence, 1024)})
    batch = count * draw.choice((1, 4, 16))
    peaks = accelerator(on).peak_flops_per_second
    precision = draw.choice([word for word, peak in FORMATS.items() if peak in peaks] or [""])
    cluster = parse_cluster(f"{count}x{on}")
    try:
        where = system_of(cluster, engine(software), precision)
        table = possible_layouts(model, count, sequence, batch, {})
    except UserError:
        return None
    table = table[~np.any([np.zeros(len(table), bool), *lacked(where.engine, table).values()], axis=0)]
    if not len(table):
        return None
    table = table[draw.sample(range(len(table)), min(40, len(table)))]

    def planned(where, table=table, times=1):
        candidates = candidates_of(model, table, sequence=sequence, global_batch=times * batch)
        return candidates, plan_candidates(candidates, where)

    return f"{name} on {count}x{on}, {software} {precision} {sequence}", cluster, where, table, planned


@pytest.mark.parametrize("seed", (0, 1, 11, 14, 19, 23))  # the last four found absurd plans
def test_no_plan_of_a_random_sample_is_absurd(seed):
    """Weights that do not fit what is planned, more of a peak than anybody reached, more replicas that make each one's
    work another, fewer bits that are slower where products bind."""
    draw = random.Random(seed)
    for said, cluster, where, table, planned in filter(None, (drawn(draw) for _ in range(6))):
        candidates, plans = planned(where)
        seconds = plans.times.step_seconds
        assert np.isfinite(seconds).all() and (seconds > 0).all(), said
        assert (plans.peak.total >= plans.peak.weights).all() and (plans.peak.weights > 0).all(), said
        assert (
            candidates.model_flops() / seconds / cluster.count / where.hardware.peak(where.precision)
        ).max() < 0.72, said

        wider = table.copy()
        wider["dp"] *= 2
        twice = replace(cluster, count=2 * cluster.count)
        _, more = planned(system_of(twice, where.engine, where.precision), wider, 2)
        dense, whole = table["ep"] == 1, (table["ep"] == 1) & (table["zero"] == 0)  # sharded, more share the update
        for term in ("forward", "backward", "head_matmul", "loss", "embedding"):
            before, after = (getattr(of.times, term)[whole] for of in (plans, more))
            np.testing.assert_allclose(after, before, rtol=1e-9, err_msg=said)
        alone, shared = (of.times.step_seconds - of.times.reduce_exposed for of in (plans, more))
        assert (shared >= 0.98 * alone)[whole].all(), said  # one link of a mesh is no faster than a network card

        peaks = cluster.accelerator.peak_flops_per_second
        bound = (candidates.tokens >= 8192) & (candidates.model.hidden / candidates.tp >= 4096) & dense
        for wide, narrow in (("bf16", "fp8"), ("mxfp8", "nvfp4")):
            rates = [peaks[FORMATS[word]].value if FORMATS[word] in peaks else 0.0 for word in (wide, narrow)]
            if bound.any() and 0 < 1.5 * rates[0] < rates[1]:
                slow, fast = (planned(system_of(cluster, where.engine, word))[1].times for word in (wide, narrow))
                assert (fast.step_seconds <= 1.02 * slow.step_seconds)[bound].all(), (said, narrow)


def all_reduce(name, where, ranks, size):
    return collective_seconds("all_reduce", size, ranks, fabric=fabric_of(accelerator(name), node(where)))


def test_nvlink_is_not_timed_by_what_a_bus_attains():
    nvlink, bus = (
        all_reduce(name, where, 4, 2**28)
        for name, where in (("v100-sxm-32gb", "dgx-1-v100"), ("v100-pcie-32gb", "pcie-workstation"))
    )
    assert 2**28 * 1.5 / nvlink > 0.6 * 150e9 > 2**28 * 1.5 / bus  # bytes that a rank sends, of NVLink's rate


@pytest.mark.parametrize(
    ("name", "ranks", "measured_seconds"),  # of 512 MiB; NCCL 2.27 and 2.29 (ai-dynamo/aiconfigurator)
    [("l40s", 2, 0.0267), ("l40s", 4, 0.156), ("l40s", 8, 0.649), ("rtx-pro-6000-blackwell", 8, 0.0381)],
)
def test_cards_share_pcie_as_measured(name, ranks, measured_seconds):
    assert all_reduce(name, "pcie-server", ranks, 2**29) == pytest.approx(measured_seconds, rel=0.25)


def test_pcie_reduces_nothing_in_a_switch():
    sent = 2 * 7 / 8 * 2**29
    assert all_reduce("h100-pcie-80gb", "pcie-server", 8, 2**29) > 2 * sent / 63e9


@pytest.mark.parametrize(
    ("on", "said"), [("8xa40", True), ("2xa40", False), ("8xl40s", False), ("8xh100-sxm-80gb", False)]
)
def test_how_cards_share_pcie_is_said_where_nobody_measured_it(on, said):
    assert any(one.name == "PCIe" for one in assumed_links(parse_cluster(on))) == said


def test_links_whose_constants_are_assumed_are_named():
    """Collectives of V100s were measured over PCIe alone."""
    links = {name: system_of(parse_cluster(name), engine("nemo"), "fp16") for name in ("4xv100-sxm-32gb", "4xl40s")}
    named = {name: "collectives" in str(where.hardware.efficiency.assumptions()) for name, where in links.items()}
    assert named == {"4xv100-sxm-32gb": True, "4xl40s": False}


@pytest.mark.parametrize(
    ("name", "on", "software", "layout", "batch", "formats"),
    [
        # The same compute hides transfers once, sharded ones or those among copies.
        ("mixtral-8x22b", "8xmi300x", "generic", "dp=4 zero=2 shard=2 pp=2", 4, ("fp32", "tf32")),
        # Transfers go on while the device waits for launches.
        ("phi-3-mini", "16xh800-sxm-80gb", "nanotron", "dp=16 recompute=every:8", 16, ("tf32", "bf16")),
        # Attention that hides the exchange of keys hides no rows of experts.
        ("mixtral-8x22b", "64xl40s", "nemo", "dp=4 cp=16 cp_kind=ring ep=16 micro_batch=64", 256, ("fp32", "tf32")),
    ],
)
def test_faster_products_make_no_step_longer(name, on, software, layout, batch, formats):
    candidates = candidates_of(ModelConfig.named(name), [parse_layout(layout)], sequence=512, global_batch=batch)
    systems = (system_of(parse_cluster(on), engine(software), precision) for precision in formats)
    slow, fast = (plan_candidates(candidates, where).times.step_seconds[0] for where in systems)
    assert fast <= 1.0001 * slow
