"""What is drawn has the distribution that was asked for, whatever else is in the batch."""

from __future__ import annotations

import math
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parent))  # for `serving`
from serving import engine

from ironlaw.model.config import ModelConfig
from ironlaw.model.transformer import Transformer
from ironlaw.serve.request import Request, SamplingParams
from ironlaw.serve.sampler import Row, sample, uniform

stats = pytest.importorskip("scipy.stats")
DRAWS = 4000


def request(sampling: SamplingParams, seed: int = 0, prompt: tuple[int, ...] = (0,)) -> Request:
    made = Request(prompt, sampling)
    made.seed = seed
    return made


def draw(
    logits: torch.Tensor, sampling: SamplingParams, count: int = DRAWS, tokens: tuple[int, ...] = ()
) -> torch.Tensor:
    """How often each token is drawn, in `count` places of one answer."""
    asked = request(sampling, seed=11)
    asked.tokens += tokens
    rows = [Row(asked, place) for place in range(count)]
    chosen = sample(logits.expand(count, -1).clone(), rows)
    return torch.bincount(torch.tensor([c.token for c in chosen]), minlength=logits.numel())


def likely(counts: torch.Tensor, probabilities: torch.Tensor) -> bool:
    """Chi-square at one in a thousand; what has no probability must never come."""
    assert counts[probabilities == 0].sum() == 0
    some = probabilities > 0
    expected = probabilities[some].double() / probabilities[some].double().sum() * counts.sum()
    return bool(stats.chisquare(counts[some].double().numpy(), expected.numpy()).pvalue > 1e-3)


@pytest.fixture
def logits() -> torch.Tensor:
    return torch.randn(40, generator=torch.Generator().manual_seed(3)) * 1.5


@pytest.mark.parametrize("temperature", [0.5, 1.0, 2.0])
def test_temperature(logits: torch.Tensor, temperature: float) -> None:
    assert likely(draw(logits, SamplingParams(temperature=temperature)), torch.softmax(logits / temperature, -1))
    assert not likely(
        draw(logits, SamplingParams(temperature=temperature)), torch.softmax(logits / temperature * 1.3, -1)
    )


def test_top_k_top_p_and_min_p_keep_the_likeliest(logits: torch.Tensor) -> None:
    whole = torch.softmax(logits, -1)
    ordered, order = whole.sort(descending=True)
    for sampling, kept in (
        (SamplingParams(top_k=5), 5),
        (SamplingParams(top_p=0.7), int((ordered.cumsum(0) < 0.7).sum()) + 1),
        (SamplingParams(min_p=0.2), int((ordered >= 0.2 * ordered[0]).sum())),
        (SamplingParams(top_k=12, top_p=0.5), int((ordered[:12].cumsum(0) < 0.5 * ordered[:12].sum()).sum()) + 1),
    ):
        wanted = torch.zeros(40)
        wanted[order[:kept]] = ordered[:kept]
        assert 1 < kept < 40 and likely(draw(logits, sampling), wanted)


def test_a_flat_distribution_needs_more_than_the_first_candidates() -> None:
    """Top-p of 5,000 alike tokens: 256 candidates hold a twentieth of it."""
    counts = draw(torch.zeros(5000), SamplingParams(top_p=0.9), 1000)
    assert int((counts > 0).sum()) > 256


def test_a_token_depends_on_no_other_row_of_its_batch() -> None:
    logits = torch.randn(700, generator=torch.Generator().manual_seed(3)) * 2.5
    kinds: list[dict[str, Any]] = [
        {},
        {"top_p": 0.95},
        {"top_p": 0.0},
        {"top_k": 7},
        {"top_k": 600, "top_p": 0.9},
        {"min_p": 0.1},
    ]
    rows = [[Row(request(SamplingParams(**kind), seed), 5) for seed in range(100)] for kind in kinds]
    alone = [[chosen.token for chosen in sample(logits.expand(100, -1), some)] for some in rows]
    together = sample(logits.expand(600, -1), [row for some in rows for row in some])
    assert [chosen.token for chosen in together] == [token for tokens in alone for token in tokens]
    assert set(alone[2]) == {int(logits.argmax())}


