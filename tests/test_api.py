"""`ironlaw` from Python: the same answers as the command line, typed, and shown by a notebook."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import ironlaw
from ironlaw.api import ExplainResult, PlanResult, TrainResult
from ironlaw.config import build_config, format_overrides


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory, machine_profile: Any, corpus: Path) -> Iterator[TrainResult]:
    from ironlaw.machine.profile import save_profile

    with pytest.MonkeyPatch.context() as patch:
        folder = tmp_path_factory.mktemp("api")
        patch.setenv("XDG_CACHE_HOME", str(folder / "cache"))
        save_profile(machine_profile)
        tables = {
            "model": {"name": "tiny", "layers": 2, "hidden": 32, "heads": 2, "vocab": 300, "context": 16},
            "data": {"path": str(corpus), "cache": str(folder / "data")},
            "train": {"steps": 12, "global_batch": 4, "precision": "fp32", "profile_steps": 2},
            "evaluation": {"every": 6, "batches": 1},
        }
        settings = {"schedule.warmup_steps": 2, "optimizer.lr": 3e-3}
        yield ironlaw.train(tables, out=folder / "run", settings=settings, quiet=True)


def test_importing_takes_nothing_along() -> None:
    code = (
        "import sys, ironlaw; assert not {'torch', 'numpy', 'pydantic', 'rich'} & set(sys.modules)\n"
        "ironlaw.plan('llama3-8b', on='8xh100-sxm-80gb', steps=10)._repr_html_()\n"
        "assert not {'torch', 'tokenizers', 'transformers'} & set(sys.modules)\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_a_cluster_plan_is_the_commands(ironlaw_here: Callable[..., tuple[int, str, str]]) -> None:
    import json

    plan: PlanResult = ironlaw.plan("llama3-8b", on="8xh100-sxm-80gb", steps=10, sequence=4096, global_batch=64)
    asked = ("plan", "llama3-8b", "--on", "8xh100-sxm-80gb", "--steps", "10", "--seq", "4096", "--global-batch", "64")
    assert json.loads(ironlaw_here(*asked, "--json")[1]) == json.loads(json.dumps(plan.to_json()))
    assert plan.fits and plan.step_seconds is not None and plan.parameters is not None
    assert plan.parameters.value == 8_030_261_248 and plan.step_seconds.low < plan.step_seconds.value
    lines = ironlaw_here(*asked)[1].splitlines()
    assert str(plan) == "\n".join(line.rstrip() for line in lines).strip("\n")
    assert plan._repr_html_().startswith("<pre") and "Step time" in plan._repr_html_()


def test_a_served_model_is_planned() -> None:
    plan = ironlaw.plan("llama3-1b", on="h200", serve="input=512 output=64 concurrency=4", weights="fp8")
    assert plan.fits and plan.tpot_seconds is not None and plan.tpot_seconds.value < 0.1
    assert plan.step_seconds is not None and "weights fp8" in str(plan)
    with pytest.raises(ironlaw.UserError, match="on this machine is measured, not planned"):
        ironlaw.plan("llama3-1b", on="this", serve="input=512 output=64 concurrency=4")


def test_settings_change_every_form_of_config(
    tiny_document: Any, tiny_config: Any, tiny_file: Any, user_cache: Path
) -> None:
    for what in (tiny_document(), tiny_config(), tiny_file()):
        half = ironlaw.plan(what, settings={"train.global_batch": 4})
        whole = ironlaw.plan(what)
        assert half.flops_per_step is not None and whole.flops_per_step is not None
        assert 2 * half.flops_per_step.value == whole.flops_per_step.value
    with pytest.raises(ironlaw.UserError, match=r"train\.step.*train\.steps"):
        ironlaw.plan(tiny_document(), settings={"train.step": 4})


WRONG: dict[str, Any] = {
    "what": [None, 3, b"gpt2", ("a",), object()], "on": [3, "", []],
    "settings": ["x=1", 3, {3: 4}, {"train.steps": None}],
    "tokens": [5e9, [], ""], "steps": ["3", 0, -1, 1.5, True, 10**30], "sequence": [0, "3", 10**30],
    "global_batch": [-1, 0, 2.5, 10**30], "precision": [3], "layout": [{"dp": 8}], "network": [[]], "serve": [3, ""],
    "price_per_hour": ["x", -1, 0, float("nan"), float("inf")], "nonsense": [1],
}  # fmt: skip


@pytest.mark.parametrize(("name", "value"), [(name, value) for name, values in WRONG.items() for value in values])
def test_arguments_of_the_wrong_type_are_one_line(name: str, value: Any) -> None:
    given = {"what": "gpt2", "on": "8xh100-sxm-80gb", name: value}
    with pytest.raises(ironlaw.UserError) as error:
        ironlaw.plan(**given)
    assert "\n" not in str(error.value)
    with pytest.raises(ironlaw.UserError, match="plan: what: Missing required argument"):
        ironlaw.plan()  # type: ignore[call-arg]


def test_what_is_no_run_no_module_and_no_port_is_one_line(run: TrainResult, tmp_path: Path) -> None:
    module = torch.nn.Linear(4, 4)
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    observe: Any = ironlaw.observe
    anything: Any = module
    for call in (
        lambda: ironlaw.train(anything), lambda: ironlaw.explain(anything), lambda: ironlaw.serve(anything),
        lambda: ironlaw.train({}, out=anything), lambda: ironlaw.explain(run, anything),
        lambda: ironlaw.serve(run, port=99_999), lambda: observe(optimizer, module), lambda: observe(None, optimizer),
        lambda: observe([module, 3], optimizer), lambda: observe(module, [optimizer, "x"]), lambda: observe("x", "y"),
        lambda: observe(module, optimizer, 3), lambda: observe(module, optimizer, tmp_path, profile_steps=1.5),
    ):  # fmt: skip
        with pytest.raises(ironlaw.UserError) as error:
            call()
        assert "\n" not in str(error.value)


def test_settings_take_any_text_and_paths() -> None:
    model = {"layers": 2, "hidden": 32, "heads": 2, "vocab": 300, "context": 16}
    settings: dict[str, Any] = {"model.name": "é😀", "data.path": Path("a b"), "train.clip": float("inf")}
    settings |= {"model.bias": False, "model.moe": {"experts": 4, "experts_per_token": 2, "capacity_factor": 1.5}}
    found = build_config({"model": model}, overrides=format_overrides(settings))
    assert (found.model.name, found.data.path, found.train.clip) == ("é😀", "a b", float("inf"))
    assert found.model.moe is not None and found.model.moe.capacity_factor == 1.5


def test_a_run(run: TrainResult) -> None:
    assert (run.steps, run.interrupted) == (12, None) and run.path.is_dir()
    assert [table["step"] for table in run.metrics if "loss" in table] == list(range(1, 13))
    assert run.validation_loss is not None and 3 < run.validation_loss.value < 6
    assert "12 of 12 steps, done" in str(run) and "validation loss" in run._repr_html_()
    assert isinstance(ironlaw.train, type(sys)) and "train" in repr(ironlaw.train)


def test_a_load_is_not_compared(run: TrainResult, tmp_path: Path) -> None:
    for name in ("ledger.json", "steps.jsonl"):
        (tmp_path / name).touch()
    for pair in ((run, tmp_path), (tmp_path, run)):
        with pytest.raises(ironlaw.UserError, match=f"{tmp_path} is a load of a server"):
            ironlaw.explain(*pair)


def test_a_run_explained(run: TrainResult, tmp_path: Path) -> None:
    found: ExplainResult = ironlaw.explain(run)
    assert found.document["run"] == str(run.path) and found.bottleneck in " ".join(str(found).split())
    assert all(remedy["title"] for remedy in found.remedies)
    assert "Plan beside run" in found._repr_html_()
    assert found.write_html(tmp_path / "report.html").stat().st_size > 1000
    with pytest.raises(ironlaw.UserError, match="path = 3"):
        found.write_html(3)  # type: ignore[arg-type]
    same = ironlaw.explain(run, run)
    assert same.document["change"] == 0 and "No difference" in same.bottleneck and same.remedies == []
    with pytest.raises(ironlaw.UserError, match="only one training run"):
        same.write_html(tmp_path / "two.html")


def test_a_loop_observed(tmp_path: Path, user_cache: Path) -> None:
    model = torch.nn.Linear(8, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with ironlaw.observe(model, optimizer, out=tmp_path / "run", profile_steps=0) as watch:
        for _ in range(6):
            model(torch.randn(4, 8)).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
    assert "6 steps" in watch._repr_html_()
    assert ironlaw.explain(watch).document["run"] == str(tmp_path / "run")


def test_a_run_served(run: TrainResult) -> None:
    pytest.importorskip("uvicorn")
    with ironlaw.serve(run, settings={"serve.batch": 2}) as server:
        assert server.url in server._repr_html_()
        text = server.complete("def ", max_tokens=5, temperature=0)
        assert text and text == server.complete("def ", max_tokens=5, temperature=0)
        with pytest.raises(ironlaw.UserError, match="prompt"):
            server.complete("def " * 40)
        for wrong in ({"max_tokens": "x"}, {"temperature": float("nan")}, {"stop": {1, 2}}):
            with pytest.raises(ironlaw.UserError, match="complete"):
                server.complete("def ", **wrong)  # type: ignore[arg-type]
    assert "closed" in str(server)
    with pytest.raises(ironlaw.UserError, match="is closed"):
        server.complete("def ")
