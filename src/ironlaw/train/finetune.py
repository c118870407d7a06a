"""Fine-tuning with adapters: freeze a base model, add trained adapters, and merge both into one model.

Checkpoints hold only the adapters. They name their base and identify it by a digest, since adapters are meaningless
with other base weights.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from itertools import groupby
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from ironlaw.config import RunConfig
from ironlaw.files import open_file
from ironlaw.model.adapters import Adapter, adapt, adapted_layers
from ironlaw.model.config import ModelConfig
from ironlaw.model.huggingface.configs import names_of
from ironlaw.model.linear import Linear, become
from ironlaw.model.transformer import Transformer
from ironlaw.numerics.frozen_linear import quantize_frozen
from ironlaw.train.checkpoint import newest_of
from ironlaw.train.peft import read_adapter, write_adapter
from ironlaw.train.precision import product_type
from ironlaw.train.run_directory import RunDirectory, complete_or_nothing
from ironlaw.workload.finetune import FinetuneConfig, adapters_of

SAMPLE_BYTES, SAMPLES = 2**14, 64  # of a weight file, for the digest: any further training changes all samples


def add_adapters(
    model: nn.Module, config: ModelConfig, finetune: FinetuneConfig, source: str, precision: str = "fp32"
) -> None:
    """Freeze `model`, which holds the weights of `source`, and add the adapters.

    At a 16-bit precision frozen matrices are stored in 16 bits, since products would round them anyway; not for DoRA.
    """
    names = names_of(Path(source), config)
    chosen = adapters_of(config, names, finetune)
    model.requires_grad_(False)
    for entry in chosen.saved:
        model.get_parameter(entry.ours).requires_grad_(True)
    linears = [module for module in model.get_submodule("blocks").modules() if isinstance(module, Linear)]
    for module in linears if finetune.method == "qlora" else ():
        quantize_frozen(module)
    for layer, group in groupby(chosen.targets, key=lambda target: target.layer):
        linear = model.get_submodule(layer)
        assert isinstance(linear, Linear)
        adapters = {
            t.name: Adapter(t.start, t.stop, t.inputs, finetune.rank, finetune.scale, finetune.dropout) for t in group
        }
        adapt(linear, adapters, magnitudes=finetune.method == "dora")
    if finetune.start_from:
        read_adapter(Path(finetune.start_from), model, config, names, finetune)
    held = product_type(precision)
    if held is None or finetune.method == "dora":
        return
    assert isinstance(model, Transformer) and model.embedding is not None
    model.embedding.register_forward_hook(lambda module, inputs, found: found.float())  # fp32 residual stream
    for held_so in (model.embedding, model.head, *linears):
        if "weight" in held_so._parameters and not held_so.weight.requires_grad:  # neither quantized nor trained
            held_so.weight.data = held_so.weight.data.to(held)


def merge(model: nn.Module) -> None:
    """Merge every layer's adapters into its matrix, which leaves a plain model."""
    for layer in adapted_layers(model).values():
        weight = nn.Parameter(layer.merged().float(), requires_grad=False)
        del layer.adapters
        layer._buffers.clear()
        become(layer, Linear).weight = weight


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


def about_base(finetune: FinetuneConfig, source: str) -> dict[str, Any]:
    """Return the index fields that describe a checkpoint's base and adapters."""
    return {"base": {"path": source, "sha256": base_digest(source)}, "finetune": finetune.model_dump(mode="json")}
