"""Measurement: where the time, the memory and the energy of a run went.

The room can be called, so that a user's own loop needs one line:

    with ironlaw.observe(model, optimizer, out="runs/mine") as watch: ...

`from ironlaw.observe.watch import observe` is the same function for those who want its type.
"""

from __future__ import annotations

import sys
from types import ModuleType
from typing import Any


class _Room(ModuleType):
    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        from ironlaw.observe.watch import observe

        return observe(*args, **kwargs)


sys.modules[__name__].__class__ = _Room
