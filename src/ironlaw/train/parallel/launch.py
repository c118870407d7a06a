"""Job files for the launchers of clusters, to be read, kept and submitted. Writing one needs no scheduler.

Every job starts `torchrun` once per node with a rendezvous on the first, restarts if ranks die, and resumes from the
last checkpoint (`--resume` also starts a new run). The run directory must be on storage that all nodes share. PyTorch's
flight recorder is on: after a timeout each rank writes its last collectives beside the run.

Names of hosts, images and so on must follow the syntax of their launcher (`GRAMMAR`). All other user input is quoted
for the shell that reads it, and YAML scalars are written as JSON, which is a subset of YAML.
"""

from __future__ import annotations

import hashlib
import json
import re
import shlex
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ironlaw.errors import JobFailed, UserError, refuse_options
from ironlaw.files import read_text, write_text

KINDS = {"slurm": "job.sbatch", "kubernetes": "job.yaml", "ssh": "job.sh"}
SUBMIT = {"slurm": ("sbatch",), "kubernetes": ("kubectl", "apply", "-f"), "ssh": ("sh",)}
OPTIONS = dict.fromkeys(("time", "partition", "account"), ("--on slurm",)) | {
    "image": ("--on kubernetes",), "claim": ("--on kubernetes",), "hosts": ("--on ssh",),
}  # fmt: skip
PORT = 29500
RESTARTS = 10  # of the whole job, by torchrun; after that a person should look
VARIABLES = {
    "TORCH_FR_BUFFER_SIZE": "500",  # collectives that the flight recorder keeps
    "TORCH_NCCL_DUMP_ON_TIMEOUT": "1",
    "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1",  # a restarted job must not find the addresses of dead ranks
    "OMP_NUM_THREADS": "4",
}

_LABEL = r"[A-Za-z0-9]([A-Za-z0-9-]{0,61}[A-Za-z0-9])?"
_HOST = rf"{_LABEL}(\.{_LABEL})*|\[[0-9A-Fa-f:.]+\]"
GRAMMAR = {  # option -> regular expression for the whole value, and a hint for the user
    "--hosts": (rf"([A-Za-z0-9_][A-Za-z0-9_.-]{{0,31}}@)?({_HOST})", "names or addresses such as node0,user@10.0.0.2"),
    "--image": (
        r"[A-Za-z0-9][A-Za-z0-9._-]*(:\d+)?(/[a-z0-9][a-z0-9._-]*)*(:[A-Za-z0-9_][A-Za-z0-9_.-]{0,127})?"
        r"(@[a-z0-9]+:[0-9a-fA-F]{32,})?",
        "an image such as registry.example/ironlaw:1",
    ),
    "--claim": (r"[a-z0-9]([a-z0-9.-]{0,251}[a-z0-9])?", "the name of a volume claim: lower case, digits, - and ."),
    "--partition": (r"[A-Za-z0-9_][A-Za-z0-9_.,-]*", "the name of a partition"),
    "--account": (r"[A-Za-z0-9_][A-Za-z0-9_.,-]*", "the name of an account"),
    "--time": (r"\d+|\d+:\d+(:\d+)?|\d+-\d+(:\d+){0,2}", "minutes, hours:minutes:seconds or days-hours"),
}


@dataclass(frozen=True)
class LaunchRequest:
    """`hosts` are for ssh, `image` and `claim` (a shared volume) for Kubernetes, `time`, `partition` and `account` for
    Slurm. A job that loses nodes continues with `min_nodes` or more. UserError for values that violate `GRAMMAR`."""

    name: str
    config: Path
    out: Path
    nodes: int
    per_node: int
    overrides: tuple[str, ...] = ()
    hosts: tuple[str, ...] = ()
    image: str | None = None
    claim: str | None = None
    min_nodes: int | None = None
    time: str | None = None
    partition: str | None = None
    account: str | None = None

    def __post_init__(self) -> None:
        for option, (grammar, usual) in GRAMMAR.items():
            given = getattr(self, option[2:])
            for value in given if isinstance(given, tuple) else (given,):
                if value is not None and not re.fullmatch(grammar, value):
                    raise UserError(f"{option} {value!r} cannot be used: write {usual}")
        texts = (str(self.config), str(self.out), *self.overrides)
        if any(not text.isprintable() for text in texts):
            raise UserError("paths and --set of a job take printable characters only: a line break ends a command")


