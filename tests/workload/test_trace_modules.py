"""Traces of modules that are not ours: convolutions, encoder-decoder, recurrent, recomputed; against real autograd."""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.attention.flex_attention import flex_attention
from torch.utils.checkpoint import checkpoint
from torch.utils.flop_counter import FlopCounterMode

from ironlaw.errors import UserError
from ironlaw.ledger import Kind, Phase
from ironlaw.plan.memory import peak_memory
from ironlaw.workload.module_source import Input, install_advice
from ironlaw.workload.operations import saved_bytes, total_flops
from ironlaw.workload.program import step_of_trace
from ironlaw.workload.trace import trace
from ironlaw.workload.trace_kernels import LstmLayer


class Convolutional(nn.Module):
    """Every kind of layer an image network has: plain, strided, depthwise and transposed convolutions."""

    def __init__(self, groups: int = 1) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            nn.Conv2d(3, 16, 3, padding=1), nn.BatchNorm2d(16), nn.ReLU(), nn.MaxPool2d(2),
            nn.Conv2d(16, 32, 3, stride=2, padding=1, groups=groups, bias=False), nn.GroupNorm(4, 32), nn.GELU(),
            nn.ConvTranspose2d(32, 16, 2, stride=2), nn.SiLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten(),
        )  # fmt: skip
        self.head = nn.Linear(16, 10)

    def forward(self, image: Tensor, label: Tensor) -> Tensor:
        return F.cross_entropy(self.head(self.layers(image)), label)


class Translator(nn.Module):
    """torch's own encoder-decoder."""

    def __init__(self, dropout: float = 0.0) -> None:
        super().__init__()
        self.source, self.target = nn.Embedding(100, 64), nn.Embedding(100, 64)
        self.transformer = nn.Transformer(64, 4, 2, 2, 128, dropout=dropout, batch_first=True)
        self.head = nn.Linear(64, 100)

    def forward(self, source: Tensor, target: Tensor) -> Tensor:
        mask = nn.Transformer.generate_square_subsequent_mask(target.shape[1])
        mixed = self.transformer(self.source(source), self.target(target), tgt_mask=mask, tgt_is_causal=True)
        return self.head(mixed)


class NormalisedSequence(nn.Module):
    """Batch norm of channels that come last, as in PatchTST: its result is in PyTorch's order, its input is not."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.norm, self.outer = nn.Linear(16, 16), nn.BatchNorm1d(16), nn.Linear(16, 16)

    def forward(self, x: Tensor) -> Tensor:
        normed = self.norm(self.inner(x).transpose(1, 2)).transpose(1, 2)
        return self.outer(normed) * normed


class Keeping(nn.Module):
    """Keeps tensors for itself, which are not autograd's, and normalises narrow numbers with wide weights."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.outer = nn.Linear(16, 16), nn.Linear(16, 16)
        self.norms = nn.Sequential(nn.LayerNorm(16), nn.GroupNorm(2, 16), nn.BatchNorm1d(16))
        self.last: tuple[Tensor, ...] = ()

    def forward(self, x: Tensor) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            y = self.inner(x)
            scaled = torch.vmap(lambda row: row * self.outer.weight[0])(y)
            self.last = y * 2, x.exp(), scaled
            places = torch.zeros(8, 16).long()
            places.add_(y > 0)  # values that are no longer known
            return self.outer(self.norms(y + scaled).gather(1, places))


IMAGES = [Input("image", (4, 3, 32, 32)), Input("label", (4,), "int64")]
PHRASES = [Input("source", (2, 16), "int64"), Input("target", (2, 24), "int64")]


def next_token_loss(logits: Tensor) -> Tensor:
    return F.cross_entropy(logits.flatten(0, 1), torch.zeros(logits.shape[:2], dtype=torch.int64).flatten())


def real_inputs(inputs: list[Input]) -> list[Tensor]:
    return [torch.randn(i.shape) if i.dtype == "float32" else torch.randint(0, 10, i.shape) for i in inputs]


