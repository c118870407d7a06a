"""Does every second and every byte have a name, and what does looking cost?

    python benchmarks/closure.py RUNS --run demo gpt huggingface ranks     # closure: holds beside other programs too
    python benchmarks/closure.py RUNS --overhead --seconds 100             # cost: on an idle machine
    python benchmarks/closure.py RUNS --out FILE                           # reports what is there

Unattributed: the step less its phases. Memory: the categories at the peak against the peak. Cost: the same loop in
segments that are observed and not, in turn; of the observation that is always on, without recorded steps. Once as it
is, where the machine's own noise is larger than a percent, and once with the same modules and parameters grown tiny:
what observing costs does not depend on their size, and shows in steps of milliseconds.
"""

from __future__ import annotations

import argparse
import contextlib
import datetime
import itertools
import json
import os
import platform
import shutil
import statistics
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

CASES = {
    "demo": "`ironlaw train examples/gpt-tiny.toml`, shortened",
    "gpt": "`ironlaw train`, GPT of (12, 768, 512), one sequence",
    "huggingface": "transformers' GPT-2 in a user's own loop, `ironlaw.observe`",
    "ranks": "two ranks, DistributedDataParallel on gloo, `ironlaw.observe`",
}
SKIPPED = 3  # steps of a segment: the first is followed by a probe of the machine
# size of the model -> (width, words, tokens of a sequence), steps of a segment, pairs of segments
SIZES = {"whole": ((256, 4096, 16), 12, 300), "tiny": ((8, 32, 4), 30, 60)}


def train_demo(out: Path) -> None:
    from ironlaw.config import load_config

    example = Path(__file__).parents[1] / "examples/gpt-tiny.toml"
    _train(load_config(example, ["train.steps=60", "data.mock=true", "evaluation.every=30"]), out)


def train_gpt(out: Path) -> None:
    from ironlaw.config import build_config

    model = {"name": "gpt", "layers": 12, "hidden": 768, "heads": 12, "vocab": 8192, "context": 512}
    steps = {"steps": 12, "global_batch": 1, "precision": "fp32", "profile_steps": 3}
    _train(build_config({"model": model, "data": {"mock": True}, "train": steps, "evaluation": {"every": 0}}), out)


def _train(config: Any, out: Path) -> None:
    from ironlaw.machine.profile import load_profile
    from ironlaw.train.session import run_training

    run_training(config, out, load_profile())


def observe_huggingface(out: Path) -> None:
    import torch
    from transformers import GPT2Config, GPT2LMHeadModel

    import ironlaw

    torch.manual_seed(0)
    model = GPT2LMHeadModel(GPT2Config(n_layer=4, n_embd=256, n_head=4, vocab_size=4096, n_positions=128))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    rows = torch.randint(0, 4096, (112, 64))
    loader = torch.utils.data.DataLoader(rows, batch_size=8, shuffle=True)
    with ironlaw.observe(model, optimizer, out=out) as watch:
        for ids in loader:
            loss = model(input_ids=ids, labels=ids).loss
            loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
            watch.log(loss=loss.detach())


def observe_ranks(out: Path) -> None:
    import torch

    import ironlaw

    torch.set_num_threads(1)
    torch.manual_seed(0)
    torch.distributed.init_process_group("gloo")
    model = torch.nn.parallel.DistributedDataParallel(_small_model())
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)
    with ironlaw.observe(model, optimizer, out=out):
        for ids in _batches(30):
            _loss(model, ids).backward()
            optimizer.step()
            optimizer.zero_grad()
    torch.distributed.destroy_process_group()


def _small_model(width: int = 256, words: int = 4096) -> Any:
    import torch
    from torch import nn

    layer = nn.TransformerEncoderLayer(width, 4, 4 * width, 0.0, "gelu", batch_first=True, norm_first=True)
    return nn.Sequential(nn.Embedding(words, width), nn.TransformerEncoder(layer, 4, enable_nested_tensor=False),
                         nn.Linear(width, words)).to(torch.float32)  # fmt: skip


def _batches(count: int, words: int = 4096, tokens: int = 64) -> Any:
    import torch

    rows = torch.randint(0, words, (count * 8, tokens + 1), generator=torch.Generator().manual_seed(1))
    return torch.utils.data.DataLoader(rows, batch_size=8)


def _loss(model: Any, ids: Any) -> Any:
    import torch

    return torch.nn.functional.cross_entropy(model(ids[:, :-1]).flatten(0, 1), ids[:, 1:].flatten())


RUN: dict[str, Callable[[Path], None]] = {
    "demo": train_demo, "gpt": train_gpt, "huggingface": observe_huggingface, "ranks": observe_ranks,
}  # fmt: skip


def run(case: str, out: Path) -> None:
    """In a child of this process, or in two."""
    shutil.rmtree(out, ignore_errors=True)
    out.parent.mkdir(parents=True, exist_ok=True)
    children = []
    for rank in range(2 if case == "ranks" else 1):
        child = os.fork()
        if child == 0:
            code = 1
            try:
                if case == "ranks":
                    os.environ |= {"RANK": str(rank), "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1",
                                   "MASTER_PORT": str(29500 + os.getppid() % 500)}  # fmt: skip
                RUN[case](out)
                code = 0
            finally:
                if code:
                    traceback.print_exc()
                os._exit(code)
        children.append(child)
    codes = [os.waitpid(child, 0)[1] for child in children]
    if any(codes):
        raise SystemExit(f"{case} failed")


