"""The order of batches: every window once per epoch, the same for any ranks, known from the step alone."""

from __future__ import annotations

import itertools
import threading
import time
from collections.abc import Iterator

import numpy as np
import pytest

from ironlaw.data.batch import Batch
from ironlaw.data.batches import Batches, TokenWindows, check_fills_batch, evaluation_batches
from ironlaw.data.loader import Prefetcher
from ironlaw.data.order import permuted
from ironlaw.errors import UserError

TOKENS = np.arange(1003, dtype=np.uint16)


def held_out(tokens: np.ndarray, sequence: int, rows: int, limit: int | None = None) -> Iterator[Batch[np.ndarray]]:
    return evaluation_batches(TokenWindows(tokens, sequence, 0, 0), rows, limit, documents=False)


def windows_of(
    tokens: np.ndarray, sequence: int, sequences_per_batch: int, seed: int, rank: int = 0, world: int = 1
) -> Batches:
    check_fills_batch(tokens, sequence, sequences_per_batch)
    return Batches(TokenWindows(tokens, sequence, seed, sequences_per_batch), sequences_per_batch, rank, world)


@pytest.mark.parametrize("size", [1, 2, 3, 5, 16, 17, 1000, 4097])
@pytest.mark.parametrize("key", [0, 1, 2**63])
def test_permuted_is_a_permutation(size: int, key: int) -> None:
    result = permuted(np.arange(size), size, key)
    assert sorted(result.tolist()) == list(range(size))


def test_permutations_look_random_and_differ() -> None:
    size = 10_000
    first, second = (permuted(np.arange(size), size, key) for key in (7, 8))
    # Of a random permutation one element stays in place on average, and neighbours are not correlated.
    assert (first == np.arange(size)).sum() < 10 and (first == second).sum() < 10
    assert abs(np.corrcoef(first[:-1], first[1:])[0, 1]) < 0.05
    assert abs(np.corrcoef(first, np.arange(size))[0, 1]) < 0.05


def test_the_order_is_pinned() -> None:
    # Runs resume across releases: this order must never change.
    assert permuted(np.arange(6), 10, 3).tolist() == [5, 7, 4, 1, 9, 0]
    assert windows_of(TOKENS, 8, 4, seed=5).keys(2).tolist() == [136, 912, 840, 344]


def test_targets_are_one_ahead_and_int64() -> None:
    batches = windows_of(TOKENS, sequence=8, sequences_per_batch=4, seed=0)
    batch = batches.batch(3)
    inputs, targets = batch.inputs, batch.targets
    assert batch.documents is None
    assert inputs.shape == targets.shape == (4, 8)
    assert inputs.dtype == targets.dtype == np.int64
    np.testing.assert_array_equal(inputs + 1, targets)
    assert inputs[:, 0].tolist() == batches.keys(3).tolist()


