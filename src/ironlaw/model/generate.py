"""Sampling from a model, one token at a time. Short prompts and small models; the inference room will do better."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence

import torch

from ironlaw.model.transformer import Transformer


@torch.no_grad()
def continue_tokens(
    model: Transformer,
    prompt: Sequence[int],
    count: int,
    *,
    temperature: float = 1.0,
    top_k: int = 0,
    seed: int = 0,
    stop: Collection[int] = (),
) -> Iterator[int]:
    """Up to `count` token ids after `prompt`, until one of `stop`; the model sees the last `context` tokens.

    The whole window is computed again for every token: no cache to go wrong, and fast enough for a sample.
    """
    generator = torch.Generator().manual_seed(seed)
    window = list(prompt)
    for _ in range(count):
        tokens = torch.tensor([window[-model.config.context :]])
        logits = model(tokens)[0, -1].float()
        if temperature == 0:
            choice = int(logits.argmax())
        else:
            if top_k:
                cut = logits.topk(min(top_k, logits.numel())).values[-1]
                logits = logits.masked_fill(logits < cut, float("-inf"))
            choice = int(torch.multinomial((logits / temperature).softmax(-1), 1, generator=generator))
        if choice in stop:
            return
        window.append(choice)
        yield choice
