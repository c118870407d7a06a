"""A Hugging Face tokenizer.json in llama.cpp's words: byte-level BPE, split as one of those that llama.cpp knows."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from ironlaw.errors import UserError
from ironlaw.files import read_json

# llama.cpp knows splits into words by name, not by expression: the expression -> its name (llama-vocab.cpp).
_CASES = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|",
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+",
)
_SPLITS = {_CASES[0] + r"\p{N}{1,3}" + _CASES[1]: "llama-bpe", _CASES[0] + r"\p{N}" + _CASES[1]: "qwen2"}
_GPT2, _DIGITS = "gpt-2", "starcoder"
NORMAL, CONTROL, USER_DEFINED, UNUSED = 1, 3, 4, 5  # llama.cpp's types of tokens


def tokenizer_fields(path: Path, vocab: int) -> dict[str, Any]:
    """`split`, `tokens` (vocab,), `types` (vocab,) and `merges`. UserError for a tokenizer that is not byte-level BPE.

    Ids up to `vocab` that the tokenizer lacks become tokens that nothing gives.
    """
    document = read_json(path)
    model = document["model"]
    split = _split(document.get("pre_tokenizer"))
    normalizer = (document.get("normalizer") or {}).get("type", "NFC")
    if model.get("type") != "BPE" or split is None or normalizer != "NFC" or model.get("byte_fallback"):
        raise UserError(
            f"--to gguf knows byte-level BPE split as GPT-2, StarCoder, Llama 3 or Qwen2 do, and {path} is another: "
            "use --to hf"
        )
    tokens, types = [f"[UNUSED{number}]" for number in range(vocab)], [UNUSED] * vocab
    for token, number in model["vocab"].items():
        tokens[number], types[number] = token, NORMAL
    for added in document.get("added_tokens", ()):
        tokens[added["id"]], types[added["id"]] = added["content"], CONTROL if added["special"] else USER_DEFINED
    merges = [merge if isinstance(merge, str) else " ".join(merge) for merge in model["merges"]]
    return {"split": split, "tokens": tokens, "types": types, "merges": merges}


def _split(pre_tokenizer: dict[str, Any] | None) -> str | None:
    """llama.cpp's name of a pre-tokenizer; None: it has none."""
    parts = [] if pre_tokenizer is None else pre_tokenizer.get("pretokenizers", [pre_tokenizer])
    if not parts or parts[-1]["type"] != "ByteLevel" or parts[-1].get("add_prefix_space"):
        return None
    whole = parts[-1].get("use_regex", True)
    before = parts[:-1]
    if not before:
        return _GPT2 if whole else None
    if len(before) > 1:
        return None
    if before[0]["type"] == "Digits":
        return _DIGITS if whole and before[0].get("individual_digits") else None
    expression = before[0].get("pattern", {}).get("Regex") if before[0]["type"] == "Split" else None
    return None if whole or expression is None else _SPLITS.get(expression)
