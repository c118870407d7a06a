"""Files of a run whose values are of another type than written: a line that names the value, no fault of ours."""

from __future__ import annotations

import copy
import json
import re
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from synthetic import make_profile
from torch import nn

import ironlaw
from ironlaw import explain
from ironlaw.errors import UserError
from ironlaw.explain.observed import explain_observed
from ironlaw.ledger_types import _facts
from ironlaw.machine import host
from ironlaw.machine.profile import Profile
from ironlaw.report.page import render
from ironlaw.report.run_view import run_view

OTHERS: dict[str, Any] = {"text": "x", "number": 7, "list": [1], "object": {"a": 1}, "nothing": None, "switch": True}
KINDS = {str: "text", int: "number", float: "number", list: "list", dict: "object", type(None): "nothing",
         bool: "switch"}  # fmt: skip


@pytest.fixture(scope="module")
def observed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run with everything in it: recorded steps, a plan, unfused updates."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(33, 64), nn.GELU(), nn.Linear(64, 33))
    optimizer = torch.optim.AdamW(model.parameters())
    out = tmp_path_factory.mktemp("damaged") / "run"
    with ironlaw.observe(model, optimizer, out=out, profile_steps=2) as watch:
        for _ in range(14):
            loss = model(torch.randn(16, 33)).square().mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            watch.log(loss=loss.detach())
    explain_observed(out, profile_here())  # writes the plan
    return out


def profile_here() -> Profile:
    return replace(make_profile(), name=host.cpu_name(), threads=torch.get_num_threads())


def places(value: Any, at: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """Of every value; of lists the first item stands for all."""
    if at:
        yield at
    items = value.items() if isinstance(value, dict) else enumerate(value[:1]) if isinstance(value, list) else ()
    for key, item in items:
        yield from places(item, (*at, key))


def changed(document: dict[str, Any], place: tuple[Any, ...], value: Any) -> dict[str, Any]:
    document = copy.deepcopy(document)
    holder: Any = document
    for key in place[:-1]:
        holder = holder[key]
    holder[place[-1]] = value
    return document


def value_at(document: Any, place: tuple[Any, ...]) -> Any:
    for key in place:
        document = document[key]
    return document


def try_all(run: Path, name: str, every: int) -> int:
    """Every so many of all wrong values, one after the other; how many were refused. Anything but a UserError fails."""
    file = run / name
    text = file.read_text()
    document, refused = json.loads(text), 0
    wrong = [(place, kind) for place in places(document) for kind in OTHERS
             if kind != KINDS[type(value_at(document, place))]]  # fmt: skip
    try:
        for place, kind in wrong[::every]:
            file.write_text(json.dumps(changed(document, place, OTHERS[kind])))
            try:
                found = explain_observed(run, profile_here())
                render(run_view(found.to_json(), found.metrics, found.config_text))
            except UserError as error:
                refused += 1
                assert "\n" not in str(error)
            except Exception as error:
                raise AssertionError(f"{name}: {place} as {kind}") from error
    finally:
        file.write_text(text)
    return refused


@pytest.mark.parametrize("name", ["ledger.json", "plan.json"])
@pytest.mark.parametrize("every", [pytest.param(29, id="some"), pytest.param(1, id="all", marks=pytest.mark.long)])
def test_a_value_of_another_type_is_refused_or_does_no_harm(observed: Path, name: str, every: int) -> None:
    assert try_all(observed, name, every) > 5


@pytest.mark.parametrize("place", [("wall_seconds", "training"), ("data", "wait_seconds"), ("data_supply", "basis")])
def test_the_message_names_the_value(observed: Path, place: tuple[str, str]) -> None:
    file = observed / "ledger.json"
    text = file.read_text()
    document = json.loads(text)
    document["facts"].setdefault(place[0], {})[place[1]] = ["soon"]
    file.write_text(json.dumps(document))
    try:
        with pytest.raises(UserError, match=rf"facts\.{place[0]}"):
            explain_observed(observed, profile_here())
    finally:
        file.write_text(text)


@pytest.mark.parametrize("value", ["x", [1], {"a": 1}, True])
@pytest.mark.parametrize("name", ["seconds", "forward_seconds", "loss"])
def test_metrics_hold_numbers(observed: Path, name: str, value: Any) -> None:
    file = observed / "metrics.jsonl"
    text = file.read_text()
    rows = [json.loads(line) for line in text.splitlines()]
    rows[3][name] = value
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    try:
        with pytest.raises(UserError, match=f"step 4 of .*: {name} holds"):
            explain_observed(observed, profile_here())
    finally:
        file.write_text(text)


def test_every_fact_that_an_explanation_reads_has_a_type() -> None:
    """But those that are never stored: made from a trace when a run is explained."""
    made = {"product_shapes", "score_products", "unfused_attention"}
    sources = [path.read_text() for path in Path(explain.__file__).parent.glob("*.py")]
    read = {name for source in sources for name in re.findall(r'\.fact\(\s*"(\w+)"', source)}
    assert len(read) > 40 and read - {*_facts()} == made
