"""Every kind of source gives its documents, all of them, once, and from anywhere; what is wrong is said in one line."""

from __future__ import annotations

import gzip
import json
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from ironlaw.data import corpus as corpora
from ironlaw.data import megatron, readers
from ironlaw.data import tokenizer as tokenizers
from ironlaw.data.config import DataConfig, SourceConfig
from ironlaw.data.prepare import prepare
from ironlaw.errors import UserError

TEXTS = [f"document {i}: " + "word é " * (1 + i * 7 % 50) for i in range(300)]


def jsonl(texts: list[str], field: str = "text") -> bytes:
    return "".join(json.dumps({"id": i, field: text}) + "\n" for i, text in enumerate(texts)).encode()


def write_plain(folder: Path, field: str) -> Path:
    (folder / "a.jsonl").write_bytes(jsonl(TEXTS, field))
    return folder / "a.jsonl"


def write_gzip(folder: Path, field: str) -> Path:
    # Two members behind one another, as `cat a.gz b.gz` makes them.
    content = jsonl(TEXTS, field)
    half = content.index(b"\n", len(content) // 2) + 1
    (folder / "a.jsonl.gz").write_bytes(gzip.compress(content[:half]) + gzip.compress(content[half:]))
    return folder / "a.jsonl.gz"


def write_zstandard(folder: Path, field: str) -> Path:
    zstandard = pytest.importorskip("zstandard")
    content = jsonl(TEXTS, field)
    half = content.index(b"\n", len(content) // 2) + 1
    frames = [zstandard.ZstdCompressor().compress(part) for part in (content[:half], content[half:])]
    (folder / "a.json.zst").write_bytes(b"".join(frames))
    return folder / "a.json.zst"


def write_parquet(folder: Path, field: str) -> Path:
    pyarrow = pytest.importorskip("pyarrow")
    from pyarrow import parquet

    table = pyarrow.table({"id": list(range(len(TEXTS))), field: TEXTS})
    parquet.write_table(table, folder / "a.parquet", row_group_size=70)
    return folder / "a.parquet"


def write_saved(folder: Path, field: str) -> Path:
    """What `datasets.Dataset.save_to_disk` leaves: Arrow streams and a state.json that names them."""
    pyarrow = pytest.importorskip("pyarrow")
    table = pyarrow.table({field: TEXTS, "score": [0.5] * len(TEXTS)})
    names = []
    for i, (first, last) in enumerate(((0, 130), (130, 300))):
        names.append(f"data-{i:05d}-of-00002.arrow")
        path = str(folder / names[-1])
        with pyarrow.OSFile(path, "wb") as sink, pyarrow.ipc.new_stream(sink, table.schema) as writer:
            writer.write_table(table.slice(first, last - first), max_chunksize=50)
    state = {"_data_files": [{"filename": name} for name in names], "_fingerprint": "0", "_split": "train"}
    (folder / "state.json").write_text(json.dumps(state))
    (folder / "dataset_info.json").write_text("{}")
    return folder


WRITERS = [write_plain, write_gzip, write_zstandard, write_parquet, write_saved]
Writer = Callable[[Path, str], Path]


@pytest.mark.parametrize("write", WRITERS)
def test_documents_come_once_and_from_anywhere(tmp_path: Path, write: Writer) -> None:
    corpus = corpora.find(SourceConfig(path=str(write(tmp_path, "body")), field="body"))
    documents = list(corpus.documents())
    assert [document.content for document in documents] == TEXTS
    done = [document.done_bytes for document in documents]
    assert done == sorted(done) and 0 < done[-1] <= corpus.bytes
    for i in (0, 1, 69, 70, 130, 298, 299):
        rest = [document.content for document in corpus.documents(documents[i].next)]
        assert rest == TEXTS[i + 1 :], f"after document {i}"


@pytest.mark.parametrize("write", WRITERS)
def test_samples_begin_at_documents(tmp_path: Path, write: Writer) -> None:
    corpus = corpora.find(SourceConfig(path=str(write(tmp_path, "text"))))
    for file in corpus.files:
        found = readers.find_positions(file.kind, file.path, 8)
        assert found[0] == 0 and len(found) == (1 if file.path.suffix in (".gz", ".zst") else 8)
        for spot in found:
            assert next(readers.read(file.kind, file.path, "text", spot)).content in TEXTS


@pytest.mark.parametrize("write", WRITERS)
def test_a_field_that_is_not_there_names_those_that_are(tmp_path: Path, write: Writer) -> None:
    corpus = corpora.find(SourceConfig(path=str(write(tmp_path, "body"))))
    with pytest.raises(UserError, match=r'no (field|column) "text".*data\.field.*body') as caught:
        list(corpus.documents())
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("write", WRITERS[3:])
def test_a_column_of_numbers_is_no_text(tmp_path: Path, write: Writer) -> None:
    field = "id" if write is write_parquet else "score"
    corpus = corpora.find(SourceConfig(path=str(write(tmp_path, "body")), field=field))
    with pytest.raises(UserError, match=r"not text: set data\.field to one of body"):
        list(corpus.documents())


def test_lines_without_text_are_counted(tmp_path: Path) -> None:
    lines = [
        '{"text": null}', '{"text": "good"}', "", '{"text": " "}', "{broken", '{"other": 1}', '{"text": 5}', "[]",
        '{"text": "half of a pair: \\ud83d"}',
    ]  # fmt: skip
    (tmp_path / "a.jsonl").write_text("\n".join(lines))
    documents = list(corpora.find(str(tmp_path)).documents())
    assert [d.content for d in documents if d.content] == ["good", "half of a pair: �"]
    reasons = [d.reason for d in documents if d.content is None]
    assert reasons == ["empty", "empty", "not JSON", *['without text in "text"'] * 3]


@pytest.mark.parametrize("write", WRITERS[1:])
def test_a_torn_file_is_one_line(tmp_path: Path, write: Writer) -> None:
    write(tmp_path, "text")
    damaged = max((file for file in tmp_path.iterdir() if file.suffix != ".json"), key=lambda file: file.stat().st_size)
    content = damaged.read_bytes()
    damaged.write_bytes(content[: len(content) // 3])
    with pytest.raises(UserError, match="is damaged") as caught:
        list(corpora.find(str(tmp_path)).documents())
    assert "\n" not in str(caught.value) and str(damaged) in str(caught.value)


def test_a_column_of_categories_is_text(tmp_path: Path) -> None:
    pyarrow = pytest.importorskip("pyarrow")
    parquet = pytest.importorskip("pyarrow.parquet")
    parquet.write_table(pyarrow.table({"text": pyarrow.array(TEXTS).dictionary_encode()}), tmp_path / "a.parquet")
    assert [document.content for document in corpora.find(str(tmp_path)).documents()] == TEXTS


@pytest.mark.parametrize("claims_text", [False, True])
@pytest.mark.parametrize("kind", ["parquet", "arrow"])
def test_bytes_that_are_not_text_are_refused(tmp_path: Path, kind: str, claims_text: bool) -> None:
    pyarrow = pytest.importorskip("pyarrow")
    from pyarrow import feather, parquet

    column = pyarrow.array([b"good", "größer".encode(), b"\xff\xfe", b"good"], pyarrow.binary())
    if claims_text:  # a writer that did not check
        column = pyarrow.StringArray.from_buffers(len(column), *column.buffers()[1:])
    write = parquet.write_table if kind == "parquet" else feather.write_feather
    write(pyarrow.table({"body": column}), tmp_path / f"a.{kind}")
    documents = corpora.find(SourceConfig(path=str(tmp_path), field="body")).documents()
    assert [next(documents).content for _ in range(2)] == ["good", "größer"]
    with pytest.raises(UserError, match=r'UTF-8.*column "body", row 3') as caught:
        list(documents)
    assert f"a.{kind}" in str(caught.value) and "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("settings", "told"),
    [
        ({"path": "rows.csv"}, 'data.format = "text"'),
        ({"path": "rows.json"}, "JSONL or Parquet"),
        ({"path": "rows.txt", "split": "train"}, "data.split"),
        ({"path": "nested.jsonl"}, "and no other"),
    ],
)
def test_what_would_be_learned_otherwise_than_meant_is_refused(
    tmp_path: Path, settings: dict[str, str], told: str
) -> None:
    for name, content in {
        "rows.csv": "text\na",
        "rows.json": '[{"text": "a"}]',
        "rows.txt": "a",
        "nested.jsonl": '{"text": {}}',
    }.items():
        (tmp_path / name).write_text(content)
    with pytest.raises(UserError, match=told):
        list(corpora.find(SourceConfig(**settings | {"path": str(tmp_path / settings["path"])})).documents())
    assert corpora.find(SourceConfig(path=str(tmp_path / "rows.csv"), format="text")).files


def test_what_is_no_jsonl_is_said(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text("plain text\nmore\n")
    with pytest.raises(UserError, match="is not JSONL"):
        list(corpora.find(str(tmp_path)).documents())


def test_folders_may_mix_text_and_records(tmp_path: Path) -> None:
    write_plain(tmp_path, "text")
    (tmp_path / "b.md").write_text("a page of prose")
    (tmp_path / "sub").mkdir()
    write_gzip(tmp_path / "sub", "text")
    contents = [document.content for document in corpora.find(str(tmp_path)).documents()]
    assert contents == [*TEXTS, "a page of prose", *TEXTS]


def test_a_dictionary_of_splits(tmp_path: Path) -> None:
    (tmp_path / "train").mkdir()
    write_saved(tmp_path / "train", "text")
    (tmp_path / "dataset_dict.json").write_text('{"splits": ["train", "test"]}')
    assert len(list(corpora.find(str(tmp_path)).documents())) == len(TEXTS)
    with pytest.raises(UserError, match=r'no split "valid": set data\.split to one of train, test'):
        corpora.find(SourceConfig(path=str(tmp_path), split="valid"))


@pytest.mark.parametrize("write", [write_parquet, write_zstandard])
def test_a_missing_extra_is_named(tmp_path: Path, write: Callable[[Path, str], Path]) -> None:
    write(tmp_path, "text")
    code = (
        "import sys; sys.modules['pyarrow'] = None\n"
        "from ironlaw.data import corpus\nfrom ironlaw.errors import UserError\n"
        "try: list(corpus.find(sys.argv[1]).documents())\n"
        "except UserError as error: print(error)"
    )
    done = subprocess.run([sys.executable, "-c", code, str(tmp_path)], capture_output=True, text=True, check=True)
    assert "needs pyarrow" in done.stdout and "pip install 'ironlaw[data]'" in done.stdout
    assert done.stdout.count("\n") == 1


# -- Megatron --------------------------------------------------------------------------------------------------------


def write_megatron(prefix: Path, end: int | None = 0) -> list[np.ndarray]:
    generator = np.random.default_rng(0)
    documents = []
    for _ in range(40):
        ids = generator.integers(1, 500, generator.integers(1, 200))
        documents.append(ids if end is None else np.append(ids, end))
    megatron.write_indexed(prefix, documents, np.dtype("<u2"))
    return documents


def test_megatron_is_read_as_it_was_written(tmp_path: Path) -> None:
    documents = write_megatron(tmp_path / "set")
    for path in (tmp_path / "set", tmp_path / "set.bin", tmp_path / "set.idx", tmp_path):
        corpus = corpora.find(str(path))
        found = [document.content for document in corpus.documents()]
        assert len(found) == 40 and corpus.tokenised
        for got, wanted in zip(found, documents, strict=True):
            np.testing.assert_array_equal(got, wanted)


def test_megatrons_layout_is_the_documented_one(tmp_path: Path) -> None:
    """By hand: two documents, the second of two sequences, ids of four bytes."""
    header = b"MMIDIDX\x00\x00" + (1).to_bytes(8, "little") + b"\x04" + (3).to_bytes(8, "little")
    header += (3).to_bytes(8, "little")
    lengths, pointers, table = np.array([2, 1, 3], "<i4"), np.array([0, 8, 12], "<i8"), np.array([0, 1, 3], "<i8")
    (tmp_path / "m.idx").write_bytes(header + lengths.tobytes() + pointers.tobytes() + table.tobytes())
    (tmp_path / "m.bin").write_bytes(np.array([70000, 1, 2, 3, 4, 5], "<i4").tobytes())
    indexed = megatron.open_indexed(tmp_path / "m")
    assert [indexed.document(i).tolist() for i in range(indexed.documents)] == [[70000, 1], [2, 3, 4, 5]]


def test_megatron_tokens_are_trained_on_as_they_are(tmp_path: Path) -> None:
    documents = write_megatron(tmp_path / "set")
    config = DataConfig(path=str(tmp_path / "set"), validation_fraction=0.2, cache=str(tmp_path / "cache"))
    dataset = prepare(config, 512)
    assert dataset.end_of_text == 0 and dataset.tokenizer_path is None and dataset.unigram_loss is not None
    both = [np.asarray(part) for part in (dataset.train.tokens, dataset.validation.tokens)]
    assert sum(map(len, both)) == sum(map(len, documents))
    kept = [both[0][a:b] for a, b in zip(dataset.train.bounds, dataset.train.bounds[1:], strict=False)]
    wanted = {ids.tobytes() for ids in documents}
    assert all(ids.astype(np.int64).tobytes() in wanted for ids in kept)
    with pytest.raises(UserError, match=r"set model\.vocab = 500"):
        prepare(config, 400)


def test_megatron_without_a_common_end_needs_its_tokenizer(tmp_path: Path) -> None:
    write_megatron(tmp_path / "set", end=None)
    with pytest.raises(UserError, match=r"data\.tokenizer"):
        prepare(DataConfig(path=str(tmp_path / "set"), cache=str(tmp_path / "cache")), 512)


def change_table(index: Path, place: int, value: int) -> None:
    """Change an entry of the document table, which ends an index of 40 documents."""
    table = np.frombuffer(index.read_bytes()[-41 * 8 :], "<i8").copy()
    table[place] = value
    index.write_bytes(index.read_bytes()[: -41 * 8] + table.tobytes())


@pytest.mark.parametrize("given", [False, True])
@pytest.mark.parametrize("ids", [[3, -7], [3, 2**16 + 3]])
def test_ids_that_the_tokenizer_cannot_have_made_are_refused(tmp_path: Path, ids: list[int], given: bool) -> None:
    """In a file of 16 bits they would be others."""
    tokenizer = tokenizers.train(TEXTS, 300, tmp_path / "tokenizer.json")
    documents = [np.array([*more, tokenizer.end_of_text]) for more in ([1, 2], [2, 3], ids)]
    megatron.write_indexed(tmp_path / "set", documents, np.dtype("<i4"))
    own = {"tokenizer": str(tokenizer.path)} if given else {}
    with pytest.raises(UserError, match=r"holds token -7|holds token 65,53[89]"):
        prepare(DataConfig(path=str(tmp_path / "set"), cache=str(tmp_path / "cache"), **own), 400)


@pytest.mark.parametrize(
    ("damage", "words"),
    [
        (lambda folder: (folder / "set.bin").unlink(), "is missing"),
        (lambda folder: (folder / "set.idx").write_bytes(b"nonsense" * 9), "not a Megatron index"),
        (lambda folder: (folder / "set.idx").write_bytes((folder / "set.idx").read_bytes()[:-9]), "instead of"),
        (lambda folder: (folder / "set.bin").write_bytes(b"\0\0"), "its index says"),
        (lambda folder: (folder / "set.bin").write_bytes(b"\0\0\0"), "its index says"),
        (lambda folder: change_table(folder / "set.idx", 0, -5), "document table"),
        (lambda folder: change_table(folder / "set.idx", 0, 1), "document table"),
        (lambda folder: change_table(folder / "set.idx", 40, 39), "document table"),
    ],
)
def test_a_damaged_megatron_set_is_one_line(tmp_path: Path, damage: Callable[[Path], Any], words: str) -> None:
    write_megatron(tmp_path / "set")
    damage(tmp_path)
    with pytest.raises(UserError, match=words) as caught:
        megatron.open_indexed(tmp_path / "set")
    assert "\n" not in str(caught.value)


# -- through preparation ---------------------------------------------------------------------------------------------


def test_every_kind_gives_the_same_tokens(tmp_path: Path) -> None:
    found = []
    for write in WRITERS:
        folder = tmp_path / write.__name__
        folder.mkdir()
        config = DataConfig(path=str(write(folder, "text")), validation_fraction=0.1, cache=str(tmp_path / "cache"))
        dataset = prepare(config, 300)
        assert dataset.validation.documents > 5
        found.append([np.asarray(dataset.train.tokens).tolist(), np.asarray(dataset.validation.tokens).tolist()])
        assert dataset.train.bytes + dataset.validation.bytes == sum(len(text.encode()) for text in TEXTS)
    # The tokenizer learns from the same text, in another order at most.
    assert all(tokens == found[0] for tokens in found[1:])


def test_skipped_records_are_counted_once_also_when_resumed(tmp_path: Path) -> None:
    lines = [json.dumps({"text": f"line {i} " * 30}) if i % 3 else "{" for i in range(1, 300)]
    (tmp_path / "a.jsonl").write_text("\n".join(lines))
    config = DataConfig(path=str(tmp_path), cache=str(tmp_path / ".c"), shard_tokens=1024)
    dataset = prepare(config, 300)
    assert dataset.shards > 3
    assert dataset.skipped == {"not JSON": 99}


def test_an_arrow_stream_that_was_cut_between_two_batches_is_damaged(tmp_path: Path) -> None:
    pyarrow = pytest.importorskip("pyarrow")
    table, places = pyarrow.table({"text": TEXTS}), []
    path = str(tmp_path / "a.arrow")
    with pyarrow.OSFile(path, "wb") as sink, pyarrow.ipc.new_stream(sink, table.schema) as writer:
        for batch in table.to_batches(max_chunksize=10):
            writer.write_batch(batch)
            places.append(sink.tell())
    (tmp_path / "a.arrow").write_bytes((tmp_path / "a.arrow").read_bytes()[: places[1]])
    with pytest.raises(UserError, match=r"is damaged .it ends before"):
        prepare(DataConfig(path=str(tmp_path), cache=str(tmp_path / ".c")), 300)


def test_bits_per_byte_need_the_bytes_of_all_tokens(tmp_path: Path) -> None:
    """A mixture with a source of tokens, whose text is not known, has none."""
    tokenizer = tokenizers.train(TEXTS, 300, tmp_path / "tokenizer.json")
    (tmp_path / "a.jsonl").write_text("\n".join(json.dumps({"text": text}) for text in TEXTS))
    megatron.write_indexed(tmp_path / "set", [np.array([i, 1, 0]) for i in range(40)], np.dtype("<u2"))
    own: dict[str, Any] = {
        "tokenizer": str(tokenizer.path),
        "cache": str(tmp_path / "cache"),
        "validation_fraction": 0.2,
    }
    text = {"path": str(tmp_path / "a.jsonl")}
    assert prepare(DataConfig(sources=(text, text), **own), 300).bits_per_byte(3.0) is not None
    assert prepare(DataConfig(sources=(text, {"path": str(tmp_path / "set")}), **own), 300).bits_per_byte(3.0) is None


@pytest.mark.parametrize(
    ("shards", "missing"),
    [
        ("train-00000-of-00003.jsonl train-00002-of-00003.jsonl", "train-00001-of-00003.jsonl"),
        ("c4.00000-of-01024.json.gz", "c4.00001-of-01024.json.gz"),
        ("x_1_of_3.jsonl x_3_of_3.jsonl", "x_2_of_3.jsonl"),
        ("train-0-of-2-ab12.jsonl", "train-1-of-2-ab12.jsonl"),
        ("train-0-of-3-ab12.jsonl train-2-of-3-cd34.jsonl", "train-1-of-3*.jsonl"),
        ("train-0-of-2-ab12.jsonl train-1-of-2-cd34.jsonl", None),  # each with its own digest
        ("x_1_of_2.jsonl x_2_of_2.jsonl", None),
    ],
)
def test_a_missing_shard_is_named(tmp_path: Path, shards: str, missing: str | None) -> None:
    (tmp_path / "part").mkdir()
    for name in shards.split():
        (tmp_path / "part" / name).write_text('{"text": "some text"}\n')
    if missing is None:
        assert len(corpora.find(SourceConfig(path=str(tmp_path))).files) == 2
        return
    for dangling in (False, True):  # as a cache whose content is gone
        if dangling:
            (tmp_path / "part" / missing.replace("*", "")).symlink_to("nowhere")
        with pytest.raises(UserError, match=rf"shard .*part/{re.escape(missing)} .* is missing") as caught:
            corpora.find(SourceConfig(path=str(tmp_path)))
        assert "\n" not in str(caught.value)


def test_a_missing_file_of_a_saved_set_is_named(tmp_path: Path) -> None:
    write_saved(tmp_path, "text")
    (tmp_path / "data-00001-of-00002.arrow").unlink()
    with pytest.raises(UserError, match=r"shard .*data-00001-of-00002.arrow .* is missing"):
        corpora.find(SourceConfig(path=str(tmp_path)))


def test_an_empty_shard_of_rows_is_damaged(tmp_path: Path) -> None:
    (tmp_path / "train-00000-of-00001.parquet").touch()
    with pytest.raises(UserError, match=r"train-00000-of-00001.parquet is damaged"):
        list(corpora.find(SourceConfig(path=str(tmp_path))).documents())
