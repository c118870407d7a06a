"""Round trips of weights, proven by logits against `transformers` on small random models of each family."""

from __future__ import annotations

import importlib.util
import json
import os
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from ironlaw.config import RunConfig, build_config
from ironlaw.data import tokenizer as tokenizers
from ironlaw.errors import UserError
from ironlaw.model.config import ModelConfig
from ironlaw.model.huggingface.configs import family_of, read_config, to_fields
from ironlaw.model.huggingface.verify import verify
from ironlaw.model.huggingface.weights import check_weights, load_weights, read_weights, stored_type, write_model
from ironlaw.model.transformer import Transformer

os.environ.setdefault("HF_HUB_OFFLINE", "1")  # read when transformers is imported: nothing here needs the network
needs_transformers = pytest.mark.skipif(
    importlib.util.find_spec("transformers") is None, reason="transformers is not installed"
)

ROTARY: dict[str, Any] = {
    "layers": 2, "hidden": 32, "heads": 4, "kv_heads": 2, "ffn": 48, "gated_ffn": True, "activation": "silu",
    "norm": "rmsnorm", "norm_eps": 1e-5, "positions": "rope", "bias": False, "vocab": 70, "context": 64,
    "tied": False,
}  # fmt: skip
LLAMA3 = {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_context": 16.0}
EXPERTS: dict[str, Any] = {"experts": 5, "experts_per_token": 2}
MODELS: dict[str, dict[str, Any]] = {
    "gpt2": {"layers": 2, "hidden": 32, "heads": 4, "vocab": 70, "context": 64},
    "gpt2 with exact gelu and its own output layer": {
        "layers": 1, "hidden": 32, "heads": 2, "ffn": 40, "vocab": 70, "context": 64, "activation": "gelu",
        "tied": False,
    },
    "llama": ROTARY,
    "llama tied with all heads": ROTARY | {"kv_heads": None, "tied": True, "rope_theta": 5e5},
    "llama 3.1 with scaled positions": ROTARY | {"rope_scaling": LLAMA3, "rope_theta": 5e5},
    "llama with biases": ROTARY | {"bias": True},
    "mistral": ROTARY | {"sliding_window": 8},
    "qwen2": ROTARY | {"qkv_bias": True, "tied": True, "rope_theta": 1e6},
    "qwen3": ROTARY | {"qk_norm": True, "head_size": 12, "norm_eps": 1e-6},
    "mixtral": ROTARY | {"moe": EXPERTS},
    "qwen2_moe": ROTARY | {"qkv_bias": True, "moe": EXPERTS | {
        "expert_ffn": 24, "normalize": False, "shared_experts": 1, "shared_ffn": 20, "shared_gate": True,
        "balance_loss": 0.001,
    }},
    "qwen3_moe with dense layers": ROTARY | {"layers": 4, "qk_norm": True, "head_size": 12, "moe": EXPERTS | {
        "expert_ffn": 24, "dense_layers": 1, "every": 2,
    }},
    "olmoe": ROTARY | {"qk_norm": True, "qk_norm_whole": True, "moe": EXPERTS | {"normalize": False}},
}  # fmt: skip


LATENT = {"query_rank": 20, "key_value_rank": 12, "plain_size": 10, "rotary_size": 6, "value_size": 14}
YARN = {
    "factor": 4.0, "beta_fast": 32.0, "beta_slow": 1.0, "original_context": 16.0, "mscale": 0.7, "mscale_all_dim": 0.9,
}  # fmt: skip
DEEPSEEK: dict[str, Any] = ROTARY | {"kv_heads": None, "layers": 3, "latent": LATENT, "norm_eps": 1e-6}
DEEPSEEK_EXPERTS = {"experts": 8, "experts_per_token": 3, "expert_ffn": 24, "shared_experts": 2, "dense_layers": 1}
MODELS |= {
    "deepseek_v2": DEEPSEEK | {"moe": DEEPSEEK_EXPERTS | {
        "normalize": False, "routed_scale": 4.0, "groups": 4, "groups_per_token": 2,
    }},
    "deepseek_v2 with whole queries": DEEPSEEK | {
        "latent": LATENT | {"query_rank": None}, "rope_scaling": YARN, "moe": DEEPSEEK_EXPERTS | {"normalize": False},
    },
    "deepseek_v3": DEEPSEEK | {"rope_scaling": YARN | {"mscale": 1.0, "mscale_all_dim": 1.0}, "moe": {
        **DEEPSEEK_EXPERTS, "score": "sigmoid", "balance": "bias", "routed_scale": 2.5, "groups": 4,
        "groups_per_token": 2,
    }},
    "glm with scaled positions, which phi3 does not have": ROTARY | {"rotary_size": 4, "rope_scaling": {"factor": 2.0}},
    "llama with yarn": ROTARY | {"rope_scaling": {k: YARN[k] for k in YARN if not k.startswith("mscale")}},
}  # fmt: skip


def random_model(config: ModelConfig) -> Transformer:
    """No weight is at its initial value: a norm or a bias in the wrong place must show."""
    torch.manual_seed(0)
    model = Transformer(config)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.add_(torch.randn_like(parameter) * (0.3 if parameter.dim() < 2 else 0.1))
            assert parameter.abs().sum() > 0, name
        for name, buffer in model.named_buffers():
            if name.endswith("router.bias"):
                buffer.normal_(std=0.2)
    return model.eval()


def logits_there(folder: Path, tokens: torch.Tensor) -> torch.Tensor:
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager").eval()
    with torch.no_grad():
        logits: torch.Tensor = model(tokens).logits
    return logits


@needs_transformers
@pytest.mark.parametrize("name", MODELS)
def test_what_we_export_computes_the_same_there(name: str, tmp_path: Path) -> None:
    config = ModelConfig(**MODELS[name])
    assert family_of(config).kind == name.split()[0]
    model = random_model(config)
    write_model(tmp_path, config, model.state_dict())
    tokens = torch.randint(0, config.vocab, (2, 40), generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        ours = model(tokens)
    torch.testing.assert_close(ours, logits_there(tmp_path, tokens), rtol=1e-4, atol=1e-4)
    # And back: the same tensors to the bit, of the same model.
    again = read_config(tmp_path)
    written_out = {"name", "dropout", "qkv_bias", "head_size", "kv_heads", "ffn"}  # there, even where it is the default
    assert again.model_dump(exclude=written_out) == config.model_dump(exclude=written_out)
    check_weights(tmp_path, config)
    other = Transformer(again)
    load_weights(tmp_path, other, again)
    for (key, mine), theirs in zip(model.state_dict().items(), other.state_dict().values(), strict=True):
        assert torch.equal(mine, theirs), key


@needs_transformers
@pytest.mark.parametrize("name", MODELS)
def test_what_transformers_saves_computes_the_same_here(name: str, tmp_path: Path) -> None:
    """From their own random initialisation, written by their own code."""
    from transformers import AutoConfig, AutoModelForCausalLM

    fields = to_fields(ModelConfig(**MODELS[name])) | {"pad_token_id": None}  # that of GLM is beyond the vocabulary
    (tmp_path / "config.json").write_text(json.dumps(fields), encoding="utf-8")
    torch.manual_seed(2)
    theirs = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(tmp_path), attn_implementation="eager").eval()
    with torch.no_grad():
        for parameter in theirs.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.1)
    theirs.save_pretrained(tmp_path / "saved", max_shard_size="20KB" if name == "qwen2" else "1GB")
    assert (tmp_path / "saved" / "model.safetensors.index.json").is_file() == (name == "qwen2")
    config = read_config(tmp_path / "saved")
    check_weights(tmp_path / "saved", config)
    ours = Transformer(config).eval()
    load_weights(tmp_path / "saved", ours, config)
    tokens = torch.randint(0, config.vocab, (2, 40))
    with torch.no_grad():
        torch.testing.assert_close(ours(tokens), theirs(tokens).logits, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"norm": "rmsnorm"}, "gpt2 is nearest, and differs in norm"),
        ({"positions": "rope", "qk_norm": True}, "gpt_neox is nearest, and differs in qk_norm"),
        (ROTARY | {"bias": True, "sliding_window": 8}, "differs in out_bias, ffn_bias"),
        ({"bias": False, "moe": EXPERTS}, "mixtral is nearest"),
        (ROTARY | {"moe": EXPERTS | {"score": "sigmoid"}}, r"differs in moe.score"),
        (ROTARY | {"moe": EXPERTS | {"shared_experts": 1}}, r"differs in moe.shared_ffn"),
        (ROTARY | {"qkv_bias": True, "moe": EXPERTS}, "differs in qkv_bias"),
        (ROTARY | {"moe": EXPERTS | {"dense_layers": 1}}, "qwen3_moe is nearest"),
        (ROTARY | {"moe": EXPERTS | {"normalize": False}}, r"differs in moe.normalize"),
    ],
)
def test_what_no_architecture_computes_is_refused(change: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=message) as error:
        family_of(ModelConfig(**(MODELS["gpt2"] | change)))
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("index", [{}, {"weight_map": 3}, {"weight_map": {"a": 3, "b": "../x.safetensors"}}])
def test_an_index_that_names_no_files_of_its_directory_is_refused(index: Any, tmp_path: Path) -> None:
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index), encoding="utf-8")
    with pytest.raises(UserError, match="weight_map: fetch it again"):
        stored_type(tmp_path)


