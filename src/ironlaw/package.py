"""The package's version, and its subpackages that can be called as functions."""

from __future__ import annotations

import importlib
import sys
from types import ModuleType
from typing import Any

__version__ = "0.2.0"
CALLABLE = ("plan", "train", "explain", "observe", "serve")


class Room(ModuleType):
    """A subpackage whose call is forwarded to the function of its name in `ironlaw.api`."""

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        package, _, name = self.__name__.partition(".")
        return getattr(importlib.import_module(f"{package}.api"), name)(*args, **kwargs)


def callable_room(name: str) -> None:
    """Make the module `name` callable; each subpackage in `CALLABLE` calls this in its first line."""
    sys.modules[name].__class__ = Room
