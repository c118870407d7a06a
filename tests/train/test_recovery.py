"""Loss spikes: what counts as one, and that a run which went back is the run that never saw those batches."""

from __future__ import annotations

import json
import math
import random
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from ironlaw.config import RecoveryConfig, RunConfig, ScalerConfig
from ironlaw.errors import UserError
from ironlaw.train import recovery
from ironlaw.train.loop import Trainer
from ironlaw.train.mesh import StepResult
from ironlaw.train.recovery import MeasuredStep, Recovery, Spike, batch_of, find_spike
from ironlaw.train.result import Outcome
from ironlaw.train.step import Step

Config = Callable[..., RunConfig]
Train = Callable[..., Outcome]
Losses = Callable[[Path], dict[int, float]]
DEFAULT = RecoveryConfig()


# -- what is a spike ---------------------------------------------------------------------------------------------


def curve(steps: int, noise: float, seed: int = 0) -> list[MeasuredStep]:
    """A falling loss with noise, gradient norms with the heavy tail that they have."""
    chance = random.Random(seed)
    return [
        MeasuredStep(n, 2 + 6 * math.exp(-n / 300) + chance.gauss(0, noise), math.exp(chance.gauss(0, 0.4)))
        for n in range(1, steps + 1)
    ]


def first_spike(history: list[MeasuredStep], config: RecoveryConfig = DEFAULT) -> Spike | None:
    return next((s for n in range(1, len(history) + 1) if (s := find_spike(history[max(0, n - 70) : n], config))), None)


@pytest.mark.parametrize("noise", [0.0, 0.02, 0.3, 1.0])
def test_noise_is_no_spike(noise: float) -> None:
    assert first_spike(curve(3000, noise)) is None


def test_a_single_hard_batch_is_no_spike() -> None:
    history = curve(300, 0.05)
    for step in (150, 200, 201):
        history[step - 1] = MeasuredStep(step, history[step - 1].loss + 4, 9.0)
    assert first_spike(history) is None


def raised(history: list[MeasuredStep], first: int, last: int, loss: float, norm: float = 1.0) -> list[MeasuredStep]:
    return [
        MeasuredStep(m.step, m.loss + loss, m.grad_norm * norm) if first <= m.step <= last else m for m in history
    ]  # fmt: skip


def test_a_rise_that_stays_is_one_after_patience() -> None:
    found = first_spike(raised(curve(300, 0.05), 200, 240, loss=2.0))
    assert found is not None
    assert (found.first_step, found.last_step) == (200, 202)
    assert "robust standard deviations above" in found.reason


def test_gradients_that_break_out_earlier_mark_its_beginning_and_make_a_smaller_rise_count() -> None:
    small = raised(curve(1000, 0.05), 900, 940, loss=0.35)  # between half of what counts and all of it
    assert first_spike(small) is None
    found = first_spike(raised(small, 900, 940, loss=0.0, norm=100.0))
    assert found is not None and found.first_step == 900
    early = raised(raised(curve(1000, 0.05), 898, 899, loss=0.0, norm=100.0), 900, 940, loss=2.0)
    found = first_spike(early)
    assert found is not None and (found.first_step, found.last_step) == (898, 902)


@pytest.mark.parametrize("loss", [math.nan, math.inf])
def test_what_is_not_finite_is_one_at_once(loss: float) -> None:
    assert find_spike([MeasuredStep(1, loss, 1.0)], DEFAULT) is not None
    found = find_spike([*curve(3, 0.1), MeasuredStep(4, 2.0, loss)], DEFAULT)
    assert found is not None and found.reason == "the gradient norm is not finite"


# -- which batches are left out ----------------------------------------------------------------------------------


def test_skips_number_the_batches_that_are_left() -> None:
    chance = random.Random(1)
    for _ in range(200):
        ranges = [(first := chance.randrange(40), first + chance.randrange(12)) for _ in range(chance.randrange(5))]
        left = [n for n in range(400) if not any(first <= n < end for first, end in ranges)]
        assert [batch_of(step, ranges) for step in range(200)] == left[:200]