def test_numbers_beyond_fp16_are_not_written_as_infinities(tmp_path: Path) -> None:
    config = ModelConfig(**MODELS["llama"])
    weights = random_model(config).state_dict()
    weights["final_norm.weight"][0] = 1e5
    with pytest.raises(UserError, match=r"model.norm.weight has numbers too large for float16.*export it with"):
        write_model(tmp_path / "half", config, weights, torch.float16)
    assert not (tmp_path / "half").exists()


def test_files_of_the_bare_gpt2_with_its_masks_and_a_shorter_context(tmp_path: Path) -> None:
    """As the first published files are: no `transformer.` before the names, and the causal masks among them."""
    config = ModelConfig(**MODELS["gpt2"])
    model = random_model(config)
    write_model(tmp_path, config, model.state_dict())
    tensors = {k.removeprefix("transformer."): v for k, v in load_file(tmp_path / "model.safetensors").items()}
    tensors["h.0.attn.bias"] = torch.ones(1, 1, 64, 64)
    save_file(tensors, tmp_path / "model.safetensors")
    shorter = config.model_copy(update={"context": 16})
    check_weights(tmp_path, shorter)
    other = Transformer(shorter).eval()
    load_weights(tmp_path, other, shorter)
    tokens = torch.randint(0, 70, (1, 16))
    with torch.no_grad():
        assert torch.equal(other(tokens), model(tokens))


