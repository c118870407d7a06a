"""Export of a model as a GGUF file for llama.cpp and its derivatives. Needs the package `gguf` (ironlaw[gguf]).

The package maps Hugging Face's tensor names to llama.cpp's. llama.cpp's `llama` rotates neighbouring elements of a
head, whereas Ironlaw (and Qwen, StarCoder2) rotates the first half against the second, so rows of queries and keys are
permuted. GPT-2's matrices have outputs first again. Vectors stay fp32, as llama.cpp's kernels require.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ironlaw.errors import UserError
from ironlaw.files import read_json
from ironlaw.model.config import ModelConfig
from ironlaw.model.huggingface.configs import family_of
from ironlaw.model.huggingface.families import FAMILIES
from ironlaw.model.huggingface.tensors import to_theirs
from ironlaw.model.huggingface.weights import check_range
from ironlaw.model.rotary import llama3_frequencies
from ironlaw.schema import refuse

# Hugging Face's `model_type` -> the package's name of llama.cpp's architecture.
ARCHITECTURES = {
    "llama": "LLAMA", "mistral": "LLAMA", "qwen2": "QWEN2", "qwen3": "QWEN3", "gpt2": "GPT2",
    "starcoder2": "STARCODER2",
}  # fmt: skip
# Ironlaw's name -> type of the matrices, of embedding and output layer (wider, as in llama.cpp), and of the file.
TYPES = {
    "fp32": ("F32", "F32", "ALL_F32"), "fp16": ("F16", "F16", "MOSTLY_F16"), "bf16": ("BF16", "BF16", "MOSTLY_BF16"),
    "q8_0": ("Q8_0", "Q8_0", "MOSTLY_Q8_0"), "q4_0": ("Q4_0", "Q8_0", "MOSTLY_Q4_0"),
}  # fmt: skip
BLOCK = 32  # numbers of a row that share a scale in Q8_0 and Q4_0
WIDE = ("token_embd.weight", "output.weight")


def check_gguf(config: ModelConfig) -> str:
    """Return the architecture's name in the package. UserError for a model that llama.cpp does not support."""
    try:
        import gguf  # noqa: F401
    except ImportError:
        raise UserError("--to gguf needs the package gguf: pip install 'ironlaw[gguf]'") from None
    kind, scaling = _family(config), config.rope_scaling if not _is_linear(config) else None
    architecture = ARCHITECTURES.get(kind, "")
    biased = config.has_qkv_bias and config.has_out_bias and config.has_ffn_bias
    refuse((
        (not architecture, f"--to gguf writes {', '.join(ARCHITECTURES)}, and this model is {kind}: use --to hf"),
        (config.size_of_rotary != config.size_of_head,
         f"llama.cpp's {kind} turns whole heads, here {config.size_of_rotary} of {config.size_of_head}: use --to hf"),
        (config.sliding_window is not None and config.sliding_window < config.context,
         f"llama.cpp's {kind} has no sliding window: set model.context to {config.sliding_window}"),
        (not config.gated_ffn and config.activation != "gelu_tanh",
         f"llama.cpp's {kind} computes gelu_tanh, this model {config.activation}: use --to hf"),
        (architecture == "STARCODER2" and not biased,
         "llama.cpp's starcoder2 has biases in all linear layers, this model not: use --to hf"),
        (architecture not in ("LLAMA", "QWEN3") and config.query_size != config.hidden,
         f"llama.cpp's {kind} has heads as wide together as the model: use --to hf"),
        (scaling and (architecture != "LLAMA" or "low_freq_factor" not in scaling),
         "--to gguf writes positions scaled linearly, or as Llama 3.1's in a Llama: use --to hf"),
    ))  # fmt: skip
    return architecture


