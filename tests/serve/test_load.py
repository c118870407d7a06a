"""Load and its figures; the ledger that a run of load leaves."""

from __future__ import annotations

import asyncio
import json
import signal
import sys
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parent))  # for `serving`
from serving import write_server_directory

from ironlaw.errors import UserError
from ironlaw.ledger import Kind, Ledger, Phase
from ironlaw.report.serving_view import load_view
from ironlaw.serve.load import Client, Report, RequestOutcome, poisson, read_trace, run, summary
from ironlaw.serve.measured import serving_ledger
from ironlaw.serve.recording import Recording
from ironlaw.serve.trials import Load

pytest.importorskip("uvicorn")


def test_poisson_arrivals_have_their_rate_and_are_seeded() -> None:
    plans = poisson(5.0, 2000, 10, 20, seed=1)
    gaps = [b.at - a.at for a, b in pairwise(plans)]
    mean = sum(gaps) / len(gaps)
    assert mean == pytest.approx(0.2, rel=0.1)
    assert sum(g * g for g in gaps) / len(gaps) == pytest.approx(2 * mean * mean, rel=0.15)  # exponential
    assert plans == poisson(5.0, 2000, 10, 20, seed=1) != poisson(5.0, 2000, 10, 20, seed=2)


@pytest.mark.parametrize(
    "text",
    [
        '{"timestamp": 10, "input_length": 5, "output_length": 3}\n'
        '{"timestamp": 12, "input_length": 7, "output_length": 2}',
        "TIMESTAMP,ContextTokens,GeneratedTokens\n2023-11-16 18:15:10,5,3\n2023-11-16 18:15:12.0000000,7,2\n",
        '{"timestamp": 10000, "input_length": 5, "output_length": 3, "hash_ids": [1]}\n'
        '{"timestamp": 12000, "input_length": 7, "output_length": 2, "hash_ids": []}',
    ],
)
def test_traces_of_several_origins_are_read_alike(text: str, tmp_path: Path) -> None:
    file = tmp_path / "trace"
    file.write_text(text)
    assert [(p.at, p.prompt_tokens, p.output_tokens) for p in read_trace(file)] == [(0.0, 5, 3), (2.0, 7, 2)]


ROW = '{"timestamp": %s, "input_length": %s, "output_length": 2}'


@pytest.mark.parametrize("text", [
    "", "a,b\n1,2\n", '{"timestamp": "x"}', "{", ROW % (0, 1) + "\n[1, 2]", ROW % (0, "Infinity"), ROW % ("NaN", 1),
    ROW % (0, -5),
])  # fmt: skip
def test_what_is_no_trace_is_refused_in_one_line(text: str, tmp_path: Path) -> None:
    (tmp_path / "trace").write_text(text)
    with pytest.raises(UserError, match=r"trace|no requests"):
        read_trace(tmp_path / "trace")


def load_of(models: str, body: str | None, before: str = "") -> Report:
    """Two requests to a server that always answers so, or (without a body) never."""

    async def reply(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        asked = await reader.readuntil(b"\r\n\r\n")
        steps = '{"next": 0, "now": 0, "facts": {}, "steps": []}'
        said = models if b"/v1/models" in asked else steps if b"/steps" in asked else body
        if said is None:
            await reader.read()  # until the client leaves
            return
        writer.write(f"{before}HTTP/1.1 200 OK\r\nContent-Length: {len(said)}\r\n\r\n{said}".encode())
        writer.close()

    async def load() -> Report:
        async with await asyncio.start_server(reply, "127.0.0.1") as server:
            client = Client(
                f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}", None, None, 10.0 if body is not None else 0.1
            )
            report = Report()
            await run(client, poisson(50.0, 2, 8, 4, seed=1), report, concurrency=1, ignore_eos=False)
            return report

    return asyncio.run(load())


@pytest.mark.parametrize(("models", "answer", "told"), [
    ("{}", "", "names no model"),
    ("[" * 50_000, "", "no OpenAI-compatible server"),
    ('{"data": []}', "", "names no model"),
    ('{"data": [{"id": "m"}]}', '{"error": "boom"}', "boom"),
    ('{"data": [{"id": "m"}]}', "[1]", "has not OpenAI's form"),
    ('{"data": [{"id": "m"}]}', '{"usage": {"tokens": 1}}', "has not OpenAI's form"),
    ('{"data": [{"id": "m"}]}', '{"usage": {"completion_tokens": 1e400, "prompt_tokens": 1}}', "has not OpenAI's form"),
    ('{"data": [{"id": "m"}]}', '{"usage": {"completion_tokens": 1, "prompt_tokens": -9}}', "has not OpenAI's form"),
    ('{"data": [{"id": "m"}]}', None, "no answer in 0.1 s"),
])  # fmt: skip
def test_a_server_that_answers_otherwise_is_told_in_one_line(models: str, answer: str | None, told: str) -> None:
    with pytest.raises(UserError, match=told):
        load_of(models, None if answer is None else f"data: {answer}\n\n")
    with pytest.raises(UserError, match="give --api-key"):
        load_of(models, "", before="HTTP/1.1 401 Unauthorized\r\nContent-Length: 0\r\n\r\n")


