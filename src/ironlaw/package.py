"""What the package says of itself: its version, and which of its rooms can be called."""

from __future__ import annotations

import importlib
import sys
from types import ModuleType
from typing import Any

__version__ = "0.2.0"
CALLABLE = ("plan", "train", "explain", "observe", "serve")


class Room(ModuleType):
    """A package that is called as the function of its name in `ironlaw.api`."""

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        package, _, name = self.__name__.partition(".")
        return getattr(importlib.import_module(f"{package}.api"), name)(*args, **kwargs)


def callable_room(name: str) -> None:
    """Called by the rooms of `CALLABLE`, in their first line."""
    sys.modules[name].__class__ = Room
