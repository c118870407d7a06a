"""Adapters: PEFT computes the same from the same files, runs resume to the bit, and nothing but adapters is trained."""

from __future__ import annotations

import json
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from ironlaw.config import RunConfig, build_config, load_config
from ironlaw.errors import UserError
from ironlaw.ledger import Ledger
from ironlaw.model.adapters import adapted_layers
from ironlaw.model.config import ModelConfig
from ironlaw.model.huggingface.configs import names_of
from ironlaw.model.huggingface.weights import write_model
from ironlaw.model.transformer import Transformer
from ironlaw.numerics import quantize
from ironlaw.train.compression import _loss, text_of
from ironlaw.train.finetune import add_adapters, check_adapter, merge, write_adapter
from ironlaw.train.parallel.materialize import build_on_meta, materialize
from ironlaw.train.parallel.step import read_first_weights
from ironlaw.train.parallel.store import ShardedFiles
from ironlaw.train.restore import load_first_weights, load_run
from ironlaw.train.result import Outcome
from ironlaw.workload.finetune import FinetuneConfig, adapter_parameters

Config = Callable[..., RunConfig]
Train = Callable[..., Outcome]
Losses = Callable[[Path], dict[int, float]]

GPT: dict[str, Any] = {"name": "tiny-gpt", "layers": 2, "hidden": 32, "heads": 2, "vocab": 300, "context": 16}
LLAMA: dict[str, Any] = GPT | {
    "name": "tiny-llama", "heads": 4, "kv_heads": 2, "ffn": 48, "gated_ffn": True, "activation": "silu",
    "norm": "rmsnorm", "positions": "rope", "bias": False, "tied": False,
}  # fmt: skip
MIXTRAL = LLAMA | {"name": "tiny-mixtral", "moe": {"experts": 4, "experts_per_token": 2}}
MODELS = {"llama": LLAMA, "gpt2": GPT, "mixtral": MIXTRAL}
ADAPTED = [(name, method, every) for name in ("llama", "gpt2") for method in ("lora", "dora", "qlora")
           for every in (True, False)]  # fmt: skip
LORA: dict[str, Any] = {"method": "lora", "rank": 4, "alpha": 10.0}


def tokens() -> Tensor:
    return torch.randint(0, 300, (2, 16), generator=torch.Generator().manual_seed(1))


def write_base(folder: Path, table: dict[str, Any]) -> ModelConfig:
    """A model with weights and biases that are no zeros."""
    config = ModelConfig(**table)
    torch.manual_seed(0)
    model = Transformer(config)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter), alpha=0.1)
    write_model(folder, config, model.state_dict())
    return config


def adapted(folder: Path, config: ModelConfig, finetune: FinetuneConfig, drawn: bool = True) -> Transformer:
    model = Transformer(config)
    load_first_weights(str(folder), model, config)
    add_adapters(model, config, finetune, str(folder))
    with torch.no_grad():
        for parameter in model.parameters() if drawn else ():
            if parameter.requires_grad:
                parameter.add_(torch.randn_like(parameter), alpha=0.1)
    return model.eval()


@pytest.mark.parametrize(("name", "method", "every"), [*ADAPTED, ("mixtral", "lora", True), ("mixtral", "qlora", True)])
def test_peft_computes_the_same_logits(tmp_path: Path, name: str, method: str, every: bool) -> None:
    """With every matrix adapted, with some, and with the ends trained in full (GPT-2's are one)."""
    peft, transformers = pytest.importorskip("peft"), pytest.importorskip("transformers")
    config = write_base(tmp_path / "base", MODELS[name])
    some = ("attn.c_proj",) if name == "gpt2" else ("mlp.down_proj", "v_proj")
    ends: dict[str, Any] = {"modules_to_save": ("wte",) if name == "gpt2" else ("embed_tokens", "lm_head")}
    finetune = FinetuneConfig(**LORA | {"method": method} | (ends if every else {"targets": some}))
    model = adapted(tmp_path / "base", config, finetune)
    (tmp_path / "adapter").mkdir()
    names = names_of(tmp_path / "base", config)
    write_adapter(tmp_path / "adapter", dict(model.named_parameters()), config, names, finetune, str(tmp_path / "base"))

    base = tmp_path / "base"
    if method == "qlora":  # the adapters are for the rounded matrices
        rounded = adapted(base, config, finetune, drawn=False)
        merge(rounded)  # with adapters that are still zero
        base = tmp_path / "rounded"
        write_model(base, config, rounded.state_dict())
    theirs = transformers.AutoModelForCausalLM.from_pretrained(base)
    plain = theirs(tokens()).logits
    theirs = peft.PeftModel.from_pretrained(theirs, tmp_path / "adapter").eval()
    with torch.no_grad():
        ours = model(tokens())
        assert torch.allclose(theirs(tokens()).logits, ours, rtol=0, atol=1e-5)
        assert not torch.allclose(plain, ours, atol=0.1)  # the adapters do something
        again = adapted(
            tmp_path / "base", config, finetune.model_copy(update={"start_from": str(tmp_path / "adapter")}), False
        )
        assert torch.equal(again(tokens()), ours)
        merge(model)
        assert not adapted_layers(model)
        assert torch.allclose(model(tokens()), ours, rtol=0, atol=1e-5)


