"""A user's own loop, observed: phases close, memory sums to the peak, names are those of a plan by tracing."""

from __future__ import annotations

import itertools
import json
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader, TensorDataset

import ironlaw
from ironlaw.errors import UserError
from ironlaw.explain.observed import explain_observed
from ironlaw.ledger import STEP_PHASES, Kind, Ledger, Phase
from ironlaw.machine.profile import Profile
from ironlaw.observe.partition import Partition
from ironlaw.observe.trials import attention_seconds, score_products
from ironlaw.workload.module_source import Input
from ironlaw.workload.operations import line_name
from ironlaw.workload.trace import trace
from ironlaw.workload.trace_store import trace_from_json, trace_to_json


class Small(nn.Module):
    """Anybody's module: nothing in it is ours."""

    def __init__(self, layers: int = 3, width: int = 64) -> None:
        super().__init__()
        self.embed = nn.Embedding(100, width)
        self.layers = nn.ModuleList(
            nn.Sequential(nn.LayerNorm(width), nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))
            for _ in range(layers)
        )
        self.head = nn.Linear(width, 100)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens)
        for layer in self.layers:
            x = x + layer(x)
        return self.head(x)


def loader(batches: int, batch: int = 8, tokens: int = 33) -> DataLoader[Any]:
    generator = torch.Generator().manual_seed(0)
    return DataLoader(TensorDataset(torch.randint(0, 100, (batches * batch, tokens), generator=generator)), batch)


def run_loop(out: Path, steps: int = 16, *, accumulate: int = 1, read: bool = False, **options: Any) -> Ledger:
    torch.manual_seed(0)
    model = Small()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    with ironlaw.observe(model, optimizer, out=out, **options) as watch:
        for number, (tokens,) in enumerate(loader(steps * accumulate)):
            logits = model(tokens[:, :-1])
            loss = F.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())
            loss.backward()
            if read:
                loss.item()
            if (number + 1) % accumulate:
                continue
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
            watch.log(loss=loss.detach())
            if number == 12:
                model.eval()
                with torch.no_grad():
                    model(tokens)
                model.train()
                torch.save(model.state_dict(), out.with_suffix(".pt"))
    return Ledger.load(out / "ledger.json")


@pytest.fixture(scope="module")
def ledger(tmp_path_factory: pytest.TempPathFactory) -> Ledger:
    return run_loop(tmp_path_factory.mktemp("observed") / "run")


def test_phases_partition_the_step(ledger: Ledger) -> None:
    step = ledger.totals["step_seconds"].value
    phases = ledger.seconds_by_phase()
    assert set(phases) <= set(STEP_PHASES)
    assert {Phase.DATA, Phase.FORWARD, Phase.BACKWARD, Phase.OPTIMIZER, Phase.HOST} <= set(phases)
    assert sum(phases.values()) == pytest.approx(step, rel=0.03)
    assert all(seconds >= 0 for seconds in phases.values())


def test_evaluation_and_checkpoints_are_seen_and_lie_outside_the_step(ledger: Ledger) -> None:
    wall = ledger.facts["wall_seconds"]
    assert wall["evaluation"] > 0 and wall["checkpoint"] > 0
    assert sum(wall.values()) == pytest.approx(ledger.totals["total_seconds"].value, rel=1e-6)


def test_memory_at_the_peak_is_what_the_model_needs(ledger: Ledger) -> None:
    model = Small()
    weights = sum(p.numel() * 4 for p in model.parameters())
    parts = ledger.memory_bytes()
    assert parts["weights"] == weights
    assert parts["optimizer"] == pytest.approx(2 * weights, rel=0.01)
    assert parts["batch"] == pytest.approx(8 * 33 * 8, rel=0.3)
    assert sum(parts.values()) == pytest.approx(ledger.totals["peak_bytes"].value, rel=0.02)
    planned = trace(model, [Input("tokens", (8, 32), "int64")])
    saved = sum(op.saved_bytes for op in planned.operations)
    logits = 8 * 32 * 100 * 4  # the loss is outside of the module: what it keeps, and the logits, are not in its trace
    assert 0.9 * saved < parts["activations"] < saved + 3 * logits


def test_operations_have_the_names_of_a_trace(ledger: Ledger) -> None:
    planned = trace(Small(), [Input("tokens", (8, 32), "int64")])
    wanted = {(op.phase, op.kind, line_name(op.name)) for op in planned.operations if op.kind is Kind.MATMUL}
    found = {(line.phase, line.kind, line.operation): line.count for line in ledger.lines}
    assert wanted <= set(found)
    assert found[Phase.FORWARD, Kind.MATMUL, "layers.*.1"] == 3
    assert found[Phase.BACKWARD, Kind.MATMUL, "layers.*.3"] == 6


