"""What tests of the whole path share: a machine nobody measured, a cache that is not the user's, tiny runs."""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest

import ironlaw
from ironlaw.config import RunConfig, build_config
from ironlaw.machine.profile import Curve, MatmulFit, Profile, save_profile
from ironlaw.plan.step import step_operations

# Before PyTorch: models here are tiny, and other tests use the other cores. What threads change is asked for by name.
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

sys.path.insert(0, str(Path(__file__).parent))  # for `micro_batch`, which several folders here share

SOURCE = Path(ironlaw.__file__).parents[1]
# `IRONLAW_TEST_DEVICE=cuda python -m pytest tests/train tests/serve` runs on a GPU what tests run in this process.
DEVICE = os.environ.get("IRONLAW_TEST_DEVICE", "cpu")
REPOSITORY = Path(__file__).parents[1]

# Small enough that a step takes milliseconds, large enough to learn something.
TINY_GPT: dict[str, Any] = {
    "name": "tiny-gpt", "layers": 2, "hidden": 32, "heads": 2, "vocab": 300, "context": 16,
}  # fmt: skip
TINY_LLAMA: dict[str, Any] = TINY_GPT | {
    "name": "tiny-llama", "heads": 4, "kv_heads": 2, "ffn": 48, "gated_ffn": True, "activation": "silu",
    "norm": "rmsnorm", "positions": "rope", "bias": False, "tied": False,
}  # fmt: skip


@pytest.fixture(scope="session", autouse=True)
def _ctrl_c() -> None:
    """A suite started in the background inherits an ignored Ctrl-C, which Python and its children would ignore too."""
    signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.fixture(scope="session", autouse=True)
def _not_the_users_cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Nothing here may read or change what this machine remembers of the user's runs."""
    with pytest.MonkeyPatch.context() as patch:
        # Every process that a test starts would compile all it imports again: 0.3 s each, and no user lives like that.
        patch.delenv("PYTHONDONTWRITEBYTECODE", raising=False)
        patch.setenv("XDG_CACHE_HOME", str(tmp_path_factory.mktemp("session-cache")))
        patch.setenv("PYTHONPATH", str(SOURCE), prepend=os.pathsep)  # wherever the processes are that tests start
        yield


def build_profile(*, flops_per_second: float = 1e11, elements_per_second: float = 1e9, threads: int = 1) -> Profile:
    """A machine with plausible curves: products with fixed cost and dilution, streams with a floor."""
    sides = (16, 64, 256, 1024, 4096)
    shapes = [(m, n, k) for m in sides for n in sides for k in (16, 256, 4096)]
    seconds = [2e-6 + 2 * m * n * k * (1 / flops_per_second + 1e-11 * (1 / m + 1 / n)) for m, n, k in shapes]
    fits = dict.fromkeys(("matmul_bias", "matmul", "matmul_weight_gradient"), MatmulFit.fit(shapes, seconds))
    sizes = (2.0**12, 2.0**16, 2.0**21, 2.0**23)
    curve = Curve(sizes, tuple(2e-6 + n / elements_per_second for n in sizes))
    configs = [build_config({"model": model}) for model in (TINY_GPT, TINY_LLAMA | {"qk_norm": True})]
    kernels = {op.kernel for c in configs for p in ("fp32", "bf16") for op, _ in step_operations(c, p)}
    kernels |= {f"{name}_{way}" for name in ("gelu", "gelu_tanh", "silu") for way in ("forward", "backward")}
    points = [(tokens, size, 2e-10 * size / 32) for tokens in (64, 1024) for size in (32, 64, 128)]
    attention = {"forward": points, "backward": [(t, d, 2.5 * s) for t, d, s in points]}
    return Profile(
        device=DEVICE, name="AMD EPYC", created="2026-01-02T03:04:05+00:00",
        versions={"ironlaw": "0.1.0", "torch": "2.13.0", "python": "3.11.7"}, threads=threads,
        memory_bytes=8 * 2**30, runtime_bytes=200 * 2**20,
        matmul={"fp32": fits, "bf16": fits},
        curves={precision: dict.fromkeys(sorted(kernels), curve) for precision in ("fp32", "bf16")},
        attention={"fp32": attention, "bf16": attention},
        native_attention={"fp32": attention, "bf16": attention},  # no faster: only who asks for it gets it
        copy_bytes_per_second=2e10, small_operation_seconds=1e-6,
        tiny_block_seconds={"forward": 2e-4, "backward": 3e-4},
        reference_step_seconds={"fp32": 0.0, "bf16": 0.0},  # no more than the sum of its kernels
        storage_bytes_per_second=5e8, tokenizer_tokens_per_second=1e6,
        interference={"compute": [1.0, 1.1, 1.2], "memory": [1.0, 1.05, 1.1]},
        probe={"compute": 3e-3, "memory": 5e-4},
        best_seconds={"matmul fp32 matmul (512, 512, 512)": 3e-3, "curve fp32 gelu_tanh_forward 524288": 5e-4},
        capability=None if DEVICE == "cpu" else (9, 0),
    )  # fmt: skip


@pytest.fixture(scope="session")
def machine_profile() -> Profile:
    return build_profile()


@pytest.fixture
def user_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, machine_profile: Profile) -> Path:
    """A user whose machine has been measured: the cache directory, for this process and for those it starts."""
    cache = tmp_path / "cache"
    monkeypatch.setenv("XDG_CACHE_HOME", str(cache))
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    save_profile(machine_profile)
    return cache


