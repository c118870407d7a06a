"""What a step computes on CUDA: the CPU's losses in fp32, and near them in every other precision and path."""

from __future__ import annotations

import gc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from ironlaw.catalog.formats import number_format
from ironlaw.config import RunConfig
from ironlaw.errors import UserError
from ironlaw.machine.profile import Profile
from ironlaw.train.precision import capability
from ironlaw.train.result import Outcome

pytestmark = pytest.mark.gpu
Config, Train, Losses = Callable[..., RunConfig], Callable[..., Outcome], Callable[[Path], list[float]]
LLAMA: dict[str, Any] = {
    "layers": 3, "hidden": 128, "heads": 4, "vocab": 512, "context": 128,
    "kv_heads": 2, "ffn": 256, "gated_ffn": True, "activation": "silu", "norm": "rmsnorm", "positions": "rope",
    "bias": False, "tied": False,
}  # fmt: skip


@pytest.mark.parametrize("model", [None, LLAMA], ids=["gpt", "llama"])
@pytest.mark.parametrize("optimizer", ["adamw", "sgd", "momentum", "rmsprop", "adafactor", "muon", "galore"])
def test_fp32_is_the_cpus(
    model: Any, optimizer: str, config: Config, train: Train, train_on_cpu: Train, losses: Losses, tmp_path: Path
) -> None:
    chosen = config(model, optimizer={"name": optimizer} | ({"rank": 8} if optimizer == "galore" else {}))
    train(chosen, tmp_path / "here")
    train_on_cpu(chosen, tmp_path / "cpu")
    assert losses(tmp_path / "here") == pytest.approx(losses(tmp_path / "cpu"), rel=2e-3)


@pytest.mark.parametrize("precision", ["tf32", "bf16", "fp16", "fp8", "fp8_block", "mxfp8", "nvfp4"])
def test_other_precisions_are_near(
    precision: str, config: Config, train: Train, losses: Losses, tmp_path: Path, device: torch.device
) -> None:
    hardware = number_format(precision).is_native(capability(device))
    if precision == "tf32" and not hardware:
        with pytest.raises(UserError, match="newer NVIDIA GPU"):
            train(config(train={"precision": precision}), tmp_path / "here")
        return
    by_library = hardware and number_format(precision).narrow
    if by_library:
        pytest.importorskip("torchao")
    compile_ = "on" if by_library else "off"
    train(config(LLAMA), tmp_path / "fp32")
    train(config(LLAMA, train={"precision": precision, "compile": compile_}), tmp_path / "here")
    assert losses(tmp_path / "here") == pytest.approx(
        losses(tmp_path / "fp32"), rel=2e-3 if precision == "tf32" else 0.06
    )


@pytest.mark.parametrize("compile_", ["on", "graphs"])
def test_compiled_blocks(
    compile_: str, config: Config, train: Train, losses: Losses, ledger: Any, tmp_path: Path
) -> None:
    train(config(), tmp_path / "plain")
    train(config(train={"compile": compile_}), tmp_path / "compiled")
    assert ledger(tmp_path / "compiled").facts["compile"] is True
    assert losses(tmp_path / "compiled") == pytest.approx(losses(tmp_path / "plain"), rel=2e-3)


@pytest.mark.parametrize(
    ("model", "data", "kernel"),
    [
        ({}, {}, ("SDPA: flash", "SDPA: cuDNN")),
        ({"sliding_window": 24}, {}, ("FlexAttention",)),
        ({}, {"packing": "best_fit"}, ("FlexAttention",)),
        ({"dropout": 0.1}, {}, ("SDPA: flash", "SDPA: cuDNN", "SDPA: memory-efficient")),
    ],
    ids=["plain", "window", "documents", "dropout"],
)
def test_attention_kernels(
    model: dict[str, Any], data: dict[str, Any], kernel: tuple[str, ...], config: Config, train: Train,
    train_on_cpu: Train, losses: Losses, ledger: Any, tmp_path: Path,
) -> None:  # fmt: skip
    """In bf16, which fused kernels want; the kernel that is reported, and near the CPU's losses (but for the noise)."""
    chosen = config(LLAMA | model, data=data, train={"precision": "bf16"})
    train(chosen, tmp_path / "here")
    assert ledger(tmp_path / "here").facts["attention"] in kernel
    if "dropout" not in model:
        train_on_cpu(chosen, tmp_path / "cpu")
        assert losses(tmp_path / "here") == pytest.approx(losses(tmp_path / "cpu"), rel=0.03)


