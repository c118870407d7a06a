"""MkDocs hooks: reference pages written from the code, and the result files as pages of the site.

What can be read off the code is never written by hand: verbs from the typer app, keys, defaults and units from the
pydantic models and the comments beside them, documents from their dataclasses.
"""

from __future__ import annotations

import ast
import dataclasses
import inspect
import re
import sys
import textwrap
import typing
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "benchmarks" / "results"


def on_files(files: Files, config: MkDocsConfig) -> Files:
    sys.path.insert(0, str(ROOT / "src"))  # here: MkDocs puts the path back after it has loaded its hooks
    made = {"reference/cli.md": verbs(), "reference/config.md": keys(), "reference/documents.md": documents()}
    results = sorted(RESULTS.glob("*.md"))
    made["results/index.md"] = "# Result files\n\nEach is written again by the command it names.\n\n" + "".join(
        f"- [{path.read_text('utf-8').splitlines()[0].lstrip('# ')}]({path.name})\n" for path in results
    )
    made |= {f"results/{path.name}": path.read_text("utf-8") for path in results}
    for name, text in made.items():
        files.append(File.generated(config, name, content=text))
    return files


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Links from docs/ to the repository's results and files, as they work on a site; no columns that say nothing."""
    page.meta["hide"] = {"index.md": ["navigation", "toc"], "tutorial.md": ["navigation"]}.get(page.file.src_uri, [])
    up = "../" * page.file.src_uri.count("/")
    markdown = re.sub(r"\]\((?:\.\./)+benchmarks/results/([\w.-]+\.md)\)", rf"]({up}results/\1)", markdown)
    return re.sub(r"\[([^\]]+)\]\((?:\.\./)+(?!results/)[\w./-]*\.(?:py|toml|jsonl|txt|ipynb)\)", r"\1", markdown)


# Verbs, from the typer app.


def verbs() -> str:
    from ironlaw.cli.main import EXAMPLES, VERBS, module_of

    head = "Written from the command line itself: `ironlaw VERB --help` says the same. Every verb takes `--json`."
    parts = [f"# Verbs\n\n{head}\n"]
    for verb, about in VERBS.items():
        function = getattr(module_of(verb), verb)
        parts.append(f"## {verb}\n\n{about}\n")
        for command in getattr(function, "registered_commands", ()):
            name = command.name or command.callback.__name__
            parts.append(
                f"### {verb} {name}\n\n{inspect.getdoc(command.callback) or ''}\n\n{options(command.callback)}"
            )
        if callable(function) and not hasattr(function, "registered_commands"):
            parts.append(options(function))
        if verb in EXAMPLES:
            parts.append(f"Example: `ironlaw {EXAMPLES[verb]}`\n")
    return "\n".join(parts)


def options(function: Any) -> str:
    rows = []
    defaults = inspect.signature(function).parameters
    for name, hint in typing.get_type_hints(function, include_extras=True).items():
        if name == "return":
            continue
        kind, info = hint.__args__[0], hint.__metadata__[0]
        is_option = type(info).__name__ == "OptionInfo"
        words = (info.default, *(info.param_decls or ()))  # in Annotated the first name comes as the default
        given = ", ".join(word for word in words if isinstance(word, str)) or "--" + name.strip("_").replace("_", "-")
        default = defaults[name].default
        shown = "" if default in (None, False, inspect.Parameter.empty) else f"`{default}`"
        shown = info.show_default if isinstance(info.show_default, str) else shown
        what = given if is_option else info.metavar or name.upper()
        rows.append((f"`{what}`", info.help or "", shown, f"`{(is_option and info.metavar) or unless_given(kind)}`"))
    return table(("argument or option", "meaning", "default", "type"), rows)


# Config keys, from the models and the comments beside their fields.


def keys() -> str:
    from ironlaw.config import RunConfig
    from ironlaw.serve.config import ServeConfig

    text = "# Config keys\n\nA TOML file has these tables; `--set section.key=value` overrides any of them.\n"
    text += "Unknown keys are errors. Empty default: absent, and what that means is said.\n\n"
    for name, field in RunConfig.model_fields.items():
        model = model_of(field.annotation)
        text += (
            of_model(name, model)
            if model
            else f"## {name}\n\n`{unless_given(field.annotation)}`, {default_of(field)}\n\n"
        )
    return text + of_model("serve", ServeConfig)


