"""`ironlaw compress`"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from ironlaw.catalog.formats import METHODS, SCORES, read_target
from ironlaw.errors import UserError
from ironlaw.report.console import answer, messages

if TYPE_CHECKING:
    from collections.abc import Mapping

    from ironlaw.model.transformer import Transformer
    from ironlaw.numerics.quantized import Quantized
    from ironlaw.train.compression import Decoder


def compress(
    source: Annotated[Path, typer.Argument(metavar="RUN|DIR", help="A run, or a Hugging Face model's directory.")],
    to: Annotated[str | None, typer.Option(help="A format of `ironlaw formats`, 2:4, pruned=50%, or int4,2:4.")] = None,
    out: Annotated[
        Path | None, typer.Option(help="The run directory to write, RUN-FORMAT unless given; of --sweep a page, .html.")
    ] = None,
    method: Annotated[str, typer.Option(help=f"{', '.join(METHODS)}: docs/formats.md.")] = "rtn",
    prune_by: Annotated[str, typer.Option(help="magnitude, or wanda: times the norm of the input.")] = "magnitude",
    all_layers: Annotated[bool, typer.Option("--all-layers", help="Embedding and output layer too.")] = False,
    within: Annotated[str | None, typer.Option(help="Bytes, such as 6MB: wider formats where loss needs them.")] = None,
    sweep: Annotated[bool, typer.Option("--sweep", help="Every format: loss against bytes and speed.")] = False,
    budget: Annotated[str, typer.Option(help="Time for --sweep: 90s, 10min, 1h.")] = "10min",
    data: Annotated[str | None, typer.Option(help="Text to measure on; a run's own unless given.")] = None,
    json: Annotated[bool, typer.Option("--json", help="Print one JSON document.")] = False,
) -> None:
    if method not in METHODS:
        raise UserError(f"--method {method!r} is not known: write {', '.join(METHODS)}")
    if prune_by not in SCORES:
        raise UserError(f"--prune-by {prune_by!r} is not known: write {' or '.join(SCORES)}")
    if sweep:
        _sweep(source, to, out, budget, data, json)
        return
    if to is None:
        raise UserError("give --to FORMAT, such as int4, or --sweep")

    from dataclasses import asdict

    from ironlaw.report.catalog_view import compression_view
    from ironlaw.train.compression import compress_run
    from ironlaw.train.run_directory import beside
    from ironlaw.units import parse_bytes

    target = read_target(to)
    out = out or beside(source, to)
    try:
        room = None if within is None else parse_bytes(within)
    except ValueError as error:
        raise UserError(f"--within {error}") from None
    if prune_by == "wanda" and target.pruning is None:
        raise UserError("--prune-by wanda prunes nothing: add 2:4 or pruned=50% to --to")
    result = compress_run(
        source, target, out, engine_decoder, method=method, score=prune_by, whole=all_layers,
        within=room, data=data, say=messages().print,
    )  # fmt: skip
    answer(
        json, {"schema": 1, "out": str(out), **asdict(result)},
        lambda found: compression_view(str(source), str(out), found),
    )  # fmt: skip


def _sweep(source: Path, to: str | None, out: Path | None, budget: str, data: str | None, json: bool) -> None:
    if to is not None:
        raise UserError("--sweep tries every format: leave --to out")
    if out is not None and (out.suffix != ".html" or out.is_dir()):
        raise UserError(f"--out {out}: a sweep writes one page, give it a name such as sweep.html")

    from ironlaw.cli.tune import seconds_of
    from ironlaw.report.page import write
    from ironlaw.report.sweep_view import FOOTER, sweep_view
    from ironlaw.train.sweep import sweep_formats

    found = sweep_formats(source, engine_decoder, seconds_of(budget), data=data, say=messages().print)
    view = sweep_view(found)
    answer(json, found, lambda _: view)
    if out is not None:
        write(out, view, f"Formats of {found['source']}", FOOTER)
        messages().print(f"drawn in {out}")


def engine_decoder(model: Transformer, held: Mapping[str, Quantized]) -> Decoder:
    """Single-stream decoding as `generate` does it: so many tokens after one, the likeliest each."""
    from ironlaw.serve.config import ServeConfig
    from ironlaw.serve.engine import Engine
    from ironlaw.serve.loading import prepare
    from ironlaw.serve.request import Sampling
    from ironlaw.train.compression import Decoder

    config = ServeConfig(batch=1)
    served = prepare(model, config, model.config.name, held)
    engine = Engine(served, config)
    run = lambda count: len(engine.continued([0], Sampling(max_tokens=count, temperature=0.0)))  # noqa: E731
    embedding = model.embedding.weight if model.embedding is not None else None
    looked_up = 0 if embedding is None or embedding is model.head._parameters.get("weight") else embedding.nbytes
    return Decoder(run, served.weight_bytes - looked_up, served.kernels)
