"""What a trace knows of values: masks, indices and constants; and modules that need more of them than it has."""

from __future__ import annotations

from collections import OrderedDict
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from ironlaw.errors import UserError
from ironlaw.workload import trace as tracing
from ironlaw.workload.module_source import Input
from ironlaw.workload.operations import Operation, saved_bytes, total_flops
from ironlaw.workload.trace import trace

WIDE = 300  # a weight of this width squared is too large to have values in a trace


def rows(operations: list[Operation]) -> list[tuple[Any, ...]]:
    return [
        (op.phase, op.name, op.kernel, op.matmul, op.flops, op.saved_bytes, op.gradient_bytes)
        for op in operations
        if op.kernel not in ("add", "add_in_place")  # of gradients that meet: in place in both, under two names
    ]


def same_as_real(build: Any, inputs: Any) -> None:
    fake, real = (trace(build, inputs, real=real) for real in (False, True))
    assert rows(fake.operations) == rows(real.operations)
    assert saved_bytes(fake.operations) == saved_bytes(real.operations)
    assert fake.parameters == real.parameters


class Masked(nn.Module):
    """Attention as libraries call it: a mask that hides nothing is left out."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv = nn.Linear(64, 192)

    def forward(self, x: Tensor, attention_mask: Tensor) -> Tensor:
        q, k, v = (t.unflatten(-1, (4, 16)).transpose(1, 2) for t in self.qkv(x).chunk(3, -1))
        if attention_mask.all():
            return nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        hidden = attention_mask[:, None, None, :].bool()
        return nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=hidden)


class Chooses(nn.Module):
    """Small whole numbers that follow from what is unknown are unknown, whatever they are cast to."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(16, WIDE)

    def forward(self, x: Tensor) -> Tensor:
        scores = self.layer(x)
        best = scores.topk(2, dim=-1).indices.to(torch.int32)
        hidden = best.new_ones(scores.shape, dtype=torch.bool).scatter(-1, best.long(), False)
        return scores.masked_fill(hidden, 0.0).sum()


def test_choices_are_unknown() -> None:
    same_as_real(Chooses, [Input("x", (4, 16))])


