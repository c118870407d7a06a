"""A table of wrong input: one line that says what to write instead, exit code 2, and nothing half-written."""

from __future__ import annotations

import subprocess
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from ironlaw.config import RunConfig, load_config
from ironlaw.machine.profile import Profile, profile_path
from ironlaw.train.session import run_training

Here = Callable[..., tuple[int, str, str]]


@dataclass(frozen=True)
class Bad:
    """`arguments` after which the message must hold every one of `says`. CONFIG and RUN stand for good ones."""

    arguments: list[str]
    says: list[str]
    before: list[Callable[[Path], Any]] = field(default_factory=list)  # what to put into the folder first


def file(name: str, content: str = "") -> Callable[[Path], Any]:
    def write(folder: Path) -> None:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(content, encoding="utf-8")

    return write


def pictures(folder: Path) -> None:
    (folder / "pictures").mkdir()
    (folder / "pictures" / "a.png").write_bytes(b"\x89PNG\0\0\0")


NEW = ["--out", "new"]
NOBODY = "http://127.0.0.1:9"  # the port of the discard service, where nothing listens
TABLE = {
    "unknown key": Bad(["plan", "bad.toml"], ["unknown key train.lerning_rate"],
                       [file("bad.toml", '[model]\nname = "gpt2"\n[train]\nlerning_rate = 1\n')]),
    "unknown key, misspelt": Bad(["train", "CONFIG", *NEW, "--set", "train.stesp=3"],
                                 ["unknown key train.stesp", "did you mean train.steps"]),
    "unknown section": Bad(["train", "CONFIG", *NEW, "--set", "trian.steps=3"],
                           ["unknown section trian", "did you mean train"]),
    "unknown accelerator": Bad(["plan", "CONFIG", "--on", "hx100"], ["hx100", "did you mean"]),
    "unknown model": Bad(["plan", "bad.toml"], ["unknown model 'lama3-8b'", "did you mean llama3-8b"],
                         [file("bad.toml", '[model]\nname = "lama3-8b"\n')]),
    "missing config": Bad(["plan", "nothing.toml"], ["no config file at nothing.toml", "examples/gpt-tiny.toml"]),
    "missing config to train": Bad(["train", "nothing.toml", *NEW], ["no config file at nothing.toml"]),
    "invalid TOML": Bad(["plan", "bad.toml"], ["bad.toml is not valid TOML"], [file("bad.toml", "[model\n")]),
    "config without a model": Bad(["plan", "bad.toml"], ["no [model] table", 'name = "gpt2"'], [file("bad.toml")]),
    "config that is a folder": Bad(["plan", "empty"], ["no config at empty"],
                                [lambda folder: (folder / "empty").mkdir()]),
    "set without equals": Bad(["train", "CONFIG", *NEW, "--set", "train.steps"], ["--set optimizer.lr=3e-4"]),
    "set without section": Bad(["plan", "CONFIG", "--set", "steps=3"], ["--set optimizer.lr=3e-4"]),
    "a number that is none": Bad(["train", "CONFIG", *NEW, "--set", "train.steps=many"], ["train.steps = 'many'"]),
    "a number that fp32 lacks": Bad(["train", "CONFIG", *NEW, "--set", "model.logit_cap=1e308"], ["logit_cap", "fp32"]),
    "a key beside one that is missing": Bad(
        ["train", "CONFIG", *NEW, "--set", "model.moe.every=x"], ["moe.every = 'x'"]),
    "a budget that is no size": Bad(
        ["plan", "CONFIG", "--set", "recompute.budget=x"], ["recompute.budget: 'x'", "20GiB"]),
    "a host that no name can be": Bad(["serve", "RUN", "--host", "\u202e"], ["cannot listen on", "another serve.host"]),
    "a host with a label too long": Bad(["serve", "RUN", "--host", "x" * 70 + ".y"], ["cannot listen on"]),
    "heads": Bad(["train", "CONFIG", *NEW, "--set", "model.heads=5"], ["heads = 5", "use heads = 4"]),
    "key/value heads": Bad(["plan", "CONFIG", "--set", "model.kv_heads=3"], ["use kv_heads = 2"]),
    "micro-batch": Bad(["train", "CONFIG", *NEW, "--set", "train.micro_batch=9"], ["use train.micro_batch = 8"]),
    "sequence": Bad(["train", "CONFIG", *NEW, "--set", "train.sequence=99"], ["use train.sequence = 16"]),
    "threads that were not measured": Bad(["train", "CONFIG", *NEW, "--set", "train.threads=64"],
                                          ["train.threads = 64", "ironlaw measure --threads 64"]),
    "vocabulary": Bad(["train", "CONFIG", *NEW, "--set", "model.vocab=100"], ["model.vocab = 100", "257"]),
    "path that is not there": Bad(["train", "CONFIG", *NEW, "--set", "data.path=./nowhere"],
                                  ['data.path = "./nowhere" does not exist', "stdlib"]),
    "path with no text": Bad(["train", "CONFIG", *NEW, "--set", "data.path=./pictures"],
                             ["has no text", "1 binary", "UTF-8"], [pictures]),
    "path that is empty": Bad(["train", "CONFIG", *NEW, "--set", "data.path=./empty"], ["has no text", "it is empty"],
                              [lambda folder: (folder / "empty").mkdir()]),
    "corpus smaller than a batch": Bad(["train", "CONFIG", *NEW, "--set", "data.path=./small"],
                                       ["one batch of 8", "train.global_batch"],
                                       [file("small/a.txt", "a few words\n"), file("small/b.txt", "and more\n")]),
    "validation text too short": Bad(["train", "CONFIG", *NEW, "--set", "data.path=./lopsided"],
                                     ["validation text", "data.validation_fraction"],
                                     [file("lopsided/a.txt", "many words here " * 900 + "\nend")]),
    "tokenizer that is none": Bad(["train", "CONFIG", *NEW, "--set", "data.tokenizer=bad.json"],
                                  ["bad.json is not a Hugging Face tokenizer.json"], [file("bad.json", "{}")]),
    "model too large": Bad(["train", "CONFIG", *NEW, "--set", "model.hidden=65536"], ["does not fit", "micro_batch"]),
    "run that exists": Bad(["train", "CONFIG", "--out", "RUN"], ["exists", "--resume", "another --out"]),
    "out that is a file": Bad(["train", "CONFIG", "--out", "file"], ["file is a file", "--out"], [file("file", "x")]),
    "out below a file": Bad(["train", "CONFIG", "--out", "file/run"], ["--out"], [file("file", "x")]),
    "resume without out": Bad(["train", "CONFIG", "--resume"], ["--resume needs --out"]),
    "resume into something else": Bad(["train", "CONFIG", "--out", "other", "--resume"], ["no run", "new directory"],
                                      [file("other/thesis.txt", "mine")]),
    "checkpoint of another model": Bad(["train", "CONFIG", "--out", "RUN", "--resume", "--set", "model.layers=3"],
                                       ["another model", "--out"]),
    "explain no run": Bad(["explain", "folder"], ["not a run", "ironlaw train"], [file("folder/a.txt", "x")]),
    "explain nothing": Bad(["explain", "nothing"], ["no run directory at nothing"]),
    "explain half a run": Bad(["explain", "half"], ["not finished", "--resume"],
                              [file("half/config.toml", '[model]\nname = "gpt2"\n')]),
    "generate from no run": Bad(["generate", "folder"], ["is not a run directory"], [file("folder/a.txt", "x")]),
    "generate without checkpoints": Bad(["generate", "RUN"], ["no intact checkpoint", "train the run first"],
                                        [lambda folder: _empty(folder / "RUN" / "checkpoints")]),
    "layout of several devices": Bad(["train", "CONFIG", *NEW, "--layout", "dp=8"], ["8 devices", "dp=1"]),
    "layout of unknown words": Bad(["train", "CONFIG", *NEW, "--layout", "dq=1"], ["unknown key 'dq'", "did you mean"]),
    "layout without values": Bad(["train", "CONFIG", *NEW, "--layout", "fast please"], ["fast", "key=value"]),
    "layout for this machine": Bad(["plan", "CONFIG", "--layout", "dp=8"], ["--layout is for clusters", "--on"]),
    "a served layout of no devices": Bad(
        ["plan", "gpt2", "--serve", "input=9 output=9 rate=1/s", "--layout", "tp=2"], ["--on 4xh100-sxm-80gb"]),
    "options of two engines": Bad(
        ["plan", "gpt2", "--serve", "input=9 output=9 rate=1/s", "--engine", "sglang", "--emit", "vllm"],
        ["another engine"]),
    "keys of a module": Bad(["plan", "torch.nn:Identity", "--input=x=4", "--set", "train.steps=3"], ["--set is for"]),
    "a load of no seconds": Bad(["bench", NOBODY, "--rate", "1", "--seconds", "0"], ["--seconds", "0.001"]),
    "a load without an end": Bad(["bench", NOBODY, "--rate", "9", "--seconds", "1e9"], ["at most"]),
    "lengths beside a trace": Bad(["bench", NOBODY, "--trace", "t", "--input", "9"], ["--input is for"]),
    "a prefix longer than a trace's prompts": Bad(
        ["bench", NOBODY, "--trace", "t", "--prefix", "9"], ["--prefix 9 leaves nothing"],
        [file("t", '{"timestamp": 0, "input_length": 5, "output_length": 5}')]),
    "a load into a device": Bad(
        ["bench", NOBODY, "--rate", "1", "--out", "/dev/null/x"], ["cannot write to /dev/null/x"]),
    "one format's method for all": Bad(["compress", "x", "--sweep", "--method", "awq"], ["--method is for one format"]),
    "all formats' time for one": Bad(["compress", "x", "--to", "int4", "--budget", "9s"], ["--budget is for all"]),
    "a score that prunes nothing": Bad(["compress", "x", "--to", "int4", "--prune-by", "magnitude"], ["2:4"]),
    "served load of a config": Bad(["tune", "CONFIG", "--input", "16"], ["--input is for --serve: leave it out"]),
}  # fmt: skip