def test_of_one_file_and_an_older_index_the_file_is_read(tmp_path: Path) -> None:
    """As `transformers` does; and what is not weights of this model in plain numbers is refused."""
    config = ModelConfig(**MODELS["llama"])
    write_model(tmp_path / "old", config, random_model(config).state_dict())
    shard, index = tmp_path / "model-1.safetensors", tmp_path / "model.safetensors.index.json"
    (tmp_path / "old" / "model.safetensors").rename(shard)
    index.write_text(json.dumps({"weight_map": dict.fromkeys(load_file(shard), shard.name)}), encoding="utf-8")
    weights = {name: 2 * tensor for name, tensor in random_model(config).state_dict().items()}
    write_model(tmp_path, config, weights)
    assert all(torch.equal(tensor, weights[name]) for name, tensor in read_weights(tmp_path, config))
    (tmp_path / "model.safetensors").unlink()
    shard.unlink()
    with pytest.raises(UserError, match=r"no weights at .*model-1.safetensors"):
        check_weights(tmp_path, config)
    write_model(tmp_path, config, weights)
    (tmp_path / "adapter_config.json").touch()  # `transformers` looks for this file, whatever that of the weights is
    with pytest.raises(UserError, match="an adapter beside the weights: merge it"):
        check_weights(tmp_path, config)
    fields = json.loads((tmp_path / "config.json").read_text(encoding="utf-8"))
    (tmp_path / "config.json").write_text(json.dumps(fields | {"quantization_config": {"quant_method": "fp8"}}))
    with pytest.raises(UserError, match=r"in few bits \(fp8\): convert them"):
        check_weights(tmp_path, config)


def test_what_shards_hold_twice_is_the_same(tmp_path: Path) -> None:
    config = ModelConfig(**MODELS["llama"])
    write_model(tmp_path, config, random_model(config).state_dict())
    tensors = load_file(tmp_path / "model.safetensors")
    (tmp_path / "model.safetensors").rename(tmp_path / "a.safetensors")
    index = {"weight_map": dict.fromkeys(tensors, "a.safetensors") | {"model.norm.weight": "b.safetensors"}}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index), encoding="utf-8")
    norm = tensors["model.norm.weight"]
    for second in (norm, norm + 1, norm.double()):
        save_file({"model.norm.weight": second}, tmp_path / "b.safetensors")
        with nullcontext() if second is norm else pytest.raises(UserError, match=r"\(model.norm.weight is there twice"):
            check_weights(tmp_path, config)


