"""Decoding of one sequence in every weight format: `python benchmarks/decode_formats.py [--threads 1] [--rounds 9]`.

A Llama of 110M random weights, engines in turns, medians. The roofline of a format is the bytes of weights that a token
reads over the rate at which these threads read memory, which is measured in the same turns: the sum of 256 MB.
"""

from __future__ import annotations

import argparse
import statistics
import time

import torch

from ironlaw.model.config import ModelConfig
from ironlaw.model.transformer import Transformer
from ironlaw.serve.config import ServeConfig
from ironlaw.serve.engine import Engine
from ironlaw.serve.loading import prepare
from ironlaw.serve.request import SamplingParams

MODEL = ModelConfig(
    name="llama-110m", layers=12, hidden=768, heads=12, kv_heads=12, ffn=2048, gated_ffn=True, activation="silu",
    norm="rmsnorm", positions="rope", bias=False, tied=False, vocab=32000, context=512,
)  # fmt: skip
TOKENS = 24


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--rounds", type=int, default=9)
    options = parser.parse_args()
    engines, sampling = {}, SamplingParams(max_tokens=TOKENS, temperature=0.0, ignore_eos=True)
    for weights in ("fp32", "bf16", "int8", "int4"):
        torch.manual_seed(0)
        config = ServeConfig(batch=1, weights=weights, threads=options.threads, blocks=40)
        engines[weights] = Engine(prepare(Transformer(MODEL).eval(), config, weights), config)
    seconds: dict[str, list[float]] = {name: [] for name in (*engines, "read")}
    memory = torch.ones(2**26)
    for _ in range(options.rounds):
        for name, engine in engines.items():
            began = time.perf_counter()
            count = len(list(engine.stream([1], sampling)))
            seconds[name].append((time.perf_counter() - began) / count)
        began = time.perf_counter()
        memory.sum()
        seconds["read"].append((time.perf_counter() - began) / memory.nbytes)
    taken = {name: statistics.median(found) for name, found in seconds.items()}
    print(f"these threads read {1e-9 / taken['read']:.1f} GB/s")
    read = {name: e.served.weight_bytes - e.served.model.embedding.weight.nbytes for name, e in engines.items()}
    bounds = {name: count * taken["read"] for name, count in read.items()}
    for name in engines:
        print(
            f"{name}: {1 / taken[name]:.1f} tokens/s, {taken['bf16'] / taken[name]:.2f} times bf16; reads "
            f"{read[name] / 1e6:.0f} MB a token: {1e3 * bounds[name]:.2f} of {1e3 * taken[name]:.2f} ms, which alone "
            f"allow {bounds['bf16'] / bounds[name]:.2f} times"
        )


if __name__ == "__main__":
    main()
