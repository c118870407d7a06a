"""Ironlaw: plan, run and explain transformer training."""

__version__ = "0.2.0"


def __getattr__(name: str) -> object:
    """`ironlaw.observe(...)` without importing the room, and PyTorch with it, for those who only plan."""
    if name == "observe":
        import importlib

        return importlib.import_module("ironlaw.observe")
    raise AttributeError(f"module 'ironlaw' has no attribute {name!r}")
