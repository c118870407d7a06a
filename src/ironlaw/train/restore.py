"""From a checkpoint on disk back into a model and its states, whichever way it was stored."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from torch import Tensor, nn

from ironlaw.errors import UserError
from ironlaw.model.config import ModelConfig
from ironlaw.model.transformer import Transformer
from ironlaw.numerics.pruning import Sparse
from ironlaw.train.checkpoint import Checkpoint, Store, WholeFiles, check_model, newest
from ironlaw.train.quantized_store import QuantizedFiles, no_training, read_held
from ironlaw.train.state import Stateful

STORES: dict[str, Store] = {store.name: store for store in (WholeFiles(), QuantizedFiles({}))}  # by name in the index


def check_resumable(checkpoint: Checkpoint) -> None:
    """UserError when it holds nothing to go on training from."""
    if checkpoint.index.get("store") == QuantizedFiles.name:
        raise UserError(no_training(checkpoint.path))


def load(
    checkpoint: Checkpoint, model: nn.Module, config: ModelConfig, states: Mapping[str, Stateful] | None = None
) -> list[str]:
    """Restore the weights and the named `states`; returns the names of those that the checkpoint does not hold."""
    check_model(checkpoint, config)
    name = checkpoint.index.get("store", WholeFiles.name)
    if name == "sharded":  # loaded only here: its imports take a second
        from ironlaw.train.parallel.names import mark_fused
        from ironlaw.train.parallel.store import ShardedFiles

        mark_fused(model)
        return ShardedFiles().read(checkpoint.path, model, states or {})
    store = STORES.get(name)
    if store is None:
        raise UserError(f"the checkpoint {checkpoint.path} is stored as {checkpoint.index['store']!r}, unknown here")
    return store.read(checkpoint.path, model, states or {})


def load_for_inference(folder: Path, config: ModelConfig) -> Transformer:
    """The newest checkpoint's model, in evaluation mode."""
    found = newest(folder)
    if found is None:
        raise UserError(f"no intact checkpoint in {folder}: train the run first")
    model = Transformer(config)
    load(found, model, config)
    return model.eval()


def int4_scales(checkpoint: Checkpoint) -> dict[str, Tensor]:
    """Of a compressed checkpoint's int4 weights, by their names: what each number is a whole multiple of."""
    if checkpoint.index.get("store") != QuantizedFiles.name:
        return {}
    held = {name: weight for name, weight in read_held(checkpoint.path) if not isinstance(weight, Tensor)}
    dense = {name: weight.dense() if isinstance(weight, Sparse) else weight for name, weight in held.items()}
    return {name: weight.scale_of_each() for name, weight in dense.items() if weight.format.name == "int4"}