def write_gguf(
    file: Path, config: ModelConfig, weights: Mapping[str, Tensor], dtype: str = "fp16", *,
    scales: Mapping[str, Tensor] | None = None, tokenizer: Path | None = None, begin: int | None = None,
    end: int | None = None, adds_begin: bool = False, template: str | None = None,
) -> None:  # fmt: skip
    """Write `weights` (by Ironlaw's names) as one GGUF file with matrices in `dtype` (a key of `TYPES`). An
    OSError leaves a part of it.

    scales:     for weights that are already int4, the scale of each number: their codes are written unchanged.
    tokenizer:  a Hugging Face tokenizer.json; without one the file has token numbers only.
    begin, end: the ids that begin and end a text; adds_begin: whether prompts get the first.
    template:   the chat template.
    """
    architecture = check_gguf(config)
    import gguf

    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH[architecture], config.layers)
    fields = _shape_fields(config) | {
        "file_type": gguf.LlamaFileType[TYPES[dtype][2]], "quantization_version": gguf.GGML_QUANT_VERSION,
        "tokenizer_model": "none",
    }  # fmt: skip
    if tokenizer is not None:
        fields |= tokenizer_fields(tokenizer, config.vocab)
        fields |= {"add_bos_token": adds_begin, "bos_token_id": begin, "eos_token_id": end, "chat_template": template}
    of_matrices, of_ends, _ = TYPES[dtype]
    there, scales_there = _huggingface_weights(config, weights), _huggingface_weights(config, scales or {})
    writer = gguf.GGUFWriter(file, gguf.MODEL_ARCH_NAMES[gguf.MODEL_ARCH[architecture]])
    for field, value in fields.items():
        if value is not None:
            getattr(writer, f"add_{field}")(value)
    for theirs, tensor in there.items():
        name = names.get_name(theirs, try_suffixes=(".weight", ".bias"))
        assert name is not None, theirs
        wanted = of_ends if name in WIDE else of_matrices
        if tensor.dim() == 1 or name.startswith("position_embd"):
            wanted = "F32"
        elif wanted.startswith("Q") and tensor.shape[1] % BLOCK:
            wanted = "F16"
        kind = gguf.GGMLQuantizationType[wanted]
        with np.errstate(all="ignore"):  # an overflow is refused below
            if wanted == "Q4_0" and theirs in scales_there:
                data = _q4_0(tensor, scales_there[theirs])
            else:
                data = gguf.quants.quantize(tensor.numpy(), kind)
            check_range(theirs, torch.from_numpy(gguf.quants.dequantize(data, kind)), wanted)
        writer.add_tensor(name, data, raw_dtype=kind)
    if config.rope_scaling and not _is_linear(config):
        writer.add_tensor("rope_freqs.weight", _frequency_divisors(config))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def _family(config: ModelConfig) -> str:
    """Return Hugging Face's family; GPT-NeoX with sequential branches is equivalent to StarCoder2."""
    kind = family_of(config).kind
    return "starcoder2" if kind == "gpt_neox" and not config.parallel_norms else kind


