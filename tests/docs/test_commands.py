"""Every command of the README and the site runs, and what they quote is what is printed or was recorded."""

from __future__ import annotations

import itertools
import json
import re
import runpy
import shlex
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from ironlaw.cli.main import EXAMPLES

from ..conftest import environment
from .conftest import environment_with
from .test_names import config_keys, options_of

ROOT = Path(__file__).parents[2]
Here = Callable[..., tuple[int, str, str]]
_QUOTES = runpy.run_path(str(ROOT / "scripts" / "quotes.py"))
PAGES, blocks, quoted, missing, recorded, is_everywhere_the_same = (
    _QUOTES[name] for name in ("PAGES", "blocks", "quoted", "missing", "recorded", "is_everywhere_the_same")
)


def grouped(same: bool) -> list[tuple[str, list[tuple[Path, tuple[str, ...]]]]]:
    """command -> (page, quoted lines), so that each command runs once."""
    chosen = sorted((c, (page, lines)) for page, c, lines in quoted() if is_everywhere_the_same(c) == same)
    return [(c, [where for _, where in group]) for c, group in itertools.groupby(chosen, key=lambda pair: pair[0])]


@pytest.mark.parametrize(("command", "places"), grouped(same=True), ids=lambda v: v if isinstance(v, str) else "")
def test_what_is_quoted_is_printed(command: str, places: Any, ironlaw_here: Here) -> None:
    code, output, messages = ironlaw_here(*shlex.split(command)[1:])
    assert code in (0, 1), messages
    for page, lines in places:
        assert not missing(lines, output), f"{page}: `{command}` prints otherwise:\n{output}"


@pytest.mark.parametrize(("command", "places"), grouped(same=False), ids=lambda v: v if isinstance(v, str) else "")
def test_what_is_quoted_was_recorded(command: str, places: Any) -> None:
    """Of this machine: benchmarks/results/demo.txt."""
    section = recorded(command)
    for page, lines in places:
        assert section and not missing(lines, section), (
            f"{page}: `{command}`: not in the recording: {missing(lines, section)}"
        )


# Commands without quoted output: in `sh` blocks, and in backticks of the README and the home page; for maintainers,
# indented, with `[OPTIONS]` and names of the reader's.


def commands(pages: Sequence[Path] = tuple(PAGES)) -> list[str]:
    found = [line for page, text in blocks("sh") if page in pages for line in text.splitlines() if line.strip()]
    for page in set(PAGES[:2]) & set(pages):
        found += re.findall(r"`(ironlaw \w+[^`]*)`", page.read_text("utf-8"))
    return sorted({command.split("   #")[0].strip() for command in found})


def sketched() -> set[str]:
    found = (re.findall(r"^    (?:ironlaw|torchrun) .+", page.read_text("utf-8"), re.M) for page in PAGES[1:])
    return {re.sub(r" +#.*|[\[\]]", "", command).strip() for command in itertools.chain(*found)}


@pytest.mark.parametrize(
    "command", sorted({*commands(), *sketched(), *(f"ironlaw {example}" for example in EXAMPLES.values())})
)
def test_every_command_has_options_that_there_are(command: str) -> None:
    """Its verb and every option's name."""
    words = shlex.split(command)
    words = words[words.index("ironlaw") :] if "ironlaw" in words else words
    from ironlaw.cli.main import VERBS

    assert words[1] in VERBS
    assert set(re.findall(r"--set ([\w.]+)=", command)) <= {*config_keys(), "model.from"}
    for word in words[2:]:
        assert not word.startswith("--") or word.split("=")[0] in options_of(words[1]), word


