"""Tokens per second, peak memory and loss of Ironlaw's trainer beside nanoGPT's, on this machine's CPU.

    git clone https://github.com/karpathy/nanoGPT
    ironlaw measure
    python benchmarks/train_peers.py speed nanoGPT --write benchmarks/results/train_peers.md
    python benchmarks/train_peers.py parity nanoGPT

nanoGPT runs unmodified from its own checkout, with its own `torch.compile` on and off; so does Ironlaw. Same model,
batch, context, fp32, AdamW, clipping. Every run is a process of its own; the four take turns, medians over the rounds.
A step's time is what passes from the end of one step to the end of the next, logging included, on both sides.
`--launcher "taskset -c 0,1"` is put before every measured command.
"""

from __future__ import annotations

import argparse
import json
import os
import pickle
import platform
import re
import shlex
import statistics
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np

VARIANTS = ("nanoGPT", "nanoGPT compiled", "Ironlaw", "Ironlaw compiled")


@dataclass(frozen=True)
class Case:
    layers: int
    hidden: int
    context: int
    batch: int
    heads: int
    vocab: int
    steps: int
    warmup: int

    @property
    def name(self) -> str:
        return f"({self.layers}, {self.hidden}, {self.context}, {self.batch})"

    @property
    def flops_per_step(self) -> float:
        """Matrix products, forward and backward; causal attention counted half (docs/workload.md)."""
        tokens = self.batch * self.context
        products = self.layers * 12 * self.hidden**2 + self.vocab * self.hidden
        return 6 * tokens * products + 6 * tokens * self.layers * self.context * self.hidden


CASES = (
    Case(4, 128, 64, 12, 4, 256, steps=150, warmup=20),
    Case(6, 384, 256, 12, 6, 256, steps=14, warmup=4),
    Case(12, 768, 1024, 4, 12, 50304, steps=3, warmup=1),
)


def write_data(folder: Path, vocab: int) -> None:
    """Bytes of this Python's own standard library, in nanoGPT's format."""
    text = b"".join(path.read_bytes() for path in sorted(Path(os.__file__).parent.glob("*.py")))
    tokens = np.frombuffer(text, np.uint8).astype(np.uint16)
    folder.mkdir(parents=True, exist_ok=True)
    split = len(tokens) * 9 // 10
    tokens[:split].tofile(folder / "train.bin")
    tokens[split:].tofile(folder / "val.bin")
    (folder / "meta.pkl").write_bytes(pickle.dumps({"vocab_size": vocab}))


def nanogpt_command(case: Case, dataset: str, compiled: bool, **options: object) -> list[str]:
    """nanoGPT's own train.py with options of its own configurator."""
    settings = {
        "dataset": dataset, "device": "cpu", "dtype": "float32", "compile": compiled, "bias": True, "dropout": 0.0,
        "n_layer": case.layers, "n_head": case.heads, "n_embd": case.hidden, "block_size": case.context,
        "batch_size": case.batch, "gradient_accumulation_steps": 1, "max_iters": case.steps, "log_interval": 1,
        "eval_interval": 10**9, "eval_iters": 1, "learning_rate": 1e-3, "decay_lr": False, "out_dir": "/tmp",
    } | options  # fmt: skip
    return [sys.executable, "train.py", *(f"--{key}={value}" for key, value in settings.items())]


def timed(command: list[str], launcher: str, cwd: Path | None = None) -> tuple[str, int]:
    """Standard output and the largest resident bytes of the command's process tree (its largest process)."""
    probe = (
        "import resource,subprocess,sys;code=subprocess.run(sys.argv[1:]).returncode;"
        "print('PEAK',resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss*1024);sys.exit(code)"
    )
    whole = [*shlex.split(launcher), sys.executable, "-c", probe, *command]
    result = subprocess.run(whole, cwd=cwd, capture_output=True, text=True)
    if result.returncode:
        sys.exit(f"{' '.join(command)} failed:\n{result.stderr[-2000:]}")
    return result.stdout, int(re.findall(r"PEAK (\d+)", result.stdout)[-1])


def run_variant(variant: str, case: Case, peer: Path, dataset: str, launcher: str) -> tuple[float, int]:
    """Median seconds of a step after the warm-up, peak resident bytes."""
    compiled = variant.endswith("compiled")
    if variant.startswith("nanoGPT"):
        output, peak = timed(nanogpt_command(case, dataset, compiled), launcher, peer)
        seconds = [float(ms) / 1e3 for ms in re.findall(r"time ([\d.]+)ms", output)]
    else:
        command = [sys.executable, __file__, "one", json.dumps(case.__dict__), "on" if compiled else "off"]
        output, peak = timed(command, launcher)
        seconds = json.loads(next(line for line in output.splitlines() if line.startswith("[")))
    return statistics.median(seconds[case.warmup + 1 :]), peak


