"""Adapters on ranks: those of one process within fp32's rounding, PEFT's files, and a killed run that goes on."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch.torch_version import TorchVersion

from ironlaw.config import build_config, load_config
from ironlaw.errors import UserError
from ironlaw.ledger import Ledger
from ironlaw.machine.profile import Profile
from ironlaw.model.config import ModelConfig
from ironlaw.model.huggingface.weights import write_model
from ironlaw.model.transformer import Transformer
from ironlaw.train.parallel.ranks import check
from ironlaw.train.restore import load_run
from ironlaw.train.session import run_training

LLAMA: dict[str, Any] = {
    "name": "tiny-llama", "layers": 2, "hidden": 32, "vocab": 300, "context": 16, "heads": 4, "kv_heads": 2, "ffn": 48,
    "gated_ffn": True, "activation": "silu", "norm": "rmsnorm", "positions": "rope", "bias": False, "tied": False,
}  # fmt: skip


@pytest.mark.long
def test_adapters_on_ranks_are_those_of_one_process(
    tiny_file: Callable[..., Path], tmp_path: Path, known_links: None, machine_profile: Profile, on_ranks: Any,
    read_metrics: Any,
) -> None:  # fmt: skip
    peft, transformers = pytest.importorskip("peft"), pytest.importorskip("transformers")
    tokens = torch.arange(32).view(2, 16)
    models = {"llama": LLAMA, "mixtral": LLAMA | {"moe": {"experts": 4, "experts_per_token": 2}}}
    for base, table in models.items():
        config = ModelConfig(**table)
        torch.manual_seed(0)
        write_model(tmp_path / base, config, Transformer(config).state_dict())
    cases, names = [], []
    layouts: list[tuple[str, str, dict[str, int]]] = [
        ("llama", "lora", {"dp": 2}), ("llama", "qlora", {"dp": 2, "zero": 2}), ("llama", "dora", {"dp": 2, "zero": 3}),
        ("llama", "lora", {"cp": 2}), ("llama", "lora", {"tp": 2}), ("llama", "dora", {"tp": 2}),
        ("llama", "lora", {"pp": 2}), ("mixtral", "lora", {"dp": 2, "zero": 3}),
        ("mixtral", "qlora", {"dp": 2, "zero": 3}), ("mixtral", "lora", {"cp": 2}), ("mixtral", "qlora", {"pp": 2}),
    ]  # fmt: skip
    for base, method, layout in layouts:
        sections: dict[str, Any] = {
            "finetune": {"method": method, "rank": 4}, "checkpoint": {"every": 4}, "evaluation": {"every": 0},
            "optimizer": {"adapter_lr_scale": 1},
            "train": {"start_from": str(tmp_path / base), "steps": 8, "micro_batch": 4},
        }  # fmt: skip
        name = "-".join((base, method, *layout))
        file = tiny_file(models[base], **sections).rename(tmp_path / f"{name}.toml")
        run_training(load_config(file), tmp_path / f"{name}-one", machine_profile)
        names.append(name)
        settings = {f"layout.{key}": value for key, value in layout.items()}
        case = {"task": "run", "config": str(file), "out": str(tmp_path / name), "set": settings}
        # A signal ends it after the fourth step, and it goes on.
        cases += [case | {"fault": "signal", "rank": 1, "batches": [3]}, case | {"resume": True}]
    steps = []
    for found in on_ranks(2, cases):
        assert "stopped" not in found[0], found[0]["stopped"]
        steps.append(found[0]["step"])
    assert steps == [4, 8] * len(names)
    for name in names:
        ours, one = (read_metrics(tmp_path / run) for run in (name, f"{name}-one"))
        assert [e["loss"] for e in ours] == pytest.approx([e["loss"] for e in one], rel=1e-5)
        sent = [
            {
                line.key: line.bytes_moved
                for line in Ledger.load(tmp_path / name / f).lines
                if line.phase == "communication"
            }
            for f in ("plan.json", "ledger.json")
        ]
        # Gradients of adapters only; stages also tell each other once what they will send.
        assert sent[0] == pytest.approx(sent[1], rel=1e-3) and sent[0]
        files = [load_file(tmp_path / run / "adapter" / "adapter_model.safetensors") for run in (name, f"{name}-one")]
        assert files[0].keys() == files[1].keys()
        for key, tensor in files[1].items():
            torch.testing.assert_close(files[0][key], tensor, rtol=1e-4, atol=1e-6)
        if "qlora" not in name:  # whose base is rounded
            theirs = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / name.partition("-")[0])
            theirs = peft.PeftModel.from_pretrained(theirs, tmp_path / name / "adapter").eval()
            with torch.no_grad():
                ours = load_run(tmp_path / name).model(tokens)
                torch.testing.assert_close(theirs(tokens).logits, ours, rtol=0, atol=1e-5)


WIDE = {"hidden": 128, "context": 64, "layers": 3}
MODELS = {
    "llama": LLAMA | WIDE | {"ffn": 256}, "gpt": {"heads": 4, "vocab": 300, **WIDE, "layers": 4},
    "mixtral": LLAMA | WIDE | {"moe": {"experts": 4, "experts_per_token": 2}},
}  # fmt: skip
CASES: list[tuple[str, str, dict[str, Any], dict[str, Any]]] = [
    ("llama", "qlora", {"dp": 2, "zero": 3 if torch.__version__ >= "2.12" else 2}, {}),
    ("gpt", "lora", {"tp": 2, "sp": True}, {}),
    ("gpt", "lora", {"pp": 2}, {}), ("llama", "dora", {"tp": 2}, {}), ("llama", "lora", {"dp": 2, "zero": 1}, {}),
    ("gpt", "qlora", {"dp": 2, "zero": 2}, {}), ("llama", "qlora", {"tp": 2}, {"recompute": {"mode": "full"}}),
    ("gpt", "dora", {"dp": 2, "zero": 3}, {}), ("llama", "lora", {"cp": 2, "zero": 3}, {}),
    ("gpt", "lora", {"dp": 2, "zero": 3}, {"finetune": {"modules_to_save": ("wte",)}}),
    ("llama", "qlora", {"dp": 2}, {"finetune": {"modules_to_save": ("lm_head", "embed_tokens")}}),
    ("gpt", "lora", {"pp": 2, "virtual_stages": 2}, {}), ("gpt", "lora", {"tp": 2}, {"train": {"loss": "chunked"}}),
    ("mixtral", "qlora", {"dp": 2, "zero": 3 if torch.__version__ >= "2.12" else 2}, {}),
    ("mixtral", "lora", {"pp": 2}, {}), ("mixtral", "lora", {"cp": 2, "zero": 3}, {}),
]  # fmt: skip
ON_FOUR: list[tuple[str, str, dict[str, Any], dict[str, Any]]] = [
    ("llama", "qlora", {"tp": 2, "pp": 2}, {}), ("gpt", "dora", {"dp": 2, "tp": 2, "zero": 1}, {}),
    ("llama", "lora", {"dp": 2, "tp": 2, "zero": 3}, {}), ("gpt", "lora", {"dp": 2, "pp": 2, "zero": 1}, {}),
]  # fmt: skip


def test_codes_that_pytorch_does_not_divide_are_refused(tiny_config: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    config = tiny_config(layout={"dp": 2, "zero": 3}, finetune={"method": "qlora"}, train={"start_from": "model"})
    monkeypatch.setattr(torch, "__version__", TorchVersion("2.11.0+cu130"))
    with pytest.raises(UserError, match=r"PyTorch 2.11.0\+cu130 divides no codes of 8 bits: use .* layout.zero = 2"):
        check(config, 2)


@pytest.mark.parametrize(("ranks", "cases"), [
    pytest.param(2, CASES[:2], id="quick"), pytest.param(2, CASES[2:], id="two", marks=pytest.mark.long),
    pytest.param(4, ON_FOUR, id="four", marks=pytest.mark.long),
])  # fmt: skip
def test_every_layout_trains_what_one_process_does_as_planned(
    ranks: int, cases: list[Any], tmp_path: Path, on_ranks: Any
) -> None:
    """Losses and adapters; a checkpoint from one process and back; bytes sent, exactly; bytes held, within 5%."""
    for name, model in MODELS.items():
        torch.manual_seed(0)
        config = ModelConfig(**{"name": name} | model)
        write_model(tmp_path / name, config, Transformer(config).state_dict())
    asked = []
    for name, method, layout, tables in cases:
        train = {"start_from": str(tmp_path / name), "micro_batch": 2, "global_batch": 16} | tables.get("train", {})
        finetune = {"method": method, "rank": 4} | tables.get("finetune", {})
        tables = {key: value for key, value in tables.items() if key != "train"} | {"finetune": finetune}
        case = {"family": name, "model": MODELS[name], "layout": layout, "train": train, "tables": tables}
        case["optimizer"] = {"lr": 3e-4}  # of adapters ten times that
        asked += [case | {"task": task} for task in ("adapters", "traffic", "memory")]
    found = iter(on_ranks(ranks, asked, timeout_seconds=900))
    for case in cases:
        trained, sent, held = next(found), next(found), next(found)
        assert trained[0]["apart"] < 2e-5 and trained[0]["adapters"] < 1e-4, (case, trained)
        assert trained[0]["state"] < 1e-6 and trained[0]["learned"] > 0.01, (case, trained)
        for rank in range(ranks):
            assert sent[rank]["found"] == sent[rank]["planned"], (case, sent[rank])
            assert held[rank]["planned"] == pytest.approx(held[rank]["found"], rel=0.05), (case, held[rank])


@pytest.mark.parametrize(("layout", "finetune", "message"), [
    ({"dp": 2}, {"dropout": 0.1}, "use finetune.dropout = 0"),
])  # fmt: skip
def test_what_does_not_go_with_ranks_says_why(layout: Any, finetune: Any, message: str) -> None:
    with pytest.raises(UserError, match=message):
        build_config({"model": LLAMA, "layout": layout, "finetune": {"method": "lora"} | finetune})
