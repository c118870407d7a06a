"""Offloading, run on a CPU through a stream that copies as late as it may: the losses are those of a run without."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from micro_batch import in_order, unfolded
from torch import Tensor

from ironlaw.config import RunConfig
from ironlaw.errors import UserError
from ironlaw.ledger import Ledger, Phase
from ironlaw.machine.profile import Profile
from ironlaw.plan.cluster.system import Host
from ironlaw.plan.offload import blocks_of, on_device, saved_by
from ironlaw.plan.recipe import check_supported
from ironlaw.plan.step import plan_run
from ironlaw.train.offload import ActivationOffload
from ironlaw.train.result import Outcome
from ironlaw.workload.blocks import Shape
from ironlaw.workload.kinds import forward_of, layer_groups
from ironlaw.workload.program import layers_of_shape

Config = Callable[..., RunConfig]
Train = Callable[..., Outcome]
HOST = Host(link_bytes_per_second=25e9, memory_bytes=64 * 2**30, memory_bytes_per_second=100e9)


class Late:
    """A copy that is made when somebody waits for it, and not before."""

    def __init__(self, source: Tensor, target: Tensor, before: Late | None = None) -> None:
        self.source, self.target, self.before, self.complete = source, target, before, False

    def query(self) -> bool:
        return self.complete

    def synchronize(self) -> None:
        assert self.before is None or self.before.complete, "comes back before it has left"
        if not self.complete:
            self.target.copy_(self.source)
            self.complete = True

    wait = synchronize


class LateStream:
    def __init__(self) -> None:
        self.out_bytes = self.back_bytes = 0
        self._last: dict[int, Late] = {}  # by the host's memory

    def host_like(self, tensor: Tensor) -> Tensor:
        return torch.full_like(tensor, 255 if tensor.dtype is torch.uint8 else float("nan")).contiguous()

    def out(self, tensor: Tensor, host: Tensor) -> Late:
        self.out_bytes += tensor.nbytes
        self._last[host.data_ptr()] = Late(tensor, host)
        return self._last[host.data_ptr()]

    def back(self, host: Tensor) -> tuple[Tensor, Late]:
        there = self.host_like(host)
        return there, self.back_into(host, there)

    def back_into(self, host: Tensor, tensor: Tensor) -> Late:
        self.back_bytes += host.nbytes
        return Late(host, tensor, self._last.get(host.data_ptr()))


@pytest.fixture
def stream(monkeypatch: pytest.MonkeyPatch) -> LateStream:
    """A CPU that offloads everything, however small, to itself."""
    late = LateStream()
    monkeypatch.setattr("ironlaw.train.step.TransferStream", lambda device: late)
    monkeypatch.setattr("ironlaw.train.offload.SMALLEST_BYTES", 1)
    monkeypatch.setattr("ironlaw.plan.offload.SMALLEST_BYTES", 1)
    monkeypatch.setattr("ironlaw.plan.step.host_of_machine", lambda profile: HOST)
    monkeypatch.setattr("ironlaw.plan.step.check_supported", lambda config, device: None)
    return late


@pytest.mark.parametrize(
    ("offload", "sections"),
    [
        ("activations", {}),
        ("activations", {"train": {"micro_batch": 3}}),
        ("activations", {"recompute": {"mode": "full"}}),
        ("activations", {"recompute": {"mode": "selective"}, "data": {"packing": "best_fit"}}),
        ("activations", {"train": {"precision": "bf16"}}),
        ("optimizer", {"optimizer": {"name": "adafactor"}}),
        ("both", {"train": {"micro_batch": 4}, "model": {"dropout": 0.1}}),
    ],
)
def test_losses_to_the_bit(
    offload: str, sections: dict[str, Any], tiny_config: Config, train: Train, stream: LateStream,
    losses: Callable[[Path], dict[int, float]], tmp_path: Path,
) -> None:  # fmt: skip
    sections = {name: dict(table) for name, table in sections.items()}
    model = {"layers": 5} | sections.pop("model", {})
    table = {"steps": 5} | sections.pop("train", {})
    train(tiny_config(model, train=table, **sections), tmp_path / "plain")
    assert stream.out_bytes == 0
    train(tiny_config(model, train=table | {"offload": offload}, **sections), tmp_path / "offloaded")
    assert stream.out_bytes > 0 and stream.back_bytes > 0
    assert losses(tmp_path / "plain") == losses(tmp_path / "offloaded")


def test_a_resumed_run_goes_on_as_if_it_had_not_stopped(
    tiny_config: Config, train: Train, stream: LateStream, losses: Callable[[Path], dict[int, float]], tmp_path: Path
) -> None:
    def config(steps: int) -> RunConfig:
        return tiny_config(train={"steps": steps, "offload": "both"}, schedule={"kind": "constant"})

    train(config(8), tmp_path / "whole")
    train(config(4), tmp_path / "parts")
    train(config(8), tmp_path / "parts", resume=True)
    assert losses(tmp_path / "whole") == losses(tmp_path / "parts")


@pytest.mark.parametrize(
    "moe", [{}, {"experts": 4, "experts_per_token": 2}, {"experts": 4, "experts_per_token": 3, "dense_layers": 2}]
)
def test_the_bytes_are_those_of_the_plan(
    moe: dict[str, int], tiny_config: Config, train: Train, stream: LateStream, tmp_path: Path
) -> None:
    """Two micro-batches of every block but the last; gradients out and weights back once."""
    model = {"layers": 4} | ({"moe": moe, "bias": False} if moe else {})
    config = tiny_config(
        model, train={"steps": 1, "micro_batch": 4, "offload": "both"}, evaluation={"every": 0},
        schedule={"warmup_steps": 0},
    )  # fmt: skip
    train(config, tmp_path / "run")
    offload = Ledger.load(tmp_path / "run" / "plan.json").facts["offload"]
    assert stream.out_bytes == pytest.approx(offload["activation_bytes"] + offload["optimizer_bytes"], rel=0.02)
    assert stream.back_bytes <= stream.out_bytes  # what was not gone yet need not come back
    assert offload["optimizer_bytes"] == 4 * config.model.parameters
    ledger = Ledger.load(tmp_path / "run" / "ledger.json")
    assert ledger.facts["host_bytes"] == pytest.approx(offload["host_bytes"], rel=0.02)
    assert ledger.memory_bytes()["optimizer"] == 0


@pytest.mark.parametrize("moe", [{"dense_layers": 2}, {"every": 2}, {"dense_layers": 1}, {"every": 3}])
def test_the_plan_of_offloaded_experts_holds_two_blocks(moe: dict[str, int], tiny_config: Config) -> None:
    """Whatever the kinds of the layers, gradients of all of them are made and what is kept is freed."""
    model = tiny_config({"layers": 8, "bias": False, "moe": {"experts": 4, "experts_per_token": 2} | moe}).model
    shape = Shape(model, 4, 64)
    layers = layers_of_shape(shape)
    operations = list(in_order(on_device(layers, shape.tokens * model.hidden * 4)))
    made = sum(op.gradient_bytes for op in unfolded(shape))
    kinds = layer_groups(model)
    assert sum(op.gradient_bytes for op in operations) == made
    assert {op.group for op in operations} >= set(kinds[-2:])
    kept = [op.saved_bytes - op.frees_saved_bytes for op in operations]
    assert min(np.cumsum(kept)) >= 0 and sum(kept) == sum(
        op.saved_bytes - op.frees_saved_bytes for op in unfolded(shape)
    )
    saved = [saved_by(layer, 0) for layer in blocks_of(layers)]
    assert [big + small for big, small in saved] == [
        sum(op.saved_bytes for op in forward_of(shape, kind)) for kind in kinds
    ]


def test_what_leaves_is_bounded(tiny_config: Config, stream: LateStream) -> None:
    """However late the copies are, no more than asked for plus one tensor is on its way."""
    from ironlaw.model.transformer import Transformer

    model = Transformer(tiny_config({"layers": 5}).model)
    offload = ActivationOffload(model, torch.device("cpu"), stream, ahead_bytes=20_000)
    model.around = offload.around
    highest = largest = 0
    pack = offload._pack

    def watched(tensor: Tensor) -> Any:
        nonlocal highest, largest
        result = pack(tensor)
        highest = max(highest, offload._leaving_bytes)
        largest = max(largest, tensor.untyped_storage().nbytes())
        return result

    offload._pack = watched  # type: ignore[method-assign]
    tokens = torch.randint(0, 300, (4, 16))
    model(tokens, tokens).backward()
    assert offload.moved_bytes > 5 * 20_000
    assert highest <= max(20_000, largest)
    assert offload._ahead == 0  # whatever came back was used and let go of


def test_the_plan_needs_less_memory_and_says_what_it_costs(
    tiny_config: Config, machine_profile: Profile, stream: LateStream, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = {"layers": 12, "hidden": 64, "context": 64}
    plain = plan_run(tiny_config(model), machine_profile)
    both = plan_run(tiny_config(model, train={"offload": "both"}), machine_profile)
    assert both.memory_bytes()["optimizer"] == 0
    assert both.memory_bytes()["activations"] < 0.4 * plain.memory_bytes()["activations"]
    assert both.facts["offload"]["host_bytes"] > both.facts["offload"]["activation_bytes"]
    fast = both.totals["step_seconds"].value
    slow = Host(1e8, HOST.memory_bytes, HOST.memory_bytes_per_second)
    monkeypatch.setattr("ironlaw.plan.step.host_of_machine", lambda profile: slow)
    waiting = plan_run(tiny_config(model, train={"offload": "both"}), machine_profile)
    assert waiting.totals["step_seconds"].value > fast
    shown = {line.phase: line.seconds for line in waiting.lines if line.operation == "host_offload"}
    assert set(shown) == {Phase.FORWARD, Phase.BACKWARD, Phase.OPTIMIZER}
    assert shown[Phase.OPTIMIZER] == pytest.approx(4 * waiting.totals["parameters"].value / 1e8)


@pytest.mark.parametrize(
    ("sections", "message"),
    [
        ({"optimizer": {"name": "muon"}, "train": {"offload": "optimizer"}}, "muon does not"),
        ({"train": {"offload": "both", "precision": "fp16"}}, "no loss scale"),
    ],
)
def test_what_the_host_cannot_do_is_refused(sections: dict[str, Any], message: str, tiny_config: Config) -> None:
    with pytest.raises(UserError, match=message):
        check_supported(tiny_config(**sections), "cuda")


def test_a_machine_whose_host_is_not_known_is_refused(machine_profile: Profile) -> None:
    from ironlaw.plan.offload import host_of_machine

    with pytest.raises(UserError, match="the catalogue lacks the host's memory"):
        host_of_machine(machine_profile)
