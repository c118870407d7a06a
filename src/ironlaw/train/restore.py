"""Restores a model and its states from a checkpoint in any storage format, and reads the initial weights of a run that
does not start from random ones."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from pickle import UnpicklingError
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor, nn

from ironlaw.catalog.formats import number_format
from ironlaw.config import load_config
from ironlaw.data import tokenizer as tokenizers
from ironlaw.data.dataset import Dataset
from ironlaw.data.tokenizer import Tokenizer, has_tokenizer
from ironlaw.errors import UserError, reported
from ironlaw.files import sha256
from ironlaw.model.adapters import adapted_layers
from ironlaw.model.config import ModelConfig
from ironlaw.model.huggingface.configs import is_config_file, names_of, read_config
from ironlaw.model.huggingface.weights import check_weights, load_weights
from ironlaw.model.transformer import Transformer
from ironlaw.numerics.compression import stored
from ironlaw.numerics.quantized import Quantized
from ironlaw.train.average import WeightAverage
from ironlaw.train.checkpoint import (
    AdapterFiles,
    Checkpoint,
    Stateful,
    Store,
    WholeFiles,
    check_model,
    load_unique_weights,
    newest_of,
    unique_weights,
)
from ironlaw.train.finetune import add_adapters, base_digest, check_adapter, merge
from ironlaw.train.run_directory import RunDirectory
from ironlaw.workload.finetune import FinetuneConfig, adapters_of

FILE = "quantized.safetensors"
_PARTS = ("codes", "scales", "tensor_scale", "bitmap")


@dataclass
class QuantizedFiles:
    """A store (`checkpoint.Store`) that holds weights only, so that training cannot be resumed from it.

    One safetensors file has, for each quantized weight NAME, the tensors NAME.codes, NAME.scales, NAME.tensor_scale and
    NAME.bitmap, as far as its format has them, and all other weights under their names. The file's metadata have the
    format, shape and block of each quantized weight (docs/formats.md).

    held:  the compressed weights, by name; used only by `take` and `write`.
    wide:  data type of the other weights, as far as it holds their numbers.
    """

    held: Mapping[str, Quantized]
    wide: torch.dtype = torch.float32
    name: str = "quantized"

    def take(self, model: nn.Module, states: Mapping[str, Stateful]) -> dict[str, Tensor]:
        """Return the weights that are not quantized."""
        return {n: stored(t, self.wide) for n, t in unique_weights(model).items() if n not in self.held}

    def write(self, folder: Path, taken: dict[str, Tensor]) -> dict[str, str]:
        tensors, about = dict(taken), {}
        for name, weight in self.held.items():
            tensors |= {f"{name}.{part}": tensor.contiguous() for part, tensor in weight.tensors.items()}
            about[name] = {"format": weight.format.name, "shape": list(weight.shape), "block": weight.block}
        save_file(tensors, folder / FILE, metadata={"format": "pt", "quantized": json.dumps(about)})
        return {FILE: sha256(folder / FILE)}

    def read(self, folder: Path, model: nn.Module, states: Mapping[str, Stateful]) -> list[str]:
        if states:
            raise UserError(no_training(folder))
        weights = {name: w if isinstance(w, Tensor) else w.dequantize() for name, w in read_held(folder)}
        load_unique_weights(model, weights)
        return []


def no_training(folder: Path) -> str:
    return (
        f"{folder} holds compressed weights, which no training goes on from: resume the run that was compressed, or "
        "start a new one from them with train.start_from"
    )


def read_held(folder: Path) -> Iterator[tuple[str, Tensor | Quantized]]:
    """Yield the weights of a compressed checkpoint one by one, as plain or quantized tensors."""
    with safe_open(folder / FILE, framework="pt") as file:
        about: dict[str, dict[str, Any]] = json.loads(file.metadata()["quantized"])
        names = set(file.keys())
        parts = {f"{name}.{part}" for name in about for part in _PARTS}
        for name in sorted(names - parts):
            yield name, file.get_tensor(name)
        for name, fields in about.items():
            tensors = {part: file.get_tensor(f"{name}.{part}") for part in _PARTS if f"{name}.{part}" in names}
            block = tuple(fields["block"]) if fields["block"] else None
            yield name, Quantized(number_format(fields["format"]), torch.Size(fields["shape"]), block=block, **tensors)


_FOREIGN = (SafetensorError, UnpicklingError, AssertionError, KeyError, TypeError, RuntimeError)
"""Errors of files with valid checksums but foreign content: unsafe pickles, other names or shapes."""

STORES: dict[str, Store] = {one.name: one for one in (WholeFiles(), AdapterFiles(), QuantizedFiles({}))}


def check_resumable(checkpoint: Checkpoint) -> None:
    """Raise UserError if training cannot be resumed from the checkpoint."""
    if checkpoint.index.get("store") == QuantizedFiles.name:
        raise UserError(no_training(checkpoint.path))


def check_text(folder: Path, dataset: Dataset, start: Checkpoint | None = None, teaches: bool = False) -> None:
    """Raise UserError if the run or model in `folder` has a tokenizer of other ids than `dataset`, or the run that goes
    on from `start` was trained on other text. A tokenizer that is learned from the text is another one when the text
    changes, and its ids mean nothing to weights of before."""
    files = dataset.tokenizer_path, tokenizers.tokenizer_file(folder) if has_tokenizer(folder) else None
    known = [tokenizers.read_tokenizer(file).get_vocab() for file in files if file is not None and file.is_file()]
    digest = start.index.get("text", dataset.digest) if start is not None else dataset.digest
    if known[1:] in ([], known[:1]) and digest == dataset.digest:
        return
    if teaches:
        raise UserError(
            f"the teacher {folder} has another tokenizer than {dataset.name}: a student has its teacher's tokenizer, "
            "so set model.vocab and data.tokenizer to its"
        )
    raise UserError(
        f"the text of {dataset.name}, or its tokenizer, is no longer that of {folder}: put it back, or start a new run "
        f'from the weights with model.from = "{folder}"'
    )


def load(
    checkpoint: Checkpoint, model: nn.Module, config: ModelConfig, states: Mapping[str, Stateful] | None = None
) -> list[str]:
    """Restore the weights and the named `states`. Returns the names of states that the checkpoint does not hold."""
    check_model(checkpoint, config)
    name = checkpoint.index.get("store", WholeFiles.name)
    if name == "sharded":  # imported here because it takes a second
        from ironlaw.train.parallel.store import ShardedFiles

        return ShardedFiles().read(checkpoint.path, model, states or {})
    if name == AdapterFiles.name and not adapted_layers(model):
        load_adapted(checkpoint, model, config)
        merge(model)
        return []
    store = STORES.get(name)
    if store is None:
        raise UserError(f"the checkpoint {checkpoint.path} is stored as {checkpoint.index['store']!r}, unknown here")
    told = f"the files of {checkpoint.path} are not those of its index ({{reason}}): changed by hand? take another"
    with reported(told, *_FOREIGN):
        return store.read(checkpoint.path, model, states or {})


def check_first_weights(source: str, config: ModelConfig, warn: Callable[[str], Any] | None = None) -> None:
    """Raise UserError, before anything is written, if `source` does not hold the weights of this model. For `warn` see
    `checkpoint.newest`."""
    folder = Path(source)
    if RunDirectory(folder).is_run:
        check_model(newest_of(folder, warn), config)
    elif folder.is_dir():
        check_weights(folder, config)
    else:
        raise UserError(f"train.start_from = {source!r} is no directory: give a Hugging Face model's or a run's")


def load_first_weights(source: str, model: nn.Module, config: ModelConfig) -> None:
    """Load weights only: the optimizer, the schedule and the step count start over."""
    folder = Path(source)
    if RunDirectory(folder).is_run:
        load(newest_of(folder), model, config)
    else:
        load_weights(folder, model, config)


def check_base(finetune: FinetuneConfig, source: str | None, config: ModelConfig, start: Checkpoint | None) -> None:
    """Raise UserError, before anything is written, if the base is missing or is not the one `start` was trained on."""
    if source is None:
        raise UserError(f'finetune.method = "{finetune.method}" needs a model to adapt: give --set model.from=DIR')
    check_first_weights(source, config)
    adapters_of(config, names_of(Path(source), config), finetune)
    if start is not None and base_digest(source) != start.index["base"]["sha256"]:
        raise UserError(f"{source} has changed since {start.path} was trained on it: put its old weights back")
    if start is None and finetune.start_from:
        check_adapter(Path(finetune.start_from), finetune)


def load_adapted(checkpoint: Checkpoint, model: nn.Module, config: ModelConfig) -> None:
    """Load the base and the adapters of a checkpoint into a `model` without adapters.

    The run's config says where the base is, so that a user can correct it when a base has moved.
    """
    index, run = checkpoint.index, RunDirectory(checkpoint.path.parents[1])
    finetune = FinetuneConfig(**index["finetune"] | {"start_from": None})
    written = load_config(run.config_file).train.start_from if run.is_run else None
    source = written or str(index["base"]["path"])
    if not Path(source).is_dir():
        raise UserError(
            f"{source}, which {run.path} adapts, is no longer there: put it back, or write where it is as "
            f"train.start_from in {run.config_file}"
        )
    check_base(finetune, source, config, checkpoint)
    load_first_weights(source, model, config)
    with torch.random.fork_rng(devices=[]):  # adapters are initialized at random before they are read
        add_adapters(model, config, finetune, source)
    AdapterFiles().read(checkpoint.path, model, {})


def load_for_inference(checkpoint: Checkpoint, config: ModelConfig, averaged: bool = False) -> Transformer:
    """Return the checkpoint's model in evaluation mode, or the average of its weights over the run."""
    model = Transformer(config)
    if not averaged:
        load(checkpoint, model, config)
        return model.eval()
    adapted, sharded = (checkpoint.index.get("store") == name for name in (AdapterFiles.name, "sharded"))
    if adapted:
        load_adapted(checkpoint, model, config)
    average = WeightAverage(model, 0.0, by_name=sharded)
    if checkpoint.index.get("store") == QuantizedFiles.name:
        raise UserError(
            f"{checkpoint.path} is compressed and holds no averaged weights: export the run that was compressed with "
            "--average, and compress that directory"
        )
    if load(checkpoint, model, config, {average.name: average}):
        raise UserError(f"{checkpoint.path} holds no averaged weights: train with train.average_decay")
    average.swap()
    if adapted:
        merge(model)
    return model.eval()


