"""The server as its clients meet it: OpenAI's own package, raw sockets, and those who send nonsense."""

from __future__ import annotations

import asyncio
import json
import re
import signal
import socket
import struct
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).parent))  # for `serving`
from serving import write_server_directory

from ironlaw.errors import UserError
from ironlaw.serve.config import ServeConfig
from ironlaw.serve.engine import Engine
from ironlaw.serve.loading import load_served
from ironlaw.serve.server import bind_socket, build_server

from ..docs.browser import CHROMIUM, Browser

openai: Any = pytest.importorskip("openai")
httpx: Any = pytest.importorskip("httpx")
uvicorn: Any = pytest.importorskip("uvicorn")
datastructures: Any = pytest.importorskip("starlette.datastructures")

PATIENT = httpx.Client(timeout=200)  # of a machine with other work
# Answers of this length do not end before a test is done with them.
LONG = {"max_tokens": 200, "ignore_eos": True}


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_server_directory(tmp_path_factory.mktemp("served") / "tiny")


@contextmanager
def running(directory: Path, **settings: Any) -> Iterator[tuple[str, Engine]]:
    from ironlaw.serve.api import create_app

    config = ServeConfig(**({"device": "cpu", "port": 0, "drain_seconds": 0.2} | settings))
    engine = Engine(load_served(directory, config), config)
    app = create_app(engine)
    server = uvicorn.Server(uvicorn.Config(app, port=0, log_level="error", timeout_graceful_shutdown=1))
    thread = threading.Thread(target=server.run, daemon=True)
    thread.start()
    wait_until(lambda: server.started)
    yield f"http://127.0.0.1:{server.servers[0].sockets[0].getsockname()[1]}", engine
    server.should_exit = True
    thread.join(timeout=10)


def wait_until(condition: Callable[[], Any], seconds: float = 200.0) -> None:
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "it did not happen in time"
        time.sleep(0.01)


@pytest.fixture(scope="module")
def served(directory: Path) -> Iterator[tuple[str, Engine]]:
    with running(directory, blocks=400) as found:
        yield found


def test_64_clients_at_once_get_what_each_gets_alone(served: tuple[str, Engine]) -> None:
    url, engine = served

    async def ask() -> tuple[list[str], list[str]]:
        async with openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="none") as client:

            async def whole(number: int) -> str:
                done = await client.completions.create(
                    model="tiny", prompt=f"def f{number % 8}", max_tokens=12, seed=number % 8, temperature=1.0
                )
                assert done.usage is not None and done.usage.completion_tokens <= 12
                return done.choices[0].text

            async def streamed(number: int) -> str:
                stream = await client.completions.create(
                    model="tiny", prompt=f"def f{number % 8}", max_tokens=12, seed=number % 8, stream=True
                )
                return "".join([chunk.choices[0].text async for chunk in stream])

            many = await asyncio.gather(*(streamed(n) if n % 2 else whole(n) for n in range(64)))
            return many, [await whole(number) for number in range(8)]

    many, alone = asyncio.run(ask())
    assert many == [alone[number % 8] for number in range(64)]
    wait_until(lambda: engine.blocks.used == 0 and engine.running == 0)


def test_chats_logprobs_and_several_answers(served: tuple[str, Engine]) -> None:
    url, _ = served
    client = openai.OpenAI(base_url=f"{url}/v1", api_key="none")
    assert [model.id for model in client.models.list().data] == [client.models.retrieve("tiny").id] == ["tiny"]
    with pytest.raises(openai.NotFoundError, match="use 'tiny'"):
        client.models.retrieve("other")
    messages: Any = [{"role": "user", "content": [{"type": "text", "text": "a model"}]}]
    chat = client.chat.completions.create(
        model="tiny", messages=messages, max_tokens=6, n=3, seed=1, logprobs=True, top_logprobs=2
    )
    assert [choice.index for choice in chat.choices] == [0, 1, 2]
    assert len({choice.message.content for choice in chat.choices}) > 1
    logs = chat.choices[0].logprobs
    assert logs is not None and logs.content is not None and len(logs.content) == chat.usage.completion_tokens / 3
    for log in logs.content:
        assert log.logprob <= log.top_logprobs[0].logprob and len(log.top_logprobs) == 2
    stream = client.chat.completions.create(
        model="tiny", messages=messages, max_tokens=6, seed=1, stream=True, stream_options={"include_usage": True}
    )
    chunks = list(stream)
    text = "".join(c.choices[0].delta.content or "" for c in chunks if c.choices)
    assert text == chat.choices[0].message.content
    assert chunks[-1].usage is not None and chunks[-1].usage.completion_tokens == 6


