"""Checkpoints of adapters that ranks share: whole, as one process writes them, so that any layout goes on from them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import chain
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from ironlaw.errors import UserError
from ironlaw.model.adapters import adapted_layers
from ironlaw.train.checkpoint import STATE, WEIGHTS, AdapterFiles
from ironlaw.train.optimizer import grouped, trained_parameters
from ironlaw.train.parallel.materialize import copy_part
from ironlaw.train.parallel.ranks import Ranks
from ironlaw.train.parallel.store import give_state
from ironlaw.train.state import Stateful, host_copy
from ironlaw.workload.optimizers import OptimizerConfig
from ironlaw.workload.parameters import Parameter


def _orders(model: nn.Module) -> dict[str, Tensor]:
    """Of trained tensors whose rows ranks hold in another order, which rows those are."""
    found: dict[str, Tensor] = {}
    for layer_name, layer in adapted_layers(model).items():
        for name, adapter in layer.adapters.items():
            order = getattr(adapter, "order", None)
            if order is not None:
                found |= {f"{layer_name}.adapters.{name}.{which}": order for which in ("b", "magnitude")}
    return found


def whole_tensors(model: nn.Module, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """`tensors` by the name of what is trained, or that and "/" and a key: whole, on the host. Every rank calls it."""
    orders, found = _orders(model), {}
    for name, tensor in tensors.items():
        whole = tensor.detach()
        whole = (whole.full_tensor() if isinstance(whole, DTensor) else whole).to("cpu", copy=True)
        order = orders.get(name.partition("/")[0])
        if order is not None and whole.dim():
            whole[order] = whole.clone()
        found[name] = whole
    return found


class SharedAdapterFiles(AdapterFiles):
    """Of ranks that share adapters: the first one writes what one process would, and every rank reads its part."""

    def __init__(self, whole: Sequence[Parameter], config: OptimizerConfig, writers: Ranks) -> None:
        """`whole`: what is trained, as one process has it."""
        self.writers, self.first = writers, writers.first
        self.speaks = writers.index("tp") == writers.index("cp") == writers.index("dp") == 0  # for its stage
        self.names = [parameter.name for parameter in whole]
        self.groups = grouped(whole, config)
        self.order = list(chain.from_iterable(self.groups.values()))  # as an optimizer of one process counts them

    def gather(self, model: nn.Module, states: Mapping[str, Stateful] | None = None) -> dict[str, Tensor]:
        """Whole tensors of all stages, on the first rank."""
        here = whole_tensors(model, dict(self._held(model, states or {})))
        stages = self.writers.gather(here if self.speaks and not self.first else None)
        return {name: tensor for stage in (here, *stages) if stage for name, tensor in stage.items()}

    def _held(self, model: nn.Module, states: Mapping[str, Any]) -> Iterator[tuple[str, Tensor]]:
        average = states.get("average")
        for number, (name, parameter) in enumerate(trained_parameters(model)):
            yield name, parameter
            for key, value in states["optimizer"].state.get(parameter, {}).items() if states else ():
                if isinstance(value, Tensor):
                    yield f"{name}/{key}", value
            if average is not None:
                yield f"{name}/average", average.tensors[number]

    def take(self, model: nn.Module, states: Mapping[str, Stateful]) -> tuple[dict[str, Tensor], dict[str, Any]]:
        found = self.gather(model, states)
        if not self.first:
            return {}, {}
        saved = {name: part.state_dict() for name, part in states.items()}
        by_key: dict[str, dict[str, Tensor]] = {name: {} for name in self.names}
        for name, tensor in found.items():
            of, _, key = name.partition("/")
            if key:
                by_key[of][key] = tensor
        if "average" in states:
            saved["average"] = {"tensors": [by_key[name].pop("average") for name in self.names]}
        rest = {name: value for name, value in saved["optimizer"]["param_groups"][0].items() if name != "params"}
        groups = []
        for to, names in self.groups.items():
            numbers = [self.order.index(name) for name in names]
            groups.append(rest | {"lr_scale": to.lr_scale, "weight_decay": to.weight_decay, "params": numbers})
        saved["optimizer"] = {
            "state": {n: by_key[name] for n, name in enumerate(self.order) if by_key[name]}, "param_groups": groups
        }  # fmt: skip
        return {name: found[name] for name in self.names}, host_copy(saved)

    def write(self, folder: Path, taken: Any) -> dict[str, str]:
        return super().write(folder, taken) if self.first else {}

    def read(self, folder: Path, model: nn.Module, states: Mapping[str, Any]) -> list[str]:
        saved = torch.load(folder / STATE, weights_only=True, mmap=True)
        whole = dict(load_file(folder / WEIGHTS))
        if whole.keys() != set(self.names):
            raise UserError(f"the checkpoint {folder} is of other adapters: resume with its own [finetune]")
        for number, state in saved["optimizer"]["state"].items():
            whole |= {f"{self.order[number]}/{key}": value for key, value in state.items() if isinstance(value, Tensor)}
        average = saved.get("average", {}).get("tensors", [])
        whole |= {f"{name}/average": tensor for name, tensor in zip(self.names, average, strict=False)}
        if states:
            give_state(states["optimizer"])
        orders = _orders(model)
        with torch.no_grad():
            for name, tensor in self._held(model, states):
                found, rows = whole.get(name), orders.get(name.partition("/")[0])
                if found is not None:
                    copy_part(tensor.detach(), found if rows is None or not found.dim() else found[rows])
        for name in states.keys() & saved.keys() - {"optimizer", "average"}:
            states[name].load_state_dict(saved[name])
        return sorted(states.keys() - saved.keys())
