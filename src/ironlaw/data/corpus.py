"""The documents of a source: the files that hold them, their order, and what was left out and why."""

from __future__ import annotations

import dataclasses
import hashlib
import os
import re
import sysconfig
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from fnmatch import fnmatch
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from ironlaw.data import megatron, readers
from ironlaw.data.config import CHATS, SourceConfig
from ironlaw.errors import UserError, reported
from ironlaw.files import at_home, read_json

if TYPE_CHECKING:
    from ironlaw.data.chat import Text

Cursor = tuple[int, int]  # a file's number in the corpus and the position in it from which to go on reading
START: Cursor = (0, 0)

# Only modules with the same sources on every machine: Debian does not ship `test` and ctypes.macholib, and puts
# idlelib, lib2to3, tkinter and ensurepip into packages of their own; Docker's Python images delete tests; Python 3.12
# removed distutils.
# `encodings` and `pydoc_data` are generated tables and prose, which a model would learn instead of Python.
_STDLIB_SKIPPED_FOLDERS = frozenset({
    "site-packages", "dist-packages", "__pycache__", "test", "tests", "idle_test", "idlelib", "tkinter", "turtledemo",
    "lib2to3", "distutils", "ensurepip", "macholib", "encodings", "pydoc_data",
})  # fmt: skip
_STDLIB_SKIPPED_FILES = (
    "_sysconfigdata*",
    "_sysconfig_vars*",
    "sitecustomize.py",
    "usercustomize.py",
    "_distutils_system_mod.py",
)


_RECORDS = (".json", ".csv", ".tsv")  # a file of many documents, which text readers take as one
_SAVED = ("state.json", "dataset_dict.json")  # files that `save_to_disk` writes


@dataclass(frozen=True)
class File:
    """One file of a corpus. `name` is its path below the root, with forward slashes; `size` is in bytes.

    `kind` is the file's reader (`readers.find_kind`). A text file is one document; every other file holds many.
    """

    name: str
    path: Path
    size: int
    modified_ns: int
    kind: str = "text"


@dataclass(frozen=True, slots=True)
class CorpusDocument:
    """One document, or (`content` is None) one that was left out for `reason`."""

    content: readers.Content | None
    file: File
    next: Cursor  # where the next document begins
    done_bytes: int  # of the corpus, read so far
    reason: str = ""


@dataclass
class Corpus:
    """Files in a fixed order, and why other files were left out."""

    root: Path
    source: SourceConfig
    maximum_file_bytes: int
    files: list[File] = dataclasses.field(default_factory=list)
    stdlib: bool = False
    chat: Text | None = None  # tokenises conversations
    reasons: dict[str, str] = dataclasses.field(default_factory=dict)  # name of a skipped file -> why it was skipped

    @property
    def field(self) -> str:
        """The JSONL field or the column that holds the text."""
        given = self.source.field
        return CHATS.get(self.source.format, given) if given == "text" else given

    @property
    def bytes(self) -> int:
        return sum(file.size for file in self.files)

    @property
    def tokenised(self) -> bool:
        """Whether the source gives token ids instead of text."""
        return any(file.kind in ("megatron", "chat", "pairs") for file in self.files)

    @property
    def skipped(self) -> dict[str, int]:
        """The number of skipped files by reason."""
        return dict(sorted(Counter(self.reasons.values()).items()))

    def scan(self, on_text: Callable[[File, str], None]) -> None:
        """Read every text file once and keep those that hold text. Calls `on_text(file, text)` for each of these.

        The split needs this: if held-out files turned out to be binary, nothing would be held out.
        Reading costs little compared with tokenising.
        """
        for file in [file for file in self.files if file.kind == "text"]:
            for record in readers.read(file.kind, file.path, self.field):
                if isinstance(record.content, str):
                    on_text(file, record.content)
                else:
                    self.reasons[file.name] = record.reason
        self.files = [file for file in self.files if file.name not in self.reasons]

    def fingerprint(self) -> str:
        """Return a hex digest of place, names, sizes and modification times, to detect possible changes of the text."""
        digest = hashlib.sha256(str(self.root).encode("utf-8", "surrogateescape"))
        for file in self.files:
            line = f"\0{file.name}\0{file.size}\0{file.modified_ns}"
            digest.update(line.encode("utf-8", "surrogateescape"))
        return digest.hexdigest()

    def documents(self, start: Cursor = START) -> Iterator[CorpusDocument]:
        """Yield every document from `start` on, in order; files are read lazily."""
        before = sum(file.size for file in self.files[: start[0]])
        for number in range(start[0], len(self.files)):
            file, is_text = self.files[number], self.files[number].kind == "text"
            position = start[1] if number == start[0] else 0
            for record in readers.read(file.kind, file.path, self.field, position):
                content = record.content
                if is_text and content is None:  # a file that was left out, not a document
                    self.reasons[file.name] = record.reason
                    continue
                if isinstance(content, dict):
                    content = self._tokens_of(content, f"{file.path}, conversation before byte {record.next:,}")
                following = (number + 1, 0) if is_text else (number, record.next)
                done = before + min(record.done_bytes, file.size)
                yield CorpusDocument(content, file, following, done, record.reason)
            before += file.size

    def _tokens_of(self, talk: readers.Talk, where: str) -> np.ndarray:
        assert self.chat is not None
        try:
            if "prompt" in talk:
                return self.chat.preference(talk)
            ids, learned = self.chat.conversation(**talk)
        except UserError as error:
            raise UserError(f"{where}: {error}") from None
        return np.where(learned, ids, ids | readers.UNLEARNED)