def test_a_traced_plan_and_the_run_have_the_same_keys(tmp_path: Path, machine_profile: Profile) -> None:
    run = run_loop(tmp_path / "run", accumulate=2)
    here = replace(machine_profile, name=run.facts["machine"], threads=run.facts["threads"])
    explained = explain_observed(tmp_path / "run", here)
    plan, run = explained.plan, explained.run
    assert {line.key for line in plan.lines} == {line.key for line in run.lines}
    # Of the module all is planned; beside it is the loss of the loop, which a trace does not see.
    planned = {line.key for line in plan.lines if line.seconds is not None}
    passes = [line for line in run.lines if line.phase in (Phase.FORWARD, Phase.BACKWARD)]
    beside = sum(line.seconds or 0.0 for line in passes if line.key not in planned)
    assert planned and beside < 0.5 * sum(line.seconds or 0.0 for line in passes)


def test_the_timeline_covers_the_recorded_step(ledger: Ledger) -> None:
    line = ledger.facts["timeline"]
    phases = [s for s in line["segments"] if s["lane"] == "phases"]
    assert {"forward", "backward", "optimizer"} <= {s["style"] for s in phases}
    assert all(0 <= s["start"] <= s["end"] <= line["seconds"] + 1e-9 for s in line["segments"])
    for before, after in itertools.pairwise(phases):
        assert before["end"] <= after["start"] + 1e-9


def test_accumulation_and_sync_points_are_found(tmp_path: Path) -> None:
    ledger = run_loop(tmp_path / "run", accumulate=2, read=True)
    assert ledger.facts["accumulation"] == 2
    points = [p for p in ledger.facts["sync_points"] if p["call"] == "item"]
    assert len(points) == 1 and points[0]["per_step"] == 2 and 0 < sum(points[0]["parts"].values()) < 1
    file, _, line = points[0]["place"].rpartition(":")
    assert file == __file__ and "loss.item()" in Path(__file__).read_text(encoding="utf-8").splitlines()[int(line) - 1]


def test_nothing_stays_wrapped(tmp_path: Path) -> None:
    model = Small()
    optimizer = torch.optim.AdamW(model.parameters())
    before = torch.autograd.backward, torch.save, torch.Tensor.__dict__.get("item"), len(model._forward_hooks)
    with pytest.raises(ZeroDivisionError), ironlaw.observe(model, optimizer, out=tmp_path / "run"):
        1 / 0  # noqa: B018
    after = torch.autograd.backward, torch.save, torch.Tensor.__dict__.get("item"), len(model._forward_hooks)
    assert before == after and "zero_grad" not in optimizer.__dict__
    assert not (tmp_path / "run").exists()


def test_a_loop_without_a_step_says_so(tmp_path: Path) -> None:
    model = Small()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    observed = ironlaw.observe(model, optimizer, out=tmp_path / "run")
    with pytest.raises(UserError, match="no step was observed"), observed:
        model(torch.zeros(2, 4, dtype=torch.long))
    with pytest.raises(UserError, match="optimizer"):
        ironlaw.observe(model, [], out=tmp_path / "run")
    (tmp_path / "file").write_text("mine")
    with pytest.raises(UserError, match="is a file: give out= a directory"):
        ironlaw.observe(model, optimizer, out=tmp_path / "file" / "run")
    observed = ironlaw.observe(model, optimizer, out=tmp_path / "later", profile_steps=0, plan=False)
    with pytest.warns(UserWarning, match="the observed run is lost"), observed:  # and not what the loop has trained
        (tmp_path / "later").write_text("mine")
        model(torch.zeros(2, 4, dtype=torch.long)).sum().backward()
        optimizer.step()


def test_skipped_updates_are_counted(tmp_path: Path) -> None:
    model = nn.Linear(4, 4)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scaler = torch.amp.GradScaler("cpu", init_scale=1e4)
    with ironlaw.observe(model, optimizer, out=tmp_path / "run", profile_steps=0, plan=False):
        for number in range(12):
            optimizer.zero_grad()
            loss = model(torch.ones(2, 4)).sum() * (float("inf") if number == 3 else 1.0)
            scaler.scale(loss).backward()
            scaler.step(optimizer)
            scaler.update()
    ledger = Ledger.load(tmp_path / "run" / "ledger.json")
    assert ledger.facts["skipped_updates"] == 1 and ledger.facts["steps_done"] == 12


def test_gradients_that_a_loop_asks_for_are_part_of_its_loss(tmp_path: Path) -> None:
    """As those of the inner loop of meta learning, between two forward passes."""
    model = nn.Linear(8, 8)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model.bias.register_hook(lambda gradient: time.sleep(0.01))
    with ironlaw.observe(model, optimizer, out=tmp_path / "run", plan=False, profile_steps=0):
        for _ in range(8):
            for _ in range(3):
                torch.autograd.grad(model(torch.randn(4, 8)).sum(), [*model.parameters()], create_graph=True)
            optimizer.step()
    ledger = Ledger.load(tmp_path / "run" / "ledger.json")
    assert ledger.phase_seconds[Phase.FORWARD] > 0.03
    number = int(ledger.facts["places"]["update_unfused"].rpartition(":")[2])  # and no line of another optimizer
    assert "SGD(" in Path(__file__).read_text(encoding="utf-8").splitlines()[number - 1]


