"""Every figure of the README and the site is in a result file, or follows from what is written beside it."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
RECORDED = (ROOT / "benchmarks" / "results" / "demo.txt").read_text("utf-8")
Here = Callable[..., tuple[int, str, str]]


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
    said = f"{peaks[1].strip()} / {peaks[2].strip()} on 1,055 runs, and {peaks[7].strip()}% of"
    assert said in " ".join(text.split())
    whole = re.search(r"Wall time of the training command.*?total +([\d.]+) s", RECORDED, re.S)
    assert whole is not None and f"{float(whole[1]) / 60:.1f} min, measured | 4.609" in text and "4.609" in RECORDED
    peers = (ROOT / "benchmarks" / "results" / "train_peers.md").read_text("utf-8")
    gains = [float(gain) for gain in re.findall(r"\| ([\d.]+) times ", peers)]
    assert f"trains {min(gains):.1f} to {max(gains):.1f} times nanoGPT's" in " ".join(text.split())


ROW = re.compile(r"^\| ([^|]+) \| ([^|]+) \| ([^|]+) \|$", re.M)
LINK = re.compile(r"\]\(([\w./-]+\.md)")


def test_every_figure_of_the_record_is_in_the_file_beside_it() -> None:
    """Claim, figure, result: each number of the figure, as it stands there, in one of the files of its row."""
    page = ROOT / "docs" / "record" / "index.md"
    rows = [row for row in ROW.findall(page.read_text("utf-8")) if LINK.search(row[2])]
    assert len(rows) > 10
    for claim, figure, result in rows:
        files = [(page.parent / link).resolve() for link in LINK.findall(result)]
        text = " ".join(file.read_text("utf-8") for file in files)
        absent = [n for n in re.findall(r"\d[\d,.]*\d|\d", figure) if not re.search(rf"(?<![\d.]){n}(?![\d])", text)]
        assert not absent, (claim, absent, [file.name for file in files])


# (page, what it says, result file, what the file says)
ACCURACY = "../../docs/accuracy.md"
FIGURES = [
    ("record/index.md", "61.7% median, 56.1% mean", ACCURACY, r"\| 61.7 \| 56.1 \|"),
    ("record/index.md", "6.9% median, 8.9% mean", ACCURACY, r"\| 1198 \| 2.9 \| 4.8 .* 6.9 \| 8.9 "),
    ("record/index.md", "5.8% median, 9.4% mean", ACCURACY, r"\| 1055 \| 5.8 \| 9.4"),
    ("record/index.md", "30 kills, no difference", "soak_ranks.md", r"kills \| 30(.|\n)*None\."),
    ("explanation/intervals.md", "87% of the step times and 76% of the peaks", ACCURACY, r"\| 87 \|(.|\n)*\| 76 \|"),
    ("explanation/ledger.md", "within 0.21%", "closure.md", r"\+0.21%"),
    ("howto/observe.md", "0.15 to 0.35 ms a step", "closure.md", r"0.15 to 0.35 ms a step"),
    ("explanation/parallelism.md", "1% of throughput in the mean and 12% at worst", ACCURACY, r"\| 99.0 \| 88.0"),
    ("explanation/memory.md", "median error is 5.8%", ACCURACY, r"\| 1055 \| 5.8"),
    ("howto/slurm.md", "was killed 30 times", "soak_ranks.md", r"kills \| 30"),
    ("explanation/formats.md", "81.7 ms a step where fp32 takes 119", "demo.txt", r"bf16 81.7 ms,\nfp32 119 ms"),
]  # fmt: skip


@pytest.mark.parametrize(("page", "said", "file", "found"), FIGURES)
def test_figures_of_the_site_are_in_result_files(page: str, said: str, file: str, found: str) -> None:
    assert said in " ".join((ROOT / "docs" / page).read_text("utf-8").split())
    assert re.search(found, (ROOT / "benchmarks" / "results" / file).read_text("utf-8"))


# What is promised, or follows from figures beside it: not measured.
DEFINED = {"80%", "10%", "5%", "0.3%"}
FOR_USERS = [
    ROOT / "docs" / "tutorial.md",
    *(ROOT / "docs" / "howto").glob("*.md"),
    *(ROOT / "docs" / "explanation").glob("*.md"),
]


@pytest.mark.parametrize("page", FOR_USERS, ids=lambda page: page.stem)
def test_no_figure_of_a_page_is_without_a_file(page: Path) -> None:
    """Shares, times and rates in the prose: each is part of a phrase that is compared with its result file above."""
    text = re.sub(r"```.*?```|`[^`]*`", "", page.read_text("utf-8"), flags=re.S)
    text = " ".join(text.split())
    for place, said, _, _ in FIGURES:
        text = text.replace(said, "") if ROOT / "docs" / place == page else text
    figures = re.findall(r"\b\d[\d.,]*(?:%| ?(?:ms|µs|s|h|GB/s|GiB|MiB|tokens/s|times)\b)", text)
    assert set(figures) <= DEFINED, "give each a result file in FIGURES"


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