def closure(out: Path) -> dict[str, Any] | None:
    from ironlaw.explain.runs import explain_path

    document = explain_path(out).to_json()
    if document["time"]["step"]["measured"] is None:
        return None
    parts = [row["measured"] for row in document["memory"]["components"] if row["measured"] is not None]
    peak, drops = document["memory"]["peak"]["measured"], document["waterfall"]["drops"]
    named = sum(d["seconds"] or 0.0 for d in drops) + (document["waterfall"]["ideal_seconds"] or 0.0)
    return {
        "step": document["time"]["step"]["measured"], "unattributed": document["time"]["unattributed_fraction"],
        "peak": peak, "parts": sum(parts) / peak if peak else None,
        "waterfall": named / document["time"]["step"]["measured"],
        "phases": {row["name"]: row["measured"] for row in document["time"]["phases"] if row["measured"]},
    }  # fmt: skip


def overhead(state: Path, size: str, until: float) -> None:
    """Segments in turn; each adds a line (observed or not, seconds of its median step)."""
    import torch

    import ironlaw

    (width, words, tokens), steps, pairs = SIZES[size]
    torch.manual_seed(0)
    model = _small_model(width, words)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)

    def segment() -> float:
        ends = [time.perf_counter()]
        for ids in _batches(steps, words, tokens):
            _loss(model, ids).backward()
            optimizer.step()
            optimizer.zero_grad()
            ends.append(time.perf_counter())
        return statistics.median(after - before for before, after in itertools.pairwise(ends[SKIPPED:]))

    segment()
    known = json.loads(state.read_text()) if state.is_file() else []
    scratch = state.with_suffix(".run")
    while len(known) < 2 * pairs and time.monotonic() < until:
        for on in (False, True) if len(known) % 4 else (True, False):  # either first: a drift favours neither
            shutil.rmtree(scratch, ignore_errors=True)
            watch = ironlaw.observe(model, optimizer, out=scratch, profile_steps=0, plan=False)
            with watch if on else contextlib.nullcontext():
                known.append([on, segment()])
        state.write_text(json.dumps(known))
    shutil.rmtree(scratch, ignore_errors=True)
    print(f"{size}: {len(known)} segments of {2 * pairs}")


def cost(known: list[list[Any]]) -> tuple[float, float, float, float]:
    """Seconds of a step, of observing it with its standard error, and what segments alike differ by."""
    plain, watched = ([s for on, s in known if on is kind] for kind in (False, True))
    more = [w - p for p, w in zip(plain, watched, strict=True)]
    same = [abs(b - a) for a, b in itertools.pairwise(plain)]
    error = statistics.stdev(more) / len(more) ** 0.5
    return statistics.median(plain), statistics.median(more), error, statistics.median(same)


def costs(folder: Path) -> list[str]:
    """A line per size of the model that was measured."""
    lines, whole = [], None
    for size, ((width, _, tokens), steps, _) in SIZES.items():
        state = folder / f"overhead-{size}.json"
        if not state.is_file():
            continue
        known = json.loads(state.read_text())
        step, more, error, alike = cost(known)
        whole = whole or step
        lines += [
            "",
            f"Cost of `ironlaw.observe`, always on, 4 layers of {width}, {tokens} tokens: {1e6 * more:+.0f} ± "
            f"{1e6 * error:.0f} us of a step of {1e3 * step:.2f} ms ({len(known) // 2} pairs of segments of {steps} "
            f"steps, observed and not in turn; segments alike differ by {1e6 * alike:.0f} us): "
            f"{100 * more / whole:+.2f}% ± {100 * error / whole:.2f}% of a step of {1e3 * whole:.0f} ms.",
        ]
    return lines


def report(folder: Path) -> str:
    import torch

    from ironlaw import __version__
    from ironlaw.cores import usable_cores
    from ironlaw.machine import host

    today = datetime.date.today().isoformat()
    lines = [
        "# Closure", "",
        f"{today}, ironlaw {__version__}, torch {torch.__version__}, python {platform.python_version()}, "
        f"{host.cpu_name()}, {usable_cores()} cores. Made by `python benchmarks/closure.py`.", "",
        "| run | step, ms | unattributed | waterfall / step | peak, MB | categories / peak |",
        "|---|---:|---:|---:|---:|---:|",
    ]  # fmt: skip
    for case, what in CASES.items():
        if not (folder / case / "ledger.json").is_file():
            continue
        r = closure(folder / case)
        if r is None:  # interrupted before a step was timed
            continue
        lines.append(
            f"| {what} | {1e3 * r['step']:.1f} | {100 * r['unattributed']:+.2f}% | {r['waterfall']:.4f} | "
            f"{r['peak'] / 1e6:.0f} | {r['parts']:.4f} |"
        )
    lines += costs(folder)
    return "\n".join([*lines, ""])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--run", nargs="*", default=(), help="of " + ", ".join(CASES))
    parser.add_argument("--overhead", action="store_true")
    parser.add_argument("--seconds", type=float, default=1e9, help="start no more segments after that")
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    options.folder.mkdir(parents=True, exist_ok=True)
    for case in options.run:
        run(case, options.folder / case)
    if options.overhead:
        until = time.monotonic() + options.seconds
        for size in SIZES:
            overhead(options.folder / f"overhead-{size}.json", size, until)
    if not options.run and not options.overhead:
        text = report(options.folder)
        print(text)
        if options.out:
            options.out.write_text(text)


if __name__ == "__main__":
    main()