def test_the_largest_number_finds_no_token_that_is_excluded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ironlaw.serve.sampler.uniform", lambda seed, place: 1 - 2.0**-53)
    allowed = torch.arange(300) < 3
    for sampling in (SamplingParams(), SamplingParams(top_k=50), SamplingParams(top_p=0.9)):
        (chosen,) = sample(torch.zeros(1, 300), [Row(request(sampling), 1)], allowed[None])
        assert chosen.token < 3


def test_penalties_and_biases_are_openais(logits: torch.Tensor) -> None:
    changed = logits.clone()
    changed[3] -= 0.5 + 2 * 0.4
    changed[4] -= 0.5 + 0.4
    changed[7] += 1.5
    asked = SamplingParams(presence_penalty=0.5, frequency_penalty=0.4, logit_bias=((7, 1.5),))
    assert likely(draw(logits, asked, tokens=(3, 3, 4)), torch.softmax(changed, -1))
    repeated = logits.clone()
    for token in (0, 3):  # the prompt counts too
        repeated[token] = repeated[token] / 1.8 if repeated[token] > 0 else repeated[token] * 1.8
    assert likely(draw(logits, SamplingParams(repetition_penalty=1.8), tokens=(3, 3)), torch.softmax(repeated, -1))


def test_logprobs_are_the_models_own(logits: torch.Tensor) -> None:
    (chosen,) = sample(
        logits[None].clone(), [Row(request(SamplingParams(temperature=0, logprobs=3, logit_bias=((5, 50.0),))), 1)]
    )
    logs = torch.log_softmax(logits, -1)
    assert chosen.token == 5 and chosen.logprob == pytest.approx(float(logs[5]))
    assert [token for token, _ in chosen.top] == logs.topk(3).indices.tolist()


def test_numbers_are_uniform_and_independent_of_neighbours() -> None:
    numbers = [uniform(seed, place) for seed in range(60) for place in range(60)]
    assert stats.kstest(numbers, "uniform").pvalue > 1e-3
    by_seed = torch.tensor(numbers).view(60, 60)
    for shifted in (by_seed[1:] * by_seed[:-1], by_seed[:, 1:] * by_seed[:, :-1]):  # of independent ones: 1/4
        assert float(shifted.mean()) == pytest.approx(0.25, abs=3 * math.sqrt(7 / 144 / shifted.numel()))


@pytest.fixture(scope="module")
def model() -> Transformer:
    torch.manual_seed(4)
    return Transformer(
        ModelConfig(layers=1, hidden=16, heads=2, vocab=12, context=64, positions="rope", norm="rmsnorm", bias=False)
    ).eval()


def test_speculation_changes_no_answer_and_so_no_distribution(model: Transformer) -> None:
    """At high temperature most proposals fall; every token is still the one drawn from the model."""
    prompts = [[number % 12, 1, 2, number % 5, 1, 2] for number in range(40)]
    asked = SamplingParams(max_tokens=20, temperature=0.7, top_p=0.95)
    plain, proposed = engine(model, batch=4), engine(model, batch=4, speculation="ngram")
    without, with_proposals = (e.generate(prompts, asked) for e in (plain, proposed))
    assert [r.answer for r in without] == [r.answer for r in with_proposals]
    assert 0 < proposed.accepted_tokens < proposed.drafted_tokens
    assert proposed.trace.count < plain.trace.count


def test_first_tokens_of_many_requests_follow_the_model(model: Transformer) -> None:
    """Through the whole engine: each request has a seed of its own."""
    prompt = [1, 5, 2]
    requests = engine(model, batch=64).generate([prompt] * 1500, SamplingParams(max_tokens=1))
    counts = torch.bincount(torch.tensor([r.answer[0] for r in requests]), minlength=12)
    with torch.no_grad():
        wanted = torch.softmax(model(torch.tensor([prompt]))[0, -1], -1)
    assert likely(counts, wanted)


def test_penalties_biases_and_logprobs_of_the_models_own_logits(model: Transformer) -> None:
    """They are changed in place, and are tensors of inference mode."""
    asked = SamplingParams(max_tokens=6, temperature=0, repetition_penalty=5.0, frequency_penalty=1.0, logprobs=1,
                     logit_bias=((7, 1.0),), ignore_eos=True)  # fmt: skip
    server = engine(model)
    (plain,) = server.generate([[1, 2, 3]], SamplingParams(max_tokens=6, temperature=0, ignore_eos=True))
    (other,) = server.generate([[1, 2, 3]], asked)
    assert len(other.answer) == 6 and len(set(other.answer)) >= len(set(plain.answer))
