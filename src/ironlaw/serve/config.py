"""The settings of serving: the `[serve]` keys of `ironlaw serve --set serve.key=value`."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal

from pydantic import Field, ValidationError

from ironlaw.config import apply_override, explain_invalid
from ironlaw.errors import UserError
from ironlaw.files import read_toml
from ironlaw.schema import Section, section


class ServeConfig(Section):
    """Sizes are in tokens, memory in bytes."""

    host: str = "127.0.0.1"  # this machine only; 0.0.0.0: everybody who can reach it
    port: int = Field(8000, ge=0, le=65535)  # 0: any free one
    api_keys: tuple[str, ...] = ()  # of which a client must send one; none are asked for when empty
    name: str | None = None  # of the model in the API; the directory's unless given

    device: Literal["auto", "cpu", "cuda"] = "auto"  # auto: CUDA where there is a GPU
    # auto: as a compressed run holds them where a kernel has that format; else bf16 on CUDA, fp32 on a CPU
    weights: Literal["auto", "fp32", "bf16", "int8", "int4"] = "auto"
    kv: Literal["auto", "fp32", "bf16", "fp8", "int8", "int4"] = "auto"  # auto: as the weights' products
    threads: int | None = Field(None, gt=0)  # of a CPU; auto: one for small models, else all cores
    compiled: bool = True  # attention and norms of a CPU's decode step in C, where there is a compiler
    graphs: bool = True  # decode steps of a CUDA device as CUDA graphs
    context: int | None = Field(None, gt=0)  # longest prompt and answer together; the model's unless given

    block: int = Field(16, gt=0, le=1024)  # tokens per page of keys and values
    blocks: int | None = Field(None, gt=1)  # pages; as many as kv_memory holds unless given
    kv_memory: int | None = Field(None, gt=0)  # bytes; a part of what is free unless given
    share_prefixes: bool = True  # full pages of equal beginnings are computed once
    batch: int = Field(64, gt=0)  # requests that run at once
    token_budget: int = Field(512, gt=0)  # tokens of one step: decode first, prompts in chunks of what is left
    policy: Literal["fcfs", "priority"] = "fcfs"  # who runs next: the first to come, or by a request's `priority`
    waiting: int = Field(256, ge=0)  # requests that may wait; more are refused with 429

    speculation: Literal["none", "ngram", "draft"] = "none"  # what proposes tokens: repeated text, or a small model
    draft: str | None = None  # a run or a Hugging Face directory with the same tokenizer
    drafted: int = Field(4, gt=0, le=16)  # tokens proposed per step
    ngram: int = Field(3, gt=0)  # longest run of tokens that n-gram speculation looks up

    max_tokens: int = Field(256, gt=0)  # of an answer whose request does not say
    body_bytes: int = Field(4 * 2**20, gt=0)  # of a request
    drain_seconds: float = Field(30.0, ge=0)  # at shutdown, for requests that run
    trace_steps: int = Field(20_000, gt=0)  # newest engine steps that are remembered
    seed: int = 0  # of requests that give none


class _Settings(Section):
    serve: ServeConfig = section()


def serve_config(overrides: Sequence[str] = (), file: Path | None = None, **values: Any) -> ServeConfig:
    """Return the config from the [serve] table of a TOML file, values, and `serve.key=value` texts (prefix optional),
    the last of which counts. The first problem is a one-line UserError."""
    if file is not None:
        table = read_toml(file).get("serve")
        if not isinstance(table, dict):
            raise UserError(f"{file} has no [serve] table: give the tuned.toml of `ironlaw tune --serve`")
        values = table | values
    document: dict[str, Any] = {"serve": values}
    for text in overrides:
        apply_override(document, f"serve.{text.strip().removeprefix('serve.')}", _Settings, "serve.batch=16")
    try:
        config = _Settings(**document).serve
    except ValidationError as error:
        raise UserError(explain_invalid(error, _Settings)) from None
    if (config.speculation == "draft") != (config.draft is not None):
        raise UserError("serve.speculation = draft needs a model, serve.draft = DIRECTORY, and the other way round")
    return config
