"""The mixture-of-experts layer against a loop over tokens, and everything that keeps its load even."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from ironlaw.model import grouped
from ironlaw.model.config import ModelConfig
from ironlaw.model.linear import onednn_available
from ironlaw.model.moe import MixtureOfExperts, attach_balance_losses, update_routing
from ironlaw.model.parameters import model_parameters
from ironlaw.model.transformer import Transformer

BASE: dict[str, Any] = {
    "layers": 2, "hidden": 32, "heads": 4, "vocab": 60, "context": 24, "kv_heads": 2, "ffn": 48, "gated_ffn": True,
    "activation": "silu", "norm": "rmsnorm", "positions": "rope", "bias": False, "tied": False,
}  # fmt: skip
TABLES: dict[str, dict[str, Any]] = {
    "mixtral": {"experts": 8, "experts_per_token": 2},
    "one expert": {"experts": 4, "experts_per_token": 1, "normalize": False},
    "all experts": {"experts": 3, "experts_per_token": 3},
    "deepseek": {
        "experts": 8, "experts_per_token": 3, "expert_ffn": 16, "shared_experts": 2, "dense_layers": 1,
        "score": "sigmoid", "routed_scale": 2.5, "balance": "bias",
    },
    "qwen2": {
        "experts": 6, "experts_per_token": 2, "expert_ffn": 20, "normalize": False, "shared_experts": 1,
        "shared_ffn": 44, "shared_gate": True, "balance_loss": 0.001,
    },
    "every second": {"experts": 4, "experts_per_token": 2, "every": 2},
}  # fmt: skip


RATE = 2e-4  # small beside the differences of fresh scores, which are some 1e-3


def config(table: dict[str, Any], **overrides: Any) -> ModelConfig:
    return ModelConfig(**(BASE | overrides), moe=table)  # type: ignore[arg-type]


def layer_of(table: dict[str, Any], **overrides: Any) -> MixtureOfExperts:
    torch.manual_seed(0)
    layer = MixtureOfExperts(config(table, **overrides)).double()
    for parameter in layer.parameters():
        torch.nn.init.normal_(parameter, std=0.3)
    return layer


def naive(layer: MixtureOfExperts, x: Tensor, capacity: int | None = None) -> Tensor:
    """Token by token, expert by expert, as the papers write it."""
    moe, experts = layer.moe, layer.experts
    taken = [0] * moe.experts
    out = []
    for token in x.flatten(0, -2):
        logits = (layer.router.weight.float() @ token.float()).double()
        scores = logits.softmax(0) if moe.score == "softmax" else logits.sigmoid()
        preference = scores if layer.router.bias is None else scores + layer.router.bias
        chosen = preference.topk(moe.experts_per_token).indices.tolist()
        weights = scores[chosen]
        if moe.normalize:
            weights = weights / weights.sum()
        total = torch.zeros_like(token)
        for expert, weight in zip(chosen, weights * moe.routed_scale, strict=True):
            taken[expert] += 1
            if capacity is not None and taken[expert] > capacity:
                continue
            up = experts.up.weight[expert] @ token
            inner = F.silu(experts.gate.weight[expert] @ token) * up if experts.gate else F.gelu(up, approximate="tanh")
            total = total + weight * (experts.down.weight[expert] @ inner)
        if layer.shared is not None:
            shared = layer.shared(token)
            total = total + (shared if layer.shared_gate is None else layer.shared_gate(token).sigmoid() * shared)
        out.append(total)
    return torch.stack(out).view_as(x)


def tokens(count: int = 20) -> Tensor:
    return torch.randn(2, count // 2, 32, dtype=torch.float64, generator=torch.Generator().manual_seed(1))


@pytest.mark.parametrize("name", TABLES)
@pytest.mark.parametrize("gated", [True, False])
def test_dropless_equals_a_loop_over_tokens(name: str, gated: bool) -> None:
    layer = layer_of(TABLES[name], gated_ffn=gated, activation="silu" if gated else "gelu_tanh")
    if layer.router.bias is not None:
        layer.router.bias += torch.linspace(-0.2, 0.2, layer.moe.experts)
    x = tokens().requires_grad_()
    ours, theirs = layer(x), naive(layer, x)
    torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-5)  # the router is fp32
    outward = torch.randn_like(ours)
    leaves = [x, *layer.parameters()]
    for one, other in zip(
        torch.autograd.grad(ours, leaves, outward), torch.autograd.grad(theirs, leaves, outward), strict=True
    ):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("factor", [0.5, 1.0, 1.5, 100.0])
def test_a_capacity_drops_the_later_tokens_of_a_full_expert(factor: float) -> None:
    layer = layer_of({"experts": 4, "experts_per_token": 2, "capacity_factor": factor})
    x = tokens().requires_grad_()
    capacity = min(20, math.ceil(20 * 2 / 4 * factor))
    assert layer.moe.capacity(20) == capacity
    ours, theirs = layer(x), naive(layer, x, capacity)
    torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-5)
    outward = torch.randn_like(ours)
    leaves = [x, *layer.parameters()]
    for one, other in zip(
        torch.autograd.grad(ours, leaves, outward), torch.autograd.grad(theirs, leaves, outward), strict=True
    ):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-5)
    surplus = int((layer.load - capacity).clamp(min=0).sum())
    assert int(layer.dropped) == surplus
    assert surplus > 0 or factor > 1


def test_evaluation_drops_nothing() -> None:
    layer = layer_of({"experts": 4, "experts_per_token": 2, "capacity_factor": 0.5}).eval()
    torch.testing.assert_close(layer(tokens()), naive(layer, tokens()), rtol=1e-4, atol=1e-5)
    assert layer.load.sum() == 0 and layer.dropped == 0


@pytest.mark.parametrize("factor", [None, 0.75])
def test_gradients_are_those_of_finite_differences(factor: float | None) -> None:
    table = {"experts": 3, "experts_per_token": 2, "capacity_factor": factor}
    layer = layer_of(table, hidden=4, heads=2, kv_heads=1, ffn=3)
    x = torch.randn(5, 4, dtype=torch.float64, requires_grad=True)
    routing = layer.route(x)
    weights = routing.weights.detach().double().requires_grad_()  # a choice has no derivative, and the router is fp32

    def experts(x: Tensor, weights: Tensor, *matrices: Tensor) -> Tensor:
        fixed = type(routing)(**(vars(routing) | {"weights": weights}))
        names = [name for name, _ in layer.experts.named_parameters()]
        rows = torch.func.functional_call(
            layer.experts, dict(zip(names, matrices, strict=True)), (layer.dispatch(x, fixed), fixed.counts)
        )
        return layer.combine(rows, fixed)

    assert torch.autograd.gradcheck(experts, (x, weights, *layer.experts.parameters()))


@pytest.mark.parametrize("name", TABLES)
@pytest.mark.parametrize("gated", [True, False])
def test_parameters_are_counted_and_listed(name: str, gated: bool) -> None:
    model = Transformer(config(TABLES[name], gated_ffn=gated, qk_norm=gated, qk_norm_whole=gated))
    there = [(name, tuple(p.shape)) for name, p in model.named_parameters()]
    assert [(p.name, p.shape) for p in model_parameters(model.config)] == there
    assert sum(p.numel() for p in model.parameters()) == model.config.parameters
    moe = model.config.moe
    assert moe is not None
    idle = sum(p.numel() for name, p in model.named_parameters() if ".experts." in name)
    idle = idle * (moe.experts - moe.experts_per_token) // moe.experts
    assert model.config.active_parameters == model.config.parameters - idle


@pytest.mark.parametrize("name", TABLES)
def test_the_model_trains_every_parameter(name: str) -> None:
    torch.manual_seed(0)
    model = Transformer(config(TABLES[name]))
    data = torch.randint(0, 60, (4, 24))
    loss = model(data, data.roll(-1, 1))
    assert loss.item() == pytest.approx(math.log(60), abs=0.1)
    loss.backward()
    assert all(p.grad is not None and p.grad.isfinite().all() for p in model.parameters())
    moved = [name for name, p in model.named_parameters() if p.grad is not None and p.grad.abs().sum() > 0]
    unmoved = {name for name, _ in model.named_parameters()} - set(moved)
    assert unmoved <= {f"blocks.{i}.ffn.router.weight" for i in range(2)} if name == "all experts" else not unmoved


def test_reduced_precision_stays_near_fp32_and_routes_in_fp32() -> None:
    torch.manual_seed(0)
    model = Transformer(config(TABLES["qwen2"]))
    data = torch.randint(0, 60, (4, 24))
    exact = model(data, data)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        loss = model(data, data)
        weights, *_ = model.blocks[0].ffn.router(torch.randn(5, 32))
    assert weights.dtype is torch.float32
    assert loss.item() == pytest.approx(exact.item(), rel=1e-2)


def test_the_balancing_loss_is_in_the_gradient_and_not_in_the_loss() -> None:
    """coefficient x E x sum f P of every layer (arXiv 2101.03961, equations 4 to 6), by autograd on the side."""
    torch.manual_seed(0)
    coefficient = 0.3
    model = Transformer(config({"experts": 4, "experts_per_token": 2, "balance_loss": coefficient}))
    data = torch.randint(0, 60, (2, 24))
    plain = Transformer(config({"experts": 4, "experts_per_token": 2, "balance": "none"}))
    plain.load_state_dict(model.state_dict())
    inputs: list[Tensor] = []
    for block in plain.blocks:
        block.ffn.register_forward_pre_hook(lambda module, args: inputs.append(args[0]))
    loss, other = model(data, data), plain(data, data)
    assert loss.item() == other.item()
    extra = 0.0
    for block, x in zip(plain.blocks, inputs, strict=True):
        scores = (x.flatten(0, 1) @ block.ffn.router.weight.T).softmax(-1)
        chosen = F.one_hot(scores.topk(2).indices, 4).sum(1).float()
        extra = extra + coefficient * 4 * (chosen.mean(0) / 2 * scores.mean(0)).sum()
    loss.backward()
    (other + extra).backward()
    for one, two in zip(model.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(one.grad, two.grad, rtol=1e-4, atol=1e-7)


def test_the_balancing_loss_is_least_when_the_load_is_even() -> None:
    layer = layer_of({"experts": 4, "experts_per_token": 1, "balance_loss": 1.0})
    even = torch.full((8, 4), 0.25)
    counts = torch.full((4,), 2)
    least = layer.router.balance_loss(even, counts)
    assert least is not None and least.item() == pytest.approx(1.0)
    skewed = torch.tensor([0.7, 0.1, 0.1, 0.1]).expand(8, 4)
    worse = layer.router.balance_loss(skewed, torch.tensor([8, 0, 0, 0]))
    assert worse is not None and worse.item() == pytest.approx(2.8)


def test_without_gradients_nothing_is_attached() -> None:
    model = Transformer(config(TABLES["mixtral"]))
    data = torch.randint(0, 60, (2, 24))
    with torch.no_grad():
        loss = model(data, data)
    assert not loss.requires_grad
    assert attach_balance_losses(loss, model) is loss


def test_biases_move_against_the_load_and_even_it_out() -> None:
    torch.manual_seed(0)
    model = Transformer(config({"experts": 8, "experts_per_token": 2, "balance": "bias", "bias_rate": RATE}, layers=1))
    layer = model.blocks[0].ffn
    data = torch.randint(0, 60, (4, 24))
    model(data, data)
    load, before = layer.load.clone(), layer.router.bias.clone()
    first = update_routing(model)
    mean = load.float().mean()
    torch.testing.assert_close(layer.router.bias - before, RATE * (mean - load).sign())
    assert layer.load.sum() == 0
    for _ in range(60):
        model(data, data)
        last = update_routing(model)
    assert first is not None and last is not None
    assert last.expert_load_busiest_over_mean < first.expert_load_busiest_over_mean
    assert "blocks.0.ffn.router.bias" in model.state_dict()


def test_the_load_says_what_was_chosen_and_dropped() -> None:
    torch.manual_seed(0)
    model = Transformer(config({"experts": 4, "experts_per_token": 2, "capacity_factor": 0.5}))
    data = torch.randint(0, 60, (2, 24))
    model(data, data)
    load = update_routing(model)
    assert load is not None and load.expert_load_busiest_over_mean >= 1
    assert load.expert_choices_dropped >= 0.5  # half of the mean load has room at most
    assert update_routing(Transformer(ModelConfig(**BASE))) is None


def test_a_later_token_does_not_change_earlier_logits() -> None:
    torch.manual_seed(0)
    model = Transformer(config(TABLES["deepseek"])).eval()
    data = torch.randint(0, 60, (3, 20))
    changed = data.clone()
    changed[:, 13] = (changed[:, 13] + 7) % 60
    torch.testing.assert_close(model(data)[:, :13], model(changed)[:, :13], rtol=1e-4, atol=1e-5)


def test_only_the_layers_named_have_experts() -> None:
    def kinds(**table: Any) -> list[bool]:
        model = Transformer(config({"experts": 2, "experts_per_token": 1} | table, layers=6))
        found = [isinstance(block.ffn, MixtureOfExperts) for block in model.blocks]
        assert sum(found) == model.config.moe_layers
        return found

    assert kinds(dense_layers=2) == [False, False, True, True, True, True]
    assert kinds(every=2) == [False, True, False, True, False, True]
    assert kinds(every=2, dense_layers=3) == [False, False, False, True, False, True]


@pytest.mark.parametrize(
    ("table", "message"),
    [
        ({"experts": 4, "experts_per_token": 5}, "more than experts"),
        ({"experts": 4, "experts_per_token": 1, "shared_gate": True}, "needs shared_experts"),
        ({"experts": 4, "experts_per_token": 1, "shared_ffn": 8}, "needs shared_experts"),
        ({"experts": 4, "experts_per_token": 1, "dense_layers": 2}, "no layer has experts"),
    ],
)
def test_tables_that_make_no_sense_are_refused(table: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        config(table)
    with pytest.raises(ValueError, match="experts have no biases"):
        config({"experts": 4, "experts_per_token": 1}, bias=True)


def test_the_order_of_rows_is_the_same_every_time() -> None:
    layer = layer_of(TABLES["mixtral"]).float()
    x = tokens().float()
    results = []
    for _ in range(2):
        x = x.detach().requires_grad_()
        out = layer(x)
        out.sum().backward()
        results.append((out, x.grad))
    assert torch.equal(results[0][0], results[1][0]) and torch.equal(results[0][1], results[1][1])  # type: ignore[arg-type]


@pytest.mark.skipif(not onednn_available(), reason="this PyTorch is built without oneDNN")
def test_onednn_products_of_any_load_are_those_of_plain_ones_in_few_shapes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each number of rows is a kernel that oneDNN makes: 200 loads must not be as many."""
    torch.manual_seed(0)
    weight, shapes = torch.randn(4, 24, 16), set()
    product = grouped.onednn_product

    def counted(x: torch.Tensor, w: torch.Tensor, *more: object) -> torch.Tensor:
        shapes.add((x.shape, w.shape))
        return product(x, w, *more)

    monkeypatch.setattr(grouped, "onednn_product", counted)
    loads = [[0, 5, 16, 107], [64, 0, 63, 1], [128, 65, 17, 15]]
    loads += torch.randint(0, 200, (50, 4)).tolist()
    for load in loads:
        ends = torch.tensor(load).cumsum(0).tolist()
        results = []
        for onednn in (False, True):
            rows, matrix = torch.randn(ends[-1], 16, requires_grad=True), weight.clone().requires_grad_()
            with torch.no_grad():
                rows.copy_(torch.linspace(-1, 1, rows.numel()).view_as(rows).sin())
            out = grouped.GroupedProduct.apply(rows, matrix, ends, onednn)
            out.backward(torch.linspace(-1, 1, out.numel()).view_as(out).cos())
            results.append((out, rows.grad, matrix.grad))
        for plain, chosen in zip(*results, strict=True):
            torch.testing.assert_close(chosen, plain, rtol=1e-5, atol=1e-4)
    assert len({x[0] for x, _ in shapes}) <= 63 + 200 // 64 < len({n for load in loads for n in load})
