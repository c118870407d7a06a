"""Greedy answers are `transformers.generate`'s, token by token, however the engine came to them."""

from __future__ import annotations

import importlib.util
import random
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

sys.path.insert(0, str(Path(__file__).parent))  # for `serving`
from serving import FAMILIES, answers, engine, expected, greedy, ours, theirs

from ironlaw.model.config import ModelConfig
from ironlaw.model.transformer import Transformer
from ironlaw.serve.blocks import layer_groups
from ironlaw.serve.config import ServeConfig
from ironlaw.serve.graphs import Graphs
from ironlaw.serve.loading import prepare

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("transformers") is None, reason="transformers is not installed"
)

# One family for every mechanism: the others differ in arithmetic that serving shares with training.
MECHANISMS = ("gemma2", "gemma3_text", "phi3 of long sequences", "gptj", "bloom", "gpt_oss", "qwen2", "smollm3",
              "falcon with groups", "gpt2", "mixtral", "deepseek_v3", "mistral")  # fmt: skip
LENGTHS, TOKENS = (17, 30, 1, 9), 14


@pytest.mark.parametrize("name", [pytest.param(n, marks=() if n in MECHANISMS else pytest.mark.long) for n in FAMILIES])
def test_every_family_answers_as_transformers(name: str, tmp_path: Path) -> None:
    """In one batch whose pages do not suffice, so that prompts come in chunks and requests are preempted."""
    model = theirs(name)
    here = ours(model, tmp_path)
    draws = random.Random(name)
    prompts = [[draws.randrange(1, here.config.vocab) for _ in range(length)] for length in LENGTHS]
    prompts.append([*prompts[1][:20], 3, 4])  # shares pages
    windows = layer_groups([here.config])[0]
    server = engine(here, blocks=1 + 21 * len(windows), token_budget=12)
    requests = server.generate(prompts, greedy(TOKENS))
    wanted = [expected(model, prompt, TOKENS) for prompt in prompts]
    assert answers(requests) == wanted
    assert answers(engine(here, speculation="ngram").generate(prompts, greedy(TOKENS))) == wanted
    assert server.blocks.used == 0
    if len(set(windows)) == 1:
        assert (server.scheduler.preemptions > 0) == (windows[0] is None)


@pytest.mark.long
@pytest.mark.parametrize("name", FAMILIES)
def test_every_family_answers_in_a_batch_of_32(name: str, tmp_path: Path) -> None:
    model = theirs(name)
    here = ours(model, tmp_path)
    draws = random.Random(name)
    prompts = [[draws.randrange(1, here.config.vocab) for _ in range(1 + draws.randrange(30))] for _ in range(32)]
    requests = engine(here, batch=32, token_budget=64).generate(prompts, greedy(TOKENS))
    assert answers(requests) == [expected(model, prompt, TOKENS) for prompt in prompts]


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> tuple[Transformer, list[list[int]], list[list[int]]]:
    """A model, 32 prompts of which some share beginnings, and the answers to them."""
    model = theirs("llama")
    here = ours(model, tmp_path_factory.mktemp("llama"))
    draws = random.Random(5)
    start = [draws.randrange(70) for _ in range(13)]
    prompts = [[draws.randrange(70) for _ in range(1 + draws.randrange(30))] for _ in range(20)]
    prompts += [start + [draws.randrange(70) for _ in range(1 + draws.randrange(20))] for _ in range(12)]
    prepare(here, ServeConfig(device="cpu"), "tiny")
    return here, prompts, [expected(model, prompt, 20) for prompt in prompts]


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"batch": 1},
        {"token_budget": 5, "batch": 32},
        {"blocks": 20, "batch": 32},
        {"share_prefixes": False},
        {"speculation": "ngram"},
        {"speculation": "ngram", "blocks": 24, "token_budget": 9},
        {"block": 1},
        {"compiled": False, "blocks": 24},
        {"policy": "priority"},
    ],
    ids=str,
)
def test_a_batch_answers_as_each_request_alone(
    llama: tuple[Transformer, list[list[int]], list[list[int]]], settings: dict[str, Any]
) -> None:
    model, prompts, wanted = llama
    server = engine(model, **({"batch": 32} | settings))
    for _ in range(2):  # the second time prefixes are there
        assert answers(server.generate(prompts, greedy(20))) == wanted
    assert server.blocks.used == 0 and not server.running
    assert (server.blocks.hits > 0) == server.config.share_prefixes
    if settings.get("blocks"):
        assert server.scheduler.preemptions > 0
    if "speculation" in settings:
        assert server.accepted_tokens > 0


