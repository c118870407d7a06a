"""`ironlaw compress`"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from ironlaw.cli.console import messages, print_json, show
from ironlaw.errors import UserError

if TYPE_CHECKING:
    from collections.abc import Callable

    from ironlaw.model.transformer import Transformer

METHODS, SCORES = ("rtn", "gptq"), ("magnitude", "wanda")


def compress(
    source: Annotated[Path, typer.Argument(metavar="RUN|DIR", help="A run, or a Hugging Face model's directory.")],
    to: Annotated[str, typer.Option(help="A format of `ironlaw formats`, 2:4, pruned=50%, or one of each: int4,2:4.")],
    out: Annotated[Path, typer.Option(help="The run directory to write.")],
    method: Annotated[str, typer.Option(help="rtn: each weight to nearest. gptq: by the layers' inputs.")] = "rtn",
    prune_by: Annotated[str, typer.Option(help="magnitude, or wanda: times the norm of the input.")] = "magnitude",
    all_layers: Annotated[bool, typer.Option("--all-layers", help="Embedding and output layer too.")] = False,
    data: Annotated[str | None, typer.Option(help="Text to measure on; a run's own unless given.")] = None,
    json: Annotated[bool, typer.Option("--json", help="Print one JSON document.")] = False,
) -> None:
    if method not in METHODS:
        raise UserError(f"--method {method!r} is not known: write {' or '.join(METHODS)}")
    if prune_by not in SCORES:
        raise UserError(f"--prune-by {prune_by!r} is not known: write {' or '.join(SCORES)}")

    from dataclasses import asdict

    from ironlaw.numerics.compression import read_target
    from ironlaw.report.catalog_view import compression_view
    from ironlaw.train.compression import compress_run

    target = read_target(to)
    if prune_by == "wanda" and target.pruning is None:
        raise UserError("--prune-by wanda prunes nothing: add 2:4 or pruned=50% to --to")
    result = compress_run(
        source, target, out, engine_decoder, method=method, score=prune_by, whole=all_layers, data=data,  # type: ignore[arg-type]
        say=messages().print,
    )  # fmt: skip
    if json:
        print_json({"schema": 1, "out": str(out), **asdict(result)})
    else:
        show(compression_view(str(source), str(out), asdict(result)))


def engine_decoder(model: Transformer) -> Callable[[int], int]:
    """Single-stream decoding as `generate` does it: so many tokens after one, the likeliest each."""
    from ironlaw.serve.config import ServeConfig
    from ironlaw.serve.engine import Engine
    from ironlaw.serve.loading import prepare
    from ironlaw.serve.request import Sampling

    config = ServeConfig(batch=1)
    engine = Engine(prepare(model, config, model.config.name), config)
    return lambda count: len(engine.continued([0], Sampling(max_tokens=count, temperature=0.0)))
