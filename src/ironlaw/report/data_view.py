"""Data on the terminal: preparation as it goes, what it made, and rows as the model sees them."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any, Protocol

from rich.console import Console
from rich.text import Text

from ironlaw import units

PLAIN_EVERY_SECONDS = 5.0


class DataProgress:
    """Called with (bytes done, bytes in all): a bar with rate and time left, or a line now and then."""

    def __init__(self, console: Console, label: str = "Tokenising") -> None:
        self._console, self._label = console, label
        self._began: float | None = None
        self._begun_bytes = 0
        self._last_line = 0.0
        self._bar: Any = None

    def __call__(self, done: int, total: int) -> None:
        now = time.monotonic()
        if self._began is None:  # a resumed preparation does not begin at nothing
            self._began, self._begun_bytes = now, done
        what = self._words(done, total, now - self._began)
        if self._console.is_terminal:
            self._draw(done, total, what)
        elif done > self._begun_bytes and (now - self._last_line >= PLAIN_EVERY_SECONDS or done >= total):
            self._last_line = now
            self._console.print(f"{self._label} {what}")

    def _words(self, done: int, total: int, seconds: float) -> str:
        words = f"{units.bytes_(done)} of {units.bytes_(total)}"
        made = done - self._begun_bytes
        if made > 0 and seconds > 0:
            rate = made / seconds
            words += f"  {units.bytes_(rate)}/s"
            if done < total:
                words += f"  {units.seconds((total - done) / rate)} left"
        return words

    def _draw(self, done: int, total: int, what: str) -> None:
        from rich.progress import BarColumn, Progress, TextColumn

        if self._bar is None:
            columns = (
                TextColumn(self._label, markup=False), BarColumn(), TextColumn("{task.description}", markup=False),
            )  # fmt: skip
            self._bar = Progress(*columns, console=self._console, transient=True)
            self._bar.start()
            self._bar.add_task("", total=1.0)
        self._bar.update(self._bar.task_ids[0], completed=done / total if total else 1.0, description=what)

    def close(self) -> None:
        if self._bar is not None:
            self._bar.stop()
            self._bar = None


def show_stats(console: Console, stats: dict[str, Any]) -> None:
    """Everything `data stats` knows."""
    _show_sources(console, stats)
    for split, here in stats["splits"].items():
        line = f"{split:<12}{units.count(here['documents'])} documents, {units.count(here['tokens'])} tokens"
        if here["bytes_per_token"] is not None:
            line += f", {units.bytes_(here['bytes'])} of text ({here['bytes_per_token']:.2f} bytes per token)"
        console.print(line)
        sizes = here["document_tokens"]
        if sizes:
            console.print(
                f"            tokens per document: {sizes['mean']:,.0f} on average, {sizes['median']:,.0f} median, "
                f"{sizes['p90']:,.0f} at 90%, {sizes['p99']:,.0f} at 99%, {sizes['longest']:,} the longest"
            )
    tokenizer, train = stats["tokenizer"], stats["splits"]["train"]
    end = f", documents end in {tokenizer['end_of_text_token']}" if tokenizer["end_of_text_token"] else ""
    used = units.percent(train["vocabulary_used"] / tokenizer["vocab"])
    console.print(f"vocabulary  {units.count(tokenizer['vocab'])} entries, {used} occur{end}")
    if stats["unigram_loss"] is not None:
        console.print(f"baseline    {stats['unigram_loss']:.3f} nats per token from token frequencies alone")
    for name, report in stats["packing"].items():
        console.print(f"{name:<12}{_packing_words(report, stats['sequence'])}")
    _show_skipped(console, stats)
    _show_stages(console, stats)
    if stats["folder"]:
        _show_place(console, stats)


def show_prepared(console: Console, stats: dict[str, Any], reused: bool, config: str) -> None:
    """After `data prepare`: what there is now, and what to do with it."""
    _show_sources(console, stats)
    train, validation = (stats["splits"][split] for split in ("train", "validation"))
    state = "was prepared already" if reused else "prepared"
    console.print(
        f"{stats['source']} {state}: {units.count(train['tokens'])} training tokens in "
        f"{units.count(train['documents'])} documents, {units.count(validation['tokens'])} held out in "
        f"{units.count(validation['documents'])}"
    )
    _show_skipped(console, stats)
    if not reused:
        _show_stages(console, stats)
    if stats["folder"]:
        _show_place(console, stats)
    console.print(f"next        ironlaw train {config}")


def show_rows(console: Console, rows: Iterable[dict[str, Any]]) -> None:
    """Rows of a batch: each document's text behind its number."""
    for row in rows:
        padded = f", {row['padding']} of padding" if row["padding"] else ""
        rest = f"  {row['tokens']} tokens, {len(row['documents'])} documents{padded}"
        console.print(Text.assemble((f"row {row['row']}", "bold"), rest))
        for document in row["documents"]:
            text = document["text"] if document["text"] is not None else " ".join(map(str, document["ids"][:24]))
            head = f"  {document['document']:>3}  {document['tokens']:>6} tokens"
            console.print(Text.assemble((head, "dim"), "  ", _shortened(text)))


