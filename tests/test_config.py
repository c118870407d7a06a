"""One configuration: from TOML, from --set, from a catalogued model; out again, and back the same."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, get_args

import pytest

from ironlaw.config import RunConfig, build_config, load_config
from ironlaw.errors import UserError
from ironlaw.model.config import ModelConfig
from ironlaw.refusals import USED_WITH

MODEL = {"layers": 2, "hidden": 32, "heads": 2, "vocab": 300, "context": 16}
EXAMPLES = sorted((Path(__file__).parents[1] / "examples").glob("*.toml"))


def write(folder: Path, text: str = "") -> Path:
    path = folder / "config.toml"
    path.write_text(text or RunConfig(model=ModelConfig(**MODEL)).to_toml(), encoding="utf-8")
    return path


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.name)
def test_examples_load(path: Path) -> None:
    start = ["model.from=" + str(path.parent / "nowhere")] if "from =" in path.read_text(encoding="utf-8") else []
    if start:  # what it starts from is the user's own: everything else is read before that is missed
        with pytest.raises(UserError, match="is neither a Hugging Face directory nor a run"):
            load_config(path, start)
        return
    assert load_config(path).model.parameters > 0


@pytest.mark.parametrize(
    ("document", "message"),
    [
        ({"model": MODEL | {"hiden": 3}}, "unknown key model.hiden: did you mean model.hidden?"),
        ({"model": MODEL, "train": {"learning_rate": 1}}, "unknown key train.learning_rate"),
        ({"model": MODEL, "train": {"micro_bach": 1}}, "did you mean train.micro_batch"),
        ({"model": MODEL, "trian": {}}, "unknown section trian: did you mean train"),
        ({"model": {"name": "gpt2", "contxt": 3}}, "unknown key model.contxt: did you mean model.context?"),
        ({"model": {"name": "gpt3"}}, "unknown model 'gpt3': did you mean gpt3-175b"),
        ({}, "has no [model] table"),
        ({"model": "gpt2"}, "model must be a table"),
        ({"model": {"layers": 2}}, "model.hidden is missing"),
        ({"model": MODEL, "train": 3}, "train = 3: input should be"),
        ({"model": MODEL, "train": {"steps": 0}}, "train.steps = 0: input should be greater than 0"),
        ({"model": MODEL, "train": {"steps": 1.5}}, "train.steps = 1.5"),
        ({"model": MODEL, "train": {"precision": "fp4"}}, "did you mean nvfp4"),
        ({"model": MODEL, "train": {"qat": "int5"}}, "train.qat = 'int5' is no format that holds weights: did you"),
        ({"model": MODEL, "train": {"qat": "2:4,2:4"}}, "train.qat = '2:4,2:4' names two of a kind"),
        ({"model": MODEL, "train": {"qat": "pruned=0"}}, "such as pruned=50%"),
        (
            {"model": MODEL, "finetune": {"targets": "q_proj"}},
            "finetune.targets = 'q_proj': write a list, [\"q_proj\"]",
        ),
        (
            {
                "model": MODEL | {"bias": False, "moe": {"experts": 4, "experts_per_token": 2}},
                "train": {"precision": "fp8"},
            },
            "does not reach experts yet",
        ),
        ({"model": MODEL | {"heads": 5}}, "use heads = 4 or give head_size"),
        ({"model": MODEL | {"heads": 8, "kv_heads": 3}}, "use kv_heads = 2"),
        ({"model": {"name": "gpt2", "layers": -1}}, "model.layers = -1: input should be greater than 0"),
        ({"model": {"name": "gpt2", "heads": 7}}, "hidden = 768 is not divisible by heads = 7: use heads = 6"),
        ({"model": MODEL | {"positions": "rope", "head_size": 5}}, "even head size"),
        ({"model": MODEL, "train": {"global_batch": 8, "micro_batch": 9}}, "use train.micro_batch = 8"),
        ({"model": MODEL | {"logit_cap": 30.0}, "train": {"loss": "chunked"}}, 'these have a cap: use "full"'),
        (
            {"model": MODEL, "optimizer": {"name": "galore"}},
            "longer than optimizer.rank = 128, and this",
        ),
        ({"model": MODEL, "train": {"sequence": 17}}, "use train.sequence = 16 or a larger model.context"),
    ],
)
def test_every_mistake_has_one_line_that_says_what_to_write(document: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError) as error:
        build_config(document)
    assert message in str(error.value)
    assert "\n" not in str(error.value)


def test_files_that_are_none(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="no config file at"):
        load_config(tmp_path / "nothing.toml")
    with pytest.raises(UserError, match="not valid TOML"):
        load_config(write(tmp_path, "[model\n"))
    (tmp_path / "binary.toml").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(UserError, match="not valid TOML"):
        load_config(tmp_path / "binary.toml")


@pytest.mark.parametrize(
    ("override", "section", "key", "value"),
    [
        ("optimizer.lr=3e-4", "optimizer", "lr", 3e-4),
        ("train.steps=7", "train", "steps", 7),
        (" train.steps = 7", "train", "steps", 7),
        ("data.path=./my texts", "data", "path", "./my texts"),
        ('data.path="./quoted"', "data", "path", "./quoted"),
        ("data.path=a=b", "data", "path", "a=b"),
        ("data.path=2024", "data", "path", "2024"),  # a folder of that name
        ("data.path=true", "data", "path", "true"),
        ("data.mock=true", "data", "mock", True),
        ("train.precision=bf16", "train", "precision", "bf16"),
        ("model.tied=false", "model", "tied", False),
        ("evaluation.every=0", "evaluation", "every", 0),
    ],
)
def test_set(tmp_path: Path, override: str, section: str, key: str, value: object) -> None:
    assert getattr(getattr(load_config(write(tmp_path), [override]), section), key) == value


def test_the_last_set_wins(tmp_path: Path) -> None:
    assert load_config(write(tmp_path), ["train.steps=3", "train.steps=4"]).train.steps == 4


@pytest.mark.parametrize("override", ["train.lr", "lr=3", "train.=3", ".lr=3", "a..c=3", "=", ""])
def test_set_of_another_form_is_refused(tmp_path: Path, override: str) -> None:
    with pytest.raises(UserError, match=r"is not section.key=value: write for example --set optimizer.lr=3e-4"):
        load_config(write(tmp_path), [override])


def test_set_of_an_unknown_key_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"unknown key train.stps: did you mean train.steps"):
        load_config(write(tmp_path), ["train.stps=3"])


def test_set_cannot_smuggle_in_other_keys(tmp_path: Path) -> None:
    """The value is one TOML value; text behind it makes it a plain string."""
    with pytest.raises(UserError, match=r"train\.steps"):
        load_config(write(tmp_path), ["train.steps=3\nvalue2 = 4"])


def test_a_named_model_takes_overrides() -> None:
    config = build_config({"model": {"name": "llama3-8b", "layers": 3, "context": 128}}).model
    assert (config.layers, config.context, config.hidden, config.kv_heads) == (3, 128, 4096, 8)
    assert config == ModelConfig.named("llama3-8b", layers=3, context=128)


def test_a_name_of_ones_own_needs_no_catalog() -> None:
    assert build_config({"model": MODEL | {"name": "mine"}}).model.name == "mine"


@pytest.mark.parametrize(
    "document",
    [
        {"model": MODEL},
        {"model": {"name": "gpt2", "layers": 3}},
        {"model": {"name": "llama3-8b"}},
        {"model": {"name": "qwen3-8b", "layers": 1}},
        {"model": {"name": "mistral-7b", "sliding_window": 128}},
        {"model": MODEL, "data": {"path": 'a "quoted" \\ path', "seed": 3}, "train": {"micro_batch": 2, "clip": 0.5}},
        {"model": MODEL, "checkpoint": {"every": 0}, "evaluation": {"batches": 1}},
    ],
)
def test_to_toml_round_trip(tmp_path: Path, document: dict[str, Any]) -> None:
    config = build_config(document)
    path = write(tmp_path, config.to_toml())
    assert load_config(path) == config
    assert load_config(tmp_path) == config  # a run directory stands for its config


def test_a_run_without_clipping_survives_its_own_config(tmp_path: Path) -> None:
    config = build_config({"model": MODEL, "train": {"clip": float("inf")}})
    assert load_config(write(tmp_path, config.to_toml())) == config


def test_derived_figures() -> None:
    config = build_config({"model": MODEL, "train": {"global_batch": 8, "micro_batch": 2, "sequence": 12}})
    assert (config.micro_batch, config.accumulation, config.sequence, config.tokens_per_step) == (2, 4, 12, 96)
    plain = build_config({"model": MODEL, "train": {"global_batch": 8}})
    assert (plain.micro_batch, plain.accumulation, plain.sequence) == (8, 1, 16)


def test_layout_is_a_section_that_may_be_absent() -> None:
    document = {"model": {"name": "gpt2"}}
    assert build_config(document).layout is None
    layout = build_config(document | {"layout": {"tp": 2}}).layout
    assert layout is not None and (layout.tp, layout.dp, layout.zero) == (2, None, 0)
    with pytest.raises(UserError, match=r"unknown key layout\.tpp: .*layout\.tp"):
        build_config(document | {"layout": {"tpp": 2}})


@pytest.mark.parametrize("table", [{"finetune": {"rank": 4}}, {"objective": {"temperature": 3.0}}], ids=str)
def test_keys_that_nothing_reads_are_refused(tiny_config: Callable[..., RunConfig], table: dict[str, Any]) -> None:
    with pytest.raises(UserError, match=rf"\[{next(iter(table))}\] are for .* or leave them out"):
        tiny_config(**table)


@pytest.mark.parametrize(
    ("tables", "words"),
    [
        ({"schedule": {"step_every": 9}},
         'schedule.step_every = 9 is not used: it belongs to schedule.kind = "step", not "cosine"'),
        ({"optimizer": {"name": "sgd", "beta2": 0.9}}, "beta2 = 0.9 is not used: it belongs to optimizer.name"),
        ({"communication": {"outer_lr": 0.5}}, "it belongs to communication.local_steps, which is not set"),
        ({"finetune": {"method": "none", "rank": 4}},
         'finetune.rank = 4 is not used: it belongs to finetune.method = "lora", "qlora"'),
        ({"data": {"end_of_text": "</s>"}}, "data.end_of_text = '</s>' is not used: it belongs to data.tokenizer"),
        ({"layout": {"shard": 2}}, "layout.shard = 2 is not used: it belongs to layout.zero, which is not set"),
    ],
)  # fmt: skip
def test_a_given_key_that_nothing_reads_is_named(
    tiny_config: Callable[..., RunConfig], tables: dict[str, Any], words: str, tmp_path: Path
) -> None:
    config = tiny_config(**tables)
    (line,) = config.unused_keys()
    assert words in line and "\n" not in line
    assert load_config(write(tmp_path, config.to_toml())).unused_keys() == [line]  # also lists all defaults


def test_keys_that_are_read_are_not_named(tiny_config: Callable[..., RunConfig]) -> None:
    assert tiny_config().unused_keys() == []
    given = tiny_config(schedule={"kind": "step", "step_every": 9}, layout={"pp": 2, "schedule": "gpipe"})
    assert given.unused_keys() == []


def test_the_keys_of_a_choice_exist() -> None:
    for choice, values, keys in USED_WITH:
        section, *names = keys.replace(":", "").split()
        for key in (choice, *(f"{section}.{name}" for name in names)):
            table, _, name = key.partition(".")
            annotation = RunConfig.model_fields[table].annotation
            kind = next(one for one in (annotation, *get_args(annotation)) if hasattr(one, "model_fields"))
            assert name in kind.model_fields, key
            if key == choice and get_args(kind.model_fields[name].annotation):
                assert set(values) <= set(get_args(kind.model_fields[name].annotation)), key
