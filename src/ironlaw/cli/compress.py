"""`ironlaw compress` and `ironlaw export`"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from typer import Argument, Option

from ironlaw.catalog.formats import METHODS, SCORES, read_target
from ironlaw.cli.options import Json
from ironlaw.errors import UserError, refuse_options
from ironlaw.report.console import answer, messages, output, print_json
from ironlaw.train.run_directory import path_beside
from ironlaw.units import parse_bytes

if TYPE_CHECKING:
    from collections.abc import Mapping

    from ironlaw.model.huggingface.verify import Verified
    from ironlaw.model.transformer import Transformer
    from ironlaw.numerics.quantized import Quantized
    from ironlaw.train.compression import Decoder
    from ironlaw.train.restore import Trained

ONE, ALL = "one format, --to int4", "all formats, --sweep"


def compress(
    source: Annotated[Path, Argument(metavar="RUN|DIR", help="A run, or the directory of a Hugging Face model.")],
    to: Annotated[
        str | None, Option(help="Format (see `ironlaw formats`), 2:4, pruned=50%, or several: int4,2:4.")
    ] = None,
    out: Annotated[
        Path | None, Option(help="Run directory to write, RUN-FORMAT unless given; of --sweep, a page (.html).")
    ] = None,
    method: Annotated[
        str | None, Option(help=f"Method: {', '.join(METHODS)} (docs/formats.md); {METHODS[0]} unless given.")
    ] = None,
    prune_by: Annotated[
        str | None, Option(help="What is kept: magnitude (unless given), or wanda, which counts inputs too.")
    ] = None,
    all_layers: Annotated[
        bool, Option("--all-layers", help="Compress the embedding and the output layer too.")
    ] = False,
    within: Annotated[
        str | None, Option(help="Limit, such as 6MB: wider formats go where the loss needs them.")
    ] = None,
    sweep: Annotated[bool, Option("--sweep", help="Try every format: loss against bytes and speed.")] = False,
    budget: Annotated[str | None, Option(help="Time for --sweep: 90s, 10min, 1h; 10min unless given.")] = None,
    data: Annotated[str | None, Option(help="Text to measure the loss on; that of the run unless given.")] = None,
    json: Json = False,
) -> None:
    given = {"to": to, "method": method, "prune_by": prune_by, "all_layers": all_layers, "within": within}
    refuse_options(
        given | {"budget": budget}, {**dict.fromkeys(given, (ONE,)), "budget": (ALL,)}, ALL if sweep else ONE
    )
    if sweep:
        _sweep(source, out, budget or "10min", data, json)
        return
    if to is None:
        raise UserError("give --to FORMAT, such as int4, or --sweep")
    method, score = method or METHODS[0], prune_by or SCORES[0]
    if method not in METHODS:
        raise UserError(f"--method {method!r} is not known: write {', '.join(METHODS)}")
    if score not in SCORES:
        raise UserError(f"--prune-by {score!r} is not known: write {' or '.join(SCORES)}")

    target = read_target(to)
    try:
        room = None if within is None else parse_bytes(within)
    except ValueError as error:
        raise UserError(f"--within {error}") from None
    if prune_by and target.pruning is None:
        raise UserError(f"--prune-by {prune_by} prunes nothing: add 2:4 or pruned=50% to --to")

    from dataclasses import asdict

    from ironlaw.report.catalog_view import compression_view
    from ironlaw.train.compression import compress_run

    out = out or path_beside(source, to)
    result = compress_run(
        source, target, out, engine_decoder, method=method, score=score, whole=all_layers,
        within=room, data=data, say=messages().print,
    )  # fmt: skip
    answer(
        json, {"schema": 1, "out": str(out), **asdict(result)},
        lambda found: compression_view(str(source), str(out), found),
    )  # fmt: skip


def _sweep(source: Path, out: Path | None, budget: str, data: str | None, json: bool) -> None:
    if out is not None and (out.suffix != ".html" or out.is_dir()):
        raise UserError(f"--out {out}: a sweep writes one page, give it a name such as sweep.html")

    from ironlaw.cli.tune import parse_budget
    from ironlaw.report.page import write
    from ironlaw.report.sweep_view import sweep_view
    from ironlaw.train.sweep import sweep_formats

    found = sweep_formats(source, engine_decoder, parse_budget(budget), data=data, say=messages().print)
    view = sweep_view(found)
    answer(json, found, lambda _: view)
    if out is not None:
        write(out, view)
        messages().print(f"drawn in {out}")
    if found.get("interrupted"):
        raise KeyboardInterrupt


def engine_decoder(model: Transformer, held: Mapping[str, Quantized]) -> Decoder:
    """Return a greedy decoder of one sequence with the engine of `generate`; it starts from one token."""
    from ironlaw.serve.config import ServeConfig
    from ironlaw.serve.engine import Engine
    from ironlaw.serve.loading import prepare
    from ironlaw.serve.request import SamplingParams
    from ironlaw.train.compression import Decoder

    config = ServeConfig(batch=1)
    served = prepare(model, config, model.config.name, held)
    engine = Engine(served, config)
    run = lambda count: len(list(engine.stream([0], SamplingParams(max_tokens=count, temperature=0.0))))  # noqa: E731
    embedding = model.embedding.weight if model.embedding is not None else None
    looked_up = 0 if embedding is None or embedding is model.head._parameters.get("weight") else embedding.nbytes
    return Decoder(run, served.weight_bytes - looked_up, served.kernels)


_TORCH = {"fp32": "float32", "bf16": "bfloat16", "fp16": "float16"}
DTYPES = {"hf": (*_TORCH, "int4", "int8", "fp8", "mxfp4", "nf4"), "gguf": (*_TORCH, "q8_0", "q4_0")}


def export(
    run: Annotated[Path, Argument(help="A run directory with a checkpoint.")],
    folder: Annotated[Path | None, Argument(help="The directory to write; RUN-hf or RUN-gguf unless given.")] = None,
    to: Annotated[
        str, Option(help="hf: config.json and safetensors for `transformers`; gguf: one file for llama.cpp.")
    ] = "hf",
    dtype: Annotated[
        str | None,
        Option(help="fp32 (gguf: fp16) unless given, or bf16; of gguf q8_0 or q4_0; of hf a compressed run's own."),
    ] = None,
    average: Annotated[
        bool, Option("--average", help="Export the average of the weights (train.average_decay).")
    ] = False,
    json: Json = False,
) -> None:
    if to not in DTYPES:
        raise UserError(f"--to {to!r} is not known: write --to {' or --to '.join(DTYPES)}")
    dtype = dtype or ("fp16" if to == "gguf" else "fp32")
    if dtype not in DTYPES[to]:
        raise UserError(f"--dtype {dtype!r} is not known of {to}: write {', '.join(DTYPES[to])}")
    folder = folder or path_beside(run, to)

    from ironlaw.train.restore import load_run

    trained = load_run(run, average)
    for message in trained.passed_over:
        messages().print(message)
    if trained.other_average:
        messages().print("the run has averaged weights, too: --average exports them")
    kind, verified = (_gguf if to == "gguf" else _safetensors)(trained, folder, dtype)
    parameters = trained.model.config.parameters
    said = {"folder": str(folder), "architecture": kind, "parameters": parameters}
    if json:
        print_json(said | trained.about() | {"verification": verified.to_json()})
    else:
        output().print(
            f"{folder}: {kind}, {parameters:,} parameters in {dtype}, of step {trained.step}; {verified}",
            soft_wrap=True,
        )


def _gguf(trained: Trained, folder: Path, dtype: str) -> tuple[str, Verified]:
    from ironlaw.data.chat import read_template
    from ironlaw.model.gguf import check_gguf, write_gguf
    from ironlaw.model.huggingface.verify import Verified
    from ironlaw.train.run_directory import complete_or_nothing

    model, tokenizer = trained.model, trained.tokenizer
    kind = check_gguf(model.config).lower()
    codes = {name: one for name, one in trained.held.items() if dtype == "q4_0" and one.format.name == "int4"}
    scales = {name: one.scale_of_each() for name, one in codes.items()}
    beside: dict[str, Any] = {}
    if tokenizer is not None:
        beside = {"tokenizer": tokenizer.path, "begin": tokenizer.begin, "end": tokenizer.end}
        beside |= {"adds_begin": tokenizer.adds_begin, "template": read_template(tokenizer.home)[0]}
    with complete_or_nothing(folder) as partial:
        write_gguf(partial / "model.gguf", model.config, model.state_dict(), dtype, scales=scales, **beside)
    return kind, Verified(reason="a GGUF file is not read back here")


def _safetensors(trained: Trained, folder: Path, dtype: str) -> tuple[str, Verified]:
    import torch

    from ironlaw.data.chat import Text, end_fields, read_template
    from ironlaw.data.tokenizer import GENERATION
    from ironlaw.files import read_json_or_empty, write_json
    from ironlaw.model.huggingface.configs import family_of
    from ironlaw.model.huggingface.verify import verify
    from ironlaw.model.huggingface.weights import write_model, write_tensors, write_tokenizer
    from ironlaw.numerics.stored import COMPUTES, LIBRARY, STORED, check_stored, stored_tensors
    from ironlaw.train.run_directory import complete_or_nothing

    model, tokenizer = trained.model, trained.tokenizer
    config, kind = model.config, family_of(model.config).kind  # raises before anything is written
    stops, named = dict[str, Any](), dict[str, Any]()
    if tokenizer is not None:
        template, special = read_template(tokenizer.home)
        named = special if template is None else special | {"chat_template": template}
        turns = Text(tokenizer, template, special).turn_ends()
        stops = end_fields(tokenizer.begin, tokenizer.ends | turns, tokenizer.end)
    precision = getattr(torch, _TORCH.get(dtype, "float32"))
    if dtype in STORED:
        check_stored(config, trained.held, dtype)
    with complete_or_nothing(folder) as partial:
        if dtype in STORED:
            tensors, about = stored_tensors(config, model.state_dict(), trained.held, dtype)
            write_tensors(partial, config, tensors, precision, **stops, quantization_config=about)
        else:
            write_model(partial, config, model.state_dict(), precision, **stops)
        if tokenizer is not None:
            write_tokenizer(partial, tokenizer.path, tokenizer.end_of_text_token, config.context, **named)
            # Without this file `transformers` takes the fields from config.json.
            if generation := read_json_or_empty(tokenizer.home / GENERATION):
                write_json(partial / GENERATION, generation | stops)
        verified = verify(partial, model, precision, LIBRARY.get(dtype), COMPUTES.get(dtype, torch.float32))
        if verified.differs:
            raise UserError(
                f"{verified.problem or f'{verified.version} computes another model from what was written'} "
                f"(largest difference of logits {verified.largest_difference}), so {folder} was not made: report this"
            )
    return kind, verified