def of_model(name: str, model: Any) -> str:
    notes = comments(model)
    rows, below = [], ""
    own = sorted(model.model_fields.items(), key=lambda item: item[0] not in model.__annotations__)  # inherited: last
    for key, field in own:
        inner = model_of(field.annotation)
        if inner is not None:
            below += of_model(f"{name}.{key}", inner)
        rows.append((f"`{name}.{key}`", notes.get(key, ""), default_of(field), f"`{unless_given(field.annotation)}`"))
    doc = " ".join((inspect.getdoc(model) or "").split())
    return f"## {name}\n\n{doc}\n\n" + table(("key", "meaning", "default", "type"), rows) + "\n" + below


def model_of(annotation: Any) -> Any:
    """The pydantic model in `X`, `X | None` or `tuple[X, ...]`."""
    from pydantic import BaseModel

    kinds = (annotation, *getattr(annotation, "__args__", ()))
    return next((kind for kind in kinds if isinstance(kind, type) and issubclass(kind, BaseModel)), None)


def spelt(annotation: Any) -> str:
    text = (
        annotation.__name__ if isinstance(annotation, type) and not hasattr(annotation, "__args__") else str(annotation)
    )
    text = re.sub(r"Literal\[(.*?)\]", r"\1", text)
    text = re.sub(r"typing\.|ironlaw(\.\w+)*\.|pathlib\.|collections\.abc\.|<class '|'>", "", text)
    return text.replace("NoneType", "None").replace(" | ", " or ")


def unless_given(annotation: Any) -> str:
    """Of what may be left out: an empty default says so."""
    return spelt(annotation).removesuffix(" or None")


def default_of(field: Any) -> str:
    if field.is_required():
        return "required"
    value = field.get_default(call_default_factory=True)
    is_table = hasattr(value, "model_fields") or (isinstance(value, tuple) and not value)
    return "" if value is None or is_table else f"`{value!r}`"


def comments(kind: type) -> dict[str, str]:
    """Field -> the comment on its line and those above it, which say what it means and in which unit."""
    found: dict[str, str] = {}
    for base in reversed(kind.__mro__):
        if base.__module__.startswith("ironlaw"):
            found |= dict(own_comments(base))
    return found


def own_comments(kind: type) -> Iterator[tuple[str, str]]:
    source = textwrap.dedent(inspect.getsource(kind))
    lines = source.splitlines()
    body = ast.parse(source).body[0]
    assert isinstance(body, ast.ClassDef)
    for node in body.body:
        if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
            above, line = [], node.lineno - 2
            while line >= 0 and lines[line].lstrip().startswith("#"):
                above.insert(0, lines[line].strip("# "))
                line -= 1
            end = lines[(node.end_lineno or node.lineno) - 1]
            beside = end[node.end_col_offset or 0 :].partition("#")[2].strip()
            yield node.target.id, " ".join(part for part in [*above, beside] if part and part != "fmt: skip")


# Documents, from their dataclasses.


def documents() -> str:
    from ironlaw import ledger
    from ironlaw.api import PlanResult

    text = "# Keys of documents\n\nWritten from the code. Every document has a `schema_version` too.\n\n"
    for kind, what in (
        (ledger.Ledger, "`ledger.json` and `plan.json` of a run; `ledger` in `plan --json`"),
        (ledger.Line, "an entry of `lines`: one operation of one phase, per step"),
        (ledger.MemoryLine, "an entry of `memory`: one component of the peak"),
        (ledger.Estimate, "a number with its interval and origin: every total"),
    ):
        text += f"## {kind.__name__}\n\n{what}\n\n" + table(("key", "meaning", "type"), list(entries(kind))) + "\n"
    names = [name for name, value in vars(PlanResult).items() if type(value).__name__ == "Total"]
    rows = [(f"`{name}`", vars(PlanResult)[name].__doc__) for name in names]
    return text + "## Totals of a plan\n\n" + table(("total", "meaning"), rows)


def entries(kind: type) -> Iterator[tuple[str, str, str]]:
    """As `to_json` writes them: the bounds of an estimate are one key."""
    notes = comments(kind)
    for field in dataclasses.fields(kind):
        key, type_ = ("interval", "[low, high]") if field.name == "low" else (field.name, unless_given(field.type))
        if field.name != "high":
            yield f"`{key}`", notes.get(field.name, ""), f"`{type_}`"


def table(heads: tuple[str, ...], rows: list[tuple[str, ...]]) -> str:
    def line(cells: tuple[str, ...]) -> str:
        cells = tuple(re.sub(r"(`[^`]*`)|\|", lambda found: found[1] or r"\|", cell) for cell in cells)  # code is whole
        return "| " + " | ".join(cell.replace("\n", " ") for cell in cells) + " |\n"

    return line(heads) + "|---" * len(heads) + "|\n" + "".join(line(row) for row in rows)
