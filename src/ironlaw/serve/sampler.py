"""Samples tokens from logits, for all requests of a step at once.

A token is sampled by inversion of the distribution at one uniform number, which depends on the request's seed and the
token's position only. An answer is thus independent of the other requests in the batch, preemption and speculation.

Shapes: R rows, V vocabulary.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from ironlaw.data.order import finalised
from ironlaw.serve.request import Request, SampledToken, SamplingParams

_CANDIDATES = 256  # most likely tokens, which usually include all that top-p and min-p keep


@dataclass
class Row:
    """The logits after one token of a request. The token sampled from them gets position `place`."""

    request: Request
    place: int

    @property
    def known(self) -> int | None:
        """The token at this position, if it is one of a prompt that is scored: nothing is sampled."""
        scored = self.request.sampling.scores_prompt and self.place < self.request.prompt_length
        return self.request.tokens[self.place] if scored else None


def uniform(seed: int, place: int) -> float:
    """Return a number in [0, 1) that seed and place decide."""
    return (finalised((seed * 0x9E3779B97F4A7C15 + (place + 1) * 0xD1B54A32D192ED03) % 2**64) >> 11) * 2.0**-53


@torch.inference_mode()
def sample(logits: Tensor, rows: Sequence[Row], masks: Tensor | None = None) -> list[SampledToken]:
    """Sample one token for each row of `logits` (R, V). `masks` (R, V) are true for allowed tokens."""
    asked = [row.request.sampling for row in rows]
    wants_logprobs = any(s.logprobs is not None for s in asked)
    changed = any(s.changes_logits for s in asked)
    lengths = [row.place - row.request.prompt_length for row in rows]
    early = [number for number, s in enumerate(asked) if 0 <= lengths[number] < s.min_tokens]  # too short to end
    if not changed and not early and masks is None and not wants_logprobs and all(s.is_greedy for s in asked):
        return [SampledToken(token) for token in most_likely(logits).tolist()]
    original = logits.float()
    logits = original.clone() if changed or early else original
    for number, row in enumerate(rows):
        if row.request.sampling.changes_logits:
            _apply_penalties(logits[number], row)
    if masks is not None:
        logits = logits.masked_fill(~masks, -math.inf)
    for number in early:
        _exclude_ends(logits[number], rows[number].request.ends)
    tokens = most_likely(logits)
    drawn = [number for number, s in enumerate(asked) if not s.is_greedy]
    if drawn:
        some = torch.tensor(drawn, device=logits.device)
        tokens[some] = _draw(logits[some], [rows[number] for number in drawn])
    known = (row.known for row in rows)
    chosen = [SampledToken(t if k is None else k) for t, k in zip(tokens.tolist(), known, strict=True)]
    if wants_logprobs:
        _add_logprobs(original, chosen, [s.logprobs for s in asked])
    return chosen


def most_likely(logits: Tensor) -> Tensor:
    """Return the most likely tokens (R,). On a CPU NumPy takes a tenth to a twenty-fifth of PyTorch's time."""
    if logits.device.type != "cpu":
        return logits.argmax(-1)
    return torch.from_numpy(logits.float().numpy().argmax(-1))


def _apply_penalties(logits: Tensor, row: Row) -> None:
    """Apply the penalties and biases of one request to `logits` (V,) in place."""
    request, sampling = row.request, row.request.sampling
    device = logits.device
    if sampling.repetition_penalty != 1.0:
        seen = torch.tensor(request.tokens, device=device).unique()
        found = logits[seen]
        logits[seen] = torch.where(found > 0, found / sampling.repetition_penalty, found * sampling.repetition_penalty)
    answer = request.answer
    if answer and (sampling.presence_penalty or sampling.frequency_penalty):
        seen, counts = torch.tensor(answer, device=device).unique(return_counts=True)
        logits[seen] -= sampling.presence_penalty + sampling.frequency_penalty * counts.to(logits.dtype)
    if sampling.logit_bias:
        tokens, biases = zip(*sampling.logit_bias, strict=True)
        logits[list(tokens)] += torch.tensor(biases, device=device)


