"""What a machine with one GPU shows in under 8 minutes, without a network: `make gpu`.

    make gpu                                    # writes benchmarks/results/gpu-NAME.md and marks docs/gpu-status.md
    python benchmarks/gpu.py --only train       # parts whose names begin so
    python benchmarks/gpu.py --dry --out DIR    # the same path on a CPU with tiny shapes, in seconds

The parts run one after another, the most telling first, each in a process and with a time budget of its own. Every row
is written as soon as it is there: whatever cuts the command off leaves what is done.
"""

from __future__ import annotations

import argparse
import contextlib
import datetime
import importlib.metadata
import importlib.util
import json
import os
import platform
import re
import selectors
import signal
import statistics
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any
from unittest import mock

ROOT = Path(__file__).parents[1]
STATUS = ROOT / "docs" / "gpu-status.md"
NEEDED = ("torch", "pydantic", "typer", "rich", "tokenizers", "safetensors", "tomli_w", "psutil", "jinja2", "pytest")
Row = dict[str, Any]


@dataclass(frozen=True)
class Part:
    title: str
    seconds: float
    about: str


PARTS = {
    "measure": Part("This machine", 60, "`ironlaw measure`: the profile from which the plans below are made."),
    "train-gpt2": Part("Training GPT-2 124M", 60, "16 x 1,024 tokens a step, made-up data, bf16."),
    "train-8b": Part(
        "Training 8B-shaped blocks", 70, "Eight of Llama 3 8B's 32 layers, 1 x 8,192 tokens a step, bf16."
    ),
    "tests": Part("GPU tests", 130, "`pytest -m gpu`: every path of docs/gpu-status.md that has a test."),
    "train-1b": Part("Training Llama 3 1B", 50, "4 x 4,096 tokens a step, bf16."),
    "serve": Part("Serving Llama 3 1B", 50, "The engine alone, random weights: 512 tokens in, 64 out, greedy."),
    "formats": Part(
        "Number formats",
        50,
        "Compiled but for mxfp8. Two 8B-shaped blocks, 1 x 4,096 tokens a step; the loss beside bf16's.",
    ),
}


# What a part measures: a generator of rows, each a flat table of words and numbers with units in their names.


def measure_part(dry: bool) -> Iterator[Row]:
    from ironlaw.data.tokenizer import rate
    from ironlaw.machine.measure import measure
    from ironlaw.machine.profile import load_profile, profile_path, save_profile

    if dry and profile_path().is_file():
        profile = load_profile()
    else:
        profile = measure(budget_seconds=30, tokenizer_rate=None if dry else rate)
        save_profile(profile)
    for precision in profile.matmul:
        yield {"what": f"matrix products, {precision}", "TFLOP/s": profile.matmul_peak(precision) / 1e12}
    yield {"what": "copy, read plus written", "GB/s": profile.copy_bytes_per_second / 1e9}
    yield {"what": "small operation", "µs": profile.small_operation_seconds * 1e6}
    yield {"what": "memory", "GiB": profile.memory_bytes / 2**30}


def train_part(
    name: str, layers: int | None, sequence: int, batch: int, variants: dict[str, dict[str, Any]], dry: bool
) -> Iterator[Row]:
    """Each variant trained beside its plan from the measured profile and, eager, from the catalogue."""
    reference: float | None = None
    for label, train in variants.items():
        try:
            row = trained(name, layers, sequence, batch, train, dry)
        except (Exception, SystemExit) as error:
            yield {"variant": label, "note": f"failed: {type(error).__name__}: {str(error).splitlines()[0][:200]}"}
            continue
        loss = row.pop("loss")
        if reference is None:
            reference = loss
        else:
            row["loss, difference"] = loss - reference
        yield {"variant": label} | row


