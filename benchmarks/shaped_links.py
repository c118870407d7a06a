"""Step time over slow links, measured and planned: every rank a host of its own, a network namespace on this machine.

    python benchmarks/shaped_links.py FOLDER [--rates 1gbit 100mbit] [--layouts dp=2 "dp=2 zero=3" pp=2]
    python benchmarks/shaped_links.py FOLDER --report               # the table of all rounds in that folder
    python benchmarks/shaped_links.py FOLDER --collectives [--hosts 4]     # what gloo puts on the wire

A host is a namespace with one core, one veth interface behind a bridge and its own address; what leaves it is shaped
by a token bucket (`tc tbf`), and delayed by `tc netem` where --delay-ms is given and the kernel has it. Root, `ip` and
`tc` (Debian: iproute2) are needed. A call is one round: all hosts run `ironlaw measure` at the same time; then, for
each layout, `torchrun` starts a rank of `ironlaw train` in each; measured is the median of the steps after the first
three. The plan is `plan_step` for hosts like the first one, as it was measured in that round, and links of that rate.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

RATES = {"1gbit": 1e9, "100mbit": 1e8}  # bits/s
LAYOUTS = ("dp=2", "dp=2 zero=3", "pp=2")
WARMUP, STEPS = 3, 8
GOODPUT = 1448 / 1514
"""Of an Ethernet frame of 1,514 bytes, which is what the token bucket counts, TCP with timestamps carries 1,448."""
SEGMENT_BYTES = 16 * 1024
BURST_BYTES = 2 * SEGMENT_BYTES  # a wire has none: as little as leaves segments whole
PORT = 29517
GRACE_SECONDS = 10.0

GPT: dict[str, Any] = {"name": "gpt", "layers": 4, "hidden": 256, "heads": 4, "vocab": 2048, "context": 128}
WORKLOADS: dict[str, dict[str, Any]] = {
    # Weights outweigh what is computed with them: gradients rule.
    "many weights": {"model": GPT, "train": {"global_batch": 8, "micro_batch": 1}},
    # Tokens outweigh weights: messages of a pipeline rule.
    "many tokens": {
        "model": GPT | {"layers": 2, "hidden": 128, "vocab": 512, "context": 256},
        "train": {"global_batch": 32, "micro_batch": 4},
    },
}


def unsupported(*, delay: bool = False) -> str | None:
    """Why hosts cannot be made here, or None."""
    if not sys.platform.startswith("linux"):
        return "network namespaces are Linux's"
    missing = [tool for tool in ("ip", "tc") if shutil.which(tool) is None]
    if missing:
        return f"{' and '.join(missing)} not found: install iproute2"
    if os.geteuid() != 0:
        return "network namespaces need root"
    name = f"ilprobe{os.getpid()}"
    kinds = [["tbf", "rate", "1gbit", "burst", "128kb", "latency", "100ms"]] + [["netem", "delay", "1ms"]] * delay
    try:
        _call("ip", "netns", "add", name)
    except subprocess.CalledProcessError as error:
        return f"network namespaces are not permitted: {error.stderr.strip()}"
    try:
        for kind in kinds:
            _call("ip", "netns", "exec", name, "tc", "qdisc", "replace", "dev", "lo", "root", *kind)
    except subprocess.CalledProcessError as error:
        return f"this kernel shapes no links: tc {kind[0]}: {error.stderr.strip()}"
    finally:
        _call("ip", "netns", "del", name)
    return None


def _call(*words: str) -> str:
    return subprocess.run(words, check=True, capture_output=True, text=True).stdout


@dataclass(frozen=True)
class Hosts:
    """Namespaces with a shaped way out each. Make them with `hosts(count, rate)`."""

    names: tuple[str, ...]

    @staticmethod
    def address(host: int) -> str:
        return f"10.213.7.{host + 1}"

    def shape(self, rate: str, delay_ms: float = 0.0) -> None:
        """What leaves each host: `rate` as tc writes it, and a delay."""
        for name in self.names:
            tc = ("ip", "netns", "exec", name, "tc", "qdisc")
            with contextlib.suppress(subprocess.CalledProcessError):
                _call(*tc, "del", "dev", "eth0", "root")
            tbf = ("tbf", "rate", rate, "burst", str(BURST_BYTES), "latency", "400ms")
            _call(*tc, "add", "dev", "eth0", "root", "handle", "1:", *tbf)
            if delay_ms:
                _call(*tc, "add", "dev", "eth0", "parent", "1:1", "netem", "delay", f"{delay_ms}ms", "limit", "100000")

    def sent_bytes(self) -> list[int]:
        """What has left each host so far, frames and all."""
        file = "/sys/class/net/eth0/statistics/tx_bytes"
        return [int(_call("ip", "netns", "exec", name, "cat", file)) for name in self.names]

    def start(self, host: int, command: Sequence[str | Path], **named: Any) -> subprocess.Popen[str]:
        """`command` in a host, on its core; hosts share cores where there are fewer."""
        core = sorted(os.sched_getaffinity(0))[host % len(os.sched_getaffinity(0))]
        words = ["ip", "netns", "exec", self.names[host], "taskset", "-c", str(core), *map(str, command)]
        named = {"stdout": subprocess.PIPE} | named
        return subprocess.Popen(words, text=True, stderr=subprocess.STDOUT, start_new_session=True, **named)

    def torchrun(self, arguments: Sequence[str | Path], folder: Path, timeout_seconds: float = 150) -> None:
        """`python -m torch.distributed.run ... ARGUMENTS` with one rank per host; RuntimeError with what it said."""
        source = str(Path(__file__).parents[1] / "src")
        environment = os.environ | {"GLOO_SOCKET_IFNAME": "eth0", "OMP_NUM_THREADS": "1", "PYTHONPATH": source}
        running: list[subprocess.Popen[str]] = []
        files = [folder / f"host-{host}.log" for host in range(len(self.names))]
        for host in range(len(self.names)):
            launcher = [sys.executable, "-m", "torch.distributed.run", "--nnodes", str(len(self.names))]
            launcher += ["--node-rank", str(host), "--nproc-per-node", "1"]
            launcher += ["--master-addr", self.address(0), "--master-port", str(PORT)]
            with files[host].open("w", encoding="utf-8") as file:
                command = [*launcher, *map(str, arguments)]
                running.append(self.start(host, command, cwd=folder, env=environment, stdout=file))
        ends = time.monotonic() + timeout_seconds
        try:
            while any(p.poll() is None for p in running) and time.monotonic() < ends:
                if any(p.poll() for p in running):  # the others now wait for it: until they have said so, no longer
                    ends = min(ends, time.monotonic() + GRACE_SECONDS)
                time.sleep(0.1)
        finally:
            for process in running:
                if process.poll() is None:
                    os.killpg(process.pid, signal.SIGKILL)  # torchrun and the rank it started
        if any(process.wait() for process in running):
            raise RuntimeError("\n".join(f"{file.name}: {file.read_text(encoding='utf-8')[-3000:]}" for file in files))


@contextlib.contextmanager
def hosts(count: int, rate: str = "1gbit", delay_ms: float = 0.0) -> Iterator[Hosts]:
    """`count` hosts behind one switch, gone afterwards."""
    mark = f"il{os.getpid() % 100000}"
    made = Hosts(tuple(f"{mark}h{host}" for host in range(count)))
    bridge = f"{mark}b"
    try:
        _call("ip", "link", "add", bridge, "type", "bridge")
        _call("ip", "link", "set", bridge, "up")
        for host, name in enumerate(made.names):
            _call("ip", "netns", "add", name)
            _call("ip", "link", "add", f"{mark}v{host}", "type", "veth", "peer", "name", "eth0", "netns", name)
            _call("ip", "link", "set", f"{mark}v{host}", "master", bridge, "up")
            inside = ("ip", "-n", name)
            _call(*inside, "addr", "add", f"{made.address(host)}/24", "dev", "eth0")
            _call(*inside, "link", "set", "eth0", "gso_max_size", str(SEGMENT_BYTES))
            for device in ("lo", "eth0"):
                _call(*inside, "link", "set", device, "up")
            # As a network card's own queue, the shaper's is short: acknowledgements do not wait behind megabytes.
            for setting in ("tcp_limit_output_bytes=131072", "tcp_slow_start_after_idle=0"):
                _call("ip", "netns", "exec", name, "sysctl", "-qw", f"net.ipv4.{setting}")
        made.shape(rate, delay_ms)
        yield made
    finally:
        for words in [("ip", "netns", "del", name) for name in made.names] + [("ip", "link", "del", bridge)]:
            with contextlib.suppress(subprocess.CalledProcessError):
                _call(*words)


# -- step times --------------------------------------------------------------------------------------------------------


def document(workload: str, layout: str) -> dict[str, Any]:
    """The config of a run, as tables."""
    from ironlaw.workload.layout import parse_layout

    chosen = parse_layout(layout)
    tables = {"dp": chosen.dp, "zero": chosen.zero, "pp": chosen.pp}
    given = WORKLOADS[workload]
    # Only a pipeline wants many micro-batches.
    train = {"steps": STEPS} | given["train"]
    if chosen.pp == 1:
        train["micro_batch"] = train["global_batch"] // chosen.dp
    return given | {
        "train": train | {"precision": "fp32", "profile_steps": 0, "compile": "off"},
        "schedule": {"warmup_steps": 1},
        "evaluation": {"every": 0, "batches": 1}, "checkpoint": {"every": 0}, "layout": tables,
    }  # fmt: skip


def measure_hosts(made: Hosts, folder: Path) -> None:
    """The machine as each host sees it while the others look, too: caches `host 0` and so on, in `folder`."""
    environment = os.environ | {"PYTHONPATH": str(Path(__file__).parents[1] / "src")}
    running = [
        made.start(
            host, [sys.executable, "-m", "ironlaw", "measure"],
            env=environment | {"XDG_CACHE_HOME": str(folder / f"host {host}")},
        )
        for host in range(len(made.names))
    ]  # fmt: skip
    for process in running:
        words = process.communicate()[0]
        if process.returncode:
            raise RuntimeError(words)


def measure(made: Hosts, workload: str, layout: str, folder: Path) -> dict[str, float]:
    """Median seconds of a step, and of its phases, by their names in metrics.jsonl."""
    import tomli_w

    config = folder / "config.toml"
    config.write_text(tomli_w.dumps(document(workload, layout)), encoding="utf-8")
    out = Path(tempfile.mkdtemp(dir=folder)) / "run"
    made.torchrun(["-m", "ironlaw", "train", config, "--out", out], folder)
    lines = (out / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    steps = [json.loads(line) for line in lines][WARMUP:]
    return {
        name: statistics.median(step[name] for step in steps) for name in set(steps[0]) & set(steps[-1])
        if name == "seconds" or name.endswith("_seconds")
    }  # fmt: skip


def planned(workload: str, layout: str, rate: float, delay_ms: float = 0.0) -> float:
    """Seconds of a step on hosts like the measured one, over links of `rate` bits/s."""
    from dataclasses import replace

    from ironlaw.config import build_config
    from ironlaw.machine.links import Link, RankFabric, load_costs
    from ironlaw.machine.profile import load_profile
    from ironlaw.plan.step import plan_step
    from ironlaw.workload.layout import parse_layout

    config = build_config(document(workload, layout))
    link = Link(delay_ms / 1e3, rate / 8 * GOODPUT)
    chosen = replace(parse_layout(layout), micro_batch=config.micro_batch)
    fabric = RankFabric(load_costs(), ranks_per_host=1, between=link)
    return plan_step(config, load_profile(), chosen, fabric).step_seconds


def report(folder: Path) -> str:
    """What was measured and planned, medians over the rounds, and whether the plan ranks the layouts as measured."""
    rounds = sorted(folder.glob("round *"))
    found: dict[tuple[str, float, str], dict[str, list[tuple[float, float]]]] = {}
    for round_folder in rounds:
        os.environ["XDG_CACHE_HOME"] = str(round_folder / "host 0")
        for line in (round_folder / "found.jsonl").read_text(encoding="utf-8").splitlines():
            f = json.loads(line)
            plan = planned(f["workload"], f["layout"], RATES[f["rate"]], f["delay_ms"])
            case = found.setdefault((f["rate"], f["delay_ms"], f["workload"]), {})
            case.setdefault(f["layout"], []).append((f["measured_seconds"], plan))
    lines = [
        "| link | workload | layout | measured | planned | error | error in each round |",
        "|---|---|---|---|---|---|---|",
    ]  # fmt: skip
    verdicts = []
    for (rate, _, workload), layouts in found.items():
        measured = {name: statistics.median(m for m, _ in pairs) for name, pairs in layouts.items()}
        plans = {name: statistics.median(p for _, p in pairs) for name, pairs in layouts.items()}
        for name in sorted(measured, key=lambda name: measured[name]):
            errors = [100 * (plan / seconds - 1) for seconds, plan in layouts[name]]
            lines.append(
                f"| {rate} | {workload} | {name} | {1e3 * measured[name]:.0f} ms | {1e3 * plans[name]:.0f} ms | "
                f"{statistics.median(errors):+.0f}% | {', '.join(f'{error:+.0f}' for error in errors)} |"
            )
        same = sorted(measured, key=lambda name: measured[name]) == sorted(plans, key=lambda name: plans[name])
        verdicts.append(f"- {rate}, {workload}: the plan's ranking is {'' if same else 'not '}the measured one")
    return "\n".join([*lines, "", *verdicts]) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description="Step time over slow links, measured and planned.")
    parser.add_argument("folder", type=Path, help="where each round's profile and findings are kept")
    parser.add_argument("--rates", nargs="*", default=list(RATES), choices=RATES)
    parser.add_argument("--layouts", nargs="*", default=list(LAYOUTS))
    parser.add_argument("--workloads", nargs="*", default=list(WORKLOADS), choices=WORKLOADS)
    parser.add_argument("--delay-ms", type=float, default=0.0)
    parser.add_argument("--collectives", action="store_true", help="bytes and seconds of each collective instead")
    parser.add_argument("--hosts", type=int, default=2, help="how many, for --collectives")
    parser.add_argument("--report", action="store_true", help="print the table of what is in the folder instead")
    chosen = parser.parse_args()
    if chosen.report:
        print(report(chosen.folder))
        return
    problem = unsupported(delay=bool(chosen.delay_ms))
    if problem:
        raise SystemExit(problem)
    with tempfile.TemporaryDirectory() as name, hosts(chosen.hosts) as made:
        if chosen.collectives:
            made.shape(chosen.rates[0], chosen.delay_ms)
            made.torchrun([Path(__file__).with_name("shaped_collectives.py"), Path(name) / "found.json"], Path(name))
            print((Path(name) / "found.json").read_text(encoding="utf-8"))
            return
        here = chosen.folder.absolute() / f"round {1 + len(list(chosen.folder.glob('round *')))}"
        here.mkdir(parents=True)
        measure_hosts(made, here)
        # Runs of all rounds find their text prepared, and this round's machine.
        os.environ["XDG_CACHE_HOME"] = str(here.parent / "cache")
        shutil.copytree(here / "host 0", here.parent / "cache", dirs_exist_ok=True)
        for rate in chosen.rates:
            made.shape(rate, chosen.delay_ms)
            for workload in chosen.workloads:
                for layout in chosen.layouts:
                    before = made.sent_bytes()
                    phases = measure(made, workload, layout, Path(name))
                    seconds = phases.pop("seconds")
                    sent = [(b - a) / STEPS for a, b in zip(before, made.sent_bytes(), strict=True)]
                    plan = planned(workload, layout, RATES[rate], chosen.delay_ms)
                    found = {
                        "rate": rate, "delay_ms": chosen.delay_ms, "workload": workload, "layout": layout,
                        "measured_seconds": seconds, "planned_seconds": plan, "error": plan / seconds - 1,
                        "sent_bytes_per_step": sent, "phases": phases,
                    }  # fmt: skip
                    print(json.dumps(found), flush=True)
                    with (here / "found.jsonl").open("a", encoding="utf-8") as file:
                        file.write(json.dumps(found) + "\n")


if __name__ == "__main__":
    main()
