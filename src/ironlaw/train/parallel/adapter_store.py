"""Checkpoints of adapters trained on many ranks, in the format of one process, so that any layout can resume."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import chain
from pathlib import Path
from typing import Any

from safetensors import safe_open
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from ironlaw.errors import UserError
from ironlaw.model.adapters import adapted_layers
from ironlaw.model.parameters import Parameter
from ironlaw.train.checkpoint import WEIGHTS, AdapterFiles
from ironlaw.train.optimizer import grouped
from ironlaw.train.parallel.materialize import SplitTensor
from ironlaw.train.parallel.names import named_tensors
from ironlaw.train.parallel.ranks import Ranks
from ironlaw.train.parallel.store import ShardedFiles
from ironlaw.train.state import Stateful, host_copy
from ironlaw.workload.optimizers import OptimizerConfig


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
        self.sends_stage = (
            writers.index("tp") == writers.index("cp") == writers.index("dp") == 0
        )  # sends a stage's tensors
        self.names = [parameter.name for parameter in whole]
        self.groups = grouped(whole, config)
        self.order = list(chain.from_iterable(self.groups.values()))  # parameter order of one process's optimizer

    def gather(self, model: nn.Module, states: Mapping[str, Any] | None = None) -> dict[str, Tensor]:
        """Return the unsharded tensors of all stages on rank 0, by their names on disk."""
        states = states or {}
        held = dict(named_tensors(model, states.get("optimizer")))
        if "average" in states:
            held |= states["average"].named()
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
