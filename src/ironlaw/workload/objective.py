"""What a run minimises, and what that needs beside the model. No torch."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from ironlaw.schema import Section

FROZEN = "frozen model"  # the operation that a teacher's or a reference's forward pass is, in both ledgers


class ObjectiveConfig(Section):
    """The loss. One process computes those that need a second model."""

    # cross_entropy of the next token; distillation from a larger model (arXiv 1503.02531); dpo: of pairs of answers,
    # against the model as it was (arXiv 2305.18290), which with adapters is the base without them.
    kind: Literal["cross_entropy", "distillation", "dpo"] = "cross_entropy"
    teacher: str | None = None  # of distillation: a run or a Hugging Face directory with the same tokenizer
    temperature: float = Field(2.0, gt=0)  # divides both models' logits
    weight: float = Field(0.5, ge=0, le=1)  # of what the teacher says; the rest is the text's
    hidden: float = Field(0.0, ge=0)  # weight of 1 - cosine of the last hidden states (arXiv 1910.01108)
    beta: float = Field(0.1, gt=0)  # of dpo: how much leaving the reference costs

    @property
    def needs_logits(self) -> bool:
        """Whether the logits of a micro-batch exist at once."""
        return self.kind != "cross_entropy"
