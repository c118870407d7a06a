"""The settings of data. Importing this module must stay cheap: `ironlaw plan` reads it too."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Literal, Self

from pydantic import Field, model_validator

from ironlaw import files
from ironlaw.schema import Refusals, Section, refuse

Format = Literal["auto", "text", "jsonl", "parquet", "huggingface", "megatron", "chat", "pairs"]
CHATS = {"chat": "messages", "pairs": "chosen"}  # formats of conversations, and the fields that hold them
Packing = Literal["concat", "best_fit"]

# Settings that only decide how fast the samples come and from where: a run may be resumed with others. The tokenizer
# may have moved: its ids are compared with those of the run (`train.restore.check_text`).
_NOT_THE_SAMPLES = {"cache", "workers", "loader_processes", "prefetch", "pin_memory", "tokenizer"}


class SourceConfig(Section):
    """One place where text comes from."""

    path: str  # as data.path
    weight: float = Field(1.0, gt=0)  # share of the training samples, relative to the other sources' weights
    format: Format = "auto"  # by suffix and content, unless given
    # JSONL field or Parquet / Arrow column that holds the text; of chat, a list of messages with role and content
    field: str = "text"
    split: str | None = None  # of a Hugging Face DatasetDict; "train" unless given


class DataConfig(Section):
    """Where the text comes from and how it becomes batches. `seed` drives the held-out split."""

    # A directory or file of text, code, JSONL or Parquet, a Hugging Face dataset saved to disk, a Megatron .bin or
    # .idx; "stdlib": the Python standard library's sources. format = "chat": JSONL with `messages`, of which the
    # assistant's are learned; "pairs": with `prompt`, `chosen` and `rejected`.
    path: str = "stdlib"
    format: Format = "auto"  # by suffix and content, unless given
    field: str = "text"  # JSONL field or Parquet / Arrow column that holds the text
    split: str | None = None  # of a Hugging Face DatasetDict; "train" unless given
    sources: tuple[SourceConfig, ...] = ()  # a mixture: [[data.sources]] with path and weight, instead of data.path
    # A Hugging Face tokenizer.json or a directory with a tokenizer; otherwise a byte-level BPE is trained here.
    tokenizer: str | None = None
    end_of_text: str | None = None  # the tokenizer's document separator, when it is not one of the usual ones
    chat_template: str | None = None  # a Jinja2 file for format = "chat"; the tokenizer's own unless given
    # Whole documents are held out, by a hash of their text. A corpus of a single document holds out its tail.
    validation_fraction: float = Field(0.02, gt=0.0, lt=1.0)
    seed: int = Field(0, ge=0)  # decides which documents are held out
    # concat: windows of the text as it stands, documents cut where a window ends; best_fit: a document is cut only
    # when it is longer than a sequence, and rows are filled with the pieces that fit best (arXiv 2404.10830).
    packing: Packing = "concat"
    # Attention stays inside a document and positions restart with it. Unless given: with best_fit only.
    mask_documents: bool | None = None
    streaming: bool = False  # tokenise while training instead of before
    mock: bool = False  # random tokens instead of text: the time it saves is what data costs
    shard_tokens: int = Field(2**26, ge=1024, le=2**32)  # a shard is closed at the first document past so many tokens
    cache: str | None = None  # default: $XDG_CACHE_HOME/ironlaw/data or ~/.cache/ironlaw/data
    workers: int | None = Field(None, ge=0, le=4096)  # tokenising processes; 0: threads here; else one per core
    loader_processes: int = Field(0, ge=0, le=4096)  # processes that make batches; 0: a thread of the training process
    prefetch: int = Field(4, gt=0, le=2**16)  # batches made ready ahead of the step
    pin_memory: bool = True  # CUDA only: batches wait in page-locked memory and are copied while the step runs
    # A text file is read whole, so one larger than this is left out, and counted as such.
    maximum_file_bytes: int = Field(2**30, gt=0)

    @model_validator(mode="before")
    @classmethod
    def _chat_is_packed(cls, given: Any) -> Any:
        """Pack conversations whole unless `packing` is given."""
        if not isinstance(given, dict):
            return given
        sources = given.get("sources")
        tables = [given, *(sources if isinstance(sources, list | tuple) else ())]
        chats = any(isinstance(table, dict) and str(table.get("format")) in CHATS for table in tables)
        return {"packing": "best_fit"} | given if chats else given

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        refuse(self._refusals())
        return self

    def _refusals(self) -> Refusals:
        # A run's saved config also lists the defaults, so that a key equal to its default does not count as given.
        for key in ("path", "format", "field", "split") if self.sources else ():
            given = getattr(self, key) != type(self).model_fields[key].default
            yield given, f"data.{key} and data.sources are both given: move it into a [[data.sources]] table"
        chats = [source.format for source in self.all_sources if source.format in CHATS]
        yield from (
            (chats and not (self.packing == "best_fit" and self.masks_documents),
             f'data.format = "{next(iter(chats), "")}" keeps conversations whole and apart: use data.packing = '
             '"best_fit" and leave out data.mask_documents'),
            ("pairs" in chats and len(self.all_sources) > 1,
             'data.format = "pairs" does not mix with other sources: give data.path alone'),
            (self.chat_template is not None and not chats,
             'data.chat_template is for conversations: add data.format = "chat"'),
            (self.streaming and self.packing == "best_fit",
             "data.streaming = true cannot pack best_fit, which needs every length first: use data.packing = "
             '"concat", or prepare the data'),
            (self.streaming and self.loader_processes,
             "data.streaming = true tokenises in data.workers processes: leave data.loader_processes out, each of "
             "them would tokenise everything"),
            (self.streaming and len(self.sources) > 1,
             "data.streaming = true reads one source: give data.path, or prepare the mixture"),
        )  # fmt: skip

    @property
    def all_sources(self) -> tuple[SourceConfig, ...]:
        if self.sources:
            return self.sources
        return (SourceConfig(path=self.path, format=self.format, field=self.field, split=self.split),)

    @property
    def pairs(self) -> bool:
        return any(source.format == "pairs" for source in self.all_sources)

    @property
    def masks_documents(self) -> bool:
        return self.packing == "best_fit" if self.mask_documents is None else self.mask_documents

    @property
    def cache_folder(self) -> Path:
        if self.cache is not None:
            return files.at_home(self.cache)
        return files.cache_folder() / "data"

    def samples_key(self) -> dict[str, Any]:
        """Return all settings that decide which samples a run sees, without those that only make them come faster."""
        return self.model_dump(mode="json", exclude=_NOT_THE_SAMPLES)
