"""Traffic, latency and published points of the collective model."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from ironlaw.errors import UserError
from ironlaw.machine.efficiency.collectives import collective_seconds, traffic_bytes
from ironlaw.machine.efficiency.hardware import CollectiveConstants, Fabric
from ironlaw.machine.efficiency.store import load_efficiency, load_network


def node(generation: str, link: float, **options) -> Fabric:
    constants = load_efficiency(generation).collectives
    assert constants is not None
    return Fabric(8, link, constants, **options)


A100, H100, B200 = node("ampere", 300e9), node("hopper", 450e9), node("blackwell", 900e9)
H100_CLUSTER = node("hopper", 450e9, network_bytes_per_second=50e9, network=load_network("infiniband"))

IDEAL = CollectiveConstants(0.0, 0.0, 0.0, 1.0, 1.0, 1e12)  # no latency, nominal bandwidth


def test_worked_example_seven_billion_gradients() -> None:
    # 7e9 fp16 gradients = 14 GB, ring over 8 nodes: 2 x 7/8 x 14 = 24.5 GB each, at 100 Gb/s 1.96 s
    assert traffic_bytes("all_reduce", 14e9, 8) == pytest.approx(24.5e9)
    fabric = Fabric(8, 100e9 / 8, IDEAL)
    assert collective_seconds("all_reduce", 14e9, 8, fabric=fabric) == pytest.approx(1.96)


@pytest.mark.parametrize("ranks", [2, 3, 8, 64, 4096])
def test_large_messages_move_what_the_ring_moves(ranks: int) -> None:
    fabric = Fabric(ranks, 1e9, IDEAL)
    share = (ranks - 1) / ranks
    assert collective_seconds("all_reduce", 1e9, ranks, fabric=fabric) == pytest.approx(2 * share)
    for kind in ("all_gather", "reduce_scatter", "all_to_all"):
        assert collective_seconds(kind, 1e9, ranks, fabric=fabric) == pytest.approx(share)
    assert collective_seconds("send_recv", 1e9, ranks, fabric=fabric) == pytest.approx(1.0)


def test_latency_grows_with_n_for_rings_and_log_n_for_trees() -> None:
    fabric = Fabric(4096, 450e9, H100.island)
    n = np.array([16.0, 256.0, 4096.0])
    ring = collective_seconds("all_reduce", 8.0, n, fabric=fabric)
    tree = collective_seconds("all_reduce", 8.0, 8 * n, 8, fabric=H100_CLUSTER)  # over islands, the quicker one
    assert (ring[2] - ring[1]) / (ring[1] - ring[0]) == pytest.approx(16, rel=0.05)
    assert (tree[2] - tree[1]) / (tree[1] - tree[0]) == pytest.approx(1, rel=0.05)
    assert tree[2] < ring[2] / 20


def test_nothing_to_do_costs_nothing() -> None:
    assert collective_seconds("all_reduce", 1e9, 1, fabric=H100) == 0.0
    assert collective_seconds("all_gather", 0.0, 8, fabric=H100) == 0.0


@pytest.mark.parametrize(
    ("fabric", "bus"),
    [
        # nccl-tests, all-reduce of 8 GiB and more over 8: A100 235, H100 480, B200 838 GB/s
        # (github.com/stas00/ml-engineering network/README.md; NVIDIA/dgxc-benchmarking nccl/README.md)
        (A100, 235e9), (H100, 480e9), (B200, 838e9),
    ],
)  # fmt: skip
def test_published_bus_bandwidth(fabric: Fabric, bus: float) -> None:
    seconds = collective_seconds("all_reduce", 2.0**34, 8, fabric=fabric)
    assert traffic_bytes("all_reduce", 2.0**34, 8) / seconds == pytest.approx(bus, rel=0.12)


def test_a_rack_reduces_in_its_switches_at_its_own_share() -> None:
    rack, board = (replace(B200, island_ranks=72, island=island) for island in (
        B200.island, replace(B200.island, wide_switch_fraction=0.0)))  # fmt: skip
    seconds = [
        [collective_seconds("all_reduce", 2.0**34, n, fabric=fabric) for n in (8, 72)] for fabric in (rack, board)
    ]
    assert seconds[0][0] == seconds[1][0] and 1.1 < seconds[0][1] / seconds[1][1] < 1.2


def test_switch_reduction_beats_the_ring() -> None:
    size = 2.0**32
    auto = collective_seconds("all_reduce", size, 8, fabric=H100)
    ring = collective_seconds(
        "all_reduce", size, 8, fabric=replace(H100, island=replace(H100.island, switch_fraction=0))
    )
    assert 1.15 < ring / auto < 1.5  # NVLS 480 against ring 365 GB/s


def test_small_messages_are_latency() -> None:
    seconds = collective_seconds("all_reduce", np.array([8.0, 1024.0, 8192.0]), 8, fabric=H100)
    assert np.all(seconds > 10e-6) and np.all(seconds < 30e-6)
    assert seconds[2] < 1.3 * seconds[0]


@pytest.mark.parametrize("kind", ["all_reduce", "all_gather", "reduce_scatter", "all_to_all", "send_recv"])
def test_monotone_in_size_and_slower_across_nodes(kind: str) -> None:
    size = np.geomspace(1e3, 1e10, 200)
    inside = collective_seconds(kind, size, 8, fabric=H100_CLUSTER)
    across = collective_seconds(kind, size, 64, 8, fabric=H100_CLUSTER)
    assert np.all(np.diff(inside) > 0) and np.all(np.diff(across) > 0)
    assert np.all(across > inside)


def test_one_rank_per_node_has_one_network_share() -> None:
    size = 4e9
    filled = collective_seconds("all_reduce", size, 64, 8, fabric=H100_CLUSTER)
    single = collective_seconds("all_reduce", size, 8, 1, fabric=H100_CLUSTER)
    assert 4 < single / filled < 9  # an eighth of the network


def test_hundreds_of_gpus_as_coreweave_measured() -> None:
    # 96 H100, 8 x 400 Gb/s per node, 8 GiB: 387 GB/s (github.com/coreweave/nccl-tests README)
    seconds = collective_seconds("all_reduce", 2.0**33, 96, 8, fabric=H100_CLUSTER)
    assert traffic_bytes("all_reduce", 2.0**33, 96) / seconds == pytest.approx(387e9, rel=0.1)


def test_mesh_uses_as_many_links_as_peers() -> None:
    constants = load_efficiency("cdna3").collectives
    assert constants is not None
    mesh = Fabric(8, 448e9, constants, topology="mesh")
    n = np.array([2.0, 8.0])
    seconds = collective_seconds("all_reduce", 2.0**32, n, fabric=mesh)
    bus = traffic_bytes("all_reduce", 2.0**32, n) / seconds
    assert bus[1] / bus[0] == pytest.approx(7, rel=0.1)  # measured on MI300X: 48 and 313 GB/s
    assert bus[1] == pytest.approx(313e9, rel=0.1)


def test_wrong_arguments() -> None:
    with pytest.raises(UserError, match="give the network"):
        collective_seconds("all_reduce", 1e6, 16, fabric=H100)
    with pytest.raises(UserError, match="infiniband"):
        load_network("infinband")
