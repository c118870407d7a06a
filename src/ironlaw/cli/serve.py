"""`ironlaw serve` and `ironlaw generate`"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import typer

from ironlaw.errors import UserError, printable
from ironlaw.report.console import messages, print_json


def serve(
    path: Annotated[Path, typer.Argument(help="A run directory with a checkpoint, or a Hugging Face directory.")],
    port: Annotated[int | None, typer.Option(help="0: any free one; 8000 unless given.", min=0, max=65535)] = None,
    host: Annotated[str | None, typer.Option(help="Address to listen on; 127.0.0.1 unless given.")] = None,
    settings: Annotated[list[str] | None, typer.Option("--set", help="serve.key=value, as often as needed.")] = None,
    engine: Annotated[str, typer.Option(help="ironlaw, or vllm in its own process.")] = "ironlaw",
    json: Annotated[bool, typer.Option("--json", help="Print one line of JSON with the url when ready.")] = False,
) -> None:
    from ironlaw.serve.config import serve_config
    from ironlaw.serve.server import bound, require_extra

    given = {key: value for key, value in (("port", port), ("host", host)) if value is not None}
    if engine == "vllm":
        from ironlaw.serve.vllm import become_vllm

        become_vllm(path, serve_config(settings or (), **given))
    if engine != "ironlaw":
        raise UserError(f"no engine {engine!r}: write ironlaw or vllm")
    require_extra()
    config = serve_config(settings or (), **given)
    address = bound(config)
    from ironlaw.serve.engine import Engine
    from ironlaw.serve.loading import load_served
    from ironlaw.serve.server import serve as run
    from ironlaw.serve.warmup import warm_up

    served = load_served(path, config)
    if served.note:
        messages().print(served.note)
    made = Engine(served, config)
    warm_up(made)
    about = {
        "model": served.name, "device": str(served.device), "weights": served.weights, "kv": served.kv,
        "kv_tokens": made.blocks.tokens, "context": made.context, "threads": served.threads,
        "kernels": served.kernels,
    }  # fmt: skip

    def ready(url: str) -> None:
        if json:
            import json as encoder

            print(encoder.dumps({"url": url} | about), flush=True)
        messages().print(
            f"{served.name} at {url}: {served.weights} weights, {about['kv_tokens']:,} tokens of {served.kv} keys and "
            f"values, {config.batch} requests at once; Ctrl-C ends it",
        )

    run(made, ready, address)


def generate(
    run: Annotated[Path, typer.Argument(help="A run directory with a checkpoint, or a Hugging Face model's.")],
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

    config = ServeConfig(batch=1)
    served = load_served(run, config, needs_text=True)
    for message in (*served.passed_over, *([served.note] if served.note else [])):
        messages().print(message)
    text = served.text
    if text is None:
        raise UserError(f"{run} has no tokenizer (mock data?): train on text to generate text")
    start = text.encode(prompt) or sorted(served.end_tokens)[:1]
    sampling = Sampling(max_tokens=tokens, temperature=temperature, top_k=top_k, seed=seed)
    new = Engine(served, config).continued(start, sampling)
    answer = text.decode(new)
    if json:
        print_json({"prompt": prompt, "text": answer, "tokens": len(new)} | served.about)
        return
    # A model may write anything, escapes of terminals too; a file gets it as it is.
    sys.stdout.write(printable(prompt + answer) + "\n" if sys.stdout.isatty() else prompt + answer + "\n")
    which = f"step {served.about['step']}, " if served.about else ""
    messages().print(f"{which}{len(new)} tokens, temperature {temperature}, top-k {top_k}, seed {seed}", style="dim")
