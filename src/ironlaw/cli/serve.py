"""`ironlaw serve`, `ironlaw generate` and `ironlaw bench`"""

from __future__ import annotations

import math
import sys
from contextlib import nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from typer import Argument, Exit, Option

from ironlaw.cli.options import Json
from ironlaw.errors import UserError, printable, refuse_options
from ironlaw.report.console import answer, messages, print_json, progress

if TYPE_CHECKING:
    from ironlaw.serve.load import Report

MAX_REQUESTS = 10_000_000  # of one load: each is kept
MIN_SECONDS = 0.001  # seconds, the least that is a limit or a duration


def serve(
    path: Annotated[Path, Argument(help="A run directory with a checkpoint, or a Hugging Face directory.")],
    port: Annotated[int | None, Option(help="Port; 0 takes a free one, 8000 unless given.", min=0, max=65535)] = None,
    host: Annotated[str | None, Option(help="Address to listen on; 127.0.0.1 unless given.")] = None,
    settings: Annotated[
        list[str] | None, Option("--set", metavar="serve.KEY=VALUE", help="Override a setting; may be repeated.")
    ] = None,
    config: Annotated[Path | None, Option(help="A file of settings, as `tune --serve` writes it.")] = None,
    engine: Annotated[str, Option(help="Engine: ironlaw, or vllm in a process of its own.")] = "ironlaw",
    json: Annotated[bool, Option("--json", help="Print one line of JSON with the url when ready.")] = False,
) -> None:
    from ironlaw.serve.config import serve_config
    from ironlaw.serve.server import bind_socket, require_extra

    if engine not in ("ironlaw", "vllm"):
        raise UserError(f"no engine {engine!r}: write ironlaw or vllm")
    given = {key: value for key, value in (("port", port), ("host", host)) if value is not None}
    asked = serve_config(settings or (), config, **given)
    if engine == "vllm":
        from ironlaw.serve.vllm import exec_vllm

        exec_vllm(path, asked)
    require_extra()
    address = bind_socket(asked)
    from ironlaw.serve.engine import Engine
    from ironlaw.serve.loading import load_served
    from ironlaw.serve.server import serve as run
    from ironlaw.serve.warmup import warm_up

    served = load_served(path, asked)
    for message in served.notes:
        messages().print(message)
    made = Engine(served, asked)
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
            f"values, {asked.batch} requests at once; Ctrl-C ends it",
        )

    run(made, ready, address)


def generate(
    run: Annotated[Path, Argument(help="A run directory with a checkpoint, or a Hugging Face directory.")],
    prompt: Annotated[str, Option(help="Text to continue.", show_default="a line break")] = "\n",
    tokens: Annotated[int, Option(help="How many tokens to add.", min=1)] = 120,
    temperature: Annotated[
        float, Option(help="Randomness of the choice; 0 takes the likeliest token every time.", min=0.0)
    ] = 0.8,
    top_k: Annotated[int, Option(help="Choose among the k likeliest tokens; 0 among all.", min=0)] = 50,
    seed: Annotated[int, Option(help="The same seed gives the same text.")] = 0,
    json: Json = False,
) -> None:
    from ironlaw.serve.answers import TokenReader
    from ironlaw.serve.config import ServeConfig
    from ironlaw.serve.engine import Engine
    from ironlaw.serve.loading import load_served
    from ironlaw.serve.request import SamplingParams

    config = ServeConfig(batch=1)
    served = load_served(run, config, needs_text=True)
    for message in served.notes:
        messages().print(message)
    text = served.text
    if text is None:
        raise UserError(f"{run} has no tokenizer (mock data?): train on text to generate text")
    start = text.encode(prompt) or sorted(served.end_tokens)[:1]
    sampling = SamplingParams(max_tokens=tokens, temperature=temperature, top_k=top_k, seed=seed)
    made = Engine(served, config).stream(start, sampling)
    if json:
        new = list(made)
        print_json({"prompt": prompt, "text": text.decode_behind(new), "tokens": len(new)} | served.about)
        return
    # A model may write terminal escape sequences: they are escaped on a terminal, and unchanged in a file.
    shown = printable if sys.stdout.isatty() else str
    read = TokenReader(text, skips_special=False)
    count, interrupted = 0, None
    try:
        print(shown(prompt), end="", flush=True)
        for count, token in enumerate(made, 1):  # noqa: B007 the last number is shown
            print(shown(read(token)), end="", flush=True)
    except KeyboardInterrupt as stop:
        interrupted = stop
    print(shown(read.rest()))
    which = f"step {served.about['step']}, " if served.about else ""
    messages().print(f"{which}{count} tokens, temperature {temperature}, top-k {top_k}, seed {seed}", style="dim")
    if interrupted is not None:
        raise interrupted