def _exclude_ends(logits: Tensor, ends: Iterable[int]) -> None:
    """Exclude the tokens that end an answer from `logits` (V,), in place, unless its form leaves no others."""
    without = logits.clone()
    without[list(ends)] = -math.inf
    if not without.isneginf().all():
        logits.copy_(without)


def _draw(logits: Tensor, rows: Sequence[Row]) -> Tensor:
    """Sample tokens (R,) from `logits` (R, V) with temperature, top-k, top-p and min-p. In which order a row's tokens
    are summed depends on its own parameters alone: another order has another token at the same number."""
    asked = [row.request.sampling for row in rows]
    vocab = logits.shape[1]
    probabilities = torch.softmax(logits / _column([max(s.temperature, 1e-5) for s in asked], logits).float(), -1)
    numbers = _column([uniform(row.request.seed, row.place) for row in rows], logits)
    tokens = torch.empty(len(rows), dtype=torch.int64, device=logits.device)
    left = [number for number, s in enumerate(asked) if s.restricts_tokens]
    whole = [number for number, s in enumerate(asked) if not s.restricts_tokens]
    if whole:
        tokens[whole] = _invert(_select(probabilities, whole), numbers[whole])
    for width in (min(vocab, _CANDIDATES), vocab):
        if left:
            drawn, enough = _draw_from_top(
                _select(probabilities, left), numbers[left], [asked[number] for number in left], width
            )
            tokens[left] = drawn  # those without enough candidates are drawn again
            left = [number for number, is_enough in zip(left, enough, strict=True) if not is_enough]
    return tokens


def _select(rows: Tensor, numbers: Sequence[int]) -> Tensor:
    """Return the rows of these numbers, without a copy where they are all."""
    return rows if len(numbers) == len(rows) else rows[numbers]


def _column(values: Sequence[float], like: Tensor) -> Tensor:
    return torch.tensor(values, device=like.device, dtype=torch.float64)[:, None]


def _draw_from_top(
    probabilities: Tensor, numbers: Tensor, asked: Sequence[SamplingParams], width: int
) -> tuple[Tensor, list[bool]]:
    """Sample tokens (R,) from the `width` most likely ones. Also return whether these include all that a row keeps."""
    largest, tokens = probabilities.topk(width)  # (R, width), in order
    sums = largest.cumsum(-1)
    top_k = torch.tensor([s.top_k or probabilities.shape[1] for s in asked], device=sums.device)[:, None]
    kept = torch.arange(width, device=sums.device) < top_k
    # top-p is a share of what top-k leaves, as in all engines.
    total = torch.where(top_k < probabilities.shape[1], sums.gather(1, top_k.clamp(max=width) - 1), 1.0)
    kept &= sums - largest < _column([s.top_p for s in asked], sums) * total
    kept &= largest >= _column([s.min_p for s in asked], sums) * largest[:, :1]
    kept[:, 0] = True
    enough = [
        (not last and not s.top_k) or 0 < s.top_k <= width for s, last in zip(asked, kept[:, -1].tolist(), strict=True)
    ]
    return tokens.gather(1, _invert(largest * kept, numbers)[:, None])[:, 0], enough


def _invert(weights: Tensor, numbers: Tensor) -> Tensor:
    """Return (R,): the first column whose running sum of `weights` (R, n) exceeds `numbers` (R, 1) of the total."""
    sums = weights.double().cumsum(-1)
    found = torch.searchsorted(sums, numbers * sums[:, -1:], right=True)[:, 0]
    return found.clamp(max=weights.shape[1] - 1)


def _add_logprobs(logits: Tensor, chosen: list[SampledToken], wanted: Sequence[int | None]) -> None:
    """Add log-probabilities of the model itself, before temperature and penalties."""
    logs = torch.log_softmax(logits, -1)
    most = max(count or 0 for count in wanted)
    values, tokens = (t.tolist() for t in logs.topk(most)) if most else ([[]] * len(chosen),) * 2
    own = logs.gather(1, torch.tensor([c.token for c in chosen], device=logs.device)[:, None])[:, 0].tolist()
    for number, count in enumerate(wanted):
        if count is not None:
            chosen[number].logprob = own[number]
            pairs = zip(tokens[number][:count], values[number][:count], strict=True)
            chosen[number].top = tuple(pairs)
