"""Nodes and clusters: sizes, rates in one direction, and how a cluster is written."""

import pytest

from ironlaw.catalog.accelerators import accelerator_names
from ironlaw.catalog.figures import figures, source
from ironlaw.catalog.nodes import node, node_names, parse_cluster
from ironlaw.errors import UserError

FABRICS = {"", "infiniband", "roce", "efa", "ethernet", "slingshot", "ici"}


@pytest.mark.parametrize("name", node_names())
def test_every_node_is_sourced_and_plausible(name: str) -> None:
    it = node(name)
    assert source(it.source).title
    assert it.fabric in FABRICS
    assert 1 <= it.accelerators <= 16
    assert it.scale_up_accelerators == 1 or it.scale_up_accelerators >= it.accelerators
    for key, figure in figures(it).items():
        assert figure.value > 0 and source(figure.source).title, key
    if it.nic_bytes_per_second is not None:
        assert 1e9 <= it.nic_bytes_per_second.value <= 100e9  # 800 Gbit/s is 100e9 bytes/s
    assert (it.nics is None) == (it.nic_bytes_per_second is None)


@pytest.mark.parametrize(
    ("name", "rate"),
    [
        ("dgx-a100", 200e9),
        ("dgx-h100", 400e9),
        ("p4d-24xlarge", 50e9),
        ("p5-48xlarge", 400e9),
        ("a3-megagpu-8g", 200e9),
        ("dgx-b300", 800e9),
    ],
)
def test_network_per_node_in_one_direction(name: str, rate: float) -> None:
    assert node(name).network_bytes_per_second == pytest.approx(rate)


def test_an_unknown_network_is_none_and_not_zero() -> None:
    assert node("pcie-workstation").network_bytes_per_second is None


def test_host_power_is_what_the_accelerators_leave() -> None:
    dgx = node("dgx-h100")
    assert dgx.system_watts is not None and dgx.host_watts is not None
    assert dgx.host_watts.value == dgx.system_watts.value - 8 * 700


@pytest.mark.parametrize(
    ("text", "count", "nodes", "node_name", "island"),
    [
        ("h200", 1, 1, "dgx-h200", 1),
        ("2xh200", 2, 1, "dgx-h200", 2),
        ("64xh100-sxm-80gb", 64, 8, "dgx-h100", 8),
        ("16384xh100-sxm-80gb", 16384, 2048, "dgx-h100", 8),
        ("16,384 x h100-sxm-80gb", 16384, 2048, "dgx-h100", 8),
        ("64xh100-sxm-80gb@p5-48xlarge", 64, 8, "p5-48xlarge", 8),
        ("64xh100-sxm-80gb@p5.48xlarge", 64, 8, "p5-48xlarge", 8),
        ("12xa100-sxm-80gb", 12, 2, "dgx-a100", 8),
        ("72xgb200", 72, 18, "gb200-nvl72", 72),
        ("144xgb200", 144, 36, "gb200-nvl72", 72),
        ("32xv100-sxm-32gb", 32, 2, "dgx-2", 16),
        ("2xrtx-4090", 2, 1, "pcie-workstation", 1),
    ],
)
def test_clusters(text: str, count: int, nodes: int, node_name: str, island: int) -> None:
    cluster = parse_cluster(text)
    assert (cluster.count, cluster.nodes, cluster.node.name) == (count, nodes, node_name)
    assert min(count, cluster.node.scale_up_accelerators) == island
    assert parse_cluster(str(cluster)) == cluster


@pytest.mark.parametrize("name", accelerator_names())
def test_every_accelerator_is_a_cluster_of_one(name: str) -> None:
    assert parse_cluster(name).nodes == 1


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("0xh200", "1 to"),
        ("-4xh200", "1 to"),
        ("2.5xh200", "whole number"),
        ("1,5xh200", "whole number"),
        ("99999999999xh200", "1 to"),
        ("8xh100", "h100-sxm-80gb"),
        ("8xh20o", "h200"),
        ("8xh200@dgxh200", "dgx-h200"),
        ("", "COUNTxACCELERATOR"),
        ("8x", "unknown accelerator"),
    ],
)
def test_bad_clusters_are_one_line(text: str, expected: str) -> None:
    with pytest.raises(UserError) as caught:
        parse_cluster(text)
    assert expected in str(caught.value) and "\n" not in str(caught.value)