def test_a_request_has_the_priority_that_its_body_says(served: tuple[str, Engine]) -> None:
    url, engine = served
    assert (
        PATIENT.post(f"{url}/v1/completions", json={"prompt": "a", "max_tokens": 1, "priority": 3}).status_code == 200
    )
    assert engine.finished[-1].priority == 3


def test_a_stop_string_ends_an_answer_and_is_not_part_of_it(served: tuple[str, Engine]) -> None:
    url, _ = served
    asked = {"prompt": "def f", "max_tokens": 60, "seed": 4, "ignore_eos": True}
    whole = PATIENT.post(f"{url}/v1/completions", json=asked).json()["choices"][0]["text"]
    stop = whole[10:13]
    choice = PATIENT.post(f"{url}/v1/completions", json=asked | {"stop": [stop]}).json()["choices"][0]
    assert choice == choice | {"text": whole[: whole.index(stop)], "finish_reason": "stop"}
    kept = PATIENT.post(f"{url}/v1/completions", json=asked | {"stop": stop, "include_stop_str_in_output": True}).json()
    assert kept["choices"][0]["text"] == whole[: whole.index(stop) + len(stop)]


def test_logprobs_tell_the_bytes_and_places_of_the_tokens_of_an_answer_streamed_or_not(
    served: tuple[str, Engine],
) -> None:
    url, _ = served
    client = openai.OpenAI(base_url=f"{url}/v1", api_key="none")
    asked: Any = {"model": "tiny", "prompt": "def", "max_tokens": 60, "seed": 5, "logprobs": 3, "stop": ["\ue000"]}
    whole = client.completions.create(**asked).choices[0]
    logs = whole.logprobs
    assert any(token.startswith("bytes:\\x") for token in logs.tokens)  # this model writes broken characters
    for at, token, log, top in zip(logs.text_offset, logs.tokens, logs.token_logprobs, logs.top_logprobs, strict=True):
        assert top[token] == log and 3 <= len(top) <= 4
        assert token.startswith(("bytes:", "<|endoftext|>")) or whole.text[at:].startswith(token)
    options = {"include_usage": True}
    *chunks, last = client.completions.create(**asked, stream=True, stream_options=options)
    assert last.usage is not None and all("usage" in c.model_dump(exclude_unset=True) for c in chunks)
    assert "".join(c.choices[0].text for c in chunks) == whole.text
    for name in ("tokens", "text_offset", "top_logprobs"):
        parts = [part for c in chunks for part in getattr(c.choices[0].logprobs, name)]
        assert parts == getattr(logs, name)
    messages: Any = [{"role": "user", "content": "a"}]
    chat = client.chat.completions.create(model="tiny", messages=messages, max_tokens=60, seed=2, logprobs=True)
    said = b"".join(bytes(one.bytes) for one in chat.choices[0].logprobs.content if one.token != "<|endoftext|>")
    assert said.decode(errors="replace").rstrip("\ufffd") == chat.choices[0].message.content.rstrip("\ufffd")


def test_nothing_ends_an_answer_before_its_least_tokens_but_its_form(served: tuple[str, Engine]) -> None:
    pytest.importorskip("llguidance")
    url, engine = served
    (end,) = engine.served.end_tokens
    sure: dict[str, Any] = {"prompt": "f", "logit_bias": {str(end): 100}, "temperature": 0, "max_tokens": 30}

    def ask(**more: Any) -> tuple[list[int], Any]:
        choice = PATIENT.post(f"{url}/v1/completions", json=sure | more).json()["choices"][0]
        return engine.finished[-1].answer, choice

    assert ask()[0] == [end]
    answer, choice = ask(min_tokens=7)
    assert answer.index(end) == 7 and choice["finish_reason"] == "stop"
    stop = engine.served.text.decode_behind(answer[2:3])
    assert stop in ask(min_tokens=7, stop=[stop])[1]["text"]
    answer, choice = ask(min_tokens=7, structured_outputs={"choice": ["f"]})
    assert choice["text"] == "f" and answer[-1] == end


