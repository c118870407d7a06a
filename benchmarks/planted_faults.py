"""Fourteen defects planted one at a time in a working training script: is the cause named, and the gain foretold?

    python benchmarks/planted_faults.py RUNS --out FILE      # on an idle machine; what is there already stays

Each run is a process of its own, forked from one that has only imported: an ordinary PyTorch loop (a GPT of 4 x 256 on
text, bf16, observed by `ironlaw.observe`), with one defect or none, as often as TURNS says. Named right: the first
cause of `ironlaw explain` is the planted one, in the first run with it. Foretold: what the first remedy promises, as a
share of the step (median of the turns), against the gain measured by the same scripts unobserved (planted_gains.py).
Run `ironlaw measure` before. Two cores take some eleven minutes.
"""

from __future__ import annotations

import argparse
import contextlib
import datetime
import importlib
import itertools
import json
import os
import shutil
import statistics
import time
import traceback
from pathlib import Path
from typing import Any

import planted_gains
import remedies_page

STEPS, BATCH, TOKENS, VOCAB = 24, 16, 64, 4096
LONG = 2048  # tokens, where attention is what matters
# defect -> (rule that names it, stage of the input where the rule has stages)
FAULTS: dict[str, tuple[str, str | None]] = {
    "slow_storage": ("input_bound", "read"),
    "single_thread_tokenizer": ("input_bound", "tokenise"),
    "too_few_workers": ("input_bound", "workers"),
    "item_every_micro_batch": ("sync_points", None),
    "fp32": ("precision", None),
    "unfused_attention": ("attention_unfused", None),
    "unaligned_vocabulary": ("misaligned", None),
    "tiny_batch": ("batch_small", None),
    "checkpoint_every_step": ("checkpoint_frequent", None),
    "evaluation_too_often": ("evaluation_frequent", None),
    "twice_the_threads": ("oversubscribed", None),
    "straggling_rank": ("straggler", None),
    "needless_recomputation": ("recompute_needless", None),
    "sync_inside_accumulation": ("sync_in_accumulation", None),
}
# What the first remedy makes of the script, where that is not the script without the defect.
REMEDIED = {("item_every_micro_batch", "batch"): "plain"}
# The remedy that makes the script without the defect of it: what its promise is graded by.
CURES = {
    "slow_storage": "data", "single_thread_tokenizer": "data", "too_few_workers": "data", "fp32": "precision",
    "unfused_attention": "attention", "tiny_batch": "batch", "item_every_micro_batch": "batch",
    "unaligned_vocabulary": "alignment", "checkpoint_every_step": "checkpoint", "evaluation_too_often": "evaluation",
    "twice_the_threads": "threads", "straggling_rank": "straggler", "needless_recomputation": "recompute",
    "sync_inside_accumulation": "no_sync",
}  # fmt: skip
# What the script without the defect looks like, where it is not the plain one.
BASE_OF = {
    "unaligned_vocabulary": "large_vocabulary", "item_every_micro_batch": "accumulating",
    "tiny_batch": "eightfold_batch", "too_few_workers": "enough_workers", "unfused_attention": "long_sequences",
    "straggling_rank": "two_ranks", "sync_inside_accumulation": "two_ranks_accumulating",
}  # fmt: skip


# -- the training script -----------------------------------------------------------------------------------------