def script(kind: str, request: LaunchRequest) -> str:
    """Return the text of the job. Raises UserError for missing options, and for options that the launcher lacks."""
    refuse_options(vars(request), OPTIONS, f"--on {kind}")
    return {"slurm": _slurm, "kubernetes": _kubernetes, "ssh": _ssh}[kind](request)


def torchrun(request: LaunchRequest, endpoint: str, run_id: str) -> str:
    """Return the command for one node. `endpoint` and `run_id` may be shell variables."""
    nodes = f"{request.min_nodes}:{request.nodes}" if request.min_nodes else request.nodes
    config, out = (_as_path(path) for path in (request.config, request.out))
    words = [
        f"torchrun --nnodes {nodes} --nproc-per-node {request.per_node} --max-restarts {RESTARTS}",
        f'--rdzv-backend c10d --rdzv-endpoint "{endpoint}" --rdzv-id "{run_id}"',
        f"-m ironlaw train {config} --out {out} --resume",
    ]
    words += [f"--set {shlex.quote(override)}" for override in request.overrides]
    words += ["|| exit $(($? == 138 ? 2 : $?))"]  # 138: a rank has refused its input, and has reported why
    return " \\\n  ".join(words)


def _as_path(path: Path) -> str:
    """Quote a path so that no program takes it for an option."""
    text = str(path)
    return shlex.quote(f"./{text}" if text.startswith("-") else text)


def _exports() -> str:
    return "\n".join(f"export {name}={value}" for name, value in VARIABLES.items())


def _slurm(request: LaunchRequest) -> str:
    options = {"time": request.time, "partition": request.partition, "account": request.account}
    asked = "".join(f"#SBATCH --{name}={value}\n" for name, value in options.items() if value is not None)
    return f"""#!/bin/bash
#SBATCH --job-name={request.name}
#SBATCH --nodes={request.nodes}
#SBATCH --ntasks-per-node=1
#SBATCH --gpus-per-node={request.per_node}
{asked}#SBATCH --exclusive
#SBATCH --requeue
#SBATCH --signal=TERM@120
#SBATCH --output={request.name}-%j.log

{_exports()}
head=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)

# A step has one core per task unless told; TERM above leaves two minutes for a checkpoint before the time limit.
srun --cpus-per-task="$SLURM_CPUS_ON_NODE" {torchrun(request, f"$head:{PORT}", "$SLURM_JOB_ID")}
"""


def _ssh(request: LaunchRequest) -> str:
    if len(request.hosts) != request.nodes:
        raise UserError(f"--on ssh needs {request.nodes} hosts: add --hosts node0,... ({len(request.hosts)} given)")
    first = request.hosts[0].rpartition("@")[2]
    command = f"{'; '.join(_exports().splitlines())}; cd {shlex.quote(str(Path.cwd()))} && "
    command += torchrun(request, f"{first}:{PORT}", request.name)
    lines = [
        f'ssh -tt -- {shlex.quote(host)} {shlex.quote(command)} < /dev/null & pids="$pids $!"' for host in request.hosts
    ]
    started = "\n".join(lines)
    return f"""#!/bin/sh
# One torchrun per node; the first is where they meet. With a terminal (-tt) a node's processes end with its ssh.
trap 'kill $pids' INT TERM HUP
{started}
status=0
for pid in $pids; do wait "$pid" || status=$?; done
exit $status
"""


