"""Measured runs: reading them, planning them, judging the plans, calibrating an engine."""
