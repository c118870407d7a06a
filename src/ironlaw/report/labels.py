"""Labels of figures, their print formats and meanings."""

from __future__ import annotations

from ironlaw import units
from ironlaw.report.document import Print


def _flop(value: float | None) -> str:
    return units.si(value, "FLOP")


def _loss(value: float | None) -> str:
    return units.NOT_KNOWN if value is None else f"{value:.3f} nats/token"


def _hours(value: float | None) -> str:
    return units.NOT_KNOWN if value is None else f"{units.count(value)} h"


# Name of a total -> (label, how it is printed)
TOTALS: dict[str, tuple[str, Print]] = {
    "parameters": ("Parameters", units.count),
    "flops_per_step": ("FLOPs per step", _flop),
    "flops_per_step_unmasked": ("FLOPs, causal mask ignored", _flop),
    "step_seconds": ("Step time", units.seconds),
    "tokens_per_second": ("Throughput", units.token_rate),
    "mfu": ("MFU", units.percent),
    "mfu_palm": ("MFU, PaLM's convention", units.percent),
    "mfu_6nd": ("MFU, 6 N D", units.percent),
    "hfu": ("HFU", units.percent),
    "peak_bytes": ("Peak tensor memory", units.bytes_),
    "resident_bytes": ("Process memory", units.bytes_),
    "total_seconds": ("Total time", units.seconds),
    "accelerator_hours": ("Accelerator-hours", _hours),
    "rent_usd": ("Rent", units.dollars),
    "purchase_usd": ("Purchase", units.dollars),
    "break_even_hours": ("Buying pays after", _hours),
    "break_even_runs": ("Buying pays after", lambda v: units.NOT_KNOWN if v is None else f"{v:.1f} such runs"),
    "energy_joules": ("Energy", units.energy),
    "carbon_kg": ("Carbon", lambda v: f"{units.mass(v)} CO2"),
    "train_loss": ("Training loss", _loss),
    "validation_loss": ("Validation loss", _loss),
    "unigram_loss": ("Unigram model's loss", _loss),
}

# Path of each total in the document of `Explanation.to_json`, and what the total counts.
EXPLAINED: dict[str, tuple[tuple[str, ...], str]] = {
    "step_seconds": (("time", "step"), ""),
    "tokens_per_second": (("time", "tokens_per_second"), "tokens trained on, per second of step time"),
    "mfu": (("mfu",), "model FLOPs as a share of the machine's measured matmul rate"),
    "peak_bytes": (("memory", "peak"), "at the highest moment of a step"),
    "resident_bytes": (("memory", "resident"), "tensors, Python and its libraries"),
    "total_seconds": (("time", "total"), "planned: steps and evaluations; measured: the whole command"),
    "energy_joules": (("energy",), ""),
    "parameters": (("parameters",), ""),
    "flops_per_step": (("flops_per_step",), "matrix products, forward and backward"),
}

MEANINGS = {
    "data": "waiting for the next batch",
    "transfer": "copying the batch to the device",
    "forward": "the model's output and loss",
    "backward": "gradients",
    "communication": "waiting for other devices",
    "optimizer": "clipping and the update",
    "host": "Python: dispatch, logging, the loop",
    "idle": "nothing ran",
    "matmul": "matrix products",
    "attention": "scores, softmax, weighted sum",
    "norm": "LayerNorm, RMSNorm",
    "elementwise": "activations, residuals, casts",
    "embedding": "table look-ups and their gradients",
    "loss": "softmax over the vocabulary",
    "collective": "communication",
    "other": "not matched to a planned operation",
    "unattributed": "in the step, in none of the phases",
    "weights": "parameters",
    "gradients": "alive at the peak",
    "optimizer state": "two moments per parameter",
    "activations": "kept for the backward pass",
    "temporaries": "freed within the phase",
    "gathered": "weights of other ranks, for a while",
    "reducing": "gradients on their way to other ranks",
    "messages": "between pipeline stages",
    "batch": "tokens and targets",
    "average": "exponential average of the weights",
    "checkpoint copy": "a checkpoint on its way to the disk",
}

CHECKS = {
    "step_time": "Step time, plan against run",
    "peak_memory": "Peak memory, plan against run",
    "unattributed": "Step time without a name",
}

WALL = {
    "training": "training steps",
    "evaluation": "evaluation",
    "checkpoint": "checkpoints",
    "startup": "start-up",
    "profiling": "the profiler",
    "repeated": "steps taken again",
    "other": "everything else",
}


def error(value: float | None) -> str:
    """Return a plan's relative error; an error that rounds to zero has no sign."""
    if value is None:
        return units.NOT_KNOWN
    text = units.signed_percent(value)
    return "0.0%" if text in ("+0.0%", "-0.0%") else text


def meaning(name: str, show: Print) -> str:
    """Return the meaning of a part of the step or of memory."""
    return MEANINGS.get("optimizer state" if show is units.bytes_ and name == "optimizer" else name, "")
