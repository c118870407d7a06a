"""Weights to and from Hugging Face safetensors: GPT-2, Llama, Mistral, Qwen2, Qwen3, with experts Mixtral, Qwen2-MoE,
Qwen3-MoE and OLMoE, and with latent attention DeepSeek-V2 and V3. Those of more families are in
`family_weights.py`.

Differences are of form only. Query, key and value are one matrix here and, except in GPT-2, three there; GPT-2
stores its matrices input first; the experts' matrices are one stack here and one by one there. Rotary positions turn
the first half of a head against the second on both sides, so nothing is permuted; but for latent attention, where they
turn neighbours there, and rows change places.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from ironlaw.errors import UserError
from ironlaw.files import read_json, write_json
from ironlaw.model.config import ModelConfig
from ironlaw.model.huggingface.entry import Entry
from ironlaw.model.huggingface.family_weights import NAMES, family_entries
from ironlaw.model.huggingface.fields import family, to_fields

SINGLE, SHARDED = "model.safetensors", "model.safetensors.index.json"
_TYPES = {"BF16": torch.bfloat16, "F16": torch.float16}  # others are read as fp32
# What older files hold beside the weights: attention masks and rotary tables, which are calculated.
_BUFFERS = re.compile(r"(^|\.)(attn\.(masked_)?bias|rotary_emb\.inv_freq)$")


def entries(config: ModelConfig, kind: str | None = None) -> Iterator[Entry]:
    """Every tensor of the model, with its names on both sides. UserError for a model that has none there.

    `kind`: the `model_type` of the files, where some are read; else the one that would be written.
    """
    if kind in NAMES:
        yield from family_entries(config, kind)
        return
    gpt2 = family(config) == "gpt2"
    yield Entry("embedding.weight", ("transformer.wte.weight" if gpt2 else "model.embed_tokens.weight",))
    if gpt2:
        yield Entry("positions.weight", ("transformer.wpe.weight",))
    for layer in range(config.layers):
        yield from _gpt2_block(layer) if gpt2 else _llama_block(config, layer)
    final = "transformer.ln_f" if gpt2 else "model.norm"
    yield from (Entry(f"final_norm.{kind}", (f"{final}.{kind}",)) for kind in _norm(config))
    if not config.tied:
        yield Entry("head.weight", ("lm_head.weight",))


def _gpt2_block(layer: int) -> Iterator[Entry]:
    ours, theirs = f"blocks.{layer}", f"transformer.h.{layer}"
    for kind in ("weight", "bias"):
        yield Entry(f"{ours}.attention_norm.{kind}", (f"{theirs}.ln_1.{kind}",))
        yield Entry(f"{ours}.ffn_norm.{kind}", (f"{theirs}.ln_2.{kind}",))
        for mine, other in (
            ("attention.qkv", "attn.c_attn"), ("attention.out", "attn.c_proj"),
            ("ffn.up", "mlp.c_fc"), ("ffn.down", "mlp.c_proj"),
        ):  # fmt: skip
            yield Entry(f"{ours}.{mine}.{kind}", (f"{theirs}.{other}.{kind}",), transposed=kind == "weight")


def _llama_block(config: ModelConfig, layer: int) -> Iterator[Entry]:
    ours, theirs = f"blocks.{layer}", f"model.layers.{layer}"
    yield Entry(f"{ours}.attention_norm.weight", (f"{theirs}.input_layernorm.weight",))
    yield Entry(f"{ours}.ffn_norm.weight", (f"{theirs}.post_attention_layernorm.weight",))
    if config.latent is not None:
        yield from _latent(config, f"{ours}.attention", f"{theirs}.self_attn")
    sizes = (config.query_size, config.key_value_size, config.key_value_size)
    for kind in () if config.latent is not None else ("weight", "bias") if config.has_qkv_bias else ("weight",):
        names = tuple(f"{theirs}.self_attn.{part}_proj.{kind}" for part in "qkv")
        yield Entry(f"{ours}.attention.qkv.{kind}", names, sizes)
    if config.qk_norm:
        yield Entry(f"{ours}.attention.query_norm.weight", (f"{theirs}.self_attn.q_norm.weight",))
        yield Entry(f"{ours}.attention.key_norm.weight", (f"{theirs}.self_attn.k_norm.weight",))
    experts = config.moe is not None and config.moe.in_layer(layer)
    for kind in ("weight", "bias") if config.bias else ("weight",):
        yield Entry(f"{ours}.attention.out.{kind}", (f"{theirs}.self_attn.o_proj.{kind}",))
        for part in () if experts else ("gate", "up", "down"):
            yield Entry(f"{ours}.ffn.{part}.{kind}", (f"{theirs}.mlp.{part}_proj.{kind}",))
    if experts:
        yield from _experts(config, f"{ours}.ffn", theirs)


def _latent(config: ModelConfig, ours: str, theirs: str) -> Iterator[Entry]:
    """What comes before attention's output layer."""
    latent = config.latent
    assert latent is not None
    halves = (*range(0, latent.rotary_size, 2), *range(1, latent.rotary_size, 2))  # of neighbours, the first ones first

    def turned(start: int, plain: int) -> Iterator[int]:
        yield from range(start, start + plain)
        yield from (start + plain + row for row in halves)

    heads = range(0, config.query_size, latent.head_size)
    query = tuple(row for start in heads for row in turned(start, latent.plain_size))
    if latent.query_rank:
        yield Entry(f"{ours}.query_down.weight", (f"{theirs}.q_a_proj.weight",))
        yield Entry(f"{ours}.query_norm.weight", (f"{theirs}.q_a_layernorm.weight",))
    name = "q_b_proj" if latent.query_rank else "q_proj"
    yield Entry(f"{ours}.query_up.weight", (f"{theirs}.{name}.weight",), order=query)
    shared = tuple(turned(0, latent.key_value_rank))
    yield Entry(f"{ours}.latent_down.weight", (f"{theirs}.kv_a_proj_with_mqa.weight",), order=shared)
    yield Entry(f"{ours}.latent_norm.weight", (f"{theirs}.kv_a_layernorm.weight",))
    yield Entry(f"{ours}.latent_up.weight", (f"{theirs}.kv_b_proj.weight",))


