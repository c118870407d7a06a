"""Checkpoints of many ranks with `torch.distributed.checkpoint`: each rank writes its shards, any layout reads them.

Every tensor has one name and one global shape, whichever rank holds which part: `weights/NAME` and
`optimizer/NAME/KEY`, with query, key and value separate (a fused matrix is read and written as three views) and a tied
weight once. A run can therefore resume with other degrees of dp, tp and pp, or on one process. Small states (random
generators, ...) are those of rank 0. Adapters are stored in the format of one process, so that any layout can resume.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from safetensors import safe_open
from torch import Tensor, nn
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.metadata import TensorStorageMetadata
from torch.distributed.checkpoint.state_dict import _init_optim_state
from torch.distributed.tensor import DTensor

from ironlaw.errors import UserError
from ironlaw.files import sha256
from ironlaw.model.adapters import adapted_layers
from ironlaw.model.parameters import Parameter, model_parameters
from ironlaw.train.checkpoint import STATE, WEIGHTS, AdapterFiles, Stateful, host_copy
from ironlaw.train.optimizer import grouped
from ironlaw.train.parallel.materialize import COPY, SplitTensor, copy_parts, named_tensors, split_projection
from ironlaw.train.parallel.ranks import Ranks
from ironlaw.workload.optimizers import OptimizerConfig

NAME = "sharded"
FOLDER = "shards"
BY_NAME = {"optimizer", "average"}  # states whose tensors are held by name, like weights


class StepPlugin:
    """An extension of a step, to which the step refers by this interface only. Its state is in checkpoints under
    `name`, and its tensors are saved rank by rank under its own names."""

    name: str

    def begin(self, part: nn.Module, tokens: Tensor) -> None:
        """Called before the first step with the callable model and the tokens of a micro-batch."""

    def after(self, step: int) -> None:
        """Called on every rank after `step` steps."""

    def evaluating(self) -> AbstractContextManager[None]:
        """Return the context for evaluations and for reading weights."""
        return nullcontext()

    def held(self) -> Any:
        """Return the tensors, nested in any way, that it holds between steps."""
        return ()

    # -- checkpoints -----------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        return {}

    def load_state_dict(self, state: dict[str, Any], /) -> None:
        """Load small values. Tensors have already been read by name."""

    def tensors_to_save(self, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
        """Return copies of the tensors to write for `tensors` (weights and optimizer state), and of its own."""
        return tensors

    def tensors_to_read(self, tensors: dict[str, Tensor], known: Mapping[str, torch.Size]) -> dict[str, Tensor]:
        """Return the tensors into which a checkpoint with the names `known` is read, in place of `tensors`."""
        return tensors

    def after_read(self) -> None:
        """Called when the wanted tensors have been read."""


class ShardedFiles:
    """A store of shards. `group`: a separate process group, because writing overlaps with training; None for one
    process. `settings` determine the order of the tensors in the optimizer of one process."""

    name = NAME

    def __init__(self, group: dist.ProcessGroup | None = None, settings: OptimizerConfig | None = None) -> None:
        self.group, self.settings = group, settings or OptimizerConfig()
        self.is_rank_0 = group is None or dist.get_rank(group) == 0

    def take(self, model: nn.Module, states: Mapping[str, Stateful]) -> tuple[dict[str, Tensor], dict[str, Any]]:
        # Copies are not written, since this or another rank writes the original.
        tensors = {name: _host(tensor) for name, tensor in named_tensors(model, states) if not name.endswith(COPY)}
        for part in states.values():
            if isinstance(part, StepPlugin):
                tensors = part.tensors_to_save(tensors)
        others = {name: part for name, part in states.items() if name != "optimizer" and self.is_rank_0}
        rest = {name: {} if name in BY_NAME else part.state_dict() for name, part in others.items()}
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
        from_one_process = not (folder / FOLDER).is_dir()  # written by one process
        saved: dict[str, Any] = {}
        if states or from_one_process:
            saved = torch.load(folder / STATE, weights_only=True, mmap=from_one_process)
        there = {name: state for name, state in states.items() if name in saved or name == "optimizer"}
        # Two tensors may be read from the same name: a tied weight and its copy on the last stage.
        wanted, known = dict(named_tensors(model, there)), dict[str, torch.Size]()
        plugins = [part for part in states.values() if isinstance(part, StepPlugin)]
        if plugins and not from_one_process:
            metadata = dcp.FileSystemReader(folder / FOLDER).read_metadata().state_dict_metadata
            known = {n: entry.size for n, entry in metadata.items() if isinstance(entry, TensorStorageMetadata)}
        for plugin in plugins:
            wanted = plugin.tensors_to_read(wanted, known)
        if from_one_process:
            self._read_whole(folder, wanted, saved, optimizer, model)
        else:
            self._read_shards(folder, wanted)
        for plugin in plugins:
            plugin.after_read()
        for name in there.keys() - BY_NAME:
            there[name].load_state_dict(saved[name])
        return sorted(states.keys() - there.keys())

    def _unsharded(self, model: nn.Module) -> tuple[Sequence[Parameter], SplitTensor]:
        """Return the tensors of one process, and the function that splits them into those here, by names on disk."""
        config: Any = model.config
        return model_parameters(config), partial(split_projection, config=config)

    @torch.no_grad()
    def _read_whole(
        self, folder: Path, wanted: dict[str, Tensor], saved: dict[str, Any], optimizer: Any, model: nn.Module
    ) -> None:
        """Read a checkpoint of one process, with the states `saved`, into `wanted`."""
        unsharded, split = self._unsharded(model)
        with safe_open(folder / WEIGHTS, framework="pt") as file:
            for name in tuple(file.keys()):
                copy_parts(f"weights/{name}", file.get_tensor(name), wanted, split)
        average = saved.get("average", {}).get("tensors", ())
        for parameter, whole in zip(unsharded, average, strict=False):
            copy_parts(f"average/{parameter.name}", whole, wanted, split)
        if optimizer is None:
            return
        if "state" not in saved["optimizer"]:  # of two optimizers, which need whole tensors: nothing is divided
            optimizer.load_state_dict(saved["optimizer"])
            return
        order = list(chain.from_iterable(grouped(unsharded, self.settings).values()))
        for index, state in saved["optimizer"]["state"].items():
            for key, value in state.items():
                if isinstance(value, Tensor):
                    copy_parts(f"optimizer/{order[index]}/{key}", value, wanted, split)

    def _read_shards(self, folder: Path, wanted: dict[str, Tensor]) -> None:
        read = {name.removesuffix(COPY): tensor for name, tensor in wanted.items()}
        try:
            dcp.load(read, checkpoint_id=folder / FOLDER, process_group=self.group, no_dist=self.group is None)
        except (CheckpointException, RuntimeError, KeyError) as error:
            raise UserError(
                f"the checkpoint {folder} does not hold this run's state "
                f"({str(error).strip().splitlines()[-1]}): resume with the config it was trained with"
            ) from None
        for name, tensor in wanted.items():  # both a tied weight and its copy, where one rank has both ends
            if tensor is not read[name.removesuffix(COPY)]:
                tensor.copy_(read[name.removesuffix(COPY)])


def _host(tensor: Tensor) -> Tensor:
    """Return a host copy that no later step changes; for a DTensor, of this rank's part."""
    if tensor.device.type == "cpu":
        return tensor.detach().clone()
    from torch.distributed._state_dict_utils import _offload_state_dict_to_cpu

    return _offload_state_dict_to_cpu({"tensor": tensor.detach()})["tensor"]


