"""A server at 1.5 times what it can do, with clients that are killed in the middle of answers.

    python benchmarks/serve_soak.py --seconds 600 --json

Starts `ironlaw serve` on a random 7M Llama, measures its capacity by a closed loop, then sends a Poisson process of 1.5
times that for so long with `ironlaw bench`, while every two seconds one more client is killed (SIGKILL) in its stream.
Exit code 0 when nothing was lost without a word: every request was answered or refused with 429 or 503 and Retry-After,
no page is held at the end, the server's memory grew by less than 5% over the second half, and SIGTERM lets what runs
finish.
"""

from __future__ import annotations

import argparse
import json
import signal
import statistics
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from pathlib import Path
from typing import Any

import psutil
from serve_peers import LLAMA, MODELS

IRONLAW = [sys.executable, "-m", "ironlaw"]
CLIENT = """
import json, sys, urllib.request
body = {"prompt": list(range(5, 69)), "max_tokens": 400, "stream": True, "ignore_eos": True}
kind = {"Content-Type": "application/json"}
ask = urllib.request.Request(sys.argv[1] + "/v1/completions", json.dumps(body).encode(), kind)
for line in urllib.request.urlopen(ask, timeout=60): print(line[:9], flush=True)
"""


def write_directory(folder: Path) -> None:
    """A random 7M Llama with a small tokenizer: a load sends text."""
    from ironlaw.data.tokenizer import train
    from ironlaw.model.config import ModelConfig
    from ironlaw.model.huggingface.weights import write_model, write_tokenizer
    from ironlaw.model.transformer import Transformer

    tokenizer = train([Path(__file__).read_text(encoding="utf-8")], 400, folder.with_suffix(".json"))
    config = ModelConfig(**MODELS["7M"] | LLAMA | {"vocab": tokenizer.vocab})
    write_model(folder, config, Transformer(config).state_dict(), eos_token_id=tokenizer.end_of_text)
    write_tokenizer(folder, folder.with_suffix(".json"), tokenizer.end_of_text_token, config.context)


def bench(url: str, *options: str) -> subprocess.Popen[str]:
    words = [*IRONLAW, "bench", url, "--input", "64", "--output", "64", *options, "--json"]
    return subprocess.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)


def said(process: subprocess.Popen[str]) -> dict[str, Any]:
    return json.loads(process.communicate()[0])


def state(url: str) -> dict[str, Any]:
    with urllib.request.urlopen(url + "/state", timeout=10) as answer:
        return json.load(answer)


def refusal(url: str) -> tuple[int, str | None] | None:
    """Status and Retry-After of a request that is refused now; None where it was taken."""
    body = json.dumps({"prompt": [5, 6, 7], "max_tokens": 1}).encode()
    try:
        ask = urllib.request.Request(url + "/v1/completions", body, {"Content-Type": "application/json"})
        urllib.request.urlopen(ask, timeout=60).read()
    except urllib.error.HTTPError as error:
        return error.code, error.headers.get("Retry-After")
    return None


def overload(url: str, server: subprocess.Popen[str], rate: float, seconds: float) -> dict[str, Any]:
    load = bench(url, "--rate", f"{rate:.3f}", "--seconds", f"{seconds:.0f}")
    process, memory, refused, killed = psutil.Process(server.pid), [], [], 0
    while load.poll() is None:
        client = subprocess.Popen(
            [sys.executable, "-c", CLIENT, url], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL
        )
        assert client.stdout is not None
        killed += bool(client.stdout.readline())  # it was taken, and its stream has begun
        client.kill()
        client.wait()
        refused.append(refusal(url))
        memory.append(process.memory_info().rss)
        time.sleep(2)
    return said(load) | {"killed_in_stream": killed, "memory": memory, "refusals": [r for r in refused if r]}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=600)
    parser.add_argument("--times", type=float, default=1.5)
    parser.add_argument("--json", action="store_true")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as place:
        write_directory(Path(place) / "7M")
        settings = [f"serve.{text}" for text in ("device=cpu", "batch=16", "waiting=32", "threads=1")]
        words = [
            *IRONLAW,
            "serve",
            f"{place}/7M",
            "--port",
            "0",
            "--json",
            *(w for s in settings for w in ("--set", s)),
        ]
        server = subprocess.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
        assert server.stdout is not None
        url = json.loads(server.stdout.readline())["url"]
        capacity = said(bench(url, "--concurrency", "16", "--requests", "96"))["requests_per_second"]
        found = overload(url, server, arguments.times * capacity, arguments.seconds)
        end = time.monotonic() + 30
        while (now := state(url))["running"] + now["waiting"] and time.monotonic() < end:
            time.sleep(0.2)
        last = bench(url, "--concurrency", "8", "--requests", "8")
        while not state(url)["running"] and last.poll() is None:
            time.sleep(0.02)
        server.send_signal(signal.SIGTERM)
        code, drained = server.wait(timeout=60), said(last)
    memory = found.pop("memory")
    half = memory[len(memory) // 2 :]
    quarter = max(1, len(half) // 4)
    growth = statistics.median(half[-quarter:]) / statistics.median(half[:quarter]) - 1 if half else 0.0
    lost = found["requests"] - found["completed"] - found["refused"]
    result = {
        "capacity_requests_per_second": capacity, "rate": arguments.times * capacity, "seconds": found["seconds"],
        "requests": found["requests"], "completed": found["completed"], "refused": found["refused"], "lost": lost,
        "errors": found["error_messages"], "killed_in_stream": found["killed_in_stream"],
        "refusals_seen": len(found["refusals"]), "kv_usage_at_the_end": now["kv_usage"], "memory_first": memory[0],
        "memory_last": memory[-1], "memory_growth_second_half": growth, "exit_code": code,
        "drained": drained["completed"], "tokens_per_second": found["output_tokens_per_second"],
    }  # fmt: skip
    good = (not lost and not found["error_messages"] and now["kv_usage"] == 0 and growth < 0.05 and code == 0
            and all(status in (429, 503) and after for status, after in found["refusals"]))  # fmt: skip
    result["good"] = good
    print(json.dumps(result, indent=1) if arguments.json else "\n".join(f"{k}: {v}" for k, v in result.items()))
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
