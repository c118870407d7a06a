"""Compressed weights in the formats of `transformers` and vLLM: a layer's tensors, and `quantization_config`.

    int4, int8, fp8, mxfp4   compressed-tensors: our codes, packed in int32 (integers) or bytes (E2M1)
    nf4                      bitsandbytes: blocks of 64 run over the flattened matrix, the first code in the high bits

Codes and scales pass through the same name map as weights (`model/huggingface/tensors.py`), which splits and reorders
rows: a scale is therefore first repeated for each of its numbers, and gathered again afterwards.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from ironlaw.catalog.formats import number_format
from ironlaw.errors import UserError
from ironlaw.model.config import ModelConfig
from ironlaw.model.huggingface.configs import family_of
from ironlaw.model.huggingface.tensors import entries
from ironlaw.numerics.packing import pack
from ironlaw.numerics.quantized import Quantized
from ironlaw.numerics.rounding import encode

# compressed-tensors' names of the file format and of the number type.
_COMPRESSED = {
    "int4": ("pack-quantized", "int"), "int8": ("pack-quantized", "int"), "fp8": ("float-quantized", "float"),
    "mxfp4": ("mxfp4-pack-quantized", "float"),
}  # fmt: skip
STORED = (*_COMPRESSED, "nf4")
# The library that `transformers` reads the format with, and its type of products on a CPU, if that is not fp32.
LIBRARY = dict.fromkeys(_COMPRESSED, "compressed_tensors") | {"nf4": "bitsandbytes"}
COMPUTES = {"mxfp4": torch.bfloat16, "nf4": torch.bfloat16}


def check_stored(config: ModelConfig, held: Mapping[str, Quantized], name: str) -> None:
    """Raises UserError if the layers are not all in format `name`, or their family or row length is unsupported."""
    formats = {weight.format.name for weight in held.values()}
    if formats != {name}:
        found = " and ".join(sorted(formats)) or "no compressed weights"
        raise UserError(
            f"--dtype {name}: the run holds {found}; write `ironlaw compress RUN --to {name} --out DIR` first"
        )
    there = [entry for entry in entries(config, family_of(config).names) if entry.ours in held]
    if any(entry.transposed for entry in there):
        raise UserError(
            f"GPT-2's matrices lie transposed, in layers that {LIBRARY[name]} does not hold: leave --dtype out, or use "
            "--to gguf"
        )
    if any(entry.stacked or (entry.unstacked and name == "nf4") for entry in there):
        raise UserError(f"experts are one stack there, which {LIBRARY[name]} does not hold: leave --dtype out")
    wide = next((w for w in held.values() if w.shape[-1] % (64 if name == "nf4" else 32)), None)
    if wide is not None and name != "fp8":
        raise UserError(f"rows of {wide.shape[-1]} numbers are no whole blocks of {name}: leave --dtype out")


def stored_tensors(
    config: ModelConfig, weights: Mapping[str, Tensor], held: Mapping[str, Quantized], name: str
) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Returns the file's tensors by their names, and `quantization_config`. Call `check_stored` first."""
    codes, scales, tensors = dict[str, Tensor](), dict[str, Tensor](), dict[str, Tensor]()
    ends = {"embedding.weight", "head.weight"}  # stored dequantised: no client supports compressed embeddings
    for entry in entries(config, family_of(config).names):
        one = held.get(entry.ours)
        if one is None or entry.ours in ends:
            entry.to_theirs(weights[entry.ours].detach().float(), tensors)
            continue
        entry.to_theirs(one.values(), codes)
        entry.to_theirs(one.scale_of_each(), scales)
        block, about = one.block, _config(one, name)
    assert block is not None
    for there, values in codes.items():
        group = block[1] if block[1] < values.shape[1] and block[0] == 1 else values.shape[1]
        made = _nf4 if name == "nf4" else _compressed
        tensors |= made(there, values, scales[there][:, ::group].contiguous(), name)
    return tensors, about


def _config(held: Quantized, name: str) -> dict[str, Any]:
    if name == "nf4":
        return {
            "quant_method": "bitsandbytes", "load_in_4bit": True, "bnb_4bit_quant_type": "nf4",
            "bnb_4bit_use_double_quant": False, "bnb_4bit_compute_dtype": "bfloat16",
            "llm_int8_skip_modules": ["lm_head"],
        }  # fmt: skip
    files, kind = _COMPRESSED[name]
    numbers: dict[str, Any] = {"num_bits": held.format.element.bits, "type": kind, "symmetric": True, "dynamic": False}
    assert held.block is not None
    by_group = name in ("int4", "mxfp4")
    numbers |= {"strategy": "group", "group_size": held.block[1]} if by_group else {"strategy": "channel"}
    if name == "mxfp4":
        numbers |= {"scale_dtype": "torch.uint8"}
    group = {"targets": ["Linear"], "weights": numbers, "format": files}
    return {
        "quant_method": "compressed-tensors", "format": files, "quantization_status": "compressed",
        "ignore": ["lm_head"], "config_groups": {"group_0": group},
    }  # fmt: skip


def _compressed(there: str, values: Tensor, scale: Tensor, name: str) -> dict[str, Tensor]:
    made = {f"{there}_scale": scale}
    if name == "fp8":
        return made | {there: values.to(torch.float8_e4m3fn)}
    if name == "mxfp4":  # scales are powers of two: stored as exponents
        exponents = torch.frexp(scale).exponent - 1 + 127
        return {
            f"{there}_scale": exponents.to(torch.uint8),
            f"{there}_packed": pack(encode(values, number_format("fp4_e2m1")), 4),
        }
    bits = 4 if name == "int4" else 8
    words = pack((values + (1 << (bits - 1))).to(torch.uint8), bits).view(torch.int32)
    return made | {f"{there}_packed": words, f"{there}_shape": torch.tensor(values.shape)}


def _nf4(there: str, values: Tensor, scale: Tensor, name: str) -> dict[str, Tensor]:
    format = number_format("nf4")
    codes = encode(values, format).flatten()
    about = {"quant_type": "nf4", "blocksize": 64, "dtype": "float32", "shape": list(values.shape)}
    said = torch.tensor(list(json.dumps(about).encode()), dtype=torch.uint8)
    return {
        there: (codes[::2] << 4 | codes[1::2])[:, None].contiguous(), f"{there}.absmax": scale.flatten(),
        f"{there}.quant_map": torch.tensor(format.values), f"{there}.quant_state.bitsandbytes__nf4": said,
    }  # fmt: skip
