"""Ranks on hosts of their own, with links as slow as one says: network namespaces on this machine.

Root, `ip` and `tc` (Debian: iproute2) and a kernel with namespaces are needed; what is missing is the reason to skip.
How long steps take beside their plan is measured by benchmarks/shaped_links.py, on a quiet machine; here only what no
load can change: nothing is faster than its link.
"""

from __future__ import annotations

import importlib.util
import json
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from ironlaw.config import load_config
from ironlaw.workload.collectives import collectives, table_of
from ironlaw.workload.layout import Layout
from ironlaw.workload.recipe import Recipe, StepBatch

PROGRAM = Path(__file__).parents[3] / "benchmarks" / "shaped_links.py"
_spec = importlib.util.spec_from_file_location("shaped_links", PROGRAM)
assert _spec is not None and _spec.loader is not None
shaped_links: Any = importlib.util.module_from_spec(_spec)
sys.modules["shaped_links"] = shaped_links  # dataclasses look their module up
_spec.loader.exec_module(shaped_links)

RECEIVE = """
import socket
server = socket.create_server(("0.0.0.0", 5001))
print("ready", flush=True)
there, (address, port) = server.accept()
size = 0
while part := there.recv(2**20):
    size += len(part)
there.sendall(b"done")
print(address, size)
"""
SEND = """
import socket, sys, time
there = socket.create_connection((sys.argv[1], 5001))
began = time.perf_counter()
there.sendall(bytes(int(sys.argv[2])))
there.shutdown(socket.SHUT_WR)
there.recv(4)
print(time.perf_counter() - began)
"""
RATE = 12.5e6  # bytes/s


def need(**what: bool) -> None:
    problem = shaped_links.unsupported(**what)
    if problem:
        pytest.skip(problem)


def transfer(made: Any, size: int) -> tuple[str, int, float]:
    """From the second host to the first: the address that sent, what came, and seconds."""
    receiver = made.start(0, [sys.executable, "-c", RECEIVE])
    assert receiver.stdout.readline() == "ready\n"
    sender = made.start(1, [sys.executable, "-c", SEND, made.address(0), str(size)])
    took = float(sender.communicate(timeout=120)[0])
    address, came = receiver.communicate(timeout=120)[0].split()
    return address, int(came), took


def test_hosts_have_addresses_of_their_own_and_links_of_the_wanted_rate() -> None:
    need()
    with shaped_links.hosts(2, "100mbit") as made:
        before = made.sent_bytes()
        address, came, seconds = transfer(made, 4_000_000)
        sent = [after - earlier for after, earlier in zip(made.sent_bytes(), before, strict=True)]
    assert (address, came) == (made.address(1), 4_000_000)
    assert sent[1] > came > 20 * sent[0]
    assert seconds > 0.9 * (came - shaped_links.BURST_BYTES) / RATE
    with pytest.raises(Exception, match=r"h0"):  # nothing is left behind
        shaped_links._call("ip", "netns", "exec", made.names[0], "true")


def test_a_delay_is_waited_for() -> None:
    need(delay=True)
    with shaped_links.hosts(2, "1gbit", delay_ms=40) as made:
        began = time.perf_counter()
        _, _, seconds = transfer(made, 1000)
        assert seconds > 0.08 and time.perf_counter() > began


@pytest.mark.long
@pytest.mark.parametrize(("zero", "share"), [(0, 1.0), (3, 2.0)])
def test_a_step_over_slow_links_takes_as_long_as_its_bytes(
    zero: int, share: float, tiny_file: Callable[..., Path], ironlaw_process: Callable[..., Any], tmp_path: Path,
    user_cache: Path,
) -> None:  # fmt: skip
    """Two ranks on two hosts at 100 Mbit/s train like one process, and no step outruns its link.

    `share`: bytes on the wire over bytes of weights; all-reduce 2 (n-1)/n, and zero 3 gathers half twice as well.
    """
    need()
    model = {"layers": 2, "heads": 4, "hidden": 128, "vocab": 512}
    config = tiny_file(model, layout={"zero": zero}, train={"micro_batch": 8, "steps": 8})
    with shaped_links.hosts(2, "100mbit") as made:
        made.torchrun(["-m", "ironlaw", "train", config, "--out", tmp_path / "two"], tmp_path, timeout_seconds=240)
    lines = [json.loads(line) for line in (tmp_path / "two" / "metrics.jsonl").read_text("utf-8").splitlines()]
    loaded = load_config(config)
    layout = Layout(dp=2, zero=zero, micro_batch=loaded.train.global_batch // 2)
    batch = StepBatch(loaded.train.global_batch, loaded.sequence)
    table = table_of(collectives(loaded.model, layout, batch, Recipe(), position=0))
    wire = sum(
        sent.bytes * (0.5 if kind == "all_gather" else 1.0) for (_, kind), sent in table.items()
    )  # what gloo puts on a link between two
    assert wire == pytest.approx(share * 4 * loaded.model.parameters, rel=0.1)
    for line in lines[1:]:
        assert line["seconds"] > 0.9 * (wire - 2 * shaped_links.BURST_BYTES) / RATE
    assert ironlaw_process("train", config, "--out", tmp_path / "one").returncode == 0
    alone = [json.loads(line) for line in (tmp_path / "one" / "metrics.jsonl").read_text("utf-8").splitlines()]
    assert [line["loss"] for line in lines] == pytest.approx([line["loss"] for line in alone], rel=1e-5)