def bench(
    url: Annotated[str, Argument(help="Any OpenAI-compatible server, such as http://127.0.0.1:8000")],
    rate: Annotated[
        float | None, Option(help="Requests per second, at the times of a Poisson process.", min=1e-6, max=1e6)
    ] = None,
    concurrency: Annotated[int | None, Option(help="Instead of --rate: this many requests at once.", min=1)] = None,
    trace: Annotated[Path | None, Option(help="Instead of --rate: a recorded trace, as JSON lines or CSV.")] = None,
    requests: Annotated[
        int | None, Option(help="Number of requests; 100 unless given.", min=1, max=MAX_REQUESTS)
    ] = None,
    seconds: Annotated[
        float | None, Option(help="With --rate, instead of --requests: duration.", min=MIN_SECONDS)
    ] = None,
    input: Annotated[int | None, Option(help="Tokens of a prompt; 128 unless given.", min=1)] = None,
    output_tokens: Annotated[
        int | None, Option("--output", help="Tokens of an answer; 64 unless given.", min=1)
    ] = None,
    prefix: Annotated[int, Option(help="Tokens that all prompts begin with.", min=0)] = 0,
    ttft: Annotated[
        float | None, Option(help="Limit for goodput: seconds to the first token.", min=MIN_SECONDS)
    ] = None,
    tpot: Annotated[
        float | None, Option(help="Limit for goodput: seconds per token after it.", min=MIN_SECONDS)
    ] = None,
    timeout: Annotated[float, Option(help="Time limit of one request, in seconds.", min=MIN_SECONDS)] = 600.0,
    seed: Annotated[int, Option(help="With --rate: seed of the arrival times.")] = 0,
    model: Annotated[str | None, Option(help="Model to ask; the server's first unless given.")] = None,
    api_key: Annotated[str | None, Option(envvar="OPENAI_API_KEY", help="API key, sent as a bearer token.")] = None,
    allow_end: Annotated[bool, Option(help="Let answers end early, as servers without ignore_eos do.")] = False,
    out: Annotated[Path | None, Option(help="Write a run directory for `ironlaw explain`.")] = None,
    json: Json = False,
) -> None:
    from ironlaw.report.serving_view import load_view
    from ironlaw.serve import load
    from ironlaw.train.run_directory import complete_or_nothing

    if sum(choice is not None for choice in (rate, concurrency, trace)) != 1:
        raise UserError("say how requests come: one of --rate 4, --concurrency 16 and --trace FILE")
    kind = "--rate" if rate is not None else "--concurrency" if concurrency is not None else "--trace"
    lengths, arrivals = ("--rate", "--concurrency"), ("--rate",)
    given = {"input": input, "output": output_tokens, "seconds": seconds, "seed": seed}
    refuse_options(given, {"input": lengths, "output": lengths, "seconds": arrivals, "seed": arrivals}, kind)
    if seconds is not None and requests is not None:
        raise UserError("--seconds and --requests say the same thing twice: give one of them")
    if trace is not None:
        plans = load.read_trace(trace)[:requests]
    else:
        count = requests or (math.ceil(seconds * rate) if seconds and rate else 100)
        if count > MAX_REQUESTS:
            raise UserError(f"--seconds {seconds:g} at this rate is {count:,} requests, at most {MAX_REQUESTS:,}")
        input, output_tokens = input or 128, output_tokens or 64
        plans = load.poisson(rate or math.inf, count, input, output_tokens, seed)
    shortest = min(plan.prompt_tokens for plan in plans)
    if prefix >= shortest > 0:
        raise UserError(f"--prefix {prefix} leaves nothing of a prompt of {shortest} tokens: give fewer")
    client = load.Client(url, model, api_key, timeout)
    asked = {"url": url, "rate": rate, "concurrency": concurrency, "trace": None if trace is None else str(trace),
             "input": input, "output": output_tokens, "prefix": prefix}  # fmt: skip
    # The folder is made before anything is sent, and what was measured is shown before it is written.
    with nullcontext() if out is None else complete_or_nothing(out) as folder:
        with progress("Requests") as update:
            report, interrupted = load.Report(), None
            going = load.run(
                client, plans, report, concurrency=concurrency, ignore_eos=not allow_end, shared_prefix=prefix,
                profile=out is not None, progress=update,
            )  # fmt: skip
            try:
                load.run_until_interrupted(going)
            except KeyboardInterrupt as stop:
                interrupted = stop
        if interrupted is not None and not report.outcomes:
            raise interrupted
        found = load.summary(report, ttft, tpot) | ({} if interrupted is None else {"interrupted": True})
        answer(json, {"load": asked} | found, load_view)
        if interrupted is not None:
            raise interrupted
        if folder is not None:
            _keep(folder, report, asked, found)
    if out is not None:
        lost = (report.server or {}).get("lost_steps")
        if lost:
            messages().print(
                f"the server remembers its newest steps (serve.trace_steps): {lost:,} of this load are lost"
            )
        messages().print(f"ironlaw explain {out} says where the time went")
    if found["errors"] or not found["completed"]:
        raise Exit(1)


def _keep(out: Path, report: Report, asked: dict[str, Any], found: dict[str, Any]) -> None:
    """Write a run directory for `ironlaw explain`."""
    from ironlaw.ledger import parse_line
    from ironlaw.serve.measured import serving_ledger, write_run

    server: dict[str, Any] = report.server or {"steps": [], "facts": {}}
    lines = map(parse_line, server.get("lines", ()))
    ledger = serving_ledger(server["steps"], server["facts"] | {"load": asked}, found, lines)
    write_run(out, ledger, [o.to_json() for o in report.outcomes], server["steps"])