@pytest.mark.parametrize("padded", [False, True])
def test_a_mask_decides_as_it_does_in_the_run(padded: bool) -> None:
    mask = torch.ones(2, 32, dtype=torch.int64)
    mask[0, 20:] = 0 if padded else 1
    inputs = {"x": Input("x", (2, 32, 64)), "attention_mask": mask}
    same_as_real(Masked, inputs)
    attention = [op for op in trace(Masked, inputs).operations if op.attention]
    assert attention[0].elements == 2 * 4 * (32 * 32 if padded else 32 * 32 // 2)


def test_a_mask_is_assumed_to_hide_nothing_and_that_is_said() -> None:
    found = trace(Masked, [Input("x", (2, 32, 64)), Input("attention_mask", (2, 32), "int64")])
    assert [assumed[:2] for assumed in found.assumptions] == [("values of attention_mask", "ones")]
    given = trace(Masked, [Input("x", (2, 32, 64)), Input("attention_mask", (2, 32), "int64", "zeros")])
    assert given.assumptions == ()
    assert total_flops(given.operations) > total_flops(found.operations)


def test_a_mask_of_ones_costs_a_decoder_of_hugging_face_nothing() -> None:
    transformers = pytest.importorskip("transformers")
    config = transformers.LlamaConfig(
        hidden_size=64, intermediate_size=96, num_hidden_layers=2, num_attention_heads=4, vocab_size=128,
        use_cache=False,
    )  # fmt: skip
    tokens = Input("input_ids", (2, 64), "int64")
    mask = Input("attention_mask", (2, 64), "int64")
    without, with_ones = (
        trace(lambda: transformers.LlamaForCausalLM(config), inputs) for inputs in ([tokens], [tokens, mask])
    )
    assert total_flops(with_ones.operations) == total_flops(without.operations)
    same_as_real(lambda: transformers.LlamaForCausalLM(config), [tokens, mask])


class Rates(nn.Module):
    """Initialised as image models are: rates read from a tensor, and samples drawn until none is outside."""

    def __init__(self) -> None:
        super().__init__()
        rates = [rate.item() for rate in torch.linspace(0, 0.1, 3)]
        self.layers = nn.ModuleList(nn.Sequential(nn.Linear(WIDE, WIDE), nn.Dropout(rate)) for rate in rates)
        for parameter in self.parameters():
            nn.init.trunc_normal_(parameter, std=0.02)

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return x


class ReadsItsWeights(Rates):
    def __init__(self) -> None:
        super().__init__()
        self.scale = float(self.layers[0][0].weight.abs().max())  # type: ignore[index]


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.head = nn.Embedding(WIDE, WIDE), nn.Linear(WIDE, WIDE, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, tokens: Tensor) -> Tensor:
        return self.head(self.embedding(tokens))


def under_meta() -> nn.Module:
    with torch.device("meta"):
        return Tied().bfloat16()


TOKENS = [Input("tokens", (2, 8), "int64")]


@pytest.mark.parametrize(
    ("build", "inputs"),
    [
        (Rates, [Input("x", (4, WIDE))]),
        (ReadsItsWeights, [Input("x", (4, WIDE))]),
        (lambda: Tied().bfloat16(), TOKENS),
        (lambda: Tied().to(torch.float64), TOKENS),
        (lambda: nn.LSTM(32, WIDE).bfloat16(), [Input("input", (3, 4, 32), "bfloat16")]),
    ],
)
def test_construction(build: Any, inputs: list[Input]) -> None:
    same_as_real(build, inputs)


def test_weights_that_construction_reads_are_built_in_memory_and_that_is_said() -> None:
    assert trace(ReadsItsWeights, [Input("x", (4, WIDE))]).assumptions[0][:2] == ("weights", "built in memory")
    assert trace(Rates, [Input("x", (4, WIDE))]).assumptions == ()


def test_factories_under_meta() -> None:
    found, plain = trace(under_meta, TOKENS), trace(lambda: Tied().bfloat16(), TOKENS)
    assert rows(found.operations) == rows(plain.operations)
    assert found.parameters == plain.parameters == WIDE * WIDE


class Router(nn.Module):
    """Each token goes to the expert that its values choose."""

    def __init__(self, width: int = 16) -> None:
        super().__init__()
        self.router = nn.Linear(width, 4)
        self.experts = nn.ModuleList(nn.Linear(width, width) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        chosen = self.router(x).argmax(-1)
        out = torch.zeros_like(x)
        for i, expert in enumerate(self.experts):
            (rows,) = torch.where(chosen == i)
            out = out.index_add(0, rows, expert(x[rows]))
        return out


def test_a_module_that_looks_at_values_is_run_on_real_tensors() -> None:
    inputs = [Input("x", (64, 16))]
    found = trace(Router, inputs)
    name, _, reason, _ = found.assumptions[0]
    assert name == "a step on real tensors" and "looks at the values" in reason and "test_trace_values.py:" in reason
    products = [op for op in found.operations if op.name.startswith("experts") and op.matmul]
    assert sum(op.matmul[0] for op in products if str(op.phase) == "forward" and op.matmul) == 64
    assert total_flops(found.operations) == total_flops(trace(Router, inputs, real=True).operations)


def test_a_large_one_is_run_only_when_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tracing, "REAL_UNASKED_BYTES", 100)
    with pytest.raises(UserError, match=r"looks at the values of a tensor.*--real"):
        trace(Router, [Input("x", (64, 16))])
    assert trace(Router, [Input("x", (64, 16))], real=True).assumptions == ()


def test_a_real_step_leaves_the_module_as_it_was() -> None:
    module = nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8)).eval()
    before = {name: tensor.clone() for name, tensor in module.state_dict().items()}
    generator = torch.get_rng_state()
    trace(module, [Input("x", (4, 8))], real=True)
    assert all(torch.equal(tensor, before[name]) for name, tensor in module.state_dict().items())
    assert all(p.grad is None for p in module.parameters()) and not module.training
    assert torch.equal(generator, torch.get_rng_state())


