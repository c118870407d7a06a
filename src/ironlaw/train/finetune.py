"""Fine-tuning with adapters: freeze a base model, add trained adapters, and merge both into one model.

Checkpoints hold only the adapters. They name their base and identify it by a digest, since adapters are meaningless
with other base weights. Adapters are also written, and read as a start, in PEFT's format.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Mapping, Sequence
from contextlib import suppress
from itertools import groupby
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from ironlaw.config import RunConfig
from ironlaw.errors import UserError, reported
from ironlaw.files import open_file, read_json, write_json
from ironlaw.model.adapters import Adapter, adapt, adapted_layers
from ironlaw.model.config import ModelConfig
from ironlaw.model.huggingface.configs import names_of
from ironlaw.model.huggingface.spec import Names
from ironlaw.model.huggingface.tensors import entries
from ironlaw.model.linear import Linear, become
from ironlaw.model.moe import ExpertLinear
from ironlaw.model.transformer import Transformer
from ironlaw.numerics.frozen_linear import FrozenExperts, quantize_frozen
from ironlaw.train.checkpoint import newest_of
from ironlaw.train.precision import product_type
from ironlaw.train.run_directory import RunDirectory, complete_or_nothing
from ironlaw.workload.finetune import AdapterTarget, FinetuneConfig, adapters_of

SAMPLE_BYTES, SAMPLES = 2**14, 64  # of a weight file, for the digest: any further training changes all samples


def add_adapters(
    model: nn.Module, config: ModelConfig, finetune: FinetuneConfig, source: str, precision: str = "fp32"
) -> None:
    """Freeze `model`, which holds the weights of `source`, and add the adapters.

    At a 16-bit precision frozen matrices are stored in 16 bits, since products would round them anyway; in DoRA only
    those of experts, which have no adapters.
    """
    names = names_of(Path(source), config)
    chosen = adapters_of(config, names, finetune)
    model.requires_grad_(False)
    for entry in chosen.saved:
        model.get_parameter(entry.ours).requires_grad_(True)
    blocks = model.get_submodule("blocks")
    matrices = [module for module in blocks.modules() if isinstance(module, Linear | ExpertLinear)]
    for module in matrices if finetune.method == "qlora" else ():
        quantize_frozen(module)
    for layer, group in groupby(chosen.targets, key=lambda target: target.layer):
        linear = model.get_submodule(layer)
        assert isinstance(linear, Linear)
        own = finetune.rank, finetune.scale, finetune.dropout
        adapters = {t.name: Adapter(t.start, t.stop, t.inputs, *own) for t in group}
        adapt(linear, adapters, magnitudes=finetune.method == "dora")
    if finetune.start_from:
        read_adapter(Path(finetune.start_from), model, config, names, finetune)
    held = product_type(precision)
    if held is None:
        return
    assert isinstance(model, Transformer) and model.embedding is not None
    narrowed: list[nn.Module] = [*matrices]
    if finetune.method == "dora":
        narrowed = [module for module in matrices if isinstance(module, ExpertLinear)]
    else:
        model.embedding.register_forward_hook(lambda module, inputs, found: found.float())  # fp32 residual stream
        narrowed += [model.embedding, model.head]
    for held_so in narrowed:
        weight = held_so._parameters.get("weight")  # None: quantised
        if weight is not None and not weight.requires_grad:
            weight.data = weight.data.to(held)


def merge(model: nn.Module) -> None:
    """Merge every layer's adapters into its matrix, which leaves a plain model that can be trained."""
    for layer in adapted_layers(model).values():
        weight = nn.Parameter(layer.merged().float())
        del layer.adapters
        layer._buffers.clear()
        become(layer, Linear).weight = weight
    for experts in [module for module in model.modules() if isinstance(module, FrozenExperts)]:
        weight = nn.Parameter(experts.frozen().unflatten(0, (-1, experts.outputs)))
        experts._buffers.clear()
        become(experts, ExpertLinear).weight = weight
    model.requires_grad_(True)