# What a command needs that a reader has: small ones of a test under the names that are printed.
BEGIN = (
    "ironlaw train examples/gpt-tiny.toml --out runs/demo",
    "ironlaw explain runs/demo",
    "ironlaw train gpt2.toml --out runs/gpt2",
    "ironlaw export runs/gpt2 ./gpt2-hf --to hf",
)
ORDER = ("train", "serve", "bench", "calibrate", "validate", "plan", "compress", "generate", "export", "explain")
# Shorter, or what a placeholder stands for; the rest of a command is run as it is printed.
STANDS_FOR = (
    ("CONFIG", "examples/gpt-tiny.toml"), ("--serve RUN", "--serve runs/demo"),
    ("explain A B", "explain runs/demo runs/larger"),
    ("-per-node 8", "-per-node 2"), ("--requests 100", "--requests 4"), ("--rate 4", "--rate 4 --requests 4"),
    ("ironlaw tune --serve", "ironlaw tune --out runs/tuned-server --serve"),
    ("ironlaw tune ", "ironlaw tune --budget 20s "),
    ("train examples/gpt2.toml", "train examples/gpt2.toml --out runs/texts"),
)  # fmt: skip


@pytest.fixture
def reader(tmp_path: Path, tiny_file: Any, corpus: Path) -> Path:
    """The folder of someone who reads: examples, text, runs measured elsewhere, a trace."""
    import torch

    examples = tmp_path / "examples"
    examples.mkdir()
    shape = {"heads": 4, "context": 256, "positions": "rope"}  # of the example's family
    config = tiny_file(model=shape, train={"profile_steps": 2}).read_text("utf-8")
    (examples / "gpt-tiny.toml").write_text(config, encoding="utf-8")
    learned = tiny_file(model={"positions": "learned"}).read_text("utf-8")
    for name in ("gpt2.toml", "examples/gpt2.toml"):
        (tmp_path / name).write_text(learned, encoding="utf-8")
    (examples / "finetune.toml").write_text("[model]\n\n[data]" + config.partition("[data]")[2], encoding="utf-8")
    (tmp_path / "my_texts").symlink_to(corpus)
    page = (ROOT / "docs" / "howto" / "calibrate.md").read_text("utf-8")
    head, row = re.findall(r"```text\n *(.*)\n *(.*)\n", page)[0]
    rows = [row.replace("a,torchtitan", f"{n},torchtitan").replace("6.9", f"{6.9 + n % 3 / 10}") for n in range(12)]
    for name in ("my_runs.csv", "more_runs.csv", "runs.csv"):
        (tmp_path / name).write_text("\n".join([head, *rows]), encoding="utf-8")
    sizes = {"hidden_size": 512, "num_hidden_layers": 4, "num_attention_heads": 8, "intermediate_size": 1024}
    published = {"model_type": "llama", "vocab_size": 32000, "max_position_embeddings": 2048} | sizes
    (tmp_path / "config.json").write_text(json.dumps(published), encoding="utf-8")
    with torch.profiler.profile() as profiled:
        for _ in range(4):
            with torch.profiler.record_function("ProfilerStep#1"):
                torch.randn(64, 64) @ torch.randn(64, 64)
    profiled.export_chrome_trace(str(tmp_path / "trace.json"))
    return tmp_path


@pytest.fixture
def run(ironlaw_here: Here) -> Callable[..., tuple[int, str]]:
    """A verb's exit status and messages."""
    pytest.importorskip("uvicorn")

    def verb(*words: str) -> tuple[int, str]:
        code, _, messages = ironlaw_here(*words)
        return code, messages

    return verb


def begin_with(run: Callable[..., tuple[int, str]], *more: str) -> None:
    """What later commands rest on."""
    for command in (*BEGIN, *more):
        assert run(*shlex.split(command)[1:])[0] == 0


@pytest.mark.slow
def test_commands_run_as_printed(reader: Path, ironlaw_here: Here) -> None:
    """The first ones, and those that only look. All of them: the next test, with `-m long`."""
    looks = [c for c in commands() if c.split()[1] in ("catalog", "doctor", "launch", "compress", "generate")]
    for command in [*BEGIN[:2], *(c for c in looks if "CONFIG" not in c and "gptq" not in c and "demo-" not in c)]:
        code, _, messages = ironlaw_here(*shlex.split(command)[1:])
        assert code == 0, f"{command}: {messages}"


