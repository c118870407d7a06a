"""`ironlaw generate`"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import typer

from ironlaw.cli.console import messages, print_json
from ironlaw.errors import UserError


def generate(
    run: Annotated[Path, typer.Argument(help="A run directory with a checkpoint, or a Hugging Face directory.")],
    prompt: Annotated[str, typer.Option(help="Text to continue.")] = "\n",
    tokens: Annotated[int, typer.Option(help="How many tokens to add.", min=1)] = 120,
    temperature: Annotated[float, typer.Option(help="0 takes the likeliest token every time.", min=0.0)] = 0.8,
    top_k: Annotated[int, typer.Option(help="Choose among the k likeliest tokens; 0 among all.", min=0)] = 50,
    seed: Annotated[int, typer.Option(help="The same seed gives the same text.")] = 0,
    json: Annotated[bool, typer.Option("--json", help="Print one JSON document.")] = False,
) -> None:
    from ironlaw.serve.config import ServeConfig
    from ironlaw.serve.engine import Engine
    from ironlaw.serve.loading import load_served
    from ironlaw.serve.request import Sampling
    from ironlaw.serve.server import text_of

    config = ServeConfig(batch=1)
    served = load_served(run, config)
    text = text_of(served)
    if text is None:
        raise UserError(f"{run} has no tokenizer (mock data?): train on text to generate text")
    engine = Engine(served, config)
    start = text.encode(prompt) or sorted(served.end_tokens)[:1]
    sampling = Sampling(max_tokens=tokens, temperature=temperature, top_k=top_k, seed=seed)
    new = engine.continued(start, sampling)
    answer = text.decode(new)
    if json:
        print_json({"prompt": prompt, "text": answer, "tokens": len(new)})
        return
    sys.stdout.write(prompt + answer + "\n")
    messages().print(f"[dim]{len(new)} tokens, temperature {temperature}, top-k {top_k}, seed {seed}[/dim]")
