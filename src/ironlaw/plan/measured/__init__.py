"""Measured runs: reading and planning them, evaluating the plans, calibrating an engine."""
