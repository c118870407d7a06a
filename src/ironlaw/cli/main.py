"""The `ironlaw` command. Only the called verb is imported, so that `plan` never waits for PyTorch.

Exit codes: 0 done, 1 the answer is no, 2 wrong input, 70 a bug in Ironlaw, 130 interrupted (SIGINT), 143 terminated
(SIGTERM), 129 hung up (SIGHUP). On a signal, `train` saves before it exits.
"""

from __future__ import annotations

import atexit
import importlib
import io
import math
import os
import signal
import sys
from collections.abc import Callable
from types import ModuleType
from typing import Any

import typer
from typer.core import TyperCommand, TyperGroup

from ironlaw.cli.failure import WRONG_INPUT, Interrupted, fail, leave_quietly
from ironlaw.errors import MAX_INTEGER, MAX_TEXT, JobFailed, UserError, shortened
from ironlaw.package import __version__
from ironlaw.report.console import answered, has_reader, silence

# Panels of `ironlaw --help`: verb -> one line of help. Each verb is a function of that name, or a group of verbs.
PANELS = {
    "Plan": {
        "plan": "Compute memory, time, cost and energy of training or serving before it starts, and whether it fits.",
        "measure": "Measure what this machine attains: matrix products, memory, attention, storage, tokenizer.",
        "catalog": "List accelerators, nodes, models, power grids and prices, with their sources.",
        "formats": "List number formats: bits, range, scales, bytes of a model, and what multiplies them.",
        "validate": "Compare plans with measured runs, yours or published ones.",
        "calibrate": "Fit the planner's constants to some of your own runs.",
        "rehearse": "Run a cluster layout's ranks and collectives here, with tiny shapes, and compare with its plan.",
    },
    "Train": {
        "data": "Tokenise your own text once, look at it, check it, export it.",
        "train": "Plan and train a model, as a config file says, into a run directory.",
        "distil": "Train a small model to imitate a larger one: its probabilities and its hidden states.",
        "launch": "Write and submit the job of a run on a cluster: Slurm, Kubernetes or ssh.",
        "runs": "List the runs of a folder with their key figures.",
    },
    "Explain": {
        "explain": "Compare a run with its plan: where time and memory went, and what to change.",
        "tune": "Apply the changes that are planned to pay, measuring each, until none pays.",
    },
    "Serve and hand on": {
        "serve": "Serve a run or a Hugging Face directory through an OpenAI-compatible API.",
        "bench": "Load an OpenAI-compatible server, and measure latency, throughput and goodput.",
        "generate": "Continue a prompt with a trained model.",
        "compress": "Store a model in fewer bits or weights, and measure bytes, speed and loss before and after.",
        "export": "Write a model as Hugging Face safetensors, or as GGUF for llama.cpp.",
    },
    "This installation": {
        "doctor": "Show versions, devices, measurements, and what each missing optional part would give.",
    },
}
VERBS = {verb: about for panel in PANELS.values() for verb, about in panel.items()}
# Verb -> what its help ends with, a command that works as it stands or with a run or config of the user's.
EXAMPLES = {
    "plan": "plan llama3-8b --on 64xh100-sxm-80gb --tokens 160B",
    "catalog": "catalog h100-sxm-80gb",
    "formats": "formats nvfp4",
    "validate": "validate runs.csv --html record.html",
    "calibrate": "calibrate runs.csv --as my-cluster",
    "rehearse": 'rehearse llama3-8b --on 64xh100-sxm-80gb --layout "dp=8 tp=8 zero=1 sp=1"',
    "train": "train examples/gpt-tiny.toml --out runs/demo --set train.steps=200",
    "distil": "distil examples/gpt-tiny.toml --teacher runs/demo --out runs/student",
    "launch": "launch config.toml --on slurm --nodes 16 --time 4:00:00",
    "runs": "runs --sort validation_loss",
    "explain": "explain runs/demo",
    "tune": "tune examples/gpt-tiny.toml --budget 15min",
    "serve": "serve runs/demo --port 8000",
    "bench": "bench http://127.0.0.1:8000 --rate 4 --requests 100 --out runs/load",
    "generate": 'generate runs/demo --prompt "def "',
    "compress": "compress runs/demo --to int4 --method gptq",
    "export": "export runs/demo --to hf",
}
# Verb -> its module, where the names differ.
ELSEWHERE = {
    "distil": "train", "launch": "train", "calibrate": "validate", "generate": "serve", "bench": "serve",
    "explain": "tune", "rehearse": "plan", "export": "compress",
} | dict.fromkeys(("catalog", "formats", "runs", "doctor", "measure"), "listings")  # fmt: skip


