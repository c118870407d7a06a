"""Catalog: accelerators, nodes, models, power grids and prices, each figure with its source.

Data files and their typed loaders, and no decisions: what a figure means for a plan is decided elsewhere.
Importing this needs the standard library alone, and asking for one accelerator parses one file.
"""

from ironlaw.catalog.accelerators import DTYPES, Accelerator, accelerator, accelerator_names, peak
from ironlaw.catalog.cpus import PowerRange, cpu_power
from ironlaw.catalog.figures import Figure, Source, source, source_keys
from ironlaw.catalog.money import Grid, Price, Quote, grid, grid_names, price, priced_names, pue, pue_names
from ironlaw.catalog.nodes import Cluster, Node, node, node_names, parse_cluster

__all__ = [
    "DTYPES",
    "Accelerator",
    "Cluster",
    "Figure",
    "Grid",
    "Node",
    "PowerRange",
    "Price",
    "Quote",
    "Source",
    "accelerator",
    "accelerator_names",
    "cpu_power",
    "grid",
    "grid_names",
    "node",
    "node_names",
    "parse_cluster",
    "peak",
    "price",
    "priced_names",
    "pue",
    "pue_names",
    "source",
    "source_keys",
]
