"""One order for every rank, worker and resumption: packed, mixed, streamed, in threads or processes."""

from __future__ import annotations

import json
import multiprocessing
import random
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ironlaw.data.batch import Batch
from ironlaw.data.batches import Batches, TokenWindows
from ironlaw.data.config import DataConfig
from ironlaw.data.dataset import Dataset
from ironlaw.data.loader import BatchSource, Loader, Prefetcher
from ironlaw.data.mixture import BLOCK, Mixture, compute_places
from ironlaw.data.prepare import prepare
from ironlaw.errors import UserError

VOCAB, SEQUENCE, GLOBAL = 300, 16, 12


def write_texts(folder: Path, word: str, number: int) -> Path:
    chance = random.Random(word)
    folder.mkdir()
    lines = [
        json.dumps({"text": " ".join(f"{word}{chance.randrange(30)}" for _ in range(chance.randrange(1, 60)))})
        for _ in range(number)
    ]
    (folder / "a.jsonl").write_text("\n".join(lines))
    return folder


@pytest.fixture(scope="module")
def places_on_disk(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("loader")
    return {
        "big": write_texts(root / "big", "abc", 300),
        "small": write_texts(root / "small", "xyz", 80),
        "cache": root / "cache",
    }


def config_of(kind: str, where: dict[str, Path], **more: Any) -> DataConfig:
    sources = [
        {"path": str(where["big"]), "weight": 3.0},
        {"path": str(where["small"]), "weight": 1.0},
    ]
    kinds: dict[str, dict[str, Any]] = {
        "concat": {"path": str(where["big"])},
        "masked": {"path": str(where["big"]), "mask_documents": True},
        "best_fit": {"path": str(where["big"]), "packing": "best_fit"},
        "mixture": {"sources": sources},
        "mixed_best_fit": {"sources": sources, "packing": "best_fit"},
        "stream": {"path": str(where["big"]), "streaming": True, "mask_documents": True},
        "mock": {"mock": True, "packing": "best_fit"},
    }
    settings = {"validation_fraction": 0.1, "cache": str(where["cache"])} | kinds[kind] | more
    return DataConfig.model_validate(settings)


KINDS = ["concat", "masked", "best_fit", "mixture", "mixed_best_fit", "stream", "mock"]


def source_of(kind: str, where: dict[str, Path], rank: int = 0, world: int = 1, **more: Any) -> BatchSource:
    config = config_of(kind, where, **more)
    return Loader(prepare(config, VOCAB), config, SEQUENCE).training(GLOBAL, 5, rank, world)


def arrays(batch: Batch[np.ndarray]) -> list[np.ndarray]:
    return [array for array in (batch.inputs, batch.targets, batch.documents) if array is not None]


def same(one: Batch[np.ndarray], other: Batch[np.ndarray]) -> None:
    assert (one.documents is None) == (other.documents is None)
    for a, b in zip(arrays(one), arrays(other), strict=True):
        np.testing.assert_array_equal(a, b)


@pytest.fixture(autouse=True)
def _small(monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> None:
    if "processes" not in request.node.name:  # which would not know
        monkeypatch.setattr("ironlaw.data.prepare._MOCK_TOKENS", 2**17)
    monkeypatch.setattr("ironlaw.data.stream.BLOCK_BYTES", 8000)


@pytest.mark.parametrize("kind", KINDS)
def test_any_rank_count_sees_the_same_global_order(kind: str, places_on_disk: dict[str, Path]) -> None:
    whole = source_of(kind, places_on_disk)
    steps = (0, 1, 2, 3, 30, 60)
    expected = [whole.batch(step) for step in steps]
    assert all((batch.documents is not None) == (kind not in ("concat", "mixture")) for batch in expected)
    for world in (2, 3, 12):
        ranks = [source_of(kind, places_on_disk, rank, world) for rank in range(world)]
        for step, batch in zip(steps, expected, strict=True):
            parts = [arrays(rank.batch(step)) for rank in ranks]
            for position, array in enumerate(arrays(batch)):
                joined = np.concatenate([part[position] for part in parts])
                np.testing.assert_array_equal(joined, array, err_msg=f"{world} ranks, step {step}")


@pytest.mark.parametrize("kind", KINDS)
def test_resumed_with_another_number_of_ranks_and_workers(kind: str, places_on_disk: dict[str, Path]) -> None:
    """Seven steps on one rank; then three ranks go on, with other workers: what an uninterrupted run would see."""
    whole = source_of(kind, places_on_disk)
    with Prefetcher(whole, range(12)) as uninterrupted:
        expected = list(uninterrupted)
    saved = 7
    with Prefetcher(source_of(kind, places_on_disk), range(12), depth=2) as first:
        seen = [next(first) for _ in range(saved)]
    for one, other in zip(seen, expected, strict=False):
        same(one, other)
    workers = {"workers": 1} if kind == "stream" else {"prefetch": 1}
    ranks = [Prefetcher(source_of(kind, places_on_disk, rank, 3, **workers), range(saved, 12)) for rank in range(3)]
    try:
        for step in range(saved, 12):
            parts = [arrays(next(rank)) for rank in ranks]
            for position, array in enumerate(arrays(expected[step])):
                np.testing.assert_array_equal(np.concatenate([part[position] for part in parts]), array)
    finally:
        for rank in ranks:
            rank.close()


@pytest.mark.parametrize("kind", ["masked", "mixed_best_fit", "mock"])
def test_processes_make_the_same_batches(kind: str, places_on_disk: dict[str, Path]) -> None:
    expected = source_of(kind, places_on_disk)
    with Prefetcher(source_of(kind, places_on_disk, loader_processes=2), range(3, 20)) as ahead:
        for step in range(3, 20):
            same(next(ahead), expected.batch(step))
        assert ahead.facts()["stage_tokens_per_second"].keys() >= {"read", "pack"}
        with pytest.raises(StopIteration):
            next(ahead)


def test_a_loader_process_that_dies_is_one_line(places_on_disk: dict[str, Path]) -> None:
    batches: Any = source_of("concat", places_on_disk, loader_processes=1)
    batches.batch(0)
    (process,) = multiprocessing.active_children()
    process.kill()
    with pytest.raises(UserError, match="loader_processes ended by itself") as caught:
        for step in range(1, 100):
            batches.batch(step)
    assert "\n" not in str(caught.value)
    batches.close()


def test_workers_and_prefetch_are_not_part_of_the_samples(places_on_disk: dict[str, Path]) -> None:
    one = config_of("concat", places_on_disk, workers=0, loader_processes=0, prefetch=1, cache="a")
    other = config_of("concat", places_on_disk, workers=2, loader_processes=2, prefetch=9, cache="b", pin_memory=False)
    assert one.samples_key() == other.samples_key()
    assert one.samples_key() != config_of("best_fit", places_on_disk).samples_key()


@pytest.mark.parametrize("kind", KINDS)
def test_stages_are_timed(kind: str, places_on_disk: dict[str, Path]) -> None:
    with Prefetcher(source_of(kind, places_on_disk), range(20)) as ahead:
        for _ in ahead:
            pass
        facts = ahead.facts()
    assert set(facts["stage_tokens_per_second"]) == {"read", "pack", "copy"} | (
        {"tokenise"} if kind == "stream" else set()
    )
    slowest = facts["stage_tokens_per_second"][facts["slowest_stage"]]
    assert slowest == min(facts["stage_tokens_per_second"].values())
    # All stages together cannot be quicker than the slowest.
    assert kind == "stream" or 0 < facts["tokens_per_second"] <= slowest


@pytest.mark.parametrize("kind", KINDS)
def test_validation_says_documents_as_training_does(kind: str, places_on_disk: dict[str, Path]) -> None:
    config = config_of(kind, places_on_disk)
    loader = Loader(prepare(config, VOCAB), config, SEQUENCE)
    batches = list(loader.validation(4, 12))
    assert batches and len(batches) <= 3
    assert all((batch.documents is not None) == config.masks_documents for batch in batches)
    for one, other in zip(batches, loader.validation(4, 12), strict=True):
        same(one, other)


def test_facts_report_what_packing_loses(places_on_disk: dict[str, Path]) -> None:
    facts = {}
    for kind in ("concat", "best_fit", "mixed_best_fit"):
        config = config_of(kind, places_on_disk)
        loader = Loader(prepare(config, VOCAB), config, 128)
        loader.training(2, 0)
        facts[kind] = loader.facts()
        json.dumps(facts[kind])
    assert facts["concat"]["padded_fraction"] == 0 < facts["concat"]["cropped_fraction"] < 0.1
    assert 0 <= facts["best_fit"]["padded_fraction"] < 0.1 and facts["best_fit"]["cropped_fraction"] == 0
    assert facts["best_fit"]["documents_cut_fraction"] < facts["concat"]["documents_cut_fraction"]
    assert facts["mixed_best_fit"]["shares"] == [0.75, 0.25]


# -- mixtures --------------------------------------------------------------------------------------------------------


@given(st.lists(st.floats(0.2, 100), min_size=1, max_size=12))
@settings(max_examples=200, deadline=None)
def test_places_fill_a_block_by_weight(weights: list[float]) -> None:
    given_places = compute_places(weights)
    assert sum(given_places) == BLOCK and min(given_places) >= 1
    for number, weight in zip(given_places, weights, strict=True):
        assert abs(number - BLOCK * weight / sum(weights)) <= 1 + len(weights)


def test_a_weight_of_almost_nothing_is_refused() -> None:
    with pytest.raises(UserError, match="less than 1 part"):
        compute_places([1.0, 1e-6])


def test_a_mixture_takes_every_source_in_its_own_order_by_weight() -> None:
    tokens = [np.arange(10_000 * i, 10_000 * i + size) for i, size in ((1, 4001), (2, 801))]
    parts = [TokenWindows(array, 8, seed, 1) for seed, array in enumerate(tokens)]
    mixture = Mixture(parts, [0.9, 0.1], seed=7)
    batches = Batches(mixture, 64)
    firsts = np.concatenate([batches.batch(step).inputs[:, 0] for step in range(2 * BLOCK // 64)])
    for start in (0, BLOCK):
        block = firsts[start : start + BLOCK]
        assert (block < 20_000).sum() == compute_places([0.9, 0.1])[0]  # exactly, in every block
    # Early in a block the shares are right already, and the sources alternate.
    early = firsts[:512] < 20_000
    assert 0.83 < early.mean() < 0.97
    # Each source visits all of its windows before any a second time.
    own = firsts[firsts < 20_000]
    assert len(set(own[: parts[0].per_epoch].tolist())) >= parts[0].per_epoch - BLOCK * 0.1
    one_epoch = Batches(parts[0], 1)
    keys = {int(one_epoch.keys(step)[0]) for step in range(len(own))}
    assert {int(value) - 10_000 for value in own} <= keys


def test_mixture_of_sources_that_share_a_tokenizer(places_on_disk: dict[str, Path]) -> None:
    dataset = prepare(config_of("mixture", places_on_disk), VOCAB)
    assert [part.name for part in dataset.sources] == [str(places_on_disk["big"]), str(places_on_disk["small"])]
    first, second = (part.tokenizer_path for part in dataset.sources)
    assert first is not None and second is not None and first.read_bytes() == second.read_bytes()
    assert len(dataset.train.tokens) == sum(len(part.train.tokens) for part in dataset.sources)
    assert dataset.unigram_loss is not None and dataset.validation.bytes > 0
    assert prepare(config_of("mixture", places_on_disk), VOCAB).reused


# -- streams ---------------------------------------------------------------------------------------------------------


def samples_of(source: BatchSource, steps: int) -> list[bytes]:
    return [row.tobytes() for step in range(steps) for row in source.batch(step).inputs]


def test_a_stream_visits_the_training_text_once_per_epoch(places_on_disk: dict[str, Path]) -> None:
    prepared: Dataset = prepare(config_of("concat", places_on_disk), VOCAB)
    config = config_of("stream", places_on_disk)
    dataset = prepare(config, VOCAB)
    assert dataset.stream is not None
    loader = Loader(dataset, config, SEQUENCE)
    source = loader.training(GLOBAL, 5)
    tokens = len(prepared.train.tokens)
    steps = int(tokens / SEQUENCE / GLOBAL * 0.95)
    seen = samples_of(source, steps)
    assert len(set(seen)) > 0.99 * len(seen)
    assert loader.facts()["cropped_fraction"] < 0.02
    # The same text: nothing but what preparing the source gives, no held-out document among it.
    joined = np.asarray(prepared.train.tokens).astype(np.int64).tobytes()
    assert sum(row in joined for row in seen) == len(seen)


def test_a_stream_resumes_from_its_notes_and_without_them(places_on_disk: dict[str, Path], tmp_path: Path) -> None:
    cache = {"cache": str(tmp_path)}
    straight = source_of("stream", places_on_disk, **cache)
    expected = [straight.batch(step) for step in range(60)]
    notes = list(tmp_path.glob("stream-*/positions-*.jsonl"))
    assert len(notes) == 1 and len(notes[0].read_text().splitlines()) > 3
    quick: Any = source_of("stream", places_on_disk, **cache)
    same(quick.batch(50), expected[50])
    with_notes = quick.seconds["read"] > 0 and quick._kept[0].start.samples
    assert with_notes, "it began in the middle"
    same(quick.batch(10), expected[10])  # and backwards
    with notes[0].open("a") as file:
        file.write("[12, 0")  # half a line of a process that was killed
    same(source_of("stream", places_on_disk, **cache).batch(59), expected[59])
    whole = notes[0].read_text()
    # As if bytes of the disk had changed.
    notes[0].write_text(re.sub(r'"samples": (\d+)', lambda found: f'"samples": {int(found[1]) - 3}', whole))
    same(source_of("stream", places_on_disk, **cache).batch(59), expected[59])
    notes[0].unlink()
    same(source_of("stream", places_on_disk, **cache).batch(50), expected[50])


def test_a_stream_holds_out_what_preparation_holds_out(places_on_disk: dict[str, Path]) -> None:
    prepared = prepare(config_of("concat", places_on_disk), VOCAB)
    streamed = prepare(config_of("stream", places_on_disk), VOCAB)
    np.testing.assert_array_equal(streamed.validation.tokens, np.asarray(prepared.validation.tokens))


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"streaming": True, "packing": "best_fit"}, "best_fit"),
        ({"streaming": True, "loader_processes": 2}, "loader_processes"),
        ({"sources": [{"path": "a"}], "path": "b"}, "data.path and data.sources"),
        ({"streaming": True, "sources": [{"path": "a"}, {"path": "b"}]}, "one source"),
    ],
)
def test_settings_that_do_not_go_together(change: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        DataConfig.model_validate(change)
