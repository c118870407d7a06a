"""Checkpoints of many ranks with `torch.distributed.checkpoint`: each rank writes its shards, any layout reads them.

Every tensor has one name and one global shape, whichever rank holds which part: `weights/NAME` and
`optimizer/NAME/KEY`, with query, key and value separate (a fused matrix is read and written as three views) and a tied
weight once. A run can therefore resume with other degrees of dp, tp and pp, or on one process. Small states (random
generators, ...) are those of rank 0.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.metadata import TensorStorageMetadata
from torch.distributed.checkpoint.state_dict import _init_optim_state

from ironlaw.errors import UserError
from ironlaw.files import sha256
from ironlaw.model.parameters import Parameter, model_parameters
from ironlaw.train.checkpoint import STATE
from ironlaw.train.parallel.materialize import SplitTensor, read_checkpoint
from ironlaw.train.parallel.names import COPY, named_tensors, split_projection
from ironlaw.train.parallel.plugin import StepPlugin
from ironlaw.train.state import Stateful, host_copy
from ironlaw.workload.optimizers import OptimizerConfig

NAME = "sharded"
FOLDER = "shards"


class ShardedFiles:
    """A store of shards. `group`: a separate process group, because writing overlaps with training; None for one
    process. `settings` determine the order of the tensors in the optimizer of one process."""

    name = NAME

    def __init__(self, group: dist.ProcessGroup | None = None, settings: OptimizerConfig | None = None) -> None:
        self.group, self.settings = group, settings or OptimizerConfig()
        self.is_rank_0 = group is None or dist.get_rank(group) == 0

    def take(self, model: nn.Module, states: Mapping[str, Stateful]) -> tuple[dict[str, Tensor], dict[str, Any]]:
        optimizer = states["optimizer"]
        # Copies are not written, since this or another rank writes the original.
        tensors = {name: _host(tensor) for name, tensor in named_tensors(model, optimizer) if not name.endswith(COPY)}
        for part in states.values():
            if isinstance(part, StepPlugin):
                tensors = part.saved(tensors)
        rest = (
            {name: part.state_dict() for name, part in states.items() if name != "optimizer"} if self.is_rank_0 else {}
        )
        return tensors, host_copy(rest)

    def write(self, folder: Path, taken: tuple[dict[str, Tensor], dict[str, Any]]) -> dict[str, str]:
        tensors, rest = taken
        shards = folder / FOLDER
        named = {name.removesuffix(COPY): tensor for name, tensor in tensors.items()}
        dcp.save(named, checkpoint_id=shards, process_group=self.group, no_dist=self.group is None)
        if not self.is_rank_0:
            return {}
        torch.save(rest, folder / STATE)
        paths = [folder / STATE, *sorted(path for path in shards.rglob("*") if path.is_file())]
        return {str(path.relative_to(folder)): sha256(path) for path in paths}

    def read(self, folder: Path, model: nn.Module, states: Mapping[str, Stateful]) -> list[str]:
        optimizer = states.get("optimizer")
        if optimizer is not None:
            _init_optim_state(optimizer)  # type: ignore[arg-type]  # allocates tensors to read into, by a zero update
        # Two tensors may be read from the same name: a tied weight and its copy on the last stage.
        wanted = dict(named_tensors(model, optimizer))
        spread = [part for part in states.values() if isinstance(part, StepPlugin)]
        from_one_process = not (folder / FOLDER).is_dir()  # written by one process
        known = {} if not spread else _of_one_process(folder) if from_one_process else _known(folder)
        for part in spread:
            wanted = part.wanted(wanted, known)
        if from_one_process:
            saved = read_checkpoint(folder, wanted, optimizer, self.settings, *self._unsharded(model))
        else:
            self._read_shards(folder, wanted)
            saved = torch.load(folder / STATE, weights_only=True) if states else {}
        for part in spread:
            part.after_read()
        if not states:
            return []
        for name in states.keys() & saved.keys() - {"optimizer"}:
            states[name].load_state_dict(saved[name])
        return sorted(states.keys() - saved.keys() - {"optimizer"})

    def _unsharded(self, model: nn.Module) -> tuple[Sequence[Parameter], SplitTensor]:
        """Return the tensors of one process, and the function that splits them into those here, by names on disk."""
        config: Any = model.config
        return model_parameters(config), partial(split_projection, config=config)

    def _read_shards(self, folder: Path, wanted: dict[str, Tensor]) -> None:
        for group in (
            {name: tensor for name, tensor in wanted.items() if not name.endswith(COPY)},
            {name.removesuffix(COPY): tensor for name, tensor in wanted.items() if name.endswith(COPY)},
        ):
            try:
                dcp.load(group, checkpoint_id=folder / FOLDER, process_group=self.group, no_dist=self.group is None)
            except (CheckpointException, RuntimeError, KeyError) as error:
                raise UserError(
                    f"the checkpoint {folder} does not hold this run's state "
                    f"({str(error).strip().splitlines()[-1]}): resume with the config it was trained with"
                ) from None


def _known(folder: Path) -> dict[str, torch.Size]:
    """Return the names and global shapes of the tensors in a checkpoint."""
    metadata = dcp.FileSystemReader(folder / FOLDER).read_metadata().state_dict_metadata
    return {name: entry.size for name, entry in metadata.items() if isinstance(entry, TensorStorageMetadata)}


def _of_one_process(folder: Path) -> dict[str, torch.Size]:
    """Return the states in a checkpoint of one process, each with the shape of a scalar."""
    return {f"{name}/": torch.Size() for name in torch.load(folder / STATE, weights_only=True, mmap=True)}


def _host(tensor: Tensor) -> Tensor:
    """Return a host copy that no later step changes; for a DTensor, of this rank's part."""
    if tensor.device.type == "cpu":
        return tensor.detach().clone()
    from torch.distributed._state_dict_utils import _offload_state_dict_to_cpu

    copied: Tensor = _offload_state_dict_to_cpu({"tensor": tensor.detach()})["tensor"]
    return copied