def find(source: SourceConfig | str, maximum_file_bytes: int = 2**30) -> Corpus:
    """List the files of a source without reading their contents."""
    source = SourceConfig(path=source) if isinstance(source, str) else source
    if source.path == "stdlib" and source.format == "auto":
        root = Path(sysconfig.get_paths()["stdlib"])
        corpus = Corpus(root, source, maximum_file_bytes, stdlib=True)
        _walk(corpus, root)
        if not corpus.files:
            raise UserError(f"there are no standard library sources in {root}: give a directory of text in data.path")
        return corpus
    root = at_home(source.path)
    megatron_prefix = root.with_name(root.name + ".idx") if root.name else root
    if not root.exists() and megatron_prefix.is_file():
        root = megatron_prefix
    if not root.exists():
        raise UserError(f'data.path = "{source.path}" does not exist: write a directory or file of text, or "stdlib"')
    root = root.resolve()
    corpus = Corpus(root, source, maximum_file_bytes)
    saved = root.is_dir() and any((root / name).is_file() for name in _SAVED)
    if source.split is not None and not saved:
        raise UserError(f'data.split = "{source.split}" is of data sets that save_to_disk() wrote: leave it out')
    if root.is_file() and root.suffix.lower() in _RECORDS and source.format == "auto":
        raise UserError(
            f'data.path = "{source.path}" would be learned as one text, with its {root.suffix} punctuation: write its '
            'records as JSONL or Parquet, or set data.format = "text"'
        )
    if root.is_file():
        _add(corpus, root, root.name)
    elif source.format in ("auto", "huggingface") and saved:
        _add_saved_dataset(corpus, root)
    elif source.format == "huggingface":
        raise UserError(f'data.path = "{source.path}" holds no state.json: give the folder that save_to_disk() wrote')
    else:
        _walk(corpus, root)
        _check_shards(corpus)
    check_has_text(corpus)
    if len({file.kind == "megatron" for file in corpus.files}) > 1:
        raise UserError(
            f'data.path = "{source.path}" holds Megatron tokens beside other files: give the .idx itself, '
            "and the rest as another of data.sources"
        )
    return corpus


def check_has_text(corpus: Corpus) -> None:
    """Raise UserError if the corpus has no file with text."""
    if corpus.files:
        return
    remedy = "data.maximum_file_bytes can be raised" if "too large" in corpus.skipped else "give UTF-8 text files"
    raise no_text_error(corpus.source.path, corpus.skipped, remedy)


def no_text_error(path: str, skipped: dict[str, int], remedy: str = "give documents with text") -> UserError:
    reasons = ", ".join(f"{count:,} {reason}" for reason, count in skipped.items())
    found = f"skipped: {reasons}" if reasons else "it is empty"
    return UserError(f'data.path = "{path}" has no text ({found}): {remedy}')


def _walk(corpus: Corpus, root: Path) -> None:
    """Fill `corpus.files`, sorted by name. A folder reached twice through links counts once, so that loops end."""

    def name_of(path: str | Path) -> str:
        return Path(path).relative_to(root).as_posix()

    def unreadable(error: OSError) -> None:
        corpus.reasons[name_of(error.filename)] = "unreadable"

    seen: set[tuple[int, int]] = set()
    for folder, folders, files in os.walk(root, onerror=unreadable, followlinks=True):
        status = os.stat(folder)
        if (status.st_dev, status.st_ino) in seen:
            folders.clear()
            continue
        seen.add((status.st_dev, status.st_ino))
        skipped = _STDLIB_SKIPPED_FOLDERS if corpus.stdlib else ()
        # Sorted, so that of two links to one folder the same one is followed on every run.
        folders[:] = sorted((n for n in folders if not n.startswith(".") and n not in skipped), reverse=True)
        for name in files:
            if not name.startswith(".") and (not corpus.stdlib or _is_stdlib_source(name)):
                path = Path(folder, name)
                _add(corpus, path, name_of(path))
    corpus.files.sort(key=lambda file: file.name)


def _is_stdlib_source(name: str) -> bool:
    return name.endswith(".py") and not any(fnmatch(name, pattern) for pattern in _STDLIB_SKIPPED_FILES)


