"""Views of data: a preparation, rows as the model sees them, the loader's rates, and the cache."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

from ironlaw import units
from ironlaw.report.document import Document, dim, strong

Pairs = Iterator[tuple[str, str]]


def stats_view(stats: dict[str, Any]) -> Document:
    """Return all statistics of `data stats`."""
    view = Document()
    view.facts([*_sources(stats), *_splits(stats), *_tokens(stats), *_shards(stats)])
    return view


def prepared_view(stats: dict[str, Any], reused: bool, config: str) -> Document:
    """Return the result of `data prepare`: the prepared data, and the next command."""
    view = Document()
    train, validation = (stats["splits"][split] for split in ("train", "validation"))
    tokens = f"{units.count(train['tokens'])} training tokens in {units.count(train['documents'])} documents"
    held = f"{units.count(validation['tokens'])} held out in {units.count(validation['documents'])}"
    state = "was prepared already" if reused else "prepared"
    view.facts(_sources(stats))
    view.text(f"{stats['source']} {state}: {tokens}, {held}")
    view.facts(_shards(stats, stages=not reused))
    view.text(f"next        ironlaw train {config}")
    return view


def _sources(stats: dict[str, Any]) -> Pairs:
    total = sum(source["weight"] for source in stats["sources"])
    for source in stats["sources"]:
        tokens = source["splits"]["train"]["tokens"]
        share = units.percent(source["weight"] / total)
        yield "source", f"{source['source']}: {share} of the samples, {units.count(tokens)} training tokens"


def _splits(stats: dict[str, Any]) -> Pairs:
    for split, here in stats["splits"].items():
        line = f"{units.count(here['documents'])} documents, {units.count(here['tokens'])} tokens"
        if here["bytes_per_token"] is not None:
            line += f", {units.bytes_(here['bytes'])} of text ({here['bytes_per_token']:.2f} bytes per token)"
        yield split, line
        sizes = here["document_tokens"]
        if sizes:
            line = f"tokens per document: {sizes['mean']:,.0f} on average, {sizes['median']:,.0f} median, "
            line += f"{sizes['p90']:,.0f} at 90%, {sizes['p99']:,.0f} at 99%, {sizes['longest']:,} the longest"
            yield "", line


def _tokens(stats: dict[str, Any]) -> Pairs:
    tokenizer, train = stats["tokenizer"], stats["splits"]["train"]
    end = f", documents end in {tokenizer['end_of_text_token']}" if tokenizer["end_of_text_token"] else ""
    used = units.percent(train["vocabulary_used"] / tokenizer["vocab"])
    yield "vocabulary", f"{units.count(tokenizer['vocab'])} entries, {used} occur{end}"
    if stats["unigram_loss"] is not None:
        yield "baseline", f"{stats['unigram_loss']:.3f} nats per token from token frequencies alone"
    for name, report in stats["packing"].items():
        yield name, f"{units.count(report['rows'])} rows of {stats['sequence']:,}: {_lost(report)}"


def _shards(stats: dict[str, Any], stages: bool = True) -> Pairs:
    if stats["skipped"]:
        yield "left out", ", ".join(f"{count:,} {reason}" for reason, count in stats["skipped"].items())
    rates = stats["stage_bytes_per_second"]
    if rates and stages:
        slowest = min(rates, key=lambda stage: rates[stage])
        words = ", ".join(f"{stage} {units.bytes_(rate)}/s" for stage, rate in rates.items())
        yield "stages", f"{words} by themselves; {slowest} was the slowest"
    if stats["folder"]:
        shards = f"{stats['shards']} shard" + ("s" if stats["shards"] != 1 else "")
        yield "on disk", f"{units.bytes_(stats['disk_bytes'])} in {shards}, {stats['folder']}"


def _lost(report: dict[str, Any]) -> str:
    """Describe what a packing loses, as far as it is known."""
    return ", ".join(
        f"{units.percent(report[key])} of the {what}"
        for key, what in (
            ("padded_fraction", "positions padded"), ("cropped_fraction", "tokens cropped"),
            ("documents_cut_fraction", "documents cut"),
        )
        if report.get(key) is not None
    )  # fmt: skip


def rows_view(rows: Iterable[dict[str, Any]]) -> Document:
    """Return the rows of a batch: the number and the text of each document."""
    view = Document()
    for row in rows:
        padded = f", {row['padding']} of padding" if row["padding"] else ""
        view.text(strong(f"row {row['row']}"), f"  {row['tokens']} tokens, {len(row['documents'])} documents{padded}")
        for document in row["documents"]:
            text = document["text"] if document["text"] is not None else " ".join(map(str, document["ids"][:24]))
            head = f"{document['document']:>3}  {document['tokens']:>6} tokens  "
            view.text(dim(head), _shortened(text), indent=2)
    return view


def _shortened(text: str) -> str:
    line = repr(text)[1:-1]
    return line if len(line) <= 160 else f"{line[:77]} ... {line[-77:]}"


def supply_words(supply: dict[str, Any]) -> str:
    """Describe a plan's `data_supply`: the rates of the loader's stages against what the step consumes."""
    demand = f"the step demands {units.token_rate(supply['demand_tokens_per_second'])}"
    if not any(supply["stage_tokens_per_second"].values()):
        return f"{demand}; what the loader can supply is {supply['basis']}."
    rates = ", ".join(
        f"{stage} {'not measured' if rate is None else units.token_rate(rate)}"
        for stage, rate in supply["stage_tokens_per_second"].items()
    )
    whole = supply["supply_tokens_per_second"]
    can = "" if whole is None else f"the loader can supply {units.token_rate(whole)}; "
    times = supply["times_demand"]
    verdict = ""
    if times is not None and times < 1:
        verdict = f" The step would wait: {times:.2f} of the demand."
    elif times is not None:
        verdict = f" {times:,.{0 if times >= 10 else 1}f} times the demand."
    return f"{demand}; {can}{rates} ({supply['basis']}).{verdict}"


def loaded_words(data: dict[str, Any]) -> str:
    """Describe a run's `data`: the loader's rates, and how long the steps waited for it."""
    stages = ", ".join(f"{stage} {units.token_rate(rate)}" for stage, rate in data["stage_tokens_per_second"].items())
    words = f"the loader could deliver {units.token_rate(data['tokens_per_second'])} ({stages})"
    if data.get("slowest_stage"):
        words += f", {data['slowest_stage']} the slowest stage"
    words += f"; the steps of the last session waited {units.seconds(data['wait_seconds'])} for it in all"
    lost = _lost(data)
    return words + (f"; {data['packing']}: {lost}" if lost else "")


def cache_view(folder: Path, entries: Sequence[Any]) -> Document:
    """Return the cache folders that `data clean` would remove (name, kind, source, bytes, days, busy)."""
    view = Document()
    if not entries:
        view.text(f"{folder}: nothing to remove")
        return view
    view.text(f"{folder}: {units.bytes_(sum(entry.bytes for entry in entries))}")
    for entry in entries:
        source = f" of {entry.source}" if entry.source else ""
        now = ", being made now: it stays" if entry.busy else f", unused for {entry.days:.0f} days"
        view.text(f"{units.bytes_(entry.bytes):>9}  {entry.name}  ", dim(f"{entry.kind}{source}{now}"), indent=2)
    return view
