"""Mixtral 8x7B worked by hand, as docs/worked-examples.md prints it, against the planner's own ingredients.

64 H100s, tp 1, pp 4, ep 8, so dp 16; one sequence of 4,096 tokens at a time; a stage holds 8 of 32 layers, a rank one
expert of each. H = 4096, F = 14336, 8 experts, 2 per token, 32 heads of 128 on 8 key/value heads, 32,000 words.
"""

from dataclasses import replace

import numpy as np
import pytest
from block_products import block_products, matmul_seconds_of

from ironlaw.catalog.nodes import parse_cluster
from ironlaw.ledger import Phase
from ironlaw.machine.efficiency.matmul import matmul_seconds
from ironlaw.machine.efficiency.streaming import streaming_seconds
from ironlaw.model.config import ModelConfig
from ironlaw.plan.cluster.candidates import candidates_of
from ironlaw.plan.cluster.estimate import ClusterRequest, plan_candidates, plan_cluster
from ironlaw.plan.cluster.system import system_of
from ironlaw.plan.engines.named import engine
from ironlaw.workload.layout import parse_layout
from ironlaw.workload.moe import IMBALANCE, permuted_elements

MIXTRAL = ModelConfig.named("mixtral-8x7b")
CLUSTER = parse_cluster("64xh100-sxm-80gb")
LAYOUT = parse_layout("dp=16 pp=4 virtual_stages=8 ep=8 zero=1")
TOKENS, H, F = 4096, 4096, 14336
LAYERS = 8  # of a stage
WORDS = 32_000
ROWS = 2 * TOKENS * IMBALANCE  # of the busiest rank
LINK, CARD = 450e9, 50e9  # bytes/s of a rank: NVLink, its InfiniBand card


@pytest.fixture(scope="module")
def planned():
    candidates = candidates_of(MIXTRAL, [LAYOUT], sequence=4096, global_batch=256)
    where = system_of(CLUSTER, engine("nemo"), "bf16")
    return candidates, where, plan_candidates(candidates, where)


def test_products_of_a_layer(planned):
    """Router 2 x 4096 x 8 x 4096 = 0.27 GFLOP; the expert's 2 x 8192 x 4096 x (28672 + 14336) = 2.89 TFLOP forward, one
    grouped product each for gate and up and for down: 8,192 rows of one expert, 9,011 on the busiest rank."""
    candidates, where, plans = planned
    shapes = block_products(candidates, where.engine)
    assert shapes["router"] == (8, H, TOKENS, 1)
    assert shapes["expert_up"] == pytest.approx((2 * F, H, ROWS, 1)) and shapes["expert_down"] == pytest.approx(
        (H, F, ROWS, 1)
    )
    assert pytest.approx(2.886e12, rel=1e-3) == 2 * 2 * TOKENS * H * 3 * F
    # At 9,011 rows a product is a large dense one: 695 TFLOP/s, the power limit. Reading its weights takes 2% of that.
    seconds = matmul_seconds(ROWS, 2 * F, H, hardware=where.hardware, sustained=True)
    assert 2 * ROWS * H * 2 * F / seconds == pytest.approx(695e12, rel=0.01)
    assert pytest.approx(0.02 * seconds, rel=0.2) == 2 * H * 2 * F / 3.35e12
    dense = 2 * TOKENS * H * (H + 2 * 1024 + H)  # query, key and value; out
    forward, backward = matmul_seconds_of(plans.costs)
    per_second = (dense + 2 * ROWS * 3 * H * F) / forward
    assert per_second == pytest.approx(690e12, rel=0.01)
    assert backward == pytest.approx(2 * forward, rel=0.01)


def test_eight_small_products_fill_waves_together():
    """Tiles of all experts of a rank are one grid: 8 experts of 1,024 rows take as long as one of 8,192 (but for their
    weights), and more where the rows of each do not fill its tiles."""
    hardware = system_of(CLUSTER, engine("nemo"), "bf16").hardware
    one = matmul_seconds(8192, 1536, 2048, 1, hardware=hardware, sustained=True)
    assert matmul_seconds(1024, 1536, 2048, 8, hardware=hardware, sustained=True) == pytest.approx(one, rel=0.06)
    assert matmul_seconds(16, 1536, 2048, 8, hardware=hardware) < 8 * matmul_seconds(
        16, 1536, 2048, 1, hardware=hardware
    )
    # 64 experts of 8 rows: 8 of 64 rows of a tile are of use.
    assert matmul_seconds(8, 1536, 2048, 64, hardware=hardware) > 2 * matmul_seconds(
        512, 1536, 2048, 1, hardware=hardware
    )


def test_rows_are_copied_out_and_added_up(planned):
    """2 x 8,192 rows x 4,096 out (read, written), 8,192 in and 4,096 tokens back: 7 x 4096 x 4096 x 2 B = 235 MB of an
    even load, 255 of the busiest; no second sorting, for a rank has one expert."""
    candidates, where, plans = planned
    sent, back = permuted_elements(candidates.shape(replace(where.engine, rows_sent="choices")))
    elements = (sent + back)[0]
    assert elements == pytest.approx((3 * ROWS + TOKENS) * H) and pytest.approx(235e6, rel=2e-3) == 2 * 7 * TOKENS * H
    norms = 10 * TOKENS * H  # two norms, two residual additions
    moved = 2 * (elements + norms)
    assert plans.costs.block["stream", Phase.FORWARD][0] == pytest.approx(
        streaming_seconds(moved, where.hardware), rel=0.05
    )


