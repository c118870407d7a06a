"""Experts on many ranks: shared token counts, and the exchange of rows with the ranks that hold their experts.

Expert-parallel ranks (GShard, arXiv 2006.16668) each hold E / ep experts of every layer and send every row to the rank
of its expert: one all-to-all there, one back, and the same in the backward pass. Without a capacity the sizes of the
exchange vary by layer and are exchanged first; with one they are fixed. Tensor-parallel ranks hold a part of every
expert and compute all rows with it.

Counts that one process takes over a micro-batch (choices for the balancing loss, positions within a capacity) are taken
over the ranks that share it: those of one sequence, and replicas with less than a micro-batch each.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed._functional_collectives import all_to_all_single_autograd
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Placement, Shard, distribute_tensor

from ironlaw.config import RunConfig
from ironlaw.model.moe import ExpertLinear, ExpertLoad, Experts, Peers, expert_layers, inverse, update_routing
from ironlaw.train.parallel.partition import positions_of
from ironlaw.train.parallel.ranks import Ranks, replicas_per_micro_batch


class SharedPeers(Peers):
    """Process groups of a layer of experts: `counting` shares a micro-batch, `exchanging` holds all experts; None means
    this rank alone. `sequence`: tokens per sequence."""

    def __init__(self, ranks: Ranks, sequence: int) -> None:
        self.counting, self.exchanging = ranks.groups.get("micro_batch"), ranks.groups.get("ep")
        self.ranks = 1 if self.counting is None else self.counting.size()
        self.copies, self.cp = ranks.layout.tp, ranks.layout.cp
        self.sequence = sequence

    def total(self, counts: Tensor) -> Tensor:
        if self.counting is None:
            return counts
        counts = counts.clone()
        dist.all_reduce(counts, group=self.counting)
        return counts

    @torch.no_grad()
    def positions_in_expert(self, chosen: Tensor, experts: int) -> Tensor:
        if self.counting is None:
            return super().positions_in_expert(chosen, experts)
        all_chosen = chosen.new_empty(self.ranks * chosen.shape[0], chosen.shape[1])
        dist.all_gather_into_tensor(all_chosen, chosen.contiguous(), group=self.counting)
        order = self._order(chosen.shape[0]).to(chosen.device)  # token order of a single process
        number = torch.empty_like(all_chosen)
        number[order] = super().positions_in_expert(all_chosen[order], experts)
        return number.view(self.ranks, *chosen.shape)[dist.get_rank(self.counting)]

    def _order(self, tokens: int) -> Tensor:
        """Return the indices of gathered tokens in the order of the micro-batch."""
        rows = tokens // (self.sequence // self.cp)
        positions = [positions_of(rank, self.cp, self.sequence) for rank in range(self.cp)]
        place = torch.cat(
            [
                (replica * rows + row) * self.sequence + positions[rank]
                for replica in range(self.ranks // self.cp)
                for rank in range(self.cp)
                for row in range(rows)
            ]
        )
        return place.argsort()

    @torch.compiler.disable
    def compute(self, experts: nn.Module, rows: Tensor, counts: Tensor) -> Tensor:
        if self.exchanging is None:
            return super().compute(experts, rows, counts)
        if rows.dim() == 3:
            return self._fixed(experts, rows, counts)
        ep = self.exchanging.size()
        there = counts.view(ep, -1)  # rows to send: (destination rank, expert there)
        here = there.clone()  # rows to receive: (source rank, expert here)
        dist.all_to_all_single(here, there.contiguous(), group=self.exchanging)
        sent, received = there.sum(1).tolist(), here.sum(1).tolist()
        arrived = all_to_all_single_autograd(rows, received, sent, self.exchanging)
        expert = torch.arange(here.shape[1], device=rows.device).repeat(ep).repeat_interleave(here.flatten())
        order = expert.argsort(stable=True)
        back = inverse(order)
        computed = super().compute(experts, _Permute.apply(arrived, order, back), here.sum(0))
        returned = _Permute.apply(computed, back, order)
        return all_to_all_single_autograd(returned, sent, received, self.exchanging)

    def _fixed(self, experts: nn.Module, rows: Tensor, counts: Tensor) -> Tensor:
        """Compute rows (E, C, H) with a capacity: every rank has C rows for every expert."""
        assert self.exchanging is not None
        ep, (count, capacity, hidden) = self.exchanging.size(), rows.shape
        arrived = all_to_all_single_autograd(rows, None, None, self.exchanging)
        by_expert = arrived.view(ep, count // ep, capacity, hidden).transpose(0, 1).reshape(count // ep, -1, hidden)
        computed = super().compute(experts, by_expert, counts)
        by_rank = computed.view(count // ep, ep, capacity, hidden).transpose(0, 1).reshape(count, capacity, hidden)
        return all_to_all_single_autograd(by_rank.contiguous(), None, None, self.exchanging)


class _Permute(torch.autograd.Function):
    """A permutation of rows, by indexing in both directions."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, order: Tensor, back: Tensor) -> Tensor:
        ctx.save_for_backward(back)
        return rows.index_select(0, order)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None]:
        (back,) = ctx.saved_tensors
        return gradients[0].index_select(0, back), None, None


