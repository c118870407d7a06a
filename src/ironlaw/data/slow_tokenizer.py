"""Tokenizers of Hugging Face directories without a `tokenizer.json`, converted by `transformers` and kept.

Older directories hold a vocabulary and its merges, or a SentencePiece model. How text is split before that is code of
the tokenizer's class, so that only the library that has the class can convert it.
"""

from __future__ import annotations

import hashlib
import importlib.util
import os
from pathlib import Path

from ironlaw.errors import UserError
from ironlaw.files import cache_folder

FAST = "tokenizer.json"
_SLOW = ("vocab.json", "merges.txt", "vocab.txt", "tokenizer.model", "spiece.model", "sentencepiece.bpe.model",
         "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json")  # fmt: skip


def has_tokenizer(folder: Path) -> bool:
    """Whether there are files of one, usable or not."""
    names = (FAST, *(name for name in _SLOW if name.startswith("vocab") or name.endswith(".model")))
    return any((folder / name).is_file() for name in names)


def tokenizer_file(folder: Path) -> Path:
    """The `tokenizer.json` of a model's directory, or what its other files were converted to; UserError: neither."""
    if (folder / FAST).is_file():
        return folder / FAST
    there = [folder / name for name in _SLOW if (folder / name).is_file()]
    found = {path.name for path in there}
    if not ({"vocab.json", "merges.txt"} <= found or "vocab.txt" in found or any(n.endswith(".model") for n in found)):
        raise UserError(f"{folder} has no tokenizer: put its {FAST} there, or name one in data.tokenizer")
    names = " and ".join(path.name for path in there if path.suffix != ".json" or path.name == "vocab.json")
    if importlib.util.find_spec("transformers") is None:
        raise UserError(f"{folder} has no {FAST}, and {names} need transformers: pip install 'ironlaw[hf]'")
    return _converted(folder, there, names)


def _converted(folder: Path, files: list[Path], names: str) -> Path:
    digest = hashlib.sha256()
    for path in (*files, folder / "config.json"):  # whose model_type may decide the class
        digest.update(path.name.encode() + b"\0" + (path.read_bytes() if path.is_file() else b""))
    kept = cache_folder() / "tokenizers" / f"{digest.hexdigest()[:16]}.json"
    if kept.is_file():
        return kept
    from transformers import AutoTokenizer, logging

    logging.set_verbosity_error()  # what goes wrong is said below, in one line
    try:
        inner = AutoTokenizer.from_pretrained(folder, use_fast=True, local_files_only=True).backend_tokenizer
        kept.parent.mkdir(parents=True, exist_ok=True)
        partial = kept.with_suffix(f".{os.getpid()}")
        inner.save(str(partial))
        partial.replace(kept)
    except Exception as error:  # each class raises its own
        reason = " ".join(str(error).split())[:200]
        if ".model" in names and importlib.util.find_spec("sentencepiece") is None:
            reason = "most need another library: pip install sentencepiece"
        raise UserError(
            f"{folder} has no {FAST}, and {names} could not be converted ({reason}): save a {FAST} there, or name one "
            "in data.tokenizer"
        ) from None
    return kept
