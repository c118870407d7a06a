"""`ironlaw generate`"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import typer

from ironlaw.cli.console import messages, print_json
from ironlaw.errors import UserError, printable


def generate(
    run: Annotated[Path, typer.Argument(help="A run directory with a checkpoint, or a Hugging Face model's.")],
    prompt: Annotated[str, typer.Option(help="Text to continue.")] = "\n",
    tokens: Annotated[int, typer.Option(help="How many tokens to add.", min=1)] = 120,
    temperature: Annotated[float, typer.Option(help="0 takes the likeliest token every time.", min=0.0)] = 0.8,
    top_k: Annotated[int, typer.Option(help="Choose among the k likeliest tokens; 0 among all.", min=0)] = 50,
    seed: Annotated[int, typer.Option(help="The same seed gives the same text.")] = 0,
    json: Annotated[bool, typer.Option("--json", help="Print one JSON document.")] = False,
) -> None:
    from ironlaw.model.generate import continue_tokens
    from ironlaw.train.restore import load_trained

    trained = load_trained(run)
    for message in trained.passed_over:
        messages().print(message, markup=False)
    tokenizer = trained.tokenizer
    if tokenizer is None:
        raise UserError(f"{run} has no tokenizer (mock data?): train on text to generate text")
    start = tokenizer.encode(prompt, special=trained.step is None) or [tokenizer.end_of_text]
    new = list(
        continue_tokens(
            trained.model, start, tokens, temperature=temperature, top_k=top_k, seed=seed, stop=tokenizer.ends
        )
    )
    text = tokenizer.decode(new)
    if json:
        print_json({"prompt": prompt, "text": text, "tokens": len(new)} | trained.about())
        return
    # A model may write anything, escapes of terminals too; a file gets it as it is.
    sys.stdout.write(printable(prompt + text) + "\n" if sys.stdout.isatty() else prompt + text + "\n")
    which = "" if trained.step is None else f"step {trained.step}, "
    messages().print(f"{which}{len(new)} tokens, temperature {temperature}, top-k {top_k}, seed {seed}", style="dim")
