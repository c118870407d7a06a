"""`ironlaw generate`"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import typer

from ironlaw.cli.console import messages, print_json
from ironlaw.errors import UserError, printable


def generate(
    run: Annotated[Path, typer.Argument(help="A run directory with a checkpoint.")],
    prompt: Annotated[str, typer.Option(help="Text to continue.")] = "\n",
    tokens: Annotated[int, typer.Option(help="How many tokens to add.", min=1)] = 120,
    temperature: Annotated[float, typer.Option(help="0 takes the likeliest token every time.", min=0.0)] = 0.8,
    top_k: Annotated[int, typer.Option(help="Choose among the k likeliest tokens; 0 among all.", min=0)] = 50,
    seed: Annotated[int, typer.Option(help="The same seed gives the same text.")] = 0,
    json: Annotated[bool, typer.Option("--json", help="Print one JSON document.")] = False,
) -> None:
    from ironlaw.train.run_directory import RunDirectory

    directory = RunDirectory(run)
    if not directory.config_file.is_file():
        raise UserError(f"{run} is not a run directory: give one that `ironlaw train` made, such as runs/NAME")
    if not directory.tokenizer_file.is_file():
        raise UserError(f"{run} has no tokenizer (mock data?): train on text to generate text")

    from ironlaw.config import load_config
    from ironlaw.data.tokenizer import load
    from ironlaw.model.generate import continue_tokens
    from ironlaw.train.restore import load_for_inference

    config = load_config(directory.config_file)
    tokenizer = load(directory.tokenizer_file, config.data.end_of_text)
    model = load_for_inference(directory.checkpoints, config.model)
    start = tokenizer.encode(prompt) or [tokenizer.end_of_text]
    new = list(
        continue_tokens(
            model, start, tokens, temperature=temperature, top_k=top_k, seed=seed, stop=tokenizer.end_of_text
        )
    )
    text = tokenizer.decode(new)
    if json:
        print_json({"prompt": prompt, "text": text, "tokens": len(new)})
        return
    # A model may write anything, escapes of terminals too; a file gets it as it is.
    sys.stdout.write(printable(prompt + text) + "\n" if sys.stdout.isatty() else prompt + text + "\n")
    messages().print(f"{len(new)} tokens, temperature {temperature}, top-k {top_k}, seed {seed}", style="dim")
