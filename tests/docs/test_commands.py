"""Every command of the README and the site runs, and what they quote is what is printed or was recorded."""

from __future__ import annotations

import itertools
import re
import shlex
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]
RECORDED = (ROOT / "benchmarks" / "results" / "demo.txt").read_text("utf-8")
PAGES = [ROOT / "README.md"] + [
    path
    for name in ("index.md", "tutorial.md", "howto/*.md", "explanation/*.md")
    for path in sorted((ROOT / "docs").glob(name))
]
Here = Callable[..., tuple[int, str, str]]


def blocks(language: str) -> Iterator[tuple[str, str]]:
    """(page, text) of every fenced block in a language."""
    for page in PAGES:
        for found in re.findall(rf"^ *```{language}\n(.*?)^ *```", page.read_text("utf-8"), re.S | re.M):
            yield str(page.relative_to(ROOT)), found


def quoted() -> list[tuple[str, str, tuple[str, ...]]]:
    """(page, command, the lines of its output that are quoted)."""
    return [
        (page, shown.split("\n", 1)[0], tuple(line.rstrip() for line in shown.split("\n")[1:] if line.strip()))
        for page, text in blocks("console")
        for shown in text.split("$ ")[1:]
    ]


def is_everywhere_the_same(command: str) -> bool:
    words = command.split()
    return words[1] in ("catalog", "formats") or (words[1] == "plan" and "--on" in words)


def missing(lines: tuple[str, ...], output: str) -> list[str]:
    """Those that do not follow each other in the output; spaces count as one."""
    printed = [" ".join(line.split()) for line in output.splitlines()]
    absent, at = [], 0
    for line in lines:
        wanted = " ".join(line.split())
        if wanted in printed[at:]:
            at = printed.index(wanted, at) + 1
        else:
            absent.append(line)
    return absent


def grouped(same: bool) -> list[tuple[str, list[tuple[str, tuple[str, ...]]]]]:
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
    section = RECORDED.partition(f"$ {command}\n")[2].partition("\n$ ")[0]
    for page, lines in places:
        assert section and not missing(lines, section), (
            f"{page}: `{command}`: not in the recording: {missing(lines, section)}"
        )


# Commands without quoted output: in `sh` blocks, and in backticks of the README and the home page.


def commands() -> list[str]:
    found = [line for _, text in blocks("sh") for line in text.splitlines() if line.strip()]
    for page in PAGES[:2]:
        found += re.findall(r"`(ironlaw \w+[^`]*)`", page.read_text("utf-8"))
    return sorted({command.split("   #")[0].strip() for command in found})


# Not run here: what blocks, takes minutes, or needs what a test has not; where it is run instead.
ELSEWHERE = {
    r"ironlaw serve": "tests/serve, tests/test_api.py",
    r"ironlaw bench": "tests/serve/test_load.py",
    r"ironlaw tune": "tests/explain/test_tune.py",
    r"ironlaw rehearse": "tests/cli, benchmarks",
    r"torchrun": "tests/train/parallel",
    r"ironlaw (calibrate|validate)|.*my-cluster": "tests/plan/test_calibrate.py, tests/plan/test_validate.py",
    r"ironlaw explain (trace.json|runs/load|A B|runs/mine)": "tests/explain, tests/test_api.py",
    r".*(gguf|CONFIG|small hf)": "tests/model/test_gguf.py",
    r".*my_texts": "the same on other text",
    r".*config\.json": "tests/plan/test_request.py",
    r"ironlaw plan examples/finetune": "tests/workload/test_finetune.py",
}


def is_run_here(command: str) -> bool:
    return not any(re.match(pattern, command) for pattern in ELSEWHERE)


