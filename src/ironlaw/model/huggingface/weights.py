"""Import and export of weights as Hugging Face safetensors, by the names of `tensors.py`."""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from ironlaw.errors import UserError
from ironlaw.files import open_file, read_json, read_json_or_empty, write_json
from ironlaw.model.config import ModelConfig
from ironlaw.model.huggingface.configs import family_of, names_of, to_fields
from ironlaw.model.huggingface.tensors import entries, shapes_of, to_theirs

SINGLE, SHARDED = "model.safetensors", "model.safetensors.index.json"
_TYPES = {"BF16": torch.bfloat16, "F16": torch.float16}  # others are read as fp32
# Buffers in older files besides the weights: attention masks and rotary tables, which are calculated.
_BUFFERS = re.compile(r"(^|\.)(attn\.(masked_)?bias|rotary_emb\.inv_freq)$")


# -- import ------------------------------------------------------------------------------------------------------


class _Files:
    """The tensors of a directory by name, over all of its files, read on demand."""

    def __init__(self, folder: Path, stack: ExitStack) -> None:
        self.folder = folder
        self.files: dict[str, Any] = {}
        # If both exist, the index belongs to older files, and `transformers` reads the single file.
        single = (folder / SINGLE).is_file() or not (folder / SHARDED).is_file()
        path = None
        try:
            for path in [folder / SINGLE] if single else _shards(folder):
                open_file(path).close()  # refuses a folder, and a pipe, for which the library would wait for ever
                file = stack.enter_context(safe_open(path, framework="pt"))
                for name in sorted(self.files.keys() & file.keys()):
                    one, other = self.files[name].get_tensor(name), file.get_tensor(name)
                    if one.dtype != other.dtype or not torch.equal(one, other):
                        raise ValueError(f"{name} is there twice, with different numbers")
                self.files |= dict.fromkeys(file.keys(), file)
        except FileNotFoundError:
            pickled = any(folder.glob("pytorch_model*.bin"))
            raise UserError(
                f"no weights at {path}: "
                + ("save the pickled ones again, with transformers' save_pretrained" if pickled else
                   f"give a directory with {SINGLE}, or {SHARDED} and all its files")
            ) from None  # fmt: skip
        except (SafetensorError, ValueError, KeyError) as error:
            raise UserError(f"the weights in {folder} cannot be read ({error}): fetch them again") from None
        # Files of GPT-2 without its output layer omit the prefix of the names.
        whole = ("transformer.", "model.", "gpt_neox.")
        self._prefix = "" if any(name.startswith(whole) for name in self.files) else "transformer."
        self.names = {self._prefix + name if name != "lm_head.weight" else name for name in self.files}

    def _stored(self, name: str) -> str:
        stored = name if name == "lm_head.weight" else name.removeprefix(self._prefix)
        if stored not in self.files:
            raise UserError(f"the weights in {self.folder} lack {name}: is its config.json that of another model?")
        return stored

    def shape(self, name: str) -> tuple[int, ...]:
        stored = self._stored(name)
        return tuple(self.files[stored].get_slice(stored).get_shape())

    def tensor(self, name: str) -> Tensor:
        stored = self._stored(name)
        tensor: Tensor = self.files[stored].get_tensor(stored)
        if tensor.dtype not in (torch.float64, torch.float32, torch.float16, torch.bfloat16):
            raise UserError(f"{name} in {self.folder} is stored as {tensor.dtype}: convert the weights to bf16 first")
        if not is_finite(tensor):
            raise UserError(f"{name} in {self.folder} holds numbers that are not finite: fetch the weights again")
        return tensor


def is_finite(tensor: Tensor) -> bool:
    return all(math.isfinite(end) for end in tensor.aminmax())


def check_range(name: str, held: Tensor, dtype: str) -> None:
    """Raise UserError if `held`, what a tensor became in `dtype`, has numbers that are not finite."""
    if held.is_floating_point() and not is_finite(held.float()):
        raise UserError(f"{name} has numbers too large for {dtype}, or not finite: export it with --dtype bf16 or fp32")


def _shards(folder: Path) -> list[Path]:
    """Return the files named by an index, which must be in its own directory."""
    found = read_json(folder / SHARDED).get("weight_map")
    names = set(map(str, found.values())) if isinstance(found, dict) else set()
    if not names or any(Path(name).name != name for name in names):
        raise UserError(f"{folder / SHARDED} names no files of its directory in weight_map: fetch it again")
    return sorted(folder / name for name in names)


def stored_type(folder: Path) -> torch.dtype:
    """Return the dtype of most numbers in a directory: bf16, fp16, or fp32 for anything else."""
    counts = Counter[torch.dtype]()
    with ExitStack() as stack:
        for name, file in _Files(folder, stack).files.items():
            part = file.get_slice(name)
            counts[_TYPES.get(part.get_dtype(), torch.float32)] += math.prod(part.get_shape())
    return counts.most_common(1)[0][0]


