"""What the main thread is found activity_of while the step waits."""

from __future__ import annotations

import gc
import logging
import queue
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from types import FrameType, SimpleNamespace
from typing import Any

import pytest
import torch

import ironlaw
from ironlaw.ledger import Phase
from ironlaw.observe.partition import ClockReading, Interval, Partition
from ironlaw.observe.sampler import StackSampler, StepGrowth, _is_waiting, activity_of, data_stage_of
from ironlaw.observe.user_code import LoopLines, stacks


def while_running(work: Callable[[threading.Event], None], look: Callable[[FrameType], Any]) -> Any:
    """`look` at the stack of a thread that does `work`, once it is there."""
    inside = threading.Condition.wait if work is waits else work
    ended = threading.Event()
    thread = threading.Thread(target=work, args=(ended,), daemon=True)
    thread.start()
    try:
        assert thread.ident is not None
        while True:
            with stacks() as frames:
                if _is_in(inside, frames[thread.ident]):
                    return look(frames[thread.ident])
            time.sleep(0.01)
    finally:
        ended.set()
        thread.join()


def _is_in(work: Callable[..., None], frame: FrameType | None) -> bool:
    while frame is not None and frame.f_code is not work.__code__:
        frame = frame.f_back
    return frame is not None


def counts(ended: threading.Event) -> None:
    while not ended.is_set():
        sum(range(100))


def waits(ended: threading.Event) -> None:
    ended.wait()


def tokenizes(ended: threading.Event) -> None:
    def encode_all() -> None:
        while not ended.is_set():
            pass

    encode_all()


def test_waiting_for_a_thread_at_work_is_sharing_the_interpreters_lock() -> None:
    def both(waiting: FrameType) -> tuple[str, str]:
        return while_running(counts, lambda busy: data_stage_of(waiting, [busy]))

    stage, place = while_running(waits, both)
    assert stage == "lock" and place.partition(":")[0] == __file__


def test_a_line_that_holds_the_interpreters_lock_has_its_time() -> None:
    rows, moments = [0.5] * 300_000, []
    lines = LoopLines()
    lines.begin()
    for _ in range(2):
        moments.append(ClockReading(time.perf_counter(), 0.0, 0.0))
        torch.tensor(rows)  # HERE
        sum(range(1000))
    lines.end()
    moments.append(ClockReading(time.perf_counter(), 0.0, 0.0))
    (place, _), *_ = lines.within([Interval(moments[0], moments[-1])]).most_common()
    assert "# HERE" in Path(__file__).read_text(encoding="utf-8").splitlines()[int(place.rpartition(":")[2]) - 1]
    assert sys.gettrace() is None


@pytest.mark.parametrize(("function", "waits_there"), [
    (threading.Condition.wait, True), (queue.Queue.get, True), (threading.Event.is_set, False), (counts, False),
])  # fmt: skip
def test_a_thread_that_asks_whether_an_event_is_set_is_at_work(function: Callable[..., Any], waits_there: bool) -> None:
    frame: Any = SimpleNamespace(f_code=function.__code__)
    assert _is_waiting(frame) is waits_there


def test_waiting_for_a_thread_that_waits_too_is_not() -> None:
    def both(waiting: FrameType) -> tuple[str, str]:
        return while_running(waits, lambda other: data_stage_of(waiting, [other]))

    assert while_running(waits, both)[0] == "read"


