"""The job of a run for a cluster's own launcher: a text to read, keep and submit. No scheduler is needed to write it.

Every one starts `torchrun` once per node with a rendezvous on the first, restarts a job whose ranks die, and goes on
from the last checkpoint (`--resume` starts a run that is not there yet). The run directory must be on storage that all
nodes see. PyTorch's flight recorder is on: after a timeout each rank leaves its last collectives beside the run.
"""

from __future__ import annotations

import shlex
import shutil
import subprocess
from dataclasses import dataclass
from pathlib import Path

from ironlaw.errors import UserError

KINDS = {"slurm": "job.sbatch", "kubernetes": "job.yaml", "ssh": "job.sh"}
SUBMIT = {"slurm": ("sbatch",), "kubernetes": ("kubectl", "apply", "-f"), "ssh": ("sh",)}
PORT = 29500
RESTARTS = 10  # of the whole job by torchrun, before a person should look
VARIABLES = {
    "TORCH_FR_BUFFER_SIZE": "500",  # the flight recorder: collectives remembered
    "TORCH_NCCL_DUMP_ON_TIMEOUT": "1",
    "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1",  # a restarted job must not meet the addresses of dead ranks
    "OMP_NUM_THREADS": "4",
}


@dataclass(frozen=True)
class Request:
    """`hosts` are for ssh, `image` and `claim` (a shared volume) for Kubernetes. A job that loses nodes goes on with
    `min_nodes` or more."""

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


def script(kind: str, request: Request) -> str:
    """The text of the job. UserError for what a launcher needs and nobody gave."""
    return {"slurm": _slurm, "kubernetes": _kubernetes, "ssh": _ssh}[kind](request)


def torchrun(request: Request, endpoint: str, run_id: str) -> str:
    """The command of one node; `endpoint` and `run_id` may be variables of the shell."""
    nodes = f"{request.min_nodes}:{request.nodes}" if request.min_nodes else request.nodes
    words = [
        f"torchrun --nnodes {nodes} --nproc-per-node {request.per_node} --max-restarts {RESTARTS}",
        f'--rdzv-backend c10d --rdzv-endpoint "{endpoint}" --rdzv-id "{run_id}"',
        f"-m ironlaw train {shlex.quote(str(request.config))} --out {shlex.quote(str(request.out))} --resume",
    ]
    words += [f"--set {shlex.quote(override)}" for override in request.overrides]
    return " \\\n  ".join(words)


def _exports() -> str:
    return "\n".join(f"export {name}={value}" for name, value in VARIABLES.items())


def _slurm(request: Request) -> str:
    return f"""#!/bin/bash
#SBATCH --job-name={request.name}
#SBATCH --nodes={request.nodes}
#SBATCH --ntasks-per-node=1
#SBATCH --gpus-per-node={request.per_node}
#SBATCH --exclusive
#SBATCH --requeue
#SBATCH --signal=TERM@120
#SBATCH --output={request.name}-%j.log

{_exports()}
head=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)

# A step has one core per task unless told; TERM above leaves two minutes for a checkpoint before the time limit.
srun --cpus-per-task="$SLURM_CPUS_ON_NODE" {torchrun(request, f"$head:{PORT}", "$SLURM_JOB_ID")}
"""


def _ssh(request: Request) -> str:
    if len(request.hosts) != request.nodes:
        raise UserError(
            f"--on ssh needs the {request.nodes} hosts: add --hosts node0,node1,... ({len(request.hosts)} given)"
        )
    command = f"{'; '.join(_exports().splitlines())}; cd {shlex.quote(str(Path.cwd()))} && "
    command += torchrun(request, f"{request.hosts[0]}:{PORT}", request.name)
    lines = [f'ssh -tt {host} {shlex.quote(command)} < /dev/null & pids="$pids $!"' for host in request.hosts]
    started = "\n".join(lines)
    return f"""#!/bin/sh
# One torchrun per node; the first is where they meet. With a terminal (-tt) a node's processes end with its ssh.
trap 'kill $pids' INT TERM
{started}
status=0
for pid in $pids; do wait "$pid" || status=$?; done
exit $status
"""


def _kubernetes(request: Request) -> str:
    for option, value in (("--image", request.image), ("--claim", request.claim)):
        if value is None:
            what = "an image with ironlaw in it" if option == "--image" else "a shared volume claim for the run"
            raise UserError(f"--on kubernetes needs {what}: add {option} NAME")
    command = torchrun(request, f"{request.name}-0.{request.name}:{PORT}", request.name).replace(" \\\n  ", " ")
    variables = "".join(f"\n            - {{name: {name}, value: '{value}'}}" for name, value in VARIABLES.items())
    return f"""apiVersion: v1
kind: Service
metadata: {{name: {request.name}}}
spec:
  clusterIP: None  # so that the pods have names: {request.name}-0.{request.name}
  publishNotReadyAddresses: true  # from the start: all look for the first
  selector: {{job-name: {request.name}}}
---
apiVersion: batch/v1
kind: Job
metadata: {{name: {request.name}}}
spec:
  completions: {request.nodes}
  parallelism: {request.nodes}
  completionMode: Indexed
  backoffLimit: {RESTARTS * request.nodes}
  template:
    spec:
      subdomain: {request.name}
      restartPolicy: OnFailure
      containers:
        - name: train
          image: {request.image}
          workingDir: /work
          command: [sh, -c, {_quoted(command)}]
          env:{variables}
          resources: {{limits: {{nvidia.com/gpu: {request.per_node}}}}}
          volumeMounts:
            - {{name: work, mountPath: /work}}
            - {{name: memory, mountPath: /dev/shm}}
      volumes:
        - name: work
          persistentVolumeClaim: {{claimName: {request.claim}}}
        - name: memory  # NCCL and data loading share memory between the ranks of a node
          emptyDir: {{medium: Memory}}
"""


def _quoted(text: str) -> str:
    return "'" + text.replace("'", "''") + "'"


def submit(kind: str, path: Path) -> str:
    """Hand the written job to its launcher; returns what that said."""
    words = SUBMIT[kind]
    if shutil.which(words[0]) is None:
        raise UserError(f"{words[0]} is not on this machine: run `{' '.join(words)} {path}` where it is")
    done = subprocess.run([*words, str(path)], capture_output=True, text=True, check=False)
    if done.returncode:
        raise UserError(f"{words[0]} refused {path}: {(done.stderr or done.stdout).strip().splitlines()[-1]}")
    return done.stdout.strip()