def autograd_bytes(module: nn.Module, inputs: list[Input], loss: Callable[[Any], Tensor] | None) -> int:
    """Unique storages that a real forward pass leaves with autograd, without parameters, buffers and inputs."""
    given = real_inputs(inputs)
    known = {t.untyped_storage().data_ptr() for t in [*module.parameters(), *module.buffers(), *given]}
    kept: dict[int, Tensor] = {}

    def pack(tensor: Tensor) -> Tensor:
        if tensor.untyped_storage().data_ptr() not in known:
            kept[tensor.untyped_storage().data_ptr()] = tensor
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
        output = module(*given)
        _ = loss(output) if loss else output
    return sum(tensor.untyped_storage().nbytes() for tensor in kept.values())


@pytest.mark.parametrize(
    ("build", "inputs", "loss"),
    [
        (Convolutional, IMAGES, None),
        (lambda: Convolutional(groups=4), IMAGES, None),
        (Translator, PHRASES, next_token_loss),
        (lambda: Translator(dropout=0.1), PHRASES, next_token_loss),
        (NormalisedSequence, [Input("x", (2, 24, 16))], None),
        (Keeping, [Input("x", (8, 16))], None),
        (lambda: nn.EmbeddingBag(50, 8), [Input("ids", (4, 5), "int64")], None),
        (lambda: Returning(lambda y: torch.view_as_complex(y.exp().view(8, 2, 2)) * 2), [Input("x", (8, 4))], None),
        (lambda: Returning(lambda y: F.fold(y.view(1, 8, 4), 3, 2).cos()), [Input("x", (8, 4))], None),
    ],
)
def test_saved_bytes_are_those_of_autograd(build: Any, inputs: list[Input], loss: Any) -> None:
    traced = trace(build, inputs, loss=loss)
    assert saved_bytes(traced.operations) == autograd_bytes(build(), inputs, loss)
    assert sum(op.gradient_bytes for op in traced.operations) == traced.trained_bytes


def test_convolution_flops_are_torchs() -> None:
    image, label = real_inputs(IMAGES)
    with FlopCounterMode(display=False) as counter:
        Convolutional()(image, label).backward()
    assert total_flops(trace(Convolutional, IMAGES).operations) == counter.get_total_flops()


