"""Jobs for schedulers: what is written, and what is refused."""

from __future__ import annotations

import subprocess
from collections.abc import Callable
from pathlib import Path


def test_a_slurm_job_starts_torchrun_once_per_node(
    ironlaw_here: Callable[..., tuple[int, str, str]], tiny_file: Callable[..., Path], tmp_path: Path
) -> None:
    config = tiny_file()
    code, out, err = ironlaw_here("launch", config, "--on", "slurm", "--nodes", "16", "--set", "train.steps=7")
    assert code == 0, err
    assert "#SBATCH --nodes=16" in out and "#SBATCH --ntasks-per-node=1" in out
    assert "torchrun --nnodes 16 --nproc-per-node 8" in out
    assert "--resume" in out and "--set train.steps=7" in out
    _, fewer, _ = ironlaw_here("launch", config, "--on", "slurm", "--nodes", "16", "--min-nodes", "12")
    assert "torchrun --nnodes 12:16 --nproc-per-node 8" in fewer
    code, _, err = ironlaw_here("launch", config, "--on", "slurm", "--nodes", "16", "--min-nodes", "17")
    assert code == 2 and "--min-nodes 16 or fewer" in err
    ironlaw_here("launch", config, "--on", "slurm", "--nodes", "16", "--set", "train.steps=7")
    job = tmp_path / "job.sbatch"
    assert job.read_text(encoding="utf-8") == out
    assert subprocess.run(["bash", "-n", str(job)], check=False).returncode == 0


def test_ssh_commands_meet_on_the_first_host(
    ironlaw_here: Callable[..., tuple[int, str, str]], tiny_file: Callable[..., Path], tmp_path: Path
) -> None:
    arguments = ("launch", tiny_file(), "--on", "ssh", "--nodes", "2")
    code, _, err = ironlaw_here(*arguments)
    assert code == 2 and "--hosts" in err
    code, out, _ = ironlaw_here(*arguments, "--hosts", "a,b")
    assert code == 0 and out.count("ssh ") == 2 and out.count('--rdzv-endpoint "a:29500"') == 2
    assert subprocess.run(["sh", "-n", str(tmp_path / "job.sh")], check=False).returncode == 0


def test_a_kubernetes_job_needs_image_and_volume(
    ironlaw_here: Callable[..., tuple[int, str, str]], tiny_file: Callable[..., Path]
) -> None:
    arguments = ("launch", tiny_file(), "--on", "kubernetes", "--nodes", "4")
    code, _, err = ironlaw_here(*arguments)
    assert code == 2 and "--image" in err
    code, out, _ = ironlaw_here(*arguments, "--image", "registry/ironlaw:1", "--claim", "shared")
    assert code == 0
    assert "completions: 4" in out and "claimName: shared" in out and "ironlaw-tiny-gpt-0.ironlaw-tiny-gpt" in out


def test_what_cannot_run_is_not_written(
    ironlaw_here: Callable[..., tuple[int, str, str]], tiny_file: Callable[..., Path], tmp_path: Path
) -> None:
    code, _, err = ironlaw_here("launch", tiny_file(layout={"tp": 3}), "--on", "slurm", "--nodes", "2")
    assert code == 2 and "does not make 16 ranks" in err and err.count("\n") == 1
    assert not (tmp_path / "job.sbatch").exists()
    code, _, err = ironlaw_here("launch", tiny_file(), "--on", "slrum")
    assert code == 2 and "slurm" in err