def module_of(verb: str) -> ModuleType:
    return importlib.import_module(f"ironlaw.cli.{ELSEWHERE.get(verb, verb)}")


class Verbs(TyperGroup):
    def invoke(self, ctx: Any) -> Any:
        try:
            return super().invoke(ctx)
        except KeyboardInterrupt as stop:
            raise Interrupted(*stop.args) from None
        except BrokenPipeError:
            if has_reader(sys.stdout):  # else `main` handles it
                raise JobFailed("a process that this one was writing to has ended") from None
            raise


class Verb(TyperCommand):
    """A command that checks numbers and texts the same way for all verbs, in addition to the options' own bounds."""

    def invoke(self, ctx: Any) -> Any:
        for parameter in self.params:
            value = ctx.params.get(parameter.name)
            too_large = isinstance(value, int) and abs(value) > MAX_INTEGER
            if too_large or (isinstance(value, float) and not math.isfinite(value)):
                raise UserError(f"{parameter.opts[0]} {value}: give a finite number of at most {MAX_INTEGER:,}")
            if isinstance(value, str) and len(value) > MAX_TEXT and parameter.name != "prompt":
                raise UserError(f"{parameter.opts[0]} {shortened(value)}: give at most {MAX_TEXT:,} characters")
            if value == "" and parameter.default is None:
                raise UserError(f"{parameter.opts[0]} is empty: give a value or leave it out")
        return super().invoke(ctx)


def build_app(called: str | None) -> typer.Typer:
    """Build the command line with the verb `called` loaded; other verbs are present only for their help lines."""
    app = typer.Typer(cls=Verbs, no_args_is_help=True, pretty_exceptions_enable=False)

    @app.callback()
    def ironlaw(
        version: bool = typer.Option(False, "--version", help="Print the version and exit.", is_eager=True),
    ) -> None:
        """Where do the memory, the time and the money of a run go, and what should I change?

        Begin with `ironlaw plan llama3-8b --on 8xh100-sxm-80gb --tokens 160B` or
        `ironlaw train examples/gpt-tiny.toml`.
        """

    for panel, verb in ((panel, verb) for panel, verbs in PANELS.items() for verb in verbs):
        function: Callable[..., None] | typer.Typer = _not_loaded
        if verb == called:
            function = getattr(module_of(verb), verb)
        if isinstance(function, typer.Typer):
            for command in function.registered_commands:
                command.cls = Verb
            app.add_typer(function, name=verb, help=VERBS[verb], rich_help_panel=panel)
        else:
            example = f"Example: ironlaw {EXAMPLES[verb]}" if verb in EXAMPLES else None
            app.command(verb, help=VERBS[verb], epilog=example, cls=Verb, rich_help_panel=panel)(function)
    return app


def _not_loaded() -> None:
    raise AssertionError("only the verb that is called is loaded")


def main() -> None:
    arguments = sys.argv[1:]
    answered.clear()
    for name in ("stdout", "stderr"):
        if getattr(sys, name) is None:  # the parent process closed it
            setattr(sys, name, open(os.devnull, "w"))  # noqa: SIM115 until the end
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):  # for ASCII-only terminals and file names that are not UTF-8
            stream.reconfigure(errors="backslashreplace")
    if "_IRONLAW_COMPLETE" in os.environ:  # the shell asks for completions, with the words in its own variables
        words = os.environ.get("_TYPER_COMPLETE_ARGS") or os.environ.get("COMP_WORDS", "")
        arguments = words.split()[1:]
    pressed: list[int] = []  # a library that Ctrl-C finds in its import may swallow it, and fail for it later

    def interrupt(number: int, frame: Any) -> None:
        pressed.append(number)
        signal.default_int_handler(number, frame)

    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, interrupt)
    called = next((argument for argument in arguments if not argument.startswith("-")), None)
    try:
        if "--version" in arguments[:1]:
            code = print(__version__)
        else:
            code = build_app(called)(prog_name="ironlaw", standalone_mode=False)
        sys.stdout.flush()
    except (SystemExit, BrokenPipeError) as stop:
        if not isinstance(stop, BrokenPipeError) and not isinstance(stop.__context__, BrokenPipeError):
            if stop.code == WRONG_INPUT:
                leave_quietly()
            raise
        silence(sys.stdout)  # `ironlaw catalog | head`, for which rich and typer would exit with 1
        code = 0
    except (Exception, KeyboardInterrupt) as error:
        code = fail(Interrupted() if pressed else error, "--json" in arguments)
    finally:  # from here on, Ctrl-C would only print tracebacks of libraries that are being unloaded
        atexit.register(signal.signal, signal.SIGINT, signal.SIG_IGN)
    sys.exit(code or 0)


if __name__ == "__main__":
    main()