@pytest.mark.parametrize("command", commands())
def test_every_command_has_options_that_there_are(command: str) -> None:
    """Its verb and every option's name."""
    words = shlex.split(command)
    words = words[words.index("ironlaw") :] if "ironlaw" in words else words
    import importlib
    import inspect

    from ironlaw.cli.main import VERBS

    assert words[1] in VERBS
    source = inspect.getsource(importlib.import_module(f"ironlaw.cli.{words[1]}"))
    for word in words[2:]:
        if word.startswith("--"):
            name = word[2:].split("=")[0].replace("-", "_")
            assert re.search(rf'"{word.split("=")[0]}"|\b{name}_?: Annotated', source), word


@pytest.mark.slow
def test_commands_run_as_printed(tmp_path: Path, tiny_file: Any, ironlaw_here: Here) -> None:
    """One after another, as a newcomer would, with small configs under the examples' names."""
    (tmp_path / "examples").mkdir()
    config = tiny_file(model={"heads": 4}, train={"profile_steps": 2}).read_text("utf-8")
    (tmp_path / "examples" / "gpt-tiny.toml").write_text(config, encoding="utf-8")
    learned = {"positions": "learned"}
    (tmp_path / "gpt2.toml").write_text(tiny_file(model=learned).read_text("utf-8"), encoding="utf-8")
    tables = config.partition("[data]")
    (tmp_path / "examples" / "finetune.toml").write_text("[model]\n\n[data]" + tables[2], encoding="utf-8")
    before = [
        "ironlaw train examples/gpt-tiny.toml --out runs/demo",
        "ironlaw train gpt2.toml --out runs/gpt2",
        "ironlaw export runs/gpt2 ./gpt2-hf --to hf",
    ]
    order = ("train", "explain", "plan", "launch", "catalog", "compress", "generate", "export")
    written = [command for command in commands() if is_run_here(command) and command not in before]
    assert len(written) > 12
    for command in [
        *before,
        *sorted(written, key=lambda c: order.index(c.split()[1]) if c.split()[1] in order else -1),
    ]:
        code, _, messages = ironlaw_here(*shlex.split(command)[1:])
        assert code == 0, f"{command}: {messages}"


def test_figures_of_the_readme_are_in_result_files() -> None:
    """Numbers of prose and tables; commands' output is tested above."""
    text = re.sub(r"```.*?```", "", (ROOT / "README.md").read_text("utf-8"), flags=re.S)
    accuracy = (ROOT / "docs" / "accuracy.md").read_text("utf-8")
    lines = accuracy.partition("## Peak memory")[0].splitlines()
    times = {line.split("|")[1].strip(" *"): line.split("|") for line in lines if line.startswith("| ")}
    table = {line.split("|")[1].strip(): line for line in text.splitlines() if line.startswith("| ")}
    for row, groups in {
        "10 of Megatron's SC21 table, to 1T parameters on 3,072 A100": ["sc21-table1"],
        "720 small models on one node (vTrain)": ["vtrain-1node-h1024"],
        "41 of 3.6B and 18.4B on 8 to 64 nodes (vTrain)": ["vtrain-GPT-3.6B", "vtrain-GPT-18.4B"],
        "all 1,198": ["all"],
    }.items():
        for group in groups:
            cells = [cell.strip() for cell in times[group]]
            median, mean, unseen, base = cells[3], cells[4], cells[8], (cells[9], cells[10])
            assert f"{median} / {mean}" in table[row] and f"{base[0]} / {base[1]}" in table[row], row
            assert group != "all" or (f"mean is {unseen}" in text and f"{cells[11]}% of the steps" in text)
    peaks = accuracy.partition("## Peak memory")[2].partition("| **all** |")[2].split("|")
    assert f"{peaks[1].strip()} / {peaks[2].strip()} on 1,055 runs" in " ".join(text.split())
    assert "4.606" in RECORDED and "95.9 s" in RECORDED  # the first tier: 1.6 minutes
    peers = (ROOT / "benchmarks" / "results" / "train_peers.md").read_text("utf-8")
    gains = [float(gain) for gain in re.findall(r": ([\d.]+) times nanoGPT's best", peers)]
    assert f"trains {min(gains):.1f} to {max(gains):.1f} times nanoGPT's" in " ".join(text.split())