def test_exchange_of_rows(planned):
    """8,192 x 4,096 x 2 B = 67.1 MB a rank, 73.8 with the busiest load; 7/8 leave: 64.6 MB, 0.165 ms at what NVLink
    attains (392 of 450 GB/s), 0.22 with start-up. Four of them a layer and micro-batch. No token has two choices on one
    rank, so that sending it once per rank sends as much."""
    _, where, plans = planned
    leaving = ROWS * H * 2 * 7 / 8
    assert leaving == pytest.approx(64.6e6, rel=1e-3)
    attained = where.fabric.island.direct_fraction * LINK
    assert leaving / attained == pytest.approx(0.165e-3, rel=0.01)
    assert leaving / attained < plans.costs.ep_layer[0] < 1.4 * leaving / attained
    micro_batches = 16
    assert plans.times.ep_exposed[0] == pytest.approx(micro_batches * LAYERS * 4 * plans.costs.ep_layer[0])


def test_gradients_and_state(planned):
    """Dense 41.9M a layer and 131M of words are reduced over 16 ranks, experts 176.2M a layer over dp / ep = 2, one on
    each of two nodes: half of 1.409G x 2 B through one card, 28.2 ms of the 32. A rank updates a sixteenth of the
    first, half of the second: 734M parameters, 5.9 GB of moments; 34 B each at 3.2 TB/s take 7.8 ms."""
    candidates, _, plans = planned
    attention = H * (H + 2 * 1024) + H * H
    dense = LAYERS * (attention + 8 * H + 2 * H) + WORDS * H
    experts = LAYERS * 3 * H * F
    assert attention == pytest.approx(41.9e6, rel=2e-3) and pytest.approx(176.2e6, rel=1e-3) == 3 * H * F
    assert candidates.expert_replicas[0] == 2
    through_card = experts * 2 / 2 / CARD
    assert through_card == pytest.approx(28.2e-3, rel=1e-3)
    assert through_card < plans.costs.dp_reduce[0] < 1.2 * through_card
    owned = dense / 16 + experts / 2
    assert owned == pytest.approx(734e6, rel=1e-3)
    assert plans.costs.optimizer[0] == pytest.approx(34 * owned / 3.18e12, rel=0.01)
    assert plans.peak.moments[0] == pytest.approx(8 * owned, rel=0.01)


def test_flops_times_and_mfu_of_the_step():
    """6 x 12.75G active matrix elements x 1.05M tokens + 6 x 32 x 4096 x 4096 of attention each: 83.6 PFLOP, the routed
    experts' imbalance and nothing recomputed among them; lines add up to the step."""
    ledger = plan_cluster(
        ClusterRequest(MIXTRAL, CLUSTER, sequence=4096, global_batch=256, engine="nemo"), LAYOUT
    ).ledger
    tokens = 256 * 4096
    matrices = 32 * (H * (H + 2 * 1024) + H * H + 2 * 3 * H * F + 8 * H) + WORDS * H
    assert matrices == pytest.approx(12.75e9, rel=1e-3)
    flops = (6 * matrices + 6 * 32 * H * 4096) * tokens
    assert flops == pytest.approx(83.6e15, rel=1e-3)
    assert ledger.totals["flops_per_step"].value == pytest.approx(flops, rel=1e-9)
    assert sum(line.flops or 0 for line in ledger.lines) == pytest.approx(flops, rel=1e-6)
    step = ledger.totals["step_seconds"].value
    assert sum(line.seconds or 0 for line in ledger.lines) == pytest.approx(step, rel=1e-6)
    assert ledger.totals["mfu"].value == pytest.approx(flops / step / (64 * 989.4e12), rel=1e-3)


def test_eight_bits_are_cast_once_per_tensor():
    """9,011 x (4096 + 14336) elements in and x (28672 + 4096) of gradients, 4 B each on Hopper (read in 16 bits,
    written in two arrangements): 1.85 GB, 0.58 ms of 8.7; the router stays in 16 bits."""
    candidates = candidates_of(MIXTRAL, [LAYOUT], sequence=4096, global_batch=256)
    plans = {p: plan_candidates(candidates, system_of(CLUSTER, engine("nemo"), p)) for p in ("bf16", "fp8")}
    moved = 4 * ROWS * (H + F + 2 * F + H)
    assert moved == pytest.approx(1.85e9, rel=0.01) and moved / 3.18e12 == pytest.approx(0.58e-3, rel=0.01)
    seconds = sum(matmul_seconds_of(plans["fp8"].costs))
    assert seconds == pytest.approx(8.7e-3, rel=0.05)
    wide = sum(matmul_seconds_of(plans["bf16"].costs))
    assert 1.6 < wide / seconds < 1.9 and np.isclose(plans["fp8"].costs.ep_layer[0], plans["bf16"].costs.ep_layer[0])