@pytest.fixture
def finetuning(tiny_document: Callable[..., dict[str, Any]], tmp_path: Path) -> Config:
    """The config of a run of twelve steps on top of a tiny Llama."""
    write_base(tmp_path / "base", LLAMA)

    def build(finetune: dict[str, Any], **sections: dict[str, Any]) -> RunConfig:
        sections["train"] = {"start_from": str(tmp_path / "base")} | sections.get("train", {})
        return build_config(tiny_document(LLAMA, finetune=LORA | finetune, **sections))

    return build


@pytest.mark.parametrize("method", ["lora", "dora", "qlora"])
def test_a_stopped_run_goes_on_to_the_bit(
    finetuning: Config, train: Train, train_until: Any, losses: Losses, tmp_path: Path, method: str
) -> None:
    config = finetuning({"method": method, "dropout": 0.1})
    train(config, tmp_path / "whole")
    train_until(6, config, tmp_path / "run")
    train(config, tmp_path / "run", resume=True)
    assert losses(tmp_path / "run") == losses(tmp_path / "whole")
    assert losses(tmp_path / "run")[12] < losses(tmp_path / "run")[1]
    found, whole = (load_file(tmp_path / run / "adapter" / "adapter_model.safetensors") for run in ("run", "whole"))
    assert found.keys() == whole.keys()
    assert all(torch.equal(found[name], whole[name]) for name in whole)
    longer = finetuning({"method": method, "dropout": 0.1}, train={"steps": 16})
    train_until(14, longer, tmp_path / "run", resume=True)
    assert not (tmp_path / "run" / "adapter").exists()  # it was of step 12


@pytest.mark.parametrize("method", [(), ("finetune.method=qlora",)])
def test_the_example_is_for_all_weights_and_for_adapters(finetuning: Config, tmp_path: Path, method: Any) -> None:
    example = Path(__file__).parents[2] / "examples" / "finetune.toml"
    config = load_config(example, [f"model.from={tmp_path / 'base'}", *method])
    assert config.finetune.adapts == bool(method)


def test_only_adapters_are_trained_and_kept(finetuning: Config, train: Train, tmp_path: Path) -> None:
    config = finetuning({}, train={"average_decay": 0.9})
    names = names_of(tmp_path / "base", config.model)
    trained = {p.name: p.shape for p in adapter_parameters(config.model, names, config.finetune)}
    train(config, tmp_path / "run")
    newest = sorted((tmp_path / "run" / "checkpoints").iterdir())[-1]
    held = load_file(newest / "model.safetensors")
    assert {name: tuple(tensor.shape) for name, tensor in held.items()} == trained
    state = torch.load(newest / "training.pt", weights_only=True)
    assert len(state["optimizer"]["state"]) == len(state["average"]["tensors"]) == len(trained)


@pytest.mark.parametrize("method", ["lora", "dora", "qlora"])
def test_plan_and_run_name_the_same_work(finetuning: Config, train: Train, tmp_path: Path, method: str) -> None:
    train(finetuning({"method": method}, train={"profile_steps": 2}), tmp_path / "run")
    plan, run = (
        {line.key for line in Ledger.load(tmp_path / "run" / name).lines if line.phase in ("forward", "backward")}
        for name in ("plan.json", "ledger.json")
    )
    assert plan == run and ("forward", "matmul", "qkv_adapter") in run
    (weights,) = (line for line in Ledger.load(tmp_path / "run" / "plan.json").memory if line.component == "weights")
    assert weights.note == ("nf4 blocks, fp32 ends, fp32 adapters" if method == "qlora" else "fp32 parameters")


