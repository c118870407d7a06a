"""Two ranks under DistributedDataParallel, observed: exposed communication is a phase, and every rank's step closes."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from ironlaw.explain.observed import explain_observed
from ironlaw.ledger import Ledger, Phase

LOOP = """
import pathlib, sys, time, torch, ironlaw
from torch import nn
torch.set_num_threads(1)
torch.distributed.init_process_group("gloo")
rank = torch.distributed.get_rank()
here = pathlib.Path(__file__).parent
body = nn.Sequential(nn.Embedding(2000, 128), nn.Linear(128, 512), nn.GELU(), nn.Linear(512, 2000))
model = nn.parallel.DistributedDataParallel(body)
optimizer = torch.optim.AdamW(model.parameters())
if rank == 0:  # whose last gradient is there
    body[0].weight.register_hook(lambda gradient: (here / f"done{step}").touch())
with ironlaw.observe(model, optimizer, out=sys.argv[1], plan=False):
    for step in range(14):
        ids = torch.randint(0, 2000, (4, 33))
        if rank == 1 and step > 2:  # the second forward pass exchanges buckets
            while not (here / f"done{step}").exists():
                time.sleep(0.001)
            time.sleep(0.1)
        loss = nn.functional.cross_entropy(model(ids[:, :-1]).flatten(0, 1), ids[:, 1:].flatten())
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
torch.distributed.destroy_process_group()
"""


@pytest.mark.long
def test_what_a_rank_waits_for_the_others_is_communication(tmp_path: Path) -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    (tmp_path / "loop.py").write_text(LOOP, encoding="utf-8")
    run = tmp_path / "run"
    shared = os.environ | {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    command = [sys.executable, str(tmp_path / "loop.py"), str(run)]
    ranks = [subprocess.Popen(command, env=shared | {"RANK": str(rank)}) for rank in range(2)]
    assert [process.wait(240) for process in ranks] == [0, 0]
    first, second = (Ledger.load(path / "ledger.json") for path in (run, run / "rank1"))
    for ledger in (first, second):
        assert sum(ledger.phase_seconds.values()) == pytest.approx(ledger.totals["step_seconds"].value, rel=1e-6)
        assert sum(ledger.memory_bytes().values()) == pytest.approx(ledger.totals["peak_bytes"].value, rel=0.02)
    waiting = first.phase_seconds[Phase.COMMUNICATION]
    assert waiting > 0.07  # for the other one's sleep
    assert second.phase_seconds[Phase.IDLE] > 0.07
    explained = explain_observed(run)
    assert explained.run.facts["slowest_rank"] == 1
    assert explained.diagnosis.findings[0].rule in ("straggler", "communication_bound")
