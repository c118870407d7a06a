"""llama.cpp computes from our GGUF files what we compute from the run. LLAMA_CPP_PYTHON names an interpreter that has
the package `xllamacpp`, in an environment of its own; this one's unless given."""

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
# Log probability of each token after the ones before it; the server gives those of the likeliest, here of all.
THEIRS = """
import json, sys
import xllamacpp
tokens, size = json.loads(sys.argv[2]), int(sys.argv[3])
parameters = xllamacpp.CommonParams()
parameters.model.path, parameters.n_ctx, parameters.n_parallel, parameters.warmup = sys.argv[1], 256, 1, False
parameters.cpuparams.n_threads = 1
server = xllamacpp.Server(parameters)
found = {}
for n in range(1, len(tokens)):
    asked = {"prompt": tokens[:n], "n_predict": 1, "n_probs": size, "temperature": 0.0, "samplers": []}
    answer = server.handle_completions(asked)
    answer = answer if isinstance(answer, dict) else json.loads(answer)
    choice = (answer[0] if isinstance(answer, list) else answer)["choices"][0]
    if choice["logprobs"] is not None:  # the likeliest token ends the text
        found[n] = {top["id"]: top["logprob"] for top in choice["logprobs"]["content"][0]["top_logprobs"]}[tokens[n]]
print("found", json.dumps(found))
"""


@pytest.mark.long
@pytest.mark.parametrize(("to", "dtype"), [("int8", "q8_0"), ("int4", "q4_0")])
def test_llama_cpp_has_our_perplexity(
    to: str, dtype: str, train: Callable[..., Any], tiny_config: Callable[..., Any], ironlaw_here: Callable[..., Any],
    tmp_path: Path,
) -> None:  # fmt: skip
    pytest.importorskip("gguf")
    if subprocess.run([PYTHON, "-c", "import xllamacpp"], capture_output=True).returncode:
        pytest.skip("there is no xllamacpp: LLAMA_CPP_PYTHON names an interpreter that has it")
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
    words = [PYTHON, "-c", THEIRS, str(tmp_path / "out" / "model.gguf"), json.dumps(tokens.tolist()), "300"]
    done = subprocess.run(words, capture_output=True, text=True, timeout=120)
    lines = [line for line in done.stdout.splitlines() if line.startswith("found")]
    assert lines, done.stderr[-2000:]
    theirs = {int(n): value for n, value in json.loads(lines[0].removeprefix("found")).items()}
    assert len(theirs) > 20
    ours = [float(of_each[n - 1, tokens[n]]) for n in theirs]
    perplexities = [math.exp(-sum(found) / len(theirs)) for found in (ours, list(theirs.values()))]
    assert perplexities[1] == pytest.approx(perplexities[0], rel=0.01), perplexities
