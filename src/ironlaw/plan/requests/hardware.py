"""The accelerators, their nodes and the layout that a plan request names."""

from __future__ import annotations

import re
from dataclasses import replace

from ironlaw import units
from ironlaw.catalog.nodes import Cluster, parse_cluster
from ironlaw.errors import UserError
from ironlaw.plan.cluster.system import fabric_of
from ironlaw.plan.measured.network import described_node, resized
from ironlaw.plan.request_types import Assumption, Options, assume_accelerator
from ironlaw.workload.layout import Layout, parse_layout

_COUNT = r"\s*[\d_,.]+\s*[x*]"


def has_count(on: str) -> bool:
    """Returns whether `on` gives a number of accelerators, as in 8xh200."""
    return re.match(_COUNT, on) is not None


def parse_hardware(on: str, options: Options) -> tuple[Cluster, Layout | None, list[Assumption]]:
    """Returns cluster and layout; each may set the number of accelerators if the other leaves it open."""
    cluster = parse_cluster(on)
    assumed = assume_accelerator(re.sub(rf"^{_COUNT}|@.*", "", on).strip())
    cluster = _described(cluster, options, assumed)
    if options.layout is None:
        return cluster, None, assumed
    layout = parse_layout(options.layout)
    counted = has_count(on)
    if not counted and layout.accelerators > 1:
        cluster = Cluster(cluster.accelerator, layout.accelerators, cluster.node)
        assumed.append(Assumption("accelerators", f"{cluster.count:,}", "the product of the layout", "--on COUNTx..."))
    rest = layout.tp * layout.pp * layout.cp
    if "dp=" not in options.layout.replace(" ", "") and counted and cluster.count % rest == 0:
        layout = replace(layout, dp=cluster.count // rest)
        assumed.append(Assumption("dp", str(layout.dp), "what tp, pp and cp leave", "--layout"))
    return cluster, layout, assumed


def _described(cluster: Cluster, options: Options, assumed: list[Assumption]) -> Cluster:
    """Returns the cluster with the nodes that the options describe. Raises UserError if they name no network."""
    if options.per_node is not None:
        cluster = replace(cluster, node=resized(cluster.node, options.per_node))
    if options.network is None:
        return cluster
    found, note = described_node(cluster.node, options.network)
    if note and found.fabric == cluster.node.fabric:
        raise UserError(
            f"--network '{options.network}' names no kind of network with a rate: write for example "
            '--network "8x 200 Gb/s RoCE per node, 2:1"'
        )
    if note:
        assumed.append(Assumption("network", f"{found.fabric} at the node's usual rate", "none is said", "--network"))
    return replace(cluster, node=found)


def assumed_links(cluster: Cluster) -> list[Assumption]:
    """Returns what traffic between accelerators needs and nobody measured: how cards share PCIe, the network's rate."""
    if cluster.count == 1:
        return []
    node, fabric, found = cluster.node, fabric_of(cluster.accelerator, cluster.node), []
    evidence = fabric.island.evidence
    if fabric.topology == "bus" and evidence and evidence.assumed and cluster.count > 2:
        share = f"a group of n cards attains (2/n)^{fabric.island.sharing_exponent:g} of what two do"
        found.append(Assumption("PCIe", share, f"no measurement on cards like {cluster.accelerator.name}", ""))
    if cluster.count > max(node.accelerators, node.scale_up_accelerators) and not node.network_bytes_per_second:
        rate = fabric.network_bytes_per_second * node.accelerators
        why = f"the network of a {node.product[0].lower()}{node.product[1:]} is not known"
        found.append(Assumption("network", f"{units.si(8 * rate, 'bit/s')} for each", why, "--network"))
    return found