# -- adapters -----------------------------------------------------------------------------------------------------


def _orders(model: nn.Module) -> dict[str, Tensor]:
    """Return the original row indices of trained tensors whose rows are held in another order on ranks."""
    found: dict[str, Tensor] = {}
    for layer_name, layer in adapted_layers(model).items():
        for name, adapter in layer.adapters.items():
            order = getattr(adapter, "order", None)
            if order is not None:
                found |= {f"{layer_name}.adapters.{name}.{which}": order for which in ("b", "magnitude")}
    return found


def whole_tensors(model: nn.Module, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return unsharded copies of `tensors` on the host, with rows in the order on disk. Every rank calls it."""
    orders, found = _orders(model), {}
    for name, tensor in tensors.items():
        whole = tensor.detach()
        whole = (whole.full_tensor() if isinstance(whole, DTensor) else whole).to("cpu", copy=True)
        order = orders.get(name.split("/")[1])
        if order is not None and whole.dim():
            whole[order] = whole.clone()
        found[name] = whole
    return found


class SharedAdapterFiles(ShardedFiles):
    """The store of ranks that share adapters: rank 0 writes what one process would, and every rank reads its part."""

    name = AdapterFiles.name

    def __init__(self, whole: Sequence[Parameter], config: OptimizerConfig, writers: Ranks) -> None:
        """`whole`: the trained parameters before they are divided."""
        super().__init__(writers.writing, config)
        self.whole, self.writers = whole, writers
        # Whether this rank sends the tensors of its stage.
        self.sends_stage = not any(map(writers.index, ("tp", "cp", "dp")))
        self.names = [parameter.name for parameter in whole]
        self.groups = grouped(whole, config)
        self.order = list(chain.from_iterable(self.groups.values()))  # parameter order of one process's optimizer

    def gather(self, model: nn.Module, states: Mapping[str, Any] | None = None) -> dict[str, Tensor]:
        """Return the unsharded tensors of all stages on rank 0, by their names on disk."""
        held = dict(named_tensors(model, states or {}))
        trained = {name: tensor for name, tensor in held.items() if name.split("/")[1] in self.names}
        here = whole_tensors(model, trained)
        stages = self.writers.gather(here if self.sends_stage and not self.is_rank_0 else None)
        return {name: tensor for stage in (here, *stages) if stage for name, tensor in stage.items()}

    def take(self, model: nn.Module, states: Mapping[str, Stateful]) -> tuple[dict[str, Tensor], dict[str, Any]]:
        found = self.gather(model, states)
        if not self.is_rank_0:
            return {}, {}
        saved = {name: part.state_dict() for name, part in states.items()}
        if "average" in states:
            saved["average"] = {"tensors": [found[f"average/{name}"] for name in self.names]}
        rest = {name: value for name, value in saved["optimizer"]["param_groups"][0].items() if name != "params"}
        groups, state = [], {}
        for to, names in self.groups.items():
            numbers = [self.order.index(name) for name in names]
            groups.append(rest | {"lr_scale": to.lr_scale, "weight_decay": to.weight_decay, "params": numbers})
        for number, name in enumerate(self.order):
            own = f"optimizer/{name}/"
            if kept := {key.removeprefix(own): tensor for key, tensor in found.items() if key.startswith(own)}:
                state[number] = kept
        saved["optimizer"] = {"state": state, "param_groups": groups}
        return {name: found[f"weights/{name}"] for name in self.names}, host_copy(saved)

    def write(self, folder: Path, taken: tuple[dict[str, Tensor], dict[str, Any]]) -> dict[str, str]:
        return AdapterFiles().write(folder, taken) if self.is_rank_0 else {}

    def read(self, folder: Path, model: nn.Module, states: Mapping[str, Stateful]) -> list[str]:
        with safe_open(folder / WEIGHTS, framework="pt") as file:
            if set(file.keys()) != set(self.names):
                raise UserError(f"the checkpoint {folder} is of other adapters: resume with its own [finetune]")
        return super().read(folder, model, states)

    def _unsharded(self, model: nn.Module) -> tuple[Sequence[Parameter], SplitTensor]:
        orders = _orders(model)

        def split(name: str, whole: Tensor) -> Iterator[tuple[str, Tensor]]:
            rows = orders.get(name.split("/")[1])
            yield name, whole if rows is None or not whole.dim() else whole[rows]

        return self.whole, split
