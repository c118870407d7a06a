"""`ironlaw export`"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from ironlaw.errors import UserError
from ironlaw.report.console import messages, output, print_json
from ironlaw.train.run_directory import beside

if TYPE_CHECKING:
    from ironlaw.model.huggingface.verify import Verified
    from ironlaw.train.restore import Trained

_TORCH = {"fp32": "float32", "bf16": "bfloat16", "fp16": "float16"}
DTYPES = {"hf": (*_TORCH, "int4", "int8", "fp8", "mxfp4", "nf4"), "gguf": (*_TORCH, "q8_0", "q4_0")}


def export(
    run: Annotated[Path, typer.Argument(help="A run directory with a checkpoint.")],
    folder: Annotated[
        Path | None, typer.Argument(help="The directory to write; RUN-hf or RUN-gguf unless given.")
    ] = None,
    to: Annotated[
        str, typer.Option(help="hf: config.json and safetensors, as `transformers` reads them; gguf: for llama.cpp.")
    ] = "hf",
    dtype: Annotated[
        str | None,
        typer.Option(help="fp32 (gguf: fp16) unless given; bf16. Of a compressed run its format; of gguf q8_0, q4_0."),
    ] = None,
    json: Annotated[bool, typer.Option("--json", help="Print one JSON document.")] = False,
) -> None:
    if to not in DTYPES:
        raise UserError(f"--to {to!r} is not known: write --to {' or --to '.join(DTYPES)}")
    dtype = dtype or ("fp16" if to == "gguf" else "fp32")
    if dtype not in DTYPES[to]:
        raise UserError(f"--dtype {dtype!r} is not known of {to}: write {', '.join(DTYPES[to])}")
    folder = folder or beside(run, to)
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise UserError(f"{folder} exists: give a new directory")

    from ironlaw.train.restore import load_run

    trained = load_run(run)
    for message in trained.passed_over:
        messages().print(message)
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
    from ironlaw.model.gguf import check_gguf, write_gguf
    from ironlaw.model.huggingface.verify import Verified
    from ironlaw.numerics.compression import int4_scales
    from ironlaw.train.run_directory import complete_or_nothing

    model, tokenizer = trained.model, trained.tokenizer
    kind = check_gguf(model.config).lower()
    scales = int4_scales(trained.held) if dtype == "q4_0" else {}
    with complete_or_nothing(folder) as partial:
        write_gguf(
            partial / "model.gguf", model.config, model.state_dict(), dtype, scales=scales,
            tokenizer=tokenizer.path if tokenizer is not None else None,
            end_of_text=tokenizer.end_of_text if tokenizer is not None else None,
        )  # fmt: skip
    return kind, Verified(reason="a GGUF file is not read back here")


def _safetensors(trained: Trained, folder: Path, dtype: str) -> tuple[str, Verified]:
    import torch

    from ironlaw.model.huggingface.configs import family_of
    from ironlaw.model.huggingface.verify import verify
    from ironlaw.model.huggingface.weights import write_model, write_tensors, write_tokenizer
    from ironlaw.numerics.stored import COMPUTES, LIBRARY, STORED, check_stored, stored_tensors
    from ironlaw.train.run_directory import complete_or_nothing

    model, tokenizer = trained.model, trained.tokenizer
    config, kind = model.config, family_of(model.config).kind  # before anything is written
    end = tokenizer.end_of_text if tokenizer is not None else None
    precision = getattr(torch, _TORCH.get(dtype, "float32"))
    if dtype in STORED:
        check_stored(config, trained.held, dtype)
    with complete_or_nothing(folder) as partial:
        if dtype in STORED:
            tensors, about = stored_tensors(config, model.state_dict(), trained.held, dtype)
            write_tensors(partial, config, tensors, precision, end, quantization_config=about)
        else:
            write_model(partial, config, model.state_dict(), precision, end)
        if tokenizer is not None:
            write_tokenizer(partial, tokenizer.path, tokenizer.end_of_text_token, config.context)
        verified = verify(partial, model, precision, LIBRARY.get(dtype), COMPUTES.get(dtype, torch.float32))
        if verified.differs:
            raise UserError(
                f"{verified.problem or f'{verified.version} computes another model from what was written'} "
                f"(largest difference of logits {verified.largest_difference}), so {folder} was not made: report this"
            )
    return kind, verified
