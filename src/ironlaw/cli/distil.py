"""`ironlaw distil`"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from ironlaw.cli.train import train
from ironlaw.config import model_in, with_settings


def distil(
    config: Annotated[Path, typer.Argument(help="The student's config file.")],
    teacher: Annotated[Path, typer.Option(help="A run or a Hugging Face directory.")],
    set_: Annotated[list[str] | None, typer.Option("--set", metavar="KEY=VALUE", help="Override a config key.")] = None,
    out: Annotated[Path | None, typer.Option(help="Run directory; runs/MODEL-DATE unless given.")] = None,
    resume: Annotated[bool, typer.Option("--resume", help="Continue the run in --out, or start it.")] = False,
    dashboard: Annotated[bool, typer.Option("--dashboard", help="A page in the browser while it trains.")] = False,
    json: Annotated[bool, typer.Option("--json", help="Print one JSON document at the end.")] = False,
) -> None:
    """Short for `train` with `objective.kind = "distillation"`, and with the teacher's tokenizer and vocabulary."""
    vocab, folder = model_in(teacher, f"--teacher {teacher}").vocab, teacher.absolute()
    settings = {"objective.kind": "distillation", "objective.teacher": str(folder), "model.vocab": vocab}
    if (folder / "tokenizer.json").is_file():
        settings["data.tokenizer"] = str(folder / "tokenizer.json")
    train(config, [*with_settings(settings), *(set_ or [])], None, out, resume, dashboard, json)