def test_a_server_that_tells_no_usage_is_not_credited_with_the_tokens_asked_for() -> None:
    pieces = [
        {"text": "a", "finish_reason": None},
        {"text": "b", "finish_reason": None},
        {"text": "", "finish_reason": "stop"},
    ]
    body = "".join(
        f"data: {json.dumps({'choices': [piece], 'error': None})}\r\n\r\n" for piece in pieces
    )  # and no [DONE]
    report = load_of('{"data": [{"id": "m"}]}', body, before="HTTP/1.1 103 Early Hints\r\n\r\n")
    found = summary(report)
    assert (found["completed"], found["output_tokens"], found["prompt_tokens"]) == (2, 4, None)
    assert found["total_tokens_per_second"] is None
    assert report.server is None and "tells no usage" in str(load_view(found))


def test_an_interrupted_load_shows_what_was_answered(
    ironlaw_here: Callable[..., tuple[int, str, str]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = []

    async def get(self: Client, path: str, method: str = "GET") -> tuple[int, Any]:
        return (200, {"data": [{"id": "m"}]}) if path == "/v1/models" else (404, None)

    async def send(self: Client, plan: Any, *request: Any) -> RequestOutcome:
        asked.append(plan)
        if len(asked) > 4:  # of which the first is the probe
            signal.raise_signal(signal.SIGINT)
            await asyncio.sleep(60)
        return RequestOutcome(0.0, 8, 4, output_tokens=4, status=200, ttft=0.1, end=0.4)

    monkeypatch.setattr(Client, "get", get)
    monkeypatch.setattr(Client, "send", send)
    load = ("bench", "http://127.0.0.1:1", "--concurrency", "1", "--out", "kept")
    code, out, err = ironlaw_here(*load)
    assert code == 130 and "3 of 3 requests answered" in out and "interrupted" in out and "interrupted" in err
    assert not list(tmp_path.glob("*kept*"))
    asked.clear()
    code, out, _ = ironlaw_here(*load, "--json")
    assert code == 130 and json.loads(out)["completed"] == 3 and json.loads(out)["interrupted"]
    code, out, _ = ironlaw_here(*load)  # with nothing to show
    assert code == 130 and not out


def test_goodput_counts_answers_within_both_limits_of_all_requests() -> None:
    def answer(ttft: float, end: float) -> RequestOutcome:
        return RequestOutcome(0.0, 10, 5, output_tokens=5, status=200, ttft=ttft, end=end, times=[ttft, end])

    refused, failed = RequestOutcome(0.0, 10, 5, status=429, error="busy"), RequestOutcome(0.0, 10, 5, error="gone")
    found = summary(Report([answer(0.1, 0.5), answer(0.1, 4.1), answer(2.0, 2.4), refused, failed], 10.0), 1.0, 0.2)
    assert (found["completed"], found["refused"], found["errors"]) == (3, 1, 1)
    assert found["goodput_share"] == 0.2 and found["goodput_requests_per_second"] == 0.1
    assert found["tpot_seconds"]["p50"] == pytest.approx(0.1) and found["output_tokens_per_second"] == 1.5


def step(
    phase: str, seconds: float, model: float, prefill: int = 0, decode: int = 0, start: float = 0.0
) -> dict[str, Any]:
    scheduling = seconds - model - 0.1  # a step's `start` is when it has been scheduled
    return {"start": start + scheduling, "phase": phase, "seconds": seconds, "model_seconds": model,
            "sample_seconds": 0.1, "prefill_tokens": prefill, "decode_tokens": decode, "kv_usage": 0.5, "waiting": 0,
            "accepted": 0, "produced": decode, "schedule_seconds": scheduling, "output_seconds": 0.0}  # fmt: skip


def test_what_prompts_add_to_a_mixed_step_is_prefill_and_phases_add_up() -> None:
    steps = [step("decode", 1.0, 0.8, decode=3), step("mixed", 3.0, 2.8, 50, 4, start=1.5),
             step("prefill", 2.0, 1.5, 60, start=5.0)]  # fmt: skip
    phases = serving_ledger(steps, {}, {}).phase_seconds
    assert phases[Phase.DECODE] * 3 == pytest.approx(0.8 + 0.8)
    assert phases[Phase.PREFILL] * 3 == pytest.approx(2.0 + 1.5)
    assert phases[Phase.HOST] * 3 == pytest.approx(0.1 + 0.1 + 0.4 + 0.5)  # scheduling, and the gap while some ran
    assert phases[Phase.IDLE] * 3 == pytest.approx(0.5)
    assert sum(phases.values()) * 3 == pytest.approx(7.0)
    # No step of that size only decodes: what the server timed when it started stands for it.
    timed = {"passes": [{"phase": "decode", "tokens": 4, "model_seconds": 0.6}]}
    assert serving_ledger(steps[1:2], timed, {}).phase_seconds[Phase.PREFILL] == pytest.approx(2.8 - 0.6)


def test_a_recording_is_of_the_load_that_asked_for_it() -> None:
    recording = Recording()
    for rows in (1, 64):
        recording.start(1)
        with recording.step(torch.nn.Linear(64, 64), "decode"):
            torch.ones(rows, 64) @ torch.ones(64, 64)
        assert recording.lines()
    recording.start(1)
    assert recording.lines() == []


def test_a_prefix_as_long_as_the_prompt_is_refused(ironlaw_here: Any) -> None:
    code, _, told = ironlaw_here("bench", "http://127.0.0.1:9", "--rate", "1", "--input", "64", "--prefix", "64")
    assert code == 2 and "--prefix 64" in told


def test_with_speculation_requests_are_counted_and_not_their_drafted_tokens() -> None:
    steps = [step("decode", 1.0, 0.8, decode=15) | {"decode_requests": 3}]
    assert serving_ledger(steps, {}, {}).totals["decode_batch"].value == 3


OPERATIONS = [(Kind.MATMUL, name) for name in ("qkv", "attention_out", "ffn_gate", "ffn_up", "ffn_down", "head")]


def test_serve_and_bench_from_the_command_line(ironlaw_process: Any, start_ironlaw: Any, tmp_path: Path) -> None:
    """One line of JSON when ready; a run directory from bench; an end with exit code 0 when told."""
    directory = write_server_directory(tmp_path / "tiny")
    process = start_ironlaw("serve", directory, "--port", "0", "--json", "--set", "device=cpu")
    ready = json.loads(process.stdout.readline())
    assert ready["model"] == "tiny" and ready["kv_tokens"] > 0
    out = tmp_path / "load"
    load = ("bench", ready["url"], "--rate", "40", "--requests", "12", "--input", "20", "--output", "6")
    done = ironlaw_process(*load, "--out", str(out), "--json")
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert found["completed"] == 12 and found["errors"] == 0 and found["output_tokens"] == 72
    ledger = Ledger.load(out / "ledger.json")
    assert ledger.facts["kind"] == "serving" and ledger.totals["ttft_seconds"].value > 0
    keys = {(line.phase, line.kind, line.operation) for line in ledger.lines}
    for operation in (*OPERATIONS, (Kind.ATTENTION, "attention"), (Kind.ELEMENTWISE, "cache")):
        assert (Phase.DECODE, *operation) in keys and (Phase.PREFILL, *operation) in keys
    steps = [json.loads(line) for line in (out / "steps.jsonl").read_text().splitlines()]
    assert sum(s["produced"] for s in steps) == 72 == ledger.facts["steps"]["produced"]
    assert len((out / "requests.jsonl").read_text().splitlines()) == 12
    second = ironlaw_process(*load, "--out", str(tmp_path / "second"))
    assert second.returncode == 0, second.stderr
    twice = Ledger.load(tmp_path / "second" / "ledger.json").facts  # counters of its own load, not of both
    assert 0 < ledger.facts["prefix_queried"] < 12 * 40 and 0 < twice["prefix_queried"] < 12 * 40
    again = ironlaw_process(*load, "--out", str(out))
    assert again.returncode == 2 and "give a new directory" in again.stderr
    process.terminate()
    assert process.wait(timeout=200) == 0
    assert ironlaw_process("bench", ready["url"], "--rate", "1").returncode == 2


def test_a_trial_measures_settings_on_the_same_load(tmp_path: Path) -> None:
    """The loss comes through pages: formats that round change it a little, others not at all."""
    directory = write_server_directory(tmp_path / "tiny")
    load = Load(directory, [list(range(5 + n, 25 + n)) for n in range(4)], 5, 2, 0.0)
    base = {"device": "cpu", "blocks": 60}
    plain, other, rounded = (load(base | more) for more in ({}, {"block": 4, "token_budget": 9}, {"kv": "int8"}))
    assert plain.seconds_per_token > 0 and plain.step_seconds > 0
    assert plain.loss == pytest.approx(other.loss, abs=1e-5) and 0 < abs(plain.loss - rounded.loss) < 0.01