@pytest.mark.parametrize("settings", [{"token_budget": 5}, {"blocks": 20}, {"speculation": "ngram"}], ids=str)
def test_a_prompt_is_scored_as_by_transformers(
    settings: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Part by part, again after a preemption, and not from pages of others, which hold no logits."""
    monkeypatch.setattr("ironlaw.serve.request.MAX_SCORED_TOKENS", 7)
    model = theirs("llama")
    server, draws = engine(ours(model, tmp_path), **({"batch": 32} | settings)), random.Random(6)
    start = [draws.randrange(70) for _ in range(16)]
    prompts = [start + [draws.randrange(70) for _ in range(draws.randrange(20))] for _ in range(8)]
    for tokens in (0, 9):
        asked = replace(greedy(tokens), logprobs=2, scores_prompt=True)
        requests = server.generate(prompts, asked)
        assert answers(requests) == [expected(model, p, tokens) if tokens else [] for p in prompts]
        for request, prompt in zip(requests, prompts, strict=True):
            with torch.no_grad():
                logs = model(torch.tensor([prompt])).logits[0].log_softmax(-1)
            wanted = logs[range(len(prompt) - 1), prompt[1:]].tolist()
            assert [s.token for s in request.scored] == prompt and request.scored[0].logprob is None
            assert [s.logprob for s in request.scored[1:]] == pytest.approx(wanted, abs=1e-4)
            assert [s.top[0][0] for s in request.scored[1:]] == logs.argmax(-1)[:-1].tolist()
    assert server.blocks.used == 0 and (server.scheduler.preemptions > 0) == ("blocks" in settings)


@pytest.mark.parametrize("kv", ["bf16", "fp8", "int4"])
def test_narrow_keys_and_values_are_read_as_they_are_kept(
    llama: tuple[Transformer, list[list[int]], list[list[int]]], kv: str
) -> None:
    """Otherwise an answer depended on how its prompt was divided, which its neighbours decide."""
    model, prompts, _ = llama
    whole, parts = (engine(model, kv=kv, token_budget=budget, compiled=False) for budget in (512, 12))
    assert answers(whole.generate(prompts, greedy(8))) == answers(parts.generate(prompts, greedy(8)))


def replayed(step: Callable[[], Tensor]) -> tuple[Tensor, Callable[[], Any]]:
    """As CUDA graphs take steps, but run anew where those would be replayed."""
    logits = step().clone()
    return logits.zero_(), lambda: logits.copy_(step())


def test_steps_of_fixed_shapes_have_a_table_of_pages_for_each_group_of_layers() -> None:
    torch.manual_seed(3)
    model = Transformer(ModelConfig(layers=3, hidden=16, heads=2, vocab=70, context=96, sliding_window=8, full_every=3))
    prompts = [list(range(n, 2 * n)) for n in (3, 17, 30)]
    server, plain = (engine(model.eval(), compiled=False) for _ in range(2))
    graphs = server.runner.graphs = Graphs(replayed)
    assert answers(server.generate(prompts, greedy(20))) == answers(plain.generate(prompts, greedy(20)))
    assert graphs.found and {len(shapes) for shapes in graphs.found} == {2 + 2 * 3}


def test_steps_of_fixed_shapes_answer_as_others(
    llama: tuple[Transformer, list[list[int]], list[list[int]]],
) -> None:
    model, prompts, wanted = llama
    server = engine(model, batch=32, compiled=False)
    graphs = server.runner.graphs = Graphs(replayed)
    assert answers(server.generate(prompts, greedy(20))) == wanted
    assert {shapes[0] for shapes in graphs.found} <= {1, 2, 4, 8, 16, 32} and 1 < len(graphs.found) < 20


@pytest.mark.parametrize("speculation", ["ngram", "draft"])
def test_nothing_is_proposed_beyond_a_context(speculation: str) -> None:
    """The model's, at whose end earlier text is proposed, or the draft's, which is shorter."""
    torch.manual_seed(0)
    whole, short = (Transformer(ModelConfig(layers=1, hidden=16, heads=2, vocab=9, context=n)).eval() for n in (24, 12))
    served = prepare(whole, ServeConfig(device="cpu"), "whole")
    prompts = [[1, 2, 3] * 5, [2, 3, 3, 5, 6, 7, *[1] * 14, 2, 3], [5, 6]]
    wanted = answers(engine(served).generate(prompts, greedy(40)))
    served.draft = prepare(short, ServeConfig(device="cpu"), "short")
    assert answers(engine(served, speculation=speculation).generate(prompts, greedy(40))) == wanted
    assert [len(answer) for answer in wanted] == [9, 2, 22]


def test_a_draft_model_changes_nothing_but_the_number_of_steps(
    llama: tuple[Transformer, list[list[int]], list[list[int]]],
) -> None:
    """The model as its own draft: nearly all it proposes stands."""
    model, prompts, wanted = llama
    config = ServeConfig(device="cpu")
    served = prepare(model, config, "tiny")
    served.draft = prepare(model, config, "draft")
    for blocks in (400, 26):
        server = engine(served, batch=32, blocks=blocks, speculation="draft", token_budget=200)
        assert answers(server.generate(prompts, greedy(20))) == wanted
        assert server.accepted_tokens > 0.8 * server.drafted_tokens > 0
    alone = engine(served, speculation="draft", token_budget=200)
    alone.generate(prompts[:1], greedy(20))
    assert alone.trace.count <= 6  # a prompt, and five tokens a step