@pytest.mark.parametrize(("method", "recompute"), [("lora", "none"), ("qlora", "full"), ("dora", "full")])
def test_the_planned_peak_is_the_runs(
    finetuning: Config, train: Train, tmp_path: Path, method: str, recompute: str
) -> None:
    sections = {"train": {"profile_steps": 2, "precision": "bf16"}, "recompute": {"mode": recompute}}
    train(finetuning({"method": method}, **sections), tmp_path / "run")
    planned, found = (
        Ledger.load(tmp_path / "run" / name).totals["peak_bytes"].value for name in ("plan.json", "ledger.json")
    )
    assert planned == pytest.approx(found, rel=0.05)


def test_export_merges(finetuning: Config, train: Train, ironlaw_here: Callable[..., Any], tmp_path: Path) -> None:
    train(finetuning({"method": "dora"}), tmp_path / "run")
    code, out, _ = ironlaw_here("export", tmp_path / "run", tmp_path / "hf", "--json")
    assert code == 0 and json.loads(out)["step"] == 12
    merged = Transformer(ModelConfig(**LLAMA)).eval()
    load_first_weights(str(tmp_path / "hf"), merged, merged.config)
    with torch.no_grad():
        assert torch.allclose(merged(tokens()), load_run(tmp_path / "run").model(tokens()), atol=1e-5)
        base = Transformer(merged.config).eval()
        load_first_weights(str(tmp_path / "base"), base, base.config)
        assert not torch.allclose(merged(tokens()), base(tokens()), atol=1e-2)


def test_a_base_that_has_changed_is_refused(finetuning: Config, train: Train, train_until: Any, tmp_path: Path) -> None:
    train_until(6, finetuning({}), tmp_path / "run")
    torch.manual_seed(5)
    write_model(tmp_path / "base", ModelConfig(**LLAMA), Transformer(ModelConfig(**LLAMA)).state_dict())
    with pytest.raises(UserError, match="has changed since"):
        train(finetuning({}), tmp_path / "run", resume=True)
    with pytest.raises(UserError, match="has changed since"):
        load_run(tmp_path / "run")


def test_a_base_that_has_moved_is_found_where_the_config_says(
    finetuning: Config, train: Train, train_until: Any, tmp_path: Path
) -> None:
    run = tmp_path / "run"
    train_until(6, finetuning({}), run)
    (tmp_path / "base").rename(tmp_path / "moved")
    with pytest.raises(UserError, match=r"no longer there: put it back, or write .*train.start_from in .*run/config.t"):
        load_run(run)
    text = (run / "config.toml").read_text()
    (run / "config.toml").write_text(text.replace(str(tmp_path / "base"), str(tmp_path / "moved")))
    assert load_run(run).step == 4
    moved = finetuning({}, train={"start_from": str(tmp_path / "moved")})
    assert train(moved, run, resume=True).step == 12
    assert load_run(run).step == 12


def test_a_fine_tuned_run_is_a_base(
    finetuning: Config, tiny_config: Config, train: Train, losses: Losses, tmp_path: Path
) -> None:
    """Its own adapters merged."""
    train(finetuning({}), tmp_path / "first")
    config = finetuning({"method": "dora"}, train={"start_from": str(tmp_path / "first")})
    train(config, tmp_path / "second")
    assert losses(tmp_path / "second")[1] < losses(tmp_path / "first")[1]
    # Trained in full it is a plain model: every weight moves, and every rank of a layout has the same ones.
    train(tiny_config(LLAMA, train={"steps": 2, "start_from": str(tmp_path / "first")}), tmp_path / "third")
    before, after = (load_run(tmp_path / name).model for name in ("first", "third"))
    for name, weight in after.named_parameters():
        assert not weight.equal(before.get_parameter(name)), name
    part = build_on_meta(before.config)
    materialize([part], torch.device("cpu"), initialize=False)
    read_first_weights(str(tmp_path / "first"), [part], part, ShardedFiles())
    assert all(weight.equal(before.get_parameter(name)) for name, weight in part.named_parameters())


@pytest.mark.parametrize(
    ("sections", "problem"),
    [
        ({"optimizer": {"name": "muon"}}, "narrow matrices, for which muon"),
        ({"communication": {"gradients": "powersgd"}}, "has little to send"),
        ({"train": {"precision": "mxfp8"}}, "16 bits or more"),
        ({"train": {"offload": "both"}}, "leaves little to offload"),
    ],
)
def test_what_adapters_do_not_go_with(finetuning: Config, sections: dict[str, Any], problem: str) -> None:
    with pytest.raises(UserError, match=problem):
        finetuning({}, **sections)


