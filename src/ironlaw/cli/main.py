"""The `ironlaw` command. Only the verb that is called is imported, so that `plan` never waits for PyTorch.

Exit codes: 0 done, 1 the answer is no, 2 wrong input, 130 interrupted.
"""

from __future__ import annotations

import errno
import importlib
import os
import sys
from collections.abc import Callable
from typing import Any

import typer
from typer.core import TyperGroup

from ironlaw import __version__
from ironlaw.errors import UserError

# verb -> one line of help; each verb is the function `ironlaw.cli.<verb>.<verb>`, or a group of verbs of that name.
VERBS = {
    "measure": "Find this machine's real ceilings: matmul, memory, attention, storage, tokenizer.",
    "plan": "Parameters, FLOPs, memory, time and energy of a run before it starts; fits or not.",
    "validate": "The planner's record on measured runs, yours or anybody's.",
    "calibrate": "Fit the planner's constants to a handful of your own runs.",
    "data": "Your own text: tokenise it once, look at it, check it, hand it on.",
    "train": "Train a config into a run directory, beside its plan.",
    "rehearse": "A cluster layout's ranks, schedule and collectives with tiny shapes, here, against its plan.",
    "launch": "Write, and submit, the job of a run on a cluster: slurm, kubernetes, ssh.",
    "explain": "Put a run beside its plan: where time and memory went, and what to change.",
    "tune": "Measure, change what is planned to pay, measure again, until nothing pays.",
    "export": "Write a run's model as Hugging Face safetensors.",
    "runs": "List the runs of a folder with their key figures; compare two with `explain A B`.",
    "serve": "Serve a run or a Hugging Face directory: an OpenAI-compatible server.",
    "bench": "Load any OpenAI-compatible server: times to first token and per token, throughput, goodput.",
    "generate": "Continue a prompt with a trained run.",
    "formats": "Number formats: bits, range, spacing, scales, bytes of a model, what multiplies them.",
    "catalog": "List and show accelerators, nodes, models, grids and prices, with their sources.",
}


class Interrupted(Exception):
    """Ctrl-C within a verb: typer would end the process without a word."""


class Verbs(TyperGroup):
    def invoke(self, ctx: Any) -> Any:
        try:
            return super().invoke(ctx)
        except KeyboardInterrupt:
            raise Interrupted from None


def build_app(called: str | None) -> typer.Typer:
    """The command line with the verb `called` loaded; the other verbs are there for their help lines only."""
    app = typer.Typer(cls=Verbs, add_completion=False, no_args_is_help=True, pretty_exceptions_enable=False)

    @app.callback()
    def ironlaw(
        version: bool = typer.Option(False, "--version", help="Print the version and exit.", is_eager=True),
    ) -> None:
        """Where do the memory, the time and the money of a training run go, and what should I change?"""

    for verb, help_line in VERBS.items():
        function: Callable[..., None] | typer.Typer = _not_loaded
        if verb == called:
            function = getattr(importlib.import_module(f"ironlaw.cli.{verb}"), verb)
        if isinstance(function, typer.Typer):
            app.add_typer(function, name=verb, help=help_line)
        else:
            app.command(verb, help=help_line)(function)
    return app


def _not_loaded() -> None:
    raise AssertionError("only the verb that is called is loaded")


def main() -> None:
    arguments = sys.argv[1:]
    if "--version" in arguments[:1]:
        print(__version__)
        return
    called = next((argument for argument in arguments if not argument.startswith("-")), None)
    try:
        build_app(called)(prog_name="ironlaw", standalone_mode=True)
    except UserError as error:
        print(f"ironlaw: {error}", file=sys.stderr)
        sys.exit(2)
    except (KeyboardInterrupt, Interrupted):
        print("ironlaw: interrupted", file=sys.stderr)
        sys.exit(130)
    except BrokenPipeError:  # `ironlaw catalog | head`
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(0)
    except OSError as error:
        if error.errno not in (errno.ENOSPC, errno.EDQUOT):
            raise
        where = f" ({error.filename})" if error.filename else ""
        print(f"ironlaw: the disk is full{where}: free some space; a run goes on with --resume", file=sys.stderr)
        sys.exit(2)


if __name__ == "__main__":
    main()