def test_special_tokens_are_shown_when_asked_for_and_an_echo_is_the_prompt(served: tuple[str, Engine]) -> None:
    url, engine = served
    (end,) = engine.served.end_tokens
    asked = {"prompt": "f\ufffdé", "logit_bias": {str(end): 100}, "temperature": 0, "ignore_eos": True, "echo": True}
    for shows, text in ((True, "f\ufffdé"), (False, "f\ufffdé<|endoftext|><|endoftext|>")):
        more = {"max_tokens": 2, "skip_special_tokens": shows}
        assert PATIENT.post(f"{url}/v1/completions", json=asked | more).json()["choices"][0]["text"] == text


@pytest.mark.parametrize("most", [0, 1])
def test_an_echo_is_scored_as_harnesses_ask_that_judge_models_by_the_likelihood_of_texts(
    most: int, served: tuple[str, Engine]
) -> None:
    url, _ = served
    asked = {"prompt": "def f(x): return x + 1", "max_tokens": most, "logprobs": 1, "temperature": 0, "echo": True}
    choice = PATIENT.post(f"{url}/v1/completions", json=asked).json()["choices"][0]
    found = choice["logprobs"]
    tokens, logs, tops = (found[key] for key in ("tokens", "token_logprobs", "top_logprobs"))
    assert "".join(tokens[: len(tokens) - most]) == asked["prompt"] and choice["text"].startswith(asked["prompt"])
    assert logs[0] is None and tops[0] is None
    assert all(tops[n][token] == logs[n] <= max(tops[n].values()) for n, token in enumerate(tokens) if n)
    with openai.OpenAI(base_url=f"{url}/v1", api_key="none") as client:
        pieces = [c for c in client.completions.create(model="tiny", stream=True, **asked) if c.choices]
    streamed = [log for c in pieces if c.choices[0].logprobs for log in c.choices[0].logprobs.token_logprobs]
    assert "".join(c.choices[0].text for c in pieces) == choice["text"]
    assert streamed[1:] == pytest.approx(logs[1:], abs=1e-5)


def test_an_answer_has_the_form_that_was_asked_for(served: tuple[str, Engine]) -> None:
    pytest.importorskip("llguidance")
    url, _ = served
    schema = {"type": "object", "properties": {"a": {"type": "integer", "maximum": 9}, "b": {"enum": ["x", "y"]}},
              "required": ["a", "b"], "additionalProperties": False}  # fmt: skip
    form = {"type": "json_schema", "json_schema": {"name": "it", "schema": schema}}
    for seed in range(3):
        asked = {"prompt": "f", "max_tokens": 200, "seed": seed, "response_format": form}
        found = json.loads(PATIENT.post(f"{url}/v1/completions", json=asked).json()["choices"][0]["text"])
        assert found.keys() == {"a", "b"} and found["a"] <= 9 and found["b"] in ("x", "y")
    choice = {"prompt": "f", "structured_outputs": {"choice": ["yes", "no"]}, "max_tokens": 9}
    assert PATIENT.post(f"{url}/v1/completions", json=choice).json()["choices"][0]["text"] in ("yes", "no")


def test_a_form_is_prepared_once_for_all_answers_which_follow_it_separately(
    served: tuple[str, Engine], monkeypatch: pytest.MonkeyPatch
) -> None:
    url, _ = served
    library, prepared = pytest.importorskip("llguidance"), list[Any]()
    prepare = library.LLMatcher

    def count(*arguments: Any, **named: Any) -> Any:
        prepared.append(arguments)
        return prepare(*arguments, **named)

    for kept in ("grammar_from_regex", "validate_grammar"):
        setattr(count, kept, getattr(prepare, kept))
    monkeypatch.setattr(library, "LLMatcher", count)
    form = {"structured_outputs": {"regex": "[ab]{8}|[cd]{4}"}, "max_tokens": 20}
    answers = PATIENT.post(f"{url}/v1/completions", json={"prompt": ["f", "g"], "n": 4, "seed": 1} | form).json()
    assert len(prepared) == 1 and len({choice["text"] for choice in answers["choices"]}) > 1
    assert all(re.fullmatch("[ab]{8}|[cd]{4}", choice["text"]) for choice in answers["choices"])


