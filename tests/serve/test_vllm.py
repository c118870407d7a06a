"""Settings as vLLM's command line has them."""

from __future__ import annotations

import json
from itertools import pairwise
from pathlib import Path

import pytest

from ironlaw.errors import UserError
from ironlaw.serve.config import ServeConfig
from ironlaw.serve.vllm import command, exec_vllm


def test_shared_settings_become_vllms_flags(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    words = command(tmp_path, ServeConfig(port=9, batch=7, context=99, share_prefixes=False, weights="bf16"))
    pairs = dict(pairwise(words))
    assert pairs["--port"] == "9" and pairs["--max-num-seqs"] == "7" and pairs["--max-model-len"] == "99"
    assert pairs["--dtype"] == "bfloat16" and "--no-enable-prefix-caching" in words
    words = command(tmp_path, ServeConfig(speculation="ngram", drafted=3, ngram=2, kv_memory=2**30))
    assert json.loads(words[words.index("--speculative-config") + 1]) == {
        "method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_max": 2,
    }  # fmt: skip
    assert dict(pairwise(words))["--kv-cache-memory-bytes"] == str(2**30)
    assert command(tmp_path, ServeConfig(api_keys=("a", "b")))[-3:] == ["--api-key", "a", "b"]


def test_what_vllm_lacks_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(UserError, match="ironlaw export"):
        command(tmp_path, ServeConfig())
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(UserError, match="int8"):
        command(tmp_path, ServeConfig(kv="int8"))
    monkeypatch.setattr("shutil.which", lambda name: None)
    with pytest.raises(UserError, match="vllm is not installed"):
        exec_vllm(tmp_path, ServeConfig())