def test_a_decision_is_a_function_of_what_was_logged() -> None:
    """Two ranks, one of which joined from the files: the same target, the same batches, the same strike."""
    events: list[dict[str, Any]] = []
    one = Recovery(DEFAULT, events)
    for m in raised(curve(400, 0.05), 300, 400, loss=3.0):
        spike = one.observe(m.step, m.loss, m.grad_norm)
        if spike is not None:
            break
    assert spike is not None
    metrics = [{"step": m.step, "loss": m.loss, "grad_norm": m.grad_norm} for m in one.history]
    two = Recovery(DEFAULT, json.loads(json.dumps(events)))
    two.reset(json.loads(json.dumps(metrics)))
    decisions = [each.decide(spike, [100, 200, 280, 295]) for each in (one, two)]
    assert decisions[0] == decisions[1]
    assert decisions[0]["to_step"] == 280  # 295 is nearer than `rewind` steps
    assert decisions[0]["skipped_batches"] == [299 - 8, 301 + 1 + 32]
    assert decisions[0]["evidence"][-1]["step"] == 302


def strikes(*firsts: int, config: RecoveryConfig = DEFAULT) -> list[str]:
    recovery = Recovery(config, ())
    kinds = []
    for first in firsts:
        event = recovery.decide(Spike(first, first + 2, "", 2.0, 0.1), [0])
        recovery.decisions.append(event)
        kinds.append(f"{event['event']} {event['strike']}")
    return kinds


def test_three_in_a_row_stop_and_a_quiet_stretch_forgives() -> None:
    assert strikes(100, 105, 400) == ["rollback 1", "rollback 2", "stop 3"]
    assert strikes(100, 105, 1400, 2500) == ["rollback 1", "rollback 2", "rollback 1", "rollback 1"]
    assert strikes(100, 105, 400, 500) == ["rollback 1", "rollback 2", "stop 3", "rollback 1"]  # told to go on


def test_only_checkpoints_of_the_branch_that_counts_are_usable() -> None:
    event = {"event": "rollback", "to_step": 100, "skipped_batches": [1, 2], "spike": {"first_step": 120}}
    recovery = Recovery(DEFAULT, [event, {"note": "somebody else's"}])
    assert recovery.usable(100, 0) and recovery.usable(50, 0)
    assert not recovery.usable(120, 0)  # made before the run went back
    assert recovery.usable(120, 1)


@pytest.mark.parametrize("change", [{"to_step": "7"}, {"skipped_batches": [1]}, {"spike": None}])
def test_an_event_that_nobody_can_go_back_by_is_one_line(change: dict[str, Any]) -> None:
    event = {"event": "rollback", "to_step": 7, "skipped_batches": [1, 2], "spike": {"first_step": 9}}
    with pytest.raises(UserError, match="a rollback of no steps"):
        Recovery(DEFAULT, [event | change])


# -- a whole run -------------------------------------------------------------------------------------------------

RUN: dict[str, dict[str, Any]] = {
    "model": {"dropout": 0.1},
    "train": {"steps": 50},
    "checkpoint": {"every": 10, "keep": 4},
    "evaluation": {"every": 0},
    "recovery": {"window": 16, "patience": 2, "rewind": 3, "skip_before": 1, "skip_after": 2},
}


@pytest.fixture
def config(tiny_document: Callable[..., dict[str, Any]]) -> RunConfig:
    from ironlaw.config import build_config

    tables = dict(RUN)
    document = tiny_document(tables.pop("model"), **{k: v for k, v in tables.items() if k != "recovery"})
    return build_config(document | {"recovery": RUN["recovery"]})


@pytest.fixture
def poison(monkeypatch: pytest.MonkeyPatch) -> Callable[[Callable[[int, int], float]], None]:
    """`poison(rise)`: the loss reported for a step and its batch is higher by `rise(step, batch)`."""
    plain = Trainer._timed_step

    def set_(rise: Callable[[int, int], float]) -> None:
        def step(self: Trainer, *arguments: Any, **options: Any) -> Any:
            times = plain(self, *arguments, **options)
            self.train_loss += rise(self.step, self.recovery.batch(self.step - 1))
            return times

        monkeypatch.setattr(Trainer, "_timed_step", step)

    return set_


def events(run: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (run / "events.jsonl").read_text(encoding="utf-8").splitlines()]


