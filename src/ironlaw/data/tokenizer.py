"""Tokenizers: a byte-level BPE trained on the corpus, or any Hugging Face tokenizer.json.

Older Hugging Face directories hold a vocabulary with its merges, or a SentencePiece model. The tokenizer's class first
splits text in its own way, so only `transformers`, which has the class, can convert them; the result is cached.
"""

from __future__ import annotations

import hashlib
import importlib.util
import os
import sysconfig
import tempfile
import time
from array import array
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from ironlaw.errors import UserError, reported
from ironlaw.files import at_home, cache_folder, read_json_or_empty, write_text

if TYPE_CHECKING:
    from tokenizers import Tokenizer as HuggingFaceTokenizer


FAST, GENERATION = "tokenizer.json", "generation_config.json"
_SLOW = ("vocab.json", "merges.txt", "vocab.txt", "tokenizer.model", "spiece.model", "sentencepiece.bpe.model",
         "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json")  # fmt: skip


def has_tokenizer(folder: Path) -> bool:
    """Return whether the folder has files of a tokenizer, usable or not."""
    names = (FAST, *(name for name in _SLOW if name.startswith("vocab") or name.endswith(".model")))
    return any((folder / name).is_file() for name in names)


def tokenizer_file(folder: Path) -> Path:
    """Return the `tokenizer.json` of a model's directory, converted if needed. UserError without one."""
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
    for path in (*files, folder / "config.json"):  # its model_type may select the tokenizer's class
        digest.update(path.name.encode() + b"\0" + (path.read_bytes() if path.is_file() else b""))
    kept = cache_folder() / "tokenizers" / f"{digest.hexdigest()[:16]}.json"
    if kept.is_file():
        return kept
    from transformers import AutoTokenizer, logging

    logging.set_verbosity_error()  # errors are reported below, in one line
    try:
        inner = AutoTokenizer.from_pretrained(folder, use_fast=True, local_files_only=True).backend_tokenizer
        special = {token.content for token in inner.get_added_tokens_decoder().values()}
        if inner.get_vocab(with_added_tokens=False).keys() <= special:
            raise ValueError("the tokenizer's class reads other files than these")
        kept.parent.mkdir(parents=True, exist_ok=True)
        write_text(kept, inner.to_str(pretty=True))
    except Exception as error:  # each tokenizer class raises its own exceptions
        reason = " ".join(str(error).split())[:200]
        if ".model" in names and importlib.util.find_spec("sentencepiece") is None:
            reason = "most need another library: pip install sentencepiece"
        raise UserError(
            f"{folder} has no {FAST}, and {names} could not be converted ({reason}): save a {FAST} there, or name one "
            "in data.tokenizer"
        ) from None
    return kept


END_OF_TEXT = "<|endoftext|>"
SMALLEST_VOCAB = 257  # 256 bytes and the end of text
# Merges learned from 10 MB hardly differ from those of more text, and training takes seconds.
SAMPLE_BYTES = 10_000_000
# The names that common model families give to the token that ends a document.
_USUAL_ENDS = (END_OF_TEXT, "<|end_of_text|>", "</s>", "<eos>", "<|eos|>", "[EOS]", "[SEP]")


