"""The mixture-of-experts layer: router, dispatch, experts, combine. Token-choice top-k (arXiv 1701.06538, 2101.03961).

    layer(x)                            # (B, S, H) to (B, S, H), in place of FeedForward
    layer.experts(rows, counts)         # rows sorted by expert; expert parallelism exchanges them around this call
    update_routing(model)               # after each optimizer step: moves the biases, returns the load

There are two ways to compute the experts. Dropless: every choice is a row, rows are sorted by expert, and each expert
multiplies any number of rows. With a capacity: each expert has the same number of rows in training, surplus choices are
dropped in the order of the tokens, empty rows are computed but unused, and shapes are fixed.

Shapes as in `transformer.py`, and: N tokens of the micro-batch, k experts per token, E experts, F inner width, R rows.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ironlaw.model.config import ModelConfig
from ironlaw.model.feed_forward import FeedForward, activate
from ironlaw.model.grouped import ClampedSwiGLU, Combine, Dispatch, Ends, GroupedProduct, RowBias, group_ends
from ironlaw.model.linear import autocast_dtype, local_part


@dataclass(frozen=True)
class Routing:
    """The assignment of one micro-batch's tokens to rows of experts."""

    weights: Tensor  # (N, k) fp32, with gradient: weight of each choice
    source: Tensor  # (R,) the choice (token x k + number) of each row
    place: Tensor  # (N, k) the row of each choice
    counts: Tensor  # (E,) choices of each expert, dropped ones included
    kept: Tensor | None = None  # (N, k) whether a choice has a row; None: all have
    filled: Tensor | None = None  # (R,) whether a row has a choice; None: all have
    capacity: int | None = None  # rows of each expert; None: one per choice


class Peers:
    """The ranks that share a micro-batch and its experts: this process alone. `train/parallel/experts.py` has others.

    The layer uses them only where whole and divided computations differ.
    """

    ranks = 1  # ranks that each hold a part of the micro-batch's tokens
    copies = 1  # ranks that compute the same, and whose gradients are summed

    def total(self, counts: Tensor) -> Tensor:
        """Return the choices per expert (E,) of the whole micro-batch from those of this process."""
        return counts

    def positions_in_expert(self, chosen: Tensor, experts: int) -> Tensor:
        """Return the number of earlier choices of the same expert in the whole micro-batch, (N, k)."""
        flat = chosen.flatten()  # in the order of the tokens
        order, counts = flat.argsort(stable=True), counts_of(flat, experts)
        number = torch.arange(order.numel(), device=order.device) - (counts.cumsum(0) - counts)[flat[order]]
        return torch.empty_like(order).scatter_(0, order, number).view_as(chosen)

    def compute(self, experts: nn.Module, rows: Tensor, counts: Tensor) -> Tensor:
        """Return the experts' outputs for rows sorted by expert, in the same order."""
        return experts(rows, counts)


ALONE = Peers()


def counts_of(chosen: Tensor, experts: int) -> Tensor:
    """Return the number of choices of each expert, (E,). `bincount` knows no tensors without values."""
    return chosen.new_zeros(experts).scatter_add_(0, chosen.flatten(), torch.ones_like(chosen).flatten())


def inverse(order: Tensor) -> Tensor:
    """Return the inverse of a permutation (N,)."""
    return torch.empty_like(order).scatter_(0, order, torch.arange(order.numel(), device=order.device))


