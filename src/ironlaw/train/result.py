"""Results of a run: its loss on held-out text, and its ledger at the end."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ironlaw.data.batch import IGNORED, Batch
from ironlaw.data.loader import Loader
from ironlaw.ledger import Estimate, Ledger, Origin
from ironlaw.machine import host, interference
from ironlaw.observe.measured import Observations, measured_ledger
from ironlaw.plan.recipe import batch_of
from ironlaw.train.run_directory import now
from ironlaw.train.step import Step
from ironlaw.workload.program import batch_bytes


@dataclass(frozen=True)
class Outcome:
    """The result of a run. `interrupted` is the name of the signal that ended it early, if any."""

    ledger: Ledger
    step: int
    interrupted: str | None


@torch.no_grad()
def validate(step: Step, loader: Loader, to_device: Callable[[Batch[Any]], Batch[Tensor]]) -> float:
    """Return the mean loss on held-out text over all replicas, which share the batches.

    Evaluation uses collectives on every rank: a rank without a batch of its own evaluates another's and ignores it.
    """
    rows, config, mesh = step.micro_batch if step.schedule is None else step.share, step.config, step.mesh
    batches = list(loader.validation(rows, config.evaluation.batches * config.train.global_batch))
    if step.schedule is not None:  # a pipeline evaluates only batches of the training step's size
        batches = [_filled(batch, rows) for batch in batches]
    total, tokens = 0.0, 0.0
    with step.evaluating():
        for first in range(0, len(batches), mesh.layout.dp):
            mine = first + mesh.index("dp")
            counts = mine < len(batches)
            losses, counted = step.evaluate(to_device(batches[mine] if counts else batches[0]))
            total, tokens = (total + losses, tokens + counted) if counts else (total, tokens)
    total, tokens = mesh.sum([total, tokens])
    return total / tokens if tokens else float("nan")


def _filled(batch: Batch[np.ndarray], rows: int) -> Batch[np.ndarray]:
    """Return a batch of `rows` sequences: where there are fewer, with the last one again, without targets."""
    own = len(batch.inputs)
    whole = batch.map(lambda array: np.pad(array, ((0, rows - own), (0, 0)), mode="edge"))
    whole.targets[own:] = IGNORED
    return whole


def in_other_units(loss: float, bits_per_byte: float | None) -> dict[str, float]:
    """Return perplexity and, if the data have a byte count for their tokens, bits per byte of text."""
    result = {"perplexity": math.exp(min(loss, 700.0))}
    return result if bits_per_byte is None else result | {"bits_per_byte": bits_per_byte}


def finished_ledger(
    observed: Observations, plan: Ledger, step: Step, unigram_loss: float | None, *, train_loss: float,
    validation_loss: float, **facts: Any,
) -> Ledger:  # fmt: skip
    """Return the ledger of all sessions, on rank 0. `facts` describe the run's end and its data."""
    facts |= {
        "machine_slowdown": interference.trimmed_mean(observed.probes),
        "other_load": interference.other_load(observed.probes),
        "virtual": host.is_virtual(), "started": facts["sessions"][0]["started"], "finished": now(),
    }  # fmt: skip
    if step.device.type == "cuda":
        observed.cuda_peak_bytes = torch.cuda.max_memory_allocated()
        observed.cuda_resident_bytes = torch.cuda.max_memory_reserved() + host.context_bytes(step.device)
    ledger = measured_ledger(
        observed,
        planned=plan,
        held=step.held() | observed.copies(),
        batch_bytes=batch_bytes(batch_of(step.config)),
        tokens_per_step=step.config.tokens_per_step,
        facts=plan.facts | facts | step.facts(),
    )
    total = sum(observed.wall_seconds.values())
    measured = {
        "train_loss": (train_loss, "loss of the last step, nats per token"),
        "validation_loss": (validation_loss, "mean over the last validation batches, nats per token"),
        "total_seconds": (total, "wall time of the training command, start-up and every session included"),
    }
    for name, (value, basis) in measured.items():
        if np.isfinite(value):
            ledger.totals[name] = Estimate(value, Origin.MEASURED, basis)
    if unigram_loss is not None:
        basis = "token frequencies of the training text alone"
        ledger.totals["unigram_loss"] = Estimate(unigram_loss, Origin.CALCULATED, basis)
    return ledger
