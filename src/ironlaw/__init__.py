"""Ironlaw: plan, run and explain transformer training and serving.

    import ironlaw

    plan = ironlaw.plan("llama3-8b", on="8xh100-sxm-80gb", tokens="1T")
    run = ironlaw.train("examples/gpt-tiny.toml", out="runs/first")
    ironlaw.explain(run)
    with ironlaw.observe(model, optimizer, out="runs/mine"): ...
    with ironlaw.serve(run) as server: server.complete("def ")

Each of the five is a subpackage that can be called; `ironlaw.api` holds the functions. Nothing is imported before its
first use, so that a plan never waits for PyTorch.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

from ironlaw.package import CALLABLE as CALLABLE
from ironlaw.package import __version__ as __version__

if TYPE_CHECKING:
    from ironlaw.api import explain as explain
    from ironlaw.api import observe as observe
    from ironlaw.api import plan as plan
    from ironlaw.api import serve as serve
    from ironlaw.api import train as train
    from ironlaw.errors import UserError as UserError


def __getattr__(name: str) -> object:
    if name in CALLABLE:
        return importlib.import_module(f"ironlaw.{name}")
    if name == "UserError":
        from ironlaw.errors import UserError

        return UserError
    raise AttributeError(f"module 'ironlaw' has no attribute {name!r}")
