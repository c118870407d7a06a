"""Calibrated engines as readable files, which `named.py` finds by their names.

save_profile("my-cluster", calibration, "my_runs.csv")     # ~/.cache/ironlaw/engines/my-cluster.toml
"""

from __future__ import annotations

import json
from dataclasses import fields
from pathlib import Path

from ironlaw.files import write_text
from ironlaw.plan.engines.engine import MEANING, TrainingEngine
from ironlaw.plan.engines.named import profile_path
from ironlaw.plan.measured.calibrate import Calibration


def save_profile(name: str, found: Calibration, runs: str) -> Path:
    """Write the calibrated engine as a readable file; a profile of that name is replaced."""
    path = profile_path(name)
    path.parent.mkdir(parents=True, exist_ok=True)
    write_text(path, _text(found, runs))
    return path


def _text(found: Calibration, runs: str) -> str:
    engine, plain = found.engine, TrainingEngine("")
    skipped = ("name", "source", "frameworks", "by_generation", *(c.name for c in found.constants))
    head = f"{found.runs} runs of {Path(runs).name}"
    lines = [
        f"# Calibrated by `ironlaw calibrate` on {head}. Mean error of step time:",
        f"# {100 * found.error_before:.1f}% before, {100 * found.error_in_sample:.1f}% on these runs,",
        f"# {100 * found.error_left_out:.1f}% with each run left out.",
        "",
        f"source = {json.dumps(f'calibrated on {head}')}",
        "",
        "# conventions",
    ]
    for field in fields(TrainingEngine):
        value = getattr(engine, field.name)
        if field.name in skipped or value == getattr(plain, field.name):
            continue
        lines.append(f"{field.name} = {json.dumps(value)}  # {_words(field.name)}")
    lines += ["", "# calibrated"]
    for constant in found.constants:
        value = float(f"{constant.after:.5g}")
        lines.append(f"{constant.name} = {value}  # {_words(constant.name)}; was {constant.before:.4g}")
    for generation, entries in sorted(engine.by_generation.items()):
        lines += ["", f"[by_generation.{generation}]"]
        lines += [f"{key} = {json.dumps(value)}" for key, value in entries.items()]
    return "\n".join(lines) + "\n"


def _words(key: str) -> str:
    unit, meaning = MEANING.get(key, ("", "convention of the engine"))
    return f"{unit}; {meaning}" if unit else meaning
