"""Comparison of a model with `transformers` on an exported directory: the logits of both on the same tokens in fp32."""

from __future__ import annotations

import importlib.util
import logging
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
import torch

from ironlaw.model.huggingface.configs import names_of
from ironlaw.model.huggingface.tensors import entries
from ironlaw.model.transformer import Transformer

# Relative to the largest logit. Two fp32 implementations agree to about 1e-6; bf16 rounds products to 2^-9 of it.
TOLERANCE = {torch.float32: 2e-4, torch.bfloat16: 0.02}
MIN_TOKENS, MAX_TOKENS = 256, 2048
_IN = {torch.float32: "", torch.bfloat16: " in bf16"}


@dataclass(frozen=True)
class Verified:
    """The largest difference and logit over `tokens` positions, or the `reason` why nothing could be compared."""

    version: str | None = None
    largest_difference: float | None = None
    largest_logit: float | None = None
    tokens: int = 0
    reason: str | None = None
    computes: torch.dtype = torch.float32  # dtype of the computation in `transformers`
    rounding: float = 0.0  # largest difference that products in that dtype make in our own model
    problem: str | None = None  # error of `transformers` in reading the directory

    @property
    def differs(self) -> bool:
        if self.largest_difference is None or self.largest_logit is None:
            return self.problem is not None
        # Some models amplify rounding: two computations of 16 bits may differ by twice what one differs from fp32.
        allowed = max(TOLERANCE[self.computes] * self.largest_logit, 2 * self.rounding)
        return not self.largest_difference <= allowed  # NaN differs too

    def to_json(self) -> dict[str, Any]:
        if self.largest_difference is None:
            return {"verified": False, "reason": self.reason or self.problem}
        return {
            "verified": not self.differs, "with": self.version, "tokens": self.tokens,
            "largest_difference": self.largest_difference, "largest_logit": self.largest_logit,
        }  # fmt: skip

    def __str__(self) -> str:
        if self.largest_difference is None:
            return f"not verified: {self.reason or self.problem}"
        return (
            f"{self.version} computes the same{_IN[self.computes]}: logits of {self.tokens} tokens differ by at most "
            f"{self.largest_difference:.1e} of {self.largest_logit:.1f}"
        )


def verify(
    folder: Path, model: Transformer, dtype: torch.dtype = torch.float32, library: str | None = None,
    computes: torch.dtype = torch.float32,
) -> Verified:  # fmt: skip
    """Compare `model`, with its weights rounded in place to the `dtype` of `folder`, with `transformers` on `folder`.

    library: the package that `transformers` needs for a compressed model; computes: the dtype of its products.
    """
    if library is not None and importlib.util.find_spec(library) is None:
        return Verified(reason=f"transformers reads it with {library}, which is not installed")
    if importlib.util.find_spec("transformers") is None:
        return Verified(reason="transformers is not installed (pip install 'ironlaw[hf]')")
    needed, free = 4 * model.config.parameters, psutil.virtual_memory().available
    if needed > 0.8 * free:
        return Verified(reason=f"a second copy takes {needed / 2**30:.0f} GiB of memory, {free / 2**30:.0f} are free")
    import transformers

    version, config = f"transformers {transformers.__version__}", model.config
    length = min(config.context, max(MIN_TOKENS, min(MAX_TOKENS, (config.sliding_window or 0) + MIN_TOKENS)))
    tokens = torch.randint(0, config.vocab, (1, length), generator=torch.Generator().manual_seed(0))
    # bitsandbytes casts by itself, and cannot add 16-bit biases on a CPU.
    loaded = torch.float32 if library == "bitsandbytes" else computes
    before = logging.root.manager.disable
    logging.disable(logging.WARNING)  # of libraries, such as those about kernels that cannot be loaded
    transformers.utils.logging.disable_progress_bar()
    try:
        theirs = transformers.AutoModelForCausalLM.from_pretrained(
            folder, dtype=loaded, attn_implementation="eager", local_files_only=True
        ).eval()
        with torch.no_grad():
            other = theirs(tokens).logits.float()
    except Exception as error:  # any mismatch
        if "does not recognize" in str(error):
            return Verified(reason=f"{version} does not know the architecture")
        return Verified(version, problem=f"{version} cannot read it: {' '.join(str(error).split())[:200]}")
    finally:
        transformers.utils.logging.enable_progress_bar()
        logging.disable(before)
    state = model.state_dict()
    with torch.no_grad():
        for entry in entries(config, names_of(folder, config)):
            state[entry.ours].copy_(entry.rounded(state[entry.ours], dtype))
        ours = model(tokens)
        rounding = 0.0
        if computes != torch.float32:
            with torch.autocast("cpu", computes):
                rounding = float((model(tokens).float() - ours).abs().max())
    difference, largest = float((ours - other).abs().max()), float(ours.abs().max())
    return Verified(version, difference, largest, length, computes=computes, rounding=rounding)