# (page, what it says, result file, what the file says)
ACCURACY = "../../docs/accuracy.md"
FIGURES = [
    ("record/index.md", "7.1% median, 9.0% mean", ACCURACY, r"\| 1198 \| 2.9 \| 4.8 .* 7.1 \| 9.0 "),
    ("record/index.md", "61.7% median, 56.0% mean", ACCURACY, r"\| 61.7 \| 56.0 \|"),
    ("record/index.md", "5.8% median, 9.4% mean", ACCURACY, r"\| 1055 \| 5.8 \| 9.4"),
    ("record/index.md", "99.0% mean, 88.0% worst", ACCURACY, r"\| 99.0 \| 88.0"),
    ("record/index.md", "9.7% median error", "plan_error.md", r"Median error 9.7%"),
    ("record/index.md", "1.47, 1.69 and 1.48 times", "train_peers.md", r"1.47 times(.|\n)*1.69 times(.|\n)*1.48"),
    ("record/index.md", "100 of 100 identical", "soak.md", r"identical to the uninterrupted run \| 100"),
    ("record/index.md", "30 kills, no difference", "soak_ranks.md", r"kills \| 30(.|\n)*None\."),
    ("explanation/intervals.md", "91% of the step times and 74% of the peaks", ACCURACY, r"\| 91 \|(.|\n)*\| 74 \|"),
    ("explanation/ledger.md", "within 0.21%", "closure.md", r"\+0.21%"),
    ("howto/observe.md", "0.15 to 0.35 ms a step", "closure.md", r"0.15 to 0.35 ms a step"),
    ("explanation/parallelism.md", "1% of throughput in the mean and 12% at worst", ACCURACY, r"\| 99.0 \| 88.0"),
    ("explanation/memory.md", "median error is 5.8%", ACCURACY, r"\| 1055 \| 5.8"),
    ("explanation/formats.md", "104 ms a step where fp32 takes 159", "demo.txt", r"bf16 104 ms, fp32\n159 ms"),
]  # fmt: skip


@pytest.mark.parametrize(("page", "said", "file", "found"), FIGURES)
def test_figures_of_the_site_are_in_result_files(page: str, said: str, file: str, found: str) -> None:
    assert said in " ".join((ROOT / "docs" / page).read_text("utf-8").split())
    assert re.search(found, (ROOT / "benchmarks" / "results" / file).read_text("utf-8"))


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


@pytest.mark.parametrize(("device", "hours"), [("rtx-4090", "8.92 h"), ("h100-sxm-80gb", "2.29 h")])
def test_tiers_are_planned_so(device: str, hours: str, ironlaw_here: Here) -> None:
    code, output, _ = ironlaw_here(
        "plan", "examples/gpt2.toml", "--on", device, "--engine", "ironlaw", "--layout", "dp=1 micro_batch=16"
    )
    assert code == 0 and re.search(rf"Total time +{hours}", output), output
    assert f"| {hours}, planned |" in (ROOT / "README.md").read_text("utf-8")


def test_expected_losses_follow_the_law() -> None:
    """Hoffmann et al., arXiv 2203.15556, equation 10, of the parameters and tokens of the README's tiers."""

    def law(parameters: float, tokens: float) -> float:
        return 1.69 + 406.4 * parameters**-0.34 + 410.7 * tokens**-0.28

    text = (ROOT / "README.md").read_text("utf-8")
    assert f"{law(124_439_808, 5000 * 524_288):.1f}, by Chinchilla's law" in text
    assert f"{law(8_030_261_248, 160e9):.1f}, by Chinchilla's law" in text


def test_the_readme_is_short() -> None:
    assert len((ROOT / "README.md").read_text("utf-8").splitlines()) <= 150