@pytest.mark.parametrize(("work", "part"), [(counts, 0.05), (counts, 0.5), (waits, 0.5)])
def test_a_thread_that_computes_beside_the_loop_has_a_line(
    work: Callable[..., Any], part: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`part` of a core, whatever this machine has left for it; no line where it waits for the loop."""
    ended = threading.Event()
    thread = threading.Thread(target=work, args=(ended,), daemon=True)
    thread.start()
    computed = lambda: {thread.ident: part * time.perf_counter(), threading.get_ident(): time.perf_counter()}  # noqa: E731
    monkeypatch.setattr("ironlaw.observe.sampler._computed_seconds", computed)
    partition = Partition()
    partition.start()
    with StackSampler(partition) as sampler:
        while not sampler._other_threads:
            time.sleep(0.01)
    ended.set()
    found = sampler.busy_thread()
    assert (found is None) == (part < 0.1)
    assert found is None or (found["place"] or "").rpartition(":")[0] == (__file__ if work is counts else "")


def test_tokenising_is_known_by_its_names() -> None:
    assert while_running(tokenizes, data_stage_of)[0] == "tokenise"
    assert while_running(counts, data_stage_of)[0] == "read"


def test_a_logger_on_the_stack_is_logging() -> None:
    found: queue.Queue[str] = queue.Queue()

    class Handler(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            found.put(activity_of(sys._getframe()))

    logger = logging.getLogger("test_sampler")
    logger.addHandler(Handler())
    logger.warning("a line")
    assert (found.get_nowait(), activity_of(sys._getframe())) == ("logs", "")


@pytest.mark.parametrize("collecting", [True, False])
def test_nothing_is_collected_while_stacks_are_read(collecting: bool) -> None:
    """A collection within `f_back` may let the other thread run: CPython 3.11 crashes when its frame has ended."""
    (gc.enable if collecting else gc.disable)()
    try:
        with stacks() as frames:
            assert threading.get_ident() in frames and not gc.isenabled()
        assert gc.isenabled() == collecting
    finally:
        gc.enable()


def test_stacks_of_other_threads_are_read_in_one_way() -> None:
    files = [f for f in Path(ironlaw.__file__).parent.rglob("*.py") if "_current_frames" in f.read_text("utf-8")]
    assert [file.name for file in files] == ["user_code.py"]


def test_looks_at_gaps_are_told_from_passes_and_all_lines_of_an_update_are_kept() -> None:
    now = ClockReading(0.0, 0.0, 0.0)
    first, second, update = (Interval(now, now, phase) for phase in (Phase.FORWARD, Phase.FORWARD, Phase.OPTIMIZER))
    sampler, call = StackSampler(Partition()), "train.py:9"
    sampler._samples = [
        *[(first, ["mask.py:3", call], call, "")] * 2,
        (second, ["model.py:5", call], call, "module"),
        *[(update, [f"own.py:{n}"], "train.py:12", "") for n in range(5)],
        *[(Interval(now, now), ["train.py:14"], "train.py:14", what) for what in ("module", "module", "logs", "")],
    ]
    assert (sampler.fraction("module"), sampler.fraction("logs")) == (0.5, 0.25)  # of gaps: passes are none
    assert sum(share for _, share in sampler.lines()["optimizer"]) == pytest.approx(1.0)


@pytest.mark.parametrize("same", [True, False])
def test_a_module_that_is_given_the_same_tensors_again_has_a_line(same: bool) -> None:
    """Prompts whose embeddings do not change, and not a teacher of every batch."""
    modules, given = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.ReLU()), torch.randn(2, 4)
    partition, now = Partition(), ClockReading(0.0, 0.0, 0.0)
    with StackSampler(partition) as sampler, torch.no_grad():
        for _ in range(3):
            modules(given.clone())
            modules(given if same else given.clone())
            modules(given if same else given.clone())  # HERE
    sampler._samples = [(Interval(now, now), [line], line, "module") for line in sampler._again for _ in range(4)]
    again = sampler.module_again()
    assert (again is not None) is same
    if again is not None:
        number = int(again["place"].rpartition(":")[2])
        assert "# HERE" in Path(__file__).read_text(encoding="utf-8").splitlines()[number - 1]
        assert again["part"] == pytest.approx(1 / 3)  # of three lines alike


@pytest.mark.parametrize("grows", [True, False])
def test_a_line_that_takes_more_in_every_step_makes_steps_grow(grows: bool) -> None:
    growth, seconds = StepGrowth(), []  # of an idle machine; lines are sampled on this one
    for number in range(1, 17):
        last = 2e-4 * number**2 if grows else 0.02
        time.sleep(0.02)
        time.sleep(last)  # HERE
        seconds.append(0.02 + last)
        growth.step_ended(number, may_look=True)
    growth.end()
    found = growth.facts(seconds)
    assert (found is not None) is grows
    if found is not None:
        file, _, number = found["place"].rpartition(":")
        assert "# HERE" in Path(file).read_text(encoding="utf-8").splitlines()[int(number) - 1] and found["part"] > 0.3
