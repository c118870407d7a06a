"""Preparation of one source: tokenised to disk once, reused by later calls with the same source and settings."""

from __future__ import annotations

import re
import shutil
import time
from collections import Counter, defaultdict
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from ironlaw import units
from ironlaw.data import building, megatron, shards
from ironlaw.data import tokenizer as tokenizers
from ironlaw.data.config import DataConfig
from ironlaw.data.corpus import Corpus, no_text_error
from ironlaw.data.dataset import Dataset, open_dataset
from ironlaw.data.sample import sample
from ironlaw.data.splits import SPLITS, Splitter, no_held_out_error, split
from ironlaw.data.stats import unigram_loss
from ironlaw.data.tokenise import Tokeniser, worker_count
from ironlaw.errors import UserError
from ironlaw.files import digest_of, read_json, seal, sha256, write_json

Say = Callable[[str], None]
_LARGE_BYTES = 2**30  # of text, which takes seconds to read


def prepare_source(
    config: DataConfig, vocab: int, corpus: Corpus, given: tokenizers.Tokenizer | None,
    progress: shards.Progress | None, say: Say,
) -> Dataset:  # fmt: skip
    """Prepare one source. Without `given`, a tokenizer is trained on the source."""
    folder = config.cache_folder / folder_name(config, vocab, corpus, given)
    reused = folder.exists()
    fill = partial(_build, config, vocab, corpus, given, progress, say)
    building.make(folder, fill)
    try:
        # Files written just now were hashed while they were written: only their sizes are compared.
        dataset = open_dataset(folder, checksums=None if reused else False, reused=reused)
    except shards.DamagedShards as damage:
        say(str(damage).split(":")[0] + ": making them again")
        building.make(folder, fill, damage.index)
        dataset = open_dataset(folder, reused=False)
    if dataset.vocab > vocab:  # possible only for tokens made elsewhere
        raise _too_many(corpus, dataset.vocab, vocab)
    return dataset


def folder_name(config: DataConfig, vocab: int, corpus: Corpus, given: tokenizers.Tokenizer | None) -> str:
    """Return a readable name that differs whenever any token could differ."""
    key: dict[str, Any] = {
        # The standard library keeps schema 1: its tokens have not changed, so that cached ones are found.
        "schema": 1 if corpus.stdlib else shards.SCHEMA_VERSION,
        "corpus": corpus.fingerprint(),
        "fraction": config.validation_fraction,
        "seed": config.seed,
    }
    if not corpus.stdlib:
        key |= {"kinds": sorted({file.kind for file in corpus.files}), "field": corpus.source.field}
    if given is not None:
        key |= {"tokenizer": sha256(given.path), "end_of_text": given.end_of_text}
    elif not corpus.tokenised:
        # A new release of the library may break ties differently.
        from tokenizers import __version__

        key |= {"vocab": vocab, "trained_with": __version__, "sample_bytes": tokenizers.SAMPLE_BYTES}
    if corpus.chat is not None:
        key |= {"template": corpus.chat.source, "names": corpus.chat.template_names}
    label = "stdlib" if corpus.stdlib else corpus.root.stem
    return f"{re.sub(r'[^A-Za-z0-9_-]+', '_', label)[:40]}-{digest_of(key)[:16]}"


def _build(
    config: DataConfig, vocab: int, corpus: Corpus, given: tokenizers.Tokenizer | None,
    progress: shards.Progress | None, say: Say, folder: Path,
) -> None:  # fmt: skip
    """Fill `folder` with everything that `open_dataset` reads."""
    spent: defaultdict[str, float] = defaultdict(float)
    start = time.perf_counter()
    if corpus.bytes > _LARGE_BYTES:
        say(f"Reading {units.bytes_(corpus.bytes)} to find which documents are held out")
    splitter = split(corpus, config.validation_fraction, config.seed)
    spent["read"] += time.perf_counter() - start
    start = time.perf_counter()
    tokenizer, described = _tokenizer(vocab, corpus, splitter, given, folder)
    spent["train_tokenizer"] += time.perf_counter() - start

    head = {"tokenizer": described, "dtype": shards.token_dtype(described["vocab"]).str, "held_out": splitter.threshold}
    work = building.resume(folder, head)
    if work.shards:
        say(f"Going on behind {len(work.shards)} finished shards")
    workers = worker_count(config.workers, corpus.bytes)
    tokeniser = Tokeniser(None if corpus.tokenised else tokenizer, workers)
    try:
        building.build(work, corpus, splitter, tokeniser, described["end_of_text"], config.shard_tokens, progress)
    except KeyboardInterrupt:
        if work.shards:
            say(f"{len(work.shards)} finished shards are kept: the same command goes on behind them")
        raise

    skipped = sum((Counter(shard["skipped"]) for shard in work.shards), Counter(corpus.skipped))
    index: dict[str, Any] = {
        "path": corpus.source.path,
        "validation_fraction": config.validation_fraction,
        "seed": config.seed,
        **head,
        "shards": work.shards,
        "skipped": dict(sorted(skipped.items())),
    }
    _check(index, folder)
    start = time.perf_counter()
    train, validation = (shards.open_split(folder, index, split).learned for split in SPLITS)
    baseline = unigram_loss(train, validation, described["vocab"])
    spent["unigram"] += time.perf_counter() - start
    seconds = {stage: spent[stage] + work.seconds[stage] for stage in (*spent, *work.seconds)}
    index = {"schema": shards.SCHEMA_VERSION} | index | {"unigram_loss": baseline, "seconds": seconds}
    write_json(folder / shards.INDEX, seal(index))