def _kubernetes(request: LaunchRequest) -> str:
    for option, value in (("--image", request.image), ("--claim", request.claim)):
        if value is None:
            what = "an image with ironlaw in it" if option == "--image" else "a shared volume claim for the run"
            raise UserError(f"--on kubernetes needs {what}: add {option} NAME")
    command = torchrun(request, f"{request.name}-0.{request.name}:{PORT}", request.name).replace(" \\\n  ", " ")
    variables = "".join(
        f"\n            - {{name: {_yaml(name)}, value: {_yaml(value)}}}" for name, value in VARIABLES.items()
    )
    return f"""apiVersion: v1
kind: Service
metadata: {{name: {_yaml(request.name)}}}
spec:
  clusterIP: None  # so that the pods have names: {request.name}-0.{request.name}
  publishNotReadyAddresses: true  # from the start: all look for the first
  selector: {{job-name: {_yaml(request.name)}}}
---
apiVersion: batch/v1
kind: Job
metadata: {{name: {_yaml(request.name)}}}
spec:
  completions: {request.nodes}
  parallelism: {request.nodes}
  completionMode: Indexed
  backoffLimit: {RESTARTS * request.nodes}
  template:
    spec:
      subdomain: {_yaml(request.name)}
      restartPolicy: OnFailure
      containers:
        - name: train
          image: {_yaml(request.image)}
          workingDir: /work
          command: [sh, -c, {_yaml(command)}]
          env:{variables}
          resources: {{limits: {{nvidia.com/gpu: {request.per_node}}}}}
          volumeMounts:
            - {{name: work, mountPath: /work}}
            - {{name: memory, mountPath: /dev/shm}}
      volumes:
        - name: work
          persistentVolumeClaim: {{claimName: {_yaml(request.claim)}}}
        - name: memory  # NCCL and data loading share memory between the ranks of a node
          emptyDir: {{medium: Memory}}
"""


_OTHER_THAN_TEXT = {"y", "n", "yes", "no", "on", "off", "true", "false", "null"}  # in YAML 1.1


def _yaml(value: Any) -> str:
    """Return a YAML scalar, unquoted only if no reader can take it for anything but text."""
    text = str(value)
    plain = re.fullmatch(r"[a-z]([a-z0-9-]*[a-z0-9])?", text) and text not in _OTHER_THAN_TEXT
    return text if plain else json.dumps(text)


SEAL = "# written by `ironlaw launch`; as long as nobody edits it: "


def keep(path: Path, text: str, force: bool = False) -> str:
    """Write the job with a checksum and return its text. A file that was edited is not replaced unless `force`."""
    text += f"{SEAL}{hashlib.sha256(text.encode('utf-8', 'surrogateescape')).hexdigest()[:16]}\n"
    if not force and (path.is_symlink() or path.exists()) and not _sealed(path):
        what = "is a link" if path.is_symlink() else "is not as `ironlaw launch` wrote it"
        raise UserError(f"{path} {what}: move it away, or add --force to replace it")
    write_text(path, text)
    return text


def _sealed(path: Path) -> bool:
    """Whether a job file is unchanged since `keep` wrote it."""
    if path.is_symlink() or not path.is_file():
        return False
    text, seal, digest = read_text(path).rpartition(SEAL)
    return bool(seal) and hashlib.sha256(text.encode()).hexdigest()[:16] == digest.strip()


def submit(kind: str, path: Path) -> str | None:
    """Submit the written job and return the launcher's output. A job over ssh runs here, and shows its output."""
    words = (*SUBMIT[kind], str(path))
    if shutil.which(words[0]) is None or (kind == "ssh" and shutil.which("ssh") is None):
        missing = words[0] if shutil.which(words[0]) is None else "ssh"
        raise UserError(f"{missing} is not on this machine: run `{' '.join(words)}` where it is")
    if kind == "ssh":
        sys.stdout.flush()
        # Progress goes to stderr, since stdout is reserved for --json.
        done = subprocess.run(words, stdin=subprocess.DEVNULL, stdout=sys.stderr.fileno(), check=False)
        if done.returncode:
            raise JobFailed(f"the job ended with {done.returncode}: what the nodes said is above")
        return None
    finished = subprocess.run(words, capture_output=True, text=True, errors="replace", check=False)
    if finished.returncode:
        said = (finished.stderr or finished.stdout).strip().splitlines() or [f"exit code {finished.returncode}"]
        raise UserError(f"{words[0]} refused {path}: {said[-1]}")
    return finished.stdout.strip()
