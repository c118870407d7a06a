"""A request to the engine, and its sampling parameters."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

MAX_SCORED_TOKENS = 256  # tokens of a prompt whose logits exist at a time

FinishReason = Literal["stop", "length", "cancelled", "error"]


@dataclass(frozen=True)
class SamplingParams:
    """Sampling parameters, in this order: penalties and biases, constraint, temperature, top-k, top-p, min-p."""

    max_tokens: int = 256  # 0: the prompt is read, and nothing follows
    temperature: float = 1.0  # 0: the most likely token
    top_k: int = 0  # 0: all
    top_p: float = 1.0
    min_p: float = 0.0  # least probability, as a fraction of the most likely token's
    presence_penalty: float = 0.0  # subtracted from the logits of tokens in the answer (OpenAI's definition)
    frequency_penalty: float = 0.0  # subtracted for every occurrence of the token in the answer
    repetition_penalty: float = 1.0  # divides logits of tokens in prompt and answer (arXiv 1909.05858)
    seed: int | None = None
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()  # in addition to the end of text
    ignore_eos: bool = False  # the end of text is a token like any other
    min_tokens: int = 0  # of the answer, before which nothing ends it but its form
    logprobs: int | None = None  # number of most likely tokens to report with each token; 0: only the token itself
    scores_prompt: bool = False  # report these of the prompt's tokens, too
    logit_bias: tuple[tuple[int, float], ...] = ()
    include_stop: bool = False  # the stop string is part of the answer

    @property
    def is_greedy(self) -> bool:
        return self.temperature == 0

    @property
    def restricts_tokens(self) -> bool:
        """Whether only some of the tokens can be drawn."""
        return bool(self.top_k or self.top_p < 1 or self.min_p)

    @property
    def changes_logits(self) -> bool:
        """Whether penalties or biases change a row of logits before sampling, which is then processed separately."""
        return bool(
            self.presence_penalty or self.frequency_penalty or self.repetition_penalty != 1.0 or self.logit_bias
        )


@dataclass
class SampledToken:
    """A token and, if requested, log-probabilities. `text` is what it adds to the answer, once it is decoded."""

    token: int
    text: str | None = None
    logprob: float | None = None
    top: tuple[tuple[int, float], ...] = ()


@dataclass
class OutputPiece:
    """The output of one request in one step."""

    index: int
    text: str
    chosen: list[SampledToken]
    finish: FinishReason | None


@dataclass(eq=False)  # compared by identity, when queues are searched
class Request:
    """`tokens` grows from the prompt to prompt and answer; keys and values of the first `computed` are in pages."""

    prompt: Sequence[int]
    sampling: SamplingParams
    # Called with new tokens; the last call has `finish` set.
    on_output: Callable[[Request, list[SampledToken]], None] = lambda request, chosen: None
    # Decodes a new token. Returns whether its text ends the answer, which the second argument allows.
    decode: Callable[[SampledToken, bool], bool] | None = None
    priority: int = 0  # lower goes first, with policy "priority"
    number: int = 0  # in order of arrival
    seed: int = 0
    ends: frozenset[int] = frozenset()  # tokens that end the answer
    arrived: float = field(default_factory=time.monotonic)

    tokens: list[int] = field(default_factory=list)
    computed: int = 0
    blocks: list[list[int]] = field(default_factory=list)  # pages by group of layers
    remembered: int = 0  # pages in each group that other requests can find
    digests: list[bytes] = field(default_factory=list)  # of the first full pages
    is_long: bool = False  # beyond the original context, from which on the model uses another rotary table
    drafted_for: int = 0  # tokens whose keys and values the draft model has
    drafted: list[int] = field(default_factory=list)  # proposed for this step
    finish: FinishReason | None = None
    failure: str | None = None  # the reason for `finish` "error"
    is_at_fault: bool = False  # the same request would fail again
    shared_tokens: int = 0  # of the prompt, found in shared pages when the request was first admitted
    preemptions: int = 0
    scored: list[SampledToken] = field(default_factory=list)  # the prompt's first tokens, if they are wanted
    state: Any = None  # of the answer's constraint: `constrain.State`
    admitted: float | None = None  # time of the first scheduling
    first_token: float | None = None
    last_token: float | None = None

    def __post_init__(self) -> None:
        self.tokens = list(self.prompt)

    @property
    def prompt_length(self) -> int:
        return len(self.prompt)

    @property
    def answer(self) -> list[int]:
        return self.tokens[len(self.prompt) :]

    @property
    def salt(self) -> bytes:
        if self.sampling.scores_prompt:  # pages of others hold no logits
            return b"%d" % self.number
        return b"long" if self.is_long else b""

    @property
    def is_scoring(self) -> bool:
        """Whether log-probabilities of the prompt's tokens are still wanted."""
        return self.sampling.scores_prompt and len(self.scored) < self.prompt_length

    def left(self, computed: int) -> int:
        """Return the tokens of the next step: all that follow those `computed`; of a prompt that is scored a part, for
        its logits are in memory at once."""
        left = len(self.tokens) - computed
        return min(left, MAX_SCORED_TOKENS) if self.is_scoring else left

    def score(self, found: list[SampledToken], place: int) -> list[SampledToken]:
        """Keep the prompt's tokens among `found`, of which the first is at `place`, and return those of the answer."""
        if not self.scored:
            self.scored = [SampledToken(self.prompt[0])]  # nothing comes before it
        inside = max(0, self.prompt_length - place)
        self.scored += found[len(self.scored) - place : inside]  # after a preemption some come again
        return found[inside:]

    @property
    def is_decoding(self) -> bool:
        """Whether all but the newest token are in pages."""
        return self.computed == len(self.tokens) - 1 and len(self.tokens) > len(self.prompt)