def config_of(case: Case, **train: object) -> dict[str, object]:
    return {
        "model": {
            "layers": case.layers, "hidden": case.hidden, "heads": case.heads, "context": case.context,
            "vocab": case.vocab, "activation": "gelu",
        },
        "data": {"mock": True},
        "train": {"steps": case.steps, "global_batch": case.batch, "precision": "fp32", "profile_steps": 0} | train,
        "optimizer": {"lr": 1e-3, "weight_decay": 0.1, "no_decay": ["*norm*", "*bias"]},
        "schedule": {"warmup_steps": 0, "min_lr_fraction": 1.0},
        "evaluation": {"every": 0, "batches": 1},
        "checkpoint": {"every": 0},
    }  # fmt: skip


def one(case: Case, compiled: str) -> None:
    """Train one case here and print the seconds from step to step."""
    from ironlaw.config import build_config
    from ironlaw.machine.profile import load_profile
    from ironlaw.train.session import run_training

    ends: list[float] = []
    with tempfile.TemporaryDirectory() as folder:
        config = build_config(config_of(case, compile=compiled))
        run_training(config, Path(folder) / "run", load_profile(), watch=lambda entry: ends.append(time.perf_counter()))
    print(json.dumps([0.0, *(after - before for before, after in pairwise(ends))]))


def speed(peer: Path, cases: list[Case], variants: list[str], rounds: int, launcher: str, write: Path | None) -> None:
    import torch

    from ironlaw.machine.profile import load_profile

    profile = load_profile()
    peak = profile.matmul_peak("fp32")
    commit = _commit(peer)
    lines = [
        "# Ironlaw's trainer beside nanoGPT's",
        "",
        f"{platform.processor() or profile.name}, {profile.threads} threads, Python {platform.python_version()}, "
        f"torch {torch.__version__}, nanoGPT {commit}, Ironlaw {_commit(Path(__file__).parent)}, "
        f"{time.strftime('%Y-%m-%d')}. fp32. Medians of {rounds} interleaved runs.",
        f"Measured ceiling of fp32 products: {peak / 1e9:.0f} GFLOP/s by oneDNN, "
        f"{_default_peak(profile) / 1e9:.0f} by PyTorch's default library."
        if profile.onednn
        else f"Measured ceiling of fp32 products: {peak / 1e9:.0f} GFLOP/s.",
        "",
        "| layers, width, context, batch | trainer | ms per step | tokens/s | of the ceiling | peak resident |",
        "|---|---|---|---|---|---|",
    ]
    verdicts = []
    for case in cases:
        dataset = f"ironlaw-{case.vocab}"
        write_data(peer / "data" / dataset, case.vocab)
        found: dict[str, list[tuple[float, int]]] = {variant: [] for variant in variants}
        for _ in range(rounds):
            for variant in variants:
                found[variant].append(run_variant(variant, case, peer, dataset, launcher))
                print(case.name, variant, f"{1e3 * found[variant][-1][0]:.1f} ms", file=sys.stderr, flush=True)
        seconds = {v: statistics.median(s for s, _ in runs) for v, runs in found.items()}
        memory = {v: statistics.median(b for _, b in runs) for v, runs in found.items()}
        for variant in variants:
            rate = case.batch * case.context / seconds[variant]
            lines.append(
                f"| {case.name} | {variant} | {1e3 * seconds[variant]:.1f} | {rate:,.0f} | "
                f"{case.flops_per_step / seconds[variant] / peak:.0%} | {memory[variant] / 2**30:.2f} GiB |"
            )
        theirs = min((v for v in variants if v in VARIANTS[:2]), key=lambda v: seconds[v])
        ours = min((v for v in variants if v in VARIANTS[2:]), key=lambda v: seconds[v])
        verdicts.append(
            f"- {case.name}: {seconds[theirs] / seconds[ours]:.2f} times nanoGPT's best tokens/s, "
            f"peak resident memory {memory[ours] / memory[theirs] - 1:+.0%}."
        )
    text = "\n".join([*lines, "", *verdicts]) + "\n"
    print(text)
    if write:
        write.write_text(text, encoding="utf-8")