def save_adapter(folder: Path, trained: Mapping[str, Tensor], config: RunConfig) -> None:
    """Atomically write PEFT's directory, which must not exist, from unsharded tensors, which have our names."""
    source = config.train.start_from
    assert source is not None
    with complete_or_nothing(folder) as partial:
        write_adapter(partial, trained, config.model, names_of(Path(source), config.model), config.finetune, source)


def base_digest(source: str) -> str:
    """Return a digest of base weights: of a run's newest checkpoint, or of the sizes and samples of model files."""
    folder = Path(source)
    if RunDirectory(folder).is_run:
        return str(newest_of(folder).index["index_sha256"])
    digest = hashlib.sha256()
    for path in sorted(folder.glob("*.safetensors")):
        size = path.stat().st_size
        digest.update(f"{path.name} {size}\n".encode())
        with open_file(path) as file:
            for number in range(SAMPLES + 1):
                file.seek(max(0, size - SAMPLE_BYTES) * number // SAMPLES)
                digest.update(file.read(SAMPLE_BYTES))
    return digest.hexdigest()


CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
PREFIX = "base_model.model."
# Fields that change what an adapter computes or where it is applied, each with the only value supported here.
_ONLY = {
    "peft_type": "LORA", "bias": "none", "use_rslora": False,
    "layers_to_transform": None, "exclude_modules": None, "layer_replication": None, "lora_bias": False,
    "target_parameters": None, "use_qalora": False, "trainable_token_indices": None,
}  # fmt: skip
# Fields that are read below, and fields that say how an adapter was made. Others may change what it computes.
_HARMLESS = {
    "r", "lora_alpha", "lora_dropout", "use_dora", "rank_pattern", "alpha_pattern", "target_modules", "modules_to_save",
    "init_lora_weights", "fan_in_fan_out", "base_model_name_or_path", "task_type", "inference_mode", "auto_mapping",
    "revision", "peft_version", "layers_pattern", "runtime_config", "ensure_weight_tying", "qalora_group_size",
    "megatron_config", "megatron_core", "loftq_config", "eva_config", "corda_config", "lora_ga_config",
}  # fmt: skip
_INITIALIZATIONS = (True, False, "gaussian", "orthogonal", "eva")  # the others change the base, too


def write_adapter(
    folder: Path, trained: Mapping[str, Tensor], config: ModelConfig, names: Names, finetune: FinetuneConfig, base: str
) -> None:
    """Write PEFT's two files. `trained`: unsharded tensors by our names; `base`: name or path of the base model."""
    chosen = adapters_of(config, names, finetune)
    targets = chosen.targets
    found: dict[str, list[tuple[AdapterTarget, dict[str, Tensor]]]] = {}
    for target in targets:
        parts = {p.name.rpartition(".")[2]: trained[p.name].detach() for p in target.parameters(finetune)}
        found.setdefault(target.theirs, []).append((target, parts))
    tensors: dict[str, Tensor] = {}
    ranks: dict[str, int] = {}
    for theirs, adapters in found.items():
        # Several of our adapters on one PEFT matrix become one adapter: the ranks add up, and each keeps its own rows.
        count = adapters[0][0].count
        if count != len(adapters):
            raise UserError(f"{theirs} is {count} matrices here: give finetune.targets all of them")
        if count > 1:
            ranks[theirs] = count * finetune.rank
        prefix = PREFIX + theirs
        tensors[f"{prefix}.lora_A.weight"] = torch.cat([parts["a"] for _, parts in adapters])
        tensors[f"{prefix}.lora_B.weight"] = torch.block_diag(*(_theirs(t, parts["b"]) for t, parts in adapters))
        if finetune.method == "dora":
            lengths = torch.cat([_theirs(t, parts["magnitude"]) for t, parts in adapters])
            tensors[f"{prefix}.lora_magnitude_vector"] = lengths
    whole: dict[str, Tensor] = {}
    for entry in chosen.saved:
        entry.to_theirs(trained[entry.ours].detach(), whole)
    if config.tied and whole:  # PEFT trains separate copies of the embedding and the output layer
        whole[f"{names.head}.weight"] = whole[f"{names.embedding}.weight"]
    tensors |= {PREFIX + name: tensor for name, tensor in whole.items()}
    save_file({name: tensor.cpu().contiguous().clone() for name, tensor in tensors.items()}, folder / WEIGHTS,
              metadata={"format": "pt"})  # fmt: skip
    fields: dict[str, Any] = _ONLY | {
        "base_model_name_or_path": base, "task_type": "CAUSAL_LM", "inference_mode": True, "r": finetune.rank,
        "lora_alpha": _whole(finetune.alpha), "lora_dropout": finetune.dropout, "use_dora": finetune.method == "dora",
        "target_modules": _module_names(targets, config, names), "init_lora_weights": True,
        "modules_to_save": sorted({_tail(name.rpartition(".")[0]) for name in whole}) or None,
        "fan_in_fan_out": any(target.transposed for target in targets),
    }  # fmt: skip
    if ranks:
        by_name = {_tail(theirs): rank for theirs, rank in ranks.items()}
        fields |= {
            "rank_pattern": by_name,
            "alpha_pattern": {n: _whole(r * finetune.scale) for n, r in by_name.items()},
        }
    write_json(folder / CONFIG, fields)


def _module_names(targets: Sequence[AdapterTarget], config: ModelConfig, names: Names) -> list[str]:
    """Return the shortest suffixes of the targets' module names that match no module without an adapter."""
    chosen, found = {target.theirs for target in targets}, set()
    there = {theirs.removesuffix(".weight") for entry in entries(config, names) for theirs in entry.theirs}
    others = there - chosen
    for target in targets:
        parts = target.theirs.split(".")
        tails = (".".join(parts[-length:]) for length in range(1, len(parts) + 1))
        found.add(next(tail for tail in tails if not any(f".{other}".endswith(f".{tail}") for other in others)))
    return sorted(found)


def _tail(theirs: str) -> str:
    return theirs.rpartition(".")[2]


def _whole(number: float) -> float:
    return int(number) if number.is_integer() else number


def _theirs(target: AdapterTarget, rows: Tensor) -> Tensor:
    """Permute `rows` from our order into PEFT's."""
    if not target.order:
        return rows
    return torch.empty_like(rows).index_copy_(0, torch.tensor(target.order, device=rows.device), rows.detach())


def check_adapter(folder: Path, finetune: FinetuneConfig) -> None:
    """Raise UserError unless `folder` holds an adapter of this rank, alpha and method."""
    if not (folder / CONFIG).is_file() or not (folder / WEIGHTS).is_file():
        raise UserError(f"no adapter in {folder}: give a directory with {CONFIG} and {WEIGHTS}")
    told = f"{folder / CONFIG} has a value of another type than PEFT writes: {{reason}}"
    with reported(told, TypeError, AttributeError, ArithmeticError, ValueError):
        _check_fields(folder, read_json(folder / CONFIG), finetune)


def _check_fields(folder: Path, fields: dict[str, Any], finetune: FinetuneConfig) -> None:
    initial = fields.get("init_lora_weights", True)
    if initial not in _INITIALIZATIONS:
        raise UserError(
            f"the adapter in {folder} has init_lora_weights = {initial!r}, which changes its base: save it from PEFT "
            "with path_initial_model_for_weight_conversion"
        )
    for key in sorted((_ONLY | fields).keys() - _HARMLESS):
        if (fields.get(key) or None) != (_ONLY.get(key) or None):
            raise UserError(f"{folder / CONFIG} has {key} = {fields.get(key)!r}, which is not read here")
    method = "dora" if fields.get("use_dora") else "lora"
    if (method == "dora") != (finetune.method == "dora"):
        raise UserError(f'the adapter in {folder} is of another method: use finetune.method = "{method}"')
    for key, name, value in (("r", "rank", finetune.rank), ("lora_alpha", "alpha", finetune.alpha)):
        if not math.isclose(float(fields.get(key, 8)), value):
            raise UserError(f"the adapter in {folder} has {key} = {fields.get(key, 8)}: set finetune.{name} to it")
    ranks, alphas = fields.get("rank_pattern") or {}, fields.get("alpha_pattern") or {}
    for name in ranks | alphas:
        if not math.isclose(alphas.get(name, finetune.alpha) / ranks.get(name, finetune.rank), finetune.scale):
            raise UserError(f"the adapter in {folder} scales {name} otherwise than the rest, which is not read here")


@torch.no_grad()
def read_adapter(folder: Path, model: nn.Module, config: ModelConfig, names: Names, finetune: FinetuneConfig) -> None:
    """Copy PEFT's tensors into the adapters of `model`. Raises UserError if they do not match the targets."""
    check_adapter(folder, finetune)
    with reported(f"{folder / WEIGHTS} cannot be read ({{reason}})", SafetensorError):
        there = load_file(folder / WEIGHTS)
    known, chosen = set(), adapters_of(config, names, finetune)
    for entry in chosen.saved:
        theirs = [PREFIX + name for name in entry.theirs]
        if entry.ours == "embedding.weight" and config.tied:
            theirs.append(f"{PREFIX}{names.head}.weight")
        parts = [there[name] for name in theirs if name in there]
        if len(parts) < len(theirs) or not all(torch.equal(part, parts[0]) for part in parts):
            both = " and ".join(theirs)
            raise UserError(
                f"the adapter in {folder} has no {both}, one tensor: set finetune.modules_to_save as it was"
            )
        known |= set(theirs)
        table = model.get_parameter(entry.ours)
        if parts[0].shape != table.shape:
            raise UserError(f"{theirs[0]} in {folder} has shape {list(parts[0].shape)}, of another model")
        table.copy_(parts[0])
    for target in chosen.targets:
        adapter = model.get_submodule(f"{target.layer}.adapters.{target.name}")
        assert isinstance(adapter, Adapter)
        for part, ours in (("lora_A.weight", adapter.a), ("lora_B.weight", adapter.b),
                           ("lora_magnitude_vector", adapter.magnitude)):  # fmt: skip
            name = f"{PREFIX}{target.theirs}.{part}"
            if ours is None:
                continue
            if name not in there:
                raise UserError(f"the adapter in {folder} has no {name}: give finetune.targets the modules it has")
            known.add(name)
            tensor = there[name]
            with suppress(IndexError):  # wrong shape, reported below
                tensor = _ours(target, tensor, finetune.rank, rows=part != "lora_A.weight")
            if tensor.shape != ours.shape:
                raise UserError(f"{name} in {folder} has shape {list(there[name].shape)}, of another rank or model")
            ours.copy_(tensor)
    left = sorted(there.keys() - known)
    if left:
        raise UserError(
            f"the adapter in {folder} has {left[0]} as well: give finetune.targets and modules_to_save what it has"
        )


def _ours(target: AdapterTarget, tensor: Tensor, rank: int, rows: bool) -> Tensor:
    """Return the part of a PEFT tensor that belongs to `target`: one of `count` slices, rows permuted to our order."""
    first, size = target.which, target.stop - target.start
    # The target's part of the rank, if `write_adapter` has merged several adapters; PEFT's own share the whole rank.
    own = slice(first * rank, (first + 1) * rank)
    if target.count > 1 and rows:
        tensor = tensor[first * size : (first + 1) * size]
        tensor = tensor[:, own] if tensor.dim() == 2 and tensor.shape[1] == target.count * rank else tensor
    elif target.count > 1 and tensor.shape[0] == target.count * rank:
        tensor = tensor[own]
    return tensor[torch.tensor(target.order)] if rows and target.order else tensor