@pytest.mark.parametrize(
    ("field", "told"),
    [
        ({"init_lora_weights": "pissa"}, "changes its base"),  # PEFT subtracts the adapter's first weights from it
        ({"use_rslora": True}, "use_rslora = True"),
        ({"arrow_config": {"top_k": 3}}, "arrow_config"),
        ({"peft_type": "LOHA"}, "peft_type = 'LOHA'"),
        ({"init_lora_weights": "gaussian", "peft_version": "0.21.2", "runtime_config": {"x": False}}, ""),
    ],
)
def test_an_adapter_that_computes_otherwise_is_refused(field: dict[str, Any], told: str, tmp_path: Path) -> None:
    fields = {"peft_type": "LORA", "bias": "none", "r": 4, "lora_alpha": 10, "lora_dropout": 0.1} | field
    (tmp_path / "adapter_config.json").write_text(json.dumps(fields))
    (tmp_path / "adapter_model.safetensors").touch()
    with pytest.raises(UserError, match=told) if told else nullcontext():
        check_adapter(tmp_path, FinetuneConfig(**LORA))


def test_a_model_with_experts_adapts_attention_alone() -> None:
    """PEFT on transformers 5 takes the names of dense and shared networks for the routed experts'."""
    config = ModelConfig(**LLAMA | {"moe": {"experts": 4, "experts_per_token": 2, "dense_layers": 1}})
    names = names_of(Path("none"), ModelConfig(**MIXTRAL))
    trained = adapter_parameters(config, names, FinetuneConfig(**LORA))
    assert trained and all(".attention." in parameter.name for parameter in trained)
    with pytest.raises(UserError, match="which no matrix of attention"):
        adapter_parameters(config, names, FinetuneConfig(**LORA | {"targets": ("mlp.gate_proj",)}))


def test_a_target_that_is_not_there(finetuning: Config, train: Train, tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"'qproj', which no matrix is called: did you mean q_proj"):
        train(finetuning({"targets": ["qproj"]}), tmp_path / "run")
    assert not (tmp_path / "run").exists()


def test_a_model_to_adapt_must_be_named(
    tiny_document: Callable[..., dict[str, Any]], train: Train, tmp_path: Path
) -> None:
    with pytest.raises(UserError, match=r"model\.from=DIR"):
        train(build_config(tiny_document(finetune=LORA)), tmp_path / "run")


def test_a_quantised_base_takes_four_bits_a_weight(tmp_path: Path) -> None:
    config = write_base(tmp_path / "base", GPT | {"hidden": 128, "heads": 4})
    model = adapted(tmp_path / "base", config, FinetuneConfig(**LORA | {"method": "qlora"}), drawn=False)
    plain = Transformer(config)
    load_first_weights(str(tmp_path / "base"), plain, config)
    for name, layer in adapted_layers(model).items():
        weight = plain.get_submodule(name).weight
        bits = 8 * sum(b.numel() * b.element_size() for b in layer.buffers(recurse=False)) / weight.numel()
        assert bits == pytest.approx(4.127, abs=0.03)
        once = quantize(weight, "nf4").dequantize()
        error, twice = (weight - once).abs().mean(), (weight - layer.frozen()).abs().mean()
        assert twice < 1.02 * error  # scales in 8 bits cost next to nothing


@pytest.mark.parametrize("adapts", [False, True])
def test_the_average_of_the_weights_is_exported(
    finetuning: Config, train: Train, read_metrics: Any, ironlaw_here: Callable[..., Any], tmp_path: Path, adapts: bool
) -> None:
    config = finetuning({} if adapts else {"method": "none"}, train={"average_decay": 0.8})
    train(config, tmp_path / "run")
    last = read_metrics(tmp_path / "run")[-1]
    losses = {"validation_loss": False, "average_validation_loss": True}
    for name, averaged in losses.items():
        model = load_run(tmp_path / "run", averaged).model
        assert not adapted_layers(model)
        assert _loss(model, *text_of(tmp_path / "run", None, print)) == pytest.approx(last[name], abs=1e-5)
    assert abs(last["validation_loss"] - last["average_validation_loss"]) > 1e-4
    code, _, messages = ironlaw_here("export", "run")
    assert code == 0 and "--average exports them" in messages
    code, _, messages = ironlaw_here("export", "run", "averaged", "--average")
    assert code == 0 and "--average" not in messages
    ours = Transformer(config.model)
    load_first_weights(str(tmp_path / "averaged"), ours, config.model)
    torch.testing.assert_close(ours.eval()(tokens()), load_run(tmp_path / "run", True).model(tokens()))
    train(finetuning({"method": "none"}, train={"steps": 3}), tmp_path / "plain")
    code, _, messages = ironlaw_here("export", "plain", "--average")
    assert code == 2 and "holds no averaged weights" in messages