def test_grouped_convolution_costs_its_share() -> None:
    """torch's counter charges a grouped weight gradient for all pairs of channels; there are 1 / groups of them."""

    def products(groups: int) -> list[int | None]:
        operations = trace(lambda: Convolutional(groups), IMAGES).operations
        return [op.flops for op in operations if op.name == "layers.4" and op.kind is Kind.MATMUL]

    assert products(4) == [flops // 4 for flops in products(1) if flops]


def test_convolution_is_an_implicit_product() -> None:
    first = next(op for op in trace(Convolutional, IMAGES).operations if op.name == "layers.0")
    assert first.matmul == (4 * 32 * 32, 16, 3 * 3 * 3)
    assert first.flops == 2 * 4 * 32 * 32 * 16 * 27


def test_encoder_decoder_flops_count_half_of_the_causal_scores() -> None:
    source, target = real_inputs(PHRASES)
    module = Translator()
    with sdpa_kernel(SDPBackend.MATH), FlopCounterMode(display=False) as counter:
        next_token_loss(module(source, target)).backward()
    causal_scores = 2 * 24 * 24 * 64 * 2  # layers x queries x keys x width x sequences
    hidden = 6 * 2 * causal_scores // 2  # two products forward, four backward, 2 FLOPs each, half of them masked
    expected = counter.get_total_flops() - hidden
    assert total_flops(trace(Translator, PHRASES, loss=next_token_loss).operations) == expected
    # With dropout attention is composed of batched products; the mask still hides half of them.
    dropped = trace(lambda: Translator(dropout=0.1), PHRASES, loss=next_token_loss).operations
    assert total_flops(dropped) == expected


def test_without_a_loss_gradients_start_at_every_output() -> None:
    operations = trace(Translator, PHRASES).operations
    assert not [op for op in operations if op.kind is Kind.LOSS]
    assert [op for op in operations if op.name == "head" and op.phase is Phase.BACKWARD and op.matmul]


def test_recurrent_layers_show_their_products() -> None:
    operations = trace(lambda: nn.LSTM(32, 64, batch_first=True), [Input("input", (8, 20, 32))]).operations
    weights = 4 * 64 * (32 + 64)
    # Forward once; backward for weights and states. The first step needs no gradient of inputs, nor of its state.
    assert total_flops(operations) >= 2 * 2 * 8 * 20 * weights
    assert total_flops(operations) <= 3 * 2 * 8 * 20 * weights


class Recomputed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(64, 256), nn.Linear(256, 64)

    def ffn(self, x: Tensor) -> Tensor:
        return self.down(F.gelu(self.up(x)))

    def forward(self, x: Tensor) -> Tensor:
        return checkpoint(self.ffn, x, use_reentrant=False).sum()


def test_recomputation_is_seen() -> None:
    operations = trace(Recomputed, [Input("x", (8, 64))]).operations
    assert saved_bytes(operations) == 0
    again = [op for op in operations if op.name == "up" and op.phase is Phase.BACKWARD and op.kernel == "matmul_bias"]
    assert [op.matmul for op in again] == [(8, 256, 64)]


def test_a_real_module_is_left_as_it_was() -> None:
    module = Convolutional().eval()
    before = {name: tensor.clone() for name, tensor in module.state_dict().items()}
    traced = trace(module, IMAGES)
    assert traced.operations == trace(Convolutional, IMAGES).operations
    assert not module.training
    assert all(p.grad is None for p in module.parameters())
    assert all(torch.equal(tensor, before[name]) for name, tensor in module.state_dict().items())
    assert not [hooks for m in module.modules() for hooks in (m._forward_hooks, m._forward_pre_hooks) if hooks]
    assert torch.backends.mkldnn.enabled == torch.backends.mkldnn.is_available()


def test_meta_modules_are_traced() -> None:
    with torch.device("meta"):
        module = Convolutional()
    assert trace(module, IMAGES).operations == trace(Convolutional, IMAGES).operations


def test_lazy_layers_get_their_sizes_from_a_forward_pass() -> None:
    def lazy() -> nn.Module:
        return nn.Sequential(nn.LazyConv2d(4, 3), nn.LazyBatchNorm2d(), nn.Flatten(), nn.LazyLinear(2))

    sized = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.Flatten(), nn.Linear(4 * 6 * 6, 2))
    inputs = [Input("input", (2, 3, 8, 8))]
    assert trace(lazy, inputs).operations == trace(lazy(), inputs).operations == trace(sized, inputs).operations


class Returning(nn.Module):
    """What a function makes of a linear layer's output."""

    def __init__(self, made: Callable[[Tensor], Any]) -> None:
        super().__init__()
        self.layer, self.made = nn.Linear(4, 4), made

    def forward(self, x: Tensor) -> Any:
        return self.made(self.layer(x))


@dataclass(frozen=True, slots=True)
class Output:
    logits: Tensor
    loss: Tensor | None = None


class HandingOn(nn.Module):
    """As PEFT, DataParallel and torch.compile wrap a module."""

    def __init__(self) -> None:
        super().__init__()
        self.base_model = nn.Linear(4, 4)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.base_model(*args, **kwargs)


def exported() -> nn.Module:
    return torch.export.export(nn.Linear(4, 4), (torch.randn(8, 4),)).module()


@pytest.mark.parametrize(
    "build", [lambda: Returning(Output), lambda: Returning(lambda y: iter([y])), HandingOn, exported], ids=range(4)
)
def test_outputs_with_slots_iterators_and_wrappers_are_seen_through(build: Any) -> None:
    found = trace(build(), [Input("x", (8, 4))])
    assert total_flops(found.operations) == 2 * 2 * 8 * 4 * 4 and found.parameters == 20


