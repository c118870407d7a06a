"""The measured supply rate of the loader, stored beside the prepared tokens for the next plan.

    write_supply(config, sequence, facts)       # at the end of a run, with what its loader reported
    read_supply(config, sequence)                # before the next run: the same facts, or None

Losing this small file only costs the comparison of supply and demand before the first run.
"""

from __future__ import annotations

import datetime
from contextlib import suppress
from pathlib import Path
from typing import Any

from ironlaw.data.config import DataConfig
from ironlaw.files import digest_of, read_json_or_empty, write_json

MAX_SETTINGS = 256  # settings remembered; the oldest are dropped first
# Settings that change the work per token, where it is done, or how fast the source is read.
_KEYS = ("path", "format", "sources", "packing", "mask_documents", "streaming", "mock", "loader_processes", "workers")


def supply_path(config: DataConfig) -> Path:
    return config.cache_folder / "supply.json"


def write_supply(config: DataConfig, sequence: int, facts: dict[str, Any]) -> None:
    """Store what the loader of a finished run reported: tokens per second in all and of each stage."""
    if not facts.get("tokens_per_second"):
        return
    kept = read_json_or_empty(supply_path(config))
    key = _key(config, sequence)
    kept.pop(key, None)
    kept[key] = {
        "tokens_per_second": facts["tokens_per_second"],
        "stages": facts["stage_tokens_per_second"],
        "measured": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
    }
    path = supply_path(config)
    with suppress(OSError):  # the file is optional
        path.parent.mkdir(parents=True, exist_ok=True)
        write_json(path, dict(list(kept.items())[-MAX_SETTINGS:]))


def read_supply(config: DataConfig, sequence: int) -> dict[str, Any] | None:
    """Return `tokens_per_second`, `stages` and the time `measured`; None if no run has loaded with these settings."""
    found = read_json_or_empty(supply_path(config)).get(_key(config, sequence))
    complete = isinstance(found, dict) and {"tokens_per_second", "stages", "measured"} <= found.keys()
    return found if complete else None


def _key(config: DataConfig, sequence: int) -> str:
    document = config.model_dump(mode="json", include=set(_KEYS)) | {"sequence": sequence}
    return digest_of(document)[:16]