@dataclass(frozen=True)
class Trained:
    """A model for inference. `step` is its checkpoint's; `passed_over` describes newer checkpoints that are damaged."""

    model: Transformer
    tokenizer: Tokenizer | None  # None for a run on mock data
    step: int | None = None
    passed_over: tuple[str, ...] = ()
    held: Mapping[str, Quantized] = field(default_factory=dict)  # quantized weights of a compressed run
    other_average: bool = False  # whether the checkpoint has averaged weights that are not the model's

    def about(self) -> dict[str, Any]:
        """Return the JSON fields that identify the checkpoint of a run."""
        return {} if self.step is None else {"step": self.step, "passed_over": list(self.passed_over)}


def load_run(path: Path, averaged: bool = False) -> Trained:
    """Load the newest intact checkpoint of a run directory, or the average of its weights."""
    run = RunDirectory(path)
    if not run.is_run:
        raise UserError(f"{path} is not a run directory: give one that `ironlaw train` made, such as runs/NAME")
    config = load_config(run.config_file)
    passed_over: list[str] = []
    found = newest_of(path, passed_over.append)
    known = run.tokenizer_file.is_file()
    tokenizer = tokenizers.load(run.tokenizer_file, config.data.end_of_text) if known else None
    model = load_for_inference(found, config.model, averaged)
    compressed = read_held(found.path) if found.index.get("store") == QuantizedFiles.name else ()
    held = {name: weight for name, weight in compressed if not isinstance(weight, Tensor)}
    other_average = config.train.average_decay is not None and not averaged and not held
    return Trained(model, tokenizer, found.step, tuple(passed_over), held, other_average)


def load_trained(path: Path, needs_text: bool = True) -> Trained:
    """Load a model from a run or Hugging Face directory. The latter may lack a tokenizer unless `needs_text`."""
    if RunDirectory(path).is_run or not is_config_file(path):
        return load_run(path)
    config = read_config(path)
    check_weights(path, config)
    model = Transformer(config)
    load_weights(path, model, config)
    tokenizer = tokenizers.load(path) if needs_text or has_tokenizer(path) else None
    if tokenizer is not None:
        tokenizer.check_ends(config.vocab)
    return Trained(model.eval(), tokenizer)