class Skips(nn.Module):
    """One layer of two runs, as if the other was dropped at random; nothing needs the pooler."""

    def __init__(self) -> None:
        super().__init__()
        self.layers, self.pooler = nn.ModuleList(nn.Linear(4, 4) for _ in range(2)), nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        layer: nn.Module = self.layers[1]
        return layer(x), self.pooler(x).detach()  # type: ignore[return-value]


def test_what_never_gets_a_gradient_has_no_state() -> None:
    found = trace(Skips, [Input("x", (8, 4))])
    assert (found.parameters, found.trained_parameters, found.trained_tensors) == (60, 40, 4)


def flexible(y: Tensor) -> Tensor:
    heads = y[None, None].expand(1, 1, 8, 4)
    return flex_attention(heads, heads, heads)  # type: ignore[return-value]


def branching(y: Tensor) -> Tensor:
    branched: Tensor = torch.cond(y.shape[0] > 0 and torch.ones(()) > 0, torch.sin, torch.cos, (y,))
    return branched


@pytest.mark.parametrize(
    ("build", "inputs", "says"),
    [
        (lambda: nn.Linear(4, 4), [Input("input", (8, 5))], "check the names, shapes, dtypes and values"),
        (lambda: "no module", [Input("x", (8, 4))], "return a torch.nn.Module"),
        (Convolutional, [IMAGES[0], Input("lable", (4,), "int64")], "did you mean label"),
        (lambda: nn.Linear(4, 4).requires_grad_(False), [Input("input", (8, 4))], "unfreeze"),
        (lambda: nn.Linear(4, 4), [Input("a", (8, 4)), Input("a", (8, 4))], "same name"),
        (lambda: [][1], [Input("x", (8, 4))], "its construction"),
        (lambda: sys.exit(7), [Input("x", (8, 4))], "its construction.*SystemExit"),
        (lambda: nn.ModuleList([nn.LazyLinear(4)]), [Input("x", (8, 4))], "its forward pass: NotImplementedError"),
        (lambda: torch.jit.script(nn.Linear(4, 4)), [Input("input", (8, 4))], "return the module it was made of"),
        (lambda: nn.Sequential(torch.jit.script(nn.ReLU())), [Input("input", (8, 4))], "^0 of .* is TorchScript"),
        (lambda: Returning(flexible), [Input("x", (8, 4))], "put scaled_dot_product_attention in its place"),
        (lambda: Returning(branching), [Input("x", (8, 4))], "torch's operator cond .* put an if"),
        (lambda: Returning(lambda y: None), [Input("x", (8, 4))], "returned a NoneType without tensors"),
    ],
)
def test_what_cannot_be_traced_says_what_to_do(build: Any, inputs: list[Input], says: str) -> None:
    with pytest.raises(UserError, match=says) as raised:
        trace(build, inputs)
    assert "\n" not in str(raised.value)