def test_each_epoch_covers_each_window_once_in_another_order() -> None:
    batches = windows_of(TOKENS, sequence=10, sequences_per_batch=9, seed=1)
    n = batches.samples.per_epoch
    assert n == 99
    orders = []
    starts = np.concatenate([batches.keys(step) for step in range(n * 3 // 9)])
    for epoch in range(3):
        here = starts[epoch * n : (epoch + 1) * n]
        assert sorted(here.tolist()) == [batches.samples.offset(epoch) + 10 * i for i in range(n)]
        orders.append(((here - batches.samples.offset(epoch)) // 10).tolist())
    assert len({tuple(order) for order in orders}) == 3
    assert len({batches.samples.offset(epoch) for epoch in range(20)}) > 5
    assert all(batches.samples.offset(e) >= 0 and batches.samples.offset(e) + n * 10 < len(TOKENS) for e in range(200))


def test_batches_run_on_across_epochs() -> None:
    batches = windows_of(TOKENS, sequence=10, sequences_per_batch=7, seed=1)
    n = batches.samples.per_epoch
    starts = np.concatenate([batches.keys(step) for step in range(2 * n // 7 + 1)])
    for epoch in range(2):
        assert len(set(starts[epoch * n : (epoch + 1) * n].tolist())) == n


@pytest.mark.parametrize("ranks", [1, 2, 3, 6])
def test_ranks_share_the_global_batch(ranks: int) -> None:
    whole = windows_of(TOKENS, 8, 6, seed=2)
    parts = [windows_of(TOKENS, 8, 6, seed=2, rank=rank, world=ranks) for rank in range(ranks)]
    for step in (0, 1, 20, 1000):
        joined = np.concatenate([part.batch(step).inputs for part in parts])
        np.testing.assert_array_equal(joined, whole.batch(step).inputs)


def test_resumed_batches_are_the_same_and_seeds_differ() -> None:
    first, second = windows_of(TOKENS, 8, 4, seed=3), windows_of(TOKENS, 8, 4, seed=3)
    for step in range(50):
        first.batch(step)
    np.testing.assert_array_equal(first.batch(50).inputs, second.batch(50).inputs)
    assert windows_of(TOKENS, 8, 4, seed=4).keys(0).tolist() != first.keys(0).tolist()


def test_steps_in_any_order_are_the_same() -> None:
    # Windows are located many at a time: going back and jumping must not show it.
    batches = windows_of(TOKENS, 8, 6, seed=2, rank=1, world=2)
    for step in (5, 4, 170, 171, 500, 0, 341, 340):
        assert batches.keys(step).tolist() == windows_of(TOKENS, 8, 6, 2, 1, 2).keys(step).tolist()
        whole = windows_of(TOKENS, 8, 6, seed=2)
        assert batches.keys(step).tolist() == whole.keys(step)[3:].tolist()


def test_exactly_one_batch_is_enough() -> None:
    batches = windows_of(TOKENS[:33], sequence=8, sequences_per_batch=4, seed=0)
    assert sorted(batches.keys(0).tolist()) == [0, 8, 16, 24]


def test_wrong_sizes_are_one_line() -> None:
    for act, words in (
        (lambda: windows_of(TOKENS[:32], 8, 4, seed=0), "has 32 tokens .* needs 33: lower train.global_batch"),
        (lambda: next(held_out(TOKENS[:8], 8, 4)), "data.validation_fraction"),
    ):
        with pytest.raises(UserError, match=words) as caught:
            act()
        assert "\n" not in str(caught.value)


def test_evaluation_sees_each_window_once_and_spreads_a_limit() -> None:
    blocks = list(held_out(TOKENS, 10, 32))
    inputs = np.concatenate([block.inputs for block in blocks])
    assert inputs[:, 0].tolist() == list(range(0, 1000, 10)) and blocks[-1].inputs.shape == (4, 10)
    assert all((block.targets == block.inputs + 1).all() for block in blocks)
    limited = np.concatenate([block.inputs for block in held_out(TOKENS, 10, 3, limit=10)])
    assert limited[:, 0].tolist() == list(range(0, 1000, 100))


def test_prefetcher_gives_the_batches_in_order_and_resumes() -> None:
    batches = windows_of(TOKENS, 8, 4, seed=0)
    with Prefetcher(batches, range(10)) as prefetcher:
        seen = [next(prefetcher).inputs for _ in range(6)]
    with Prefetcher(batches, range(6, 10)) as prefetcher:
        seen += [batch.inputs for batch in prefetcher]
        assert prefetcher.tokens_per_second is not None
    for step, inputs in enumerate(seen):
        np.testing.assert_array_equal(inputs, batches.batch(step).inputs)
    assert len(seen) == 10


def test_prefetcher_measures_the_wait() -> None:
    def slow(batch: Batch[np.ndarray]) -> int:
        time.sleep(0.2)  # long beside what a busy machine may keep the reader from its wait
        return len(batch.inputs)

    began = time.perf_counter()
    with Prefetcher(windows_of(TOKENS, 8, 4, seed=0), range(3), apply=slow) as prefetcher:
        assert list(prefetcher) == [4, 4, 4]
        assert 0.2 < prefetcher.wait_seconds < time.perf_counter() - began
        assert prefetcher.tokens_per_second is not None and 0 < prefetcher.tokens_per_second < 5 * 4 * 8


def test_prefetcher_hands_over_exceptions_after_the_good_batches() -> None:
    def fail_at_third(batch: Batch[np.ndarray]) -> np.ndarray:
        calls.append(1)
        if len(calls) == 3:
            raise RuntimeError("disk on fire")
        return batch.inputs

    calls: list[int] = []
    with Prefetcher(windows_of(TOKENS, 8, 4, seed=0), itertools.count(), apply=fail_at_third) as prefetcher:
        next(prefetcher), next(prefetcher)
        with pytest.raises(RuntimeError, match="disk on fire"):
            next(prefetcher)


def test_prefetcher_closes_while_its_queue_is_full() -> None:
    before = threading.active_count()
    prefetcher = Prefetcher(windows_of(TOKENS, 8, 4, seed=0), itertools.count(), depth=2)
    next(prefetcher)
    time.sleep(0.02)
    prefetcher.close()
    prefetcher.close()
    assert threading.active_count() == before
    with pytest.raises(StopIteration):
        next(prefetcher)
