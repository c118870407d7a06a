"""Habits of loops, planted in a script of a user: each is named first, with its line of code."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest

SCRIPT = """
import gc, copy, random, sys, time
import torch, torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader, TensorDataset
import ironlaw

torch.manual_seed(0)
out = sys.argv[1]
model = nn.Sequential(nn.Embedding(100, 96), nn.Linear(96, 384), nn.GELU(), nn.Linear(384, 96), nn.Linear(96, 100))
{before}
{optimizer}
batches = [torch.randint(0, 100, (16, 64)) for _ in range(4)]
kept, total, drawn = [], 0.0, random.getstate()
with ironlaw.observe(model, optimizer, out=out) as watch:
    for number in range(40):
        {tokens}
        logits = model(tokens)
        loss = F.cross_entropy(logits.flatten(0, 1), tokens.flatten())
        {backward}
        optimizer.step()
        {clear}
        {after}
assert random.getstate() == drawn, "observing takes none of the loop's random numbers"
"""
DEFAULTS = {
    "before": "", "tokens": "tokens = batches[number % 4]", "backward": "loss.backward()",
    "clear": "optimizer.zero_grad()", "after": "",
    "optimizer": "optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)",
}  # fmt: skip
CAST = """class Cast(nn.Sequential):
    def forward(self, x):
        for _ in range(60): x = x.to(torch.float16).to(torch.float32)  # HERE
        return super().forward(x)
model = nn.Sequential(model[0], Cast(*model[1:4]), model[4])"""
MASKED = """class Masked(nn.Sequential):
    def forward(self, x):
        mask = torch.tensor([[float(i >= j) for j in range(300)] for i in range(300)])  # HERE
        return super().forward(x)
model = nn.Sequential(model[0], Masked(*model[1:4]), model[4])"""
AGAIN = """class Again(nn.Sequential):
    def forward(self, x):
        return checkpoint(super().forward, x, use_reentrant=False)  # HERE
model = nn.Sequential(model[0], Again(*model[1:4]), model[4])"""
EVALUATION = """model.eval()
        with torch.no_grad(): [model(tokens) for _ in range(3)]  # HERE
        model.train()"""
REBUILT = "tokens, = next(iter(DataLoader(TensorDataset(torch.cat(batches * 900)), 16, shuffle=True)))  # HERE"
BY_NUMPY = """class Scaled(nn.Sequential):
    def forward(self, x):
        for _ in range(4): scale = numpy.median(x.detach().numpy(), -1)  # HERE
        return super().forward(x)
import numpy
model = nn.Sequential(model[0], Scaled(*model[1:4]), model[4])"""
SORTED = """class Sorted(nn.Sequential):
    def forward(self, x):
        for _ in range(8): x = x.sort(-1, descending=True).values.neg()  # HERE
        return super().forward(x)
model = nn.Sequential(model[0], Sorted(*model[1:4]), model[4])"""
WORLD = """for _ in range(16):
            with torch.no_grad(): model(batches[0][:1, :4]).argmax(-1)
            for _ in range(4): state = [0.5 * x + 1 for x in range(10_000)]  # HERE
        tokens = batches[number % 4]"""
REPLAYED = "tokens = torch.tensor([list(row) for row in rows])[:16]  # HERE"
ONE_BY_ONE = """optimizer.zero_grad()
        (loss + sum(F.cross_entropy(model(r[None]).flatten(0, 1), r) for r in tokens)).backward()  # HERE"""
BY_HAND = """loss.backward()
        for _ in range(60): [p.grad.mul_(1.0) for p in model.parameters()]  # HERE"""
