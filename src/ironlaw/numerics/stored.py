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
from ironlaw.model.huggingface.tensors import entries, to_theirs
from ironlaw.numerics.quantized import Quantized
from ironlaw.numerics.rounding import encode, pack

# compressed-tensors' names of the file format and of the number type.
_COMPRESSED = {
    "int4": ("pack-quantized", "int"), "int8": ("pack-quantized", "int"), "fp8": ("float-quantized", "float"),
    "mxfp4": ("mxfp4-pack-quantized", "float"),
}  # fmt: skip
STORED = (*_COMPRESSED, "nf4")
# The library that `transformers` reads the format with, and its type of products on a CPU, if that is not fp32.
LIBRARY = dict.fromkeys(_COMPRESSED, "compressed_tensors") | {"nf4": "bitsandbytes"}
# Rows have to be multiples of so many numbers: whole blocks, or the codes of a 32-bit word.
_ROW = {"int4": 32, "int8": 4, "fp8": 1, "mxfp4": 32, "nf4": 64}
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
    for row in {weight.shape[-1] for weight in held.values()}:
        if row % _ROW[name]:
            raise UserError(f"rows of {row} numbers are no multiple of {_ROW[name]}, as in {name}: leave --dtype out")


def stored_tensors(
    config: ModelConfig, weights: Mapping[str, Tensor], held: Mapping[str, Quantized], name: str
) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Returns the file's tensors by their names, and `quantization_config`. Call `check_stored` first."""
    names, block = family_of(config).names, number_format(name).block_of(weight=True)
    assert block is not None
    # Embedding and output layer are stored dequantised: no client supports compressed embeddings.
    coded = {name: one for name, one in held.items() if name.startswith("blocks.")}
    tensors = to_theirs(config, names, {n: weight for n, weight in weights.items() if n not in coded}, torch.float32)
    scales = to_theirs(config, names, {n: one.scale_of_each() for n, one in coded.items()})
    for there, values in to_theirs(config, names, {n: one.values() for n, one in coded.items()}).items():
        made = _nf4 if name == "nf4" else _compressed
        tensors |= made(there, values, scales[there][:, :: block[1] or values.shape[1]].contiguous(), name)
    return tensors, _config(name, block[1])


def _config(name: str, group: int) -> dict[str, Any]:
    if name == "nf4":
        return {
            "quant_method": "bitsandbytes", "load_in_4bit": True, "bnb_4bit_quant_type": "nf4",
            "bnb_4bit_use_double_quant": False, "bnb_4bit_compute_dtype": "bfloat16",
            "llm_int8_skip_modules": ["lm_head"],
        }  # fmt: skip
    files, kind = _COMPRESSED[name]
    bits = number_format(name).element.bits
    numbers: dict[str, Any] = {"num_bits": bits, "type": kind, "symmetric": True, "dynamic": False}
    numbers |= {"strategy": "group", "group_size": group} if group else {"strategy": "channel"}
    if name == "mxfp4":
        numbers |= {"scale_dtype": "torch.uint8"}
    layers = {"targets": ["Linear"], "weights": numbers, "format": files}
    return {
        "quant_method": "compressed-tensors", "format": files, "quantization_status": "compressed",
        "ignore": ["lm_head"], "config_groups": {"group_0": layers},
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
