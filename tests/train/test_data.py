"""The trainer on every kind of data: each resumes exactly, also with other workers, and says how its text came."""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from ironlaw.config import RunConfig, build_config
from ironlaw.data import tokenizer as tokenizers
from ironlaw.errors import UserError
from ironlaw.train.result import Outcome

Config = Callable[..., RunConfig]
Train = Callable[..., Outcome]
Losses = Callable[[Path], dict[int, float]]


@pytest.fixture
def kinds(tmp_path: Path, corpus: Path) -> dict[str, dict[str, Any]]:
    chance = random.Random(0)
    lines = [json.dumps({"body": " ".join(f"w{chance.randrange(40)}" for _ in range(1 + i % 40))}) for i in range(400)]
    (tmp_path / "records.jsonl").write_text("\n".join(lines))
    records = {"path": str(tmp_path / "records.jsonl"), "field": "body"}
    return {
        "best_fit": records | {"packing": "best_fit"},
        "mixture": {"sources": [records | {"weight": 2.0}, {"path": str(corpus)}]},
        "stream": records | {"streaming": True},
        "mock": {"mock": True},
    }


def test_conversations_that_are_cut_are_told(tiny_config: Config, train: Train, losses: Losses, tmp_path: Path) -> None:
    tokenizer = tokenizers.train(["what is it"] * 9, 280, tmp_path / "tokenizer.json")
    (tmp_path / "plain.jinja").write_text("{% for m in messages %}{{ m.content }}{{ eos_token }}{% endfor %}")
    talks = [[("user", "what " * (i % 9)), ("assistant", f"it is {i}")] for i in range(40)]
    lines = [{"messages": [{"role": role, "content": text} for role, text in talk]} for talk in talks]
    (tmp_path / "talks.jsonl").write_text("\n".join(map(json.dumps, lines)))
    data = {"path": str(tmp_path / "talks.jsonl"), "format": "chat", "tokenizer": str(tokenizer.path)}
    said: list[str] = []
    for sequence in (16, 64):
        config = tiny_config(
            {"context": sequence}, data=data | {"chat_template": str(tmp_path / "plain.jinja")},
            train={"steps": 2, "global_batch": 2},
        )  # fmt: skip
        train(config, tmp_path / f"run{sequence}", say=said.append)
    (line,) = [line for line in said if "conversations" in line]
    assert "are longer than a sequence and are cut" in line


@pytest.mark.parametrize("kind", ["best_fit", "mixture", "stream", "mock"])
def test_each_kind_trains_and_resumes_exactly(
    tiny_document: Callable[..., dict[str, Any]], train: Train, train_until: Any, losses: Losses, tmp_path: Path,
    kinds: dict[str, dict[str, Any]], kind: str,
) -> None:  # fmt: skip
    def config(**more: Any) -> RunConfig:
        document = tiny_document()
        cache = {"cache": str(tmp_path / "data-cache"), "validation_fraction": 0.1}
        return build_config(document | {"data": cache | kinds[kind] | more})

    outcome = train(config(), tmp_path / "whole")
    train_until(6, config(), tmp_path / "run")
    other = {"prefetch": 1} | ({"loader_processes": 1} if kind != "stream" else {"workers": 1})
    train(config(**other), tmp_path / "run", resume=True)
    assert losses(tmp_path / "run") == losses(tmp_path / "whole")
    facts = outcome.ledger.facts["data"]
    assert facts["packing"] == ("best_fit" if kind == "best_fit" else "concat")
    assert facts["document_mask"] == (kind == "best_fit")
    assert 0 <= facts["padded_fraction"] < 0.2
    stages = facts["stage_tokens_per_second"]
    assert facts["slowest_stage"] == min(stages, key=lambda stage: stages[stage])
    assert ("tokenise" in stages) == (kind == "stream")
    assert facts["tokens_per_second"] > 0


@pytest.mark.parametrize("kind", ["best_fit", "stream"])
def test_weights_are_read_with_no_tokenizer_but_theirs(
    tiny_document: Callable[..., dict[str, Any]], train: Train, ironlaw_here: Callable[..., Any], tmp_path: Path,
    kinds: dict[str, dict[str, Any]], kind: str,
) -> None:  # fmt: skip
    """A tokenizer is learned from the text: another text gives another one, and with a given one other samples."""

    def config(**more: Any) -> RunConfig:
        return build_config(tiny_document(train={"steps": 3}) | {"data": data | kinds[kind]} | more)

    data = {"cache": str(tmp_path / "data-cache"), "validation_fraction": 0.1}
    train(config(), tmp_path / "run")
    data["tokenizer"] = str(tmp_path / "run/tokenizer.json")
    train(config(), tmp_path / "given")
    del data["tokenizer"]
    before = {path: path.read_bytes() for path in (tmp_path / "run").rglob("*") if path.is_file()}
    with (tmp_path / "records.jsonl").open("a", encoding="utf-8") as file:
        file.write("".join(f'\n{{"body": "no word of before {n}"}}' for n in range(400)))
    for more in ({"resume": True}, {}):
        taught: dict[str, Any] = {"kind": "distillation", "teacher": str(tmp_path / "run")}
        out = tmp_path / ("run" if more else "student")
        with pytest.raises(UserError, match=r"no longer that of .*run" if more else "a student has"):
            train(config() if more else config(objective=taught), out, **more)
    data["tokenizer"] = str(tmp_path / "run/tokenizer.json")
    with pytest.raises(UserError, match=r"no longer that of .*given"):
        train(config(), tmp_path / "given", resume=True)
    code, _, messages = ironlaw_here("compress", "run", "--to", "int8")
    assert code == 2 and "no longer that of" in messages.splitlines()[-1]
    assert {path: path.read_bytes() for path in (tmp_path / "run").rglob("*") if path.is_file()} == before
