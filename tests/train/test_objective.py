"""What a run minimises: published formulas by hand, a second model that nothing changes, runs that go on to the bit."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from ironlaw.config import RunConfig, build_config
from ironlaw.data.batch import IGNORED, Batch
from ironlaw.data.tokenizer import train as train_tokenizer
from ironlaw.errors import UserError
from ironlaw.ledger import Ledger
from ironlaw.model.adapters import adapted_layers
from ironlaw.model.config import ModelConfig
from ironlaw.model.huggingface.weights import write_model
from ironlaw.model.transformer import Transformer
from ironlaw.train.finetune import add_adapters
from ironlaw.train.objective import CrossEntropy, Distillation, Preference
from ironlaw.train.result import Outcome
from ironlaw.workload.finetune import FinetuneConfig
from ironlaw.workload.sections import FROZEN, ObjectiveConfig

Train = Callable[..., Outcome]
TABLE: dict[str, Any] = {
    "name": "tiny-gpt", "layers": 2, "hidden": 32, "heads": 2, "vocab": 300, "context": 32, "dropout": 0.0,
}  # fmt: skip


def drawn(seed: int, **changed: Any) -> Transformer:
    torch.manual_seed(seed)
    model = Transformer(ModelConfig(**TABLE | changed))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter), alpha=0.1)
    return model


def batch() -> Batch[Tensor]:
    """Two rows: in each two pairs of documents of four tokens, of which the first is a prompt, and padding."""
    generator = torch.Generator().manual_seed(3)
    inputs, targets = (torch.randint(0, 300, (2, 18), generator=generator) for _ in range(2))
    documents = torch.tensor([*(i // 4 for i in range(16)), 4, 4]).repeat(2, 1)
    targets[:, 0:16:4] = IGNORED
    targets[:, 16:] = IGNORED
    return Batch(inputs, targets, documents.to(torch.int32))


def test_distillation_is_the_published_formula() -> None:
    student, teacher, here = drawn(0), drawn(1, layers=3), batch()
    config = ObjectiveConfig(kind="distillation", teacher="x", temperature=3.0, weight=0.25, hidden=0.5)
    objective = Distillation(config, teacher)
    ours, theirs = (m(here.inputs, documents=here.documents).double() for m in (student, teacher))
    states = []
    for model in (student, teacher):
        hook = model.final_norm.register_forward_hook(lambda m, i, out: states.append(out.double()))
        model(here.inputs, documents=here.documents)
        hook.remove()
    expected, counted = 0.0, 0
    for row, place in (here.targets != IGNORED).nonzero().tolist():
        p, q = (torch.softmax(x[row, place] / 3.0, -1) for x in (theirs, ours))
        kl = float((p * (p.log() - q.log())).sum())
        ce = -float(torch.log_softmax(ours[row, place], -1)[here.targets[row, place]])
        a, b = (s[row, place] for s in states)
        expected += 0.75 * ce + 0.25 * 9.0 * kl + 0.5 * (1 - float(a @ b / (a.norm() * b.norm())))
        counted += 1
    assert float(objective.total(student, here)) == pytest.approx(expected, rel=1e-5)
    assert counted == objective.count(here) == 24
    plain = Distillation(config.model_copy(update={"weight": 0.0, "hidden": 0.0}), teacher)
    assert float(plain.total(student, here)) == pytest.approx(float(CrossEntropy().total(student, here)), rel=1e-6)
    objective.total(student, here).backward()
    assert all(p.grad is None for p in teacher.parameters())


def test_dpo_is_equation_7() -> None:
    policy, reference, here = drawn(0), drawn(1), batch()
    logs = [torch.log_softmax(m(here.inputs, documents=here.documents).double(), -1) for m in (policy, reference)]

    def answer(which: Tensor, row: int, document: int) -> float:
        places = [p for p in range(4 * document, 4 * document + 4) if here.targets[row, p] != IGNORED]
        return sum(float(which[row, p, here.targets[row, p]]) for p in places)

    expected = 0.0
    for row in range(2):
        for pair in range(2):
            chosen, rejected = (answer(logs[0], row, 2 * pair + i) - answer(logs[1], row, 2 * pair + i) for i in (0, 1))
            expected -= math.log(1 / (1 + math.exp(-0.3 * (chosen - rejected))))
    objective = Preference(0.3, reference)
    assert objective.count(here) == 4
    assert float(objective.total(policy, here)) == pytest.approx(expected, rel=1e-5)
    assert float(Preference(0.3, policy).total(policy, here)) == pytest.approx(4 * math.log(2), rel=1e-6)


def test_the_reference_of_adapters_is_the_base(tmp_path: Path) -> None:
    base = drawn(0)
    write_model(tmp_path, base.config, base.state_dict())
    for method in ("lora", "dora"):
        policy = drawn(0)
        add_adapters(policy, base.config, FinetuneConfig(method=method, rank=4), str(tmp_path))
        with torch.no_grad():
            for layer in adapted_layers(policy).values():
                for adapter in layer.adapters.each():
                    adapter.b.normal_()
        policy.eval()
        expected = Preference(0.1, base.eval()).total(policy, batch())
        policy.train()
        assert float(Preference(0.1, None).total(policy, batch())) == pytest.approx(float(expected), rel=1e-5)
        assert policy.training and abs(float(expected) - 4 * math.log(2)) > 1e-3


def check_memory(outcome: Outcome, run: Path) -> None:
    """The second model is in both ledgers, and the planned peak is the measured one."""
    plan = Ledger.load(run / "plan.json")
    keys = [{line.key for line in ledger.lines if line.operation == FROZEN} for ledger in (plan, outcome.ledger)]
    assert keys[0] == keys[1] and keys[0]
    found = outcome.ledger.totals["peak_bytes"].value
    assert found is not None and plan.totals["peak_bytes"].value == pytest.approx(found, rel=0.05)


@pytest.fixture
def pairs(tmp_path: Path) -> Path:
    """Pairs of answers, and a model with the tokenizer that reads them."""
    lines = [{"prompt": f"{i} + {i} = ", "chosen": f"{2 * i}", "rejected": f"I do not know {i}"} for i in range(60)]
    (tmp_path / "pairs.jsonl").write_text("\n".join(map(json.dumps, lines)))
    base = drawn(0)
    write_model(tmp_path / "base", base.config, base.state_dict())
    train_tokenizer(["0 + 1 = 2", "I do not know"], 300, tmp_path / "base" / "tokenizer.json")
    return tmp_path


def preferring(folder: Path, tables: Callable[..., dict[str, Any]], **sections: Any) -> RunConfig:
    document = tables(TABLE, **sections)
    document["model"] = {"from": str(folder / "base")}
    document["data"] |= {"path": str(folder / "pairs.jsonl"), "format": "pairs", "validation_fraction": 0.2}
    document["objective"] = {"kind": "dpo"}
    document.setdefault("train", {})["sequence"] = 32
    return build_config(document)


@pytest.mark.parametrize("finetune", [{}, {"method": "lora", "rank": 4}], ids=["all", "lora"])
def test_preferences_are_learned_and_a_stopped_run_goes_on_to_the_bit(
    pairs: Path, tiny_document: Any, train: Train, train_until: Any, losses: Any, finetune: dict[str, Any],
    read_metrics: Any,
) -> None:  # fmt: skip
    config = preferring(pairs, tiny_document, finetune=finetune, optimizer={"lr": 3e-3}, train={"profile_steps": 2})
    check_memory(train(config, pairs / "whole"), pairs / "whole")
    found = losses(pairs / "whole")
    assert found[1] == pytest.approx(math.log(2), abs=1e-5)  # nothing was learned before the first step
    assert found[config.train.steps] < 0.6
    assert "perplexity" not in read_metrics(pairs / "whole")[-1]
    train_until(config.checkpoint.every + 1, config, pairs / "cut")
    train(config, pairs / "cut", resume=True)
    assert losses(pairs / "cut") == found


def test_a_student_learns_and_goes_on_to_the_bit(
    tmp_path: Path, tiny_document: Any, train: Train, train_until: Any, losses: Any
) -> None:
    teacher = build_config(tiny_document(TABLE | {"layers": 3}))
    train(teacher, tmp_path / "teacher")
    objective = {"kind": "distillation", "teacher": str(tmp_path / "teacher"), "hidden": 0.5}
    config = build_config(tiny_document(TABLE, objective=objective, train={"profile_steps": 2}))
    check_memory(train(config, tmp_path / "whole"), tmp_path / "whole")
    found = losses(tmp_path / "whole")
    assert found[config.train.steps] < found[1]
    train_until(config.checkpoint.every + 1, config, tmp_path / "cut")
    train(config, tmp_path / "cut", resume=True)
    assert losses(tmp_path / "cut") == found
    train(build_config(tiny_document(TABLE | {"layers": 3}, train={"steps": 14})), tmp_path / "teacher", resume=True)
    with pytest.raises(UserError, match="teacher has changed since"):
        train(config.model_copy(update={"train": config.train.model_copy(update={"steps": 14})}), tmp_path / "cut",
              resume=True)  # fmt: skip
    small = build_config(tiny_document(TABLE | {"vocab": 290}, objective=objective))
    with pytest.raises(UserError, match="a student has its teacher's tokenizer"):
        train(small, tmp_path / "small")


@pytest.mark.parametrize(("sections", "message"), [
    ({"objective": {"kind": "distillation"}}, "go together: give both"),
    ({"objective": {"teacher": "x"}}, "go together: give both"),
    ({"objective": {"kind": "dpo"}}, 'data.format = "pairs" go together'),
    ({"data": {"format": "pairs"}}, 'objective.kind = "dpo" and'),
    ({"objective": {"kind": "distillation", "teacher": "x"}, "train": {"loss": "chunked"}}, "compares whole logits"),
    ({"objective": {"kind": "distillation", "teacher": "x"}, "layout": {"tp": 2}}, "computed by one process"),
    ({"objective": {"kind": "dpo"}, "data": {"format": "pairs"}}, "say which with model.from"),
    ({"data": {"sources": [{"path": "a", "format": "pairs"}, {"path": "b"}]}}, "does not mix"),
])  # fmt: skip
def test_what_does_not_go_together_is_refused(sections: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=message):
        build_config({"model": TABLE} | sections)