def test_wrong_weights_are_one_line(tmp_path: Path) -> None:
    config = ModelConfig(**MODELS["llama"])
    with pytest.raises(UserError, match="no weights at"):
        check_weights(tmp_path, config)
    (tmp_path / "pytorch_model.bin").touch()
    with pytest.raises(UserError, match="with transformers' save_pretrained"):
        check_weights(tmp_path, config)
    write_model(tmp_path, config, random_model(config).state_dict())
    with pytest.raises(UserError, match=r"embed_tokens.weight in .* has shape \[70, 32\], the model needs \[80, 32\]"):
        check_weights(tmp_path, config.model_copy(update={"vocab": 80}))
    with pytest.raises(UserError, match=r"lack model.layers.2.input_layernorm.weight"):
        check_weights(tmp_path, config.model_copy(update={"layers": 3}))
    with pytest.raises(UserError, match=r"no place for: model.layers.1"):
        check_weights(tmp_path, config.model_copy(update={"layers": 1}))
    tied = config.model_copy(update={"tied": True})
    with pytest.raises(UserError, match=r"set model.tied = false"):
        load_weights(tmp_path, Transformer(tied), tied)
    for value, told in ((torch.full((32,), torch.nan), "not finite"), (torch.ones(32, dtype=torch.int8), "int8")):
        stored = load_file(tmp_path / "model.safetensors") | {"model.norm.weight": value}
        save_file(stored, tmp_path / "model.safetensors")
        with pytest.raises(UserError, match=f"model.norm.weight in .*{told}"):
            load_weights(tmp_path, Transformer(config), config)
    (tmp_path / "model.safetensors").write_bytes(b"\1" * 100)
    with pytest.raises(UserError, match="cannot be read"):
        check_weights(tmp_path, config)
    for make, told in ((Path.mkdir, "is a folder"), (os.mkfifo, "is a pipe")):  # a pipe would be waited for
        (tmp_path / "model.safetensors").unlink(missing_ok=True)
        make(tmp_path / "model.safetensors")
        with pytest.raises(UserError, match=told):
            check_weights(tmp_path, config)
        (tmp_path / "model.safetensors").rename(tmp_path / told)


# -- in a run ----------------------------------------------------------------------------------------------------


def test_a_run_is_exported_and_fine_tuned_from(
    tiny_document: Callable[..., dict[str, Any]], ironlaw_here: Callable[..., tuple[int, str, str]], tmp_path: Path
) -> None:
    """train, export, `[model] from`, train on: the first loss is that of the exported weights."""
    from ironlaw.config import load_config
    from ironlaw.train.checkpoint import newest_of
    from ironlaw.train.restore import load_for_inference

    first = tmp_path / "first.toml"
    first.write_text(build_config(tiny_document(ROTARY | {"vocab": 300})).to_toml(), encoding="utf-8")
    assert ironlaw_here("train", first, "--out", "first")[0] == 0
    code, out, messages = ironlaw_here("export", "first", "there", "--to", "hf", "--json")
    assert code == 0, messages
    assert json.loads(out)["architecture"] == "llama"
    document = tiny_document() | {"model": {"from": str(tmp_path / "there"), "dropout": 0.0}}
    config: RunConfig = build_config(document)
    assert config.train.start_from == str(tmp_path / "there")
    assert config.data.tokenizer == str(tmp_path / "there" / "tokenizer.json")
    second = tmp_path / "second.toml"
    second.write_text(config.to_toml(), encoding="utf-8")
    slow = ["--set", "optimizer.lr=1e-12", "--set", "train.steps=2"]
    code, _, messages = ironlaw_here("train", second, "--out", "second", *slow)
    assert code == 0, messages
    models = [
        load_for_inference(newest_of(tmp_path / name), load_config(tmp_path / name).model).state_dict()
        for name in ("first", "second")
    ]
    for name, tensor in models[0].items():
        torch.testing.assert_close(models[1][name], tensor, rtol=0, atol=1e-6)
    # A run is a source too, and what does not fit is said before anything is written.
    from_run = tiny_document() | {"model": {"from": str(tmp_path / "first")}}
    third = tmp_path / "third.toml"
    third.write_text(build_config(from_run).to_toml(), encoding="utf-8")
    assert ironlaw_here("train", third, "--out", "third", *slow)[0] == 0
    code, _, messages = ironlaw_here("train", third, "--out", "fourth", "--set", "model.ffn=64")
    assert code == 2 and "is of another model" in messages.splitlines()[-1]
    code, _, messages = ironlaw_here("train", second, "--out", "fourth", "--set", "model.ffn=64")
    assert code == 2 and "change no dimension" in messages.splitlines()[-1]
    assert not (tmp_path / "fourth").exists()


