"""`ironlaw explain` and `ironlaw tune`"""

from __future__ import annotations

import json as encoder
import shlex
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import tomli_w
from typer import Argument, Option

from ironlaw import units
from ironlaw.cli.options import Json, Set
from ironlaw.config import load_config
from ironlaw.errors import UserError, refuse_options, shortened
from ironlaw.files import is_taken, write_json, write_text
from ironlaw.report.console import answer, messages, output

if TYPE_CHECKING:
    from collections.abc import Callable

    from ironlaw.explain.tune import Tuned


MAX_BUDGET_SECONDS = 366 * 86400.0
DEFAULT_CONCURRENCY, PROMPT_TOKENS, ANSWER_TOKENS = 16, 128, 64  # defaults of the load for serving


def tune(
    config: Annotated[Path | None, Argument(help="A config file, such as examples/gpt-tiny.toml.")] = None,
    budget: Annotated[str, Option(help="Time to spend, such as 90s, 15min or 1h.")] = "15min",
    set_: Set = None,
    exact: Annotated[bool, Option("--exact", help="Try only changes that leave the arithmetic as it is.")] = False,
    out: Annotated[Path, Option(help="Folder for the trials, tuned.toml and evidence.json.")] = Path("runs/tune"),
    serve: Annotated[Path | None, Option(help="Instead of CONFIG: tune how this run or directory is served.")] = None,
    concurrency: Annotated[int | None, Option(help="With --serve: requests at once; 16 unless given.", min=1)] = None,
    input: Annotated[int | None, Option(help="With --serve: tokens of a prompt; 128 unless given.", min=4)] = None,
    output_tokens: Annotated[
        int | None, Option("--output", help="With --serve: tokens of an answer; 64 unless given.", min=1)
    ] = None,
    data: Annotated[
        str | None, Option(help="With --serve: text for the prompts; that of the run unless given.")
    ] = None,
    json: Json = False,
) -> None:
    seconds = parse_budget(budget)
    if (config is None) == (serve is None):
        raise UserError("say what to tune: a config file, or --serve with a run or a Hugging Face directory")
    load = {"concurrency": concurrency, "input": input, "output": output_tokens, "data": data}
    refuse_options(load, dict.fromkeys(load, ("--serve",)), *(["--serve"] if serve else []))
    if is_taken(out):
        raise UserError(f"{out} exists: give another --out")

    from ironlaw.explain.tune import INTERRUPTED
    from ironlaw.explain.tune import tune as find
    from ironlaw.machine.profile import load_profile
    from ironlaw.report.comparison_view import tuned_view

    def keep(result: Tuned) -> None:
        out.mkdir(parents=True, exist_ok=True)
        text = tomli_w.dumps({"serve": result.config}) if serve is not None else result.config.to_toml()
        write_text(out / "tuned.toml", text)
        write_json(out / "evidence.json", result.to_json())

    say = messages().print
    if serve is not None:
        asked = concurrency or DEFAULT_CONCURRENCY, input or PROMPT_TOKENS, output_tokens or ANSWER_TOKENS, data
        result = _tune_serving(serve, *asked, seconds, set_ or [], exact, keep, say)
    else:
        assert config is not None
        settings = load_config(config, set_ or [])
        result = find(settings, load_profile(), budget_seconds=seconds, folder=out, exact=exact, keep=keep, say=say)
    keep(result)
    answer(json, result.to_json(), lambda found: tuned_view(found, str(out / "tuned.toml")))
    if serve is not None and not json:
        words = ["ironlaw", "serve", str(serve)]
        for key, value in result.config.items():
            words += ["--set", f"serve.{key}={value if isinstance(value, str) else encoder.dumps(value)}"]
        output().print(shlex.join(words), soft_wrap=True)
    if result.stopped == INTERRUPTED:
        raise KeyboardInterrupt(result.signal)


def _tune_serving(
    path: Path, at_once: int, input: int, tokens: int, data: str | None, seconds: float, set_: list[str], exact: bool,
    keep: Callable[[Tuned], None], say: Callable[[str], None],
) -> Tuned:  # fmt: skip
    from ironlaw.explain.tune import Measured
    from ironlaw.explain.tune_serving import candidates, tune_serving
    from ironlaw.serve.config import serve_config
    from ironlaw.serve.trials import Load, read_prompts, resolve_settings

    start = serve_config(set_)
    base, given = resolve_settings(path, start, say), start.model_dump(exclude_unset=True)
    if input + tokens > base["context"]:
        raise UserError(
            f"--input {input} and --output {tokens} are {input + tokens} tokens together, and this model takes "
            f"{base['context']}: give fewer"
        )
    prompts, is_text = read_prompts(path, 2 * at_once, input, base["vocab"], data, say=say)
    load = Load(path, prompts, tokens, at_once, seconds=min(4.0, seconds / 20))
    formats = ("bf16", "int8", "int4") if is_text else ()
    tried = candidates(base["cores"], at_once, input + tokens, formats, exact, is_text)

    def measure(settings: dict[str, Any], name: str) -> Measured:
        found = load(settings)
        return Measured(found.seconds_per_token, found.step_seconds, (found.loss,) if is_text else (), name)

    return tune_serving(tried, measure, base, given, budget_seconds=seconds, keep=keep, say=say)


def parse_budget(text: str) -> float:
    """Parse a time to spend, in seconds: `90s`, `15min`, `1h`."""
    try:
        seconds = units.parse_seconds(text)
    except ValueError:
        seconds = 0.0
    if not 0 < seconds <= MAX_BUDGET_SECONDS:
        raise UserError(f"--budget {shortened(text)!r} is no time to spend: write for example 90s, 15min or 1h")
    return seconds


def explain(
    run: Annotated[
        Path,
        Argument(help="A run directory of `train` or `bench --out`, or a profiler trace (.json, .json.gz)."),
    ],
    other: Annotated[Path | None, Argument(help="A second one, to explain why it is faster or slower.")] = None,
    json: Json = False,
) -> None:
    from ironlaw.api import explained
    from ironlaw.report.page import write

    document, view = explained(run, other)
    answer(json, document, lambda _: view)
    if view.page:
        page = run / "report.html" if run.is_dir() else run.with_name(run.name.partition(".")[0] + ".report.html")
        said = f"The same with charts: {page}"
        try:
            write(page, view)
        except OSError as error:  # a run may lie where nothing can be written
            said = f"No page with charts: {page}: {error.strerror}"
        if not json:
            messages().print(said)