def _default_peak(profile: object) -> float:
    fits = sorted(fit.peak_flops_per_second for fit in profile.matmul["fp32"].values())  # type: ignore[attr-defined]
    return fits[len(fits) // 2]


def _commit(folder: Path) -> str:
    return subprocess.run(
        ["git", "-C", str(folder), "rev-parse", "--short", "HEAD"], capture_output=True, text=True
    ).stdout.strip()


def parity(peer: Path, steps: int, launcher: str, write: Path | None) -> None:
    """The loss curve from nanoGPT's weights, in its order of batches, beside the one that it prints itself."""
    case = Case(4, 128, 64, 12, 4, 256, steps=steps, warmup=0)
    write_data(peer / "data" / "ironlaw-256", 256)
    output, _ = timed(nanogpt_command(case, "ironlaw-256", False), launcher, peer)
    theirs = np.array([float(loss) for loss in re.findall(r"iter \d+: loss ([\d.]+)", output)])[:steps]
    ours = np.array(_our_losses(peer.resolve(), case))
    apart = np.abs(ours / theirs - 1)
    text = (
        f"Loss parity over {steps} steps of {case.name} in fp32, nanoGPT {_commit(peer)}: largest difference "
        f"{apart.max():.3%}, mean {apart.mean():.3%}; first loss {theirs[0]:.4f} and {ours[0]:.4f}, "
        f"last {theirs[-1]:.4f} and {ours[-1]:.4f} (nanoGPT prints four decimals).\n"
    )
    print(text)
    if write:
        with write.open("a", encoding="utf-8") as file:
            file.write("\n" + text)


def _our_losses(peer: Path, case: Case) -> list[float]:
    """Ironlaw's own trainer, given nanoGPT's initial weights and its batches."""
    sys.path.insert(0, str(peer))
    import torch
    from model import GPT, GPTConfig  # type: ignore[import-not-found]

    from ironlaw.config import build_config
    from ironlaw.data.batches import Batch
    from ironlaw.machine.profile import load_profile
    from ironlaw.train import loop
    from ironlaw.train.session import run_training

    torch.manual_seed(1337)  # train.py's
    theirs = GPT(GPTConfig(
        n_layer=case.layers, n_head=case.heads, n_embd=case.hidden, block_size=case.context, bias=True,
        vocab_size=case.vocab, dropout=0.0,
    ))  # fmt: skip
    data = {split: np.fromfile(peer / f"data/ironlaw-256/{split}.bin", np.uint16) for split in ("train", "val")}

    def draw(split: str) -> Batch:
        starts = torch.randint(len(data[split]) - case.context, (case.batch,)).tolist()
        rows = np.stack([data[split][s : s + case.context + 1] for s in starts]).astype(np.int64)
        return Batch(rows[:, :-1].copy(), rows[:, 1:].copy())

    batches = [draw("train")]
    draw("train"), draw("val")  # the evaluation before its first step
    batches += [draw("train") for _ in range(case.steps)]

    class Recorded(loop.Trainer):
        def _setup(self, *given: Any) -> None:
            super()._setup(*given)
            self.one_step.model.load_state_dict(translate(theirs.state_dict(), case.layers))
            self.batches.batch = batches.__getitem__  # type: ignore[method-assign]

    losses: list[float] = []
    with tempfile.TemporaryDirectory() as folder:
        original, loop_trainer = sys.modules["ironlaw.train.session"], Recorded
        original.Trainer = loop_trainer  # type: ignore[attr-defined]
        run_training(
            build_config(config_of(case)), Path(folder) / "run", load_profile(),
            watch=lambda entry: losses.append(entry["loss"]),
        )  # fmt: skip
    return losses


def translate(state: dict[str, object], layers: int) -> dict[str, object]:
    """nanoGPT's names to ours; both keep query, key and value in one matrix, in this order."""
    names = {"embedding": "wte", "positions": "wpe", "final_norm": "ln_f"}
    parts = {
        "attention_norm": "ln_1", "attention.qkv": "attn.c_attn", "attention.out": "attn.c_proj",
        "ffn_norm": "ln_2", "ffn.up": "mlp.c_fc", "ffn.down": "mlp.c_proj",
    }  # fmt: skip
    names |= {f"blocks.{i}.{ours}": f"h.{i}.{theirs}" for i in range(layers) for ours, theirs in parts.items()}
    result = {
        f"{ours}.{kind}": state[f"transformer.{theirs}.{kind}"]
        for ours, theirs in names.items()
        for kind in ("weight", "bias")
        if f"transformer.{theirs}.{kind}" in state
    }
    return result | {"head.weight": state["lm_head.weight"]}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=("speed", "parity", "one"))
    parser.add_argument("peer", help="a checkout of nanoGPT")
    parser.add_argument("compiled", nargs="?", default="off", help=argparse.SUPPRESS)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--steps", type=int, default=500, help="of the parity run")
    parser.add_argument("--cases", default="0,1,2", help="which of the three")
    parser.add_argument("--variants", default=",".join(VARIANTS), help="one of nanoGPT's and one of Ironlaw's at least")
    parser.add_argument("--launcher", default="", help="put before every measured command")
    parser.add_argument("--write", type=Path)
    arguments = parser.parse_args()
    if arguments.what == "one":
        one(Case(**json.loads(arguments.peer)), arguments.compiled)
    elif arguments.what == "speed":
        cases = [CASES[int(index)] for index in arguments.cases.split(",")]
        variants = [variant for variant in VARIANTS if variant in arguments.variants.split(",")]
        speed(Path(arguments.peer), cases, variants, arguments.rounds, arguments.launcher, arguments.write)
    else:
        parity(Path(arguments.peer), arguments.steps, arguments.launcher, arguments.write)


if __name__ == "__main__":
    main()