def test_a_form_that_is_too_large_from_its_second_token_on_is_an_error(served: tuple[str, Engine]) -> None:
    pytest.importorskip("llguidance")
    url, _ = served
    asked = {"prompt": "f", "structured_outputs": {"regex": "(a{1000}){1000}"}, "max_tokens": 9}
    whole = PATIENT.post(f"{url}/v1/completions", json=asked)
    assert whole.status_code == 400 and "the form of the answer cannot be followed" in whole.json()["error"]["message"]
    streamed = PATIENT.post(f"{url}/v1/completions", json=asked | {"stream": True}).text.split("\n\n")
    assert json.loads(streamed[-2].removeprefix("data: "))["error"] == whole.json()["error"]


FIELDS: list[dict[str, Any]] = [
    {"response_format": {"type": "json_object"}, "structured_outputs": {"regex": "a"}},
    *({name: value}
    for name, values in {
        "prompt": [None, "", [], {}, 3, [[]], [""], ["a", 3], [999_999], [-1], [1.5], [True], "long " * 2000],
        "max_tokens": [0, -1, "many", 1.5, 10**12, [], {}], "temperature": [-1, "warm", [], 1e9],
        "top_p": [-1, 2, "a"], "top_k": [-2, "a", 1.5], "min_p": [-1, 2], "n": [0, -1, 10**6, "a", 1.5],
        "stop": [3, [3], "", [""], ["a"] * 99, {}], "stop_token_ids": [["a"], 3, [10**9]], "seed": ["a", 1.5, 10**30],
        "presence_penalty": [9, "a"], "frequency_penalty": [-9], "repetition_penalty": [0, -1],
        "logit_bias": [{"a": 1}, {"1": 999}, 3, {"99999": 1}], "stream": ["maybe", 3], "logprobs": [-1, 99, "a"],
        "stream_options": [3, {"include_usage": "a"}], "response_format": [
            {"type": "poem"}, {"type": "json_object", "schema": {"type": "integer"}}, {}, {"type": "json_schema"},
            {"type": "json_schema", "json_schema": {"schema": 3}},
            {"type": "json_schema", "json_schema": {"schema": {"type": "nothing"}}},
        ],
        "structured_outputs": [{}, {"choice": []}, {"choice": [""]}, {"regex": "("}, {"regex": "a" * 10**6},
                               {"regex": "a", "choice": ["b"]}, {"what": 1}],
        "model": ["other", 3], "best_of": [3], "priority": ["a"], "min_tokens": [-1, 2], "echo": ["a"], "suffix": ["a"],
        "unknown_field": [1], "tools": [[{"type": "function"}]], "ignore_eos": ["perhaps"],
    }.items()
    for value in values),
]  # fmt: skip
MESSAGES: list[Any] = [
    None, [], "hi", {}, [3], [{}], [{"role": "user", "content": 3}], [{"role": 3, "content": "a"}], [{"content": "a"}],
    [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}], [{"role": "", "content": "a"}],
    [{"role": "wizard", "content": "a"}], [{"role": "assistant", "tool_calls": [{"id": "1"}]}],
    [{"role": "tool", "content": "4", "tool_call_id": "1"}],
]  # fmt: skip
BODIES = [b"", b"{", b"[]", b"3", b"null", b'"a"', b"\xff\xfe", b"{}", b"[" * 100_000, b'{"prompt": NaN}',
          b'{"prompt": "\\uD800"}', b'{"prompt": "\xed\xa0\x80"}']  # fmt: skip


def test_an_address_that_is_taken_is_told_before_a_model_is_loaded_for_it() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken, pytest.raises(UserError, match="cannot listen on"):
        bind_socket(ServeConfig(port=taken.getsockname()[1]))