def _add(corpus: Corpus, path: Path, name: str) -> None:
    try:
        status = path.stat()
    except OSError:  # a dangling link
        corpus.reasons[name] = "unreadable"
        return
    kind = _kind(path, corpus.source)
    if kind is None:
        return
    if not path.is_file():  # a pipe or a socket: reading it could block for ever
        corpus.reasons[name] = "not a file"
    elif kind == "text" and status.st_size > corpus.maximum_file_bytes:
        corpus.reasons[name] = "too large"
    elif status.st_size == 0 and kind not in ("parquet", "arrow"):  # those are damaged
        corpus.reasons[name] = "empty"
    else:
        size = megatron.open_indexed(path).bytes if kind == "megatron" else status.st_size
        corpus.files.append(File(name, path, size, status.st_mtime_ns, kind))


def _kind(path: Path, source: SourceConfig) -> str | None:
    """Return the kind of reader for a file, or None for a file that belongs to another, such as a .bin to its .idx."""
    if path.suffix == ".bin" and path.with_suffix(".idx").is_file() and source.format in ("auto", "megatron"):
        # Beside its index a .bin is not text; if it is the source itself, it stands for the pair.
        return None if at_home(source.path).name != path.name else "megatron"
    if source.format == "auto":
        return readers.find_kind(path)
    if source.format == "huggingface":
        return "arrow"
    if source.format == "megatron" and path.suffix != ".idx":
        return None
    return source.format


def _add_saved_dataset(corpus: Corpus, folder: Path) -> None:
    """Add the files that `datasets.Dataset.save_to_disk` wrote: Arrow streams, in the order of its state.json."""
    if (folder / "dataset_dict.json").is_file():
        names = read_json(folder / "dataset_dict.json").get("splits", [])
        wanted = corpus.source.split or "train"
        if not isinstance(names, list) or wanted not in names:
            known = ", ".join(map(str, names)) if isinstance(names, list) else "those it has (it names none)"
            raise UserError(f'{folder} has no split "{wanted}": set data.split to one of {known}')
        folder = folder / wanted
    elif corpus.source.split is not None:
        raise UserError(f"{folder} is a single data set without splits: leave data.split out")
    told = f"{folder}/state.json is missing or unreadable: save the data set again"
    with reported(told, OSError, ValueError, KeyError, TypeError):
        state = read_json(folder / "state.json")
        files = [Path(entry["filename"]) for entry in state["_data_files"]]
        if any(file.is_absolute() or ".." in file.parts for file in files):
            raise ValueError("files elsewhere")
    if state.get("_indices_files") or state.get("_indices_data_files"):
        raise UserError(f"{folder} holds a selection of rows: call flatten_indices() on the data set and save it again")
    corpus.source = corpus.source.model_copy(update={"format": "huggingface"})
    for name in files:
        if not (folder / str(name)).is_file():
            raise _missing_shard(folder / str(name))
        _add(corpus, folder / name, str(name))


_SHARD = re.compile(r"(.*?)(\d+)([-_]of[-_])(\d+)(\D.*)?")  # what follows may be a digest of each shard


def _check_shards(corpus: Corpus) -> None:
    """Raise if a numbered file is missing: `train-00001-of-00003.parquet` alone is not the whole data set."""
    there = {file.name for file in corpus.files} | {n for n, why in corpus.reasons.items() if why != "unreadable"}
    sets: dict[tuple[str, ...], dict[int, re.Match[str]]] = {}
    for found in filter(None, map(_SHARD.fullmatch, sorted(there))):
        sets.setdefault((*found.group(1, 3, 4), Path(found[0]).suffix), {})[int(found[2])] = found
    for (before, of, count, suffix), shards in sets.items():
        first = int(int(count) in shards)  # some count from 1
        missing = next((number for number in range(first, first + int(count)) if number not in shards), None)
        if missing is not None:
            width, ends = len(next(iter(shards.values()))[2]), {found[5] or "" for found in shards.values()}
            end = ends.pop() if len(ends) == 1 else f"*{suffix}"
            raise _missing_shard(corpus.root / f"{before}{missing:0{width}d}{of}{count}{end}")


def _missing_shard(path: Path) -> UserError:
    return UserError(
        f"the shard {path} of a data set is missing: fetch it again, or name the files that you want in data.sources"
    )


def tail_cut(text: str, fraction: float) -> int:
    """Return where the held-out tail of a single file begins: at a line's start unless it is inside the last line."""
    cut = max(1, int(len(text) * (1 - fraction)))
    newline = text.find("\n", cut - 1)
    return cut if newline in (-1, len(text) - 1) else newline + 1


def cut_text(text: str, characters: int = 2**18) -> Iterator[str]:
    """Cut a long document into pieces, so that every core gets work.

    Pieces end only at a newline between two characters that are not blank. A byte-level BPE never merges across such a
    place, so the tokens are those of the whole text.
    """
    start = 0
    while len(text) - start > characters:
        cut = text.find("\n", start + characters)
        while cut != -1 and cut + 1 < len(text) and (text[cut - 1].isspace() or text[cut + 1].isspace()):
            cut = text.find("\n", cut + 1)
        if cut == -1 or cut + 1 >= len(text):
            break
        yield text[start : cut + 1]
        start = cut + 1
    yield text[start:]
