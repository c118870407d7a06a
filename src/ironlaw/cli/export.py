"""`ironlaw export`"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from ironlaw.cli.console import messages, output, print_json
from ironlaw.errors import UserError

DTYPES = {"fp32": "float32", "bf16": "bfloat16", "fp16": "float16"}


def export(
    run: Annotated[Path, typer.Argument(help="A run directory with a checkpoint.")],
    folder: Annotated[Path, typer.Argument(help="The directory to write.")],
    to: Annotated[str, typer.Option(help="hf: config.json and safetensors, as `transformers` reads them.")] = "hf",
    dtype: Annotated[str, typer.Option(help="fp32, bf16 or fp16.")] = "fp32",
    json: Annotated[bool, typer.Option("--json", help="Print one JSON document.")] = False,
) -> None:
    if to != "hf":
        raise UserError(f"--to {to!r} is not known: write --to hf")
    if dtype not in DTYPES:
        raise UserError(f"--dtype {dtype!r} is not known: write {', '.join(DTYPES)}")
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise UserError(f"{folder} exists: give a new directory")

    import torch

    from ironlaw.model.huggingface.configs import family_of
    from ironlaw.model.huggingface.verify import verify
    from ironlaw.model.huggingface.weights import write_model, write_tokenizer
    from ironlaw.train.restore import load_run
    from ironlaw.train.run_directory import complete_or_nothing

    trained = load_run(run)
    for message in trained.passed_over:
        messages().print(message, markup=False)
    model, tokenizer = trained.model, trained.tokenizer
    config, precision = model.config, getattr(torch, DTYPES[dtype])
    kind = family_of(config).kind  # before anything is written
    end = tokenizer.end_of_text if tokenizer is not None else None
    with complete_or_nothing(folder) as partial:
        write_model(partial, config, model.state_dict(), precision, end)
        if tokenizer is not None:
            write_tokenizer(partial, tokenizer.path, tokenizer.end_of_text_token, config.context)
        verified = verify(partial, model, precision)
        if verified.differs:
            raise UserError(
                f"{verified.problem or f'{verified.version} computes another model from what was written'} "
                f"(largest difference of logits {verified.largest_difference}), so {folder} was not made: report this"
            )
    said = {"folder": str(folder), "architecture": kind, "parameters": config.parameters}
    if json:
        print_json(said | trained.about() | {"verification": verified.to_json()})
    else:
        output().print(
            f"{folder}: {kind}, {config.parameters:,} parameters in {dtype}, of step {trained.step}; {verified}",
            markup=False, soft_wrap=True,
        )  # fmt: skip
