"""`ironlaw data prepare | stats | inspect | check | export | clean`"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from typer import Argument, Option

from ironlaw import units
from ironlaw.cli.options import Config, Json, Set
from ironlaw.config import RunConfig, load_config
from ironlaw.errors import UserError
from ironlaw.report.console import answer, messages, output, print_json, show

if TYPE_CHECKING:
    from ironlaw.data.dataset import Dataset
    from ironlaw.data.shards import TokenSplit

data = typer.Typer(no_args_is_help=True, add_completion=False)


@data.callback()
def _data() -> None:
    """Tokenise your own text once, look at it, check it, export it."""


@data.command()
def prepare(config: Config, set_: Set = None, json: Json = False) -> None:
    """Tokenise the config's sources into shards; what is there already is not done again."""
    from ironlaw.data.stats import describe
    from ironlaw.report.data_view import prepared_view

    settings = load_config(config, set_ or [])
    dataset = _prepared(settings)
    stats = describe(dataset, settings.sequence) | {"reused": dataset.reused}
    answer(json, stats, lambda stats: prepared_view(stats, dataset.reused, str(config)))


@data.command()
def stats(config: Config, set_: Set = None, json: Json = False) -> None:
    """Documents, tokens, lengths, vocabulary, and what each way of packing pads, crops and cuts."""
    from ironlaw.data.stats import describe
    from ironlaw.report.data_view import stats_view

    settings = load_config(config, set_ or [])
    answer(json, describe(_prepared(settings), settings.sequence), stats_view)


@data.command()
def inspect(
    config: Config,
    set_: Set = None,
    step: Annotated[int, Option(help="Step whose batch is shown.", min=0)] = 0,
    rows: Annotated[int, Option(help="Number of rows.", min=1)] = 4,
    json: Json = False,
) -> None:
    """Rows of a training batch as the model sees them, document by document."""
    from ironlaw.data.loader import Loader
    from ironlaw.data.stats import describe_rows
    from ironlaw.report.data_view import rows_view

    settings = load_config(config, set_ or [])
    dataset = _prepared(settings, streaming=True)
    loader = Loader(dataset, settings.data.model_copy(update={"loader_processes": 0}), settings.sequence)
    batch = loader.training(settings.train.global_batch, settings.train.seed).batch(step)
    tokenizer = dataset.tokenizer() if dataset.tokenizer_path is not None else None
    document = describe_rows(batch.rows(slice(0, rows)), tokenizer, dataset.end_of_text)
    answer(json, {"schema_version": 1, "step": step, "rows": document}, lambda _: rows_view(document))


@data.command()
def check(config: Config, set_: Set = None, json: Json = False) -> None:
    """Read every shard of prepared data and compare its checksum; exit code 1 when one is damaged."""
    from ironlaw.data.dataset import open_dataset
    from ironlaw.data.prepare import folders_of
    from ironlaw.data.shards import DamagedShards

    settings = load_config(config, set_ or [])
    results: list[dict[str, Any]] = []
    for folder in folders_of(settings.data, settings.model.vocab):
        if not folder.exists():
            raise UserError(f"{folder} is not there: run `ironlaw data prepare {config}` first")
        try:
            dataset = open_dataset(folder, checksums=True)
            results.append({"folder": str(folder), "shards": dataset.shards, "damage": []})
        except DamagedShards as damage:
            wrong = [f"shard {number}: {what}" for number, what in damage.wrong.items()]
            results.append({"folder": str(folder), "shards": len(damage.index["shards"]), "damage": wrong})
    intact = not any(result["damage"] for result in results)
    if json:
        print_json({"schema_version": 1, "intact": intact, "folders": results})
    else:
        for result in results:
            output().print(f"{result['folder']}: {result['shards']} shards, {len(result['damage'])} damaged")
            for line in result["damage"]:
                output().print(f"  {line}")
        if not intact:
            output().print(f"next        ironlaw data prepare {config}   makes the damaged shards again")
    raise typer.Exit(0 if intact else 1)


@data.command()
def export(
    config: Config,
    prefix: Annotated[Path, Argument(help="Writes PREFIX_train.bin, .idx and PREFIX_validation.bin, .idx.")],
    set_: Set = None,
    json: Json = False,
) -> None:
    """Write prepared data as Megatron-LM's indexed data sets."""
    from ironlaw.data.megatron import write_indexed
    from ironlaw.data.splits import SPLITS

    if not prefix.name:
        raise UserError(f"'{prefix}' is no beginning of file names: write for example corpus/mine")
    dataset = _prepared(load_config(config, set_ or []))
    if dataset.train.marks is not None:
        raise UserError("Megatron-LM's files cannot say which tokens are learned: conversations are not exported")
    prefix.parent.mkdir(parents=True, exist_ok=True)
    written = {}
    for split in SPLITS:
        target = prefix.with_name(f"{prefix.name}_{split}")
        written[str(target)] = write_indexed(target, _documents(getattr(dataset, split)), dataset.train.tokens.dtype)
    if json:
        print_json({"schema_version": 1, "documents": written})
    else:
        for name, documents in written.items():
            output().print(f"{name}.bin, .idx: {documents:,} documents")


@data.command()
def clean(
    names: Annotated[list[str] | None, Argument(help="Entries to remove, as listed; all unless given.")] = None,
    cache: Annotated[Path | None, Option(help="Cache folder; that of data.cache unless given.")] = None,
    unused_days: Annotated[
        float | None, Option("--unused-days", min=0, help="Remove only what was not used for this many days.")
    ] = None,
    yes: Annotated[bool, Option("--yes", help="Remove without asking.")] = False,
    json: Json = False,
) -> None:
    """What the cache of prepared data holds, with its sizes; removes it after asking."""
    from ironlaw.data.cache import entries, remove, select_entries
    from ironlaw.data.config import DataConfig
    from ironlaw.report.data_view import cache_view

    folder = cache or DataConfig().cache_folder
    picked = select_entries(entries(folder), names or [], unused_days)
    if not json:
        show(cache_view(folder, picked))
    wanted = yes
    if picked and not yes and not json and sys.stdin.isatty() and output().is_terminal:
        wanted = typer.confirm("Remove these?")
    removed = [entry for entry in picked if remove(entry)] if wanted else []
    if json:
        listed = [
            {"name": e.name, "kind": e.kind, "source": e.source, "bytes": e.bytes, "unused_days": e.days,
             "busy": e.busy, "removed": e in removed}
            for e in picked
        ]  # fmt: skip
        print_json({"schema_version": 1, "folder": str(folder), "entries": listed})
    elif removed:
        output().print(f"removed     {len(removed)}, {units.bytes_(sum(entry.bytes for entry in removed))}")
    elif picked:
        output().print("next        ironlaw data clean --yes   removes these")


def _documents(split: TokenSplit) -> Iterator[Any]:
    for begin, end in pairwise(split.bounds.tolist()):
        yield split.tokens[begin:end]


def _prepared(settings: RunConfig, streaming: bool = False) -> Dataset:
    """Return the config's dataset, with a progress bar if it has to be made."""
    from ironlaw.data.prepare import prepare as prepare_data
    from ironlaw.report.live import DataProgress

    say = messages()
    config = settings.data if streaming else settings.data.model_copy(update={"streaming": False})
    with contextlib.closing(DataProgress(say)) as progress:
        return prepare_data(config, settings.model.vocab, progress, say.print)
