"""A report on this installation: versions, devices, the measured profile, and optional extras with their benefits."""

from __future__ import annotations

import platform
import shutil
from collections.abc import Sequence
from importlib import metadata
from typing import Any

from ironlaw import files
from ironlaw.cores import usable_threads
from ironlaw.errors import UserError
from ironlaw.machine import host
from ironlaw.machine.profile import load_profile, profile_path
from ironlaw.package import __version__

SCHEMA_VERSION = 1
OLDEST_TORCH, NEWEST_TORCH = (2, 11), (2, 13)  # versions that are tested
CORE = ("torch", "numpy", "pydantic", "typer", "rich", "tokenizers", "safetensors")

# Extra of pyproject.toml -> its distributions and the features they add.
EXTRAS: dict[str, tuple[tuple[str, ...], str]] = {
    "hf": (("transformers", "accelerate"), "Trainer callback; logits of exports compared; tokenizers in old forms"),
    "data": (("pyarrow",), "Parquet, Arrow and .zst sources"),
    "serve": (("fastapi", "uvicorn", "prometheus-client", "llguidance"), "ironlaw serve over HTTP, answers by schema"),
    "quant": (("bitsandbytes", "torchao"), "8-bit Adam; fp8 products on CUDA; optimizer state in the host's memory"),
    "track": (("tensorboard", "wandb", "mlflow-skinny"), "tracking.to: figures of a run sent to a tracker"),
    "energy": (("nvidia-ml-py",), "energy, clock and throttling of NVIDIA boards"),
    "gguf": (("gguf",), "ironlaw export --to gguf, for llama.cpp"),
    "finetune": (("peft",), "adapters used outside of Ironlaw; training them needs nothing"),
    "vllm": (("vllm",), "ironlaw serve --engine vllm; pins its own PyTorch: an environment of its own"),
    "docs": (("mkdocs-material", "mkdocstrings", "nbclient"), "the documentation site: make docs"),
    "dev": (("pytest", "hypothesis", "ruff", "mypy"), "tests and checks: make test"),
}  # fmt: skip


def examine() -> dict[str, Any]:
    """Return the document of `ironlaw doctor --json`. `problems` keep Ironlaw from working; `advice` would improve its
    figures. Imports PyTorch to list devices."""

    versions = {"ironlaw": __version__, "python": platform.python_version()} | _versions(CORE)
    problems, advice, measured = _of_torch(versions["torch"]), [], None
    if not profile_path().is_file():
        advice.append("this machine is not measured: `ironlaw measure` takes half a minute; `plan` on it needs that")
    else:
        try:
            profile = load_profile()
            measured = {key: getattr(profile, key) for key in ("created", "device", "name", "threads")}
            if profile.device == "cpu" and profile.threads != usable_threads():
                advice.append(f"measured with {profile.threads} threads, {usable_threads()} are usable: measure again")
        except UserError as error:
            problems.append(str(error))
    if shutil.which("c++") is None and shutil.which("g++") is None:
        advice.append('no C++ compiler: train.compile = "on" needs one on a CPU')
    problems += filter(None, [files.cache_problem()])
    extras = []
    for name, (parts, gives) in EXTRAS.items():
        have = _versions(parts)
        absent = [part for part, version in have.items() if version is None]
        extras.append({"name": name, "gives": gives, "versions": have, "missing": absent})
    return {
        "schema": SCHEMA_VERSION, "healthy": not problems, "versions": versions, "devices": _devices(),
        "measured": measured, "extras": extras, "problems": problems, "advice": advice,
    }  # fmt: skip


def _versions(names: Sequence[str]) -> dict[str, str | None]:
    """Return the versions of distributions; None if missing."""
    found = {name: next(iter(metadata.distributions(name=name)), None) for name in names}
    return {name: None if there is None else there.version for name, there in found.items()}


def _of_torch(version: str | None) -> list[str]:
    if version is None:
        return ["PyTorch is missing: pip install torch==2.13.0, for your device: https://pytorch.org/get-started"]
    release = tuple(int(part) for part in version.split("+")[0].split(".")[:2])
    return [] if OLDEST_TORCH <= release <= NEWEST_TORCH else [f"PyTorch {version} is not tested: use 2.11 to 2.13"]


def _devices() -> list[dict[str, Any]]:
    devices: list[dict[str, Any]] = [
        {"device": "cpu", "name": host.cpu_name(), "threads": usable_threads(), "memory_bytes": host.memory_bytes(),
         "system": f"{platform.system()} {platform.release()}"}
    ]  # fmt: skip
    try:
        import torch
    except (ImportError, OSError):  # PyTorch or one of its libraries is missing
        return devices
    for number in range(torch.cuda.device_count()):
        properties = torch.cuda.get_device_properties(number)
        devices.append({
            "device": f"cuda:{number}", "name": properties.name, "memory_bytes": properties.total_memory,
            "capability": f"{properties.major}.{properties.minor}",
        })  # fmt: skip
    return devices
