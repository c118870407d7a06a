"""Loads a run or a Hugging Face directory as a model that is ready to serve."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import torch

from ironlaw.cores import usable_cores
from ironlaw.data.chat import Text, read_template
from ironlaw.data.tokenizer import Tokenizer
from ironlaw.errors import UserError
from ironlaw.files import at_home
from ironlaw.machine import host
from ironlaw.model.packed import multiplies_all, pack
from ironlaw.model.transformer import Transformer
from ironlaw.numerics.quantized import Quantized
from ironlaw.numerics.quantized_linear import quantize_layers
from ironlaw.serve.config import ServeConfig
from ironlaw.train.restore import load_trained

_SMALL_MODEL = 30_000_000  # parameters: below, one token's products take longer to divide among threads than to compute
_KV_SHARE = 0.4  # of the memory that is free after the weights are loaded
_CUDA_KV_SHARE = 0.8  # the rest is for what a step computes, the pages that it gathers, and recorded graphs


@dataclass
class LoadedModel:
    """A model on its device, with its tokenizer and formats."""

    name: str
    model: Transformer
    device: torch.device
    weights: str  # fp32, bf16, or the format that linear layers are held and multiplied in
    kv: str
    threads: int
    weight_bytes: int = 0
    end_tokens: frozenset[int] = frozenset()
    tokenizer: Tokenizer | None = None
    template: tuple[str | None, dict[str, str]] = (None, {})  # chat template, and the special tokens it names
    draft: LoadedModel | None = None
    about: dict[str, Any] = field(default_factory=dict)  # identifies the checkpoint of a run
    passed_over: tuple[str, ...] = ()  # newer checkpoints that are damaged
    kernels: dict[str, int] = field(default_factory=dict)  # kernel -> number of quantized layers that use it
    note: str = ""  # on formats that were requested or stored, but have no kernel here

    @property
    def notes(self) -> tuple[str, ...]:
        """What a user should know of how the model was loaded."""
        return (*self.passed_over, *filter(None, [self.note]))

    @property
    def autocast(self) -> bool:
        return self.weights == "bf16"

    @cached_property
    def text(self) -> Text | None:
        """Converts prompts to tokens and answers to text; None without a tokenizer."""
        return None if self.tokenizer is None else Text(self.tokenizer, *self.template)

    def kv_memory(self, config: ServeConfig) -> int:
        """Return the bytes for keys and values."""
        if config.kv_memory is not None:
            return config.kv_memory
        if self.device.type == "cuda":
            free, _ = torch.cuda.mem_get_info(self.device)
            return int(_CUDA_KV_SHARE * free)
        return int(_KV_SHARE * host.available_bytes())


def load_served(path: Path, config: ServeConfig, needs_text: bool = False) -> LoadedModel:
    """Load a model to serve. UserError if `path` is neither a run with a checkpoint nor a Hugging Face directory.
    Without a tokenizer prompts are token ids, or with `needs_text` a UserError is raised."""

    trained = load_trained(path, needs_text)
    folder = path if path.is_dir() else path.parent
    served = prepare(trained.model, config, name=folder.resolve().name, held=trained.held)
    served.about, served.passed_over = trained.about(), trained.passed_over
    served.tokenizer, served.template = trained.tokenizer, read_template(folder)
    if trained.tokenizer is not None:
        served.end_tokens = frozenset(trained.tokenizer.ends)
    if config.draft is not None and config.speculation == "draft":
        draft = load_served(at_home(config.draft), config.model_copy(update={"draft": None}))
        if draft.model.config.vocab != served.model.config.vocab:
            raise UserError(f"serve.draft = {config.draft}: its vocabulary is another one, so it cannot propose tokens")
        served.draft = draft
    return served


def prepare(
    model: Transformer, config: ServeConfig, name: str, held: Mapping[str, Quantized] | None = None
) -> LoadedModel:
    """Put a model on its device, in the formats that it is served in. `held`: a compressed run's weights by name.

    Raises ValueError if the model, which is changed in place, is already held in other formats.
    """
    if config.device == "cuda" and not torch.cuda.is_available():
        raise UserError("serve.device = cuda, but PyTorch sees no CUDA device: use serve.device = cpu")
    device = torch.device("cuda" if config.device != "cpu" and torch.cuda.is_available() else "cpu")
    threads = config.threads or (1 if model.config.parameters < _SMALL_MODEL else usable_cores())
    torch.set_num_threads(threads)
    model.requires_grad_(False).to(device)
    wide = "bf16" if device.type == "cuda" else "fp32"
    asked = config.weights if config.weights in ("int8", "int4") else None
    held = held if held and (config.weights == "auto" or asked) else {}
    kernels = quantize_layers(model, {n: w for n, w in held.items() if asked in (None, w.format.name)}, asked)
    unknown = kernels.pop("", 0)
    formats = sorted({asked} if asked else {weight.format.name for weight in held.values()})
    wide = config.weights if config.weights in ("fp32", "bf16") else wide
    weights = "+".join(formats) if kernels else wide
    note = f"no kernel multiplies {', '.join(formats)} here: {unknown} layers are in {wide}" if unknown else ""
    if device.type == "cpu" and wide == "bf16" and not multiplies_all(model, torch.bfloat16, config.compiled):
        note = "this processor has no products in bf16: serve.weights = fp32 is faster"
    before = model.__dict__.setdefault("served_in", weights)
    if before != weights:
        raise ValueError(f"the model is held in {before}: load it again to serve it in {weights}")
    kv = ("bf16" if weights == "bf16" else "fp32") if config.kv == "auto" else config.kv
    size = pack(model, wide, config.compiled)
    return LoadedModel(config.name or name, model, device, weights, kv, threads, size, kernels=kernels, note=note)