def _huggingface_weights(config: ModelConfig, weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return the weights by Hugging Face's names in fp32, with outputs first and rows in llama.cpp's rotary order."""
    kind = _family(config)
    names = replace(FAMILIES[kind].names, transposed=False, neighbours=ARCHITECTURES[kind] == "LLAMA")
    return to_theirs(config, names, weights, torch.float32)


def _q4_0(tensor: Tensor, scale: Tensor) -> np.ndarray:
    """Return llama.cpp's Q4_0 blocks of numbers that are integer multiples of their scales: the scale in fp16, then 16
    bytes; byte i holds numbers i (low bits) and i + 16 (high bits), plus 8 each."""
    codes = ((tensor / scale).round().to(torch.int16) + 8).to(torch.uint8).unflatten(1, (-1, BLOCK))
    packed = codes[..., :16] | codes[..., 16:] << 4
    kept = scale.unflatten(1, (-1, BLOCK))[..., :1].to(torch.float16).contiguous().view(torch.uint8)
    return torch.cat((kept, packed), dim=-1).flatten(1).numpy()


def _shape_fields(config: ModelConfig) -> dict[str, Any]:
    """Return the shape by the names that the package's writer has for fields of the file."""
    import gguf

    norm = "layer_norm_rms_eps" if config.norm == "rmsnorm" else "layer_norm_eps"
    fields = {
        "name": config.name, "block_count": config.layers, "context_length": config.context,
        "embedding_length": config.hidden, "feed_forward_length": config.ffn_size, "head_count": config.heads,
        "head_count_kv": config.key_value_heads, "key_length": config.size_of_head,
        "value_length": config.size_of_head, "vocab_size": config.vocab, norm: config.norm_eps,
    }  # fmt: skip
    if config.positions == "rope":
        fields |= {"rope_dimension_count": config.size_of_head, "rope_freq_base": config.rope_theta}
    if config.rope_scaling and _is_linear(config):
        fields["rope_scaling_type"] = gguf.RopeScalingType.LINEAR
        fields["rope_scaling_factor"] = config.rope_scaling["factor"]
    return fields


def _is_linear(config: ModelConfig) -> bool:
    return set(config.rope_scaling or {}) == {"factor"} and not config.rope_short


def _frequency_divisors(config: ModelConfig) -> np.ndarray:
    """Return the divisors that llama.cpp applies to rotary frequencies."""
    half = config.size_of_rotary // 2
    plain = config.rope_theta ** (-torch.arange(half, dtype=torch.float64) / half)
    assert config.rope_scaling is not None
    return (plain / llama3_frequencies(plain, config.rope_scaling)).float().numpy()


# -- the tokenizer -----------------------------------------------------------------------------------------------------


# Regular expressions of pre-tokenizers -> their names in llama.cpp, which has no others (llama-vocab.cpp).
_CASES = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|",
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+",
)
_SPLITS = {_CASES[0] + r"\p{N}{1,3}" + _CASES[1]: "llama-bpe", _CASES[0] + r"\p{N}" + _CASES[1]: "qwen2"}
NORMAL, CONTROL, USER_DEFINED, UNUSED = 1, 3, 4, 5  # llama.cpp's token types


def tokenizer_fields(path: Path, vocab: int) -> dict[str, Any]:
    """Return the fields of a byte-level BPE tokenizer by their names in the package's writer. UserError for another.

    Ids below `vocab` that the tokenizer lacks become unused tokens.
    """
    document = read_json(path)
    model = document["model"]
    split = _split(document.get("pre_tokenizer"))
    normalizer = (document.get("normalizer") or {}).get("type", "NFC")
    if model.get("type") != "BPE" or split is None or normalizer != "NFC" or model.get("byte_fallback"):
        raise UserError(
            f"--to gguf knows byte-level BPE split as GPT-2, StarCoder, Llama 3 or Qwen2 do, and {path} is another: "
            "use --to hf"
        )
    tokens, types = [f"[UNUSED{number}]" for number in range(vocab)], [UNUSED] * vocab
    for token, number in model["vocab"].items():
        tokens[number], types[number] = token, NORMAL
    for added in document.get("added_tokens", ()):
        tokens[added["id"]], types[added["id"]] = added["content"], CONTROL if added["special"] else USER_DEFINED
    merges = [merge if isinstance(merge, str) else " ".join(merge) for merge in model["merges"]]
    return {
        "tokenizer_model": "gpt2",  # llama.cpp's name for byte-level BPE
        "tokenizer_pre": split, "token_list": tokens, "token_types": types, "token_merges": merges,
    }  # fmt: skip


def _split(pre_tokenizer: dict[str, Any] | None) -> str | None:
    """Return llama.cpp's name of a pre-tokenizer, or None if it has none."""
    parts = [] if pre_tokenizer is None else pre_tokenizer.get("pretokenizers", [pre_tokenizer])
    if not parts or parts[-1]["type"] != "ByteLevel" or parts[-1].get("add_prefix_space"):
        return None
    whole = parts[-1].get("use_regex", True)
    match parts[:-1]:
        case [] if whole:
            return "gpt-2"
        case [{"type": "Digits", "individual_digits": True}] if whole:
            return "starcoder"
        case [{"type": "Split", "pattern": {"Regex": expression}}] if not whole:
            return _SPLITS.get(expression)
    return None
