"""The plug-ins there are: each gives what a config asks of it, or None."""

from __future__ import annotations

from ironlaw.config import RunConfig
from ironlaw.train.parallel import gradient_compression, outer
from ironlaw.train.parallel.apply import Applied
from ironlaw.train.parallel.plugin import StepPlugin


def plugins_of(applied: Applied, config: RunConfig) -> list[StepPlugin]:
    found = (of(applied, config) for of in (gradient_compression.of, outer.of))
    return [plugin for plugin in found if plugin is not None]
