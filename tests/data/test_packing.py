"""Best-fit packing: nothing lost, nothing twice, nothing cut that fits, hardly any room left; and what a batch says."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ironlaw.data.batch import IGNORED
from ironlaw.data.batches import Batches, PackedRows, TokenWindows, evaluation_batches, number_documents
from ironlaw.data.packing import best_fit, concatenated
from ironlaw.data.shards import TokenSplit

END = 0
LENGTHS = st.lists(st.integers(1, 70), min_size=1, max_size=60)


def bounds_of(lengths: list[int]) -> np.ndarray:
    return np.concatenate([[0], np.cumsum(lengths)]).astype(np.int64)


def tokens_of(bounds: np.ndarray) -> np.ndarray:
    """Every token but the ends tells where it stands."""
    tokens = np.arange(1, bounds[-1] + 1, dtype=np.uint32)
    tokens[bounds[1:] - 1] = END
    return tokens


@settings(max_examples=200, deadline=None)
@given(LENGTHS, st.integers(1, 32))
def test_every_token_has_one_place_and_no_row_overflows(lengths: list[int], sequence: int) -> None:
    bounds = bounds_of(lengths)
    packed = best_fit(bounds, sequence)
    covered = np.concatenate([np.arange(s, s + n) for s, n in zip(packed.starts, packed.lengths, strict=True)])
    assert sorted(covered.tolist()) == list(range(bounds[-1]))
    used = [int(packed.lengths[a:b].sum()) for a, b in itertools.pairwise(packed.rows)]
    assert all(0 < n <= sequence for n in used)
    assert packed.documents_cut == sum(n > sequence for n in lengths)
    assert packed.report()["padded_fraction"] == pytest.approx(1 - sum(used) / (sequence * len(used)))
    whole = {(int(a), int(b - a)) for a, b in itertools.pairwise(bounds) if b - a <= sequence}
    assert whole <= set(zip(packed.starts.tolist(), packed.lengths.tolist(), strict=True))


@settings(max_examples=100, deadline=None)
@given(LENGTHS, st.integers(1, 32))
def test_rows_are_those_of_best_fit_decreasing_by_hand(lengths: list[int], sequence: int) -> None:
    pieces = sorted((min(sequence, n - i) for n in lengths for i in range(0, n, sequence)), reverse=True)
    rows: list[int] = []
    for piece in pieces:
        fitting = [room for room in rows if room >= piece]
        if fitting:
            rows[rows.index(min(fitting))] -= piece
        else:
            rows.append(sequence - piece)
    packed = best_fit(bounds_of(lengths), sequence)
    free = [sequence - int(packed.lengths[a:b].sum()) for a, b in itertools.pairwise(packed.rows)]
    assert sorted(free) == sorted(rows)


def test_text_like_lengths_leave_almost_no_room() -> None:
    lengths = 1 + np.random.default_rng(0).exponential(600, 20_000).astype(int)
    packed = best_fit(bounds_of(lengths.tolist()), 2048)
    assert packed.report()["padded_fraction"] < 0.001
    assert packed.documents_cut == int((lengths > 2048).sum())
    windows = concatenated(bounds_of(lengths.tolist()), 2048)
    assert windows["documents_cut_fraction"] > 5 * packed.documents_cut / packed.documents


@settings(max_examples=100, deadline=None)
@given(LENGTHS, st.integers(1, 32))
def test_packed_rows_hold_each_target_behind_its_input(lengths: list[int], sequence: int) -> None:
    bounds = bounds_of(lengths)
    tokens = tokens_of(bounds)
    rows = PackedRows(TokenSplit(tokens, bounds), best_fit(bounds, sequence), 0, END)
    seen: list[int] = []
    for batch in evaluation_batches(rows, 4, None, documents=True):
        assert batch.documents is not None
        for inputs, targets, documents in zip(batch.inputs, batch.targets, batch.documents, strict=True):
            assert documents[0] == 0 and set(np.diff(documents).tolist()) <= {0, 1}
            real = targets != IGNORED
            assert (np.diff(real.astype(int)) <= 0).all(), "padding is at the end"
            seen += targets[real].tolist()
            for number in range(int(documents[-1]) + 1):
                here = (documents == number) & real
                if not here.any():
                    continue
                first, rest = inputs[here][0], inputs[here][1:]
                # A document begins with the separator; a rest of one with the token before it.
                begin = int(targets[here][0]) if targets[here][0] != END else None
                assert first == END or (begin is not None and first == begin - 1) or begin is None
                np.testing.assert_array_equal(rest, targets[here][:-1])
                assert END not in targets[here][:-1], "two documents under one number"
    assert sorted(seen) == sorted(tokens.tolist())


@settings(max_examples=100, deadline=None)
@given(LENGTHS, st.integers(1, 20), st.integers(0, 30))
def test_documents_of_a_window(lengths: list[int], length: int, start: int) -> None:
    bounds = bounds_of(lengths)
    if start + length >= bounds[-1]:
        return
    owner = np.repeat(np.arange(len(lengths)), lengths)[start + 1 : start + length + 1]
    numbers = number_documents(bounds, start, length)
    assert numbers.dtype == np.int32 and numbers[0] == 0
    # The same document exactly where the targets' owners are the same.
    np.testing.assert_array_equal(np.diff(numbers) > 0, np.diff(owner) > 0)
    assert set(np.diff(numbers).tolist()) <= {0, 1}


def test_windows_say_their_documents_in_training_and_evaluation() -> None:
    bounds = bounds_of([5, 9, 3, 30, 2, 50])
    tokens = tokens_of(bounds)
    batches = Batches(TokenWindows(tokens, 8, 0, 2, bounds), 2, documents=True)
    evaluated = list(evaluation_batches(TokenWindows(tokens, 8, 0, 0, bounds), 3, None, documents=True))
    for batch in [*(batches.batch(step) for step in range(10)), *evaluated]:
        assert batch.documents is not None
        for inputs, documents in zip(batch.inputs, batch.documents, strict=True):
            # A new number where the input is the separator, but at the row's first position.
            np.testing.assert_array_equal(np.flatnonzero(np.diff(documents)) + 1, np.flatnonzero(inputs[1:] == END) + 1)


def test_packed_epochs_visit_each_row_once() -> None:
    bounds = bounds_of([7] * 50)
    rows = PackedRows(TokenSplit(tokens_of(bounds), bounds), best_fit(bounds, 16), 3, END)
    assert rows.per_epoch == 25
    batches = Batches(rows, 5, documents=True)
    keys = np.concatenate([batches.keys(step) for step in range(10)])
    assert sorted(keys[:25].tolist()) == sorted(keys[25:].tolist()) == list(range(25))
    assert keys[:25].tolist() != keys[25:].tolist()
