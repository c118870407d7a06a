"""`ironlaw compress`: a run in, a run in fewer bits out, which everything that reads runs reads."""

from __future__ import annotations

import copy
import errno
import json
import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from ironlaw.catalog.formats import number_format, read_target, weight_formats
from ironlaw.cli.compress import engine_decoder
from ironlaw.config import RunConfig, build_config
from ironlaw.errors import UserError
from ironlaw.ledger import Ledger
from ironlaw.model.config import ModelConfig
from ironlaw.model.linear import Linear
from ironlaw.model.transformer import Transformer
from ironlaw.numerics.compression import BlockInputs, compress, mixed_formats
from ironlaw.numerics.hqq import hqq
from ironlaw.numerics.quantized import quantize
from ironlaw.numerics.quantized_linear import quantize_layers
from ironlaw.numerics.scaling import Inputs, balance
from ironlaw.train import sweep
from ironlaw.train.checkpoint import newest_of
from ironlaw.train.compression import compress_run
from ironlaw.train.parallel.step import read_first_weights
from ironlaw.train.parallel.store import ShardedFiles
from ironlaw.train.restore import QuantizedFiles, load_for_inference, load_run, read_held
from ironlaw.train.run_directory import complete_or_nothing, path_beside
from ironlaw.train.sweep import candidates

from ..conftest import TINY_GPT, TINY_LLAMA

Here = Callable[..., tuple[int, str, str]]


@pytest.fixture
def run(train: Callable[..., Any], tiny_config: Callable[..., RunConfig], tmp_path: Path) -> Path:
    """A tiny Llama after a few steps."""
    train(tiny_config(TINY_LLAMA), tmp_path / "run")
    return tmp_path / "run"


def random_model(**fields: Any) -> Transformer:
    torch.manual_seed(0)
    return Transformer(ModelConfig(**TINY_GPT | fields)).eval()


@pytest.mark.parametrize("to", [*weight_formats(), "2:4", "int4,2:4", "mxfp4,pruned=70%", "nf4,pruned=0.3", "fp8,2:4"])
def test_a_compressed_checkpoint_reads_as_it_was_rounded(to: str, tmp_path: Path) -> None:
    model = random_model(hidden=40, heads=2)  # a multiple of no block
    with torch.no_grad():  # as read from 16 bits, but for a norm that is 1 + weight
        for parameter in model.parameters():
            parameter.copy_(parameter.bfloat16())
        model.final_norm.weight.add_(2.0**-12)
    held = compress(model, read_target(to), whole=True)
    store = QuantizedFiles(held, torch.bfloat16)
    taken = store.take(model, {})
    assert {name for name, tensor in taken.items() if tensor.dtype != torch.bfloat16} == {"final_norm.weight"}
    store.write(tmp_path, taken)
    other = random_model(hidden=40, heads=2)
    store.read(tmp_path, other, {})
    assert "embedding.weight" in held and len(held) == 9
    for name, tensor in other.state_dict().items():
        assert torch.equal(tensor, model.state_dict()[name])
        if name in held:
            assert torch.equal(tensor, held[name].dequantize())
    back = dict(read_held(tmp_path))
    for name, weight in held.items():
        if weight.bitmap is not None:
            assert (weight.dequantize() == 0).double().mean() > 0.2
        assert back[name].bytes == weight.bytes


def test_two_of_every_four_neighbours_stay() -> None:
    model = random_model()
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    held = compress(model, read_target("2:4"))
    for name, weight in held.items():
        now, was = weight.dequantize().reshape(-1, 4), before[name].reshape(-1, 4)
        assert ((now != 0).sum(1) == 2).all()
        assert torch.equal(now[now != 0], was[now != 0])
        gone = torch.where(now == 0, was.abs(), 0).amax(1)
        assert (torch.where(now != 0, was.abs(), torch.inf).amin(1) >= gone).all()
        assert weight.bytes == was.numel() * 2 + was.numel() // 8  # half of the fp32 numbers, and a bit of each


def linears_of(model: Transformer) -> list[Linear]:
    return [module for module in model.blocks.modules() if isinstance(module, Linear)]