FAULTS: dict[str, tuple[str, dict[str, str]]] = {
    "anomaly": ("mode_left_on", {"before": "torch.autograd.set_detect_anomaly(True)  # HERE"}),
    "float64": ("float64", {"before": "model.double()  # HERE"}),
    "kept graphs": ("memory_grows", {"after": "kept.append(loss)  # HERE"}),
    "a sum of losses": ("memory_grows", {"after": "total += loss  # HERE"}),
    "a mean of losses": ("memory_grows", {"after": "total = 0.9 * total + 0.1 * loss  # HERE"}),
    "kept logits": ("memory_grows", {"after": "kept.append(logits.detach())  # HERE"}),
    "collecting": ("host_bound", {"after": "gc.collect()  # HERE"}),
    "copies of the state": ("host_bound", {"after": "[copy.deepcopy(model.state_dict()) for _ in range(60)]  # HERE"}),
    "second pass": ("forwards_unread", {"after": "accuracy = model(tokens).argmax(-1) == tokens  # HERE"}),
    "zeros": ("gradients_zeroed", {"after": "optimizer.zero_grad(set_to_none=False)  # HERE"}),
    "asleep": ("host_bound", {"after": "time.sleep(0.02)  # HERE"}),
    "uncleared": ("gradients_uncleared", {"clear": "pass", "backward": "loss.backward()  # HERE"}),
    "a new loader": ("input_bound", {"tokens": REBUILT}),
    "conversions": ("copies", {"before": CAST}),
    "medians by numpy": ("line_slow", {"before": BY_NUMPY}),
    "a mask by Python": ("line_slow", {"before": MASKED}),
    "recomputation": ("recompute_needless", {"before": AGAIN}),
    "evaluation": ("evaluation_frequent", {"after": EVALUATION}),
    "checkpoints": ("checkpoint_frequent", {"after": "torch.save(optimizer.state_dict(), out + '.pt')  # HERE"}),
    "a sort": ("operation_slow", {"before": SORTED}),
    "a world in Python": ("host_bound", {"tokens": WORLD}),
    "a buffer of lists": ("host_bound", {
        "before": "rows = torch.randint(0, 100, (4000, 64)).tolist()", "tokens": REPLAYED,
    }),
    "row by row": ("passes_apart", {"tokens": "tokens = batches[number % 4][:, :4]", "backward": ONE_BY_ONE}),
    "by hand": ("update_by_hand", {"backward": BY_HAND}),
    "recompiling": ("recompiles", {
        "before": "model[2] = torch.compile(model[2], dynamic=False)  # HERE",
        "tokens": "tokens = batches[number % 4][:, : 64 - 2 * (number // 6)]",
    }),
    "frozen in the optimizer alone": ("gradients_idle", {
        "optimizer": "optimizer = torch.optim.AdamW(model[4].parameters(), lr=1e-3, fused=True)  # HERE",
        "clear": "model.zero_grad()",
    }),
    "a table of many words": ("rows_untouched", {"before": "model[0] = nn.Embedding(100_000, 96)  # HERE"}),
    "a graph of the graph": ("graphs_retained", {"backward": "loss.backward(create_graph=True)  # HERE"}),
    "two passes": ("graphs_again", {
        "clear": "pass",
        "backward": "optimizer.zero_grad()\n        (0.5 * loss).backward(retain_graph=True)  # HERE\n"
                    "        (0.5 * loss).backward()",
    }),
    "retained": ("graphs_retained", {"backward": "loss.backward(retain_graph=True)  # HERE"}),
}  # fmt: skip
QUICK = ("kept graphs",)  # bytes; most others are told by measured times


# What is found of the machine while the tests run is no part of the question: bursts, and threads that were set for it.
OF_THE_MACHINE = {"irregular_steps", "machine_slow", "slower_throughout", "threads_few", "oversubscribed"}
TOGETHER = ("anomaly", "kept graphs", "collecting", "second pass", "asleep", "a new loader", "conversions",
            "evaluation", "checkpoints", "by hand", "zeros")  # fmt: skip


def together(names: Iterable[str]) -> dict[str, str]:
    """The parts of several faults in one loop, one after the other; a mark says whose line it is."""
    parts: dict[str, str] = {}
    for name in names:
        for part, text in FAULTS[name][1].items():
            marked = text.replace("# HERE", f"# HERE: {name}")
            parts[part] = f"{parts[part]}\n{'' if part == 'before' else ' ' * 8}{marked}" if part in parts else marked
    return parts


def explained(folder: Path, **parts: str) -> tuple[list[dict[str, Any]], int]:
    """What is found of the code, and the number of the first line that is marked."""
    folder.mkdir(exist_ok=True)
    text = SCRIPT.format(**DEFAULTS | parts)
    script = folder / "train.py"
    script.write_text(text, encoding="utf-8")
    # No profile: whether this machine is slow today is no part of the question.
    environment = os.environ | {"XDG_CACHE_HOME": str(folder / "no-cache")}
    for command in ([sys.executable, str(script), str(folder / "run")],
                    [sys.executable, "-m", "ironlaw", "explain", str(folder / "run"), "--json"]):  # fmt: skip
        done = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=300)
        assert done.returncode == 0, done.stderr
    line = next((number for number, row in enumerate(text.splitlines(), 1) if "# HERE" in row), 0)
    findings = json.loads(done.stdout)["diagnosis"]["findings"]
    return [finding for finding in findings if finding["rule"] not in OF_THE_MACHINE], line


@pytest.mark.parametrize("fault", [pytest.param(f, marks=[] if f in QUICK else pytest.mark.long) for f in FAULTS])
def test_a_habit_is_named_first_with_its_line(fault: str, tmp_path: Path) -> None:
    rule, parts = FAULTS[fault]
    findings, line = explained(tmp_path, **parts)
    assert findings and findings[0]["rule"] == rule, findings
    assert any(f"train.py:{line}" in figure for figure in findings[0]["evidence"]), findings[0]


@pytest.mark.long
def test_of_many_habits_each_fix_surfaces_the_next(tmp_path: Path) -> None:
    left, fixed = list(TOGETHER), []
    while left:
        findings, _ = explained(tmp_path / str(len(left)), **together(left))
        lines = (tmp_path / str(len(left)) / "train.py").read_text(encoding="utf-8").splitlines()
        places = re.findall(r"train\.py:(\d+)", " ".join(findings[0]["evidence"]))
        marks = [lines[int(number) - 1].partition("# HERE: ")[2] for number in places]
        found = next((mark for mark in marks if mark), None)
        assert found in left, (left, fixed, findings[0])
        left.remove(found)
        fixed.append(found)