def train(fault: str, out: Path, blocks: Any = None) -> None:
    """Observed into `out`; or, with `blocks`, unobserved: it is asked before every step whether there is another."""
    import torch
    import torch.nn.functional as F
    from torch import nn
    from torch.utils.checkpoint import checkpoint
    from torch.utils.data import DataLoader, Dataset

    import ironlaw
    from ironlaw.cores import usable_cores
    from ironlaw.machine import host

    cores = usable_cores()
    ranks, rank = int(os.environ.get("WORLD_SIZE", 1)), int(os.environ.get("RANK", 0))
    torch.set_num_threads(2 * cores if fault == "twice_the_threads" else max(1, cores // ranks))
    host.keep_freed_memory()
    torch.manual_seed(0)
    vocab = {"unaligned_vocabulary": 16_001, "large_vocabulary": 16_064}.get(fault, VOCAB)
    accumulating = fault in ("item_every_micro_batch", "accumulating", "two_ranks_accumulating",
                             "sync_inside_accumulation")  # fmt: skip
    micro = BATCH // 4 if accumulating else 1 if fault == "tiny_batch" else BATCH
    micro = {"eightfold_batch": 8, "unfused_attention": 1, "long_sequences": 1}.get(fault, micro)
    long = fault in ("unfused_attention", "long_sequences")
    tokens = 16 if fault in ("tiny_batch", "eightfold_batch") else LONG if long else TOKENS
    accumulate = 4 if accumulating else 1

    class Attention(nn.Module):
        def __init__(self, width: int, heads: int) -> None:
            super().__init__()
            self.qkv, self.out, self.heads = nn.Linear(width, 3 * width), nn.Linear(width, width), heads

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            b, s, w = x.shape
            q, k, v = (t.view(b, s, self.heads, -1).transpose(1, 2) for t in self.qkv(x).chunk(3, dim=-1))
            if fault == "unfused_attention":
                scores = torch.matmul(q, k.transpose(-1, -2)) / (w // self.heads) ** 0.5
                hidden = torch.ones(s, s, dtype=torch.bool).triu(1)
                mixed = torch.matmul(torch.softmax(scores.masked_fill(hidden, float("-inf")).float(), -1).to(q), v)
            else:
                mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
            return self.out(mixed.transpose(1, 2).reshape(b, s, w))

    class Block(nn.Module):
        def __init__(self, width: int) -> None:
            super().__init__()
            self.norm1, self.attention, self.norm2 = nn.LayerNorm(width), Attention(width, 4), nn.LayerNorm(width)
            self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            x = x + self.attention(self.norm1(x))
            return x + self.down(F.gelu(self.up(self.norm2(x)), approximate="tanh"))

    class GPT(nn.Module):
        def __init__(self, width: int = 256) -> None:
            super().__init__()
            self.embedding, self.positions = nn.Embedding(vocab, width), nn.Embedding(LONG, width)
            self.blocks = nn.ModuleList(Block(width) for _ in range(4))
            self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, vocab, bias=False)

        def forward(self, ids: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
            x = self.embedding(ids) + self.positions.weight[: ids.shape[1]]
            for block in self.blocks:
                x = checkpoint(block, x, use_reentrant=False) if fault == "needless_recomputation" else block(x)
            return F.cross_entropy(self.head(self.norm(x)).flatten(0, 1).float(), targets.flatten())

    class Text(Dataset[torch.Tensor]):
        """Token ids; or text that is read or tokenised when it is asked for."""

        ids = torch.randint(0, VOCAB, (2048, LONG + 1), generator=torch.Generator().manual_seed(1))
        words = tuple(f"word{n}" for n in range(VOCAB))

        def __init__(self) -> None:
            self.numbers = {word: n for n, word in enumerate(self.words)}

        def __len__(self) -> int:
            return len(self.ids)

        def __getitem__(self, index: int) -> torch.Tensor:
            if fault in ("slow_storage", "too_few_workers", "enough_workers"):
                self.read_slowly()
            if fault == "single_thread_tokenizer":
                return self.tokenize(index)
            return self.ids[index, : tokens + 1]

        def read_slowly(self) -> None:
            time.sleep(0.015)  # what a busy network file system takes

        def tokenize(self, index: int) -> torch.Tensor:
            found = []
            for _ in range(60):
                found = [self.numbers[self.words[n]] for n in self.ids[index, : tokens + 1].tolist()]
                found = [n for word in (self.words[n] for n in found) for n in (self.numbers[word[:4] + word[4:]],)]
            return torch.tensor(found)[: tokens + 1]

    model: Any = GPT()
    if ranks > 1:
        torch.distributed.init_process_group("gloo")
        model = nn.parallel.DistributedDataParallel(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)
    workers = {"too_few_workers": 1, "enough_workers": 4}.get(fault, 0)
    loader = DataLoader(Text(), batch_size=micro, num_workers=workers)
    cast: Any = contextlib.nullcontext() if fault == "fp32" else torch.autocast("cpu", dtype=torch.bfloat16)
    steps = 3 * STEPS if fault == "tiny_batch" else 3 * STEPS // 4 if long else STEPS
    batches, running = iter(loader), 0.0
    observed = blocks is None
    with ironlaw.observe(model, optimizer, out=out) if observed else contextlib.nullcontext() as watch:
        for step in itertools.count():
            if (step == steps) if observed else not blocks.another():
                break
            for number in range(accumulate):
                ids = next(batches, None)
                if ids is None:  # only unobserved runs are longer than the data
                    batches = iter(loader)
                    ids = next(batches)
                if fault == "straggling_rank" and rank == 1:
                    time.sleep(0.05)
                hold = ranks > 1 and number < accumulate - 1 and fault != "sync_inside_accumulation"
                with model.no_sync() if hold else contextlib.nullcontext():
                    with cast:
                        loss = model(ids[:, :-1], ids[:, 1:])
                    loss.backward()
                if fault == "item_every_micro_batch":
                    running += loss.item()
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
            if step % (2 if fault == "evaluation_too_often" else STEPS) == 1:
                model.eval()
                with torch.no_grad(), cast:
                    for _ in range(2):
                        model(ids[:, :-1], ids[:, 1:])
                model.train()
            if fault == "checkpoint_every_step":
                torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, out.with_suffix(".pt"))
            if watch is not None:
                watch.log(loss=loss.detach())
    if ranks > 1:
        torch.distributed.destroy_process_group()


# -- the benchmark -----------------------------------------------------------------------------------------------

TURNS, TRIES = 2, 2
# fault -> steps of a turn, and those not timed, where gains are measured: what recurs every STEPS is in every turn once
BLOCKS = {"evaluation_too_often": (STEPS, 0), "too_few_workers": (STEPS, 9), "tiny_batch": (STEPS, 2)}
RANKED = ("straggling_rank", "sync_inside_accumulation", "two_ranks", "two_ranks_accumulating")


def run(fault: str, out: Path) -> None:
    """In a child of this process, which has imported everything and computed nothing."""
    for module in ("torch._dynamo", "torch.utils.checkpoint", "ironlaw.plan.module", "ironlaw.workload.trace"):
        importlib.import_module(module)

    out.parent.mkdir(parents=True, exist_ok=True)
    ranks = 2 if fault in RANKED else 1
    port = 29500 + time.time_ns() // 1000 % 500
    children = [_child(fault, out, rank, ranks, port) for rank in range(ranks)]
    codes = [os.waitpid(child, 0)[1] for child in children]
    if any(codes):
        raise SystemExit(f"{fault}: failed")


def _child(fault: str, out: Path, rank: int, ranks: int, port: int, blocks: Any = None) -> int:
    child = os.fork()
    if child:
        return child
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    if ranks > 1:
        os.environ |= {
            "RANK": str(rank),
            "WORLD_SIZE": str(ranks),
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(port),
        }
    code = 1
    try:
        train(fault, out, blocks)
        code = 0
    finally:
        if code:
            traceback.print_exc()
        os._exit(code)


def take_turn(fault: str, turn: int, folder: Path) -> None:
    """`folder/FAULT/with-0`, `with-1`, ...; what is there already stays, so that it runs in pieces.

    Beside the first, where the script without the defect is the plain one, a run of that, which has to be called
    healthy. A run beside other programs says nothing, and is repeated.
    """
    wanted = {folder / fault / f"with-{turn}": fault}
    if fault not in BASE_OF and not turn:
        wanted[folder / fault / "without"] = "plain"
    for out, what in wanted.items():
        for _ in range(0 if (out / "ledger.json").is_file() else TRIES):
            shutil.rmtree(out, ignore_errors=True)
            run(what, out)
            if alone(out):
                break


def alone(out: Path) -> bool:
    """Whether no other program used the cores meanwhile; of runs with processes of their own it is not known."""
    facts = json.loads((out / "ledger.json").read_text())["facts"]
    own = facts.get("world_size", 1) > 1 or facts.get("data_workers")
    return bool(own) or (facts.get("other_load") or 0.0) <= 0.10


def measure_gains(fault: str, folder: Path) -> None:
    """`folder/FAULT/gains.json`: seconds of a step with the defect, without, and as the remedy leaves it."""
    file = folder / fault / "gains.json"
    if file.is_file():
        return
    file.parent.mkdir(parents=True, exist_ok=True)
    sides = {"with": fault, "without": BASE_OF.get(fault, "plain")}
    for base in (base for (name, _), base in REMEDIED.items() if name == fault):
        sides["remedied"] = base
    ranks = 2 if fault in RANKED else 1
    ports = {script: 29500 + (time.time_ns() // 1000 + number) % 500 for number, script in enumerate(sides.values())}

    def start(script: str, rank: int, blocks: planted_gains.Blocks) -> int:
        return _child(script, folder / fault / f"gains-{script}", rank, ranks, ports[script], blocks)

    found = planted_gains.in_turns(start, sides, ranks, *BLOCKS.get(fault, (6, 1)), folder / fault)
    file.write_text(json.dumps(found))


def whole_step(out: Path) -> float:
    """Seconds per step with its share of evaluations and checkpoints: what the user waits for."""
    wall = json.loads((out / "ledger.json").read_text())["facts"]["wall_seconds"]
    steps = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    seconds = sorted(step["seconds"] for step in steps[4:] if not step.get("recorded"))
    return float(seconds[len(seconds) // 2] + (wall["evaluation"] + wall["checkpoint"]) / len(steps))


def explain(out: Path) -> dict[str, Any]:
    from ironlaw.explain.runs import explain_path

    return explain_path(out).to_json()


def judge(fault: str, folder: Path) -> dict[str, Any]:
    runs = [folder / f"with-{turn}" for turn in range(TURNS)]
    documents = [explain(run) for run in runs]
    named = [_named(fault, document) for document in documents]
    first, stage = _cause(documents[0])
    remedy = documents[0]["remedies"][0]["name"] if documents[0]["remedies"] else None
    promises = [
        document["remedies"][0]["step_seconds_saved"] / whole_step(run)
        for run, document in zip(runs, documents, strict=True)
        if remedy and document["remedies"] and document["remedies"][0]["name"] == remedy
    ]
    promised = statistics.median(promises) if promises else 0.0
    found = json.loads((folder / "gains.json").read_text())
    cured = found["remedied" if (fault, remedy) in REMEDIED else "without"]
    step, gained, spread = planted_gains.gain(found["with"], cured, 8 if fault == "tiny_batch" else 1)  # per sample
    return {
        "fault": fault, "first": first, "stage": stage, "step": step, "turns": TURNS,
        "named": named[0], "named_turns": sum(named), "remedy": remedy, "promised": promised, "gained": gained,
        "spread": spread, "near": bool(promises) and abs(promised - gained) <= 0.3 * abs(gained),
    }  # fmt: skip


def _named(fault: str, document: dict[str, Any]) -> bool:
    rule, wanted = FAULTS[fault]
    first, stage = _cause(document)
    return first == rule and wanted in (None, stage)


def _cause(document: dict[str, Any]) -> tuple[str, str | None]:
    """The rule named first, and the stage of the input."""
    findings = document["diagnosis"]["findings"]
    return (findings[0]["rule"] if findings else "none"), document["facts"]["run"].get("data_stage")


def verdict(out: Path) -> str:
    diagnosis = explain(out)["diagnosis"]
    return "healthy" if diagnosis["healthy"] else f"{diagnosis['findings'][:1]} {diagnosis['sentence']}"


def report(rows: list[dict[str, Any]], healthy: list[str]) -> str:
    import platform

    import torch

    from ironlaw import __version__
    from ironlaw.cores import usable_cores
    from ironlaw.machine import host

    today = datetime.date.today().isoformat()
    lines = [
        "# Planted faults", "",
        f"{today}, ironlaw {__version__}, torch {torch.__version__}, python {platform.python_version()}, "
        f"{host.cpu_name()}, {usable_cores()} cores. Made by `python benchmarks/planted_faults.py`: runs with and "
        "without the defect in turn.", "",
        f"Named right: {sum(r['named'] for r in rows)} of {len(rows)}, {sum(r['named_turns'] for r in rows)} of "
        f"{sum(r['turns'] for r in rows)} turns. Gain foretold within 30%: "
        f"{sum(r['near'] for r in rows)} of {len(rows)}. Without a fault called healthy: "
        f"{healthy.count('healthy')} of {len(healthy)}.", "",
        "| planted | named first | right | of all turns | step, ms | remedy | promised, % of the step | measured | "
        "spread | within 30% |",
        "|---|---|---|---|---:|---|---:|---:|---:|---|",
    ]  # fmt: skip
    for r in rows:
        lines.append(
            f"| {r['fault']} | {_shown(r)} | {'yes' if r['named'] else 'no'} | {r['named_turns']} of {r['turns']} | "
            f"{1e3 * r['step']:.1f} | {r['remedy'] or 'none'} | {100 * r['promised']:.1f} | {100 * r['gained']:.1f} | "
            f"{100 * r['spread']:.1f} | {'yes' if r['near'] else 'no'} |"
        )
    wrong = [verdict for verdict in healthy if verdict != "healthy"]
    return "\n".join([*lines, "", *(f"Not healthy: {verdict}" for verdict in wrong), ""])


def keep_grades(rows: list[dict[str, Any]], path: Path) -> None:
    from ironlaw.explain import grades
    from ironlaw.machine import host

    others = [grade for grade in remedies_page.read(path) if grade.source != "planted_faults"]
    path.unlink(missing_ok=True)
    for grade in others:
        grades.keep(grade, path)
    for row in rows:
        if row["remedy"] == CURES[row["fault"]]:
            grade = grades.Grade(row["remedy"], row["promised"], row["gained"], "planted_faults", host.cpu_name())
            grades.keep(grade, path)


def _shown(row: dict[str, Any]) -> str:
    return f"{row['first']} ({row['stage']})" if row["first"] == "input_bound" else str(row["first"])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, help="of the runs; what is there already stays")
    parser.add_argument("names", nargs="*", metavar="NAME", help="all, or of " + ", ".join(FAULTS))
    parser.add_argument("--out", type=Path)
    parser.add_argument("--grades", type=Path, help="replace this benchmark's lines of the record of remedies")
    options = parser.parse_args()
    folder: Path = options.folder
    wanted = options.names or list(FAULTS)
    for turn, fault in itertools.product(range(TURNS), wanted):
        take_turn(fault, turn, folder)
    for fault in wanted:
        measure_gains(fault, folder)
    rows = [judge(fault, folder / fault) for fault in wanted]
    text = report(rows, [verdict(out) for out in sorted(folder.glob("*/without"))])
    print(text)
    if options.out:
        options.out.write_text(text)
    if options.grades:
        keep_grades(rows, options.grades)


if __name__ == "__main__":
    main()