class Tokenizer:
    """Text to token ids and back.

    `vocab` is one more than the largest id; `end_of_text` is the id that closes a document. `home` is the directory
    whose other files tell of the tokenizer: not that of `path` if the tokenizer was converted.
    """

    def __init__(
        self, inner: HuggingFaceTokenizer, path: Path, end_of_text: str | None = None, home: Path | None = None
    ):
        self.path, self.home = path, home or path.parent
        self.inner = inner
        # A document that spells a special token contains text about it, not the token.
        inner.encode_special_tokens = True
        self.vocab: int = 1 + max(inner.get_vocab(with_added_tokens=True).values(), default=-1)
        self.end_of_text_token, self.end_of_text = self._find_end(end_of_text)

    def _find_end(self, wanted: str | None) -> tuple[str, int]:
        for name in (wanted,) if wanted is not None else (*_USUAL_ENDS, self._named("eos_token") or ""):
            identifier = self.inner.token_to_id(name)
            if identifier is not None:
                return name, int(identifier)
        if wanted is not None:
            raise UserError(f'the tokenizer {self.path} has no token "{wanted}": set data.end_of_text to one it has')
        raise UserError(
            f"the tokenizer {self.path} has none of the usual end-of-text tokens: name its own in data.end_of_text"
        )

    def _named(self, key: str) -> str | None:
        """Return a token named in the files beside the tokenizer, such as the `eos_token` of its model."""
        named = read_json_or_empty(self.home / "tokenizer_config.json").get(key)
        named = named.get("content") if isinstance(named, dict) else named
        return named if isinstance(named, str) else None

    def _stated(self, key: str) -> list[int]:
        """Return the ids under a key of the model's files beside the tokenizer."""
        there = [read_json_or_empty(self.home / name).get(key) for name in (GENERATION, "config.json")]
        ids = [number for found in there for number in (found if isinstance(found, list) else [found])]
        return [number for number in ids if isinstance(number, int)]

    @property
    def ends(self) -> set[int]:
        """Ids that end a text: the end of text, and the ids at which the tokenizer's model stops."""
        return {self.end_of_text, self.end, *self._stated("eos_token_id")}

    def check_ends(self, vocab: int) -> None:
        """Raise UserError if the model's files name an end of text that is not among its `vocab` tokens."""
        named = self._named("eos_token")
        if named is not None and self.inner.token_to_id(named) is None:
            raise UserError(
                f'{self.home / "tokenizer_config.json"} names eos_token "{named}", which the tokenizer does not have: '
                "name one that it has"
            )
        outside = [number for number in self._stated("eos_token_id") if not 0 <= number < vocab]
        if outside:
            raise UserError(
                f"{self.home} has eos_token_id = {outside[0]} in {GENERATION} or config.json, and the model {vocab} "
                "tokens: correct it there"
            )

    @property
    def end(self) -> int:
        """The id that the tokenizer's model names as its end, which may be that of a turn; else the end of text."""
        found = self.inner.token_to_id(self._named("eos_token") or self.end_of_text_token)
        return self.end_of_text if found is None else int(found)

    @property
    def begin(self) -> int:
        """The id that the tokenizer's model names as its first; else the end of text, which opens a document."""
        found = self.inner.token_to_id(self._named("bos_token") or "")
        return next((int(one) for one in (found, *self._stated("bos_token_id")) if one is not None), self.end_of_text)

    @property
    def adds_begin(self) -> bool:
        """Whether `encode` with special tokens puts `begin` before a text."""
        return self.encode("", special=True)[:1] == [self.begin]

    def encode(self, text: str, special: bool = False) -> list[int]:
        """Return the ids of `text`. `special` adds the tokens that the tokenizer puts around a text (Llama's first)."""
        return list(self.inner.encode(text, add_special_tokens=special).ids)

    def encode_many(self, texts: Sequence[str]) -> list[np.ndarray]:
        """Return one array of ids (C unsigned int) per text, encoded on all cores."""
        _allow_parallelism()
        # The fast variant leaves out the character offsets, which are not needed here.
        encodings = self.inner.encode_batch_fast(list(texts), add_special_tokens=False)
        # `array` reads the list of ids three times as fast as numpy does.
        return [np.frombuffer(array("I", encoding.ids), dtype=np.uintc) for encoding in encodings]

    def encode_timed(self, texts: Sequence[str]) -> tuple[list[np.ndarray], float]:
        """Return the ids of each text, and the seconds it took."""
        start = time.perf_counter()
        return self.encode_many(texts), time.perf_counter() - start

    def decode(self, ids: Iterable[int], skip_special: bool = True) -> str:
        return str(self.inner.decode([int(i) for i in ids], skip_special_tokens=skip_special))


