"""Ironlaw: plan, run and explain transformer training."""

__version__ = "0.1.0"
