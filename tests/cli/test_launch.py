"""Jobs for schedulers: what is written, and what is refused."""

from __future__ import annotations

import json
import os
import stat
import subprocess
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import yaml

Here = Callable[..., tuple[int, str, str]]


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


@pytest.mark.parametrize(
    ("option", "value"),
    [
        ("--hosts", "x;touch /x;"), ("--hosts", "$(touch x)"), ("--hosts", "-oProxyCommand=touch x"),
        ("--hosts", "a b"), ("--hosts", "a@-oProxyCommand=x"), ("--hosts", "-l@a"), ("--hosts", "a\nb"),
        ("--hosts", "`x`"), ("--hosts", "a'b"), ("--hosts", "é"),
        ("--image", "x, command: [sh]"), ("--image", "x\n          command: [evil]"), ("--image", "-x"),
        ("--image", "x}"), ("--image", "x #"), ("--image", ""),
        ("--claim", "a}}, {b"), ("--claim", "a\nb"), ("--claim", "-a"), ("--claim", "A B"),
        ("--partition", "a\n#SBATCH --wrap=x"), ("--partition", "-a"), ("--account", "a b"), ("--time", "4h"),
        ("--time", "1\n#SBATCH"), ("--set", "data.path=a\nb"), ("--out", "a\nb"),
    ],
)  # fmt: skip
def test_what_is_no_name_of_its_kind_is_refused(
    ironlaw_here: Here, tiny_file: Callable[..., Path], tmp_path: Path, option: str, value: str
) -> None:
    on = {"--hosts": "ssh", "--image": "kubernetes", "--claim": "kubernetes"}.get(option, "slurm")
    given = {"--image": "a", "--claim": "b"} if on == "kubernetes" else {}
    words = [word for pair in (given | {option: value}).items() for word in pair]
    code, _, err = ironlaw_here("launch", tiny_file(), "--on", on, *words)
    assert code == 2 and err.count("\n") == 1, err
    assert not any((tmp_path / name).exists() for name in ("job.sh", "job.yaml", "job.sbatch", "x"))


def test_what_a_user_may_write_is_quoted_for_the_shell_and_for_yaml(
    ironlaw_here: Here, tiny_file: Callable[..., Path], tmp_path: Path
) -> None:
    evil = "data.path=$(touch evil) `touch evil`; touch evil 'x' \"y\": }"
    words = ("launch", tiny_file(), "--set", evil, "--out", "-o $(touch evil)")
    assert ironlaw_here(*words, "--on", "kubernetes", "--image", "r.io:5000/a/b:1", "--claim", "yes")[0] == 0
    _, job = yaml.safe_load_all((tmp_path / "job.yaml").read_text(encoding="utf-8"))
    pod = job["spec"]["template"]["spec"]
    assert pod["containers"][0]["image"] == "r.io:5000/a/b:1"
    assert pod["volumes"][0]["persistentVolumeClaim"]["claimName"] == "yes"
    command = pod["containers"][0]["command"][2]
    # What the shell of the job would hand to torchrun.
    (tmp_path / "torchrun").write_text('#!/bin/sh\nfor word; do echo "$word"; done\n', encoding="utf-8")
    (tmp_path / "torchrun").chmod(0o755)
    path = f"{tmp_path}:{os.environ['PATH']}"
    said = subprocess.run(["sh", "-c", command], env={"PATH": path}, capture_output=True, text=True, check=True).stdout
    assert evil in said.splitlines() and "./-o $(touch evil)" in said.splitlines()
    assert not (tmp_path / "evil").exists()
    # A rank that is refused ends torchrun by that signal; whatever else it ends with is the job's.
    for end, code in (("kill -USR1 $$", 2), ("exit 0", 0), ("exit 1", 1)):
        (tmp_path / "torchrun").write_text(f"#!/bin/sh\n{end}\n", encoding="utf-8")
        assert subprocess.run(["sh", "-c", command], env={"PATH": path}, check=False).returncode == code


def test_an_edited_job_and_a_link_are_kept_unless_forced(
    ironlaw_here: Here, tiny_file: Callable[..., Path], tmp_path: Path
) -> None:
    job, words = tmp_path / "job.sbatch", ("launch", tiny_file(), "--on", "slurm")
    assert ironlaw_here(*words)[0] == 0
    assert ironlaw_here(*words, "--nodes", "2")[0] == 0  # nobody has edited it
    job.write_text(job.read_text(encoding="utf-8").replace("--exclusive", "--mem=0"), encoding="utf-8")
    code, _, err = ironlaw_here(*words)
    assert code == 2 and "--force" in err and "--mem=0" in job.read_text(encoding="utf-8")
    assert ironlaw_here(*words, "--force")[0] == 0 and "--mem=0" not in job.read_text(encoding="utf-8")
    job.unlink()
    (tmp_path / "mine").write_text("mine", encoding="utf-8")
    job.symlink_to(tmp_path / "mine")
    assert ironlaw_here(*words)[0] == 2
    assert ironlaw_here(*words, "--force")[0] == 0 and not job.is_symlink()
    assert (tmp_path / "mine").read_text(encoding="utf-8") == "mine"


def test_slurm_is_told_time_partition_and_account(ironlaw_here: Here, tiny_file: Callable[..., Path]) -> None:
    asked = ("--time", "2-12:00:00", "--partition", "gpu", "--account", "mine")
    code, out, _ = ironlaw_here("launch", tiny_file(), "--on", "slurm", *asked)
    assert code == 0
    assert "#SBATCH --time=2-12:00:00\n#SBATCH --partition=gpu\n#SBATCH --account=mine\n" in out
    code, _, err = ironlaw_here("launch", tiny_file(), "--on", "ssh", "--hosts", "a", "--time", "1")
    assert code == 2 and "--time is for --on slurm" in err


def test_over_ssh_the_nodes_are_heard_while_they_run(
    start_ironlaw: Callable[..., subprocess.Popen[str]], tiny_file: Callable[..., Path], tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    """An ssh that says a line, waits for a file, and fails."""
    fake = tmp_path / "bin" / "ssh"
    fake.parent.mkdir()
    fake.write_text(
        '#!/bin/sh\necho "step 1 on $3"\nwhile ! [ -e go ]; do sleep 0.05; done\nexit 3\n', encoding="utf-8"
    )
    fake.chmod(fake.stat().st_mode | stat.S_IXUSR)
    monkeypatch.setenv("PATH", f"{fake.parent}:{os.environ['PATH']}")
    process = start_ironlaw("launch", tiny_file(), "--on", "ssh", "--hosts", "a", "--submit", "--json")
    assert process.stderr is not None
    until, line = time.monotonic() + 60, ""
    while "step 1 on a" not in line and time.monotonic() < until:
        line = process.stderr.readline()
    assert "step 1 on a" in line and process.poll() is None
    (tmp_path / "go").touch()
    out, _ = process.communicate(timeout=60)
    assert process.returncode == 1 and "ended with 3" in json.loads(out)["error"]
