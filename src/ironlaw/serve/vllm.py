"""Serves the same model with vLLM, in its own process, which supports several GPUs and nodes."""

from __future__ import annotations

import json
import os
import shutil
import sys
from pathlib import Path

from ironlaw.errors import UserError
from ironlaw.model.huggingface.configs import is_config_file
from ironlaw.serve.config import ServeConfig

_WEIGHTS = {"auto": "auto", "fp32": "float32", "bf16": "bfloat16"}
_KV = {"auto": "auto", "fp8": "fp8", "bf16": "auto", "fp32": "auto"}


def command(folder: Path, config: ServeConfig, program: str = "vllm") -> list[str]:
    """Return vLLM's command line for the settings it has in common. Raises UserError for a setting it lacks."""
    if not is_config_file(folder):
        raise UserError(f"vLLM reads Hugging Face directories: export it with `ironlaw export {folder} --out DIR`")
    if config.weights not in _WEIGHTS or config.kv not in _KV:
        raise UserError(
            "serve.weights and serve.kv in int8 and int4 are this engine's: leave them out with --engine vllm"
        )
    proposes: dict[str, object] | None = None
    if config.speculation == "ngram":
        proposes = {"method": "ngram", "num_speculative_tokens": config.drafted, "prompt_lookup_max": config.ngram}
    elif config.speculation == "draft":
        proposes = {"method": "draft_model", "num_speculative_tokens": config.drafted, "model": config.draft}
    flags = {
        "host": config.host, "port": config.port, "served-model-name": config.name or folder.resolve().name,
        "dtype": _WEIGHTS[config.weights], "kv-cache-dtype": _KV[config.kv], "max-num-seqs": config.batch,
        "max-num-batched-tokens": config.token_budget, "block-size": config.block, "scheduling-policy": config.policy,
        "seed": config.seed, "max-model-len": config.context, "num-gpu-blocks-override": config.blocks,
        "kv-cache-memory-bytes": config.kv_memory, "speculative-config": proposes and json.dumps(proposes),
    }  # fmt: skip
    given = [word for flag, value in flags.items() if value is not None for word in (f"--{flag}", str(value))]
    shares = "--enable-prefix-caching" if config.share_prefixes else "--no-enable-prefix-caching"
    keys = ["--api-key", *config.api_keys] if config.api_keys else []  # one flag, since only the last one counts
    return [program, "serve", str(folder), *given, shares, *keys]


def exec_vllm(folder: Path, config: ServeConfig) -> None:
    """Replace this process by vLLM."""
    beside = Path(sys.executable).with_name("vllm")
    program = str(beside) if beside.is_file() else shutil.which("vllm")
    if program is None:
        raise UserError("vllm is not installed here: pip install 'ironlaw[vllm]', or serve without --engine vllm")
    words = command(folder, config, program)
    sys.stdout.flush()
    os.execv(program, words)