@pytest.fixture
def without(
    config: RunConfig, train: Train, losses: Losses, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> Callable[..., dict[int, float]]:
    """The losses of a run that leaves out some batches from the start."""

    def run(*ranges: tuple[int, int]) -> dict[int, float]:
        with monkeypatch.context() as patch:
            patch.setattr(Recovery, "batch", lambda recovery, step: batch_of(step, ranges))
            train(config, tmp_path / "without")
        return losses(tmp_path / "without")

    return run


BAD = range(35, 40)  # batches


@pytest.mark.parametrize("rise", [6.0, math.nan, math.inf])
def test_a_run_that_went_back_is_the_run_without_those_batches(
    config: RunConfig, train: Train, losses: Losses, tmp_path: Path, poison: Any, without: Any, rise: float
) -> None:
    poison(lambda step, batch: rise if batch in BAD else 0.0)
    said: list[str] = []
    outcome = train(config, tmp_path / "run", say=said.append)
    found = events(tmp_path / "run")
    skipped = [tuple(event["skipped_batches"]) for event in found]
    # Batch 35 is that of step 36. A rise takes two steps to be one; the checkpoint of step 30 is far enough before.
    first = {"event": "rollback", "strike": 1, "to_step": 30}
    assert found[0].items() >= first.items()
    assert skipped[0] == ((34, 39) if rise == 6.0 else (34, 38))
    assert found[0]["spike"]["first_step"] == 36
    assert len(found[0]["evidence"]) >= 8 and all(isinstance(e["grad_norm"], float) for e in found[0]["evidence"])
    assert "back to step 30, leaving out batches 34 to" in said[0]
    assert outcome.step == 50
    assert outcome.ledger.facts["rollbacks"] == len(found)
    assert outcome.ledger.facts["wall_seconds"]["repeated"] > 0
    assert losses(tmp_path / "run") == without(*skipped)


@pytest.mark.parametrize("moment", ["before", "after"])
def test_killed_while_it_goes_back(
    config: RunConfig, train: Train, losses: Losses, tmp_path: Path, poison: Any, without: Any,
    monkeypatch: pytest.MonkeyPatch, moment: str,
) -> None:  # fmt: skip
    """Once the event is on the disk it holds; before, the run finds the same spike again."""
    poison(lambda step, batch: 6.0 if batch in BAD else 0.0)

    def killed(*arguments: Any) -> None:
        raise InterruptedError

    with monkeypatch.context() as patch:
        patch.setattr(recovery, "_choose" if moment == "before" else "drop_checkpoints_after", killed)
        with pytest.raises(InterruptedError):
            train(config, tmp_path / "run")
    said: list[str] = []
    train(config, tmp_path / "run", resume=True, say=said.append)
    assert said[0] == "resumed from step 30"
    assert len(events(tmp_path / "run")) == 1
    assert losses(tmp_path / "run") == without(tuple(events(tmp_path / "run")[0]["skipped_batches"]))


def test_stopped_and_resumed_after_it_went_back(
    config: RunConfig, train: Train, losses: Losses, tmp_path: Path, poison: Any, without: Any
) -> None:
    """The batches stay left out, whichever checkpoint the next session starts from."""
    poison(lambda step, batch: 6.0 if batch in BAD else 0.0)

    def stop(entry: dict[str, Any]) -> None:
        if entry["step"] in (33, 47) and (tmp_path / "run" / "events.jsonl").is_file():
            raise InterruptedError

    for _ in range(2):
        with pytest.raises(InterruptedError):
            train(config, tmp_path / "run", resume=True, watch=stop)
        stop = _only(stop, 47)
    train(config, tmp_path / "run", resume=True)
    assert losses(tmp_path / "run") == without(tuple(events(tmp_path / "run")[0]["skipped_batches"]))


def _only(watch: Callable[[dict[str, Any]], None], step: int) -> Callable[[dict[str, Any]], None]:
    return lambda entry: watch(entry) if entry["step"] == step else None


def test_three_strikes_stop_the_run_and_it_can_go_on(
    config: RunConfig, train: Train, losses: Losses, tmp_path: Path, poison: Any
) -> None:
    poison(lambda step, batch: 6.0 if step >= 36 else 0.0)  # whatever the batches are
    with pytest.raises(UserError, match=r"stopped after 3 loss spikes \(in steps 36, 36, 36") as error:
        train(config, tmp_path / "run")
    assert "\n" not in str(error.value) and "optimizer.lr" in str(error.value) and "events.jsonl" in str(error.value)
    found = events(tmp_path / "run")
    assert [event["event"] for event in found] == ["rollback", "rollback", "stop"]
    # Each time the next batches: those of the spike before stay left out.
    ranges = [event["skipped_batches"] for event in found]
    assert ranges[0][1] <= ranges[1][1] - 3
    assert max(int(p.name[5:]) for p in (tmp_path / "run" / "checkpoints").iterdir()) == 30
    poison(lambda step, batch: 0.0)
    said: list[str] = []
    assert train(config, tmp_path / "run", resume=True, say=said.append).step == 50
    assert said == ["resumed from step 30"]
    assert len(losses(tmp_path / "run")) == 50


def test_a_damaged_checkpoint_is_not_what_a_run_goes_back_to(
    config: RunConfig, train: Train, tmp_path: Path, poison: Any
) -> None:
    poison(lambda step, batch: 6.0 if batch in BAD else 0.0)

    def damage(entry: dict[str, Any]) -> None:
        if entry["step"] == 36:
            while not (tmp_path / "run" / "checkpoints" / "step-00000030").is_dir():
                time.sleep(0.01)
            (tmp_path / "run" / "checkpoints" / "step-00000030" / "training.pt").write_bytes(b"")

    train(config, tmp_path / "run", watch=damage)
    assert events(tmp_path / "run")[0]["to_step"] == 20


def test_with_nothing_to_go_back_to(
    tiny_config: Config, config: RunConfig, train: Train, tmp_path: Path, poison: Any
) -> None:
    never = config.model_copy(update={"checkpoint": config.checkpoint.model_copy(update={"every": 0})})
    poison(lambda step, batch: 6.0 if batch in BAD else 0.0)
    said: list[str] = []
    assert train(never, tmp_path / "spike", say=said.append).step == 50
    assert len(said) == 1 and "no checkpoint before it, training goes on" in said[0]
    assert [event["event"] for event in events(tmp_path / "spike")] == ["spike"]
    poison(lambda step, batch: math.nan if batch in BAD else 0.0)
    with pytest.raises(UserError, match=r"the loss is not finite in step 36, and there is no checkpoint") as error:
        train(never, tmp_path / "nan")
    assert "\n" not in str(error.value)


def test_an_fp16_step_that_overflows_is_no_fault(
    config: RunConfig, train: Train, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, read_metrics: Any
) -> None:
    """Its gradient is not finite and it changes nothing: the scale falls, and there is nothing to go back from."""
    tables = {"train": config.train.model_copy(update={"precision": "fp16", "micro_batch": 4, "noise_scale_every": 1})}
    half = config.model_copy(update=tables | {"scaler": ScalerConfig(initial=1024.0)})
    plain = Step.update

    def update(self: Step, loss: Any, number: int, *rest: Any) -> StepResult:
        weight = next(self.model.parameters())
        if number in (0, 33):
            assert weight.grad is not None
            weight.grad.view(-1)[0] = math.inf
        before = weight.detach().clone()
        result = plain(self, loss, number, *rest)
        assert torch.equal(before, weight) is (number in (0, 33))
        return result

    monkeypatch.setattr(Step, "update", update)
    train(half, tmp_path / "run")
    assert not (tmp_path / "run" / "events.jsonl").exists()
    entries = read_metrics(tmp_path / "run")
    assert [entries[n]["skipped_steps"] for n in (0, 32, 33, 49)] == [1, 1, 2, 2]
    assert entries[33]["loss_scale"] == entries[32]["loss_scale"] / 2
    assert all(math.isfinite(float(e["loss"])) and math.isfinite(float(e["grad_norm"])) for e in entries)
    assert math.isfinite(float(entries[-1].get("critical_batch", 0.0)))


def test_switched_off(config: RunConfig, train: Train, tmp_path: Path, poison: Any) -> None:
    off = config.model_copy(update={"recovery": RecoveryConfig(enabled=False)})
    poison(lambda step, batch: 6.0 if batch in BAD else 0.0)
    assert train(off, tmp_path / "spike").step == 50
    assert not (tmp_path / "spike" / "events.jsonl").exists()
    poison(lambda step, batch: math.nan if batch in BAD else 0.0)
    with pytest.raises(UserError, match=r"the loss is not finite in step 36: lower optimizer\.lr"):
        train(off, tmp_path / "nan")