def output_error(method: str, to: str, **options: Any) -> float:
    """Of the logits on tokens of the kind that were calibrated on."""
    model, reference = random_model(context=64), random_model(context=64)
    tokens = torch.randint(0, 40, (32, 64), generator=torch.Generator().manual_seed(1))  # few of the 300: correlated
    compress(model, read_target(to), method=method, batches=tokens[:24].split(8), **options)  # type: ignore[arg-type]
    with torch.no_grad():
        return float((model(tokens[24:]) - reference(tokens[24:])).square().mean())


@pytest.mark.parametrize("to", ["int4", "mxfp4", "int4,2:4"])
def test_gptq_changes_the_output_less_than_rounding_to_nearest(to: str) -> None:
    assert output_error("gptq", to) < 0.8 * output_error("rtn", to)


def test_hqq_gives_outliers_less_weight() -> None:
    torch.manual_seed(0)
    weight = torch.randn(32, 128) * torch.randn(32, 128).abs().pow(2)
    for name in ("int4", "nf4", "int8", "fp8_block"):
        ours, nearest = hqq(weight, number_format(name)), quantize(weight, name, block=number_format(name).weight_block)
        if name != "fp8_block":  # whose blocks are rows together
            stack = hqq(weight.view(4, 8, 128), number_format(name))  # of experts
            assert torch.equal(stack.dequantize().view(32, 128), ours.dequantize())
        costs = [float((weight - held.dequantize()).abs().pow(0.7).sum()) for held in (ours, nearest)]
        assert costs[0] < costs[1], name
        assert ours.bytes == nearest.bytes


def test_smoothquant_leaves_inputs_that_8_bits_hold() -> None:
    """Of an input channel that is 200 times as large as the others, a token's scale leaves these few steps."""
    errors, tokens = [], torch.randint(0, 40, (8, 16), generator=torch.Generator().manual_seed(1))
    for method in ("rtn", "smoothquant"):
        model = random_model(**TINY_LLAMA)
        with torch.no_grad():
            for block in model.blocks:
                block.ffn_norm.weight[3] = 200.0
                block.ffn.up.weight[:, 3] /= 200
                block.ffn.gate.weight[:, 3] /= 200
            before = model(tokens)
            held = compress(model, read_target("int8"), method=method, batches=[tokens])  # type: ignore[arg-type]
            quantize_layers(model, held)
            errors.append(float((model(tokens) - before).square().mean()))
    assert errors[1] < 0.5 * errors[0]