def test_gaps_are_named_by_their_neighbours_and_by_what_the_thread_did() -> None:
    partition = Partition()
    partition.start()
    for phase in (Phase.FORWARD, Phase.BACKWARD, Phase.OPTIMIZER):
        partition.begin(phase)
        time.sleep(0.002)
        partition.end()
        time.sleep(0.01)
    partition.cut()
    (times,) = partition.done
    phases = times.phase_seconds
    assert phases[Phase.FORWARD] > 0.011 and phases[Phase.OPTIMIZER] > 0.011  # gap: loss, clipping
    assert phases[Phase.BACKWARD] > 0.001
    assert phases[Phase.IDLE] > 0.005  # asleep after the update
    assert sum(phases.values()) == pytest.approx(times.wall_seconds)


def test_a_trace_survives_as_a_document() -> None:
    traced = trace(Small(), [Input("tokens", (2, 8), "int64")])
    again = trace_from_json(json.loads(json.dumps(trace_to_json(traced))))
    assert again == traced


class Checkpointed(Small):
    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens)
        for layer in self.layers:
            x = x + checkpoint(layer, x, use_reentrant=False)
        return self.head(x)


def test_recomputation_is_timed_with_the_python_between_its_operations_and_planned(tmp_path: Path) -> None:
    model = Checkpointed(width=32)
    optimizer = torch.optim.AdamW(model.parameters())
    with ironlaw.observe(model, optimizer, out=tmp_path / "run"):
        for (tokens,) in loader(12, batch=2):
            F.cross_entropy(model(tokens[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten()).backward()
            optimizer.step()
            optimizer.zero_grad()
    ledger = Ledger.load(tmp_path / "run" / "ledger.json")
    again = [line for line in ledger.lines if line.operation.endswith("_recomputed")]
    assert {line.kind for line in again} >= {Kind.MATMUL, Kind.NORM}
    whole = ledger.facts["recomputed_seconds"]
    assert sum(line.seconds or 0.0 for line in again if line.kind is Kind.MATMUL) < whole
    assert whole < ledger.facts["profiled_step_seconds"]
    assert "not_planned" not in ledger.facts and (tmp_path / "run" / "operations.json").is_file()


def test_scores_of_attention_are_found_in_a_trace_and_the_fused_kernel_timed() -> None:
    class Attention(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.scale = nn.Parameter(torch.ones(16))

        def forward(self, x: Tensor) -> Tensor:
            q = x * self.scale
            scores = q @ q.transpose(-1, -2)
            hidden = torch.ones(64, 64, dtype=torch.bool).triu(1)
            q = torch.softmax(scores.masked_fill(hidden, float("-inf")), -1) @ q
            return torch.softmax(q @ q.transpose(-1, -2), -1) @ q

    document = trace_to_json(trace(Attention(), [Input("q", (2, 4, 64, 16), "float32")]))
    products = score_products(document)
    assert products == [[8, 64, 16, 1], [8, 64, 16, 0]]
    assert (
        all(s > 0.0 for s in (attention_seconds(products, "fp32") or {"none": 0.0}).values())
        and attention_seconds([], "fp32") is None
    )


class Feeding(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(64, 256), nn.Linear(256, 10)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(F.gelu(self.up(x)))


@pytest.mark.long  # the compiler takes half a minute the first time
@pytest.mark.parametrize("in_place", [False, True])
def test_a_compiled_loop_is_compiled_once(in_place: bool, tmp_path: Path) -> None:
    """Hooks of ours are around what is compiled, not in it; and loops that it fuses are no time of the host's."""
    from torch._dynamo.utils import counters

    torch._dynamo.reset()
    model = Feeding()
    optimizer = torch.optim.AdamW(model.parameters())
    if in_place:
        model.compile()
    called = model if in_place else torch.compile(model)
    before, graphs = counters["stats"]["unique_graphs"], []
    with ironlaw.observe(called, optimizer, out=tmp_path / "run"):
        for _ in range(20):
            F.cross_entropy(called(torch.randn(32, 64)), torch.randint(0, 10, (32,))).backward()
            optimizer.step()
            optimizer.zero_grad()
            graphs.append(counters["stats"]["unique_graphs"] - before)
    assert graphs == [1] * 20
    keys = {line.key for line in Ledger.load(tmp_path / "run" / "ledger.json").lines}
    assert (Phase.FORWARD, Kind.ELEMENTWISE, "fused") in keys and (Phase.FORWARD, Kind.MATMUL, "addmm") in keys
