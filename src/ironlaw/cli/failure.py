"""Errors of a verb as one line and an exit code. No other module turns exceptions into messages for users."""

from __future__ import annotations

import json
import os
import re
import signal
import sys
import time
import traceback
from pathlib import Path

import typer

from ironlaw.errors import JobFailed, UserError, printable
from ironlaw.files import FULL, cache_folder
from ironlaw.report.console import Unfailing, answered

FAILED, WRONG_INPUT, INTERRUPTED = 1, 2, 130
FAULT = 70  # a bug in Ironlaw; EX_SOFTWARE of sysexits.h
_USAGE: type[Exception] = typer.BadParameter.__mro__[1]
_CLICK: type[Exception] = typer.BadParameter.__mro__[2]  # of click, which typer may bundle
RANK_0_WAIT_SECONDS = 20.0  # after which a refusing rank reports the error itself


class Interrupted(Exception):
    """Ctrl-C or another signal, given by its number, within a verb: typer alone would exit without a message."""


def described(error: BaseException) -> tuple[int, str]:
    """Return exit code and message for an exception of a verb."""
    if isinstance(error, UserError):
        return WRONG_INPUT, str(error)
    if isinstance(error, JobFailed):
        return FAILED, str(error)
    if isinstance(error, _CLICK):
        context = getattr(error, "ctx", None)
        see = f"; see {context.command_path} --help" if isinstance(error, _USAGE) and context is not None else ""
        wrong = error.format_message().strip().rstrip(".")  # type: ignore[attr-defined]
        return WRONG_INPUT, f"{wrong}{see}" if wrong else ""
    if isinstance(error, KeyboardInterrupt | Interrupted | typer.Abort):
        by = signal.Signals[error.args[0]] if error.args else signal.SIGINT
        return 128 + by, "interrupted"
    if isinstance(error, MemoryError):
        return WRONG_INPUT, "out of memory: give something smaller, or a machine with more"
    number = _errno(error)
    name = str(error.filename) if isinstance(error, OSError) and error.filename is not None else None
    if number in FULL:
        where = f" ({name})" if name else ""
        return WRONG_INPUT, f"the disk is full{where}: free some space; a run goes on with --resume"
    if number is not None:
        return WRONG_INPUT, f"{name or 'cannot read or write'}: {os.strerror(number)}"
    return FAULT, _fault(error)


def _errno(error: BaseException) -> int | None:
    """Return the system's error number, if there is one. Rust libraries put it in the text of their own exceptions."""
    if isinstance(error, OSError) and error.errno is not None:
        return error.errno
    found = re.search(r"\(os error (\d+)\)", str(error))
    return int(found[1]) if found else None


def _fault(error: BaseException) -> str:
    """Return a bug's type and place in one line, and write its traceback to a file for the report."""
    frames = traceback.extract_tb(error.__traceback__)
    where = f" at {Path(frames[-1].filename).name}:{frames[-1].lineno}" if frames else ""
    message = f"a fault of Ironlaw itself: {type(error).__name__}: {error}{where}"
    try:
        path = cache_folder() / "fault.txt"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("".join(traceback.format_exception(error)), encoding="utf-8", errors="backslashreplace")
    except (OSError, UserError):
        return message
    return f"{message}; please report it with {path}"


def fail(error: BaseException, as_json: bool) -> int:
    """Report an error once and return the exit code. With --json, the document on stdout describes the error."""
    code, message = described(error)
    if not message:  # without a verb, typer has printed the help
        return code
    message = " ".join(printable(message).split())
    if code != INTERRUPTED and _is_another_rank():
        _leave_it_to_the_first()
    document = {"schema_version": 1, "error": message, "exit_code": code}
    if as_json and not answered:
        print(json.dumps(document, indent=1), file=Unfailing(sys.stdout), flush=True)
    print(json.dumps(document) if as_json else f"ironlaw: {message}", file=Unfailing(sys.stderr), flush=True)
    if code == WRONG_INPUT:
        _end_torchrun()
    return code


def _is_another_rank() -> bool:
    return os.environ.get("LOCAL_RANK", "0") != "0"


def leave_quietly() -> None:
    """End a rank whose error message another rank prints."""
    if _is_another_rank():
        _leave_it_to_the_first()
    _end_torchrun()


def _leave_it_to_the_first() -> None:
    """Wait until the node's first rank has reported the error that all ranks share. Returns only if it does not."""
    started = time.monotonic()
    while time.monotonic() - started < RANK_0_WAIT_SECONDS:
        if "TORCHELASTIC_RUN_ID" in os.environ and _torchrun() is None:  # the first rank has ended torchrun
            os._exit(WRONG_INPUT)
        time.sleep(0.05)


def _torchrun() -> int | None:
    """Return the process id of the torchrun that started this rank; None if there is none (any more)."""
    parent = os.getppid()
    try:
        words = Path(f"/proc/{parent}/cmdline").read_bytes().split(b"\0")
    except OSError:
        return None
    return parent if any(b"torchrun" in word or b"torch.distributed" in word for word in words) else None


def _end_torchrun() -> None:
    """End the torchrun that started this rank, without output.

    It would restart a job that is refused each time, as often as it may, and print its own stack and a table of ranks
    after each refusal. On SIGTERM it prints 36 lines (measured). It does not handle SIGUSR1, so that the system ends
    it, unless it was started with that signal in `--signals-to-handle`.
    """
    agent = _torchrun() if "TORCHELASTIC_RUN_ID" in os.environ else None
    if agent is not None:
        os.kill(agent, signal.SIGUSR1)