def set_groups(model: nn.Module, config: RunConfig, ranks: Ranks) -> None:
    """Create the process groups for a model with experts, and set those of every layer."""
    together = replicas_per_micro_batch(config, ranks.layout.dp) * ranks.layout.cp
    if together > 1:
        others = ranks.layout.dp * ranks.layout.cp // together
        shape = (ranks.layout.pp, others, together, ranks.layout.tp)
        names = ("pp", "others", "micro_batch", "tp")
        mesh = init_device_mesh(ranks.device.type, shape, mesh_dim_names=names)
        ranks.groups["micro_batch"] = mesh.get_group("micro_batch")
    if ranks.experts is not None:
        for dimension in ("expert_replicate", "expert_shard", "ep"):
            ranks.groups[dimension] = ranks.experts.get_group(dimension)
    for layer in expert_layers(model):
        layer.peers = SharedPeers(ranks, config.sequence)


def shard_experts(experts: Experts, ranks: Ranks) -> None:
    """Divide the experts over ep and the inner width of each over tp."""
    for name, inner in (("gate", 1), ("up", 1), ("down", 2)):
        linear = getattr(experts, name)
        if not isinstance(linear, ExpertLinear):
            continue
        placements: list[Placement] = [Shard(0), Shard(inner)]
        if ranks.experts is None:
            mesh, placements = ranks.mesh["tp"], placements[1:]
        elif ranks.layout.tp > 1:
            mesh = ranks.experts["ep", "tp"]
        else:
            mesh, placements = ranks.experts["ep"], placements[:1]
        linear.weight = nn.Parameter(distribute_tensor(linear.weight.detach(), mesh, placements, src_data_rank=None))


def hidden_dimension(module: nn.Module) -> Callable[[nn.Parameter], Shard | None]:
    """Return FSDP's placement function: for expert matrices, the dimension not divided yet; None (rows) for others."""
    found: dict[int, Shard] = {}
    for experts in (one for one in module.modules() if isinstance(one, Experts)):
        for linear in (experts.gate, experts.up, experts.down):  # (E, F, H), (E, F, H), (E, H, F)
            if linear is not None:
                found[id(linear.weight)] = Shard(1 if linear is experts.down else 2)
    return lambda parameter: found.get(id(parameter))


@torch.no_grad()
def balance(model: nn.Module, ranks: Ranks) -> ExpertLoad | None:
    """After the optimizer step, sum the loads over replicas and update the biases. Returns the mean load of layers."""
    layers = list(expert_layers(model))
    if layers:
        loads = torch.stack([torch.cat((layer.load, layer.dropped.reshape(1))) for layer in layers])
        for dimension in ("replicate", "shard"):
            if ranks.size_of(dimension) > 1:
                dist.all_reduce(loads, group=ranks.group(dimension))
        for layer, load in zip(layers, loads, strict=True):
            layer.load.copy_(load[:-1])
            layer.dropped.copy_(load[-1])
    found = update_routing(model)
    if ranks.layout.pp == 1:
        return found
    mine = found or (0.0, 0.0, 0.0)
    total = torch.tensor([*(value * len(layers) for value in mine), len(layers)], dtype=torch.float64)
    total = total.to(ranks.device)
    dist.all_reduce(total, group=ranks.group("pp"))
    *sums, count = total.tolist()
    return ExpertLoad(*(value / count for value in sums))
