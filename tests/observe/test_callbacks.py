"""The observation as a callback of other people's trainers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from ironlaw.ledger import Ledger, Phase
from ironlaw.observe.callbacks import lightning_callback, trainer_callback


@pytest.mark.slow
def test_hugging_face_trainer(tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    pytest.importorskip("accelerate")
    config = transformers.GPT2Config(n_layer=2, n_embd=32, n_head=2, vocab_size=64, n_positions=16)
    model = transformers.GPT2LMHeadModel(config)
    rows = [{"input_ids": ids, "labels": ids} for ids in torch.randint(0, 64, (96, 16))]
    arguments = transformers.TrainingArguments(
        output_dir=str(tmp_path / "hf"), max_steps=14, per_device_train_batch_size=4, report_to=[], logging_steps=5,
        save_strategy="no", disable_tqdm=True, use_cpu=True,
    )  # fmt: skip
    callback = trainer_callback(tmp_path / "run")
    transformers.Trainer(model=model, args=arguments, train_dataset=rows, callbacks=[callback]).train()
    ledger = Ledger.load(tmp_path / "run" / "ledger.json")
    step = ledger.totals["step_seconds"].value
    assert ledger.facts["steps_done"] == 14 and ledger.facts["model"]["name"] == "GPT2LMHeadModel"
    assert sum(ledger.phase_seconds.values()) == pytest.approx(step, rel=0.03)
    assert {Phase.DATA, Phase.FORWARD, Phase.BACKWARD, Phase.OPTIMIZER} <= set(ledger.phase_seconds)
    assert sum(ledger.memory_bytes().values()) == pytest.approx(ledger.totals["peak_bytes"].value, rel=0.02)
    assert any("attn" in line.operation for line in ledger.lines)


class Module(nn.Module):
    """As much of a LightningModule as the callback touches."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(8, 8)

    def training_step(self, batch: Tensor, number: int) -> Tensor:
        return self.inner(batch).square().mean()


def test_lightning(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Lightning's hooks in the order in which it calls them; the library itself is not needed."""
    import sys
    import types

    package: Any = types.ModuleType("lightning.pytorch")
    package.Callback = object
    monkeypatch.setitem(sys.modules, "lightning", types.ModuleType("lightning"))
    monkeypatch.setitem(sys.modules, "lightning.pytorch", package)
    module = Module()
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    trainer = types.SimpleNamespace(optimizers=[optimizer])
    callback = lightning_callback(tmp_path / "run", plan=False)
    callback.on_train_start(trainer, module)
    for number in range(12):
        loss = module.training_step(torch.ones(2, 8), number)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        callback.on_train_batch_end(trainer, module, {"loss": loss}, None, number)
    callback.on_train_end(trainer, module)
    ledger = Ledger.load(tmp_path / "run" / "ledger.json")
    assert ledger.facts["steps_done"] == 12 and ledger.phase_seconds[Phase.FORWARD] > 0
    assert "training_step" not in module.__dict__ and ledger.totals["train_loss"].value > 0
