"""How quick the data room is: tokenising against the library called directly, the loader against what a run consumes.

    python benchmarks/data_speed.py --write benchmarks/results/data_speed.md

Preparation (read, split, tokenise, write, checksum, baseline) of Python sources of this installation as JSONL, against
`tokenizers` called directly on the same texts on all cores, which reads, converts and writes nothing; interleaved,
medians. Then the demo's loader alone, and a short run of the demo for what it consumes and how long a step waits.
Close everything else first. Run in a process that is `__main__`: preparation starts workers.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import platform
import shutil
import statistics
import sysconfig
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import tokenizers

from ironlaw import __version__
from ironlaw.config import load_config
from ironlaw.data import tokenizer as own
from ironlaw.data.config import DataConfig
from ironlaw.data.loader import Loader, Prefetcher
from ironlaw.data.prepare import prepare

DEMO = Path(__file__).parents[1] / "examples" / "gpt-tiny.toml"
VOCAB = 32_000


def texts_of(size: int) -> list[str]:
    """About `size` bytes of the Python sources that are installed here, the larger part of packages."""
    texts, held = [], 0
    for file in sorted(Path(sysconfig.get_path("purelib")).rglob("*.py")):
        try:
            text = file.read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError):
            continue
        if text.strip() and "\0" not in text:
            texts.append(text)
            held += len(text)
        if held >= size:
            break
    return texts


def directly(file: Path, texts: list[str]) -> int:
    """The library on all cores: batches large enough for them, ids counted and nothing else."""
    os.environ["TOKENIZERS_PARALLELISM"] = "true"
    tokenizer = tokenizers.Tokenizer.from_file(str(file))
    total = 0
    for first in range(0, len(texts), 1024):
        encodings = tokenizer.encode_batch_fast(texts[first : first + 1024], add_special_tokens=False)
        total += sum(len(encoding) for encoding in encodings)
    return total


def prepared(file: Path, source: Path, cache: Path) -> int:
    shutil.rmtree(cache, ignore_errors=True)
    config = DataConfig(path=str(source), tokenizer=str(file), cache=str(cache))
    dataset = prepare(config, VOCAB)
    return len(dataset.train.tokens) + len(dataset.validation.tokens)


def rate(function: Callable[[], int]) -> float:
    start = time.perf_counter()
    tokens = function()
    return tokens / (time.perf_counter() - start)


def tokenising(folder: Path, megabytes: int, rounds: int) -> list[str]:
    texts = texts_of(megabytes * 10**6)
    source = folder / "texts.jsonl"
    source.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts), encoding="utf-8")
    file = folder / "tokenizer.json"
    own.train(texts[:: max(1, len(texts) // 1000)], VOCAB, file)
    pairs = []
    for number in range(rounds):  # in turns first, as a machine that slows down would favour whoever is
        if number % 2:
            second, first = rate(lambda: prepared(file, source, folder / "cache")), rate(lambda: directly(file, texts))
            pairs.append((first, second))
        else:
            pairs.append((rate(lambda: directly(file, texts)), rate(lambda: prepared(file, source, folder / "cache"))))
    direct, ours = (statistics.median(values) for values in zip(*pairs, strict=True))
    ratio = statistics.median(b / a for a, b in pairs)
    return [
        f"| `tokenizers` directly | {direct / 1e6:.3f} | 1 |",
        f"| `ironlaw data prepare`, all of it | {ours / 1e6:.3f} | {ratio:.3f} |",
        "",
        f"{len(texts):,} documents, {source.stat().st_size / 1e6:.0f} MB of JSONL, BPE of {VOCAB:,} entries, "
        f"medians of {rounds} interleaved rounds (single ratios {', '.join(f'{b / a:.3f}' for a, b in pairs)}).",
    ]


def loader_rate(packing: str, masked: bool, processes: int = 0) -> tuple[float, dict[str, float]]:
    """Tokens per second that the demo's loader delivers when nobody slows it, and what each stage could."""
    config = load_config(DEMO)
    data = config.data.model_copy(update={"packing": packing, "mask_documents": masked, "loader_processes": processes})
    loader = Loader(prepare(data, config.model.vocab), data, config.sequence)
    steps = 4000
    with Prefetcher(loader.training(config.train.global_batch, 0), range(steps), data.prefetch) as ahead:
        next(ahead)
        start = time.perf_counter()
        for _ in ahead:
            pass
        tokens = (steps - 1) * config.tokens_per_step
        return tokens / (time.perf_counter() - start), ahead.facts()["stage_tokens_per_second"]


def demo(folder: Path, steps: int, mock: bool) -> tuple[float, float, float]:
    """Tokens per second of the demo, the seconds that a step waits for its batch, and the seconds of a step."""
    from ironlaw.machine.keep import this_machine
    from ironlaw.train.session import run_training

    overrides = [f"train.steps={steps}", "evaluation.every=0", "evaluation.batches=1", "train.profile_steps=0"]
    config = load_config(DEMO, [*overrides, f"data.mock={str(mock).lower()}", "checkpoint.every=0"])
    ledger = run_training(config, folder / f"run-{mock}", this_machine()).ledger
    step = ledger.totals["step_seconds"].value
    lines = (folder / f"run-{mock}" / "metrics.jsonl").read_text().splitlines()[10:]
    wait = statistics.median(json.loads(line).get("data_seconds", 0.0) for line in lines)
    return config.tokens_per_step / step, wait, step


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--write", type=Path)
    parser.add_argument("--megabytes", type=int, default=40)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=120)
    parser.add_argument("--part", choices=("all", "tokenise", "loader"), default="all")
    arguments = parser.parse_args()
    cores = len(os.sched_getaffinity(0))
    lines = [
        "# Speed of the data room",
        "",
        f"`python benchmarks/data_speed.py`, {datetime.date.today()}, {platform.processor() or platform.machine()}, "
        f"{cores} cores, Python {platform.python_version()}, tokenizers {tokenizers.__version__}, "
        f"Ironlaw {__version__}.",
    ]
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        if arguments.part in ("all", "tokenise"):
            lines += ["", "## Tokenising", "", "| | million tokens/s | of direct |", "|---|---|---|"]
            lines += tokenising(folder, arguments.megabytes, arguments.rounds)
        if arguments.part in ("all", "loader"):
            lines += ["", "## Loading", ""]
            consumed, wait, step = demo(folder, arguments.steps, mock=False)
            _, mock_wait, mock_step = demo(folder, arguments.steps, mock=True)
            lines += ["| batches | million tokens/s | times the demo | slowest stage |", "|---|---|---|---|"]
            for packing, masked, processes in (("concat", False, 0), ("concat", True, 0), ("best_fit", True, 0)):
                delivered, stages = loader_rate(packing, masked, processes)
                what = f"{packing}{', documents said' if masked else ''}"
                slowest = min(stages, key=lambda stage: stages[stage])
                lines.append(
                    f"| {what} | {delivered / 1e6:.1f} | {delivered / consumed:,.0f} | "
                    f"{slowest}, {stages[slowest] / 1e6:.1f} |"
                )
            lines += [
                "",
                f"The demo ({DEMO.name}, {arguments.steps} steps) consumes {consumed:,.0f} tokens/s. A step takes "
                f"{1e3 * step:.2f} ms and waits {1e6 * wait:.0f} us for its batch ({100 * wait / step:.3f}%); with "
                f"`data.mock = true` {1e3 * mock_step:.2f} ms and {1e6 * mock_wait:.0f} us.",
            ]
    text = "\n".join(lines) + "\n"
    print(text)
    if arguments.write:
        arguments.write.write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
