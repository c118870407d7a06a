"""Training objectives. An objective computes the loss of a micro-batch and counts the items over which it is a mean.

objective = build_objective(config, device)
objective.total(model, batch, samples) / objective.count(batch)
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ironlaw.config import RunConfig
from ironlaw.data.batch import IGNORED, Batch
from ironlaw.errors import UserError
from ironlaw.files import at_home
from ironlaw.model.adapters import adapted_layers
from ironlaw.model.transformer import Transformer
from ironlaw.observe.profile import scope
from ironlaw.observe.spans import MODULE_SCOPE
from ironlaw.schema import refuse
from ironlaw.train.checkpoint import Checkpoint
from ironlaw.train.finetune import base_digest
from ironlaw.train.restore import load_first_weights, load_trained
from ironlaw.workload.sections import FROZEN, ObjectiveConfig


class CrossEntropy:
    """Cross-entropy of the next token, over all targets that are not ignored."""

    per_token = True  # the loss on held-out text is in nats per token
    second: Transformer | None = None  # a frozen model used beside the trained one

    def total(
        self, model: nn.Module, batch: Batch[Tensor], samples: Tensor | None = None, balance: Tensor | None = None
    ) -> Tensor:
        """Return the sum of the losses of all items; `balance` weighs the loss that balances experts."""
        return model(batch.inputs, batch.targets, samples, batch.documents, "sum", balance)

    def count(self, batch: Batch[Tensor]) -> Tensor:
        """Return the number of targets."""
        return (batch.targets != IGNORED).sum()

    def held_out(self, model: nn.Module, batch: Batch[Tensor], autocast: Callable[[], Any]) -> tuple[float, int]:
        """Return the sum of held-out losses in nats and the number of items. The model is in evaluation mode."""
        counted = int((batch.targets != IGNORED).sum())
        if not counted:
            return 0.0, 0
        with autocast():
            return float(model(batch.inputs, batch.targets, documents=batch.documents)) * counted, counted


class Distillation(CrossEntropy):
    """(1 - w) cross-entropy + w T^2 KL(teacher || student) of logits divided by T (arXiv 1503.02531, section 2), plus
    `hidden` (1 - cosine) of the last hidden states. On held-out text, the student's cross-entropy alone is used."""

    def __init__(self, config: ObjectiveConfig, teacher: Transformer) -> None:
        self.config, self.second = config, teacher

    def total(
        self, model: nn.Module, batch: Batch[Tensor], samples: Tensor | None = None, balance: Tensor | None = None
    ) -> Tensor:
        assert self.second is not None
        with torch.no_grad(), scope(MODULE_SCOPE + FROZEN):
            taught_hidden, taught = outputs(self.second, batch)
        hidden, logits = outputs(model, batch, samples)
        learned = (batch.targets != IGNORED).flatten()
        student, teacher = (x.flatten(0, 1)[learned].float() for x in (logits, taught))
        loss = (1 - self.config.weight) * F.cross_entropy(student, batch.targets.flatten()[learned], reduction="sum")
        t = self.config.temperature
        ours, theirs = (F.log_softmax(x / t, dim=-1) for x in (student, teacher))
        loss = loss + self.config.weight * t * t * F.kl_div(ours, theirs, reduction="sum", log_target=True)
        if self.config.hidden:
            ours, theirs = (x.flatten(0, 1)[learned].float() for x in (hidden, taught_hidden))
            loss = loss + self.config.hidden * (1 - F.cosine_similarity(ours, theirs, dim=-1)).sum()
        return loss


class Preference(CrossEntropy):
    """DPO (arXiv 2305.18290, equation 7): -log sigmoid(beta (m - m_reference)), where m is the log-probability of the
    chosen answer minus that of the rejected one. Documents 2 i and 2 i + 1 of a row are the answers of pair i."""

    per_token = False

    def __init__(self, beta: float, reference: Transformer | None) -> None:
        """If `reference` is None, the model without its adapters is the reference."""
        self.beta, self.second = beta, reference

    def total(
        self, model: nn.Module, batch: Batch[Tensor], samples: Tensor | None = None, balance: Tensor | None = None
    ) -> Tensor:
        other = _without_adapters(model) if self.second is None else nullcontext(self.second)
        with torch.no_grad(), scope(MODULE_SCOPE + FROZEN), other as frozen:
            reference = margins(frozen, batch)
        return -F.logsigmoid(self.beta * (margins(model, batch, samples) - reference)).sum()

    def count(self, batch: Batch[Tensor]) -> Tensor:
        """Return the number of pairs."""
        return _pairs(batch).sum()

    def held_out(self, model: nn.Module, batch: Batch[Tensor], autocast: Callable[[], Any]) -> tuple[float, int]:
        with autocast():
            return float(self.total(model, batch)), int(self.count(batch))


