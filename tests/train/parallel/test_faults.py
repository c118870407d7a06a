"""Faults on one rank of several: all ranks decide alike; who hangs or is slow is found and named."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from ironlaw.train.parallel.observer import StragglerDetector, slow_ranks
from ironlaw.train.parallel.watcher import NOTE_JSON, Note, RecordedCollective, find_culprits, format_report

ALL = (0, 1, 2, 3)


# -- who is missing ----------------------------------------------------------------------------------------------


def operation(
    number: int, kind: str = "all_reduce", members: tuple[int, ...] = ALL, done: bool = True
) -> RecordedCollective:
    return RecordedCollective(kind, number, "shard" if members == ALL else "tp", members, 1000.0 + number, done)


def note(rank: int, last: RecordedCollective, waits: RecordedCollective | None = None, **fields: Any) -> Note:
    told: dict[str, Any] = {"step": 17, "where": "data/loader.py:88 (batch)", "written_seconds": 2000.0} | fields
    last_of = (last,) if waits is None else (last, waits)
    return Note(rank, f"node{rank // 2}", last=last_of, waits=waits, waited_seconds=300.0 if waits else 0.0, **told)


def test_the_rank_that_never_comes_is_named_with_where_it_is() -> None:
    waiting = operation(213, "reduce_scatter", done=False)
    notes = [note(rank, operation(212, "all_gather"), waiting) for rank in (0, 1, 2)]
    notes.append(note(3, operation(212, "all_gather")))
    line = format_report([NOTE_JSON.validate_json(NOTE_JSON.dump_json(each)) for each in notes], 2001.0)
    assert line == (
        "nothing has moved for 300 s: rank 3 on node1 is at step 17 in data/loader.py:88 (batch), its last operation "
        "all_gather #212 over shard; ranks 0-2 wait in reduce_scatter #213 over shard, step 17"
    )
    assert "not heard of" not in format_report(notes, 2061.0)  # all are as old: it is the store that is slow


@pytest.mark.parametrize("last", [{"message": True}, {"waits": operation(4, done=False)}, {}])
def test_a_rank_that_stopped_is_named_whatever_it_was_doing(last: dict[str, Any]) -> None:
    waiting = last.get("waits")
    others = [note(rank, operation(3), waiting, message=waiting is None, written_seconds=2060.0) for rank in (0, 2, 3)]
    stopped = note(1, operation(3), **last)
    line = format_report([*others, stopped], 2061.0)
    assert [each.rank for each in find_culprits([*others, stopped])] == [1]
    assert "rank 1 on node0 is at step 17" in line and "not heard of for 61 s; ranks 0, 2-3 wait in" in line


def test_a_rank_that_only_waits_for_the_one_that_is_missing_is_not_to_blame() -> None:
    """0 and 1 wait for each other's pair: 1 waits for 3, which is elsewhere."""
    first, second = (0, 1), (1, 3)
    notes = [
        note(0, operation(4, members=first), operation(5, members=first, done=False)),
        note(1, operation(8, members=second), operation(9, members=second, done=False)),
        note(3, operation(8, members=second)),
    ]
    assert [each.rank for each in find_culprits(notes)] == [3]


def test_ranks_in_different_collectives_and_ranks_all_in_the_same() -> None:
    gather, scatter = operation(7, "all_gather", done=False), operation(5, "all_reduce", (2, 3), done=False)
    notes = [note(rank, operation(6), gather) for rank in (0, 1, 2)] + [note(3, operation(6), scatter)]
    line = format_report(notes, 2000.0)  # 2 and 3 wait for each other
    assert "rank 2 on node1 is at step 17, waiting in all_gather #7 over shard; " in line
    assert "rank 3 on node1 is at step 17, waiting in all_reduce #5 over tp; ranks 0-1 wait in all_gather #7" in line
    same = [note(rank, operation(6), gather) for rank in ALL]
    assert (
        "ranks 0-3 wait in all_gather #7 over shard, step 17; all have called it: look at the network"
        in format_report(same, 2000.0)
    )


def test_stages_that_wait_for_messages() -> None:
    notes = [note(rank, operation(3), message=True) for rank in (0, 1)] + [note(2, operation(3))]
    assert [each.rank for each in find_culprits(notes)] == [2]


# -- who is slow -------------------------------------------------------------------------------------------------


def test_one_that_stands_out_is_slow_and_scatter_is_not() -> None:
    found = slow_ranks([1.0, 1.02, 0.98, 1.5, 1.01, 0.99], 2.0, [0] * 6, 0.15)
    assert [(each.rank, round(each.share, 2)) for each in found] == [(3, 0.25)]
    assert slow_ranks([1.0, 1.4, 0.7, 1.5, 1.2, 0.8], 1.6, [0] * 6, 0.15) == []  # all differ
    assert [each.rank for each in slow_ranks([0.1, 1.0], 1.0, [0, 0], 0.15)] == [1]


def test_stages_are_not_compared_with_one_another() -> None:
    """The stage with the output layer works longer by design."""
    assert slow_ranks([1.0, 1.0, 1.8, 1.8], 2.0, [0, 0, 1, 1], 0.15) == []
    assert [each.rank for each in slow_ranks([1.0, 1.0, 1.8, 2.6], 2.8, [0, 0, 1, 1], 0.15)] == [3]
    assert slow_ranks([1.0, 3.0], 3.0, [0, 1], 0.15) == []


