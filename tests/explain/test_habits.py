"""Habits of loops, planted in a script of a user: each is named first, with its line of code."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

SCRIPT = """
import gc, copy, sys, time
import torch, torch.nn.functional as F
from torch import nn
import ironlaw

torch.manual_seed(0)
out = sys.argv[1]
model = nn.Sequential(nn.Embedding(100, 96), nn.Linear(96, 384), nn.GELU(), nn.Linear(384, 96), nn.Linear(96, 100))
{before}
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)
batches = [torch.randint(0, 100, (16, 64)) for _ in range(4)]
kept, total = [], 0.0
with ironlaw.observe(model, optimizer, out=out) as watch:
    for number in range(40):
        tokens = batches[number % 4]
        logits = model(tokens)
        loss = F.cross_entropy(logits.flatten(0, 1), tokens.flatten())
        {backward}
        optimizer.step()
        optimizer.zero_grad()
        {after}
"""
FAULTS: dict[str, tuple[str, dict[str, str]]] = {
    "anomaly": ("mode_left_on", {"before": "torch.autograd.set_detect_anomaly(True)  # HERE"}),
    "float64": ("float64", {"before": "model.double()  # HERE"}),
    "kept graphs": ("memory_grows", {"after": "kept.append(loss)  # HERE"}),
    "a sum of losses": ("memory_grows", {"after": "total += loss  # HERE"}),
    "kept logits": ("memory_grows", {"after": "kept.append(logits.detach())  # HERE"}),
    "collecting": ("host_bound", {"after": "gc.collect()  # HERE"}),
    "copies of the state": ("host_bound", {"after": "[copy.deepcopy(model.state_dict()) for _ in range(60)]  # HERE"}),
    "second pass": ("forwards_unread", {"after": "accuracy = model(tokens).argmax(-1) == tokens  # HERE"}),
    "zeros": ("gradients_zeroed", {"after": "optimizer.zero_grad(set_to_none=False)  # HERE"}),
    "retained": ("graphs_retained", {"backward": "loss.backward(retain_graph=True)  # HERE"}),
}  # fmt: skip
QUICK = ("anomaly", "kept graphs", "collecting")


def explained(folder: Path, **parts: str) -> tuple[dict[str, Any], int]:
    """The diagnosis, and the number of the line that is marked."""
    text = SCRIPT.format(**{"before": "", "backward": "loss.backward()", "after": ""} | parts)
    script = folder / "train.py"
    script.write_text(text, encoding="utf-8")
    # No profile: whether this machine is slow today is no part of the question.
    environment = os.environ | {"XDG_CACHE_HOME": str(folder / "no-cache")}
    for command in ([sys.executable, str(script), str(folder / "run")],
                    [sys.executable, "-m", "ironlaw", "explain", str(folder / "run"), "--json"]):  # fmt: skip
        done = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=300)
        assert done.returncode == 0, done.stderr
    line = next((number for number, row in enumerate(text.splitlines(), 1) if "# HERE" in row), 0)
    return json.loads(done.stdout)["diagnosis"], line


@pytest.mark.parametrize("fault", [pytest.param(f, marks=[] if f in QUICK else pytest.mark.long) for f in FAULTS])
def test_a_habit_is_named_first_with_its_line(fault: str, tmp_path: Path) -> None:
    rule, parts = FAULTS[fault]
    diagnosis, line = explained(tmp_path, **parts)
    causes = [finding["rule"] for finding in diagnosis["findings"]]
    assert causes and causes[0] == rule, (causes, diagnosis["sentence"])
    assert any(f"train.py:{line}" in figure for figure in diagnosis["evidence"]), diagnosis["evidence"]