def load(path: str | Path, end_of_text: str | None = None, made_here: bool = False) -> Tokenizer:
    """Read a Hugging Face tokenizer.json, or the tokenizer of a model's directory. `made_here`: it can be made again
    if it is damaged, as a converted one can."""
    file = at_home(path)
    home = file if file.is_dir() else None
    if home is not None:
        file = tokenizer_file(home)
        made_here = file.parent != home
    if not file.is_file():
        raise UserError(f'data.tokenizer = "{path}" is not a file: write the path of a tokenizer.json')
    inner = read_tokenizer(file, f"delete {file.parent}, and it is made again") if made_here else read_tokenizer(file)
    return Tokenizer(inner, file, end_of_text, home)


def read_tokenizer(file: Path, remedy: str = "export one with save()") -> HuggingFaceTokenizer:
    """Read a tokenizer without the padding and truncation that were saved with it: both spoil a corpus. Raises
    UserError for a file that is none."""
    from tokenizers import Tokenizer as HuggingFaceTokenizer

    # The library raises a bare Exception for every malformed file.
    with reported(f"{file} is not a Hugging Face tokenizer.json ({{reason}}): {remedy}", Exception):
        inner = HuggingFaceTokenizer.from_file(str(file))
    inner.no_padding()
    inner.no_truncation()
    return inner


def train(texts: Iterable[str], vocab: int, path: Path) -> Tokenizer:
    """Train a byte-level BPE of at most `vocab` entries on `texts` and save it.

    The result depends on the texts only, not on threads: ties between merges go to the smaller pair of ids.
    """
    check_vocab(vocab)
    from tokenizers import Tokenizer as HuggingFaceTokenizer
    from tokenizers import decoders, models, pre_tokenizers, trainers

    _allow_parallelism()
    inner = HuggingFaceTokenizer(models.BPE())
    inner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    inner.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab,
        special_tokens=[END_OF_TEXT],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),  # all 256 bytes, so that any text round-trips
        show_progress=False,
    )
    inner.train_from_iterator(texts, trainer)
    inner.save(str(path))
    return Tokenizer(inner, path)


def check_vocab(vocab: int) -> None:
    if vocab < SMALLEST_VOCAB:
        raise UserError(
            f"model.vocab = {vocab} is too small for a byte-level tokenizer: set model.vocab to "
            f"{SMALLEST_VOCAB} (256 bytes and the end of text) or more"
        )


def check_fits(tokenizer: Tokenizer, vocab: int) -> None:
    """Raise if the tokenizer has ids past the embedding table: they would be index errors in the middle of a step."""
    if tokenizer.vocab > vocab:
        raise UserError(
            f"the tokenizer {tokenizer.path} has {tokenizer.vocab:,} entries but model.vocab = {vocab:,}: "
            f"set model.vocab = {tokenizer.vocab} or more"
        )


def _allow_parallelism() -> None:
    # If this is unset, the library prints a warning whenever the process forks later, as torch.compile does.
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "true")


def load_in_worker(path: Path, end_of_text: str) -> Tokenizer:
    """Load the tokenizer in a tokenising process."""
    os.environ["TOKENIZERS_PARALLELISM"] = "false"  # the other cores have workers of their own
    return load(path, end_of_text)


def rate(sample_bytes: int = 2_000_000) -> float:
    """Return this machine's tokens per second on all cores, with a small BPE on the standard library's sources."""
    texts: list[str] = []
    for path in sorted(Path(sysconfig.get_path("stdlib")).glob("*.py")):
        texts.append(path.read_text(encoding="utf-8", errors="ignore"))
        if sum(map(len, texts)) > sample_bytes:
            break
    with tempfile.TemporaryDirectory() as folder:
        tokenizer = train(texts[:8], 1024, Path(folder) / "tokenizer.json")
    start = time.perf_counter()
    tokens = sum(len(ids) for ids in tokenizer.encode_many(texts))
    return tokens / (time.perf_counter() - start)