def follow(chosen: list[str], run: Callable[..., tuple[int, str]], start: Callable[..., Any], python: Path) -> None:
    """One after another, as a reader would; none is left out."""
    url, failed = "", []
    for command in sorted(chosen, key=lambda c: ORDER.index(c.split()[1]) if c.split()[1] in ORDER else -1):
        for printed, short in STANDS_FOR:
            command = command.replace(printed, short)
        words = shlex.split(command)
        if words[:2] == ["ironlaw", "serve"]:
            server = start(*words[1:], "--port", "0", "--json")
            url = json.loads(server.stdout.readline())["url"]
        elif words[0] == "torchrun":
            ranks = [python, "-m", "torch.distributed.run", *words[1:]]
            done = subprocess.run(ranks, env=environment(), capture_output=True, text=True, timeout=200)
            failed += [(command, done.stderr)] * bool(done.returncode)
        else:
            code, messages = run(*[w.replace("http://127.0.0.1:8000", url) for w in words[1:]])
            failed += [(command, messages)] * (code not in ((0, 1) if words[1] == "plan" else (0,)))
    assert not failed


@pytest.mark.long
@pytest.mark.timeout(1200)
def test_every_command_runs_as_printed(reader: Path, run: Any, start_ironlaw: Any) -> None:
    begin_with(run)
    follow([c for c in commands() if c not in BEGIN], run, start_ironlaw, Path(sys.executable))


# What placeholders and the reader's own files are on the pages for maintainers.
OWN = (
    ("./hf-model", "./mine-hf"), ("=DIR", "=./mine-hf"), ("runs/NAME", "runs/lora"), ("runs/big", "runs/demo"),
    (" --submit", ""), ("-node 8", "-node 2"), ("-node 4", "-node 2"), ("dp=2 pp=2", "dp=2"), ("0min", "0s"),
    ("5min", "5s"), ("--requests 200", "--requests 4"), ("out/ --to gguf", "gguf/ --to gguf"),
    ("out/ --to hf", "codes/ --to hf"), ("kind=dpo", "kind=dpo --out runs/dpo"),
    ("--from ENGINE", "--from torchtitan"), ("trace.json.gz", "trace.json"), ("inference.csv", "served.csv"),
    ("CONFIG --set model.from=./mine-hf --set f", "whole.toml --out runs/lora --set model.from=./mine-hf --set f"),
    ("ironlaw tune --serve", "ironlaw tune --out runs/tuned-server --serve"),
    ("corpus/ --out runs/small", "corpus/ --out runs/fewer-bits"), ("runs/mine ./mine-hf", "runs/demo ./mine-bf16"),
    ("CONFIG --set model.from=./mine-hf", "whole.toml --set model.from=./mine-hf"),
)  # fmt: skip

SERVED = """\
id,group,engine,date,model,accelerator,accelerators,weight_format,scenario,input_tokens,output_tokens,concurrency,output_tokens_per_second
a,mine,vllm,2025-06,llama-3-8b,h100-sxm-80gb,1,bf16,decode,128,128,1,150
"""


@pytest.mark.long
@pytest.mark.timeout(1800)
def test_every_command_for_maintainers_runs(reader: Path, run: Any, start_ironlaw: Any) -> None:
    """Indented on the other pages."""
    for name in ("my", "student"):
        shutil.copy(reader / "examples" / "gpt-tiny.toml", reader / f"{name}.toml")
    whole = re.sub(r"(packing|mask_documents) = .*", "", (reader / "examples" / "finetune.toml").read_text("utf-8"))
    (reader / "whole.toml").write_text(whole)
    (reader / "corpus").symlink_to((reader / "my_texts").resolve())
    turns = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]
    (reader / "talks.jsonl").write_text((json.dumps({"messages": turns}) + "\n") * 200)
    pairs = [json.dumps({"prompt": f"a {number}", "chosen": " b", "rejected": " c"}) for number in range(200)]
    (reader / "pairs.jsonl").write_text("\n".join(pairs))
    (reader / "my_package").mkdir()
    layers = "nn.Conv2d(3, 8, 16, 16), nn.Flatten(), nn.Linear(8 * 14 * 14, 10)"
    module = f"from torch import nn\n\n\ndef build():\n    return nn.Sequential({layers})\n"
    (reader / "my_package" / "models.py").write_text(module)
    (reader / "served.csv").write_text(SERVED)
    begin_with(run, "ironlaw export runs/gpt2 ./mine-hf --to hf")
    (reader / "mine-hf" / "chat_template.jinja").write_text("{% for m in messages %}{{ m.content }}\n{% endfor %}")
    chosen = sketched() - {*BEGIN}
    for printed, own in OWN:
        chosen = {command.replace(printed, own) for command in chosen}
    follow(sorted(chosen), run, start_ironlaw, Path(sys.executable))