class Router(nn.Module):
    """The scores of each token for each expert, always in fp32, so that choices do not depend on rounding. A frozen
    router chooses as it did: it has no balancing loss, and its bias does not move."""

    bias: Tensor | None

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        assert config.moe is not None
        self.moe = config.moe
        self.weight = nn.Parameter(torch.empty(config.moe.experts, config.hidden))
        # Added for the choice only, moved by the load instead of a gradient, and part of a checkpoint.
        self.register_buffer("bias", torch.zeros(config.moe.experts) if config.moe.balance == "bias" else None)
        # Added to the scores, and learned (gpt-oss).
        self.score_bias = nn.Parameter(torch.empty(config.moe.experts)) if config.moe.bias else None

    def forward(self, x: Tensor, peers: Peers = ALONE) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
        """(N, H) to weights (N, k), chosen experts (N, k), choices per expert (E,), and the balancing loss if any."""
        moe = self.moe
        with nullcontext() if autocast_dtype(x) is None else torch.autocast(x.device.type, enabled=False):
            learned = None if self.score_bias is None else self.score_bias.float()
            logits = F.linear(x.float(), self.weight.float(), learned)  # (N, E)
            scores = logits.softmax(-1) if moe.score == "softmax" else logits.sigmoid()
            preference = scores.detach() if self.bias is None else scores.detach() + self.bias
            if moe.limits_groups:
                preference = self.within_groups(preference)
            chosen = preference.topk(moe.experts_per_token, dim=-1).indices
            weights = scores.gather(1, chosen)
            if moe.normalize:
                weights = weights / weights.sum(-1, keepdim=True)
            if moe.routed_scale != 1.0:
                weights = weights * moe.routed_scale
            counts = counts_of(chosen, moe.experts)
            balances = self.training and self.weight.requires_grad
            return weights, chosen, counts, self.balance_loss(scores, counts, peers) if balances else None

    def within_groups(self, preference: Tensor) -> Tensor:
        """Return the preferences (N, E) with minus infinity outside the groups that score highest."""
        moe = self.moe
        grouped = preference.view(-1, moe.groups, moe.experts // moe.groups)
        best = min(2 if moe.score == "sigmoid" else 1, grouped.shape[-1])
        of_group = grouped.topk(best, dim=-1).values.sum(-1)  # (N, groups)
        outside = torch.ones_like(of_group, dtype=torch.bool)
        outside.scatter_(1, of_group.topk(moe.groups_per_token or moe.groups, dim=-1).indices, False)
        return grouped.masked_fill(outside.unsqueeze(-1), -math.inf).flatten(1)

    def balance_loss(self, scores: Tensor, counts: Tensor, peers: Peers = ALONE) -> Tensor | None:
        """Return coefficient x E x sum over experts of (share of the choices) x (mean score), minimal if both are even.

        Shares are those of the whole micro-batch, scores those of this rank's tokens: the mean over peers is exact.
        """
        moe = self.moe
        if moe.balance != "loss" or moe.balance_loss == 0:
            return None
        share = peers.total(counts).float() / (scores.shape[0] * moe.experts_per_token * peers.ranks)
        if moe.score == "sigmoid":
            scores = scores / scores.sum(-1, keepdim=True)
        return (scores.mean(0) * share).sum() * (moe.balance_loss * moe.experts / peers.copies)


class ExpertLinear(nn.Module):
    """One matrix per expert, stacked: (E, out, in)."""

    onednn = False  # as in `Linear`: oneDNN multiplies fp32 on a CPU

    def __init__(self, experts: int, inputs: int, outputs: int, bias: bool = False) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(experts, outputs, inputs))
        self.bias = nn.Parameter(torch.empty(experts, outputs)) if bias else None

    def forward(self, rows: Tensor, ends: Any) -> Tensor:
        """Multiply (R, in) with the row ends of each expert, or (E, C, in) if all experts have C rows."""
        bias = None if self.bias is None else self.bias.to(rows.dtype)
        product = self.product(rows, ends)
        if bias is None:
            return product
        return product + bias[:, None, :] if rows.dim() == 3 else RowBias.apply(product, bias, ends)

    def ends(self, counts: Tensor, rows: Tensor) -> Ends:
        return group_ends(counts, rows, local_part(self.weight))

    def product(self, rows: Tensor, ends: Any) -> Tensor:
        weight = local_part(self.weight).to(rows.dtype)  # the matrices of this rank's experts
        if rows.dim() == 3:
            return torch.bmm(rows, weight.transpose(1, 2))
        found: Tensor = GroupedProduct.apply(rows, weight, ends, self.onednn and rows.dtype is torch.float32)
        return found


