"""Catalog: accelerators, nodes, models, power grids and prices, each figure with its source.

Holds data files and their typed loaders, but no decisions: other packages decide what a figure means for a plan.
Importing it needs only the standard library, and loading one accelerator parses one file.
"""
