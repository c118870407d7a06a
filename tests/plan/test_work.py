"""How much training: what is said wins, what is not is assumed and listed."""

import pytest

from ironlaw.config import build_config
from ironlaw.errors import UserError
from ironlaw.model.config import ModelConfig
from ironlaw.plan.request_types import Options, settle, tokens_of

GPT2 = ModelConfig.named("gpt2")
LLAMA = ModelConfig.named("llama3-8b")


@pytest.mark.parametrize(
    ("text", "tokens"),
    [("1T", 1e12), ("500B", 5e11), ("2e12", 2e12), ("1.5t", 1.5e12), ("300k", 3e5), ("1,000,000", 1e6), ("20 B", 2e10)],
)
def test_numbers_of_tokens(text, tokens):
    assert tokens_of(text) == pytest.approx(tokens)


@pytest.mark.parametrize("text", ["", "lots", "-1T", "1TB", "0", "1e40", "T", "1,5T", "1,00,000"])
def test_what_is_no_number_of_tokens(text):
    with pytest.raises(UserError, match="--tokens"):
        tokens_of(text)


def test_everything_said_leaves_nothing_assumed():
    work = settle(LLAMA, Options("1T", 8192, 1024), 64)
    assert work.assumed == [] and (work.sequence, work.global_batch) == (8192, 1024)
    assert work.steps == 119_210 and 1e12 <= work.steps * 8192 * 1024 < 1e12 + 8192 * 1024


def test_nothing_said_is_listed_with_how_to_set_it():
    work = settle(LLAMA, Options(), 8)
    assert [a.how_to_set for a in work.assumed] == ["--seq", "--global-batch", "--tokens or --steps"]
    tokens = work.steps * work.sequence * work.global_batch
    assert work.sequence == 8192 and tokens == pytest.approx(20 * LLAMA.parameters, rel=1e-3)
    assert work.global_batch % 8 == 0
    assert settle(GPT2, Options(), 1).sequence == 1024


def test_the_assumed_batch_divides_odd_clusters():
    assert settle(LLAMA, Options(), 24).global_batch % 24 == 0
    assert settle(GPT2, Options(), 1023).global_batch % 1023 == 0


def test_a_config_file_is_asked_before_anything_is_assumed():
    config = build_config({"model": {"name": "gpt2"}, "train": {"steps": 7, "global_batch": 6, "sequence": 512}})
    work = settle(config.model, Options(), 2, config)
    assert (work.sequence, work.global_batch, work.steps, work.assumed) == (512, 6, 7, [])
    assert settle(config.model, Options(steps=9, global_batch=4), 2, config).steps == 9


def test_contradictions_are_errors():
    with pytest.raises(UserError, match="twice"):
        settle(GPT2, Options(tokens="1B", steps=5), 1)
    with pytest.raises(UserError, match="--seq 1024 or less"):
        settle(GPT2, Options(sequence=2048), 1)
