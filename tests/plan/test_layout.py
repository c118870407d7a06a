"""Layouts: how they are read, and which cannot run."""

import pytest

from ironlaw.errors import UserError
from ironlaw.model.config import ModelConfig
from ironlaw.workload.layout import Layout, parse_layout

LLAMA = ModelConfig.named("llama3-8b")


def test_reads_pairs_in_any_order_and_prints_what_differs_from_the_default():
    layout = parse_layout("micro_batch=2 dp=8, zero=3 recompute=selective sp=0")
    assert layout == Layout(dp=8, zero=3, micro_batch=2, recompute="selective")
    assert str(layout) == "dp=8 zero=3 micro_batch=2 recompute=selective"
    assert parse_layout(str(layout)) == layout


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("dp=8 micro_bach=2", "did you mean micro_batch"),
        ("dp", "no word key=value"),
        ("dp=two", "whole number"),
        ("tp=0", "at least 1"),
        ("zero=4", "zero is 0, 1, 2 or 3"),
        ("recompute=some", "none, selective, full"),
        ("schedule=interleaved", "virtual_stages=2"),
        ("schedule=fast", "1f1b, gpipe, zb, zbv, dualpipe"),
        ("sp=maybe", "sp is 0 or 1"),
        ("dp=8 dp=4", "given twice"),
    ],
)
def test_a_mistake_is_one_line_that_says_what_to_write(text, words):
    with pytest.raises(UserError, match=words) as error:
        parse_layout(text)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("layout", "words"),
    [
        ("dp=4 tp=2", "8 accelerators, the cluster has 16"),
        ("dp=1 tp=16 zero=0", None),  # 8 key/value heads are copied over 16 ranks
        ("tp=3", "heads"),
        ("dp=16 micro_batch=3", "not divisible by dp"),
        ("dp=16 sp=1", "sequence parallelism needs tp"),
        ("pp=16 virtual_stages=3", "fewer than pp 16 x virtual_stages 3"),
        ("dp=2 pp=8 zero=3", None),
        ("dp=16 zero=3 shard=8", None),
        ("dp=16 zero=3 shard=3", "cannot be grouped by shard = 3"),
        ("dp=16 shard=8", "needs zero=1, 2 or 3"),
        ("dp=16 schedule=zb", "needs pp > 1"),
        ("dp=4 pp=4 schedule=zb", None),
        ("dp=4 pp=4 schedule=zbv", None),
        ("dp=4 pp=4 schedule=zbv micro_batch=4", "needs 2 pp = 8 micro-batches"),
        ("dp=4 pp=4 schedule=dualpipe virtual_stages=4", "two chunks per rank"),
        ("dp=4 pp=4 schedule=gpipe virtual_stages=2", "one chunk per rank"),
        ("dp=16 ep=2", "mixture of experts"),
        ("dp=16 micro_batch=1 accumulation=3", "48 sequences"),
        ("dp=2 tp=2 pp=4 virtual_stages=2 micro_batch=1 zero=1 sp=1", None),
    ],
)
def test_why_a_layout_cannot_run(layout, words):
    parsed = parse_layout(layout)
    count = 16 if layout != "tp=3" else None
    reason = parsed.reason_invalid(LLAMA, sequence=8192, global_batch=64, accelerators=count)
    assert (reason is None) if words is None else (reason is not None and words in reason)


def test_split_passes_come_in_equal_rounds():
    """As PyTorch's schedule has them, which ends a run otherwise."""
    found = [parse_layout("pp=3 schedule=zb").reason_invalid(LLAMA, sequence=8192, global_batch=n) for n in (15, 16)]
    assert found == [None, "schedule=zb needs the 16 micro-batches divisible by pp = 3"]


def test_accumulation_follows_from_the_global_batch():
    assert parse_layout("dp=4 micro_batch=2").filled(64).accumulation == 8
    assert parse_layout("dp=4 micro_batch=2 accumulation=8").global_batch() == 64
