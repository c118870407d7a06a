"""What pages name is there: verbs and options, files, config keys, identifiers. And their lists are lists."""

from __future__ import annotations

import re
import tomllib
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from .test_surface import keys

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / name for name in ("README.md", "CONTRIBUTING.md", "SECURITY.md")] + sorted(
    (ROOT / "docs").rglob("*.md")
)
UNDER = [
    ROOT / folder for folder in ("", "src/ironlaw", "src/ironlaw/catalog", "src/ironlaw/plan", "docs", "benchmarks")
]
FILE = re.compile(r"(?:[\w.-]+/)+[\w.-]*(?:\.(?:py|toml|md|c|h|sh|csv|txt|ipynb)|/)")
# Of PyTorch, CUDA and NeMo; names that a page gives to something of the reader's.
ELSEWHERE = {
    "linear_cross_entropy", "CUDA_LAUNCH_BLOCKING", "tp_recompute_allgather", "scripts/scaling_benchmarks.py",
    "scaling_benchmarks", "section.key", "serve.key",
}  # fmt: skip


@cache
def words() -> frozenset[str]:
    """Of all code and tests."""
    files = (file for room in ("src", "tests", "benchmarks", "scripts") for file in (ROOT / room).rglob("*.*"))
    kinds = (".py", ".toml", ".c", ".h", ".sh", ".j2")
    files = (file for file in files if file.suffix in kinds and file != Path(__file__))
    return frozenset(word for file in files for word in re.findall(r"\w+", f"{file.stem} {file.read_text('utf-8')}"))


@cache
def config_keys() -> frozenset[str]:
    from ironlaw.config import RunConfig
    from ironlaw.serve.config import ServeConfig

    return frozenset([*keys("", RunConfig), *keys("serve.", ServeConfig)])


@cache
def options_of(verb: str) -> frozenset[str]:
    """The names of a verb's options, and of the verbs' that it has of its own (`data`)."""
    import typer

    from ironlaw.cli.main import build_app

    app: Any = typer.main.get_command(build_app(verb))
    found = app.commands[verb]
    commands = [found, *getattr(found, "commands", {}).values()]
    return frozenset(name for one in commands for parameter in one.params
                     for name in (*parameter.opts, *parameter.secondary_opts))  # fmt: skip


def unknown(name: str, page: Path) -> list[str]:
    """What of a name in backticks is not there."""
    wrong: list[str] = []
    if name.startswith("ironlaw ") and " " in name:
        from ironlaw.cli.main import VERBS

        verb = name.split()[1]
        if verb in VERBS:
            wrong += [o for o in re.findall(r"(?<=[ \[])--[a-z][a-z-]*", name) if o not in options_of(verb)]
        elif verb != "VERB" and not verb.startswith("-"):
            wrong.append(verb)
    wrong += set(re.findall(r"--set ([a-z_]+\.[a-z_.]+)=", name)) - config_keys()
    key = re.fullmatch(r"([a-z]+)\.[a-z_.0-9]+(?: ?= ?.*)?", name)
    if key and key[1] in {known.split(".")[0] for known in config_keys()}:
        is_file = re.search(r"\.(py|bin|toml)$", name)
        wrong += [name] if not is_file and re.split(" ?=", name)[0] not in config_keys() else []
    if FILE.fullmatch(name) and "NAME" not in name and name.split("/")[0] not in ("runs", "http:", "tmp"):
        wrong += [] if any((folder / name).exists() for folder in [*UNDER, page.parent]) else [name]
    wrong += [word for word in re.findall(r"\b[a-zA-Z]\w*_\w+\b", name) if word not in words()]
    return [word for word in wrong if word not in ELSEWHERE]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_what_a_page_names_is_there(page: Path) -> None:
    text = re.sub(r"^ *```.*?^ *```", "", page.read_text("utf-8"), flags=re.S | re.M)
    names = set(re.findall(r"`([^`\n]+)`", text))
    wrong = {name: absent for name in names if (absent := unknown(name, page))}
    assert not wrong, f"{page.name} names what is not there (renamed, or removed?): {wrong}"
    # GitHub begins a list right below a paragraph, the site does not.
    joined = re.findall(r"^(?![-*#|> ]|\d+\. )\S.*\n(?:[-*]|\d+\.) .*", text, flags=re.M)
    assert not joined, f"{page.name}: an empty line is missing above the list {joined}"


def test_every_rule_of_diagnosis_is_on_its_page() -> None:
    """With its axis, and its threshold where that is a share of time."""
    rules = tomllib.loads((ROOT / "src" / "ironlaw" / "explain" / "rules.toml").read_text("utf-8"))
    rows = re.findall(r"^\| (`.*`) \| (\w+) \| ([^|]+) \|", (ROOT / "docs" / "explain.md").read_text("utf-8"), re.M)
    listed = {name: (axis, begins) for names, axis, begins in rows for name in re.findall(r"`(\w+)`", names)}
    assert listed.keys() == rules.keys()
    for name, (axis, begins) in listed.items():
        share = re.match(r"(\d+)%", begins)
        assert axis == rules[name].get("axis", "algorithm"), name
        assert share is None or int(share[1]) == round(100 * rules[name].get("threshold", 0.5)), name
