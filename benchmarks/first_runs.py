"""How near is the first plan of a machine that nobody has measured before to the first run on it?

    python benchmarks/first_runs.py RUNS [--rounds 5] [--config examples/...toml]      # on an idle machine

Each round is a new user: an empty cache, `ironlaw measure`, then `ironlaw train`, which plans before it runs. Printed:
planned over measured step time, where the interval lay, and what other programs did meanwhile. Wanted: within 5% in
four of five. `--parts` puts the phases of each round beside their plan: where a miss comes from.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
from pathlib import Path

from ironlaw.ledger import Ledger
from ironlaw.machine import interference
from ironlaw.machine.profile import load_profile

NEAR = 0.05


def take_round(config: str, folder: Path, steps: int | None) -> None:
    """`folder/run`, planned from `folder/cache`; done already if it is there."""
    if (folder / "run" / "ledger.json").is_file():
        return
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    environment = os.environ | {"XDG_CACHE_HOME": str(folder.absolute() / "cache")}
    train = ["train", config, "--out", str(folder / "run")]
    if steps:
        train += ["--set", f"train.steps={steps}", "--set", f"schedule.warmup_steps={steps // 10}"]
    for words in (["measure"], train):
        done = subprocess.run([sys.executable, "-m", "ironlaw", *words], env=environment, stdout=subprocess.DEVNULL)
        if done.returncode:
            raise SystemExit(f"ironlaw {words[0]} failed")


def report(folder: Path, parts: bool) -> bool:
    """One line, and with `parts` more; whether planned is near measured."""
    plan, run = (Ledger.load(folder / "run" / f"{name}.json") for name in ("plan", "ledger"))
    profile = load_profile(folder / "cache" / "ironlaw" / "machine" / "this.json")
    planned, measured = plan.totals["step_seconds"], run.totals["step_seconds"]
    error = planned.value / measured.value - 1
    inside = planned.low is not None and planned.high is not None and planned.low <= measured.value <= planned.high
    slowdown = interference.trimmed_mean(interference.rounds(profile)) or {}
    print(
        f"{folder.name}: planned {1e3 * planned.value:.1f} ms, measured {1e3 * measured.value:.1f}, {error:+.1%}"
        f"{'' if inside else ', outside its interval'}; planned with "
        + ", ".join(f"{kind} {ratio:.2f} x best" for kind, ratio in slowdown.items())
        + f"; run at {run.facts.get('machine_speed') or float('nan'):.2f} of the planned speed; others used "
        f"{interference.other_load(interference.rounds(profile)) or 0.0:.0%} while measuring, "
        f"{run.facts.get('other_load') or 0.0:.0%} while running"
    )
    if parts:
        beside = run.seconds_by_phase()
        for phase, seconds in plan.seconds_by_phase().items():
            there = beside.get(phase)
            print(f"    {phase}: planned {1e3 * seconds:.2f} ms" + (f", measured {1e3 * there:.2f}" if there else ""))
    return abs(error) <= NEAR


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, help="of the rounds; what is there already stays")
    parser.add_argument("--config", default="src/ironlaw/examples/gpt-tiny.toml")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--steps", type=int, help="instead of the config's")
    parser.add_argument("--parts", action="store_true")
    options = parser.parse_args()
    near = []
    for number in range(options.rounds):
        take_round(options.config, options.folder / f"round-{number}", options.steps)
        near.append(report(options.folder / f"round-{number}", options.parts))
    print(f"within {NEAR:.0%}: {sum(near)} of {len(near)}")


if __name__ == "__main__":
    main()