def _experts(config: ModelConfig, ours: str, layer: str) -> Iterator[Entry]:
    """The router and the experts of one layer, which nobody but Mixtral calls by other names."""
    assert config.moe is not None
    mixtral = family(config) == "mixtral"
    theirs = f"{layer}.block_sparse_moe" if mixtral else f"{layer}.mlp"
    yield Entry(f"{ours}.router.weight", (f"{theirs}.gate.weight",))
    if config.moe.balance == "bias":
        yield Entry(f"{ours}.router.bias", (f"{theirs}.gate.e_score_correction_bias",))
    for part, name in (("gate", "w1"), ("up", "w3"), ("down", "w2")):
        name = name if mixtral else f"{part}_proj"
        each = tuple(f"{theirs}.experts.{number}.{name}.weight" for number in range(config.moe.experts))
        yield Entry(f"{ours}.experts.{part}.weight", each, stacked=True)
    if config.moe.shared_experts:
        shared = "shared_expert" if config.latent is None else "shared_experts"
        for part in ("gate", "up", "down"):
            yield Entry(f"{ours}.shared.{part}.weight", (f"{theirs}.{shared}.{part}_proj.weight",))
    if config.moe.shared_gate:
        yield Entry(f"{ours}.shared_gate.weight", (f"{theirs}.shared_expert_gate.weight",))


def _norm(config: ModelConfig) -> tuple[str, ...]:
    return ("weight", "bias") if config.norm == "layernorm" else ("weight",)


# -- import ------------------------------------------------------------------------------------------------------


class _Files:
    """The tensors of a directory by name, whichever files hold them. Only what is asked for is read."""

    def __init__(self, folder: Path, stack: ExitStack) -> None:
        self.folder = folder
        self._files: dict[str, Any] = {}
        try:
            if (folder / SHARDED).is_file():
                index = read_json(folder / SHARDED)
                paths = sorted({folder / name for name in index["weight_map"].values()})
            else:
                paths = [folder / SINGLE]
            for path in paths:
                file = stack.enter_context(safe_open(path, framework="pt"))
                self._files |= dict.fromkeys(file.keys(), file)
        except FileNotFoundError as error:
            missing = error.filename or folder / SINGLE
            raise UserError(f"no weights at {missing}: give a directory with {SINGLE} or {SHARDED}") from None
        except (SafetensorError, ValueError, KeyError) as error:
            raise UserError(f"the weights in {folder} cannot be read ({error}): fetch them again") from None
        # Files of the bare GPT-2, without its output layer, leave out the first part of the names.
        whole = ("transformer.", "model.", "gpt_neox.")
        self._prefix = "" if any(name.startswith(whole) for name in self._files) else "transformer."
        self.names = {self._prefix + name if name != "lm_head.weight" else name for name in self._files}

    def _stored(self, name: str) -> str:
        stored = name if name == "lm_head.weight" else name.removeprefix(self._prefix)
        if stored not in self._files:
            raise UserError(f"the weights in {self.folder} lack {name}: is its config.json that of another model?")
        return stored

    def shape(self, name: str) -> tuple[int, ...]:
        stored = self._stored(name)
        return tuple(self._files[stored].get_slice(stored).get_shape())

    def types(self) -> dict[torch.dtype, int]:
        """Numbers held in each type."""
        counts: dict[torch.dtype, int] = {}
        for name, file in self._files.items():
            part = file.get_slice(name)
            kind = _TYPES.get(part.get_dtype(), torch.float32)
            counts[kind] = counts.get(kind, 0) + math.prod(part.get_shape())
        return counts

    def tensor(self, name: str) -> Tensor:
        stored = self._stored(name)
        tensor: Tensor = self._files[stored].get_tensor(stored)
        return tensor