def _tokenizer(
    vocab: int, corpus: Corpus, splitter: Splitter, given: tokenizers.Tokenizer | None, folder: Path
) -> tuple[tokenizers.Tokenizer | None, dict[str, Any]]:
    """Return the tokenizer and its index entry. It is given, trained, or kept from an interrupted call."""
    file = folder / "tokenizer.json"
    largest = _largest_id(corpus, given) if corpus.tokenised and corpus.chat is None else 0
    if largest >= vocab:
        raise _too_many(corpus, largest + 1, vocab)
    if corpus.tokenised and given is None:
        return None, {"sha256": None, "vocab": largest + 1, "end_of_text": _last_id(corpus), "end_of_text_token": None}
    tokenizer = given
    if tokenizer is None:
        tokenizer = _read_unfinished_tokenizer(folder) or tokenizers.train(
            sample(corpus, splitter, tokenizers.SAMPLE_BYTES), vocab, file
        )
    else:
        shutil.copyfile(tokenizer.path, file)
    return tokenizer, {
        "sha256": sha256(file),
        "vocab": tokenizer.vocab,
        "end_of_text": tokenizer.end_of_text,
        "end_of_text_token": tokenizer.end_of_text_token,
    }


def _read_unfinished_tokenizer(folder: Path) -> tokenizers.Tokenizer | None:
    """Return the tokenizer of the finished shards of an interrupted call, if there is one."""
    with suppress(OSError, ValueError, KeyError, TypeError, UserError):
        described = read_json(folder / building.PROGRESS)["head"]["tokenizer"]
        if sha256(folder / "tokenizer.json") == described["sha256"]:
            return tokenizers.load(folder / "tokenizer.json", described["end_of_text_token"])
    return None


def _largest_id(corpus: Corpus, given: tokenizers.Tokenizer | None) -> int:
    """Return the largest id of tokens that were made elsewhere. UserError for ids that `given` cannot have made."""
    tokens = [megatron.open_indexed(file.path).tokens for file in corpus.files]
    smallest, largest = (int(of([of(some, initial=0) for some in tokens])) for of in (np.min, np.max))
    if smallest < 0:
        raise UserError(f"{corpus.root} holds token {smallest:,}, and ids begin at 0: write it again")
    if given is not None and largest >= given.vocab:
        raise UserError(
            f"{corpus.root} holds token {largest:,}, and {given.path} has {given.vocab:,}: name the tokenizer that "
            "made these tokens in data.tokenizer"
        )
    return largest


def _last_id(corpus: Corpus) -> int:
    """Return the id that ends documents."""
    ends: set[int] = set()
    for file in corpus.files:
        indexed = megatron.open_indexed(file.path)
        full = np.flatnonzero(np.diff(indexed.bounds))[:1000]
        ends |= set(indexed.tokens[indexed.bounds[full + 1] - 1].tolist())
    if len(ends) != 1:
        raise UserError(
            f"the documents of {corpus.root} do not end in a token of their own: name their tokenizer in "
            "data.tokenizer, so that its end-of-text token can be put between them"
        )
    return ends.pop()


def _too_many(corpus: Corpus, held: int, vocab: int) -> UserError:
    return UserError(
        f"{corpus.root} holds token {held - 1:,} but model.vocab = {vocab:,}: set model.vocab = {held} or more"
    )


def _check(index: dict[str, Any], folder: Path) -> None:
    documents = {split: sum(shard[split]["documents"] for shard in index["shards"]) for split in SPLITS}
    if documents["train"] and documents["validation"]:
        return
    (folder / building.PROGRESS).unlink()  # nothing here is of use to another attempt
    if not any(documents.values()):
        raise no_text_error(index["path"], index["skipped"])
    raise no_held_out_error(index["path"])