def trained(name: str, layers: int | None, sequence: int, batch: int, train: dict[str, Any], dry: bool) -> Row:
    import torch

    from ironlaw.config import build_config
    from ironlaw.ledger import Ledger
    from ironlaw.machine.profile import load_profile
    from ironlaw.train.loop import Trainer
    from ironlaw.train.session import run_training

    model: dict[str, Any] = {"name": name} | ({"layers": layers, "context": sequence} if layers else {})
    if dry:
        model = {"name": "tiny", "layers": 1, "hidden": 32, "heads": 2, "vocab": 300, "context": 16}
        sequence, batch = 16, 2
    config = build_config({
        "model": model, "data": {"mock": True},
        "train": {
            "steps": 4 if dry else 16, "global_batch": batch, "sequence": sequence, "profile_steps": 0 if dry else 2,
        } | train,
        "schedule": {"warmup_steps": 2}, "evaluation": {"every": 0, "batches": 1}, "checkpoint": {"every": 0},
    })  # fmt: skip
    ends, losses = [], []

    def watch(entry: dict[str, Any]) -> None:
        ends.append(time.perf_counter())
        losses.append(entry["loss"])

    if torch.cuda.is_available():
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
    # The last checkpoint of 8B-shaped blocks is 30 GB, and nobody resumes from it.
    without = mock.patch.object(Trainer, "_take_checkpoint", lambda *arguments: 0.0)
    with without, tempfile.TemporaryDirectory() as folder:
        outcome = run_training(config, Path(folder) / "run", load_profile(), watch=watch)
        plan = Ledger.load(Path(folder) / "run" / "plan.json").totals
    # From step to step, as a user waits, without the first that compile and warm up; the run's own figures beside it.
    step = statistics.median([after - before for before, after in pairwise(ends)][len(ends) // 3 :])
    run = outcome.ledger.totals
    row: Row = {"step, ms": 1e3 * step, "tokens/s": config.tokens_per_step / step}
    if "mfu" in run:
        row["MFU, %"] = 100 * run["mfu"].value
    row["plan, step"] = f"{100 * (plan['step_seconds'].value / step - 1):+.1f}%"
    for phase, busy, waits in device_phases(outcome.ledger):
        row |= {f"{phase}, ms": 1e3 * busy, f"{phase} waits for the host, ms": 1e3 * waits}
    peak = run["peak_bytes"].value if "peak_bytes" in run else None  # a CPU has none unless steps are recorded
    if peak is not None:
        row |= {"peak, GiB": peak / 2**30, "plan, peak": f"{100 * (plan['peak_bytes'].value / peak - 1):+.1f}%"}
    device = catalogued()
    if device and peak is not None and train.get("compile") == "off" and train["precision"] == "bf16":
        row |= by_catalogue(config, device, step, peak)
    return row | {"loss": losses[-1]}


def device_phases(ledger: Any) -> Iterator[tuple[str, float, float]]:
    """Of each recorded phase the seconds in which the device works, and in which it waits for launches."""
    from ironlaw.ledger import Kind

    for phase in ("forward", "backward", "optimizer"):
        lines = [(line.kind is Kind.HOST, line.seconds or 0.0) for line in ledger.lines if line.phase == phase]
        if lines:
            yield phase, sum(s for host, s in lines if not host), sum(s for host, s in lines if host)


def by_catalogue(config: Any, device: str, step: float, peak: float) -> Row:
    """The plan of somebody who never measured this machine."""
    from ironlaw.plan.request import plan_request
    from ironlaw.plan.request_types import Options

    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "config.toml"
        path.write_text(config.to_toml(), encoding="utf-8")
        options = Options(engine="ironlaw", layout=f"dp=1 micro_batch={config.micro_batch}")
        planned = plan_request(str(path), on=device, options=options).ledger.totals
    seconds, memory = planned["step_seconds"].value, planned["peak_bytes"].value
    return {
        "catalogue, step": f"{100 * (seconds / step - 1):+.1f}%",
        "catalogue, peak": f"{100 * (memory / peak - 1):+.1f}%",
    }  # fmt: skip


def catalogued() -> str | None:
    """This GPU's name in the catalogue: of the same chip, the nearest in memory."""
    import torch

    from ironlaw.catalog.accelerators import accelerator, accelerator_names

    if not torch.cuda.is_available():
        return None
    properties = torch.cuda.get_device_properties(0)
    chip = next((word for word in properties.name.lower().split() if any(c.isdigit() for c in word)), "")
    alike = [name for name in accelerator_names() if chip.split("-")[0] in name.split("-")]

    def unlikeness(name: str) -> tuple[float, bool]:
        bytes_apart = abs(accelerator(name).memory_bytes.value - properties.total_memory)
        return round(bytes_apart / 4e9), ("pcie" in name) != ("pcie" in properties.name.lower())

    return min(alike, key=unlikeness, default=None)


def tests_part(dry: bool) -> None:
    """Each test's outcome as it ends; `docs/gpu-status.md` is marked from these rows."""
    import pytest

    class Reporter:
        def pytest_runtest_logreport(self, report: Any) -> None:
            if report.when == "call" or (report.when == "setup" and report.outcome != "passed"):
                row = {"test": report.nodeid.rpartition("::")[2], "result": report.outcome, "s": report.duration}
                if report.outcome == "failed":
                    row["note"] = str(report.longrepr).strip().splitlines()[-1][:200]
                emit("tests", row)

    chosen = ["-k", "test_a_copy_of_the_state"] if dry else []
    if not dry and importlib.util.find_spec("xdist"):  # one after the other they take twice their time
        chosen = ["-n", str(min(8, os.cpu_count() or 1))]
    arguments = ["-q", "-m", "gpu", "-p", "no:cacheprovider", "--no-header", str(ROOT / "tests" / "gpu"), *chosen]
    with open(os.devnull, "w") as nowhere, contextlib.redirect_stdout(nowhere):
        pytest.main(arguments, plugins=[Reporter()])


def serve_part(dry: bool) -> Iterator[Row]:
    import torch

    from ironlaw.catalog.models import model_figures
    from ironlaw.model.config import ModelConfig
    from ironlaw.model.transformer import Transformer
    from ironlaw.serve.config import ServeConfig
    from ironlaw.serve.engine import Engine
    from ironlaw.serve.loading import prepare
    from ironlaw.serve.request import Request, SamplingParams

    figures = (
        {"layers": 1, "hidden": 32, "heads": 2, "vocab": 300, "context": 64} if dry else model_figures("llama3-1b")
    )
    config = ModelConfig(**({"name": "llama3-1b"} | figures))
    prompt, answer = (8, 4) if dry else (512, 64)
    for weights in ("bf16", "int8"):
        torch.manual_seed(0)
        with torch.device("cuda" if torch.cuda.is_available() else "cpu"):
            model = Transformer(config).eval()  # preparing changes it
        settings = ServeConfig(batch=64, context=prompt + answer + 1, weights=weights, token_budget=2048)
        engine = Engine(prepare(model, settings, "model"), settings)
        engine.generate([[1] * prompt], SamplingParams(max_tokens=2, temperature=0, ignore_eos=True))
        for at_once in (1, 16, 64)[: 1 if dry else 3]:
            prompts = torch.randint(config.vocab, (at_once, prompt)).tolist()
            requests = [Request(p, SamplingParams(max_tokens=answer, temperature=0, ignore_eos=True)) for p in prompts]
            began = time.perf_counter()
            for request in requests:
                request.arrived = time.monotonic()
                engine.submit(request)
            while any(request.finish is None for request in requests):
                engine.step()
            seconds = time.perf_counter() - began
            first = statistics.median(r.first_token - r.arrived for r in requests)
            per_token = statistics.median((r.last_token - r.first_token) / (answer - 1) for r in requests)
            yield {
                "weights": weights, "at once": at_once, "tokens/s": at_once * answer / seconds,
                "first token, ms": 1e3 * first, "per token, ms": 1e3 * per_token,
            }  # fmt: skip
        del engine, model


BF16, EAGER, COMPILED = {"precision": "bf16"}, {"compile": "off"}, {"compile": "on"}


def rows_of(part: str, dry: bool) -> Iterator[Row]:
    both = {"eager": BF16 | EAGER} | ({} if dry else {"compiled": BF16 | COMPILED})
    if part == "measure":
        yield from measure_part(dry)
    elif part == "train-gpt2":
        yield from train_part("gpt2", None, 1024, 16, both, dry)
    elif part == "train-1b":
        yield from train_part("llama3-1b", None, 4096, 4, both, dry)
    elif part == "train-8b":
        yield from train_part("llama3-8b", 8, 8192, 1, both, dry)
    elif part == "tests":
        tests_part(dry)
    elif part == "serve":
        yield from serve_part(dry)
    else:
        names = ("bf16", "fp32") if dry else ("bf16", "fp8", "fp16", "tf32", "mxfp8")
        how = {name: {"precision": name} | (EAGER if dry or name == "mxfp8" else COMPILED) for name in names}
        yield from train_part("llama3-8b", 2, 4096, 1, how, dry)


# Running the parts, each within its budget.


def emit(part: str, row: Row) -> None:
    print(json.dumps({"part": part} | row), file=sys.__stdout__, flush=True)


def run_here(parts: list[str], dry: bool) -> None:
    """In the process that a part was given: a row per line on stdout; whatever fails is a row too."""
    for part in parts:
        try:
            for row in rows_of(part, dry):
                emit(part, row)
        except (Exception, SystemExit) as error:
            traceback.print_exc()
            emit(part, {"note": f"failed: {type(error).__name__}: {(str(error).splitlines() or [''])[0][:200]}"})


def rows_from(parts: list[str], dry: bool, seconds: float) -> Iterator[Row]:
    """Rows of a process of its own, until it ends or its budget does."""
    command = [sys.executable, __file__, "--here", ",".join(parts), *(["--dry"] if dry else [])]
    environment = os.environ | {
        "PYTHONPATH": os.pathsep.join(filter(None, [str(ROOT / "src"), os.getenv("PYTHONPATH")]))
    }
    until = time.monotonic() + seconds
    child = subprocess.Popen(
        command, stdout=subprocess.PIPE, text=True, bufsize=1, env=environment, cwd=ROOT, start_new_session=True
    )
    assert child.stdout is not None
    with selectors.DefaultSelector() as ready:
        ready.register(child.stdout, selectors.EVENT_READ)
        try:
            while ready.select(timeout=max(0.0, until - time.monotonic())):
                line = child.stdout.readline()
                if not line:
                    break
                if line.startswith('{"part"'):
                    yield json.loads(line)
            else:
                yield {"part": parts[-1], "note": f"cut off after {seconds:.0f} s"}
        finally:
            if child.poll() is None and time.monotonic() >= until:
                os.killpg(child.pid, signal.SIGKILL)
            child.wait()
            child.stdout.close()
    if child.returncode and child.returncode != -signal.SIGKILL:
        yield {"part": parts[-1], "note": f"ended with code {child.returncode}"}


# The page that is written.


def cell(value: Any) -> str:
    if isinstance(value, float):
        return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.4g}"
    return str(value).replace("|", "\\|").replace("\n", " ")


def page(head: list[str], results: dict[str, list[Row]], seconds: dict[str, float]) -> str:
    lines = [*head, ""]
    for part, rows in results.items():
        taken = f" {seconds[part]:.0f} s." if part in seconds else ""
        lines += [f"## {PARTS[part].title}", "", PARTS[part].about + taken, ""]
        columns = list(dict.fromkeys(key for row in rows for key in row))
        if columns:
            lines += ["| " + " | ".join(columns) + " |", "|---" * len(columns) + "|"]
            lines += ["| " + " | ".join(cell(row.get(column, "")) for column in columns) + " |" for row in rows]
        lines.append("")
    return "\n".join(lines)


def marked(status: str, tests: list[Row], stamp: str) -> str:
    """The table of docs/gpu-status.md with the date beside every path whose tests ran, and those that failed."""
    lines = []
    for line in status.splitlines():
        cells = line.split(" | ")
        if line.startswith("| `") and len(cells) == 4:
            named = re.findall(r"`((?:test_|part )[\w-]+(?:\[[^`]*\])?)`", cells[2])
            ran = [t for t in tests if any(t["test"] == n or t["test"].split("[")[0] == n for n in named)]
            ran = [t for t in ran if t["result"] != "skipped"]
            failed = sorted({t["test"] for t in ran if t["result"] == "failed"})
            if ran:
                verdict = "failed: " + ", ".join(f"`{name}`" for name in failed) if failed else "passed"
                cells[3] = f"{stamp}: {verdict} |"
        lines.append(" | ".join(cells))
    return "\n".join(lines) + "\n"


def device_name(dry: bool) -> str:
    if dry:
        return "dry"
    import torch

    if not torch.cuda.is_available():
        sys.exit("PyTorch sees no GPU here: `python benchmarks/gpu.py --dry --out DIR` goes the same path on a CPU")
    return torch.cuda.get_device_name(0)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--dry", action="store_true", help="tiny shapes on a CPU, in one process")
    parser.add_argument("--only", default="", help="parts whose names begin so, separated by commas")
    parser.add_argument("--out", type=Path, default=ROOT / "benchmarks" / "results")
    parser.add_argument("--here", help=argparse.SUPPRESS)
    chosen = parser.parse_args()
    if chosen.here:
        run_here(chosen.here.split(","), chosen.dry)
        return
    missing = [name for name in NEEDED if importlib.util.find_spec(name) is None]
    if missing:
        sys.exit(f"not installed: {', '.join(missing)}; `make gpu` installs nothing, because it needs no network")
    name = device_name(chosen.dry)
    parts = [part for part in PARTS if any(part.startswith(prefix) for prefix in chosen.only.split(","))]
    versions = f"torch {importlib.metadata.version('torch')}, Python {platform.python_version()}"
    date = datetime.date.today().isoformat()
    head = [
        f"# {name}",
        "",
        f"Written by `make gpu` on {date}, {versions}. A plan's error is (planned - measured) / measured.",
    ]
    if chosen.dry:
        head.append("A dry run: tiny shapes on a CPU. The figures say nothing but that the path works.")
    path = chosen.out / f"gpu-{re.sub(r'[^a-z0-9]+', '-', name.lower().removeprefix('nvidia')).strip('-')}.md"
    path.parent.mkdir(parents=True, exist_ok=True)
    results: dict[str, list[Row]] = {}
    seconds: dict[str, float] = {}
    # A dry run has one process for all parts: what takes its time is importing PyTorch.
    for group in [parts] if chosen.dry else [[part] for part in parts]:
        began = time.monotonic()
        for row in rows_from(group, chosen.dry, sum(PARTS[part].seconds for part in group)):
            part = row.pop("part")
            results.setdefault(part, []).append(row)
            print(part, *(f"{key} {cell(value)}" for key, value in row.items()), sep="  ", flush=True)
            path.write_text(page(head, results, seconds), encoding="utf-8")
        if len(group) == 1:
            seconds[group[0]] = time.monotonic() - began
            path.write_text(page(head, results, seconds), encoding="utf-8")
    tests = [row for row in results.get("tests", []) if "test" in row]
    for part, rows in results.items():
        failed = any("note" in row for row in rows)
        tests.append({"test": f"part {part}", "result": "failed" if failed else "passed"})
    if not chosen.dry:
        STATUS.write_text(marked(STATUS.read_text("utf-8"), tests, f"{date}, {name}"), encoding="utf-8")
    print(f"written: {path}")


if __name__ == "__main__":
    main()