def outputs(model: nn.Module, batch: Batch[Tensor], samples: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """Return hidden states (B, S, H) before the output layer, and logits (B, S, V)."""
    kept: list[Tensor] = []
    hook = model.get_submodule("final_norm").register_forward_hook(lambda module, inputs, output: kept.append(output))
    try:
        logits = model(batch.inputs, None, samples, batch.documents)
    finally:
        hook.remove()
    return kept[0], logits


def margins(model: nn.Module, batch: Batch[Tensor], samples: Tensor | None = None) -> Tensor:
    """Return log-probability of the chosen minus that of the rejected answer, (pairs,), in nats."""
    logits = model(batch.inputs, None, samples, batch.documents)
    logs = -F.cross_entropy(logits.flatten(0, 1).float(), batch.targets.flatten(), reduction="none")
    sums = _by_answer(batch, logs.view_as(batch.targets))
    return (sums[..., 0] - sums[..., 1])[_pairs(batch)]


def _by_answer(batch: Batch[Tensor], values: Tensor) -> Tensor:
    """Return sums of `values` (B, S) over the targets of each answer, (B, pairs, 2)."""
    assert batch.documents is not None
    documents = batch.documents.long()
    pairs = int(documents.max()) // 2 + 1
    counted = values * (batch.targets != IGNORED)
    return values.new_zeros(len(values), 2 * pairs).scatter_add(1, documents, counted).view(len(values), pairs, 2)


def _pairs(batch: Batch[Tensor]) -> Tensor:
    """Return a mask (B, pairs) of pairs with both answers, which excludes padding."""
    return (_by_answer(batch, torch.ones_like(batch.targets)) > 0).all(-1)


@contextmanager
def _without_adapters(model: nn.Module) -> Iterator[nn.Module]:
    """Context in which `model` is its base, without adapters and dropout."""
    layers, training = list(adapted_layers(model).values()), model.training
    model.eval()
    for layer in layers:
        layer.adapting = False
    try:
        yield model
    finally:
        for layer in layers:
            layer.adapting = True
        model.train(training)


def _frozen(model: Transformer, device: torch.device) -> Transformer:
    return model.to(device).eval().requires_grad_(False)


def second_model_path(config: RunConfig) -> Path | None:
    """Return the directory of the second model, if there is one: the teacher, or the model that DPO starts from."""
    second = config.objective.teacher
    if config.objective.kind == "dpo" and not config.finetune.adapts:
        second = config.train.start_from
    return None if second is None else at_home(second)


def check_second_model(config: RunConfig, start: Checkpoint) -> None:
    """Raise UserError if the second model is not the one that `start` was trained beside."""
    second, before = second_model_path(config), start.index.get("second_sha256")
    if second is not None and before not in (None, base_digest(str(second))):
        raise UserError(f"{second} has changed since {start.path} was trained beside it: put its old weights back")


def _distillation(config: RunConfig, device: torch.device) -> CrossEntropy:
    path = second_model_path(config)
    assert path is not None
    teacher = load_trained(path, needs_text=False).model
    theirs, ours = teacher.config, config.model
    refuse((
        (theirs.vocab != ours.vocab,
         f"the teacher {path} has a vocabulary of {theirs.vocab:,}, model.vocab = {ours.vocab:,}: a student has its "
         "teacher's tokenizer, so set model.vocab and data.tokenizer to its"),
        (theirs.context < config.sequence,
         f"the teacher reads {theirs.context:,} tokens: use train.sequence of that or less"),
        (config.objective.hidden and theirs.hidden != ours.hidden,
         f"objective.hidden compares states of one width, the teacher's is {theirs.hidden:,}: use model.hidden = "
         f"{theirs.hidden} or objective.hidden = 0"),
    ))  # fmt: skip
    return Distillation(config.objective, _frozen(teacher, device))


def _preference(config: RunConfig, device: torch.device) -> CrossEntropy:
    second = second_model_path(config)
    if second is None:
        return Preference(config.objective.beta, None)
    reference = Transformer(config.model)
    load_first_weights(str(second), reference, config.model)
    return Preference(config.objective.beta, _frozen(reference, device))


OBJECTIVES: dict[str, Callable[[RunConfig, torch.device], CrossEntropy]] = {
    "cross_entropy": lambda config, device: CrossEntropy(),
    "distillation": _distillation,
    "dpo": _preference,
}


def build_objective(config: RunConfig, device: torch.device) -> CrossEntropy:
    """Return the configured objective. Raises UserError if a second model is missing or does not match."""
    with torch.random.fork_rng(devices=[]):  # a second model is initialized at random before it is read
        return OBJECTIVES[config.objective.kind](config, device)