def test_what_is_refused_is_named_and_what_asks_for_nothing_is_not(served: tuple[str, Engine]) -> None:
    def ask(content: Any, **more: Any) -> Any:
        asked = {"messages": [{"role": "user", "content": content}], "max_tokens": 1}
        return PATIENT.post(f"{served[0]}/v1/chat/completions", json=asked | more)

    image = [{"type": "text", "text": "a"}, {"type": "image_url", "image_url": {"url": "x"}}]
    assert "'image_url' is not supported" in ask(image).json()["error"]["message"]
    assert "0.text" in ask([{"type": "text", "text": 3}]).json()["error"]["message"]
    nothing: dict[str, Any] = {"tool_choice": "none", "suffix": "", "tools": [], "modalities": ["text"]}
    assert ask("a", top_logprobs=0, prompt_cache_retention="24h", **nothing).status_code == 200
    assert ask("a", modalities=["text", "audio"]).status_code == 400
    for path in ("embeddings", "responses", "models"):  # the last one by another method
        answer = PATIENT.post(f"{served[0]}/v1/{path}", json={"input": "a"})
        assert f"POST /v1/{path} is not offered here: use POST /v1/chat" in answer.json()["error"]["message"]


def test_a_proxy_finds_what_it_needs(served: tuple[str, Engine]) -> None:
    asked = {"prompt": "a", "max_tokens": 1, "stream": True}
    stream = PATIENT.post(f"{served[0]}/v1/completions", json=asked, headers={"Content-Encoding": "Identity"})
    assert stream.headers["x-accel-buffering"] == "no"  # else nginx keeps tokens until its buffer is full
    assert PATIENT.head(f"{served[0]}/health").status_code == 200


@pytest.mark.parametrize(
    ("host", "status"),
    [("localhost:8", 200), ("127.0.0.1", 200), ("[::1]:8", 200), ("backend", 200), ("x.svc.cluster.local", 200),
     ("attacker.example:8", 403), ("localhost.attacker.example", 403), ("7.attacker.example.", 403)],
)  # fmt: skip
def test_without_a_key_a_website_that_takes_this_machines_address_is_not_answered(
    host: str, status: int, served: tuple[str, Engine]
) -> None:
    answer = PATIENT.post(f"{served[0]}/v1/completions", json={"prompt": "a", "max_tokens": 1}, headers={"Host": host})
    assert answer.status_code == status


def test_each_of_a_hundred_malformed_requests_gets_one_clear_line(served: tuple[str, Engine]) -> None:
    url, engine = served
    with httpx.Client(base_url=url, timeout=200) as client:
        answers = [
            (fields, client.post("/v1/completions", json={"prompt": "f", "max_tokens": 1} | fields))
            for fields in FIELDS
        ]
        answers += [(m, client.post("/v1/chat/completions", json={"messages": m, "max_tokens": 1})) for m in MESSAGES]
        answers += [(body[:20], client.post("/v1/completions", content=body)) for body in BODIES]
        answers += [("path", client.get("/v1/nothing")), ("method", client.get("/v1/completions"))]
        answers.append(("size", client.post("/v1/completions", content=b" " * (5 * 2**20))))
        answers.append(("steps", client.get("/steps?since=never")))
        packed, gzip = b"\x1f\x8b\x08", {"content-encoding": "gzip"}
        answers.append(("gzip", client.post("/v1/completions", content=packed, headers=gzip)))
        text = {"content-type": "text/plain"}  # as a page of another site can have a browser send it
        answers.append(("kind", client.post("/v1/completions", content=b'{"prompt": "f"}', headers=text)))
        hello = {"messages": [{"role": "user", "content": "a"}], "max_tokens": 1}
        named = hello | {"chat_template_kwargs": {"messages": 3}}
        answers.append(("template", client.post("/v1/chat/completions", json=named)))
        assert len(answers) >= 100
        for asked, answer in answers:
            message = answer.json()["error"]["message"]
            assert 400 <= answer.status_code < 500 and message and "\n" not in message and len(message) < 450, asked
        assert client.post("/v1/completions", json={"prompt": "f", "max_tokens": 1}).status_code == 200
    assert engine.failure is None


