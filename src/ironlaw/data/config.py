"""What a user may say about data. Importing this must stay cheap: `ironlaw plan` reads it too."""

from __future__ import annotations

import os
from pathlib import Path

from pydantic import BaseModel, ConfigDict, Field


class DataConfig(BaseModel):
    """Where the text comes from and how it becomes tokens. `seed` drives the held-out split and the order."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    path: str = "stdlib"  # the Python standard library's sources, or a directory or file of UTF-8 text and code
    tokenizer: str | None = None  # a Hugging Face tokenizer.json; otherwise a byte-level BPE is trained here
    end_of_text: str | None = None  # the tokenizer's document separator, when it is not one of the usual ones
    # Whole files are held out. A corpus of a single file holds out its tail.
    validation_fraction: float = Field(0.02, gt=0.0, lt=1.0)
    seed: int = Field(0, ge=0)
    mock: bool = False  # random tokens instead of text: the time it saves is what data costs
    cache: str | None = None  # default: $XDG_CACHE_HOME/ironlaw/data or ~/.cache/ironlaw/data
    # A file is read whole, so one larger than this is left out, and counted as such.
    maximum_file_bytes: int = Field(2**30, gt=0)

    @property
    def cache_folder(self) -> Path:
        if self.cache is not None:
            return Path(self.cache).expanduser()
        base = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
        return Path(base).expanduser() / "ironlaw" / "data"