def test_it_is_news_once_it_lasts_and_once_it_is_over() -> None:
    watch, slow, even = StragglerDetector([0] * 4, 0.15), [1.0, 1.0, 1.0, 2.0], [1.0] * 4
    told = [watch.observe(own, 2.0, 10) for own in (slow, even, slow, slow, slow, even, slow, even, even, even)]
    assert [[each.rank for each in news] for news, _ in told] == [[], [], [], [3], [], [], [], [], [], []]
    assert [over for _, over in told] == [[]] * 8 + [[3], []]
    assert watch.own_seconds == pytest.approx([0.1, 0.1, 0.1, 0.15])


# -- whole runs on two ranks -------------------------------------------------------------------------------------

SHARDED: dict[str, Any] = {"layout.zero": 3}
STAGES: dict[str, Any] = {"layout.pp": 2, "train.micro_batch": 2}
BAD = [25, 26, 27]


def fault(kind: Any, rank: int, batches: list[int] | None, settings: dict[str, Any], **more: Any) -> dict[str, Any]:
    return {"task": "run", "fault": kind, "rank": rank, "batches": batches, "set": settings} | more


def differing(name: str, value: Any) -> dict[str, Any]:
    return {"task": "preflight", "layout": {}, "differs": [name, value]}


CASES = {
    "rise": fault(6.0, 1, BAD, SHARDED),
    "gradient": fault("gradient", 0, BAD, STAGES),
    "stop": fault("nan", 1, list(range(25, 400)), SHARDED),
    "signal": fault("signal", 1, [17], STAGES),
    "hang": fault("hang", 1, [21], SHARDED | {"recovery.collective_seconds": 1.5, "train.steps": 24}),
    "slow": fault("sleep", 1, None, {"recovery.straggler_every": 4, "train.steps": 9}, seconds=0.4),
    "torch": differing("torch", "2.11.0"),
    "config": differing("config", "abd"),
    "clock": differing("clock_seconds", -90.0),
    "python": differing("python", "3.99"),
    "devices": differing("devices", "NVIDIA H200"),
    "same": differing("clock_seconds", 0.0),
}


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_faults_on_one_of_two_ranks(
    tiny_file: Callable[..., Path], on_ranks: Callable[..., Any], ironlaw_here: Callable[..., Any],
    known_links: None,
) -> None:  # fmt: skip
    config = tiny_file(
        {"dropout": 0.1, "layers": 2, "heads": 4}, layout={}, train={"steps": 34, "micro_batch": 4},
        checkpoint={"every": 10, "keep": 4}, evaluation={"every": 0},
        recovery={"window": 16, "patience": 2, "rewind": 3, "skip_before": 1, "skip_after": 2},
    )  # fmt: skip
    found = dict(zip(CASES, on_ranks(2, [case | {"config": str(config)} for case in CASES.values()], 800), strict=True))

    def turns(first: dict[str, Any]) -> list[str]:
        """Without ranks that a busy machine makes slow."""
        return [event["event"] for event in first["events"] if not event["event"].startswith("slow_rank")]

    # A spike, or what is not a number, on one rank or one stage: both go back to the same checkpoint and go on alike.
    for name in ("rise", "gradient"):
        first, other = found[name]
        assert first["turns"] == other["turns"] and first["turns"][0] == {"event": "rollback", "to_step": 20}, name
        assert first["losses"] == other["losses"] and (first["step"], other["step"]) == (34, 34), name
        assert turns(first) == ["rollback"] * len(first["turns"]), name
    # The third in a row ends the run on both; rank 0 says why.
    first, other = found["stop"]
    assert first["stopped"].startswith("stopped after 3 loss spikes") and other["stopped"] == "2"
    assert turns(first) == ["rollback", "rollback", "stop"]
    # A signal to one of them: both stop after the same step.
    assert [(each["step"], each["interrupted"]) for each in found["signal"]] == [(18, "SIGTERM")] * 2

    # A rank that does not come: the other one says which, where it is and what waits for it.
    first, other = found["hang"]
    (event,) = [event for event in first["events"] if event["event"] == "hang"]
    assert first["left"] and set(first["left"] + other["left"]) == {1}
    assert "rank 1 on " in event["report"] and "is at step 22 in " in event["report"]
    assert "job.py:" in event["report"] and "its last operation " in event["report"]
    assert "; rank 0 waits in " in event["report"] and " over shard, step 22" in event["report"]
    assert {note["rank"] for note in event["ranks"]} == {0, 1}

    # A rank that works longer: named once, also in the ledger.
    first, _ = found["slow"]
    (event,) = [event for event in first["events"] if event["event"] == "slow_rank" and event["rank"] == 1]
    assert event["share"] > 0.15 and event["step"] >= 8
    assert [line.startswith("rank 1 on ") and "is slow" in line for line in first["said"]].count(True) == 1

    code, out, _ = ironlaw_here("explain", first["run"], "--json")
    assert code == 0
    (finding,) = [each for each in json.loads(out)["diagnosis"]["findings"] if each["rule"] == "straggler"]
    assert finding["share"] > 0.15 and "slowest rank: 1" in finding["evidence"]

    # What differs from rank 0 is refused, by rank 0 in one line.
    for name, words in {
        "torch": "has PyTorch 2.11.0, rank 0 has", "config": "has another config than rank 0",
        "clock": "has a clock 90 s behind rank 0's", "python": "has Python 3.99, rank 0 has",
        "devices": "has NVIDIA H200 as devices, rank 0 has cpu",
    }.items():  # fmt: skip
        first, other = found[name]
        assert first.startswith("UserError: rank 1 on ") and words in first and "\n" not in first
        assert other == "SystemExit: 2"
    assert found["same"] == ["trains", "trains"]