@pytest.mark.long
def test_an_encoder_decoder_of_hugging_face() -> None:
    """T5: torch's counter finds the same products, but for fused cross attention, of which it counts none on a CPU."""
    transformers = pytest.importorskip("transformers")
    batch, source, target, width, layers = 2, 24, 12, 64, 2

    class Model(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.t5 = transformers.T5ForConditionalGeneration(
                transformers.T5Config(
                    vocab_size=128, d_model=64, d_kv=16, d_ff=128, num_layers=layers, num_heads=4, dropout_rate=0.0,
                    use_cache=False, decoder_start_token_id=0, pad_token_id=0,
                )
            )  # fmt: skip

        def forward(self, source: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
            return self.t5(input_ids=source, decoder_input_ids=target).logits

    inputs = [Input("source", (batch, source), "int64"), Input("target", (batch, target), "int64")]
    found = trace(Model, inputs)
    module = Model()
    zeros = [torch.zeros(size, dtype=torch.long) for size in ((batch, source), (batch, target))]
    with FlopCounterMode(display=False) as counter:
        module(*zeros).sum().backward()
    cross = 3 * layers * 2 * 2 * batch * source * target * width
    assert total_flops(found.operations) in (counter.get_total_flops(), counter.get_total_flops() + cross)
    assert found.parameters == sum(p.numel() for p in module.parameters())


def test_what_is_missing_is_named() -> None:
    def build() -> nn.Module:
        try:
            import sklearn_of_nobody  # noqa: F401
        except ImportError as error:
            raise RuntimeError("the module cannot be built because:\nits metric:\nis missing\n") from error
        raise AssertionError

    with pytest.raises(UserError, match=r"because: its metric: is missing: pip install sklearn-of-nobody$"):
        trace(build, [Input("x", (2, 4))])
    named = ModuleNotFoundError("No module named 'sklearn.base'", name="sklearn.base")
    assert install_advice(named) == "pip install scikit-learn"
    assert install_advice(named, own="sklearn.models") == ""
    assert install_advice(ImportError("'radius_graph' requires 'pyg-lib>=0.6.0'")).endswith("that this names")


class Keeps(nn.Module):
    """What a module keeps beside parameters and buffers is there before the step, and is not saved by it."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.constant = nn.Linear(64, 64), torch.randn(64, 64)

    def forward(self, x: Tensor) -> Tensor:
        written = torch.zeros(64, 64)
        written[:, :32] = self.inner(x)[:, :32]  # nothing needs its values: freed
        return (self.inner(x) * self.constant.detach()).sum() + written.sum()


def test_constants_and_what_is_written_into_are_not_saved() -> None:
    assert saved_bytes(trace(Keeps, [Input("x", (64, 64))]).operations) == 0


class Promotes(nn.Module):
    """A CPU makes operands of two types alike before it computes, and a mask's numbers wide before it adds them."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(64, 64)

    def forward(self, x: Tensor) -> Tensor:
        y = self.inner(x)
        return y * (y > 0).bfloat16() / (y > 0).sum(-1, keepdim=True)


class Patches(nn.Sequential):
    """Patches of images, normalised with their numbers apart: oneDNN's products of columns where they are wide."""

    def __init__(self, size: int) -> None:
        super().__init__(nn.Conv2d(3, 64, size, size), nn.LayerNorm(64))

    def forward(self, x: Tensor) -> Tensor:
        return self[1](self[0](x).flatten(2).transpose(1, 2)).mean(1)


class LastChannels(nn.Conv2d):
    """A wide depthwise product of images whose channels lie together: oneDNN pads its weights to blocks."""

    def __init__(self) -> None:
        super().__init__(32, 32, 7, padding=3, groups=32)

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x.to(memory_format=torch.channels_last))


class Spectral(nn.Linear):
    """Frequencies along the tokens, or a `target` of those in two dimensions, which needs no gradient."""

    def __init__(self, target: bool) -> None:
        super().__init__(64, 64)
        self.target = target

    def forward(self, x: Tensor) -> Tensor:
        y = super().forward(x)
        filtered = torch.fft.irfft2(torch.fft.rfft2(y)) if self.target else torch.fft.rfft(y, dim=1).abs()
        return y + filtered.detach() if self.target else filtered


def step_bytes(module: nn.Module, given: Tensor) -> int:
    """The highest moment of a real step, beside weights and inputs, by the profiler's allocations."""
    (module(given) ** 2).sum().backward()  # what is built once
    module.zero_grad()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as profile:
        output = module(given)
        torch.autograd.backward(output, torch.ones_like(output))
    events = sorted(profile.profiler.kineto_results.events(), key=lambda event: event.start_ns())  # type: ignore[union-attr]
    return max(accumulate(event.nbytes() for event in events if event.name() == "[memory]"))


@pytest.mark.parametrize(("build", "shape", "within"), [
    (lambda: nn.Sequential(nn.Conv2d(16, 64, 3, padding=1), nn.Conv2d(64, 24, 1)), (4, 16, 32, 32), 0.05),
    (lambda: nn.Sequential(nn.Conv3d(1, 8, 3, padding=1), nn.Conv3d(8, 4, 3)), (2, 1, 8, 16, 16), 0.1),
    (lambda: nn.Conv2d(3, 64, 7, stride=2), (8, 3, 64, 64), 0.1),
    (lambda: nn.Conv2d(16, 16, 3).double(), (2, 16, 32, 32), 0.05),
    (Promotes, (512, 64), 0.05),
    (lambda: Patches(16), (2, 3, 224, 224), 0.001),
    (lambda: Patches(8), (4, 3, 64, 64), 0.01),
    (lambda: nn.Conv2d(16, 32, 17, padding=8), (1, 16, 64, 64), 0.01),
    (LastChannels, (2, 32, 8, 8), 0.02),
    (lambda: nn.utils.parametrizations.orthogonal(nn.Linear(64, 64)), (16, 64), 0.001),
    (lambda: nn.Sequential(nn.Conv2d(16, 32, 1), nn.BatchNorm2d(32)), (4, 16, 32, 32), 0.001),
    (lambda: nn.Sequential(nn.BatchNorm1d(64), nn.Linear(64, 256), nn.GroupNorm(8, 256)), (128, 64), 0.001),
    (lambda: nn.Sequential(nn.Conv2d(16, 16, 1), nn.Conv2d(16, 32, 2, 2)), (2, 16, 32, 32), 0.001),
    (lambda: Spectral(target=True), (8, 32, 64), 0.001),
    (lambda: Spectral(target=False), (8, 32, 64), 0.001),
], ids=["conv2d", "conv3d", "strided", "columns", "promoted", "patches", "rows", "wide", "depthwise",
        "orthogonal", "batch norm", "group norm", "downsampling", "to real", "spectral"])  # fmt: skip
def test_what_a_cpu_s_kernels_take_for_themselves_is_planned(build: Any, shape: tuple[int, ...], within: float) -> None:
    module = build()
    dtype = next(module.parameters()).dtype
    traced = trace(build, [Input("x", shape, str(dtype).removeprefix("torch."))])
    program = step_of_trace(traced, cpu=True)
    lasting = sum(tensor.bytes for tensor in program.tensors[0])
    measured = step_bytes(module, torch.randn(shape, dtype=dtype))
    assert peak_memory(program).total - lasting == pytest.approx(measured, rel=within)
    assert peak_memory(step_of_trace(traced)).total < peak_memory(program).total  # of kernels of a CPU alone


class Tied(nn.Module):
    """One table at both ends: the first gradient of it is a view, to which autograd adds the second out of place."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(500, 16)

    def forward(self, tokens: Tensor) -> Tensor:
        return F.linear(self.table(tokens), self.table.weight)


class Chooses(nn.Module):
    """Takes weights by number: the gradient is put into zeros in place, but of fake tensors beside them."""

    def __init__(self, rows: Callable[[Tensor, Tensor], Tensor] = Tensor.__getitem__) -> None:
        super().__init__()
        self.choice, self.weights, self.rows = nn.Linear(64, 8), nn.Parameter(torch.randn(8, 64, 128)), rows

    def forward(self, x: Tensor) -> Tensor:
        share, number = self.choice(x).softmax(-1).max(-1)
        return torch.bmm(x[:, None], self.rows(self.weights, number))[:, 0] * share[:, None]


@pytest.mark.parametrize(("build", "given"), [
    (Tied, torch.zeros(2, 8).long()), (Chooses, torch.randn(16, 64)),
    (lambda: Chooses(lambda weights, number: weights.index_select(0, number)), torch.randn(16, 64)),
])  # fmt: skip
def test_gradients_are_added_and_put_as_autograd_does(build: Any, given: Tensor) -> None:
    program = step_of_trace(trace(build, [Input("x", tuple(given.shape), str(given.dtype).removeprefix("torch."))]))
    lasting = sum(tensor.bytes for tensor in program.tensors[0])
    assert peak_memory(program).total - lasting == step_bytes(build(), given)


class Teacher(nn.Module):
    """Calls composed of others, which inference mode does not take apart."""

    def __init__(self) -> None:
        super().__init__()
        self.teacher, self.student = nn.Linear(16, 32), nn.Linear(16, 32)

    @torch.inference_mode()
    def taught(self, x: Tensor) -> Tensor:
        return torch.matmul(self.teacher(x), torch.ones(32, 32))

    def forward(self, x: Tensor) -> Tensor:
        return F.mse_loss(self.student(x), self.taught(x).clone())


class Ragged(nn.Module):
    """Sequences of unequal length in a nested tensor, which calls linear on its values."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = two_layers()

    def forward(self, x: Tensor) -> Tensor:
        return self.layers(torch.nested.nested_tensor_from_jagged(x, torch.tensor([0, 3, 10]))).values()


def two_layers() -> nn.Module:
    return nn.Sequential(nn.Linear(16, 32), nn.Linear(32, 8))


@pytest.mark.parametrize(("build", "alike"), [(Teacher, Teacher), (Ragged, two_layers)])
def test_products_of_composed_calls_are_counted(build: Any, alike: Any) -> None:
    with FlopCounterMode(display=False) as counter:
        alike()(torch.randn(10, 16)).sum().backward()
    assert total_flops(trace(build, [Input("x", (10, 16))]).operations) == counter.get_total_flops() > 0


class Outputs(nn.Module):
    """The outputs of a recurrent layer, without its last state."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, x: Tensor) -> Tensor:
        outputs: Tensor = self.layer(x)[0]
        return outputs


@pytest.mark.parametrize("kind", [nn.LSTM, nn.GRU])
@pytest.mark.parametrize(("inputs", "hidden", "layers", "bidirectional"), [
    (32, 32, 1, False), (32, 128, 1, True), (128, 32, 2, False), (512, 512, 1, False), (100, 256, 2, True),
])  # fmt: skip
def test_the_peak_of_recurrent_layers_is_the_allocators(
    kind: Any, inputs: int, hidden: int, layers: int, bidirectional: bool
) -> None:
    def build() -> nn.Module:
        return Outputs(kind(inputs, hidden, layers, bidirectional=bidirectional))

    program = step_of_trace(trace(build, [Input("x", (12, 4, inputs))], cpu=True), cpu=True)
    lasting = sum(tensor.bytes for tensor in program.tensors[0])
    measured = step_bytes(build(), torch.randn(12, 4, inputs))
    assert peak_memory(program).total - lasting == pytest.approx(measured, rel=0.05)


def test_one_call_of_an_lstm_has_the_products_of_its_steps() -> None:
    both = [trace(lambda: nn.LSTM(32, 64), [Input("x", (20, 8, 32))], cpu=c).operations for c in (False, True)]
    forward = [total_flops(op for op in operations if op.phase is Phase.FORWARD) for operations in both]
    assert forward[0] == forward[1]


@pytest.mark.skipif(not torch.backends.mkldnn.is_available(), reason="oneDNN is not in this build")
@pytest.mark.parametrize(("tokens", "batch", "inputs", "hidden"), [(5, 3, 7, 9), (9, 8, 64, 64), (3, 7, 300, 130)])
def test_the_workspace_of_an_lstm_is_onednns(tokens: int, batch: int, inputs: int, hidden: int) -> None:
    x, state = torch.randn(tokens, batch, inputs), torch.zeros(batch, hidden)
    weights = [torch.randn(4 * hidden, *columns) for columns in ((inputs,), (hidden,), (), ())]
    how: Any = (False, [], 2, hidden, 1, True, False, False, True)
    *_, workspace = torch.ops.aten.mkldnn_rnn_layer(x, *weights, state, state.clone(), *how)
    assert LstmLayer.of(x, weights[0]).workspace == workspace.numel()
