"""What the README and the site quote of commands, written anew: `python scripts/quotes.py`.

A quoted line is replaced by the line of today's output that begins alike. Commands whose output is the same everywhere
are run; those of one machine are read from benchmarks/results/demo.txt (`make record`). What begins like nothing that
is printed is named, to be mended by hand. tests/docs/test_commands.py checks the same quotes.
"""

from __future__ import annotations

import difflib
import functools
import os
import re
import shlex
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[1]
DOCS = ROOT / "docs"
PAGES = [ROOT / "README.md", DOCS / "index.md", *sorted(set(DOCS.rglob("*.md")) - {DOCS / "index.md"})]


def blocks(language: str) -> Iterator[tuple[Path, str]]:
    """(page, text) of every fenced block in a language."""
    for page in PAGES:
        for found in re.findall(rf"^ *```{language}\n(.*?)^ *```", page.read_text("utf-8"), re.S | re.M):
            yield page, found


def quoted() -> list[tuple[Path, str, tuple[str, ...]]]:
    """(page, command, the lines of its output that are quoted)."""
    return [
        (page, shown.split("\n", 1)[0], tuple(line.rstrip() for line in shown.split("\n")[1:] if line.strip()))
        for page, text in blocks("console")
        for shown in text.split("$ ")[1:]
    ]


def is_everywhere_the_same(command: str) -> bool:
    words = command.split()
    return words[1] in ("catalog", "formats") or (words[1] == "plan" and bool({"--on", "--within"} & {*words}))


def recorded(command: str) -> str:
    text = (ROOT / "benchmarks" / "results" / "demo.txt").read_text("utf-8")
    return text.partition(f"$ {command}\n")[2].partition("\n$ ")[0]


@functools.cache
def printed(command: str) -> str:
    if not is_everywhere_the_same(command):
        return recorded(command)
    words = [sys.executable, "-m", "ironlaw", *shlex.split(command)[1:]]
    with tempfile.TemporaryDirectory() as elsewhere:
        env = os.environ | {"PYTHONPATH": str(ROOT / "src")}
        return subprocess.run(words, cwd=elsewhere, env=env, capture_output=True, text=True).stdout


def missing(lines: tuple[str, ...], output: str) -> list[str]:
    """Those that do not follow each other in the output; spaces count as one."""
    shown = [" ".join(line.split()) for line in output.splitlines()]
    absent, at = [], 0
    for line in lines:
        wanted = " ".join(line.split())
        if wanted in shown[at:]:
            at = shown.index(wanted, at) + 1
        else:
            absent.append(line)
    return absent


def beginning(line: str) -> str:
    """The words before its first figure, or else its first word."""
    return re.split(r" {2,}|[\d~+−]|: ", line.strip())[0].strip() or line.split()[0]


def main() -> None:
    for page, command, lines in quoted():
        text, output = page.read_text("utf-8"), printed(command)
        for line in missing(lines, output):
            alike = [found.rstrip() for found in output.splitlines() if found.strip()]
            alike = [found for found in alike if beginning(found) == beginning(line)]
            if alike:
                closest = max(alike, key=lambda found: difflib.SequenceMatcher(None, line, found).ratio())
                text = text.replace(f"\n{line}\n", f"\n{closest}\n")
            else:
                print(f"{page.relative_to(ROOT)}: `{command}` prints nothing like: {line}")
        page.write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