def _kind(folder: Path) -> str | None:
    """The `model_type` that the directory's `config.json` names."""
    try:
        return str(read_json(folder / "config.json")["model_type"])
    except (OSError, ValueError, KeyError):
        return None


def stored_type(folder: Path) -> torch.dtype:
    """What most of the numbers of a directory are kept in: bf16, fp16, or fp32 for anything else."""
    with ExitStack() as stack:
        counts = _Files(folder, stack).types()
    return max(counts, key=lambda kind: counts[kind])


def check_weights(folder: Path, config: ModelConfig) -> None:
    """UserError when the files in `folder` are not weights of `config`; reads their headers only."""
    from ironlaw.model.transformer import Transformer

    with torch.device("meta"):
        wanted = {name: tuple(tensor.shape) for name, tensor in Transformer(config).state_dict().items()}
    with ExitStack() as stack:
        files = _Files(folder, stack)
        known: set[str] = set()
        if any(name.endswith(".weight_scale_inv") for name in files.names):  # as DeepSeek-V3 was released
            raise UserError(f"the weights in {folder} are stored in 8 bits: convert them to bf16 first")
        for entry in entries(config, _kind(folder)):
            known |= set(entry.theirs)
            shapes = [files.shape(name) for name in entry.theirs]
            found = entry.here(shapes)
            if entry.ours == "positions.weight" and found[0] > config.context:
                found = (config.context, *found[1:])  # a shorter context uses the first positions
            if found != wanted[entry.ours]:
                raise UserError(
                    f"{entry.theirs[0]} in {folder} has shape {list(shapes[0])}, the model needs "
                    f"{list(wanted[entry.ours])} in all: change no dimension of [model] beside from"
                )
        left = sorted(n for n in files.names - known if not _BUFFERS.search(n) and n != "lm_head.weight")
        second = f"model.layers.{config.layers}."  # of DeepSeek-V3, the module that predicts a second token
        if config.latent is not None and f"{second}eh_proj.weight" in left:
            left = [name for name in left if not name.startswith(second)]
        if left:
            raise UserError(f"{folder} holds tensors that this model has no place for: {', '.join(left[:3])}")


def read_weights(
    folder: Path, config: ModelConfig, wanted: Callable[[str], bool] = lambda name: True
) -> Iterator[tuple[str, Tensor]]:
    """Name here and tensor in the stored precision, one at a time, of those `wanted`. Call `check_weights` first."""
    kind = _kind(folder)
    with ExitStack() as stack:
        files = _Files(folder, stack)
        if config.tied and "lm_head.weight" in files.names:
            first = next(iter(entries(config, kind))).theirs[0]
            if not torch.equal(files.tensor("lm_head.weight"), files.tensor(first)):
                raise UserError(f"{folder} has an output layer of its own: set model.tied = false")
        for entry in filter(lambda entry: wanted(entry.ours), entries(config, kind)):
            tensor = entry.join([files.tensor(name) for name in entry.theirs])
            yield entry.ours, tensor[: config.context] if entry.ours == "positions.weight" else tensor


@torch.no_grad()
def load_weights(folder: Path, model: torch.nn.Module, config: ModelConfig) -> None:
    """Copy the weights in `folder` into `model`, in the model's own precision."""
    state = model.state_dict()
    for name, tensor in read_weights(folder, config):
        state[name].copy_(tensor)


# -- export ------------------------------------------------------------------------------------------------------


def write_model(
    folder: Path, config: ModelConfig, weights: Mapping[str, Tensor], dtype: torch.dtype = torch.float32,
    end_of_text: int | None = None,
) -> None:  # fmt: skip
    """`config.json` and `model.safetensors` as `transformers` reads them; `weights` by their names here."""
    fields = to_fields(config) | {"dtype": str(dtype).removeprefix("torch.")}
    # Without these the family's own special tokens would be taken for ours.
    fields |= {"bos_token_id": end_of_text, "eos_token_id": end_of_text, "pad_token_id": None}
    tensors: dict[str, Tensor] = {}
    for entry in entries(config, str(fields["model_type"])):
        entry.put(weights[entry.ours].detach().to(dtype), tensors)
    folder.mkdir(parents=True, exist_ok=True)
    try:
        save_file(tensors, folder / SINGLE, metadata={"format": "pt"})
    except SafetensorError as error:  # a full disk: half a file would look like a model
        (folder / SINGLE).unlink(missing_ok=True)
        raise UserError(f"cannot write {folder / SINGLE}: {error}; give a folder with more space") from None
    write_json(folder / "config.json", fields)


def write_tokenizer(folder: Path, tokenizer: Path, end_of_text: str, context: int) -> None:
    """Copy a `tokenizer.json` and say to `transformers` how to load it."""
    (folder / "tokenizer.json").write_bytes(tokenizer.read_bytes())
    fields = {"tokenizer_class": "PreTrainedTokenizerFast", "model_max_length": context}
    fields |= {"eos_token": end_of_text, "bos_token": end_of_text, "clean_up_tokenization_spaces": False}
    write_json(folder / "tokenizer_config.json", fields)
