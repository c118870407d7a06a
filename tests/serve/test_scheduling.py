"""Pages are shared, freed and reused; budgets hold; nobody starves."""

from __future__ import annotations

import sys
from dataclasses import replace
from itertools import permutations
from pathlib import Path

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parent))  # for `serving`
from hypothesis import given, settings
from hypothesis import strategies as st
from serving import engine, greedy

from ironlaw.catalog.accelerators import accelerator
from ironlaw.errors import UserError
from ironlaw.model.config import ModelConfig
from ironlaw.model.transformer import Transformer
from ironlaw.plan.serving.estimate import Served
from ironlaw.plan.serving.rates import serving_engine
from ironlaw.plan.serving.request import parse_request
from ironlaw.plan.serving.systems import Formats, ServingLayout
from ironlaw.serve.blocks import Blocks, layer_groups
from ironlaw.serve.config import serve_config
from ironlaw.serve.engine import Busy
from ironlaw.serve.request import Request, SamplingParams
from ironlaw.serve.warmup import warm_up


@pytest.fixture(scope="module")
def model() -> Transformer:
    torch.manual_seed(4)
    return Transformer(ModelConfig(layers=1, hidden=16, heads=2, vocab=50, context=64)).eval()


@settings(max_examples=60, deadline=None)
@given(
    st.lists(
        st.tuples(st.sampled_from(["add", "end"]), st.lists(st.integers(0, 1), min_size=1, max_size=12)), max_size=40
    )
)
def test_pages_are_counted_whatever_comes_and_goes(events: list[tuple[str, list[int]]]) -> None:
    blocks, held = Blocks(24, 2, windows=[None, 3]), []
    for what, tokens in events:
        if what == "add":
            request = Request(tokens, SamplingParams())
            found = blocks.find(request)
            more = 2 * (-(-len(tokens) // 2) - len(found[0]))
            if blocks.can_take(found, more):
                blocks.take(request, found)
                blocks.extend(request, more)
                blocks.remember(request, len(tokens))
                request.computed = len(tokens)
                blocks.forget(request)
                held.append(request)
        elif held:
            blocks.release(held.pop(len(tokens) % len(held)))
        pages = {page for request in held for table in request.blocks for page in table} - {0}
        assert blocks.used == len(pages) and all(request.blocks[0] > [0] for request in held)
        for request, other in permutations(held, 2):  # equal pages only where all tokens up to their end are equal
            for number, (mine, others) in enumerate(
                zip(zip(*request.blocks, strict=True), zip(*other.blocks, strict=True), strict=False)
            ):
                if any(a == b > 0 for a, b in zip(mine, others, strict=True)):
                    end = 2 * (number + 1)
                    assert request.tokens[:end] == other.tokens[:end] and len(request.tokens) >= end


@pytest.mark.parametrize(("placed", "windows"), [
    ({"full_every": 6}, [None] + [32] * 6),  # 5 and 29 layers: 7 groups of 5, the last with 4
    ({"full_first": 33}, [None] * 7 + [32]),  # 33 and 1: groups of 5, the last with 1
    ({}, [32]),
])  # fmt: skip
def test_layers_of_a_kind_share_pages_and_groups_are_few(placed: dict[str, int], windows: list[int | None]) -> None:
    small = ModelConfig(layers=2, hidden=16, heads=2, vocab=50, context=64)
    config = small.model_copy(update={"layers": 34, "sliding_window": 32} | placed)
    found, (groups, drafts) = layer_groups([config, small])
    assert layer_groups([config])[0] == windows
    assert max(map(groups.count, groups)) <= 5 or not placed
    assert all(found[group] is None for group in drafts)  # a draft that sees everything keeps its pages


@pytest.mark.parametrize(("window", "wanted"), [(None, 6), (32, 9)])  # of no layer, of every other
def test_the_engine_holds_as_many_requests_as_are_planned(window: int | None, wanted: int) -> None:
    config = ModelConfig(layers=2, hidden=16, heads=2, vocab=50, context=128, sliding_window=window,
                         full_every=window and 2)  # fmt: skip
    blocks = 145 if window is None else 300  # a page of one layer is half of one of both
    server = engine(Transformer(config), blocks=blocks, token_budget=512, share_prefixes=False, batch=40)
    here = Served(config, accelerator("h200"), serving_engine("ironlaw"), ServingLayout(), Formats("bf16"))
    here.__dict__["kv_tokens"] = float(server.blocks.tokens)
    most = here.most_requests(parse_request("input=68 output=28"))

    def sent_back(requests: int) -> int:
        before = server.scheduler.preemptions
        server.generate([[3] * 68] * requests, greedy(28))
        return server.scheduler.preemptions - before

    assert most == wanted and sent_back(most) == 0 < sent_back(most + 1)


def test_a_known_beginning_is_not_computed_again(model: Transformer) -> None:
    server = engine(model, token_budget=64)
    prompt = list(range(21))
    first, second = (server.generate([prompt], greedy(2))[0] for _ in range(2))
    assert first.shared_tokens == 0 and second.shared_tokens == 20
    assert server.trace.steps[-2].prefill_tokens == 1


def test_pages_behind_the_window_of_all_layers_are_free_again() -> None:
    model = Transformer(ModelConfig(layers=2, hidden=16, heads=2, vocab=50, context=64, sliding_window=8)).eval()
    server, request = engine(model, token_budget=8), Request(list(range(30)), greedy(20))
    server.submit(request)
    used = []
    while server.step():
        used.append(server.blocks.used)
    assert max(used) <= 2 + 8 // 4 + 1 and len(request.answer) == 20 and server.blocks.used == 0


def test_steps_keep_to_the_budget_and_decode_goes_on_beside_prompts(model: Transformer) -> None:
    server = engine(model, token_budget=8)
    server.submit(Request([1, 2], greedy(30)))
    server.step()
    server.submit(Request(list(range(40)), greedy(5)))
    while server.running or server.waiting:
        server.step()
    steps = list(server.trace.steps)
    assert max(s.prefill_tokens + s.decode_tokens for s in steps) <= 8
    mixed = [s for s in steps if s.phase == "mixed"]
    assert len(mixed) >= 4 and all(s.decode_tokens == 1 and s.produced >= 1 for s in mixed)


def test_priority_goes_before_arrival(model: Transformer) -> None:
    ends: list[int] = []
    server = engine(model, batch=1, policy="priority")
    for priority in (5, 0, 3):
        server.submit(
            Request([1, 2], greedy(3), lambda r, _: ends.append(r.priority) if r.finish else None, priority=priority)
        )
    while server.running or server.waiting:
        server.step()
    assert ends == [0, 3, 5]


def test_a_cancelled_request_leaves_nothing_behind(model: Transformer) -> None:
    server = engine(model, batch=1)
    running, waiting = Request([1, 2], greedy(30)), Request([3], greedy(30))
    server.submit(running, waiting)
    server.step()
    server.cancel(running, waiting)
    server.step()
    assert (running.finish, waiting.finish) == ("cancelled", "cancelled")
    assert server.blocks.used == 0 and not server.running and not server.waiting


def test_what_can_never_run_is_refused_at_once(model: Transformer) -> None:
    server = engine(model, blocks=3, waiting=1, batch=1)  # 3 pages of 4 tokens
    with pytest.raises(UserError, match="12 tokens, this server takes 11"):
        server.submit(Request([1] * 12, greedy(1)))
    with pytest.raises(UserError, match="token 50 is not in the vocabulary"):
        server.submit(Request([50], greedy(1)))
    assert len(server.generate([[1] * 8], greedy(30))[0].answer) == 4  # as long as there are pages
    server.submit(Request([1], greedy(1)), Request([1], greedy(1)))
    with pytest.raises(Busy):
        server.submit(Request([1], greedy(1)))


def test_an_answer_longer_than_the_context_goes_on_from_its_newest_half(model: Transformer) -> None:
    server, asked = engine(model), SamplingParams(max_tokens=150, seed=5, ignore_eos=True)
    one, again = (list(server.stream([1, 2], asked)) for _ in range(2))
    assert one == again and len(one) == 150 > server.context
    assert list(server.stream([1, 2], SamplingParams(max_tokens=150, seed=6))) != one
    served = server.served
    ends = replace(served, end_tokens=frozenset({one[4]}))
    assert list(engine(ends).stream([1, 2], replace(asked, ignore_eos=False))) == one[: one.index(one[4])]


@pytest.mark.parametrize(
    ("kv", "alike", "size"), [("bf16", 0.9, 0.7), ("fp8", 0.9, 0.7), ("int8", 0.9, 0.7), ("int4", 0.6, 0.45)]
)
def test_narrow_keys_and_values_answer_nearly_alike(model: Transformer, kv: str, alike: float, size: float) -> None:
    """Their rounding moves logits by less than what lies between most first and second choices."""
    prompts = [[number, 2 * number % 50, 7, 9, 3] for number in range(30)]
    exact, narrow = engine(model), engine(model, kv=kv)
    assert narrow.runner.kv_bytes < size * exact.runner.kv_bytes
    wanted, found = (e.generate(prompts, greedy(4)) for e in (exact, narrow))
    same = sum(a == b for r, q in zip(wanted, found, strict=True) for a, b in zip(r.answer, q.answer, strict=True))
    assert same >= alike * 120


def test_so_many_requests_are_there_as_a_load_asks_for(model: Transformer) -> None:
    server = engine(model, batch=8)
    server.generate([[number, 7, 9] for number in range(9)], greedy(4), at_once=3)
    assert [step.requests for step in server.trace.steps if step.phase == "decode"] == [3] * 9


def test_settings_come_from_a_file_too(tmp_path: Path) -> None:
    (tmp_path / "tuned.toml").write_text('[serve]\nkv = "int8"\nbatch = 3\n')
    found = serve_config(["serve.batch=5"], tmp_path / "tuned.toml", port=1)
    assert (found.kv, found.batch, found.port) == ("int8", 5, 1)
    (tmp_path / "tuned.toml").write_text("[serve]\nbach = 3\n")
    with pytest.raises(UserError, match="did you mean serve"):
        serve_config([], tmp_path / "tuned.toml")


@pytest.mark.parametrize(("text", "message"), [
    ("serve.bach=3", "did you mean serve.batch"), ("batch", "not section.key=value"), ("batch=0", "serve.batch = 0"),
    ("serve.host=", "host is empty"), ("api_keys=['']", "api_keys is empty"), ("batch=true", "serve.batch = True"),
    ("kv=fp7", "serve.kv"), ("speculation=draft", "serve.draft"),
])  # fmt: skip
def test_settings_that_mean_nothing_are_refused(text: str, message: str) -> None:
    with pytest.raises(UserError, match=message):
        serve_config([text])


def test_a_context_beyond_the_models_is_refused(model: Transformer) -> None:
    with pytest.raises(UserError, match=r"serve\.context = .* is more than the model's"):
        engine(model, context=model.config.context + 1)


def test_a_server_times_its_own_passes_and_stays_as_it_was(model: Transformer) -> None:
    made = engine(model, batch=2, token_budget=512, api_keys=("secret",), waiting=0, body_bytes=1)
    warm_up(made, seconds=600)
    decode = sorted((p["tokens"], p["length"] > 40) for p in made.passes if p["phase"] == "decode")
    assert decode == [(1, False), (1, True), (2, False), (2, True)]  # behind short and long caches
    assert [p["requests"] for p in made.passes if p["phase"] == "prefill"] == [1, 2]
    assert all(p["model_seconds"] > 0 and p["host_seconds"] > 0 for p in made.passes)
    assert made.trace.count == 0 and made.blocks.usage == 0


def test_a_server_without_its_first_clients_starts_all_the_same(
    model: Transformer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "executable", "/bin/true")
    made = engine(model)
    warm_up(made)
    assert made.passes == []


def test_requests_whose_own_tokens_fail_end_alone(model: Transformer) -> None:
    server = engine(model)

    class Broken:
        def mask(self, vocab: int) -> torch.Tensor:
            return torch.ones(vocab, dtype=torch.bool)

        def take(self, token: int) -> None:
            raise UserError("no such grammar")

    alone = server.generate([[1, 2, 3]], greedy(5))[0].answer
    well, ill = Request([1, 2, 3], greedy(5)), Request([4, 5], greedy(5), state=Broken())
    unread = Request([8], greedy(5), decode=lambda token, may_stop: bool(1 / 0))
    for request in (well, ill, unread):
        server.submit(request)
    while server.running or server.waiting:
        server.step()
    assert (well.answer, well.finish) == (alone, "length")
    assert (ill.finish, ill.failure, ill.is_at_fault) == ("error", "no such grammar", True)
    assert unread.failure == "a token could not be read: ZeroDivisionError: division by zero"
    assert server.blocks.used == 0 and server.failure is None
