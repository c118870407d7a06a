"""`ironlaw export`"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from ironlaw.cli.console import output, print_json
from ironlaw.errors import UserError

_TORCH = {"fp32": "float32", "bf16": "bfloat16", "fp16": "float16"}
DTYPES = {"hf": tuple(_TORCH), "gguf": (*_TORCH, "q8_0", "q4_0")}


def export(
    run: Annotated[Path, typer.Argument(help="A run directory with a checkpoint.")],
    folder: Annotated[Path, typer.Argument(help="The directory to write.")],
    to: Annotated[
        str, typer.Option(help="hf: config.json and safetensors, as `transformers` reads them; gguf: for llama.cpp.")
    ] = "hf",
    dtype: Annotated[
        str | None,
        typer.Option(help="fp32, bf16, fp16; of gguf also q8_0, q4_0. fp32 unless given, of gguf fp16."),
    ] = None,
    json: Annotated[bool, typer.Option("--json", help="Print one JSON document.")] = False,
) -> None:
    if to not in DTYPES:
        raise UserError(f"--to {to!r} is not known: write --to {' or --to '.join(DTYPES)}")
    dtype = dtype or ("fp16" if to == "gguf" else "fp32")
    if dtype not in DTYPES[to]:
        raise UserError(f"--dtype {dtype!r} is not known of {to}: write {', '.join(DTYPES[to])}")
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise UserError(f"{folder} exists: give a new directory")

    from ironlaw.train.run_directory import RunDirectory

    directory = RunDirectory(run)
    if not directory.config_file.is_file():
        raise UserError(f"{run} is not a run directory: give one that `ironlaw train` made, such as runs/NAME")

    import torch

    from ironlaw.config import load_config
    from ironlaw.data.tokenizer import load
    from ironlaw.model.gguf import check_gguf, write_gguf
    from ironlaw.model.huggingface.fields import family
    from ironlaw.model.huggingface.weights import write_model, write_tokenizer
    from ironlaw.train.checkpoint import newest_of
    from ironlaw.train.restore import int4_scales, load_for_inference

    config = load_config(directory.config_file)
    kind = family(config.model)  # before anything is read or written
    if to == "gguf":
        check_gguf(config.model)
    model = load_for_inference(directory.checkpoints, config.model)
    known = directory.tokenizer_file.is_file()  # not with mock data
    tokenizer = load(directory.tokenizer_file, config.data.end_of_text) if known else None
    end = tokenizer.end_of_text if tokenizer is not None else None
    if to == "gguf":
        scales = int4_scales(newest_of(run)) if dtype == "q4_0" else {}
        folder.mkdir(parents=True, exist_ok=True)
        write_gguf(
            folder / "model.gguf", config.model, model.state_dict(), dtype,
            tokenizer=directory.tokenizer_file if known else None, end_of_text=end, scales=scales,
        )  # fmt: skip
    else:
        write_model(folder, config.model, model.state_dict(), getattr(torch, _TORCH[dtype]), end)
        if tokenizer is not None:
            write_tokenizer(folder, directory.tokenizer_file, tokenizer.end_of_text_token, config.model.context)
    if json:
        print_json({"folder": str(folder), "architecture": kind, "parameters": config.model.parameters})
    else:
        output().print(f"{folder}: {kind}, {config.model.parameters:,} parameters in {dtype}")