def test_formats_are_mixed_within_bytes() -> None:
    tokens = torch.randint(0, 40, (16, 16))
    model, target = random_model(), read_target("mxfp4")
    parameters, layers = model.config.parameters, sum(m.weight.numel() for m in linears_of(model))
    others = 4 * (parameters - layers)
    chosen = mixed_formats(model, target, others + layers * 3 // 4, torch.float32, [tokens])
    held = compress(model, target, formats=chosen)
    taken = sum(weight.bytes for weight in held.values())
    assert 0.7 * layers < taken <= 0.75 * layers
    assert len({weight.format.name for weight in held.values()}) > 1
    for room, told in ((others + layers // 2, "narrower format"), (0, "--within")):
        with pytest.raises(UserError, match=told):
            mixed_formats(model, target, room, torch.float32, [tokens])


@pytest.mark.parametrize("fields", [TINY_GPT, TINY_LLAMA | {"kv_heads": 4}, TINY_GPT | {"parallel_norms": 1}])
def test_awq_scales_channels_and_leaves_the_function(fields: dict[str, Any]) -> None:
    torch.manual_seed(0)
    model = Transformer(ModelConfig(**fields)).eval()
    with torch.no_grad():  # few channels carry most
        for block in model.blocks:
            (block.ffn_norm or block.attention_norm).weight[:4] = 30.0
    tokens = torch.randint(0, 40, (16, 16))
    with torch.no_grad():
        before = model(tokens)
    errors = []
    for method in ("rtn", "awq"):
        other = copy.deepcopy(model)
        compress(other, read_target("int4"), method=method, batches=[tokens])  # type: ignore[arg-type]
        errors.append(float((other(tokens) - before).detach().square().mean()))
    assert errors[1] < 0.85 * errors[0]
    moments: dict[torch.nn.Module, Inputs] = {}
    with torch.no_grad():
        seen = BlockInputs(model, [tokens])
        for number, block in enumerate(model.blocks):
            moments |= seen.inputs_of(number, block, linears_of(model))
            seen.inputs = seen.run(number, block)
    weights = [block.ffn.up.weight.clone() for block in model.blocks]
    for block, weight, method in zip(model.blocks, weights, ("awq", "smoothquant"), strict=True):
        balance(block, moments, number_format("int4"), method)
        assert not torch.equal(block.ffn.up.weight, weight)
    assert torch.allclose(model(tokens), before, atol=2e-4)


def test_wanda_prunes_by_what_a_weight_is_multiplied_with() -> None:
    torch.manual_seed(0)
    model = random_model()
    with torch.no_grad():
        model.blocks[0].ffn_norm.weight[:16] = 0.01
        model.blocks[0].ffn_norm.bias[:] = 0
    compress(model, read_target("pruned=50%"), score="wanda", batches=[torch.randint(0, 300, (4, 16))])
    zeros = (model.blocks[0].ffn.up.weight == 0).double().mean(0)
    assert zeros[:16].min() > 0.9 and zeros[16:].max() < 0.1


def test_a_compressed_run_is_read_as_a_run(run: Path, ironlaw_here: Here, tmp_path: Path) -> None:
    run = run.rename(tmp_path / "tiny")
    code, out, err = ironlaw_here("compress", "tiny", "--to", "int8", "--json")
    assert code == 0, err
    found = json.loads(out)
    assert found["out"] == "tiny-int8"
    (tmp_path / "tiny-int8").rename(tmp_path / "small")
    config = build_config({"model": TINY_LLAMA}).model
    assert found["bytes_before"] == 4 * config.parameters
    assert found["bytes_after"] < 0.75 * found["bytes_before"]  # half of this model is its embedding and output layer
    stored = next((tmp_path / "small" / "checkpoints").glob("*/quantized.safetensors"))
    assert found["bytes_after"] <= stored.stat().st_size < found["bytes_after"] + 8192
    assert 0 < abs(found["loss_after"] - found["loss_before"]) < 0.01
    assert sum(found["kernels"].values()) == 4 * config.layers + config.layers  # qkv, out, gate, up and down
    assert 0 < abs(found["loss_served"] - found["loss_after"]) < 0.01
    logged = json.loads((run / "metrics.jsonl").read_text().splitlines()[-1])["validation_loss"]
    assert found["loss_before"] == pytest.approx(logged, rel=1e-5)
    assert found["tokens_per_second_before"] > 0 and found["tokens_per_second_after"] > 0

    assert ironlaw_here("generate", "small", "--prompt", "def", "--tokens", "3")[0] == 0
    code, _, err = ironlaw_here("export", "small")  # into small-hf
    assert code == 0, err
    code, _, err = ironlaw_here("export", "small", "codes", "--dtype", "int4")
    assert code == 2 and "the run holds int8" in err and not (tmp_path / "codes").exists()
    code, _, err = ironlaw_here("export", "small", "averaged", "--average")
    assert code == 2 and "export the run that was compressed with --average" in err
    from transformers import AutoModelForCausalLM

    ours = load_for_inference(newest_of(tmp_path / "small"), config)
    theirs = AutoModelForCausalLM.from_pretrained(tmp_path / "small-hf").eval()
    tokens = torch.randint(0, 300, (2, 16))
    with torch.no_grad():
        assert torch.allclose(theirs(tokens).logits, ours(tokens), atol=1e-5)


def test_a_sweep_tries_no_two_formats_that_hold_the_same_weights() -> None:
    weight, plain = torch.randn(64, 256, generator=torch.Generator().manual_seed(0)), set()
    tried = [to for to, method, whole in candidates() if method == "rtn" and not whole]
    for to in tried:
        format = read_target(to).format
        plain.add(quantize(weight, to, block=format.weight_block).dequantize().numpy().tobytes())
    assert len(plain) == len(tried) > 10 and "fp8" in tried


def test_a_sweep_finds_what_nothing_beats(
    run: Path, ironlaw_here: Here, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    known = [("int8", "rtn", True), ("fp8_block", "gptq", False), ("mxfp4", "rtn", False), ("mxfp4", "awq", False)]
    monkeypatch.setattr("ironlaw.train.sweep.candidates", lambda: known)
    code, out, err = ironlaw_here("compress", run, "--sweep", "--budget", "1000s", "--json", "--out", "sweep.html")
    assert code == 0, err
    found = json.loads(out)
    assert [point["name"] for point in found["points"][1:]] == ["int8 rtn, all layers", "mxfp4 rtn", "mxfp4 awq"]
    whole, int8, rtn, awq = found["points"]
    assert (
        whole["bytes"] > rtn["bytes"] > int8["bytes"]
        and int8["kernels"]
        and not rtn["kernels"]
        and rtn["bytes"] == awq["bytes"]
    )
    assert int8["bytes_read"] < 0.5 * whole["bytes_read"]
    assert int8["frontier"] and rtn["frontier"] + awq["frontier"] < 2
    page = (tmp_path / "sweep.html").read_text()
    # A dot for each format, on two axes.
    assert page.count("<circle") == 8 and page.count(">kB</text>") == 1 and "mxfp4 awq" in page
    assert [page.count(f">{letter}</text>") for letter in "abcde"] == [2, 2, 2, 2, 0]  # the table's letters
    code, out, _ = ironlaw_here("compress", run, "--sweep", "--budget", "0.001s", "--out", "sweep.html")
    assert code == 0 and "Not tried" in out
    assert ironlaw_here("compress", run)[0] == ironlaw_here("compress", run, "--sweep", "--to", "int8")[0] == 2


def test_an_interrupted_sweep_shows_what_it_has_measured(
    run: Path, ironlaw_here: Here, monkeypatch: pytest.MonkeyPatch
) -> None:
    measure, calls = sweep.measure_compression, []

    def interrupt(*given: Any, **named: Any) -> Any:
        calls.append(given)
        if len(calls) > 1:
            raise KeyboardInterrupt
        return measure(*given, **named)

    monkeypatch.setattr(sweep, "measure_compression", interrupt)
    code, out, err = ironlaw_here("compress", run, "--sweep", "--json")
    assert code == 130 and "interrupted" in err
    found = json.loads(out)
    assert found["interrupted"] and len(found["points"]) == 2  # the original and one format
    assert ironlaw_here("compress", run, "--sweep", "--json")[0] == 130  # with nothing to show


def test_what_is_made_of_a_run_goes_beside_it() -> None:
    assert path_beside(Path("runs/demo/"), "int4,2:4") == Path("runs/demo-int4-2-4")
    assert path_beside(Path("."), "hf") == Path.cwd().with_name(f"{Path.cwd().name}-hf")


@pytest.mark.parametrize("error", [OSError(errno.ENOSPC, "no space"), OSError("9 requested and 4 written")])
def test_a_full_disk_is_said_and_leaves_nothing(error: OSError, tmp_path: Path) -> None:
    with pytest.raises(OSError, match="No space left") as full, complete_or_nothing(tmp_path / "made"):
        raise error
    assert full.value.errno == errno.ENOSPC and not list(tmp_path.iterdir())


def test_what_is_told_to_stop_leaves_nothing_half_written_and_what_was_killed_is_cleared(tmp_path: Path) -> None:
    (tmp_path / ".made.0.partial").mkdir()  # no process has this number
    (tmp_path / f".made.{os.getpid()}.partial").mkdir()  # that of a container's process, which often has the same
    (tmp_path / ".others.0.partial").mkdir()
    with pytest.raises(KeyboardInterrupt, match="15"), complete_or_nothing(tmp_path / "made") as partial:
        assert partial.is_dir()
        os.kill(os.getpid(), signal.SIGTERM)
    assert [path.name for path in tmp_path.iterdir()] == [".others.0.partial"]
    assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL


def test_training_does_not_go_on_from_compressed_weights_but_starts_from_them(
    run: Path, train: Callable[..., Any], tiny_config: Callable[..., RunConfig], tmp_path: Path
) -> None:
    small = tmp_path / "small"
    made = compress_run(run, read_target("int4"), small, engine_decoder)
    ledger = Ledger.load(small / "ledger.json")
    assert ledger.totals["loss_after"].value == made.loss_after
    assert ledger.memory_bytes() == {"weights": made.bytes_after}
    for steps in (12, 20):
        with pytest.raises(UserError, match=r"train\.start_from"):
            train(tiny_config(TINY_LLAMA, train={"steps": steps}), small, resume=True)
    assert not (small / "plan.json").exists() and not (small / "metrics.jsonl").exists()
    train(tiny_config(TINY_LLAMA, train={"steps": 2, "start_from": str(small)}), tmp_path / "next")
    part, held = Transformer(ModelConfig(**TINY_LLAMA)), load_run(small).model
    read_first_weights(str(small), [part], part, ShardedFiles())
    assert all(weight.equal(held.get_parameter(name)) for name, weight in part.named_parameters())
    with pytest.raises(UserError, match="is compressed already"):
        compress_run(small, read_target("int4"), tmp_path / "smaller", engine_decoder)
    assert newest_of(small).index["store"] == "quantized"
    for folder, told in ((small, "exists"), (Path("/dev/null/x"), "cannot write to")):  # before hours of compression
        said: list[str] = []
        with pytest.raises(UserError, match=told):
            compress_run(run, read_target("int4"), folder, engine_decoder, say=said.append)
        assert not any(line.startswith("compressing") for line in said)


@pytest.mark.parametrize("to", ["int4", "2:4", "mxfp4,2:4"])
def test_what_trained_with_weights_as_held_loses_nothing_when_compressed(
    to: str, run: Path, train: Callable[..., Any], tiny_config: Callable[..., RunConfig], tmp_path: Path
) -> None:
    small = compress_run(run, read_target(to), tmp_path / "small", engine_decoder)
    about = {"train": {"steps": 4, "start_from": str(tmp_path / "small"), "qat": to}, "optimizer": {"lr": 3e-3}}
    config = tiny_config(TINY_LLAMA, **about, checkpoint={"every": 2})
    train(config, tmp_path / "tuned")
    again = compress_run(tmp_path / "tuned", read_target(to), tmp_path / "again", engine_decoder)
    assert again.loss_after < small.loss_after
    logged = json.loads((tmp_path / "tuned" / "metrics.jsonl").read_text().splitlines()[-1])["validation_loss"]
    assert again.loss_after == pytest.approx(logged, rel=1e-4)
    if to == "2:4":  # rounded ones may be 0 too, of which any may go
        held = [dict(read_held(newest_of(tmp_path / name).path)) for name in ("small", "again")]
        kept = [{n: one.bitmap for n, one in of.items() if getattr(one, "bitmap", None) is not None} for of in held]
        masks = [(one, kept[1][name]) for name, one in kept[0].items()]
        assert len(masks) == 10 and all(torch.equal(*pair) for pair in masks)


def test_a_hugging_face_directory_is_compressed_too(
    run: Path, corpus: Path, ironlaw_here: Here, tmp_path: Path
) -> None:
    assert ironlaw_here("export", run, "theirs", "--dtype", "bf16")[0] == 0
    code, _, err = ironlaw_here("compress", "theirs", "--to", "mxfp4", "--out", "small")
    assert code == 2 and "--data" in err
    code, out, err = ironlaw_here("compress", "theirs", "--to", "mxfp4", "--out", "small", "--data", corpus, "--json")
    assert code == 0, err
    assert json.loads(out)["bytes_before"] == 2 * build_config({"model": TINY_LLAMA}).model.parameters
    assert ironlaw_here("generate", "small", "--tokens", "2")[0] == 0


@pytest.mark.parametrize("to", ["int4", "int4,2:4"])
def test_a_run_in_int4_becomes_q4_0_without_another_rounding(
    to: str, train: Callable[..., Any], tiny_config: Callable[..., RunConfig], ironlaw_here: Here, tmp_path: Path
) -> None:  # fmt: skip
    gguf = pytest.importorskip("gguf")
    config = tiny_config(TINY_LLAMA | {"ffn": 64}, train={"steps": 2})
    train(config, tmp_path / "run")
    words = ("compress", "run", "--to", to, "--method", "gptq", "--out", "small")
    assert ironlaw_here(*words)[0] == 0
    code, out, err = ironlaw_here("export", "small", "llama.cpp", "--to", "gguf", "--dtype", "q4_0", "--json")
    assert code == 0, err
    assert json.loads(out)["folder"] == "llama.cpp"
    ours = load_for_inference(newest_of(tmp_path / "small"), config.model).state_dict()
    tensors = gguf.GGUFReader(tmp_path / "llama.cpp" / "model.gguf").tensors
    there = {tensor.name: gguf.quants.dequantize(tensor.data, tensor.tensor_type) for tensor in tensors}
    for layer in range(2):
        for mine, other in (("ffn.up", "ffn_up"), ("ffn.down", "ffn_down"), ("attention.out", "attn_output")):
            weight = ours[f"blocks.{layer}.{mine}.weight"]
            assert torch.equal(torch.from_numpy(there[f"blk.{layer}.{other}.weight"]), weight)
        value = ours[f"blocks.{layer}.attention.qkv.weight"][-16:]
        assert torch.equal(torch.from_numpy(there[f"blk.{layer}.attn_v.weight"]), value)


REFUSED = [
    (["--to", "int5"], "int4"),
    (["--to", "fp4_e2m1"], "no format that holds weights"),
    (["--to", "e8m0"], "no format that holds weights"),
    (["--to", "int4,int8"], "two of a kind"),
    (["--to", "2:4,pruned=50%"], "two of a kind"),
    (["--to", "pruned=150%"], "pruned=50%"),
    (["--to", "fp8", "--method", "gptq"], "use rtn"),
    (["--to", "fp8_block", "--method", "gptq"], "use rtn"),
    (["--to", "2:4", "--method", "gptq"], "use rtn"),
    (["--to", "int4", "--method", "hqqq"], "rtn, gptq, awq"),
    (["--to", "mxfp4", "--method", "hqq"], "use rtn"),
    (["--to", "int4,2:4", "--method", "hqq"], "gptq or rtn"),
    (["--to", "int4", "--within", "many"], "20GiB"),
    (["--to", "int4", "--method", "awq", "--within", "1MB"], "leave the others out"),
    (["--to", "bf16", "--method", "awq"], "8 bits or fewer"),
    (["--to", "int4", "--prune-by", "wanda"], "2:4"),
    (["--to", "int4", "--data", "nowhere"], "nowhere"),
]


QAT_REFUSED = [
    ({"train": {"qat": "int5"}}, r"train\.qat = 'int5' is no format"), ({"layout": {"dp": 2}}, "layout"),
    ({"finetune": {"method": "lora"}}, "adapters"), ({"train": {"precision": "mxfp4"}}, "bf16"),
    ({"optimizer": {"name": "muon"}}, "adamw"),
]  # fmt: skip


@pytest.mark.parametrize(("fields", "told"), QAT_REFUSED)
def test_what_qat_does_not_go_with(
    fields: dict[str, Any], told: str, train: Callable[..., Any], tiny_config: Callable[..., RunConfig], tmp_path: Path
) -> None:
    about = fields | {"train": {"qat": "int4", "steps": 2} | fields.get("train", {})}
    with pytest.raises(UserError, match=told):
        train(tiny_config(TINY_LLAMA, **about), tmp_path / "run")


def test_what_does_not_go_together_is_refused_in_one_line(run: Path, ironlaw_here: Here, tmp_path: Path) -> None:
    for words, told in REFUSED:
        code, out, err = ironlaw_here("compress", run, *words, "--out", "small")
        assert code == 2 and told in err and len(err.strip().splitlines()) == 1, (words, err)
        assert not out and not (tmp_path / "small").exists()
