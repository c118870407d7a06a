"""Decoding of one sequence in every weight format: `python benchmarks/decode_formats.py [--threads 1] [--rounds 9]`.

A Llama of 110M random weights, engines in turns, medians; beside tokens per second the bytes of weights that a token
reads, and their rate as a share of what `ironlaw measure` found this machine to copy.
"""

from __future__ import annotations

import argparse
import statistics
import time

import torch

from ironlaw.machine.profile import load_profile
from ironlaw.model.config import ModelConfig
from ironlaw.model.transformer import Transformer
from ironlaw.serve.config import ServeConfig
from ironlaw.serve.engine import Engine
from ironlaw.serve.loading import prepare
from ironlaw.serve.request import Sampling

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
    engines, sampling = {}, Sampling(max_tokens=TOKENS, temperature=0.0, ignore_end=True)
    for weights in ("fp32", "bf16", "int8", "int4"):
        torch.manual_seed(0)
        config = ServeConfig(batch=1, weights=weights, threads=options.threads, blocks=40)
        engines[weights] = Engine(prepare(Transformer(MODEL).eval(), config, weights), config)
    seconds: dict[str, list[float]] = {name: [] for name in engines}
    for _ in range(options.rounds):
        for name, engine in engines.items():
            began = time.perf_counter()
            count = len(engine.continued([1], sampling))
            seconds[name].append((time.perf_counter() - began) / count)
    rate = load_profile().copy_bytes_per_second
    taken = {name: statistics.median(found) for name, found in seconds.items()}
    for name, engine in engines.items():
        embedding = engine.served.model.embedding
        assert embedding is not None
        read = engine.served.weight_bytes - embedding.weight.nbytes
        print(
            f"{name}: {1 / taken[name]:.1f} tokens/s, {taken['bf16'] / taken[name]:.2f} times bf16; "
            f"reads {read / 1e6:.0f} MB a token, {read / taken[name] / 1e9:.1f} GB/s, "
            f"{read / taken[name] / rate:.0%} of the copy rate"
        )


if __name__ == "__main__":
    main()