def check_weights(folder: Path, config: ModelConfig) -> None:
    """Raise UserError if the files in `folder` are not weights of `config`. Only their headers are read."""
    held = read_json_or_empty(folder / "config.json").get("quantization_config")
    if held:
        method = held.get("quant_method") if isinstance(held, dict) else held
        raise UserError(f"the weights in {folder} are stored in few bits ({method}): convert them to bf16 first")
    if any((folder / f"adapter_{name}").is_file() for name in ("config.json", "model.safetensors")):
        raise UserError(
            f"{folder} holds an adapter beside the weights: merge it, or start from it (finetune.start_from)"
        )
    wanted = shapes_of(config)
    with ExitStack() as stack:
        files = _Files(folder, stack)
        known: set[str] = set()
        for entry in entries(config, names_of(folder, config)):
            known |= set(entry.theirs)
            shapes = [files.shape(name) for name in entry.theirs]
            found = tuple(entry.from_theirs([torch.empty(shape, device="meta") for shape in shapes]).shape)
            if entry.ours == "positions.weight" and found[0] > config.context:
                found = (config.context, *found[1:])  # a shorter context uses the first positions
            if found != wanted[entry.ours]:
                raise UserError(
                    f"{entry.theirs[0]} in {folder} has shape {list(shapes[0])}, the model needs "
                    f"{list(wanted[entry.ours])} in all: change no dimension of [model] beside from"
                )
        left = sorted(n for n in files.names - known if not _BUFFERS.search(n) and n != "lm_head.weight")
        second = f"model.layers.{config.layers}."  # DeepSeek-V3's module that predicts a second token
        if config.latent is not None and f"{second}eh_proj.weight" in left:
            left = [name for name in left if not name.startswith(second)]
        if left:
            raise UserError(f"{folder} holds tensors that this model has no place for: {', '.join(left[:3])}")


def read_weights(
    folder: Path, config: ModelConfig, wanted: Callable[[str], bool] = lambda name: True
) -> Iterator[tuple[str, Tensor]]:
    """Yield our name and the tensor in stored precision for each `wanted` name. Call `check_weights` first."""
    names = names_of(folder, config)
    with ExitStack() as stack:
        files = _Files(folder, stack)
        if config.tied and "lm_head.weight" in files.names:
            first = next(iter(entries(config, names))).theirs[0]
            if not torch.equal(files.tensor("lm_head.weight"), files.tensor(first)):
                raise UserError(f"{folder} has an output layer of its own: set model.tied = false")
        for entry in filter(lambda entry: wanted(entry.ours), entries(config, names)):
            tensor = entry.from_theirs([files.tensor(name) for name in entry.theirs])
            yield entry.ours, tensor[: config.context] if entry.ours == "positions.weight" else tensor


@torch.no_grad()
def load_weights(folder: Path, model: torch.nn.Module, config: ModelConfig) -> None:
    """Copy the weights in `folder` into `model`, in the model's own precision."""
    state = model.state_dict()
    for name, tensor in read_weights(folder, config):
        state[name].copy_(tensor)


# -- export ------------------------------------------------------------------------------------------------------


def write_model(
    folder: Path, config: ModelConfig, weights: Mapping[str, Tensor], dtype: torch.dtype = torch.float32, **more: Any
) -> None:  # fmt: skip
    """Write `config.json` and `model.safetensors` for `transformers`; `weights` have our names. For `more` see
    `write_tensors`."""
    write_tensors(folder, config, to_theirs(config, family_of(config).names, weights, dtype), dtype, **more)


def write_tensors(
    folder: Path, config: ModelConfig, tensors: dict[str, Tensor], dtype: torch.dtype, **more: Any
) -> None:
    """Write `config.json` and `model.safetensors`; `tensors` have their names. more: further fields of the config."""
    fields = to_fields(config) | {"dtype": str(dtype).removeprefix("torch.")}
    # Otherwise the family's default special tokens would apply.
    fields |= {"bos_token_id": None, "eos_token_id": None, "pad_token_id": None} | more
    for name, tensor in tensors.items():
        check_range(name, tensor, str(tensor.dtype).removeprefix("torch."))
    folder.mkdir(parents=True, exist_ok=True)
    save_file(tensors, folder / SINGLE, metadata={"format": "pt"})
    write_json(folder / "config.json", fields)


def write_tokenizer(folder: Path, tokenizer: Path, end_of_text: str, context: int, **more: Any) -> None:
    """Copy a `tokenizer.json`, and write the `tokenizer_config.json` with which `transformers` loads it. more: further
    fields of it."""
    (folder / "tokenizer.json").write_bytes(tokenizer.read_bytes())
    fields = {"tokenizer_class": "PreTrainedTokenizerFast", "model_max_length": context}
    fields |= {"eos_token": end_of_text, "bos_token": end_of_text, "clean_up_tokenization_spaces": False}
    write_json(folder / "tokenizer_config.json", fields | more)