@needs_transformers
def test_the_exported_tokenizer_is_the_runs(
    tiny_document: Callable[..., dict[str, Any]], ironlaw_here: Callable[..., tuple[int, str, str]], tmp_path: Path
) -> None:
    from transformers import AutoTokenizer

    from ironlaw.data.tokenizer import load

    config = tmp_path / "config.toml"
    config.write_text(build_config(tiny_document(train={"steps": 2})).to_toml(), encoding="utf-8")
    assert ironlaw_here("train", config, "--out", "run")[0] == 0
    (tmp_path / "run" / "chat_template.jinja").write_text("{{ messages[0].content }}")
    assert ironlaw_here("export", "run", "there", "--dtype", "bf16")[0] == 0
    ours, theirs = load(tmp_path / "run" / "tokenizer.json"), AutoTokenizer.from_pretrained(tmp_path / "there")
    text = "def value(self): return total"
    assert theirs(text, add_special_tokens=False)["input_ids"] == ours.encode(text)
    assert theirs.eos_token_id == ours.end_of_text
    assert theirs.chat_template == "{{ messages[0].content }}"
    assert load_file(tmp_path / "there" / "model.safetensors")["transformer.wte.weight"].dtype == torch.bfloat16
    assert ironlaw_here("export", "run", "there")[0] == 2


@needs_transformers
def test_where_a_model_stops_and_how_it_chats_goes_with_its_runs(
    tiny_document: Callable[..., dict[str, Any]], ironlaw_here: Callable[..., tuple[int, str, str]], tmp_path: Path
) -> None:
    """A model's directory is trained on from, on plain text, then compressed; both runs are exported."""
    from tokenizers import Tokenizer, processors
    from transformers import AutoModelForCausalLM, AutoTokenizer

    gguf = pytest.importorskip("gguf")
    config, chat = ModelConfig(**ROTARY | {"vocab": 302}), tmp_path / "chat"
    write_model(chat, config, random_model(config).state_dict())
    tokenizers.train([Path(torch.__file__).read_text(encoding="utf-8")[:50_000]], 300, chat / "tokenizer.json")
    inner = Tokenizer.from_file(str(chat / "tokenizer.json"))
    inner.add_special_tokens(["<|first|>", "<|turn|>"])
    first, turn = inner.token_to_id("<|first|>"), inner.token_to_id("<|turn|>")
    inner.post_processor = processors.TemplateProcessing(single="<|first|> $A", special_tokens=[("<|first|>", first)])
    inner.save(str(chat / "tokenizer.json"))
    template = "{% for m in messages %}{{ m.content }}<|turn|>{% endfor %}"
    named = {"bos_token": "<|first|>", "eos_token": "<|turn|>", "chat_template": template}
    (chat / "tokenizer_config.json").write_text(json.dumps(named))
    stops = {"bos_token_id": first, "eos_token_id": [turn, 0, 7], "top_k": 9}
    (chat / "generation_config.json").write_text(json.dumps(stops))
    document = tiny_document(train={"steps": 2}) | {"model": {"from": str(chat)}}
    (tmp_path / "config.toml").write_text(build_config(document).to_toml(), encoding="utf-8")
    assert ironlaw_here("train", tmp_path / "config.toml", "--out", "tuned")[0] == 0
    assert ironlaw_here("compress", "tuned", "--to", "int8", "--out", "small")[0] == 0
    for run in ("tuned", "small"):
        code, _, messages = ironlaw_here("export", run)
        assert code == 0, messages
        theirs = AutoModelForCausalLM.from_pretrained(tmp_path / f"{run}-hf")
        for says in (theirs.generation_config, theirs.config):
            assert says.bos_token_id == first and says.eos_token_id == [turn, 0, 7]
        assert theirs.generation_config.top_k == 9
        tokenizer = AutoTokenizer.from_pretrained(tmp_path / f"{run}-hf")
        assert (tokenizer.bos_token, tokenizer.eos_token) == ("<|first|>", "<|turn|>")
        assert tokenizer.apply_chat_template([{"role": "user", "content": "a"}], tokenize=False) == "a<|turn|>"
        assert ironlaw_here("export", run, "--to", "gguf")[0] == 0
        there = gguf.GGUFReader(tmp_path / f"{run}-gguf" / "model.gguf")
        names = ("ggml.bos_token_id", "ggml.eos_token_id", "ggml.add_bos_token", "chat_template")
        assert [there.get_field(f"tokenizer.{name}").contents() for name in names] == [first, turn, True, template]