def _empty(folder: Path) -> None:
    for path in folder.iterdir():
        for inner in path.iterdir():
            inner.unlink()
        path.rmdir()


def snapshot(folder: Path) -> dict[str, bytes | None]:
    """Everything below a folder, but for the caches of prepared data, which are the user's to keep."""
    return {
        str(path.relative_to(folder)): path.read_bytes() if path.is_file() else None
        for path in sorted(folder.rglob("*"))
        if path.relative_to(folder).parts[0] not in ("data-cache", "cache", "home")
    }


@pytest.fixture
def good_run(tiny_config: Callable[..., RunConfig], tmp_path: Path, user_cache: Path, machine_profile: Profile) -> None:
    run_training(tiny_config(train={"steps": 2}), tmp_path / "RUN", machine_profile)


@pytest.mark.parametrize("name", TABLE)
def test_bad_input(
    name: str, ironlaw_here: Here, tiny_file: Callable[..., Path], tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    bad = TABLE[name]
    if "RUN" in bad.arguments:
        request.getfixturevalue("good_run")
    config = tiny_file()
    for prepare in bad.before:
        prepare(tmp_path)
    before = snapshot(tmp_path)
    code, output, messages = ironlaw_here(*(str(config) if a == "CONFIG" else a for a in bad.arguments))
    assert code == 2, messages
    assert output == ""
    # Small texts are tokenised before they can turn out to be too small, and that is said.
    lines = [line for line in messages.splitlines() if not line.startswith("Tokenising ")]
    assert len(lines) == 1 and lines[0].startswith("ironlaw: "), messages
    for words in bad.says:
        assert words in lines[0]
    assert snapshot(tmp_path) == before
    prepared = tmp_path / "data-cache"
    torn = [path for path in prepared.iterdir() if path.name.startswith(".")] if prepared.is_dir() else []
    assert torn == [], "half-prepared data"


@pytest.mark.parametrize("arguments", [["plan", "CONFIG"], ["explain", "RUN"]])
def test_a_profile_of_another_version_asks_for_a_measurement(
    ironlaw_here: Here, tiny_file: Callable[..., Path], arguments: list[str], good_run: None
) -> None:
    config = tiny_file()
    profile_path().write_text('{"schema_version": 0}', encoding="utf-8")
    code, _, messages = ironlaw_here(*(str(config) if a == "CONFIG" else a for a in arguments))
    if arguments[0] == "plan":
        assert code == 2 and "run `ironlaw measure` again" in messages
    else:  # only its remedies need the machine
        assert code == 0


def test_plan_without_a_profile_asks_for_a_measurement(ironlaw_here: Here, tiny_file: Callable[..., Path]) -> None:
    profile_path().unlink()
    code, _, messages = ironlaw_here("plan", tiny_file())
    assert (code, len(messages.splitlines())) == (2, 1)
    assert "run `ironlaw measure`" in messages


@pytest.mark.parametrize(
    "arguments", [["plan"], ["plan", "x", "--nonsense"], ["train"], ["nonsense"], ["generate", "x", "--tokens", "-1"]]
)
def test_usage_errors_exit_with_2(ironlaw_here: Here, arguments: list[str]) -> None:
    code, output, messages = ironlaw_here(*arguments)
    assert code == 2 and output == ""
    assert "Traceback" not in messages


@pytest.mark.parametrize("name", ["unknown key", "path that is not there", "explain nothing"])
def test_the_same_through_a_process(
    name: str, ironlaw_process: Callable[..., subprocess.CompletedProcess[str]], tiny_file: Callable[..., Path],
    tmp_path: Path,
) -> None:  # fmt: skip
    bad = TABLE[name]
    config = tiny_file()
    for prepare in bad.before:
        prepare(tmp_path)
    done = ironlaw_process(*(str(config) if a == "CONFIG" else a for a in bad.arguments))
    assert (done.returncode, done.stdout) == (2, "")
    assert len(done.stderr.splitlines()) == 1 and done.stderr.startswith("ironlaw: ")
    assert not (tmp_path / "new").exists()


def test_an_explanation_needs_no_page(ironlaw_here: Here, good_run: None, tmp_path: Path) -> None:
    (tmp_path / "RUN" / "report.html").mkdir()
    code, output, messages = ironlaw_here("explain", "RUN")
    assert code == 0 and "Bottleneck" in output
    assert messages == "No page with charts: RUN/report.html: Is a directory\n"


def test_a_folder_that_may_not_be_written(
    ironlaw_here: Here, tiny_file: Callable[..., Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Permissions do not stop root, so the refusal is played."""
    mkdir = Path.mkdir

    def refuse(self: Path, *arguments: Any, **options: Any) -> None:
        if "new" in self.parts:
            raise PermissionError(13, "Permission denied", str(self))
        mkdir(self, *arguments, **options)

    monkeypatch.setattr(Path, "mkdir", refuse)
    code, _, messages = ironlaw_here("train", tiny_file(), "--out", "new")
    assert code == 2
    assert messages.splitlines()[-1].startswith("ironlaw: cannot write to new: Permission denied; give --out")


def test_the_table_is_about_a_config_that_works(ironlaw_here: Here, tiny_file: Callable[..., Path]) -> None:
    config = tiny_file(train={"steps": 2})
    assert load_config(config).train.steps == 2
    assert ironlaw_here("plan", config)[0] == 0
    assert ironlaw_here("train", config, "--out", "new")[0] == 0