def write_corpus(folder: Path, files: int = 6, words: int = 2500) -> Path:
    """Text with some structure, the same for everybody."""
    chance = random.Random(0)
    vocabulary = ["def", "return", "value", "self", "other", "if", "else", "for", "in", "range", "x", "y", "total"]
    folder.mkdir(parents=True, exist_ok=True)
    for number in range(files):
        lines = []
        for _ in range(words // 8):
            first = chance.randrange(len(vocabulary))
            # Each word is likely followed by the next of the list: something to learn.
            lines.append(" ".join(vocabulary[(first + i + chance.randrange(2)) % len(vocabulary)] for i in range(8)))
        (folder / f"part{number}.txt").write_text("\n".join(lines) + "\n", encoding="utf-8")
    return folder


@pytest.fixture(scope="session")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_corpus(tmp_path_factory.mktemp("corpus") / "text")


@pytest.fixture(scope="session")
def tiny_tables(corpus: Path) -> Callable[..., dict[str, Any]]:
    """The tables of a run of milliseconds per step; keyword arguments replace whole keys of a section."""

    def build(cache: Path, model: dict[str, Any] | None = None, **sections: dict[str, Any]) -> dict[str, Any]:
        document: dict[str, Any] = {
            "model": TINY_GPT | (model or {}),
            "data": {"path": str(corpus), "validation_fraction": 0.1, "cache": str(cache)},
            "train": {
                "steps": 12, "global_batch": 8, "precision": "fp32", "profile_steps": 0,
            },
            "optimizer": {"lr": 3e-3},
            "schedule": {"warmup_steps": 2},
            "checkpoint": {"every": 4},
            "evaluation": {"every": 6, "batches": 2},
        }  # fmt: skip
        for name, table in sections.items():
            document[name] = document.get(name, {}) | table
        return document

    return build


@pytest.fixture(scope="session")
def shared_data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where those prepare the corpus that do not look at how: once for all of them."""
    return tmp_path_factory.mktemp("shared-data")


@pytest.fixture
def data_cache(tmp_path: Path) -> Path:
    return tmp_path / "data-cache"


@pytest.fixture
def tiny_document(tiny_tables: Callable[..., dict[str, Any]], data_cache: Path) -> Callable[..., dict[str, Any]]:
    return partial(tiny_tables, data_cache)


@pytest.fixture
def tiny_config(tiny_document: Callable[..., dict[str, Any]]) -> Callable[..., RunConfig]:
    return lambda *args, **sections: build_config(tiny_document(*args, **sections))


@pytest.fixture
def tiny_file(tiny_config: Callable[..., RunConfig], tmp_path: Path) -> Callable[..., Path]:
    """The same as a config file."""

    def write(*args: Any, **sections: Any) -> Path:
        path = tmp_path / "config.toml"
        path.write_text(tiny_config(*args, **sections).to_toml(), encoding="utf-8")
        return path

    return write


def command(*arguments: str | Path) -> list[str]:
    return [sys.executable, "-m", "ironlaw", *map(str, arguments)]


def environment(**extra: str) -> dict[str, str]:
    return os.environ | {"PYTHONPATH": str(SOURCE), "NO_COLOR": "1"} | extra


@pytest.fixture
def ironlaw_process(user_cache: Path, tmp_path: Path) -> Callable[..., subprocess.CompletedProcess[str]]:
    """Run the command line in a process of its own, as this user."""

    def run(*arguments: str | Path, cwd: Path | None = None) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            command(*arguments), cwd=cwd or tmp_path, env=environment(), capture_output=True, text=True, timeout=200,
            check=False,
        )  # fmt: skip

    return run


@pytest.fixture
def start_ironlaw(user_cache: Path, tmp_path: Path) -> Iterator[Callable[..., subprocess.Popen[str]]]:
    """Start the command line and go on; whatever still runs at the end is killed."""
    started: list[subprocess.Popen[str]] = []

    def start(*arguments: str | Path) -> subprocess.Popen[str]:
        process = subprocess.Popen(
            command(*arguments), cwd=tmp_path, env=environment(), text=True,
            stdout=subprocess.PIPE, stderr=subprocess.PIPE,
        )  # fmt: skip
        started.append(process)
        return process

    yield start
    for process in started:
        if process.poll() is None:
            process.kill()
        process.communicate()


@pytest.fixture
def ironlaw_here(
    user_cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> Callable[..., tuple[int, str, str]]:
    """Run the command line in this process: exit code, stdout, stderr."""
    from ironlaw.cli.main import main

    monkeypatch.chdir(tmp_path)

    def run(*arguments: str | Path) -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "argv", ["ironlaw", *map(str, arguments)])
        capsys.readouterr()
        try:
            main()
            code: Any = 0
        except SystemExit as stop:
            code = stop.code or 0
        captured = capsys.readouterr()
        return int(code), captured.out, captured.err

    return run


@pytest.fixture(scope="session")
def read_metrics() -> Callable[[Path], list[dict[str, Any]]]:
    def read(run: Path) -> list[dict[str, Any]]:
        return [json.loads(line) for line in (run / "metrics.jsonl").read_text(encoding="utf-8").splitlines()]

    return read