class Experts(nn.Module):
    """All routed experts of a layer. `gate` and `up` are (E, F, H), `down` (E, H, F)."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        assert config.moe is not None
        count, hidden, width = config.moe.experts, config.hidden, config.expert_ffn_size
        self.activation, bias = config.activation, config.moe.bias
        self.gate = ExpertLinear(count, hidden, width, bias) if config.gated_ffn else None
        self.up = ExpertLinear(count, hidden, width, bias)
        self.down = ExpertLinear(count, width, hidden, bias)

    @torch.compiler.disable  # the rows per expert change with every step, and each size would be compiled anew
    def forward(self, rows: Tensor, counts: Tensor) -> Tensor:
        """Apply the experts to rows (R, H) sorted by expert, `counts` (E,) of each; (E, C, H) needs none."""
        ends = None if rows.dim() == 3 else self.up.ends(counts, rows)
        if self.gate is None:
            return self.down(activate(self.up(rows, ends), self.activation), ends)
        if self.activation == "clamped_swiglu":
            return self.down(ClampedSwiGLU.apply(self.gate(rows, ends), self.up(rows, ends)), ends)
        return self.down(activate(self.gate(rows, ends), self.activation) * self.up(rows, ends), ends)


class MixtureOfExperts(nn.Module):
    """A block's mixture-of-experts network. `load` counts the choices per expert since the last update."""

    peers: Peers = ALONE
    is_recomputation = False  # then the first pass counted choices and set the balancing loss
    load: Tensor
    dropped: Tensor

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        assert config.moe is not None
        self.moe = config.moe
        self.router = Router(config)
        self.experts = Experts(config)
        self.shared = FeedForward(config, config.shared_ffn_size) if config.moe.shared_experts else None
        self.shared_gate = nn.Linear(config.hidden, 1, bias=False) if config.moe.shared_gate else None
        self.register_buffer("load", torch.zeros(config.moe.experts, dtype=torch.int64), persistent=False)
        self.register_buffer("dropped", torch.zeros((), dtype=torch.int64), persistent=False)
        self.balance_loss: Tensor | None = None  # of the last forward pass, read by `attach_balance_losses`

    def forward(self, x: Tensor) -> Tensor:
        tokens = x.flatten(0, -2)  # (N, H)
        routing = self.route(tokens)
        rows = self.peers.compute(self.experts, self.dispatch(tokens, routing), routing.counts)
        out = self.combine(rows, routing).view(x.shape)
        if self.shared is None:
            return out
        shared = self.shared(x)
        return out + (shared if self.shared_gate is None else self.shared_gate(x).sigmoid() * shared)

    def route(self, tokens: Tensor) -> Routing:
        """Choose experts, count the choices, and sort them by expert."""
        weights, chosen, counts, balance_loss = self.router(tokens, self.peers)
        capacity = self.moe.capacity(tokens.shape[0] * self.peers.ranks) if self.training else None
        if not self.is_recomputation:
            self.balance_loss = balance_loss
        if self.training and not self.is_recomputation:
            self.load += counts
        if capacity is not None:
            return self._within(capacity, weights, chosen, counts)
        order = chosen.flatten().argsort(stable=True)  # (N k,): choices by expert, tokens in order within one
        return Routing(weights, order, inverse(order).view_as(chosen), counts)

    def _within(self, capacity: int, weights: Tensor, chosen: Tensor, counts: Tensor) -> Routing:
        """Assign choices to rows, at most `capacity` for each expert, and drop the surplus. The rows are fixed, unless
        several ranks share a micro-batch: how many of an expert's rows a rank fills then depends on all ranks, and only
        kept choices become rows."""
        experts = self.moe.experts
        position = self.peers.positions_in_expert(chosen, experts)
        kept = position < capacity
        if not self.is_recomputation:
            self.dropped += kept.numel() - kept.sum()
        if self.peers.ranks > 1:
            order = torch.where(kept, chosen, experts).flatten().argsort(stable=True)  # dropped ones last
            counts = counts_of(chosen[kept], experts)
            place = torch.where(kept, inverse(order).view_as(kept), 0)
            return Routing(weights, order[: int(counts.sum())], place, counts, kept)
        rows = experts * capacity
        place = torch.where(kept, chosen * capacity + position, rows).flatten()  # dropped ones: a row after the last
        choice = torch.arange(place.numel(), device=place.device)
        source = choice.new_zeros(rows + 1).scatter_(0, place, choice)[:rows]
        filled = kept.new_zeros(rows + 1).scatter_(0, place, kept.flatten())[:rows]
        place = torch.where(kept, place.view_as(chosen), 0)
        return Routing(weights, source, place, counts, kept, filled, capacity)

    def dispatch(self, tokens: Tensor, routing: Routing) -> Tensor:
        """Gather tokens (N, H) into rows by expert in the products' precision: (R, H), or (E, C, H) with a capacity."""
        tokens = tokens.to(autocast_dtype(tokens) or tokens.dtype)
        rows: Tensor = Dispatch.apply(tokens, routing.source, routing.place, routing.kept)
        return rows if routing.capacity is None else rows.view(self.moe.experts, routing.capacity, -1)

    def combine(self, rows: Tensor, routing: Routing) -> Tensor:
        """Return the weighted sum of each token's rows, (N, H)."""
        rows = rows.flatten(0, -2)
        return Combine.apply(rows, routing.weights, routing.source, routing.place, routing.kept, routing.filled)


