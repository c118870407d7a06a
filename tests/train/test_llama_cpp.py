"""llama.cpp computes from our GGUF files what we compute from the run. LLAMA_CPP_PYTHON names an interpreter that has
the package `llama-cpp-python`, in an environment of its own; this one's unless given."""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from ironlaw.train.checkpoint import newest_of
from ironlaw.train.restore import load_for_inference

from ..conftest import TINY_LLAMA

PYTHON = os.environ.get("LLAMA_CPP_PYTHON", sys.executable)
# Log probability of each token after the ones before it.
THEIRS = """
import json, sys
import numpy as np
from llama_cpp import Llama
tokens = json.loads(sys.argv[2])
model = Llama(sys.argv[1], n_ctx=256, logits_all=True, verbose=False, n_threads=1)
model.eval(tokens)
logits = np.array(model.scores[: len(tokens)], dtype=np.float64)
logits -= logits.max(1, keepdims=True)
of_each = logits - np.log(np.exp(logits).sum(1, keepdims=True))
print("found", json.dumps([of_each[n, token] for n, token in enumerate(tokens[1:])]))
"""


@pytest.mark.long
@pytest.mark.parametrize(("to", "dtype"), [("int8", "q8_0"), ("int4", "q4_0")])
def test_llama_cpp_has_our_perplexity(
    to: str, dtype: str, train: Callable[..., Any], tiny_config: Callable[..., Any], ironlaw_here: Callable[..., Any],
    tmp_path: Path,
) -> None:  # fmt: skip
    pytest.importorskip("gguf")
    if subprocess.run([PYTHON, "-c", "import llama_cpp"], capture_output=True).returncode:
        pytest.skip("there is no llama-cpp-python: LLAMA_CPP_PYTHON names an interpreter that has it")
    config = tiny_config(TINY_LLAMA | {"hidden": 64, "ffn": 128, "context": 64}, train={"steps": 60})
    train(config, tmp_path / "run")
    for words in (
        ("compress", "run", "--to", to, "--out", "small"),
        ("export", "small", "out", "--to", "gguf", "--dtype", dtype),
    ):
        code, _, err = ironlaw_here(*words)
        assert code == 0, err
    model = load_for_inference(newest_of(tmp_path / "small"), config.model)
    tokens = torch.randint(3, 300, (48,), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        of_each = torch.log_softmax(model(tokens[None])[0], -1)
    words = [PYTHON, "-c", THEIRS, str(tmp_path / "out" / "model.gguf"), json.dumps(tokens.tolist())]
    done = subprocess.run(words, capture_output=True, text=True, timeout=120)
    lines = [line for line in done.stdout.splitlines() if line.startswith("found")]
    assert lines, done.stderr[-2000:]
    theirs = json.loads(lines[0].removeprefix("found"))
    ours = [float(of_each[n, token]) for n, token in enumerate(tokens[1:])]
    perplexities = [math.exp(-sum(found) / len(theirs)) for found in (ours, theirs)]
    assert perplexities[1] == pytest.approx(perplexities[0], rel=0.01), perplexities