def test_half_a_request_is_not_waited_for_without_end(served: tuple[str, Engine], monkeypatch: Any) -> None:
    monkeypatch.setattr("ironlaw.serve.api.BODY_SECONDS", 0.1)
    host, port = served[0].removeprefix("http://").split(":")
    with socket.create_connection((host, int(port)), timeout=60) as client:
        client.sendall(b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: 99\r\n\r\n{")
        assert client.recv(2**16).startswith(b"HTTP/1.1 408")


def test_pages_of_a_client_that_is_killed_are_free_again(
    served: tuple[str, Engine], caplog: pytest.LogCaptureFixture
) -> None:
    url, engine = served
    host, port = url.removeprefix("http://").split(":")
    for streams in (True, False):
        body = json.dumps({"prompt": "def", "stream": streams, "n": 8} | LONG | {"max_tokens": 240}).encode()
        head = f"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: {len(body)}\r\n\r\n".encode()
        clients = []
        for _ in range(8):
            client = socket.create_connection((host, int(port)))
            client.sendall(head + body)
            clients.append(client)
        wait_until(lambda: engine.running >= 1)
        for client in clients:  # as the kernel does for a process that was killed with data unread
            client.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            client.close()
        wait_until(lambda: engine.running == 0 and engine.waiting == 0 and engine.blocks.used == 0)
    assert any(request.finish == "cancelled" for request in engine.finished)
    assert not [record for record in caplog.records if record.name == "asyncio"]  # of writes to nobody


def test_what_is_too_much_is_refused_and_nothing_is_lost(directory: Path) -> None:
    with running(directory, batch=2, waiting=3, blocks=64) as (url, engine):
        flooded, quick = threading.Event(), engine.step
        engine.step = lambda: (flooded.wait(200), quick())[1]  # type: ignore[method-assign]

        async def flood() -> list[Any]:
            async with httpx.AsyncClient(base_url=url, timeout=200) as client:

                async def ask() -> Any:
                    answer = await client.post("/v1/completions", json=asked)
                    flooded.set()  # with the first refusal: nothing is answered before
                    return answer

                asked = {"prompt": "def f", "max_tokens": 40, "ignore_eos": True}
                return await asyncio.gather(*(ask() for _ in range(30)))

        answers = asyncio.run(flood())
        statuses = [answer.status_code for answer in answers]
        assert set(statuses) == {200, 429} and statuses.count(200) >= 5
        refused = next(answer for answer in answers if answer.status_code == 429)
        assert int(refused.headers["retry-after"]) >= 1
        metrics = PATIENT.get(f"{url}/metrics").text
        assert f'ironlaw:requests_refused_total{{model_name="tiny"}} {statuses.count(429)}.0' in metrics
        assert (
            f'vllm:request_success_total{{finished_reason="length",model_name="tiny"}} {statuses.count(200)}.0'
            in metrics
        )
        engine.is_draining = True
        late = PATIENT.post(f"{url}/v1/completions", json={"prompt": "def"})
        assert late.status_code == 503 and "retry-after" in late.headers
        assert PATIENT.get(f"{url}/health").status_code == 503


def test_what_still_runs_at_the_end_of_draining_is_told_so(directory: Path) -> None:
    config = ServeConfig(device="cpu", port=0, drain_seconds=0.3)
    engine, urls = Engine(load_served(directory, config), config), list[str]()
    quick = engine.step
    engine.step = lambda: (time.sleep(0.05), quick())[1]  # type: ignore[method-assign]  # an answer of 12 s
    server = build_server(engine, urls.append)
    thread = threading.Thread(target=server.run, daemon=True)
    thread.start()
    wait_until(lambda: urls)
    with ThreadPoolExecutor() as pool:
        asked = [{"prompt": "def", "stream": streams} | LONG | {"max_tokens": 240} for streams in (True, False)]
        answers = [pool.submit(PATIENT.post, f"{urls[0]}/v1/completions", json=body) for body in asked]
        wait_until(lambda: engine.running == 2)
        server.handle_exit(signal.SIGTERM, None)
        streamed, whole = (answer.result() for answer in answers)
    assert whole.status_code == 503 and "retry-after" in whole.headers
    assert json.loads(streamed.text.split("\n\n")[-2].removeprefix("data: ")) == whole.json()
    thread.join(timeout=200)
    assert not thread.is_alive()


def test_a_server_with_keys_wants_one(directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with running(directory, api_keys=("secret", "schlüssel"), blocks=64) as (url, _):
        for headers, status in (
            ({}, 401),
            ({"Authorization": "Bearer wrong"}, 401),
            ({"Authorization": "secret"}, 401),
            ({"Authorization": "Bearer secret"}, 200),
            ({"Authorization": "bearer secret"}, 200),
            ({"Authorization": "Bearer schlüssel".encode()}, 200),
        ):
            public = {"Host": "llm.example"} | headers
            assert PATIENT.get(f"{url}/v1/models", headers=public).status_code == status
        assert PATIENT.get(f"{url}/health").status_code == 200
        # To older versions of Starlette this is the path that a client names in its Host, "x/health?".
        monkeypatch.setattr("starlette.requests.HTTPConnection.url", datastructures.URL("http://x/health?/v1/models"))
        assert PATIENT.get(f"{url}/v1/models").status_code == 401


def test_counters_add_up_after_answers_of_all_ends(directory: Path) -> None:
    with running(directory, blocks=12, batch=4) as (url, engine):
        prompt = "def f(x): return x + 1\n" * 2
        usage = [
            PATIENT.post(f"{url}/v1/completions", json={"prompt": prompt, "seed": 1, "max_tokens": 30} | more).json()[
                "usage"
            ]
            for more in (
                {"ignore_eos": True},
                {"n": 5, "ignore_eos": True},
                {"stop": list("abcdefg ()\n")},
                {"max_tokens": 1},
            )
        ]
        asked = {"prompt": "f", "stream": True} | LONG | {"max_tokens": 150}
        with PATIENT.stream("POST", f"{url}/v1/completions", json=asked) as stream:
            next(stream.iter_lines())
        wait_until(lambda: engine.running == 0)
        left = engine.finished[-1]
        found = dict(line.rsplit(" ", 1) for line in PATIENT.get(f"{url}/metrics").text.splitlines())
    ends = [
        found[f'vllm:request_success_total{{finished_reason="{why}",model_name="tiny"}}']
        for why in ("length", "stop", "abort")
    ]
    assert ends == ["7.0", "1.0", "1.0"]
    assert engine.scheduler.preemptions and engine.blocks.hits
    prompts = float(8 * usage[0]["prompt_tokens"] + left.prompt_length)
    answers = float(sum(each["completion_tokens"] for each in usage) + len(left.answer))
    for kind, value in (("prompt", prompts), ("generation", answers)):
        assert float(found[f'vllm:{kind}_tokens_total{{model_name="tiny"}}']) == value
        assert float(found[f'vllm:request_{kind}_tokens_sum{{model_name="tiny"}}']) == value


@pytest.mark.long
@pytest.mark.skipif(CHROMIUM is None, reason="no Chromium")
def test_the_page_shows_figures_and_an_answer_as_it_comes(directory: Path, tmp_path: Path) -> None:
    with running(directory, blocks=400) as (url, engine), Browser(tmp_path / "profile", offline=False) as page:
        quick = engine.step
        engine.step = lambda: (time.sleep(0.02), quick())[1]  # type: ignore[method-assign]  # an answer of 4 s

        def ask(**fields: str) -> None:
            for name, value in fields.items():
                page.run(f"document.getElementById('{name}').value = '{value}'")
            page.run("document.getElementById('send').click()")

        page.open(url)
        page.wait("document.getElementById('model').textContent === 'tiny'")
        ask(prompt="def f(x)", tokens="200")
        page.wait("document.getElementById('answer').textContent.length > 20")
        page.wait("document.getElementById('running').textContent.startsWith('1 /')")
        page.run("document.getElementById('cancel').click()")
        wait_until(lambda: not engine.running and engine.blocks.used == 0)
        ask(tokens="5", temperature="0")
        page.wait("!document.getElementById('send').disabled")
        assert page.run("document.getElementById('answer').textContent")
        assert page.run("document.getElementById('line').getAttribute('points')")
        ask(tokens="9000")
        page.wait("document.getElementById('answer').textContent.includes('max_tokens')")
    # The browser notes the refusal and the cancelled request itself.
    assert [said for said in page.complaints if "400" not in said and "canceled" not in said] == []