class _Attach(torch.autograd.Function):
    """Return `carrier` unchanged, and propagate a gradient to `balance` too, times `weight`: that of the carrier if it
    is a loss, 1 if it is hidden states."""

    @staticmethod
    def forward(ctx: Any, carrier: Tensor, balance: Tensor, weight: Tensor | float) -> Tensor:
        ctx.weight, ctx.like = weight, balance
        return carrier.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, Tensor, None]:
        (gradient,) = gradients
        of_loss = gradient if gradient.dim() == 0 else torch.ones_like(ctx.like)
        return gradient, of_loss * ctx.weight, None


def expert_layers(model: nn.Module) -> Iterator[MixtureOfExperts]:
    return (module for module in model.modules() if isinstance(module, MixtureOfExperts))


def attach_balance_losses(carrier: Tensor, model: nn.Module, weight: Tensor | float = 1.0) -> Tensor:
    """Return `carrier` unchanged, with the balancing losses of all layers, times `weight`, added to its gradient.

    The carrier is the scalar loss. The reported loss so stays the cross-entropy, comparable with validation and with
    dense models. In a pipeline stage without a loss, the carrier is the hidden states.
    """
    losses = []
    for layer in expert_layers(model):
        if layer.balance_loss is not None:
            losses.append(layer.balance_loss)
            layer.balance_loss = None
    if not losses or not torch.is_grad_enabled():
        return carrier
    whole: Any = carrier
    carrier = whole.full_tensor() if hasattr(whole, "full_tensor") else carrier
    return _Attach.apply(carrier, torch.stack(losses).sum(), weight)


class ExpertLoad(NamedTuple):
    """The balance of a step's expert loads, over all layers with experts, by the names of a run's metrics."""

    expert_load_busiest_over_mean: float  # load of the fullest expert over the mean, mean over layers; 1 is even
    experts_unused: float  # share of experts that no token chose
    expert_choices_dropped: float  # share of choices without a row; 0 when dropless


@torch.no_grad()
def update_routing(model: nn.Module) -> ExpertLoad | None:
    """Move the biases against the load (arXiv 2408.15664, algorithm 1), return the load and reset it.

    Call it once per optimizer step, when `load` contains the choices of all ranks. Returns None for a dense model.
    """
    busiest, unused, dropped = [], [], []
    for layer in expert_layers(model):
        load = layer.load.float()
        mean = load.mean()
        if layer.router.bias is not None and layer.router.weight.requires_grad:
            layer.router.bias += layer.moe.bias_rate * (mean - load).sign()
        busiest.append(load.max() / mean)
        unused.append((load == 0).float().mean())
        dropped.append(layer.dropped / load.sum())
        layer.load.zero_()
        layer.dropped.zero_()
    if not busiest:
        return None
    return ExpertLoad(*(float(torch.stack(values).mean()) for values in (busiest, unused, dropped)))