class Named(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(WIDE, 4)

    def forward(self, x: Tensor) -> OrderedDict[str, Any]:
        return OrderedDict(out=self.layer(x), more=[{"again": self.layer(2 * x)}])


class Detector(nn.Module):
    """Takes a list of images and a list of dicts, as torchvision's detectors do."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Conv2d(3, 4, 3)

    def forward(self, images: list[Tensor], targets: list[dict[str, Tensor]]) -> dict[str, Tensor]:
        loss = sum(self.layer(image).mean() for image in images)
        return {"loss": loss * sum(t["boxes"].mean() for t in targets)}  # type: ignore[dict-item]


DETECTED = [
    *(Input(f"images.{i}", (3, 20 + i, 16)) for i in range(2)),
    *(Input(f"targets.{i}.boxes", (3, 4)) for i in range(2)),
]


class ByScale(nn.Linear):
    def forward(self, images: dict[int, Tensor]) -> Tensor:  # type: ignore[override]
        return sum(scale * super(ByScale, self).forward(image).mean() for scale, image in images.items())


class Bag(nn.Module):
    def __init__(self, sparse: bool) -> None:
        super().__init__()
        self.bag = nn.EmbeddingBag(1000, WIDE, mode="sum", sparse=sparse)

    def forward(self, indices: Tensor, offsets: Tensor) -> Tensor:
        return self.bag(indices, offsets)


BAG = [Input("indices", (40,), "int64"), Input("offsets", (8,), "int64")]


class WithoutLoops(nn.Module):
    """As graph convolutions do: loops are taken out and every node gets one."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(WIDE, 8)

    def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
        edges = edge_index[:, edge_index[0] != edge_index[1]]
        loops = torch.arange(x.shape[0])
        edges = torch.cat([edges, torch.stack([loops, loops])], 1)
        return torch.zeros(x.shape[0], 8).index_add(0, edges[1], self.layer(x)[edges[0]])


@pytest.mark.parametrize(
    ("build", "inputs"),
    [
        (Named, [Input("x", (4, WIDE))]),
        (Detector, DETECTED),
        (Detector, {"images": [torch.randn(3, 20, 16)], "targets": [{"boxes": torch.randn(3, 4)}]}),
        (lambda: ByScale(WIDE, 8), {"images": {1: torch.randn(4, WIDE), 2: torch.randn(8, WIDE)}}),
        (lambda: Bag(False), BAG),
        (lambda: Bag(True), BAG),
        (lambda: nn.Embedding(1000, WIDE, sparse=True), [Input("input", (40,), "int64")]),
        (WithoutLoops, [Input("x", (10, WIDE)), Input("edge_index", (2, 30), "int64")]),
    ],
)
def test_inputs_and_outputs_of_all_kinds(build: Any, inputs: Any) -> None:
    same_as_real(build, inputs)


def test_the_line_that_reads_is_named() -> None:
    class Reads(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(4, 4)

        def forward(self, x: Tensor) -> Tensor:
            return self.layer(x) if x.sum() > 0 else self.layer(-x)

    with pytest.raises(UserError, match=r"test_trace_values\.py:\d+.*from shapes or plain Python numbers, or.*--real"):
        trace(Reads, [Input("x", (8, 4))], real=False)


def test_strides_are_no_sizes() -> None:
    """Of nine dimensions they multiply to 2^72 elements, the tensor has 2^18 (Longformer, LED)."""

    class Strided(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            made = x.new_empty_strided((4,) * 9, [4**n for n in range(8, -1, -1)])
            return super().forward(x) + made.numel()

    assert trace(lambda: Strided(4, 4), [Input("x", (8, 4))], real=True).parameters == 20