def test_flex_attention_is_the_dense_mask(device: torch.device) -> None:
    from ironlaw.model.masks import additive, block_mask, dense_mask, flexible

    torch.manual_seed(0)
    documents = (torch.arange(256, device=device) // 100).expand(2, -1).contiguous()
    query, key, value = (torch.randn(2, 4, 256, 64, device=device) for _ in range(3))
    found = flexible(query, key, value, block_mask(256, device, 50, documents))
    mask = additive(dense_mask(256, device, 50, documents))
    wanted = torch.nn.functional.scaled_dot_product_attention(query, key, value, attn_mask=mask)
    torch.testing.assert_close(found, wanted, rtol=1e-2, atol=1e-2)  # FlexAttention may multiply in tf32


@pytest.mark.parametrize("offload", ["activations", "optimizer", "both"])
def test_offloading_changes_no_loss(
    offload: str, config: Config, train: Train, losses: Losses, ledger: Any, tmp_path: Path, profile: Profile,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    """Tensors of a megabyte and more, so that copies take their time; peak memory falls."""
    from ironlaw.plan.cluster.system import Host

    monkeypatch.setattr("ironlaw.plan.step.host_of_machine", lambda profile: Host(2e10, 2.0**36, 1e11))
    model = {"layers": 8, "hidden": 512, "heads": 8, "vocab": 512, "context": 256}
    sections: dict[str, Any] = {"train": {"global_batch": 16, "micro_batch": 8}, "data": {"mock": True}}
    train(config(model, **sections), tmp_path / "plain")
    sections["train"]["offload"] = offload
    gc.collect()
    torch.cuda.reset_peak_memory_stats()
    train(config(model, **sections), tmp_path / "offloaded")
    assert losses(tmp_path / "offloaded") == pytest.approx(losses(tmp_path / "plain"), rel=1e-4)
    peaks = [ledger(tmp_path / name).totals["peak_bytes"].value for name in ("plain", "offloaded")]
    assert peaks[1] < 0.95 * peaks[0]


def test_experts_in_one_product_are_the_loop(device: torch.device) -> None:
    from ironlaw.model import grouped

    torch.manual_seed(0)
    rows = torch.randn(96, 64, device=device, dtype=torch.bfloat16, requires_grad=True)
    weight = torch.randn(4, 32, 64, device=device, dtype=torch.bfloat16, requires_grad=True)
    counts = torch.tensor([16, 0, 48, 32], device=device)
    if not grouped._has_grouped_kernel(rows, weight):
        pytest.skip("torch has no grouped product for this device")
    ends = grouped.group_ends(counts, rows, weight)
    assert isinstance(ends, torch.Tensor)
    found = []
    for way in (ends, counts.cumsum(0).tolist()):
        rows.grad = weight.grad = None
        out = grouped.GroupedProduct.apply(rows, weight, way)
        out.square().sum().backward()
        found.append((out.detach(), rows.grad, weight.grad))
    for one, other in zip(*found, strict=True):
        torch.testing.assert_close(one, other, rtol=2e-2, atol=2e-1)


@pytest.mark.parametrize("sections", [{}, {"train": {"precision": "bf16"}}, {"recompute": {"mode": "full"}}])
def test_peak_memory_is_the_plans(
    sections: dict[str, Any], config: Config, train: Train, ledger: Any, tmp_path: Path
) -> None:
    """Without the kernels' workspaces: a model whose tensors are large beside them."""
    from ironlaw.ledger import Ledger

    model = {"layers": 6, "hidden": 512, "heads": 8, "vocab": 8192, "context": 512}
    sections = {name: dict(table) for name, table in sections.items()}
    sections["train"] = {"global_batch": 16, "steps": 4} | sections.get("train", {})
    train(config(model, data={"mock": True}, **sections), tmp_path / "run")
    planned = Ledger.load(tmp_path / "run" / "plan.json").totals["peak_bytes"].value
    assert ledger(tmp_path / "run").totals["peak_bytes"].value == pytest.approx(planned, rel=0.05)
