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
        "plan": "Parameters, FLOPs, memory, time and energy of a run before it starts; fits or not.",
        "measure": "Find this machine's real ceilings: matmul, memory, attention, storage, tokenizer.",
        "catalog": "List and show accelerators, nodes, models, grids and prices, with their sources.",
        "formats": "Number formats: bits, range, spacing, scales, bytes of a model, what multiplies them.",
        "validate": "The planner's record on measured runs, yours or anybody's.",
        "calibrate": "Fit the planner's constants to a handful of your own runs.",
        "rehearse": "A cluster layout's ranks, schedule and collectives with tiny shapes, here, against its plan.",
    },
    "Train": {
        "data": "Your own text: tokenise it once, look at it, check it, hand it on.",
        "train": "Train a config into a run directory, beside its plan.",
        "distil": "Train a config on what a larger model says: its probabilities, and its hidden states.",
        "launch": "Write, and submit, the job of a run on a cluster: slurm, kubernetes, ssh.",
        "runs": "List the runs of a folder with their key figures; compare two with `explain A B`.",
    },
    "Explain": {
        "explain": "Put a run beside its plan: where time and memory went, and what to change.",
        "tune": "Measure, change what is planned to pay, measure again, until nothing pays.",
    },
    "Serve and hand on": {
        "serve": "Serve a run or a Hugging Face directory: an OpenAI-compatible server.",
        "bench": "Load any OpenAI-compatible server: times to first token and per token, throughput, goodput.",
        "generate": "Continue a prompt with a trained run.",
        "compress": "A run or a Hugging Face model in fewer bits or weights: bytes, speed, loss before and after.",
        "export": "Write a run's model as Hugging Face safetensors, or as GGUF for llama.cpp.",
    },
    "This installation": {
        "doctor": "Versions, devices, what is measured, optional parts and what each missing one would give.",
    },
}
VERBS = {verb: about for panel in PANELS.values() for verb, about in panel.items()}
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
            app.command(verb, help=VERBS[verb], cls=Verb, rich_help_panel=panel)(function)
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
