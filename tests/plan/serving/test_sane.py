"""What no plan may say, on random systems: constants are fitted, and a fit that breaks one of these is wrong."""

from __future__ import annotations

import random
from dataclasses import replace

import numpy as np
import pytest

from ironlaw.catalog.accelerators import accelerator
from ironlaw.catalog.models import model_names, released_names, repository
from ironlaw.model.config import ModelConfig
from ironlaw.plan.serving.estimate import Served
from ironlaw.plan.serving.rates import serving_engine
from ironlaw.plan.serving.systems import Formats, ServingLayout
from ironlaw.plan.serving.timing import decode_seconds, prompt_seconds

GPUS = ("a100-sxm-80gb", "h100-sxm-80gb", "h200", "b200-sxm", "l40s", "a10g", "l4", "rtx-4090", "mi300x", "rtx-5090")
OWN = (*GPUS[4:], "m2-max-38c", "m4-max-40c", "gtx-1080-ti", "v100-sxm2-16gb")
ENGINES = {"vllm": GPUS, "sglang": GPUS, "tensorrt-llm": GPUS[:8], "llama.cpp": OWN, "transformers": GPUS, "atom": GPUS}
MODELS = ("llama3-8b", "llama3-70b", "llama-3.2-3b", "qwen3-30b-a3b", "gpt-oss-20b", "mixtral-8x7b", "gemma-3-27b")


def sample(count: int = 60) -> list[Served]:
    draw = random.Random(14)
    found = []
    for _ in range(count):
        engine = draw.choice(sorted(ENGINES))
        weights = draw.choice(("q4_0", "q8_0", "f16-gguf") if engine == "llama.cpp" else ("bf16", "fp8", "int4-awq"))
        model, device = ModelConfig.named(draw.choice(MODELS)), accelerator(draw.choice(ENGINES[engine]))
        found.append(Served(model, device, serving_engine(engine), ServingLayout(), Formats(weights)))
    return found


@pytest.mark.parametrize("served", sample(), ids=lambda s: f"{s.model.name}-{s.device.name}-{s.engine.name}")
def test_more_at_once_is_more_per_second_and_nothing_beats_the_memory(served: Served) -> None:
    at_once, system = np.array([1.0, 2.0, 4.0, 16.0, 64.0, 256.0]), served.system
    seconds = decode_seconds(system, at_once, 512.0)
    assert (np.diff(seconds) > 0).all() and (np.diff(at_once / seconds) > 0).all()
    read = system.demand.active * min(float(system.expert_bytes), float(system.dense_bytes))
    assert seconds[0] > read / system.bandwidth
    held = float(system.weight_bytes) + max(served.kv_tokens, 0.0) * float(system.token_bytes)
    assert served.kv_tokens < 1 or held < float(system.memory)
    assert prompt_seconds(system, 1.0, 2048.0) < 2048 * seconds[0]  # together sooner than one after another


@pytest.mark.parametrize(
    ("older", "newer"),
    [
        ("a100-sxm-80gb", "h100-sxm-80gb"), ("h100-sxm-80gb", "h200"), ("h200", "b200-sxm"), ("a10g", "l40s"),
        ("mi300x", "mi325x"), ("rtx-3090", "rtx-4090"), ("rtx-4090", "rtx-5090"), ("m1-max-32c", "m4-max-40c"),
    ],
)  # fmt: skip
def test_a_successor_is_no_slower(older: str, newer: str) -> None:
    for engine, weights in (("vllm", "bf16"), ("vllm", "int4-awq"), ("llama.cpp", "q4_0"), ("atom", "bf16")):
        if engine == "llama.cpp" or "max" not in older:
            a, b = (
                Served(ModelConfig.named("llama3-8b"), accelerator(name), serving_engine(engine), ServingLayout(),
                       Formats(weights)).system
                for name in (older, newer)
            )  # fmt: skip
            assert decode_seconds(b, 1.0, 512.0) < 1.02 * decode_seconds(a, 1.0, 512.0), engine
            assert prompt_seconds(b, 1.0, 2048.0) < 1.02 * prompt_seconds(a, 1.0, 2048.0), engine


@pytest.mark.parametrize("engine", ["vllm", "sglang", "tensorrt-llm", "llama.cpp", "atom"])
def test_fewer_bits_and_more_ranks_are_no_slower_for_one_request(engine: str) -> None:
    wide, few = ("f16-gguf", "q4_0") if engine == "llama.cpp" else ("bf16", "int4-awq")
    for device in set(ENGINES[engine]) - {"gtx-1080-ti"}:
        one = Served(ModelConfig.named("llama3-70b"), accelerator(device), serving_engine(engine), ServingLayout(),
                     Formats(wide))  # fmt: skip
        alone = decode_seconds(one.system, 1.0, 512.0)
        assert decode_seconds(replace(one, formats=Formats(few)).system, 1.0, 512.0) < alone, device
        if engine != "llama.cpp":
            assert decode_seconds(replace(one, layout=ServingLayout(8)).system, 1.0, 512.0) < alone, device


def test_every_published_model_has_the_repository_that_engines_load() -> None:
    for name in [*model_names(), *released_names()]:
        assert name == "gpt3-175b" or repository(name).count("/") == 1, name
    assert repository("/srv/models/ours") == "/srv/models/ours"