@pytest.mark.long
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("source", ["clone", "wheel"])
def test_a_newcomers_path(source: str, reader: Path, wheel: Path, tmp_path: Path, request: Any) -> None:
    """Every command of README and tutorial, from a fresh clone and from the wheel, on the package's own example."""
    pytest.importorskip("uvicorn")
    if source == "clone":
        subprocess.run(["git", "clone", "-q", ROOT, tmp_path / "clone"], check=True)
    here = environment_with(wheel if source == "wheel" else tmp_path / "clone", tmp_path / "venv")
    env = {key: value for key, value in environment().items() if key != "PYTHONPATH"}
    (reader / "examples" / "gpt-tiny.toml").unlink()

    def begin(*words: str) -> subprocess.Popen[str]:
        print(f"{time.strftime('%T')} ironlaw", *words, flush=True)  # -s: how far it is
        begun = [here / "ironlaw", *words]
        process = subprocess.Popen(
            begun, cwd=reader, env=env, text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE
        )
        request.addfinalizer(process.kill)
        return process

    def run(*words: str) -> tuple[int, str]:
        shorter = "train.steps=24", "schedule.warmup_steps=2", "evaluation.batches=1"
        more = [w for s in shorter for w in ("--set", s)] if "examples/gpt-tiny.toml" in words[1:2] else []
        process = begin(*words, *(more if words[0] == "train" else []))
        messages = "".join(process.communicate(timeout=600))
        return process.returncode, messages

    console = [c for page, c, _ in quoted() if page in (PAGES[0], ROOT / "docs" / "tutorial.md")]
    for command in dict.fromkeys(["ironlaw doctor", "ironlaw measure", *BEGIN, *console]):
        words = shlex.split(command)[1:]
        if words[0] not in ("serve", "bench"):
            code, messages = run(*words)
            assert code == 0, f"{command}: {messages}"
    written = commands((PAGES[0], ROOT / "docs" / "tutorial.md"))
    follow([c for c in written if c not in (*BEGIN, *console)], run, begin, here / "python")


@pytest.mark.slow
def test_python_runs_as_printed(
    tmp_path: Path, tiny_file: Any, user_cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The blocks of the page and of the README, with a small config under the example's name."""
    pytest.importorskip("uvicorn")
    monkeypatch.chdir(tmp_path)
    (tmp_path / "examples").mkdir()
    small = tiny_file(model={"context": 64}, train={"profile_steps": 2}).read_text("utf-8")
    (tmp_path / "examples" / "gpt-tiny.toml").write_text(small, encoding="utf-8")
    page = (ROOT / "docs" / "howto" / "python.md").read_text("utf-8")
    blocks = re.findall(r"```python\n(.*?)```", page, re.S)
    readme = (ROOT / "README.md").read_text("utf-8").partition("## From Python")[2].partition("## ")[0]
    blocks.append(
        "\n".join(line[4:] for line in readme.splitlines() if line.startswith("    ")).replace("first", "second")
    )
    for block in blocks:
        exec(block, {})
    assert (tmp_path / "report.html").is_file() and (tmp_path / "runs" / "second" / "ledger.json").is_file()


def test_a_loop_runs_as_printed(tmp_path: Path, user_cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import torch

    from ironlaw.observe import callbacks

    monkeypatch.chdir(tmp_path)
    loop, attached = re.findall(
        r"```python\n(.*?)```", (ROOT / "docs" / "howto" / "observe.md").read_text("utf-8"), re.S
    )
    model = torch.nn.Linear(4, 2)
    optimizer = torch.optim.SGD(model.parameters())
    exec(loop, {"model": model, "optimizer": optimizer, "loader": [torch.randn(3, 4) for _ in range(8)]})
    assert (tmp_path / "runs" / "mine" / "ledger.json").is_file()
    assert all(hasattr(callbacks, name) for name in re.findall(r"\w+_callback", attached))