def _shortened(text: str, length: int = 160) -> str:
    line = repr(text)[1:-1]
    if len(line) <= length:
        return line
    half = (length - 5) // 2
    return f"{line[:half]} ... {line[-half:]}"


def _show_sources(console: Console, stats: dict[str, Any]) -> None:
    total = sum(source["weight"] for source in stats["sources"])
    for source in stats["sources"]:
        tokens = source["splits"]["train"]["tokens"]
        share = units.percent(source["weight"] / total)
        console.print(f"source      {source['source']}: {share} of the samples, {units.count(tokens)} training tokens")


def _show_place(console: Console, stats: dict[str, Any]) -> None:
    shards = f"{stats['shards']} shard" + ("s" if stats["shards"] != 1 else "")
    console.print(f"on disk     {units.bytes_(stats['disk_bytes'])} in {shards}, {stats['folder']}")


def _show_skipped(console: Console, stats: dict[str, Any]) -> None:
    if stats["skipped"]:
        console.print("left out    " + ", ".join(f"{count:,} {reason}" for reason, count in stats["skipped"].items()))


def _show_stages(console: Console, stats: dict[str, Any]) -> None:
    rates = stats["stage_bytes_per_second"]
    if rates:
        slowest = min(rates, key=lambda stage: rates[stage])
        words = ", ".join(f"{stage} {units.bytes_(rate)}/s" for stage, rate in rates.items())
        console.print(f"stages      {words} by themselves; {slowest} was the slowest")


def _packing_words(report: dict[str, Any], sequence: int) -> str:
    part: Callable[[str], str] = lambda key: units.percent(report[f"{key}_fraction"])  # noqa: E731
    return (
        f"{units.count(report['rows'])} rows of {sequence:,}: {part('padded')} padded, {part('cropped')} cropped, "
        f"{part('documents_cut')} of the documents cut"
    )


def supply_words(supply: dict[str, Any]) -> str:
    """A plan's `data_supply`: what the loader can deliver against what the step consumes, stage by stage."""
    demand = f"the step demands {units.rate(supply['demand_tokens_per_second'], 'token')}"
    if not any(supply["stage_tokens_per_second"].values()):
        return f"{demand}; what the loader can supply is {supply['basis']}."
    rates = ", ".join(
        f"{stage} {'not measured' if rate is None else units.rate(rate, 'token')}"
        for stage, rate in supply["stage_tokens_per_second"].items()
    )
    whole = supply["supply_tokens_per_second"]
    can = "" if whole is None else f"the loader can supply {units.rate(whole, 'token')}; "
    times = supply["times_demand"]
    verdict = ""
    if times is not None:
        verdict = (
            f" {times:,.1f} times the demand." if times >= 1 else f" The step would wait: {times:.2f} of the demand."
        )
    return f"{demand}; {can}{rates} ({supply['basis']}).{verdict}"


def loaded_words(data: dict[str, Any]) -> str:
    """A run's `data`: what its loader could deliver, and how long the steps waited for it."""
    stages = ", ".join(
        f"{stage} {units.rate(rate, 'token')}" for stage, rate in data["stage_tokens_per_second"].items()
    )
    words = f"the loader could deliver {units.rate(data['tokens_per_second'], 'token')} ({stages})"
    if data.get("slowest_stage"):
        words += f", {data['slowest_stage']} the slowest stage"
    words += f"; the steps of the last session waited {units.seconds(data['wait_seconds'])} for it in all"
    lost = [
        f"{units.percent(data[key])} of the {what} {word}"
        for key, what, word in (
            ("padded_fraction", "positions", "padded"), ("cropped_fraction", "tokens", "cropped"),
            ("documents_cut_fraction", "documents", "cut"),
        )
        if data.get(key) is not None
    ]  # fmt: skip
    return words + (f"; {data['packing']}: {', '.join(lost)}" if lost else "")


class Cached(Protocol):
    """One folder of the cache."""

    @property
    def name(self) -> str: ...
    @property
    def kind(self) -> str: ...
    @property
    def source(self) -> str | None: ...
    @property
    def bytes(self) -> int: ...
    @property
    def days(self) -> float: ...
    @property
    def busy(self) -> bool: ...


def show_cache(console: Console, folder: Path, entries: Sequence[Cached]) -> None:
    """What `data clean` would remove."""
    if not entries:
        console.print(f"{folder}: nothing to remove")
        return
    console.print(f"{folder}: {units.bytes_(sum(entry.bytes for entry in entries))}")
    for entry in entries:
        source = f" of {entry.source}" if entry.source else ""
        now = ", being made now: it stays" if entry.busy else f", unused for {entry.days:.0f} days"
        console.print(
            Text.assemble(f"  {units.bytes_(entry.bytes):>9}  {entry.name}  ", (f"{entry.kind}{source}{now}", "dim")),
            soft_wrap=True,
        )
