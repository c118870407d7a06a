"""`ironlaw serve`"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from ironlaw.errors import UserError
from ironlaw.report.console import messages


def serve(
    path: Annotated[Path, typer.Argument(help="A run directory with a checkpoint, or a Hugging Face directory.")],
    port: Annotated[int | None, typer.Option(help="0: any free one; 8000 unless given.", min=0, max=65535)] = None,
    host: Annotated[str | None, typer.Option(help="Address to listen on; 127.0.0.1 unless given.")] = None,
    settings: Annotated[list[str] | None, typer.Option("--set", help="serve.key=value, as often as needed.")] = None,
    engine: Annotated[str, typer.Option(help="ironlaw, or vllm in its own process.")] = "ironlaw",
    json: Annotated[bool, typer.Option("--json", help="Print one line of JSON with the url when ready.")] = False,
) -> None:
    from ironlaw.serve.config import serve_config
    from ironlaw.serve.server import require_extra

    given = {key: value for key, value in (("port", port), ("host", host)) if value is not None}
    if engine == "vllm":
        from ironlaw.serve.vllm import become_vllm

        become_vllm(path, serve_config(settings or (), **given))
    if engine != "ironlaw":
        raise UserError(f"no engine {engine!r}: write ironlaw or vllm")
    require_extra()
    config = serve_config(settings or (), **given)
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

    run(made, ready)
