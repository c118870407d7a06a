"""Catalog: accelerators, nodes, models, power grids and prices, each figure with its source.

Data files and their typed loaders, and no decisions: what a figure means for a plan is decided elsewhere.
Importing this needs the standard library alone, and asking for one accelerator parses one file.
"""
