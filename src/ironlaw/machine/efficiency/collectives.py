"""Time of a collective over ranks in islands (NVLink, xGMI, PCIe) joined by a network.

Inside one island of n ranks, for a buffer of S bytes (nccl-tests' convention: the full buffer):

    time = launch + hops step + fill sqrt(hops) ln(1 + S / fill_bytes) + (traffic + own share) / link

    kind            traffic per rank      hops
    all_reduce      2 (n-1)/n S           2 (n-1)
    all_gather,
    reduce_scatter  (n-1)/n S             n-1
    all_to_all      (n-1)/n S             1 + log2 n
    send_recv       S                     2

The link attains ring_fraction (direct_fraction for all_to_all and send_recv) of its nominal bandwidth, and a
rank's own share S / n is copied local_copy_ratio times faster. The logarithm fits measurements from 1 MiB to 16 GiB:
with growing size, libraries change protocols, channels and chunks, each with a longer start-up.

With reduction in the switch (NVLS), each rank sends (1 + 1/n) S instead of 2 (n-1)/n S. Over N islands with g
ranks each, a ring crosses every island once, so that its traffic uses all g network shares of an island;
a tree all-reduce sends S (N = 2) or 2 S (N > 2, a node of a double binary tree has two children) per
island, and needs 2 log2 N network hops instead of 2 N. The faster algorithm is chosen, as in NCCL.

Costs: Hockney alpha-beta; Thakur, Rabenseifner, Gropp, IJHPCA 19(1), 2005 (ring, tree); Sanders, Speck,
Traeff, Parallel Computing 35, 2009 (double binary trees). Bus bandwidth: nccl-tests doc/PERFORMANCE.md.
"""

from __future__ import annotations

import numpy as np

from ironlaw.errors import UserError
from ironlaw.machine.efficiency.hardware import Array, Fabric, NetworkConstants, Number, broadcast, unwrap


def traffic_bytes(kind: str, size: Number, ranks: Number) -> Number:
    """Return the bytes that each rank sends in a bandwidth-optimal (ring or direct) algorithm."""
    s, n = broadcast(size, ranks)
    share = 2.0 if kind == "all_reduce" else 1.0
    return unwrap(np.where(n > 1, s, 0.0) if kind == "send_recv" else share * s * (n - 1.0) / n)


def collective_seconds(
    kind: str, size: Number, ranks: Number, ranks_per_island: Number | None = None, *, fabric: Fabric
) -> Number:
    """Return the seconds of one collective on a buffer of `size` bytes (per rank for all_to_all and send_recv).

    `ranks_per_island` is the number of the group's ranks in one island: 8 for a data-parallel group that fills
    nodes of 8, 1 for one of 8 groups with one rank per node each, which then has its own share of the network.
    By default as many as fit.
    """
    inside = np.minimum(ranks, fabric.island_ranks) if ranks_per_island is None else ranks_per_island
    s, n, g = broadcast(size, ranks, np.asarray(inside, dtype=np.float64))
    g = np.minimum(g, n)
    one = _island_seconds(kind, s, n, fabric)
    crosses = n > g
    if not np.any(crosses):
        return unwrap(np.where((n > 1) & (s > 0), one, 0.0))
    if fabric.network is None or fabric.network_bytes_per_second <= 0:
        raise UserError(f"{int(np.max(n))} ranks do not fit an island of {fabric.island_ranks}: give the network")
    many = _network_seconds(kind, s, n, g, fabric, fabric.network)
    return unwrap(np.where((n > 1) & (s > 0), np.where(crosses, many, one), 0.0))


def _link(fabric: Fabric, n: Array) -> Array:
    """Return the nominal one-direction bandwidth of a rank among n, by topology."""
    link = fabric.island_bytes_per_second
    if fabric.topology == "mesh":
        return link * np.maximum(n - 1.0, 1.0) / max(fabric.island_ranks - 1, 1)
    if fabric.topology == "bus":
        return link * (2.0 / np.maximum(n, 2.0)) ** fabric.island.sharing_exponent
    return np.full(n.shape, link)