@pytest.mark.parametrize(
    ("table", "message"),
    [
        ({"from": "/nowhere"}, "is neither a Hugging Face directory nor a run"),
        ({"from": "/nowhere", "layrs": 3}, "unknown key model.layrs"),
    ],
)
def test_from_nowhere_is_one_line(table: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=message):
        build_config({"model": table})


# -- verified by what reads it -----------------------------------------------------------------------------------


@pytest.fixture
def trained(tiny_document: Callable[..., dict[str, Any]], ironlaw_here: Callable[..., Any], tmp_path: Path) -> Path:
    """A run of two steps of the shape that the demo's model has: rotary positions in a GPT-2."""
    config = tmp_path / "config.toml"
    document = tiny_document({"positions": "rope"}, train={"steps": 2})
    config.write_text(build_config(document).to_toml(), encoding="utf-8")
    assert ironlaw_here("train", config, "--out", "run")[0] == 0
    return tmp_path / "run"


@needs_transformers
@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_an_export_is_verified(trained: Path, ironlaw_here: Callable[..., tuple[int, str, str]], dtype: str) -> None:
    code, out, messages = ironlaw_here("export", "run", "there", "--json", "--dtype", dtype)
    assert code == 0, messages
    found = json.loads(out)
    assert found["verification"]["verified"] is True and "transformers" in found["verification"]["with"]
    assert 0 <= found["verification"]["largest_difference"] < 1e-4 and found["step"] == 2


@needs_transformers
def test_a_model_that_amplifies_rounding_is_verified_in_16_bits(tmp_path: Path) -> None:
    config = ModelConfig(**ROTARY)
    model = random_model(config).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.mul_(4.0 if "qkv" in name else 1.0)  # attention that nearly chooses one token
    write_model(tmp_path, config, model.state_dict())
    found = verify(tmp_path, model, computes=torch.bfloat16)
    assert found.largest_difference is not None and found.largest_logit is not None
    assert found.largest_difference > 0.02 * found.largest_logit and not found.differs
    fields = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(fields | {"rms_norm_eps": 10.0}))
    assert verify(tmp_path, model, computes=torch.bfloat16).differs


@needs_transformers
@pytest.mark.parametrize("spoil", ["rotary_pct", "vocab_size"])
def test_an_export_that_transformers_reads_otherwise_leaves_nothing(
    trained: Path, ironlaw_here: Callable[..., tuple[int, str, str]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
    spoil: str,
) -> None:  # fmt: skip
    from ironlaw.model.huggingface import weights

    def spoilt(config: ModelConfig) -> dict[str, Any]:
        fields = to_fields(config)
        del fields["rope_parameters"]
        return fields | {spoil: 0.25 if spoil == "rotary_pct" else 100}

    monkeypatch.setattr(weights, "to_fields", spoilt)
    code, out, messages = ironlaw_here("export", "run", "there", "--json")
    assert code == 2 and "was not made" in messages and "Traceback" not in messages and "was not made" in out
    assert sorted(path.name for path in tmp_path.iterdir() if "there" in path.name) == []


def test_without_transformers_an_export_says_that_it_is_not_verified(
    trained: Path, ironlaw_here: Callable[..., tuple[int, str, str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    from ironlaw.model.huggingface import verify

    monkeypatch.setattr(verify.importlib.util, "find_spec", lambda name: None)
    code, out, _ = ironlaw_here("export", "run", "there", "--json")
    assert code == 0 and json.loads(out)["verification"]["verified"] is False
    assert "not verified: transformers is not installed" in ironlaw_here("export", "run", "again")[1]


@needs_transformers
def test_the_demos_model_is_the_same_in_transformers(tmp_path: Path) -> None:
    from ironlaw.config import load_config
    from ironlaw.model.huggingface.verify import verify

    config = load_config(Path(__file__).parents[2] / "examples" / "gpt-tiny.toml").model
    model = random_model(config)
    write_model(tmp_path, config, model.state_dict())
    found = verify(tmp_path, model)
    assert not found.differs and found.largest_difference is not None and found.tokens == config.context