def _hops(kind: str, n: Array) -> Array:
    """Return the hops of a ring or, for all_to_all and send_recv, of point-to-point messages."""
    ring, tree = n - 1.0, np.ceil(np.log2(np.maximum(n, 1.0)))
    return {
        "all_reduce": 2.0 * ring, "all_gather": ring, "reduce_scatter": ring, "all_to_all": 1.0 + tree,
        "send_recv": np.full(n.shape, 2.0),
    }[kind]  # fmt: skip


def _island_bandwidth_seconds(kind: str, s: Array, n: Array, fabric: Fabric, in_switch: bool) -> Array:
    constants = fabric.island
    link = _link(fabric, n)
    if in_switch:
        wide = constants.wide_switch_fraction or constants.switch_fraction
        return s * (1.0 + 1.0 / n) / (np.where(n > 8, wide, constants.switch_fraction) * link)
    direct = kind in ("all_to_all", "send_recv") and constants.direct_fraction > 0
    attained = (constants.direct_fraction if direct else constants.ring_fraction) * link
    own = np.where(kind == "send_recv", 0.0, s / n / constants.local_copy_ratio)
    return (np.asarray(traffic_bytes(kind, s, n)) + own) / attained


def _island_seconds(kind: str, s: Array, n: Array, fabric: Fabric) -> Array:
    constants, hops = fabric.island, _hops(kind, n)
    growth = np.sqrt(hops) * np.log1p(s / constants.fill_bytes)
    fixed = constants.launch_seconds + constants.fill_seconds * growth
    steps = hops * constants.step_seconds
    seconds = steps + _island_bandwidth_seconds(kind, s, n, fabric, False)
    if kind == "all_reduce" and constants.switch_fraction > 0:
        # small all-reduces take as long with NVLS as with the ring (measured), large ones much less
        seconds = np.minimum(seconds, steps + _island_bandwidth_seconds(kind, s, n, fabric, True))
    return fixed + seconds


def _network_seconds(kind: str, s: Array, n: Array, g: Array, fabric: Fabric, network: NetworkConstants) -> Array:
    share = fabric.network_bytes_per_second * network.attained_fraction / fabric.oversubscription
    launch = fabric.island.launch_seconds + network.launch_seconds
    fixed = launch + network.fill_seconds * np.log1p(s / network.fill_bytes)
    if kind == "send_recv":
        return fixed + (network.step_seconds + s / share)
    if kind == "all_to_all":  # every rank has its own network share
        inside = _island_bandwidth_seconds(kind, s * g / n, np.maximum(g, 2.0), fabric, False)
        return fixed + (np.log2(n) * network.step_seconds + np.maximum(s * (n - g) / n / share, inside))
    candidates = []
    for name in ("ring", "tree") if kind == "all_reduce" else ("ring",):
        switches = name == "tree" and fabric.island.switch_fraction > 0
        for in_switch in (False, True) if switches else (False,):
            inside = _island_bandwidth_seconds(kind, s, np.maximum(g, 2.0), fabric, in_switch)
            crossings, hops, leaving = _crossing(kind, name, s, n, g)
            slowest = np.maximum(np.where(g > 1, inside, 0.0), leaving / (g * share))
            latency = crossings * network.step_seconds + hops * fabric.island.step_seconds
            candidates.append(latency + slowest)
    return fixed + np.minimum.reduce(candidates)


def _crossing(kind: str, name: str, s: Array, n: Array, g: Array) -> tuple[Array, Array, Array]:
    """Return network hops, island hops and bytes leaving each island, for a ring or tree over n / g islands."""
    islands, both_ways = n / g, 2.0 if kind == "all_reduce" else 1.0
    if name == "ring":
        crossings = both_ways * islands
        return (
            crossings,
            np.maximum(_hops(kind, n) - crossings, 0.0),
            np.asarray(traffic_bytes(kind, s, n)),
        )
    crossings = both_ways * np.ceil(np.log2(islands))
    return crossings, _hops(kind, g), s * np.where(islands > 2.0, 2.0, 1.0)
